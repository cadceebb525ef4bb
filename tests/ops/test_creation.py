"""Factories: dtypes as torch infers them, values, errors, out=."""

import math

import numpy as np
import pytest
import torch

from tests import ledger, oracle

DEV = oracle.DEVICE
NAMES = ["arange", "linspace", "logspace", "eye", "full", "full_like", "ones", "ones_like", "zeros", "zeros_like", "new_zeros", "new_ones", "new_full", "scalar_tensor", "fill", "zero_", "linspace.tensor_overload", "complex", "polar", "signal.windows.hann", "signal.windows.kaiser", "vander"]
CASES = [("forward", n, "float32") for n in NAMES if oracle.ops([n])] + [
    ("forward", n, "int64") for n in ("arange", "linspace", "full_like", "new_full", "tril_indices", "fill", "eye")] + [
    ("out", n, "float32") for n in ("arange", "linspace", "logspace", "eye")]

SAME = """full((2,), 3, device=d) | full((2,), True, device=d) | full((2,), 2.5, device=d) | full((2,), 1j, device=d) | full((2,), 2**40, device=d)
full((2,), 300, dtype=torch.uint8, device=d) | full((2,), -1, dtype=torch.uint8, device=d) | full((2,), 1e9, dtype=torch.float16, device=d)
full_like(torch.ones(2, device=d), 3) | full_like(torch.ones(2, dtype=torch.int32, device=d), 2.7)
arange(5, device=d) | arange(5., device=d) | arange(1, 2, 0.1, device=d) | arange(10, 0, -3, device=d) | arange(0, 1, 0.1, dtype=torch.bfloat16, device=d)
arange(True, device=d) | arange(5, 0, device=d) | arange(0, 5, 0, device=d) | arange(2**40, 2**40 + 3, device=d) | arange(0, inf, device=d)
arange(3, dtype=torch.bool, device=d) | arange(2.5, 7, dtype=torch.int64, device=d) | range(1, 4, device=d)
linspace(0, 1, 7, device=d) | linspace(0, 10, 5, dtype=torch.int64, device=d) | linspace(3, -3, 9, dtype=torch.bfloat16, device=d)
linspace(0, 1, 1, device=d) | linspace(0, 1, 0, device=d) | linspace(0, 1, -1, device=d) | linspace(0, 1j, 4, device=d)
linspace(torch.tensor(0., device=d), torch.tensor(2., device=d), 4, device=d) | linspace(torch.tensor([0.], device=d), 2, 4, device=d)
logspace(0, 2, 5, device=d) | logspace(0, 3, 4, base=2, dtype=torch.int64, device=d) | eye(3, device=d) | eye(2, 3, dtype=torch.int64, device=d)
eye(-1, device=d) | scalar_tensor(3, device=d) | zeros(2, -1, device=d) | zeros((), device=d) | ones(2, dtype=torch.complex64, device=d)
tril_indices(3, 4, device=d) | triu_indices(3, 4, 1, device=d, dtype=torch.int32) | tril_indices(-1, 4, device=d)
complex(torch.ones(2, device=d), torch.ones(2, device=d)) | complex(torch.ones(2, device=d), torch.ones(2, device=d).double())
polar(torch.ones(2, device=d), torch.ones(2, device=d)) | hamming_window(7, device=d) | hann_window(7, periodic=False, device=d)
bartlett_window(6, device=d) | blackman_window(6, device=d) | kaiser_window(6, device=d) | kaiser_window(9, False, 5.0, device=d)
hann_window(1, device=d) | hann_window(0, device=d) | hann_window(5, dtype=torch.int64, device=d) | tensor([1, 2], device=d) | tensor([1., 2], device=d)
tensor(3, device=d) | tensor([[True]], device=d) | tensor([], device=d) | as_tensor([1, 2.5], device=d) | tensor(1j, device=d)
as_tensor(np.arange(3), device=d) | from_numpy(np.arange(3.)).to(d) | ones(2, device=d).new_zeros(3) | ones(2, device=d).new_tensor([1, 2])
ones(2, device=d).new_ones(3, dtype=torch.int64) | ones(2, device=d).new_full((2,), 7) | ones(2, device=d).fill_(3)
ones(2, device=d).fill_(torch.tensor(3)) | ones(2, device=d).fill_(torch.tensor([3], device=d)) | ones(2, dtype=torch.int64, device=d).fill_(2.9)
ones(2, dtype=torch.uint8, device=d).fill_(300) | ones(2, dtype=torch.bool, device=d).fill_(5) | ones(2, device=d).fill_(1j)
ones(2, 2, device=d).t()[0].zero_() | zeros(3, out=torch.empty(0, device=d)) | ones(3, out=torch.empty(3, dtype=torch.int64, device=d))
full((3,), 2, out=torch.empty(0, device=d)) | arange(3, out=torch.empty(0, dtype=torch.int64, device=d)) | arange(3, out=torch.empty(0, device=d))
linspace(0, 1, 3, out=torch.empty(0, device=d)) | eye(3, out=torch.empty(0, device=d)) | zeros_like(torch.ones(2, 2, device=d).t()).stride()
ones_like(torch.ones(2, 3, device=d).t()).stride() | zeros_like(torch.ones(2, device=d), dtype=torch.int64) | vander(torch.arange(3, device=d))
cartesian_prod(torch.arange(3, device=d), torch.arange(2, device=d)) | signal.windows.gaussian(5, device=d)"""


@pytest.mark.parametrize("mode,name,dtype", CASES)
def test_op_database(mode, name, dtype):
    op = oracle.ops([name])[0]
    n = ledger.check(mode, name, dtype, lambda **kw: oracle.CHECKS[mode](op, getattr(torch, dtype), limit=8, **kw))
    assert n is None or n > 0


@pytest.mark.parametrize("expression", [e.strip() for line in SAME.splitlines() for e in line.split(" | ")])
@pytest.mark.filterwarnings("ignore")
def test_same_value_or_same_error(expression):
    results = []
    for d in ("cpu", DEV):
        try:
            results.append(eval(f"torch.{expression}", {"d": d, "torch": torch, "np": np, "inf": math.inf}))
        except (RuntimeError, IndexError, ValueError, TypeError) as e:
            results.append(e)
    ref, got = results
    if isinstance(ref, Exception):
        assert type(got) is type(ref), (got, ref)
    else:
        oracle.assert_same(got, ref)
        if isinstance(got, torch.Tensor):
            assert got.device.type == DEV


def test_default_dtype_is_followed():
    torch.set_default_dtype(torch.float64)
    try:
        for make in (torch.zeros, torch.ones, torch.rand, torch.randn):
            assert make(2, device=DEV).dtype == torch.float64
        assert torch.full((2,), 1.5, device=DEV).dtype == torch.float64
        assert torch.arange(2.0, device=DEV).dtype == torch.linspace(0, 1, 3, device=DEV).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_ranges_of_new_length_agree():
    for k in range(7):
        oracle.assert_same(torch.arange(k, 3 * k, 2, device=DEV), torch.arange(k, 3 * k, 2))
