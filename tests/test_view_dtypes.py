"""x.view(dtype): the same bytes as another dtype, whatever other dtypes and tensors of the same geometry were viewed before."""

import itertools

import pytest
import torch

DEVICE = "jax"
DTYPES = (torch.float32, torch.int32, torch.float64, torch.complex64, torch.complex128, torch.int16, torch.bfloat16, torch.uint8,
          torch.float8_e5m2)
PARTS = (lambda t: t, lambda t: t[..., 8:], lambda t: t[..., ::2])


def seen(base, part, dtype):
    """What a view shows, or the class of its error."""
    try:
        v = part(base).view(dtype)
    except RuntimeError as error:
        return type(error).__name__
    return v.shape, v.stride(), v.storage_offset(), v.dtype, v.cpu().contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_every_pair(source):
    base = (torch.arange(32) % 7).to(torch.float32).to(source).reshape(2, 16)
    device = base.to(DEVICE)
    for part, target in itertools.product(PARTS, DTYPES):
        assert seen(device, part, target) == seen(base, part, target), target


def test_geometry_is_not_shared_between_dtypes():
    # One geometry, many dtypes in turns: neither the source's nor the result's dtype of an earlier view may stick.
    order = (torch.float32, torch.int32, torch.int16, torch.float32, torch.int32)
    for _, source, target in itertools.product(range(2), order, order):
        x = torch.arange(1, 5).to(torch.float32).to(source) * 3
        y = x.to(DEVICE)
        assert y.view(target).dtype is target and torch.equal(y.view(target).cpu(), x.view(target))
        assert torch.equal((y.view(target)[1:] + 1).cpu(), x.view(target)[1:] + 1)
        assert y.view(4).dtype is source and y.view(2, 2).t().dtype is source
        assert torch.equal(y.view(2, 2).view(target).cpu(), x.view(2, 2).view(target))


def test_same_geometry_with_and_without_a_dtype():
    for source in (torch.float32, torch.int32):
        y = torch.arange(4).to(source).to(DEVICE)
        assert [v.dtype for v in (y[1:], y.view(torch.int32)[1:], y.unfold(0, 2, 1))] == [
            source, torch.int32, source]
        assert torch.view_as_real(torch.complex(y.float(), y.float())).dtype is torch.float32


@pytest.mark.parametrize("source,target", [(torch.float32, torch.int32), (torch.int64, torch.float32), (torch.complex64, torch.float32),
                                           (torch.complex128, torch.complex64), (torch.bfloat16, torch.uint8)], ids=str)
def test_writes_land_in_the_bytes(source, target):
    both = []
    for device in ("cpu", DEVICE):
        x = (torch.arange(8) % 5).to(torch.float32).to(source).to(device).reshape(2, 4)
        for _ in range(2):
            v = x.view(target)
            v[1, 1:] = v[0, 1:].clone()
            v.view(source)[0, 0] = 3
            x[1, 0] = 2
        both.append((x.cpu().view(torch.uint8).tolist(), v.cpu().view(torch.uint8).tolist()))
    assert both[0] == both[1]
