"""Storages as objects, pinned memory, and which tensors share what: as on the CPU."""

import copy
import io

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
    assert s.get_device() == x.device.index
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


def _ptr(t):
    return t.untyped_storage().data_ptr()


def _through(how, objects):
    if how == "deepcopy":
        return copy.deepcopy(objects)
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file)


@BOTH
@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_aliases_stay_aliases(how, device):
    x = torch.arange(6.0, device=device).view(2, 3)
    a, row, t, again, wide = _through(how, [x, x[1:], x.t(), x, x[:1].expand(2, 3)])
    assert a is again and len({_ptr(v) for v in (a, row, t, wide)}) == 1 and _ptr(a) != _ptr(x)
    assert row.storage_offset() == 3 and t.stride() == (1, 3) and wide.stride() == (0, 1) and row.untyped_storage().nbytes() == 24
    row.fill_(9)
    assert a.tolist() == [[0.0, 1.0, 2.0], [9.0] * 3] and x[1, 0].item() == 3.0
    alone = _through(how, x[:, 1:])
    assert alone.stride() == (3, 1) and alone.storage_offset() == 1 and alone.untyped_storage().nbytes() == 24
    assert not alone._is_view()


@BOTH
def test_shallow_copies_share(device):
    x = torch.zeros(2, 3, device=device)
    x.note = ["kept"]
    c = copy.copy(x)
    assert c is not x and _ptr(c) == _ptr(x) and c.note is x.note
    c.add_(1)
    assert x.tolist() == [[1.0] * 3] * 2
    view = copy.copy(x[:, 1:])
    view.zero_()
    assert x.tolist() == [[1.0, 0.0, 0.0]] * 2 and view.stride() == (3, 1)
    p = copy.copy(torch.nn.Parameter(x))
    assert isinstance(p, torch.nn.Parameter) and p.requires_grad and p.is_leaf and p.grad is None


@BOTH
def test_deep_copies_of_parameters_are_their_values_only(device):
    p = torch.nn.Parameter(torch.ones(4, device=device)[1:])
    p.sum().backward()
    p.note = 1
    q = copy.deepcopy(p)
    assert isinstance(q, torch.nn.Parameter) and q.requires_grad and q.grad is None and not hasattr(q, "note")
    assert q.untyped_storage().nbytes() == 12 and q.tolist() == [1.0] * 3
    x = torch.ones(2, device=device, requires_grad=True)
    x.sum().backward()
    assert copy.deepcopy(x).grad.tolist() == [1.0, 1.0]
    z = torch.tensor([1 + 2j], device=device).conj()
    assert not copy.deepcopy(z).is_conj() and copy.deepcopy(z).tolist() == [1 - 2j]
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)
    y, s = copy.deepcopy([x, x.untyped_storage()])
    assert s.data_ptr() == y.data_ptr()


@BOTH
def test_who_shares_with_whom(device):
    x = torch.arange(6.0, device=device).view(2, 3)
    alias = torch._C._is_alias_of
    assert alias(x, x[1:]) and alias(x, x.detach()) and not alias(x, x.clone()) and not alias(x, torch.ones(2))
    assert x.is_set_to(x.detach()) and x.is_set_to(x[:]) and not x.is_set_to(x[1:]) and not x.is_set_to(x.clone())
    before = x.data_ptr()
    x.add_(1)
    assert x.data_ptr() == before == x.t().data_ptr() and x[1].data_ptr() == before + 12
    x.data = torch.ones_like(x)
    assert x.data_ptr() != before
    assert x.expand(4, 2, 3).untyped_storage().nbytes() == 24 and (x > 0).untyped_storage().nbytes() == 6


def test_a_storage_alone_is_not_saved():
    with pytest.raises(TypeError, match="save a tensor over it"):
        torch.save(torch.ones(2, device=DEVICE).untyped_storage(), io.BytesIO())
