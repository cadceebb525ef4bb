"""The device as users meet it: names, factories, moving, saving, printing, random state, autocast, bad input."""

import copy
import io
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import torchax_tpu

DEVICE = "jax"


def on(x):
    return x.to(DEVICE)


# ---------------------------------------------------------------- names and factories


def test_device_strings():
    assert torch.device("jax", 0) == torch.device("jax:0")
    assert torch.ones(2, device="jax").device == torch.device("jax:0")
    assert torch.ones(2, device=torch.device("jax")).device.index == 0
    with pytest.raises(RuntimeError):
        torch.ones(2, device="jax:7")


def test_default_device_and_context():
    with torch.device("jax"):
        x = torch.ones(2)
        assert x.device.type == "jax" and torch.tensor([1, 2]).device.type == "jax"
        assert nn.Linear(2, 2).weight.device.type == "jax"
    assert torch.ones(2).device.type == "cpu"
    torch.set_default_device("jax")
    try:
        assert torch.arange(3).device.type == "jax"
    finally:
        torch.set_default_device(None)
    assert torch.arange(3).device.type == "cpu"


def test_accelerator_and_module():
    assert torch.accelerator.current_accelerator().type == "jax"
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == len(jax.devices())
    torch.accelerator.synchronize()
    torch.jax.synchronize()
    assert torch.jax.is_available() and torch.jax.current_device() == 0
    assert isinstance(torch.jax.memory_stats(), dict)
    assert torch.accelerator.memory_allocated() >= 0
    kept = torch.ones(2**18, device=DEVICE) + 1
    assert torch.jax.memory_allocated() >= kept.nbytes and "allocated" in torch.jax.memory_summary()
    torch.jax.empty_cache(), torch.jax.ipc_collect()
    assert not torch.jax.is_current_stream_capturing()


def test_jax_arrays_both_ways():
    x = torch.arange(3.0)
    assert isinstance(x.jax(), jax.Array) and isinstance(on(x).jax(), jax.Array)
    held = on(x)
    array = held.jax()
    held.add_(1)
    assert array.tolist() == [0.0, 1.0, 2.0]  # the array is a value, not a view
    numpy_source = np.zeros(3, np.float32)
    y = torch.from_numpy(numpy_source).to(DEVICE)
    numpy_source[:] = 5
    assert y.tolist() == [0.0, 0.0, 0.0]


def test_copies_across_devices():
    cpu, dev = torch.arange(4.0), torch.zeros(4, device=DEVICE)
    dev.copy_(cpu, non_blocking=True)
    back = torch.zeros(4)
    back.copy_(dev)
    assert torch.equal(back, cpu) and torch.equal(dev.cpu(), cpu) and dev.to(torch.float64).dtype is torch.float64
    assert dev.to(DEVICE) is dev and dev.to("jax", copy=True) is not dev


# ---------------------------------------------------------------- modules, optimizers, saving


def test_module_moves_in_place():
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    m[1].weight = m[0].weight
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    before = list(m.parameters())
    m.to(DEVICE)
    assert [a is b for a, b in zip(before, m.parameters())] == [True] * len(before)
    assert m[0].weight is m[1].weight and m[0].weight.device.type == "jax" and m[2].running_mean.device.type == "jax"
    old = m[0].weight.detach().cpu().clone()
    m(torch.ones(2, 3, device=DEVICE)).sum().backward()
    opt.step()
    assert not torch.equal(old, m[0].weight.detach().cpu()) or m[0].weight.grad is not None
    m.cpu()
    assert m[0].weight.device.type == "cpu" and m[0].weight.grad.device.type == "cpu"
    assert m.to(DEVICE).half()[0].weight.dtype is torch.float16


def test_copy_and_pickle():
    p = nn.Parameter(torch.arange(3.0, device=DEVICE))
    for q in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert isinstance(q, nn.Parameter) and q.requires_grad and q.device.type == "jax" and q.tolist() == p.tolist()
    base = torch.zeros(4, device=DEVICE)
    a, b = copy.deepcopy([base, base[1:]])
    a.fill_(1)
    assert b.tolist() == [1.0, 1.0, 1.0] and base.tolist() == [0.0] * 4


@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(weights_only):
    state = {"w": torch.arange(6.0, device=DEVICE).view(2, 3).t(), "h": torch.ones(2, device=DEVICE, dtype=torch.bfloat16),
             "i": torch.tensor(2**40, device=DEVICE)}
    for where, expect in ((None, "jax"), ("cpu", "cpu"), ("jax", "jax")):
        f = io.BytesIO()
        torch.save(state, f)
        f.seek(0)
        back = torch.load(f, map_location=where, weights_only=weights_only)
        assert {v.device.type for v in back.values()} == {expect}
        assert back["w"].tolist() == state["w"].tolist() and back["h"].dtype is torch.bfloat16 and back["i"].item() == 2**40
    f = io.BytesIO()
    torch.save({"w": torch.ones(2)}, f)
    f.seek(0)
    assert torch.load(f, map_location="jax", weights_only=weights_only)["w"].device.type == "jax"


def test_tied_weights_are_found_by_data_ptr():
    a = torch.ones(4, device=DEVICE)
    assert a.data_ptr() == a.view(2, 2).data_ptr() != 0
    assert a[1:].data_ptr() == a.data_ptr() + 4
    assert a.clone().data_ptr() != a.data_ptr()
    assert a.untyped_storage().data_ptr() == a.t().untyped_storage().data_ptr()
    assert a.untyped_storage().nbytes() == 16


# ---------------------------------------------------------------- the Python surface


def test_python_protocols():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE)
    assert len(x) == 2 and [r.tolist() for r in x] == [[1.0, 2.0], [3.0, 4.0]] and x.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert bool(x[0, 0]) and int(x[1, 1]) == 4 and float(x[0, 1]) == 2.0 and [10, 20][torch.tensor(1, device=DEVICE)] == 20
    assert f"{x[1, 0]:.1f}" == "3.0" and "device='jax:0'" in repr(x) and x in {x: 1}
    with pytest.raises(TypeError, match="can't convert"):
        x.numpy()
    with pytest.raises(TypeError):
        np.asarray(x)
    with pytest.raises(RuntimeError):
        bool(x)


def test_threads():
    out = []

    def work(n):
        x = torch.full((3,), float(n), device=DEVICE, requires_grad=True)
        (x * x).sum().backward()
        out.append((n, x.grad.tolist()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(out) == [(i, [2.0 * i] * 3) for i in range(4)]


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((2,), float(i * i))


@pytest.mark.parametrize("workers,context", [(0, None), (1, "spawn"), (1, "fork")])
def test_data_loader(workers, context):
    torch.ones(1, device=DEVICE)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=3, num_workers=workers, multiprocessing_context=context,
                                         pin_memory=True)
    assert [b.to(DEVICE, non_blocking=True)[:, 0].tolist() for b in loader] == [[0.0, 1.0, 4.0], [9.0, 16.0, 25.0]]


# ---------------------------------------------------------------- random state and autocast


def test_random_state():
    torch.manual_seed(5)
    a = torch.randn(4, device=DEVICE)
    state = torch.jax.get_rng_state()
    b = torch.randn(4, device=DEVICE)
    torch.jax.set_rng_state(state)
    assert torch.equal(b, torch.randn(4, device=DEVICE)) and not torch.equal(a, b)
    with torch.random.fork_rng(device_type="jax"):
        torch.manual_seed(1)
        torch.randn(4, device=DEVICE)
    torch.jax.manual_seed(5)
    assert torch.equal(a, torch.randn(4, device=DEVICE))
    g = torch.Generator().manual_seed(3)
    c, d = torch.rand(4, device=DEVICE, generator=g), torch.rand(4, device=DEVICE, generator=g)
    assert not torch.equal(c, d) and torch.equal(c, torch.rand(4, device=DEVICE, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    m, x = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    with torch.autocast("jax", dtype=dtype):
        y = m(x)
        assert y.dtype is dtype and torch.softmax(y, -1).dtype is torch.float32 and (y + x).dtype is torch.float32
        with torch.autocast("jax", enabled=False):
            assert m(x).dtype is torch.float32
    y.float().sum().backward()
    assert m.weight.grad.dtype is torch.float32 and m(x).dtype is torch.float32
    f = torchax_tpu.jit(lambda t: m(t))
    assert f(x).dtype is torch.float32
    with torch.autocast("jax", dtype=dtype):
        assert f(x).dtype is dtype


# ---------------------------------------------------------------- 64-bit


def test_64_bit_is_real_and_the_users_jax_is_untouched():
    before = jax.config.jax_enable_x64
    assert jnp.arange(3).dtype == jnp.int32
    x = torch.arange(3, device=DEVICE) + 2**40
    y = torch.ones(2, dtype=torch.float64, device=DEVICE) / 3
    assert x.tolist() == [2**40, 2**40 + 1, 2**40 + 2] and y[0].item() == 1 / 3
    assert (y * torch.ones(2, device=DEVICE)).dtype is torch.float64
    assert jnp.arange(3).dtype == jnp.int32 and jnp.ones(2).dtype == jnp.float32
    assert jax.config.jax_enable_x64 == before
    assert jax.jit(lambda v: v * 2)(1.5).dtype == jnp.float32


# ---------------------------------------------------------------- bad input: CPU torch's exception classes

BAD = [
    lambda d: torch.ones(2, 3, device=d) + torch.ones(4, device=d),
    lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    lambda d: torch.ones(3, device=d)[5],
    lambda d: torch.ones(3, 2, device=d)[:, 4],
    lambda d: torch.ones(3, device=d).sum(2),
    lambda d: torch.ones(3, device=d).view(2),
    lambda d: torch.ones(2, 3, device=d).t().view(-1),
    lambda d: torch.cat([torch.ones(2, 3, device=d), torch.ones(3, 2, device=d)]),
    lambda d: torch.ones(3, device=d).softmax(4),
    lambda d: torch.ones(3, dtype=torch.int64, device=d).add_(1.5),
    lambda d: torch.ones(3, device=d).add_(torch.ones(4, device=d)),
    lambda d: nn.functional.conv2d(torch.ones(1, 2, 4, 4, device=d), torch.ones(1, 3, 2, 2, device=d)),
    lambda d: nn.functional.linear(torch.ones(2, 3, device=d), torch.ones(2, 4, device=d)),
    lambda d: torch.ones(3, device=d).gather(0, torch.zeros(2, device=d)),
    lambda d: torch.ones(3, device=d).transpose(0, 3),
    lambda d: torch.ones(3, device=d).expand(2),
    lambda d: torch.ones(0, device=d).max(),
    lambda d: torch.ones(2, device=d) << torch.ones(2, device=d),
    lambda d: torch.ones(2, device=d).reshape(3),
    lambda d: torch.stack([]),
    lambda d: torch.ones(2, 2, device=d).cholesky() if False else torch.linalg.cholesky(-torch.ones(2, 2, device=d)),
    lambda d: torch.ones(3, device=d).item(),
    lambda d: torch.arange(0, 3, 0, device=d),
    lambda d: torch.ones(-1, device=d),
]


@pytest.mark.parametrize("n", range(len(BAD)))
def test_bad_input_raises_what_cpu_raises(n):
    with pytest.raises(Exception) as cpu:
        BAD[n]("cpu")
    with pytest.raises(type(cpu.value)):
        BAD[n](DEVICE)


def test_mixed_devices_are_named():
    with pytest.raises(RuntimeError, match="same device.*jax:0.*cpu"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        nn.Linear(3, 3).to(DEVICE)(torch.ones(2, 3))


def test_tensor_indices_out_of_range():
    x = torch.arange(3.0, device=DEVICE)
    far = torch.tensor([1, 7], device=DEVICE)
    got = x[far].tolist()
    assert got[0] == 1.0 and got[1] != got[1]
    x[far] = 9.0
    assert x.tolist() == [0.0, 9.0, 2.0]
    torchax_tpu.config.check_indices = True
    try:
        with pytest.raises(IndexError):
            x[far]
    finally:
        torchax_tpu.config.check_indices = False
    with pytest.raises(ValueError, match="one of"):
        torchax_tpu.config.fallback = "maybe"
