"""Convolutions: the op database and settings it misses, forward and backward."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests import ledger, oracle
from tests.ops.test_matmul import compare

NAMES = [f"nn.functional.conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3)]
CASES = [(m, n, "float32") for n in NAMES for m in ("forward", "grad")]
CASES += [("forward", n, d) for n in NAMES[:2] + NAMES[3:5] for d in ("bfloat16", "complex64", "float64")]


@pytest.mark.parametrize("mode,name,dtype", CASES)
def test_op_database(mode, name, dtype):
    op, = oracle.ops([name])
    assert oracle.applicable(op, mode, getattr(torch, dtype))
    ledger.check(mode, name, dtype, lambda **kw: oracle.CHECKS[mode](op, getattr(torch, dtype), limit=8, **kw))


@pytest.mark.parametrize("stride,padding,dilation,groups", itertools.product((1, 2), (0, 1), (1, 2), (1, 2)))
def test_conv2d_settings(stride, padding, dilation, groups):
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 4, 9, 8), torch.randn(6, 4 // groups, 3, 2), torch.randn(6)
    compare(lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups), x, w, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_settings(n, groups):
    torch.manual_seed(0)
    conv = getattr(F, f"conv_transpose{n}d")
    x, w, b = torch.randn(2, 4, *[4] * n), torch.randn(4, 3, *[3] * n), torch.randn(3 * groups)
    compare(lambda x, w, b: conv(x, w, b, stride=2, padding=1, output_padding=1, groups=groups, dilation=2), x, w, b,
            rtol=1e-4, atol=1e-2)


def test_depthwise_unbatched_and_empty():
    torch.manual_seed(0)
    compare(lambda x, w: F.conv2d(x, w, groups=4, padding="same"), torch.randn(4, 6, 6), torch.randn(8, 1, 3, 3),
            rtol=1e-4, atol=1e-3)
    compare(lambda x, w: F.conv2d(x, w), torch.randn(0, 4, 6, 6), torch.randn(8, 4, 3, 3))


def test_channels_last_input():
    x = torch.randn(2, 3, 8, 8)
    conv = torch.nn.Conv2d(3, 4, 3)
    with torch.no_grad():  # a live graph would hold on to the parameters, which then can't move
        expected = conv(x)
    got = conv.to(oracle.DEVICE)(x.to(oracle.DEVICE).to(memory_format=torch.channels_last))
    oracle.assert_same(got, expected, rtol=1e-4, atol=1e-4)


def test_conv_tbc():
    torch.manual_seed(0)
    compare(lambda x, w, b: torch.conv_tbc(x, w, b, 1), torch.randn(5, 2, 3), torch.randn(3, 3, 4), torch.randn(4),
            rtol=1e-4, atol=1e-3)


def test_second_derivative():
    def penalty(x, w):
        g, = torch.autograd.grad(F.conv2d(x, w).square().sum(), x, create_graph=True)
        return g.square().sum()

    torch.manual_seed(0)
    compare(penalty, torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), rtol=1e-4, atol=1e-1)


@pytest.mark.parametrize("fn", [
    lambda d: F.conv2d(torch.ones(1, 3, 8, 8, device=d), torch.ones(4, 2, 3, 3, device=d)),
    lambda d: F.conv2d(torch.ones(1, 3, 2, 2, device=d), torch.ones(4, 3, 3, 3, device=d)),
    lambda d: F.conv2d(torch.ones(1, 3, 8, 8, device=d), torch.ones(4, 3, 3, 3, device=d, dtype=torch.float64)),
    lambda d: F.conv2d(torch.ones(1, 3, 8, 8, device=d), torch.ones(4, 3, 3, 3, device=d), stride=0)])
def test_bad_settings_raise(fn):
    with pytest.raises(RuntimeError):
        fn("cpu")
    with pytest.raises(RuntimeError):
        fn(oracle.DEVICE)
