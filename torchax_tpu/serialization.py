"""Copying, pickling, saving and loading of device tensors.

A saved file is what torch writes for any accelerator: one record per storage, tagged with its
device, and per tensor its geometry. So it loads without this package (``map_location="cpu"``),
aliases stay aliases, and a CPU file loads onto the device (``map_location="jax"``).
"""

import copy
import math
import weakref
from collections import OrderedDict

import numpy as np
import torch

from . import convert, copies, device, dtypes, storage, untyped
from . import tensor as T
from .storage import Cell, View


class FileStorage(torch.UntypedStorage):
    """Bytes on their way to or from a file: a real CPU storage which says that it is on the device."""

    @classmethod
    def tag(cls, plain, device):
        """``plain`` (a CPU storage) itself, seen as one on ``device``."""
        plain.__class__ = cls
        plain._on, plain._cell = device, None
        return plain

    @property
    def device(self):
        """The device that the bytes come from or go to."""
        return self._on

    def bytes(self):
        """The bytes: a flat uint8 CPU tensor over the storage's memory."""
        return torch.empty(0, dtype=torch.uint8).set_(self)

    def cpu(self):
        """A plain CPU storage with a copy of the bytes."""
        return self.bytes().clone().untyped_storage()

    clone = cpu

    def tolist(self):
        """The bytes as a list of numbers."""
        return self.bytes().tolist()

    def __repr__(self):
        return f"FileStorage({self.nbytes()} bytes for {self._on})"

    def __reduce_ex__(self, protocol):
        return storage_from_bytes, (self.bytes().numpy().tobytes(), str(self._on))

    def _set_from_file(self, *args):
        # The legacy format fills storages after the tensors over them were made.
        super()._set_from_file(*args)
        if self._cell is not None:
            cell = self._cell
            cell.array = self._array(cell.array.dtype, cell.array.shape, cell.perm)
            cell.version += 1
        return self

    def _array(self, dtype, size, perm):
        values = self.bytes().numpy()
        values = values[: len(values) // dtype.itemsize * dtype.itemsize].view(dtype)
        if perm is None:
            values = values.reshape(size)
        else:
            values = values.reshape([size[p] for p in perm]).transpose(np.argsort(perm))
        return convert.numpy_to_array(values, self._on.index)

    def cell_for(self, dtype, size, stride, offset):
        """The device's copy of the bytes, made once: shaped as the first tensor over them if it covers them all."""
        if self._cell is None:
            dtype = dtypes.to_jax(dtype)
            count, perm = self.nbytes() // dtype.itemsize, None
            if offset or math.prod(size) != count or not count:
                size = (count,)
            elif stride != T.contiguous(size):
                perm = tuple(sorted(range(len(size)), key=lambda i: (-stride[i], -size[i], i)))
                if T.permuted_strides(size, perm) != stride:
                    size, perm = (count,), None
            self._cell = Cell(self._array(dtype, size, perm), dtype in dtypes.WIDE, self._on)
            self._cell.perm = perm
        return self._cell


_outgoing = weakref.WeakKeyDictionary()  # cell -> (version, weakref of the FileStorage made for saving)


def memory(cell):
    """The bytes of a cell in memory order: a flat uint8 CPU tensor."""
    array = storage.cell_array(cell)
    values = np.asarray(copies._concrete(array, "saving or pickling"))
    if cell.perm is not None:
        values = values.transpose(cell.perm)
    flat = np.array(values, order="C", copy=True).reshape(-1)
    return torch.from_numpy(flat.view(np.uint8))


def outgoing(cell):
    """The FileStorage of a cell, the same one for all tensors saved together."""
    version, held = _outgoing.get(cell, (None, None))
    found = held() if held is not None and version == cell.version else None
    if found is None:
        found = FileStorage.tag(memory(cell).untyped_storage(), cell.device)
        _outgoing[cell] = (cell.version, weakref.ref(found))
    return found


def storage_from_bytes(data, location):
    """Unpickle a storage; imports this package and brings the device up in the process that does it."""
    device.load()
    plain = torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage() if data else torch.UntypedStorage(0)
    return FileStorage.tag(plain, T.place(location))


# ---------------------------------------------------------------- torch.save, torch.load


def tag(obj):
    """torch.save's question: where does a storage live? None if it isn't ours."""
    return str(obj.device) if isinstance(obj, (FileStorage, untyped.UntypedStorage)) else None


def restore(plain, location):
    """torch.load's question: bring a CPU storage to ``location``. None if that isn't ours."""
    if isinstance(plain, FileStorage):
        return plain
    return FileStorage.tag(plain, T.place(location))


_OWN = ("_cell", "_view", "_is_param")


def attributes(tensor):
    """What users put on the tensor object."""
    return {k: v for k, v in tensor.__dict__.items() if k not in _OWN and not k.startswith("_sym_")}


def reduce_ex(self, protocol):
    """Pickling and torch.save: torch's own records for strided tensors, so any torch can load them."""
    state = attributes(self)
    if getattr(self, "_is_param", False):
        made = torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())
    else:
        made = _reduce_plain(self)
        cls = type(self).__dict__.get("_torch_class")  # a user's subclass, see moves.py
        if cls is not None:
            return torch._tensor._rebuild_from_type_v2, (made[0], cls, made[1], state)
    return (rebuild_with_state, (*made, state)) if state else made


def _reduce_plain(self):
    source = self
    if self.is_conj() or self.is_neg():
        source = self.detach().resolve_conj().resolve_neg()
    if not self.is_leaf and self.requires_grad:
        torch.utils.hooks.warn_if_has_hooks(self)
    size, stride, offset = T.geometry(source)
    untyped = outgoing(source._cell)
    common = (offset, size, stride, self.requires_grad, OrderedDict())
    if self.dtype in torch.storage._new_dtypes():
        held = torch.TypedStorage(wrap_storage=untyped, dtype=torch.uint8, _internal=True)
        return torch._utils._rebuild_tensor_v3, (held, *common, self.dtype)
    held = torch.TypedStorage(wrap_storage=untyped, dtype=self.dtype, _internal=True)
    return torch._utils._rebuild_tensor_v2, (held, *common)


def rebuild_with_state(function, args, state):
    """A tensor and the attributes it had."""
    tensor = function(*args)
    for name, value in state.items():
        setattr(tensor, name, value)
    return tensor


# ---------------------------------------------------------------- copy.deepcopy


def _twin(tensor, cell):
    """A leaf with the geometry of ``tensor`` over ``cell``."""
    size, stride, offset = T.geometry(tensor)
    out = T._make(type(tensor), size, stride, offset, dtype=tensor.dtype, device=cell.device)
    out._cell, view = cell, tensor._view
    out._view = None if view is None else View(view.size, view.stride, view.offset, view.dtype, view.flip)
    torch._C._set_conj(out, tensor.is_conj())
    torch._C._set_neg(out, tensor.is_neg())
    return out


def shallow_copy(self):
    """copy.copy: another leaf over the same storage, with the same attributes."""
    out = _twin(self, self._cell)
    if self.requires_grad:
        out.requires_grad_()
    if getattr(self, "_is_param", False):
        out._is_param = True
    out.__dict__.update(attributes(self))
    return out


def deepcopy(self, memo):
    """A copy with its own storage; tensors that alias each other alias in the copy too."""
    if not self.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at "
                           "the moment.")
    if id(self) in memo:
        return memo[id(self)]
    if getattr(self, "_is_param", False):  # torch copies a Parameter's values only
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            out = self.detach().clone(memory_format=torch.preserve_format)
        out.__class__, out._is_param = type(self), True
        memo[id(self)] = out.requires_grad_(self.requires_grad)
        return out
    out = _twin(self, copies.copy_cell(self._cell, memo))
    if self.is_conj() or self.is_neg():
        out = out.resolve_conj().resolve_neg()
    memo[id(self)] = out
    if self.requires_grad:
        out.requires_grad_()
    if self.grad is not None:
        out.grad = copy.deepcopy(self.grad, memo)
    for name, value in attributes(self).items():
        setattr(out, name, copy.deepcopy(value, memo))
    return out


# ---------------------------------------------------------------- DataLoader workers


def collate(batch, *, collate_fn_map=None):
    """Stack device tensors; torch's own way would put them into shared host memory."""
    return torch.stack(batch, 0)


torch.utils.data._utils.collate.default_collate_fn_map[T.Tensor] = collate
