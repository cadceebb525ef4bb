"""Normalisation: the op database, half precision against float64, running statistics, modes and masks."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import ledger, oracle

DEVICE = oracle.DEVICE
NAMES = [f"nn.functional.{n}" for n in ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm",
                                        "local_response_norm", "normalize")]
NAMES += ["native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "renorm"]


@pytest.mark.parametrize("mode", ["forward", "grad", "inplace", "out"])
@pytest.mark.parametrize("name", NAMES)
def test_op_database(name, mode):
    op = oracle.ops([name])[0]
    if not oracle.applicable(op, mode, torch.float32):
        assert mode in ("inplace", "out")
        return
    assert ledger.check(mode, name, "float32", lambda **kw: oracle.CHECKS[mode](op, torch.float32, limit=8, **kw)) != 0


HALVES = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[1:], w.expand(x.shape[1:]), b.expand(x.shape[1:])),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w.expand(x.shape[1]), b.expand(x.shape[1])),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w.expand(x.shape[1]), b.expand(x.shape[1]), training=True),
    "instance_norm": lambda x, w, b: F.instance_norm(x, weight=w.expand(x.shape[1]), bias=b.expand(x.shape[1])),
    "rms_norm": lambda x, w, b: F.rms_norm(x, x.shape[1:], w.expand(x.shape[1:])) + b,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_no_worse_than_cpu(name, dtype):
    """Forward and gradients of a half input lie as near to the float64 truth as the CPU's, or nearer."""
    torch.manual_seed(0)
    given = [torch.randn(4, 6, 5, 7), torch.rand(1) + 0.5, torch.randn(1)]
    given[0] = given[0] * 2 + 3
    given = [t.to(dtype) for t in given]
    cotangent = torch.randn(4, 6, 5, 7).to(dtype)

    def run(device, to):
        leaves = [t.to(device, to).requires_grad_() for t in given]
        out = HALVES[name](*leaves)
        return [t.detach().cpu() for t in (out, *torch.autograd.grad(out, leaves, cotangent.to(device, to)))]

    truth, cpu, got = run("cpu", torch.float64), run("cpu", dtype), run(DEVICE, dtype)
    for t, c, g in zip(truth, cpu, got):
        assert g.dtype == c.dtype == dtype
        ours, theirs = (g.double() - t).abs().max().item(), (c.double() - t).abs().max().item()
        assert ours <= 1.5 * theirs + torch.finfo(dtype).eps * t.abs().max().item(), (ours, theirs)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (2, 4, 3, 3), (2, 4, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("affine,track,momentum", [(True, True, 0.3), (False, True, None), (True, False, 0.1)])
def test_batch_norm_module(shape, affine, track, momentum):
    """Statistics move as on the CPU, in train and then in eval mode, with gradients in both."""
    torch.manual_seed(0)
    cls = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    module = cls(4, momentum=momentum, affine=affine, track_running_stats=track)
    twin = copy.deepcopy(module).to(DEVICE)
    for training in (True, True, False):
        x = torch.randn(shape) * 2 + 1
        results = []
        for m, device in ((module, "cpu"), (twin, DEVICE)):
            m.train(training)
            m.zero_grad()
            y = x.clone().to(device).requires_grad_()
            out = m(y)
            (out * out.detach().cos()).sum().backward()
            results.append((out, y.grad, [p.grad for p in m.parameters()], list(m.buffers())))
        oracle.assert_same(results[1], results[0], 1e-4, 1e-5)


def test_running_statistics_are_written_in_place_and_eval_leaves_them():
    mean, var = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    alias = mean.view(1, 3)
    x = torch.randn(8, 3, device=DEVICE)
    F.batch_norm(x, mean, var, training=True, momentum=1.0)
    oracle.assert_same(alias[0], x.cpu().mean(0), 1e-5, 1e-6)
    oracle.assert_same(var, x.cpu().var(0), 1e-5, 1e-6)
    kept = mean.clone()
    F.batch_norm(x + 5, mean, var, training=False)
    assert torch.equal(mean, kept)


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)), ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_backward_masks(mask, train):
    torch.manual_seed(0)
    x, g, w, mean, var = torch.randn(4, 3, 5), torch.randn(4, 3, 5), torch.rand(3), torch.randn(3), torch.rand(3) + 1
    call = torch.ops.aten.native_batch_norm_backward
    args = (g, x, w, mean, var, x.mean((0, 2)), (x.var((0, 2), correction=0) + 1e-5).rsqrt(), train, 1e-5, mask)
    ref = call(*args)
    got = call(*oracle.to_device(args))
    for a, b, wanted in zip(got, ref, mask):
        if wanted:
            oracle.assert_same(a, b, 1e-4, 1e-5)
        else:
            assert a is None


def test_batch_norm_mixed_precision_statistics():
    """Half input with float32 parameters: float32 saved statistics, half output."""
    x = torch.randn(4, 3, 5, dtype=torch.bfloat16)
    args = (torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)
    ref = torch.native_batch_norm(x, *args)
    got = torch.native_batch_norm(x.to(DEVICE), *oracle.to_device(args))
    assert [t.dtype for t in got] == [t.dtype for t in ref]
    oracle.assert_same(got[1:], ref[1:], 1e-4, 1e-5)


def test_synchronised_batch_norm_pieces():
    """stats, gathered over two halves, and elemt give the whole batch's norm; the reduced backward its gradient."""
    torch.manual_seed(0)
    x, g = torch.randn(8, 3, 4), torch.randn(8, 3, 4)
    w, b = torch.rand(3), torch.randn(3)
    leaf = x.clone().requires_grad_()
    ref = F.batch_norm(leaf, None, None, w, b, training=True)
    ref.backward(g)
    d, dg, dw, db = (t.to(DEVICE) for t in (x, g, w, b))
    stats = [torch.batch_norm_stats(part, 1e-5) for part in d.split(4)]
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        d, torch.stack([s[0] for s in stats]), torch.stack([s[1] for s in stats]), None, None, 0.1, 1e-5,
        torch.full((2,), 16.0, device=DEVICE))
    oracle.assert_same(torch.batch_norm_elemt(d, dw, db, mean, invstd, 1e-5), ref, 1e-4, 1e-5)
    sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dg, d, mean, invstd, dw, True, True, True)
    count = torch.tensor([32], dtype=torch.int32).to(DEVICE)
    gx = torch.batch_norm_backward_elemt(dg, d, mean, invstd, dw, sum_dy, sum_dy_xmu, count)
    oracle.assert_same(gx, leaf.grad, 1e-4, 1e-5)


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm(dim):
    torch.manual_seed(0)
    module = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4), dim=dim)
    twin = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4), dim=dim).to(DEVICE)
    twin.load_state_dict(module.state_dict())
    x, results = torch.randn(3, 5), []
    for m, device in ((module, "cpu"), (twin, DEVICE)):
        m(x.to(device)).square().sum().backward()
        results.append([p.grad for p in m.parameters()])
    oracle.assert_same(results[1], results[0], 1e-4, 1e-5)


def test_spectral_norm():
    torch.manual_seed(0)
    module = nn.utils.spectral_norm(nn.Linear(5, 4))
    twin = copy.deepcopy(module).to(DEVICE)
    x = torch.randn(3, 5)
    for _ in range(2):
        ref, got = module(x), twin(x.to(DEVICE))
    oracle.assert_same(got, ref, 1e-4, 1e-5)
    oracle.assert_same(twin.weight_u, module.weight_u, 1e-4, 1e-5)


def test_rms_norm_is_one_op_and_differentiable_twice_never_silently():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names = []
    x = torch.randn(3, 4).to(DEVICE).requires_grad_()
    with Log():
        F.rms_norm(x, (4,))
    assert [n for n in names if n != "aten::detach"] == ["aten::_fused_rms_norm"]
    with torch.inference_mode():
        oracle.assert_same(F.rms_norm(x, (4,)), F.rms_norm(x.cpu(), (4,)), 1e-5, 1e-6)


@pytest.mark.parametrize("call", [
    lambda x: F.layer_norm(x, (5,)), lambda x: F.group_norm(x, 3), lambda x: F.layer_norm(x, (4,), x[0, :3, 0]),
    lambda x: F.batch_norm(x, x[0, 0, :3], x[0, 0, :3], training=True), lambda x: F.rms_norm(x, (5,)),
    lambda x: torch.renorm(x, -1.0, 0, 1.0)])
def test_refuses_as_torch_does(call):
    x = torch.randn(2, 4, 4)
    with pytest.raises(RuntimeError):
        call(x)
    with pytest.raises(RuntimeError):
        call(x.to(DEVICE))


def test_layer_norm_without_gradient_is_the_same():
    """Without a gradient one result is made instead of three; modes that watch ops still see torch's own op."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    x, w, b = torch.randn(3, 4, 5), torch.randn(5), torch.randn(5)
    for dtype in (torch.float32, torch.bfloat16):
        for extra in ((), (w.to(dtype),), (w.to(dtype), b.to(dtype))):
            ref = torch.nn.functional.layer_norm(x.to(dtype), (5,), *extra)
            there = [t.to("jax") for t in extra]
            on_device = x.to(dtype).to("jax")
            plain = torch.nn.functional.layer_norm(on_device, (5,), *there)
            with Watch():
                watched = torch.nn.functional.layer_norm(on_device, (5,), *there)
            with torch.inference_mode():
                inferred = torch.nn.functional.layer_norm(on_device, (5,), *there)
            for got in (plain, watched, inferred):
                torch.testing.assert_close(got.cpu(), ref)
            grad = torch.nn.functional.layer_norm(on_device.requires_grad_(), (5,), *there)
            assert grad.grad_fn is not None and plain.grad_fn is None
            torch.testing.assert_close(grad.detach().cpu(), ref)
    assert torch.ops.aten.native_layer_norm.default in seen
    with pytest.raises(RuntimeError):
        torch.nn.functional.layer_norm(x.to("jax"), (4,))
