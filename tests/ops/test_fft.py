"""Fourier transforms against CPU torch."""

import pytest
import torch

from tests import ledger, oracle

NAMES = sorted({oracle.full_name(o) for o in oracle.ops() if o.name.startswith("fft.")} | {"stft", "istft"})


@pytest.mark.parametrize("mode", ["forward", "grad"])
@pytest.mark.parametrize("name", NAMES)
def test_op_database(mode, name):
    op, = oracle.ops([name])
    dtype = torch.complex64 if torch.float32 not in op.supported_dtypes("cpu") else torch.float32
    assert oracle.applicable(op, mode, dtype) or mode == "grad"
    if oracle.applicable(op, mode, dtype):
        ledger.check(mode, name, str(dtype)[6:], lambda **kw: oracle.CHECKS[mode](op, dtype, limit=8, **kw))


@pytest.mark.parametrize("norm", ["forward", "backward", "ortho"])
@pytest.mark.parametrize("n", [4, 5, 9])
def test_lengths_and_norms(norm, n):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    for device in ("cpu", oracle.DEVICE):
        y = x.to(device)
        out = (torch.fft.rfft(y, n, dim=1, norm=norm), torch.fft.irfft(torch.fft.rfft(y, dim=1), n, dim=1, norm=norm),
               torch.fft.fftn(y, norm=norm), torch.fft.ifft(y, n, norm=norm))
        if device == "cpu":
            expected = out
    oracle.assert_same(out, expected)


def test_more_than_three_axes_and_round_trip():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 3, 2, dtype=torch.complex64)
    got = torch.fft.fftn(x.to(oracle.DEVICE))
    oracle.assert_same(got, torch.fft.fftn(x), rtol=1e-4, atol=1e-4)
    oracle.assert_same(torch.fft.ifftn(got), x, rtol=1e-4, atol=1e-5)


def test_frequencies():
    for fn in (torch.fft.fftfreq, torch.fft.rfftfreq):
        oracle.assert_same(fn(7, 0.5, device=oracle.DEVICE), fn(7, 0.5))
