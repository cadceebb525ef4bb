"""Real compilations for TPU, calibrated on kernels whose cost is known. Each takes a second or two."""

import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with libtpu installed, JAX would look for a TPU at every start

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from torchax_tpu.tpu import TopologyError, TpuCompileError, TpuCompilerMissingError, dry_run

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed (it has wheels for x86-64 Linux only)"
)
BF16, F32 = jnp.bfloat16, jnp.float32
array = jax.ShapeDtypeStruct


@needs_libtpu
def test_matmul_is_near_the_peak_of_the_matrix_unit():
    n = 4096
    report = dry_run(lambda a, b: a @ b, array((n, n), BF16), array((n, n), BF16), topology="v5e:1x1")
    assert report.flops == 2 * n**3
    per_cycle = 2 * 4 * 128 * 128  # v5e: four 128x128 units
    assert 1.0 <= report.matmul_cycles / (2 * n**3 / per_cycle) <= 1.15
    assert report.hbm_bytes == 3 * n * n * 2
    assert (report.chips, report.devices_used, report.kernels, report.kind) == (1, 1, 1, "TPU v5e")
    assert report.fits and report.memory.total == 3 * n * n * 2 and report.memory.temporaries == 0
    assert report.floor_seconds == pytest.approx(report.matmul_cycles / 1.503e9)
    assert report.largest(1)[0].matmul_cycles == report.matmul_cycles
    shown = str(report)
    for piece in ("100.663 MB", "fits", "us at 1.503 GHz", "floor"):
        assert piece in shown


@needs_libtpu
def test_loop_bodies_count_times_their_trips():
    def program(steps):
        def f(x, ws):
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]

        return dry_run(f, array((512, 512), BF16), array((steps, 512, 512), BF16))

    short, long = program(3), program(9)
    assert long.matmul_cycles == 3 * short.matmul_cycles > 0
    assert (short.flops, long.flops) == (3 * 2 * 512**3, 9 * 2 * 512**3)
    assert short.unknown_loops == 0
    weight = 512 * 512 * 2
    assert long.hbm_bytes - short.hbm_bytes == pytest.approx(6 * weight, rel=0.01)  # a slice of the weights per trip


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:1x1"])
def test_elementwise_add_moves_three_arrays_and_donation_is_seen(topology):
    f = jax.jit(lambda a, b: a + b, donate_argnums=0)
    report = dry_run(f, array((4096, 4096), F32), array((4096, 4096), F32), topology=topology)
    size = 4096 * 4096 * 4
    assert report.hbm_bytes == 3 * size
    assert (report.flops, report.matmul_cycles, report.kernels) == (0, 0, 1)
    memory = report.memory
    assert (memory.arguments, memory.outputs, memory.aliased, memory.total) == (2 * size, size, size, 2 * size)


@needs_libtpu
def test_precision_costs_matmul_cycles():
    def cycles(precision):
        f = lambda a, b: jnp.matmul(a, b, precision=precision)
        return dry_run(f, array((2048, 2048), F32), array((2048, 2048), F32)).matmul_cycles

    assert 5 < cycles("highest") / cycles("default") < 7  # six passes of bfloat16


@needs_libtpu
def test_sharded_program_reports_per_chip_with_its_collectives():
    mesh = AbstractMesh((2, 2), ("data", "model"))

    def sharded(shape, *spec):
        return array(shape, BF16, sharding=NamedSharding(mesh, P(*spec)))

    args = sharded((1024, 1024), "data"), sharded((1024, 1024), None, "model")
    report = dry_run(lambda x, w: jnp.tanh(x @ w).sum(0), *args)
    assert (report.chips, report.devices_used) == (4, 4)
    assert report.flops == 2 * 1024**3 // 4
    assert report.memory.arguments == 2 * 1024 * 1024 * 2 // 2
    assert report.collectives["all-reduce"].count == 1
    with pytest.raises(TopologyError, match="sharded over 4 devices; v5e:1x1 has 1"):
        dry_run(lambda x, w: x @ w, *args, topology="v5e:1x1")


@needs_libtpu
def test_gather_and_scatter_compile_where_there_is_a_sparsecore():
    def f(table, ids, grad):
        return table[ids], jnp.zeros_like(table).at[ids].add(grad)

    rows, table = 4096 * 512 * 4, 50000 * 512 * 4
    args = array((50000, 512), F32), array((4096,), jnp.int32), array((4096, 512), F32)
    report = dry_run(f, *args, topology="v6e:1x1")
    assert table + 3 * rows <= report.hbm_bytes <= table + 4 * rows  # never the whole table read


@needs_libtpu
def test_too_large_is_a_report():
    report = dry_run(lambda *xs: sum(x.sum() for x in xs), *[array((1024, 1024, 1400), F32)] * 4, topology="v5e:1x1")
    assert not report.fits
    assert report.memory.total == pytest.approx(4 * 1024 * 1024 * 1400 * 4, rel=0.01)
    assert report.memory.capacity == pytest.approx(15.75 * 2**30, rel=0.01)
    assert "DOES NOT FIT" in str(report) and "Too large for TPU v5e" in str(report)
    with pytest.raises(TpuCompileError, match="needs 23,49"):
        report.as_text()


@needs_libtpu
def test_refusals_name_the_reason():
    with pytest.raises(TpuCompileError, match="LuDecomposition; got shape bf16"):
        dry_run(lambda x: jax.lax.linalg.lu(x)[0], array((16, 16), BF16))
    with pytest.raises(TpuCompileError, match="'eig' not found for platform tpu"):
        dry_run(lambda x: jnp.linalg.eig(x)[0], array((16, 16), F32))


@needs_libtpu
def test_a_compiler_that_dies_leaves_this_process_alive():
    f = lambda x, g: jax.lax.ragged_dot(x, x[None], g)
    with pytest.raises(TpuCompileError, match="ended .* this process is unharmed"):
        dry_run(f, array((16, 16), jnp.complex64), array((1,), jnp.int32))


@needs_libtpu
def test_64_bit_and_random_programs():
    report = dry_run(lambda x: x + 1, array((1024,), jnp.int64))
    assert report.memory.arguments == 8 * 1024 and "u32" in report.as_text()
    assert dry_run(lambda key: jax.random.normal(key, (8, 128)), jax.random.key(0)).memory.outputs == 4096
    assert not jax.config.jax_enable_x64


@needs_libtpu
def test_topology_of_odd_sides_is_refused_with_the_valid_forms():
    with pytest.raises(TopologyError, match="v5e:3x3.*Valid: .*v5p:2x2x1"):
        dry_run(jnp.sin, array((8,), F32), topology="v5e:3x3")


@pytest.mark.parametrize("topology", ["v5e", "v5e-8", "v9:2x2", "v5e:0x2", "", None])
def test_bad_topology_lists_the_valid_forms(topology):
    with pytest.raises(TopologyError, match="Valid: .*v5e:2x2"):
        dry_run(jnp.sin, array((8,), F32), topology=topology)


def test_missing_libtpu_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(TpuCompilerMissingError, match=r"pip install torchax_tpu\[tpu\]"):
        dry_run(jnp.sin, array((8,), F32))


def test_plain_function_keeps_structure_of_its_arguments():
    from torchax_tpu.tpu.dry_run import program_of

    pure, leaves, donated = program_of(lambda d, *, k: d["a"] - k, ({"a": jnp.ones(3)},), {"k": np.ones(3, np.float32)})
    assert len(leaves) == 2 and donated == ()
    assert float(pure(*leaves).sum()) == 0


@needs_libtpu
def test_torch_programs_have_their_state_lifted():
    import torch

    import torchax_tpu  # noqa: F401 - makes the device

    layer = torch.nn.Linear(512, 256, bias=False).to("jax")
    total = torch.zeros(128, 256, device="jax")
    x = torch.ones(128, 512, device="jax")

    def accumulate(x):
        with torch.no_grad():
            total.add_(layer(x))

    report = dry_run(accumulate, x, topology="v5e:1x1")
    assert report.flops == 2 * 128 * 256 * 512
    assert report.memory.arguments == 4 * (128 * 512 + 512 * 256 + 128 * 256)
    assert report.memory.aliased == 4 * 128 * 256  # the tensor written to is donated
    assert total.sum().item() == 0  # nothing ran


@needs_libtpu
@pytest.mark.parametrize("wrapped", [False, True])
def test_torch_module_in_training(wrapped):
    import torch

    from torchax_tpu.jit import jit

    layer = torch.nn.Linear(512, 256).to("jax")
    report = dry_run(jit(layer) if wrapped else layer, torch.ones(128, 512, device="jax"))
    assert report.flops == 2 * 128 * 256 * 512


@needs_libtpu
def test_torch_train_step():
    import torch

    layer = torch.nn.Linear(512, 256).to("jax")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = layer.weight.detach().cpu().clone()
    report = dry_run(step, torch.ones(128, 512, device="jax"))
    assert report.flops == 2 * 2 * 128 * 256 * 512  # forward, and the gradient of the weight
    assert report.memory.aliased >= 4 * 512 * 256
    assert torch.equal(layer.weight.detach().cpu(), before)
