"""Interpolation and grid sampling, all modes, forward and backward."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests import ledger, oracle
from tests.ops.test_matmul import compare

NAMES = sorted(oracle.full_name(o) for o in oracle.ops()
               if o.name in ("nn.functional.interpolate", "nn.functional.upsample_nearest", "nn.functional.upsample_bilinear",
                             "nn.functional.grid_sample", "nn.functional.affine_grid"))


@pytest.mark.parametrize("mode", ["forward", "grad"])
@pytest.mark.parametrize("name", NAMES)
def test_op_database(mode, name):
    op = next(o for o in oracle.ops() if oracle.full_name(o) == name)
    assert oracle.applicable(op, mode, torch.float32)
    ledger.check(mode, name, "float32", lambda **kw: oracle.CHECKS[mode](op, torch.float32, limit=12, **kw))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize("size", [(4, 9), (14, 5), (7, 7), (21, 14)])
def test_interpolate_size(mode, size):
    torch.manual_seed(0)
    compare(lambda x: F.interpolate(x, size, mode=mode), torch.randn(2, 3, 7, 7), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode,align_corners", itertools.product(["bilinear", "bicubic"], [False, True]))
@pytest.mark.parametrize("size", [(3, 4), (11, 9)])
def test_interpolate_antialias(mode, align_corners, size):
    torch.manual_seed(0)
    compare(lambda x: F.interpolate(x, size, mode=mode, align_corners=align_corners, antialias=True),
            torch.randn(2, 3, 8, 7), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [0.4, 1.7, 2.0])
@pytest.mark.parametrize("recompute", [None, True])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_interpolate_scale_factor(factor, recompute, mode):
    torch.manual_seed(0)
    compare(lambda x: F.interpolate(x, scale_factor=factor, mode=mode, recompute_scale_factor=recompute),
            torch.randn(1, 2, 9, 7), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode,padding,align_corners", itertools.product(
    ["bilinear", "nearest", "bicubic"], ["zeros", "border", "reflection"], [False, True]))
def test_grid_sample_2d(mode, padding, align_corners):
    torch.manual_seed(0)
    compare(lambda x, g: F.grid_sample(x, g, mode, padding, align_corners), torch.randn(2, 3, 5, 6),
            torch.rand(2, 4, 7, 2) * 3.2 - 1.6, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode,padding", itertools.product(["bilinear", "nearest"], ["zeros", "border", "reflection"]))
def test_grid_sample_3d(mode, padding):
    torch.manual_seed(0)
    compare(lambda x, g: F.grid_sample(x, g, mode, padding, False), torch.randn(1, 2, 4, 5, 3),
            torch.rand(1, 2, 3, 4, 3) * 3.2 - 1.6, rtol=1e-3, atol=1e-3)
