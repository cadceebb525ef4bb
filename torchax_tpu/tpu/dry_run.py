"""`dry_run`: compile a program for a TPU on a machine that has none, and report what it needs and costs.

The program is traced and lowered here, then compiled by libtpu in a child process (`child.py`). Nothing runs on a
device, no weights are needed, and the figures repeat to the digit."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import TorchaxTpuError
from . import costs, hlo

GIB = 1024**3


class TpuCompilerMissingError(TorchaxTpuError):
    """libtpu, which holds the TPU compiler, isn't installed."""


class TopologyError(TorchaxTpuError, ValueError):
    """The topology isn't one that can be compiled for, or is too small for the program's sharding."""


class TpuCompileError(TorchaxTpuError):
    """The TPU compiler refuses the program, or ended with it."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one device of a TPU generation.

    `bandwidth` (of HBM, bytes/s) is published. `clock` (Hz) is the published bf16 peak over the flops of the matrix units
    per cycle, e.g. v5e 197e12 / (2 * 4 * 128 * 128); None where their number isn't public. `hbm` (bytes) is what libtpu
    0.0.52 lets a program use, read from its out-of-memory message."""

    name: str
    hbm: int
    clock: float | None
    bandwidth: float | None


# v4 and tpu7x show two devices per chip: half the chip's bandwidth each.
CHIPS = {
    "v4": Chip("TPU v4", int(15.25 * GIB), 1.05e9, 1228e9 / 2),
    "v5e": Chip("TPU v5e", int(15.75 * GIB), 1.503e9, 819e9),
    "v5p": Chip("TPU v5p", int(95.73 * GIB), 1.75e9, 2765e9),
    "v6e": Chip("TPU v6e", int(31.24 * GIB), 1.751e9, 1640e9),
    "tpu7x": Chip("TPU7x", int(94.74 * GIB), None, 7380e9 / 2),
}

# Chips with a SparseCore send row gathers and scatters there; printing a program with such a call ends libtpu.
_NO_SPARSECORE = {
    "xla_tpu_offload_gather_to_sparsecore": "false",
    "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
}
_OPTIONS = {"v5p": _NO_SPARSECORE, "v6e": _NO_SPARSECORE, "tpu7x": _NO_SPARSECORE}

_FORMS = (
    "a generation, a colon and the chips along each side: v5e:1x1 (one chip), v5e:2x2, v5e:4x4, v6e:1x1, v6e:2x4, "
    "v5p:1x1x1, v5p:2x2x1, v4:2x2x1, tpu7x:2x2x1; sides above one host (2x2, or 2x2x1) must be multiples of it. "
    f"Generations: {', '.join(CHIPS)}"
)


def _chip_of(topology: str) -> tuple[Chip, int]:
    """The chip and the number of chips of a topology. Raises TopologyError."""
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+){0,2})", topology) if isinstance(topology, str) else None
    if match is None or match[1] not in CHIPS:
        raise TopologyError(f"no TPU topology {topology!r}. Valid: {_FORMS}")
    chips = 1
    for side in match[2].split("x"):
        chips *= int(side)
    if not chips:
        raise TopologyError(f"no chips in TPU topology {topology!r}. Valid: {_FORMS}")
    return CHIPS[match[1]], chips


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM per device, in bytes. `total` is arguments + outputs - aliased + temporaries; `aliased` are the outputs that
    take the place of donated arguments. Parts are None where the program was too large to compile."""

    arguments: int | None
    outputs: int | None
    aliased: int | None
    temporaries: int | None
    total: int
    capacity: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """How often one kind of collective runs per call, and the bytes per device of its larger side, operand or result."""

    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What a program needs and costs on one device of a TPU topology, as its compiler sees it.

    All figures are per device and per call; `torchax_tpu/tpu/costs.py` says how each is counted and how far to trust it.

    topology, kind, chips: as asked, the chip's name and the topology's number of chips (v4 and tpu7x show two devices
        per chip). devices_used: those the program is sharded over; 1 if it isn't.
    memory: bytes (see `Memory`). fits: whether they are within the device's memory. If they aren't, costs are None.
    flops: two per multiply-add of matmuls and convolutions. matmul_cycles: the compiler's estimate for the kernels that
        hold one. hbm_bytes: moved from and to HBM. kernels: launched. collectives: by kind.
    custom_calls: kernels that carry no estimate (Pallas, XLA's own), by name. unknown_loops: loops whose trip count
        can't be read; their bodies count once.
    clock (Hz), bandwidth (bytes/s): of the device, for `floor_seconds`. message: why it doesn't fit.
    """

    topology: str
    kind: str
    chips: int
    devices_used: int
    memory: Memory
    fits: bool
    flops: int | None
    matmul_cycles: int | None
    hbm_bytes: int | None
    kernels: int | None
    collectives: Mapping[str, Collective]
    custom_calls: Mapping[str, int]
    unknown_loops: int
    clock: float | None
    bandwidth: float | None
    message: str = ""
    _text: str = dataclasses.field(default="", repr=False)
    _kernels: tuple[costs.Kernel, ...] = dataclasses.field(default=(), repr=False)

    def as_text(self) -> str:
        """The compiled program as XLA prints it. Raises TpuCompileError if it was too large to compile."""
        if not self._text:
            raise TpuCompileError(f"no compiled program: {self.message}")
        return self._text

    @property
    def floor_seconds(self) -> float | None:
        """No call is faster: the larger of matmul_cycles / clock and hbm_bytes / bandwidth. None where unknown."""
        if self.matmul_cycles is None or self.clock is None or self.bandwidth is None:
            return None
        return max(self.matmul_cycles / self.clock, self.hbm_bytes / self.bandwidth)

    def largest(self, count: int = 10) -> list[costs.Kernel]:
        """The kernels that cost most, by their floor in time (a kernel's own figures, times how often it runs)."""
        clock, bandwidth = self.clock or 1e9, self.bandwidth or 1e12

        def cost(kernel):
            return kernel.times * max(kernel.matmul_cycles / clock, kernel.hbm_bytes / bandwidth)

        return sorted(self._kernels, key=cost, reverse=True)[:count]

    def __str__(self) -> str:
        used = "one device" if self.devices_used == 1 else f"{self.devices_used} devices"
        lines = [f"{self.topology}: {self.chips} x {self.kind}; the program uses {used}. Per device:"]

        def row(name, value, note=""):
            lines.append(f"  {name:<16}{value:>16}  {note}".rstrip())

        memory = self.memory
        for name in ("arguments", "outputs", "aliased", "temporaries"):
            if (value := getattr(memory, name)) is not None:
                row(name, _mb(value), "outputs in place of donated arguments" if name == "aliased" else "")
        verdict = "fits" if self.fits else "DOES NOT FIT"
        row("total", _mb(memory.total), f"{verdict}: the chip has {_mb(memory.capacity)}")
        if self.flops is None:
            lines += textwrap.wrap(self.message, 100, initial_indent="  ", subsequent_indent="  ")
            return "\n".join(lines)
        row("matmul flops", f"{self.flops / 1e9:,.3f} G")
        cycles, seconds = f"{self.matmul_cycles:,}", self.clock and self.matmul_cycles / self.clock
        row("matmul cycles", cycles, f"{seconds * 1e6:,.1f} us at {self.clock / 1e9:g} GHz" if self.clock else "")
        seconds = self.bandwidth and self.hbm_bytes / self.bandwidth
        note = f"{seconds * 1e6:,.1f} us at {self.bandwidth / 1e9:g} GB/s" if self.bandwidth else ""
        row("HBM traffic", _mb(self.hbm_bytes), note)
        row("kernels", f"{self.kernels:,}")
        for kind, collective in self.collectives.items():
            row(kind, f"{collective.count:,}", _mb(collective.bytes))
        if self.floor_seconds is not None:
            row("floor", f"{self.floor_seconds * 1e6:,.1f} us", "the larger of the two times; a real call takes longer")
        if self.custom_calls:
            listed = ", ".join(f"{name} x{times}" for name, times in self.custom_calls.items())
            lines.append(f"  without an estimate of cycles: {listed}")
        if self.unknown_loops:
            lines.append(f"  {self.unknown_loops} loop(s) of unknown length: counted as one trip")
        return "\n".join(lines)


def _mb(value: int) -> str:
    return f"{value / 1e6:,.3f} MB"


def dry_run(
    fn: Callable,
    *args: Any,
    topology: str = "v5e:2x2",
    compiler_options: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> DryRun:
    """Compile `fn(*args, **kwargs)` for a TPU topology, without a TPU and without running it.

    fn: what `torchax_tpu.jit` returned, a torch function or module (wrapped in it), or a JAX function, jitted or not.
        Its state (parameters, buffers, optimizer state) is lifted to arguments, as when it runs.
    args, kwargs: what it would be called with; for a JAX function `jax.ShapeDtypeStruct` will do. Shardings over any
        mesh (`jax.sharding.AbstractMesh` too) are kept; the program then takes as many devices of the topology.
    topology: generation and chips, e.g. "v5e:1x1", "v5e:2x2", "v6e:4x4", "v5p:2x2x1".
    compiler_options: passed on to the TPU compiler. timeout: seconds the compiler may take.

    A program too large for the chip's memory gives a report with `fits` False, not an error.

    Raises TpuCompilerMissingError (no libtpu), TopologyError (no such topology, or fewer devices than the program is
    sharded over) and TpuCompileError (refused by the compiler, or timeout).
    """
    chip, chips = _chip_of(topology)
    if importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"):
        raise TpuCompilerMissingError(
            "dry_run needs libtpu, which holds Google's TPU compiler (no TPU is needed): pip install torchax_tpu[tpu]"
        )
    lowered = _lower(fn, args, kwargs)
    options = {**_OPTIONS.get(topology.split(":")[0], {}), **(compiler_options or {})}
    answer, partitions = _compile(lowered, topology, options, timeout)
    common = {
        "topology": topology,
        "kind": chip.name,
        "chips": chips,
        "devices_used": partitions,
        "clock": chip.clock,
        "bandwidth": chip.bandwidth,
    }
    if "error" in answer:
        return _too_large(answer["error"], chip, common)
    stats = answer["memory"]
    total = stats["arguments"] + stats["outputs"] - stats["aliased"] + stats["temporaries"]
    walk = costs.kernels_of(hlo.parse(answer["text"]))
    collectives: dict[str, Collective] = {}
    custom_calls: dict[str, int] = {}
    for kernel in walk.kernels:
        for kind, size in kernel.collectives:
            before = collectives.get(kind, Collective(0, 0))
            collectives[kind] = Collective(before.count + kernel.times, before.bytes + size * kernel.times)
        if kernel.custom_call:
            custom_calls[kernel.custom_call] = custom_calls.get(kernel.custom_call, 0) + kernel.times
    return DryRun(
        **common,
        memory=Memory(**stats, total=total, capacity=chip.hbm),
        fits=total <= chip.hbm,
        flops=walk.total("flops"),
        matmul_cycles=walk.total("matmul_cycles"),
        hbm_bytes=walk.total("hbm_bytes"),
        kernels=sum(k.times for k in walk.kernels if k.counted),
        collectives=collectives,
        custom_calls=custom_calls,
        unknown_loops=walk.unknown_loops,
        _text=answer["text"],
        _kernels=tuple(walk.kernels),
    )


_OUT_OF_MEMORY = (
    re.compile(r"memory required[^()]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"memory space hbm\. Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)


_STACK = re.compile(r"\s*@\s+0x|.*https?://symbolize|.* RAW: ")  # a C++ stack and the talk of its crash handler


def _too_large(error: str, chip: Chip, common: dict[str, Any]) -> DryRun:
    """The report for a program that doesn't fit in HBM. Any other refusal is raised as TpuCompileError."""
    match = next((m for pattern in _OUT_OF_MEMORY if (m := pattern.search(error))), None)
    if match is None:
        said = re.split(r":?\s+@\s+0x", error)[0]  # without the C++ stack
        raise TpuCompileError(f"the TPU compiler refuses this program for {common['topology']}: {said}")
    scale = {"": 1, "K": 1024, "M": 1024**2, "G": GIB, "T": 1024 * GIB}
    needed, available = (int(float(match[i]) * scale[match[i + 1]]) for i in (1, 3))
    message = (
        f"Too large for {chip.name}: needs {_mb(needed)} per device for arguments, outputs and temporaries, and "
        f"{_mb(available)} are available. Shard it over more chips, rematerialise, or use a smaller batch."
    )
    return DryRun(
        **common,
        memory=Memory(None, None, None, None, total=needed, capacity=available),
        fits=False,
        flops=None,
        matmul_cycles=None,
        hbm_bytes=None,
        kernels=None,
        collectives={},
        custom_calls={},
        unknown_loops=0,
        message=message,
    )


def _compile(lowered: Any, topology: str, options: dict[str, str], timeout: float | None) -> tuple[dict, int]:
    """The child's answer for a lowered program, and the devices it takes. Errors of memory are in the answer."""
    module = lowered.compiler_ir("stablehlo")
    partitions = int(module.operation.attributes["mhlo.num_partitions"])
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    with tempfile.TemporaryDirectory(prefix="torchax_tpu_") as folder:
        paths = {name: os.path.join(folder, name) for name in ("module", "request", "answer")}
        with open(paths["module"], "wb") as file:
            file.write(bytecode.getvalue())
        request = {
            "topology": topology,
            "module": paths["module"],
            "options": options,
            "free_outputs": _free_outputs(module),
        }
        with open(paths["request"], "w") as file:
            json.dump(request, file)
        child = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
        environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
        try:
            done = subprocess.run(
                [sys.executable, child, paths["request"], paths["answer"]],
                env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TpuCompileError(f"the TPU compiler didn't end within {timeout:g} s for {topology}") from None
        if not os.path.exists(paths["answer"]) or not os.path.getsize(paths["answer"]):
            raise TpuCompileError(_crash(done, topology))
        with open(paths["answer"]) as file:
            answer = json.load(file)
    if answer.get("stage") == "topology":
        raise TopologyError(f"no TPU topology {topology!r}: {answer['error']}. Valid: {_FORMS}")
    if answer.get("stage") == "devices":
        raise TopologyError(answer["error"])
    return answer, partitions


def _crash(done: subprocess.CompletedProcess, topology: str) -> str:
    how = f"exit status {done.returncode}"
    if done.returncode < 0:
        how = signal.Signals(-done.returncode).name
    stderr = [line for line in done.stderr.splitlines() if not _STACK.match(line)]
    checks = [line for line in stderr if re.match(r"F\d{4}|\*\*\*|.*Check failed", line)]  # libtpu's fatal lines
    said = "\n".join(checks[:3] or stderr[-10:])
    return f"the TPU compiler ended ({how}) while compiling for {topology}; this process is unharmed. It said:\n{said}"


def _free_outputs(module: Any) -> list[bool]:
    """For each result of the program whether the compiler may choose its sharding: where none was asked for."""
    from jax._src.lib.mlir import ir

    functions = [op.operation for op in module.body.operations if op.operation.name == "func.func"]
    main = next(f for f in functions if ir.StringAttr(f.attributes["sym_name"]).value == "main")
    results = len(ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results)
    try:
        attributes = [ir.DictAttr(a) for a in main.attributes["res_attrs"]]
    except KeyError:
        return [True] * results
    return [not any(key in a for key in ("sdy.sharding", "mhlo.sharding")) for a in attributes]


def _lower(fn: Callable, args: Sequence, kwargs: Mapping) -> Any:
    """`fn` traced for these arguments and lowered for TPU (jax.stages.Lowered). Nothing runs."""
    import jax

    if not (hasattr(fn, "trace") and hasattr(fn, "lower")):
        pure, args, donated = program_of(fn, args, kwargs)
        fn, kwargs = jax.jit(pure, donate_argnums=tuple(donated)), {}
    # else it is what jax.jit returned: keep its static and donated arguments
    dtypes = [str(getattr(leaf, "dtype", "")) for leaf in jax.tree.leaves((args, kwargs))]
    wide = any(dtype in ("int64", "uint64", "float64", "complex128") for dtype in dtypes)
    with jax.enable_x64(wide or jax.config.jax_enable_x64):  # else the trace would narrow the 64-bit inputs
        traced = fn.trace(*args, **kwargs)
        try:
            return traced.lower(lowering_platforms=("tpu",))
        except NotImplementedError as error:  # JAX has no TPU rule for an op, e.g. eig
            raise TpuCompileError(f"JAX can't lower this program for TPU: {error}") from error


def program_of(fn: Callable, args: Sequence, kwargs: Mapping) -> tuple[Callable, Sequence, Sequence[int]]:
    """`fn` as a pure function of flat arrays: (function, arrays or their shapes, indices of the donated ones)."""
    if not hasattr(fn, "lower_for") and _is_torch(fn, args, kwargs):
        from ..jit import jit

        fn = fn if hasattr(getattr(fn, "forward", None), "lower_for") else jit(fn)
        fn = fn if hasattr(fn, "lower_for") else fn.forward  # a module's own jit is on its forward
    if hasattr(fn, "lower_for"):
        return fn.lower_for(*args, **kwargs)
    import jax

    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))

    def pure(*arrays):
        positional, named = jax.tree.unflatten(tree, arrays)
        return fn(*positional, **named)

    return pure, leaves, ()


def _is_torch(fn: Callable, args: Sequence, kwargs: Mapping) -> bool:
    """Whether a plain callable is torch's: a module, or given a tensor, or given nothing that is JAX's."""
    import jax
    import numpy as np

    torch = sys.modules.get("torch")
    if torch is None:
        return False
    leaves = jax.tree.leaves((tuple(args), dict(kwargs)))
    if isinstance(fn, torch.nn.Module) or any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return True
    return not any(isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)) for leaf in leaves)
