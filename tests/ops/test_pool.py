"""Pooling: the op database, ties, nan, paddings and large kernels."""

import pytest
import torch
import torch.nn.functional as F

from tests import ledger, oracle
from tests.ops.test_matmul import compare

NAMES = [f"nn.functional.{k}_pool{n}d" for k in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)]
NAMES += ["nn.functional.max_unpool2d", "nn.functional.max_unpool3d"]
CASES = [(m, n, d) for n in NAMES for m, d in (("forward", "float32"), ("grad", "float32"), ("forward", "bfloat16"))]


@pytest.mark.parametrize("mode,name,dtype", CASES)
def test_op_database(mode, name, dtype):
    op = oracle.ops([name])[0]
    known = oracle.applicable(op, mode, getattr(torch, dtype))
    n = ledger.check(mode, name, dtype, lambda **kw: oracle.CHECKS[mode](op, getattr(torch, dtype), limit=8, **kw)) if known else 0
    assert n or not known or n is None


@pytest.mark.parametrize("kernel,stride,padding,dilation,ceil_mode", [
    (2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 2, 1, 1, True), (3, 1, 1, 2, False), ((9, 9), 3, 4, 1, False), (2, 3, 0, 1, True)])
@pytest.mark.parametrize("values", ["random", "ties", "nan", "lowest"])
def test_max_pool2d(kernel, stride, padding, dilation, ceil_mode, values):
    torch.manual_seed(0)
    x = {"random": torch.randn(2, 3, 11, 10), "ties": torch.randint(0, 2, (2, 3, 11, 10)).float(),
         "nan": torch.where(torch.rand(2, 3, 11, 10) < 0.1, float("nan"), torch.randn(2, 3, 11, 10)),
         "lowest": torch.full((2, 3, 11, 10), -float("inf"))}[values]
    args = (kernel, stride, padding, dilation, ceil_mode)
    ref = torch.ops.aten.max_pool2d_with_indices(x, *args)
    got = torch.ops.aten.max_pool2d_with_indices(x.to(oracle.DEVICE), *args)
    oracle.assert_same(got, ref)
    g = torch.randn_like(ref[0])
    back = torch.ops.aten.max_pool2d_with_indices_backward
    stride = stride if isinstance(stride, (tuple, list)) else [stride] * 2
    spread = [v if isinstance(v, (tuple, list)) else [v] * 2 for v in (kernel, stride, padding, dilation)]
    oracle.assert_same(back(g.to(oracle.DEVICE), x.to(oracle.DEVICE), *spread, ceil_mode, got[1]),
                       back(g, x, *spread, ceil_mode, ref[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fn", [
    lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    lambda x: F.avg_pool2d(x, 2, divisor_override=3), lambda x: F.avg_pool2d(x, (2, 5)),
    lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), lambda x: F.avg_pool2d(x, 2, 3),
    lambda x: F.adaptive_avg_pool2d(x, (3, 4)), lambda x: F.adaptive_avg_pool2d(x, (5, 5)),
    lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    lambda x: F.adaptive_max_pool2d(x, (5, 2)), lambda x: F.max_pool2d(x, 2)])
def test_pools_forward_and_backward(fn):
    torch.manual_seed(0)
    compare(fn, torch.randn(2, 3, 10, 10))


@pytest.mark.parametrize("n", [2, 3])
def test_fractional_max_pool(n):
    torch.manual_seed(0)
    x, u = torch.randn(2, 3, *[9] * n), torch.rand(2, 3, n)
    pool = getattr(F, f"fractional_max_pool{n}d_with_indices")
    ref = pool(x, 2, 4, _random_samples=u)
    oracle.assert_same(pool(x.to(oracle.DEVICE), 2, 4, _random_samples=u.to(oracle.DEVICE)), ref)


def test_max_pool_has_second_derivatives():
    def penalty(x):
        g, = torch.autograd.grad(F.max_pool2d(x, 2).pow(3).sum(), x, create_graph=True)
        return g.square().sum()

    torch.manual_seed(0)
    compare(penalty, torch.randn(1, 2, 6, 6), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fn", [
    lambda x: F.max_pool2d(x, 2, padding=2), lambda x: F.max_pool2d(x, 11), lambda x: F.avg_pool2d(x, 2, divisor_override=0)])
def test_bad_settings_raise(fn):
    with pytest.raises(RuntimeError):
        fn(torch.ones(1, 1, 8, 8))
    with pytest.raises(RuntimeError):
        fn(torch.ones(1, 1, 8, 8, device=oracle.DEVICE))
