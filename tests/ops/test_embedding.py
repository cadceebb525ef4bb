"""Embedding, bags, their gradients, max_norm and one_hot."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests import ledger, oracle

NAMES = ("nn.functional.embedding", "nn.functional.embedding_bag", "nn.functional.one_hot")
CASES = [
    (o, m)
    for o in oracle.ops()
    if oracle.full_name(o) in NAMES
    for m in ("forward", "grad")
    if oracle.applicable(o, m, torch.float32)
]


@pytest.mark.parametrize("op,mode", CASES, ids=[f"{oracle.full_name(o)}-{m}" for o, m in CASES])
def test_op_db(op, mode):
    def run(**tolerance):
        oracle.CHECKS[mode](op, torch.float32, **tolerance)

    ledger.check(mode, oracle.full_name(op), "float32", run)


def weight(device, dtype=torch.float32):
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).to(dtype).to(device).requires_grad_()


@pytest.mark.parametrize("padding_idx,by_freq", list(itertools.product((None, 2, -1), (False, True))))
def test_embedding_gradient(padding_idx, by_freq):
    results = []
    for device in ("cpu", "jax"):
        w = weight(device)
        out = F.embedding(torch.tensor([[1, 2, 2], [6, 1, 1]]).to(device), w, padding_idx, scale_grad_by_freq=by_freq)
        out.backward(torch.arange(18.0).reshape(2, 3, 3).to(device))
        results.append((out, w.grad))
    oracle.assert_same(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_embedding_dtypes(dtype):
    results = []
    for device in ("cpu", "jax"):
        w = weight(device, dtype)
        out = F.embedding(torch.tensor([1, 2, 2, 0]).int().to(device), w)
        out.sum().backward()
        results.append((out, w.grad))
    oracle.assert_same(results[1], results[0])


BAGS = list(itertools.product(("sum", "mean", "max"), (None, 2), (False, True), (False, True)))


@pytest.mark.parametrize("mode,padding_idx,weighted,last", BAGS)
def test_bags(mode, padding_idx, weighted, last):
    if weighted and mode != "sum":
        weighted = False
    results = []
    for device in ("cpu", "jax"):
        w = weight(device)
        s = torch.linspace(0.5, 2, 8).to(device).requires_grad_() if weighted else None
        offsets = torch.tensor([0, 3, 3, 6] + [8] * last).to(device)
        out = F.embedding_bag(
            torch.tensor([1, 2, 2, 0, 5, 6, 2, 1]).to(device),
            w,
            offsets,
            mode=mode,
            padding_idx=padding_idx,
            per_sample_weights=s,
            include_last_offset=last,
        )
        out.backward(torch.arange(1.0, 1 + out.numel()).reshape(out.shape).to(device))
        results.append((out, w.grad, s.grad if weighted else None))
    oracle.assert_same(results[1], results[0])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_max_norm_renormalises_in_place(norm_type):
    results = []
    for device in ("cpu", "jax"):
        w = weight(device).detach() * 3
        out = F.embedding(torch.tensor([0, 3, 3]).to(device), w, max_norm=1.0, norm_type=norm_type)
        results.append((out, w))
    oracle.assert_same(results[1], results[0])


def test_one_hot():
    for k in (-1, 9):
        oracle.assert_same(
            F.one_hot(torch.tensor([[0, 3], [2, 1]]).to("jax"), k), F.one_hot(torch.tensor([[0, 3], [2, 1]]), k)
        )
