"""Sorting, order statistics, searching, distinct values, histograms."""

import math

import pytest
import torch

from tests import ledger, oracle

nan, inf = math.nan, math.inf
DEV = oracle.DEVICE
NAMES = ["sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode", "quantile", "nanquantile", "searchsorted", "bucketize", "unique", "unique_consecutive", "isin", "histc", "histogram", "histogramdd"]
CASES = ([("forward", n, "float32") for n in NAMES] + [("forward", "bincount", "int64")]
         + [("forward", n, "int64") for n in ("searchsorted", "bucketize", "unique", "isin", "msort")]
         + [("forward", n, "bfloat16") for n in ("msort", "nanmedian", "unique", "searchsorted")]
         + [("grad", n, "float32") for n in ("sort", "topk", "kthvalue", "median", "mode", "quantile")]
         + [("out", n, "float32") for n in ("sort", "topk", "msort", "kthvalue", "searchsorted", "isin")])


@pytest.mark.parametrize("mode,name,dtype", CASES)
def test_op_database(mode, name, dtype):
    op = oracle.ops([name])[0]
    assert oracle.applicable(op, mode, getattr(torch, dtype)), "not a case of CPU torch"
    n = ledger.check(mode, name, dtype, lambda **kw: oracle.CHECKS[mode](op, getattr(torch, dtype), limit=8, **kw))
    assert n is None or n > 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("descending", [False, True])
def test_stable_sort_of_many_ties(dtype, descending):
    torch.manual_seed(0)
    x = torch.randint(0, 2 if dtype == torch.bool else 9, (4, 50)).to(dtype)
    for dim in (0, 1):
        oracle.assert_same(torch.sort(x.to(DEV), dim=dim, stable=True, descending=descending),
                           torch.sort(x, dim=dim, stable=True, descending=descending))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [False, True])
def test_topk_values_and_where_they_stand(dtype, largest):
    torch.manual_seed(0)
    x = (torch.randn(3, 40) * 20).to(dtype)
    if dtype.is_floating_point:
        x[0, :5] = torch.tensor([nan, inf, -inf, -0.0, nan])
    else:
        x[0, :2] = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)
    for k, dim in ((5, 1), (40, 1), (2, 0), (0, 1)):
        values, index = torch.topk(x.to(DEV), k, dim, largest)
        oracle.assert_same(values, torch.topk(x, k, dim, largest)[0])
        oracle.assert_same(x.gather(dim, index.cpu()), values.cpu())
        assert index.dtype == torch.int64


X = torch.tensor([[1., nan, -inf, inf, -0., 0., nan, 2], [3, 1, 2, 1, 3, 5, 5, 0]])
SAME = """x.sort(stable=True) | x.sort(descending=True, stable=True) | x.topk(8)[0] | x.topk(3, largest=False)[0] | x.median() | x.median(1)
x.nanmedian() | x.nanmedian(1) | x.unique() | x.quantile(0.3, 1) | x.nanquantile(0.3, 1) | x[1].mode() | x[0, 0].mode()
x[1].long().bincount() | x[1].long().bincount(x[0]) | x[1].long().bincount(minlength=9) | (-x[1]).long().bincount() | x.long().bincount()
torch.searchsorted(x[1].sort()[0], x[0]) | torch.bucketize(x, torch.tensor([0., 1, 2], device=x.device), right=True)
torch.bucketize(1.5, torch.tensor([0., 1, 2], device=x.device)) | torch.isin(x, torch.arange(3., device=x.device))
torch.isin(x, 5) | torch.isin(5, x) | torch.isin(x[1].long(), torch.arange(3., device=x.device), invert=True)
torch.histc(x[1], 5) | torch.histc(x[1], 4, 1, 3) | torch.histc(x[1], 4, 3, 1) | torch.histc(x[1], 0) | torch.histc(x[1] * 0 + 2, 3)
torch.histogram(x[1], 3) | torch.histogram(x[1], torch.tensor([0., 2, 4], device=x.device), density=True)
torch.histogram(x[1], 4, range=(1., 4.), weight=x[1]) | torch.histogramdd(x[1].reshape(4, 2), [2, 3])
x.unique_consecutive(return_counts=True) | x[1].unique(return_inverse=True, return_counts=True) | x[1].bool().unique(return_counts=True)
torch.unique(x[1].reshape(4, 2), dim=0, return_inverse=True, return_counts=True) | x[:0].unique(return_counts=True)
torch.unique_consecutive(x[1].reshape(4, 2), dim=1, return_inverse=True, return_counts=True) | x[1].argsort(descending=True, stable=True)
x[0, 0].sort() | x[0, 0].topk(1) | x[0, 0].median(0) | x[0, 0].kthvalue(1) | x[:, :0].median() | x[:, :0].median(1) | x.topk(9) | x.kthvalue(9)
x[1].bool().topk(1) | x[1].to(torch.complex64).sort() | x.sort(2) | torch.searchsorted(x[1].sort()[0], x[0].double())"""


@pytest.mark.parametrize("expression", [e.strip() for line in SAME.splitlines() for e in line.split("|")])
@pytest.mark.filterwarnings("ignore")
def test_same_value_or_same_error(expression):
    results = []
    for x in (X, X.to(DEV)):
        try:
            results.append(eval(expression, {"x": x, "torch": torch}))
        except (RuntimeError, IndexError, ValueError, TypeError) as e:
            results.append(e)
    ref, got = results
    if isinstance(ref, Exception):
        assert type(got) is type(ref), (got, ref)
    else:
        oracle.assert_same(got, ref)


def test_long_boundaries_search_in_steps():
    torch.manual_seed(0)
    for n in (1, 127, 128, 129, 1000):
        b, x = torch.randn(3, n).sort(-1)[0], torch.randn(3, 20)
        x[:, 0], x[:, 1], x[:, 2] = b[:, 0], b[:, -1], nan
        for right in (False, True):
            oracle.assert_same(torch.searchsorted(b.to(DEV), x.to(DEV), right=right), torch.searchsorted(b, x, right=right))
        oracle.assert_same(torch.isin(x.to(DEV), b.to(DEV)), torch.isin(x, b))


def test_kth_and_mode_stand_where_they_say():
    torch.manual_seed(0)
    x = torch.randint(0, 9, (6, 30))
    for pick in (lambda t: t.kthvalue(7), lambda t: t.mode()):
        values, index = pick(x.to(DEV))
        oracle.assert_same(values, pick(x)[0])
        oracle.assert_same(x.gather(1, index.cpu()[:, None])[:, 0], values.cpu())


def test_many_bins():
    x = torch.randint(0, 5000, (3000,))
    oracle.assert_same(x.to(DEV).bincount(), x.bincount())
    y = torch.randn(3000)
    oracle.assert_same(y.to(DEV).histc(4000), y.histc(4000))
