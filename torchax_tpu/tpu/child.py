"""Compile one lowered program for a TPU topology: run as a process of its own, `python child.py REQUEST ANSWER`.

libtpu's internal checks end the process that called it, so the caller's process never loads it. The request is a JSON
file naming the topology, the StableHLO bytecode file and compiler options; the answer is a JSON file. This file imports
jax only (not its own package), so a child starts in half a second.
"""

import json
import os
import sys

if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # the script's folder: its module names are no business of jax's imports

# The child only compiles: no accelerator is opened, no metadata server asked, and other processes may hold libtpu.
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # asked for by libtpu's start; the topology decides
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")


def compile_for(request):
    """The answer to one request: {"text", "memory", "kind", "devices"}, or {"stage", "error"} where the stage is
    "topology", "devices" or "compile"."""
    import numpy as np
    from jax.experimental import topologies

    # JAX has no public call that compiles a module already lowered; these three are what its own `compile()` uses.
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=request["topology"]).devices
    except Exception as error:  # noqa: BLE001 - whatever libtpu raises is the caller's to word
        return {"stage": "topology", "error": str(error)}

    with mlir.make_ir_context():
        with open(request["module"], "rb") as file:
            module = ir.Module.parse(file.read())
        partitions = int(module.operation.attributes["mhlo.num_partitions"])
        if partitions > len(devices):
            error = f"the program is sharded over {partitions} devices; {request['topology']} has {len(devices)}"
            return {"stage": "devices", "error": error}
        used = devices[:partitions]
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=partitions,
            device_assignment=np.array([[device.id for device in used]]),
            env_options_overrides=request["options"] or None,
        )
        # As jax.jit does: arguments without a sharding are replicated, results without one take what suits.
        build = options.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = [False]
        build.allow_spmd_sharding_propagation_to_output = request["free_outputs"]
        try:
            executable = used[0].client.compile(
                module, executable_devices=xla_client.DeviceList(tuple(used)), compile_options=options
            )
        except Exception as error:  # noqa: BLE001
            return {"stage": "compile", "error": str(error), "kind": used[0].device_kind, "devices": len(devices)}
    stats = executable.get_compiled_memory_stats()
    return {
        "text": executable.hlo_modules()[0].to_string(),
        "memory": {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
        },
        "kind": used[0].device_kind,
        "devices": len(devices),
    }


def _end_with_parent():
    """A compilation may take minutes: don't outlive whoever asked (Linux, where libtpu exists)."""
    import ctypes
    import signal

    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    except (AttributeError, OSError):
        pass


if __name__ == "__main__":
    _end_with_parent()
    with open(sys.argv[1]) as request_file:
        answer = compile_for(json.load(request_file))
    with open(sys.argv[2], "w") as answer_file:
        json.dump(answer, answer_file)
        answer_file.flush()
    os._exit(0)  # libtpu's own teardown may abort, and nothing is left to do
