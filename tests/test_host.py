"""Ops that run on the host: warned once, counted, refusable, and a callback inside jitted functions."""

import warnings

import pytest
import torch

import torchax_tpu
from torchax_tpu import metrics


def _factor(device):
    a = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)).to(device)
    a = a + a.mT
    factors, pivots = torch.linalg.ldl_factor(a)
    return factors, pivots, torch.linalg.ldl_solve(factors, pivots, a @ torch.ones(4, 1, device=device))


def test_eager_is_counted():
    metrics.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = _factor("jax")
    for a, b in zip(ours, _factor("cpu")):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)
    assert metrics.host_calls == {"aten.linalg_ldl_factor_ex.default": 1, "aten.linalg_ldl_solve.default": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_a_callback_under_jit(dtype):
    """The host computes at every call, from the values of that call."""
    def solve(a, b):
        factors, pivots = torch.linalg.ldl_factor(a * 2)
        return torch.linalg.ldl_solve(factors, pivots, b) + 1, pivots

    jitted = torchax_tpu.jit(solve)
    metrics.reset()
    for seed in range(3):
        a, b = torch.randn(2, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(seed)), torch.ones(2, 4, 1, dtype=dtype)
        a = a + a.mT
        x, pivots = jitted(a.to("jax"), b.to("jax"))
        ref, ref_pivots = solve(a, b)
        assert x.dtype == dtype and pivots.dtype == torch.int32 and torch.equal(pivots.cpu(), ref_pivots)
        torch.testing.assert_close(x.cpu(), ref, rtol=1e-3, atol=1e-3)
    assert metrics.host_calls["aten.linalg_ldl_solve.default"] == 3


def test_refused():
    a = torch.eye(3, device="jax")
    torchax_tpu.config.fallback = "error"
    try:
        with pytest.raises(torchax_tpu.errors.FallbackError, match="linalg_ldl_factor"):
            torch.linalg.ldl_factor(a)
        with pytest.raises(torchax_tpu.errors.FallbackError, match="linalg_ldl_factor"):
            torchax_tpu.jit(torch.linalg.ldl_factor)(a)
    finally:
        torchax_tpu.config.fallback = "warn"
