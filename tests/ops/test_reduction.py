"""Reductions and scans: the op database, and the corners it leaves out."""

import math

import pytest
import torch

from tests import ledger, oracle

nan, inf = math.nan, math.inf
DEV = oracle.DEVICE
FLOAT = ["sum", "mean", "prod", "nansum", "nanmean", "var", "var.unbiased", "std", "std_mean", "var_mean", "amax", "amin", "aminmax", "max.reduction_no_dim", "max.reduction_with_dim", "min.reduction_with_dim", "argmax", "argmin", "any", "all", "norm", "norm.inf", "linalg.vector_norm", "logsumexp", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "count_nonzero", "dist", "trace", "equal", "allclose", "hash_tensor"]
GRAD = ["sum", "mean", "prod", "var", "std_mean", "amax", "max.reduction_with_dim", "norm", "linalg.vector_norm", "logsumexp", "cumsum", "cumprod", "cummax", "logcumsumexp"]
CASES = ([("forward", n, "float32") for n in FLOAT] + [("grad", n, "float32") for n in GRAD]
         + [("forward", n, "bfloat16") for n in ("sum", "mean", "prod", "var", "norm", "cumsum", "logsumexp", "amax")]
         + [("forward", n, "int64") for n in ("sum", "prod", "amax", "cumsum", "cummax", "argmax", "any")]
         + [("forward", n, "bool") for n in ("sum", "any", "all", "amax", "prod")]
         + [("forward", n, "complex64") for n in ("sum", "mean", "prod", "var", "linalg.vector_norm", "logcumsumexp")]
         + [("out", n, "float32") for n in ("sum", "max.reduction_with_dim", "amax", "cumsum", "std", "any") if oracle.ops([n])[0].supports_out])


@pytest.mark.parametrize("mode,name,dtype", CASES)
def test_op_database(mode, name, dtype):
    op = oracle.ops([name])[0]
    assert oracle.applicable(op, mode, getattr(torch, dtype)), "not a case of CPU torch"
    n = ledger.check(mode, name, dtype, lambda **kw: oracle.CHECKS[mode](op, getattr(torch, dtype), limit=6, **kw))
    assert n is None or n > 0


X = torch.tensor([[1., nan, -inf, inf, -0., 0., nan, 2], [3, 1, 2, 1, 3, 5, 5, 0]])
SAME = """x.argmax() | x.argmin(1) | x.amax(1) | x.cummax(1) | x.cummin(1) | x.nansum() | x.nanmean(1) | x.logsumexp(1) | x.max()
x.max(1) | x.min(1) | x.aminmax(dim=1) | x.std(1) | x.cumsum(1) | x.logcumsumexp(1) | x.norm() | x.norm(inf) | x[1].norm(3)
x.count_nonzero() | x[:, :0].sum() | x[:, :0].prod() | x[:, :0].mean() | x[:, :0].std(1) | x[:, :0].logsumexp(1) | x[:, :0].norm()
x[1].long().sum(dtype=torch.int32) | x[1].int().sum() | x[1].int().prod() | x[1].bool().cumsum(0) | x[1].to(torch.uint8).any()
x[1].to(torch.uint8).all(0) | x.any((0, 1)) | x.var(1, correction=8) | x[1].var(correction=0) | x[1, 0].std() | x[1, :1].std()
torch.equal(x[1], x[1]) | torch.equal(x, x) | torch.equal(x[1], x[1].long()) | torch.allclose(x, x, equal_nan=True)
x.to(torch.complex64)[1].var() | x.to(torch.complex64)[1].norm() | x[1].half().sum() | x[1].bfloat16().mean()
x[1].reshape(4, 2).trace() | torch.dist(x[1], 2 * x[1], 1) | x[0, 0].cumsum(0) | x[0, 0].max(0) | x[0, 0].argmax()
x[1].sum(dtype=torch.float64) | torch.linalg.vector_norm(x[1].half(), dtype=torch.float32) | x[1].bool().argmax()
x.sum(5) | x.sum((0, 0)) | x[:, :0].max() | x[:, :0].max(1) | x[:, :0].argmax() | x[:, :0].amax() | x[:, :0].amax(1)
x[:, :0].norm(inf) | x.long().mean() | x[1].long().std() | x.max(7) | torch.allclose(x, x.double()) | x.to(torch.complex64).max()
x[1].trace() | x.sum(dim=None, keepdim=True) | x.all((), keepdim=True) | x[1].cumprod(0) | x.argmax(keepdim=True)"""


@pytest.mark.parametrize("expression", [e.strip() for line in SAME.splitlines() for e in line.split("|")])
@pytest.mark.filterwarnings("ignore")
def test_same_value_or_same_error(expression):
    results = []
    for x in (X, X.to(DEV)):
        try:
            results.append(eval(expression, {"x": x, "torch": torch, "inf": inf}))
        except (RuntimeError, IndexError, ValueError, TypeError) as e:
            results.append(e)
    ref, got = results
    if isinstance(ref, Exception):
        assert type(got) is type(ref), (got, ref)
    else:
        oracle.assert_same(got, ref)


def test_halves_accumulate_in_float32():
    x = torch.full((4096,), 0.1, dtype=torch.bfloat16)
    assert abs(x.to(DEV).sum().item() - 4096 * float(x[0])) < 2
    assert torch.equal(x.to(DEV).cumsum(0).cpu()[-1], x.float().cumsum(0)[-1].bfloat16())


def test_a_changing_correction_or_norm_gives_its_own_value():
    x = torch.randn(5, 7)
    for c in (0, 1, 2.5):
        oracle.assert_same(x.to(DEV).var(1, correction=c), x.var(1, correction=c))
    for p in (0, 0.5, 1, 2, 3, inf, -inf):
        oracle.assert_same(torch.linalg.vector_norm(x.to(DEV), p, dim=1), torch.linalg.vector_norm(x, p, dim=1))
