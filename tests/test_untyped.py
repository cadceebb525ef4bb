"""Storages as objects, pinned memory, and which tensors share what: as on the CPU."""

import copy

import pytest
import torch

DEVICE = "jax"
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
BOTH = pytest.mark.parametrize("device", ["cpu", DEVICE])


@BOTH
def test_untyped_storage(device):
    x = torch.tensor([1, 2, 513], dtype=torch.int16, device=device)
    s = x[1:].untyped_storage()
    assert len(s) == s.size() == s.nbytes() == 6 and s.element_size() == 1 and s.device == x.device
    assert s.tolist() == list(s) == [1, 0, 2, 0, 1, 2] and s[2] == 2 and s[1:3].tolist() == [0, 2]
    s[0] = 7
    assert x.tolist() == [7, 2, 513] and s.data_ptr() == x.data_ptr() and s._cdata == x.untyped_storage()._cdata
    clone, other = s.clone(), copy.deepcopy(s)
    s.fill_(0)
    assert x.tolist() == [0, 0, 0] and clone.tolist() == other.tolist() == [7, 0, 2, 0, 1, 2]
    s.copy_(clone)
    assert x.tolist() == [7, 2, 513] and clone.data_ptr() != s.data_ptr()
    assert not (s.is_pinned() or s.is_cuda or s.is_shared() or s.is_sparse) and s.untyped() is s and s.filename is None
    assert type(s.cpu()) is torch.UntypedStorage and s.cpu().tolist() == s.tolist()
    s.resize_(8)
    assert s.nbytes() == 8 and x.tolist() == [7, 2, 513]
    assert str(s).endswith(f"[torch.storage.UntypedStorage(device={x.device}) of size 8]")


@BOTH
def test_typed_storage(device):
    x = torch.arange(4.0, device=device).view(2, 2)
    s = x[1].storage()
    assert isinstance(s, torch.TypedStorage) and s.dtype is torch.float32 and s.device == x.device
    assert len(s) == s.size() == 4 and s.nbytes() == 16 and s.element_size() == 4
    assert s.data_ptr() == x.data_ptr() == x[1].data_ptr() - 8
    assert s[3] == 3.0 and s[-1] == 3.0 and s.tolist() == [0.0, 1.0, 2.0, 3.0] == list(s)
    with pytest.raises(RuntimeError, match="slices"):
        s[1:]
    with pytest.raises(IndexError):
        s[4]
    s[1] = 9
    assert x.tolist() == [[0.0, 9.0], [2.0, 3.0]] and s.int().tolist() == [0, 9, 2, 3] and s.cpu().device.type == "cpu"
    y = torch.tensor([], device=device).set_(s, 1, (2,), (2,))
    y.add_(1)
    assert x.tolist() == [[0.0, 10.0], [2.0, 4.0]]
    with pytest.raises(RuntimeError, match="Storage"):
        torch.tensor([], dtype=torch.int32, device=device).set_(s)
    s.fill_(5)
    assert x.tolist() == [[5.0, 5.0], [5.0, 5.0]] and s.clone().data_ptr() != s.data_ptr()
    s.resize_(6)
    assert s.size() == 6 and x.tolist() == [[5.0, 5.0], [5.0, 5.0]]


def test_pinned_memory_is_ordinary_memory(recwarn):
    x, y = torch.ones(2), torch.ones(2, device=DEVICE)
    pinned = x.pin_memory()
    assert pinned.device.type == "cpu" and pinned.tolist() == [1.0, 1.0] and not x.is_pinned() and not y.is_pinned()
    assert pinned.to(DEVICE, non_blocking=True).tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        y.pin_memory()
    assert torch.ones(2, device=DEVICE, pin_memory=False).device.type == DEVICE
    loader = torch.utils.data.DataLoader([{"x": x, "n": 3}] * 2, batch_size=2, pin_memory=True)
    batch, = loader
    assert batch["x"].tolist() == [[1.0, 1.0]] * 2 and batch["n"].tolist() == [3, 3]
    assert not [w for w in recwarn if "runs on the host" in str(w.message)]
