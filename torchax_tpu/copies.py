"""Ops that act on tensors rather than arrays: copies across devices, allocation, metadata mutation."""

import gc
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import convert, dtypes, errors, narrow, overlap, storage, strides
from . import tensor as T
from .registry import aten, special
from .storage import tracing


def _concrete(array, what):
    if narrow.is_traced(array):
        raise errors.TraceError(
            f"{what} needs the values of a tensor while a program is being traced. Keep values on the device "
            "(torch.where, torch.cond, tensor arithmetic), or move this line out of the jitted function.")
    return array


def to_cpu(tensor, what="copying to the CPU"):
    """A CPU tensor with the same values; dense permuted strides are kept, as torch does."""
    out = convert.array_to_cpu(_concrete(storage.read(tensor), what))
    if not tensor.is_contiguous() and tensor.numel():
        perm = _format_perm(tensor.shape, None, tensor)
        if perm is not None:
            fresh = torch.empty_strided(tensor.shape, T.permuted_strides(tuple(tensor.shape), perm), dtype=out.dtype)
            return fresh.copy_(out)
    return out


def _format_perm(size, memory_format, source=None):
    """Axes order of memory that a memory_format asks for (None: row-major)."""
    if memory_format in (None, torch.preserve_format):
        if source is None or source.is_contiguous():
            return None
        geometry = T.geometry(source)[:2] if isinstance(source, T.Tensor) else (tuple(source.shape), source.stride())
        return strides.result_order(tuple(size), (geometry,))
    return T.format_order(len(size), memory_format)


def owned(array, device, perm=None):
    """A tensor that owns ``array``; with ``perm`` its memory runs through the axes in that order."""
    return T.wrap_permuted(array, device, perm)


def adopt(target, source):
    """Make ``target`` (same object) show ``source``'s geometry and storage: set_, resize_, .data =."""
    torch._C.TensorBase.data.__set__(target, source)
    target._cell, target._view = source._cell, source._view


# ---------------------------------------------------------------- allocation


@special(aten.empty.memory_format)
def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    _check_layout(layout)
    return _allocate(tuple(size), dtype, device, _format_perm(size, memory_format))


def _check_layout(layout):
    if layout not in (None, torch.strided):
        raise NotImplementedError(f"torchax_tpu holds dense tensors only; layout={layout} is not supported. "
                                  "Keep sparse tensors on the CPU, or use .to_dense().")


def _allocate(size, dtype, device, perm=None):
    for n in size:
        if n < 0:
            raise RuntimeError(f"Trying to create tensor with negative dimension {n}: {list(size)}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = T.place(device)
    out = T.lazy(size, dtype, device, None if perm is None else T.permuted_strides(size, perm))
    out._cell.perm = perm
    return out


@special(aten.empty_strided.default)
def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    size, stride = tuple(size), tuple(stride)
    if stride == T.contiguous(size):
        return _allocate(size, dtype, device)
    perm = tuple(sorted(range(len(size)), key=lambda i: (-stride[i], -size[i], i)))
    if T.permuted_strides(size, perm) == stride:
        return _allocate(size, dtype, device, perm)
    base = _allocate((strides.extent(size, stride),), dtype, device)
    return T.alias(base, size, stride, 0)


@special(aten.empty_like.default)
def empty_like(self, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    device = self.device if device is None else device
    if torch.device(device).type != self._cell.device.type:
        return torch.empty_strided(self.shape, self.stride(), dtype=dtype or self.dtype, device=device)
    return _allocate(tuple(self.shape), dtype or self.dtype, device, _format_perm(self.shape, memory_format, self))


@special(aten.new_empty.default)
def new_empty(self, size, dtype=None, layout=None, device=None, pin_memory=None):
    return torch.empty(size, dtype=dtype or self.dtype, device=self.device if device is None else device)


@special(aten.new_empty_strided.default)
def new_empty_strided(self, size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return torch.empty_strided(size, stride, dtype=dtype or self.dtype, device=self.device if device is None else device)


# ---------------------------------------------------------------- copies


_convert = {}


def _cast(array, dtype):
    """``array`` in another numpy dtype, by one compiled call."""
    if array.dtype == dtype:
        return array
    if isinstance(array, jax.core.Tracer) and not narrow.ON:
        with storage.x64(array.dtype in dtypes.WIDE or dtype in dtypes.WIDE):
            return dtypes.cast(array, dtype)
    fn = _convert.get(dtype)
    if fn is None:
        fn = _convert[dtype] = narrow.jit(lambda x: dtypes.cast(x, dtype))
    with storage.x64(array.dtype in dtypes.WIDE or dtype in dtypes.WIDE):
        return fn(array)


def _from_cpu(tensor, index):
    """A CPU tensor's values as an array; under jit an input that is read afresh at each call."""
    lift = getattr(tracing.active, "host_tensor", None)
    return convert.cpu_to_array(tensor, index) if lift is None else lift(tensor)


@special(aten._to_copy.default)
def to_copy(self, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    _check_layout(layout)
    device = None if device is None else torch.device(device)
    mine = isinstance(self, T.Tensor)
    if device is not None and device.type != T.devices[0].type:
        if device.type == "meta":
            return torch.empty_strided(self.shape, self.stride(), dtype=dtype or self.dtype, device="meta")
        return to_cpu(self).to(dtype=dtype, device=device, copy=False)
    if not mine:
        target = T.place(device)
        array = _from_cpu(self, target.index)
        array = array if dtype is None else _cast(array, dtypes.to_jax(dtype))
        return owned(array, target, _format_perm(self.shape, memory_format, self))
    target = self._cell.device if device is None else T.place(device)
    array = storage.read(self)
    if target is not self._cell.device:
        array = convert.to_array_on(array, target.index)
    if dtype is not None:
        array = _cast(array, dtypes.to_jax(dtype))
    return owned(array, target, _format_perm(self.shape, memory_format, self))


@special(aten.clone.default)
def clone(self, memory_format=None):
    # Arrays are immutable: the clone starts with the very same one, and either side's next write parts them.
    return owned(storage.read(self), self._cell.device, _format_perm(self.shape, memory_format, self))


@special(aten.copy_.default)
def copy_(self, src, non_blocking=False):
    if not isinstance(self, T.Tensor):  # CPU <- device
        return self.copy_(to_cpu(src))
    want = dtypes.to_jax(self.dtype)
    if isinstance(src, T.Tensor):
        if src._cell is self._cell and src is not self:
            overlap.refuse(self, src)
        array = src._cell.array
        if (src._view is None or src._view.flip is not None or self._view is None or tracing.active is not None
                or array is None or array.shape != () or array.dtype != dtypes.to_jax(src.dtype)):
            array = storage.read(src)  # else: an expanded number, which the write spreads by itself
        if src._cell.device is not self._cell.device:
            array = convert.to_array_on(array, self._cell.device.index)
    else:
        array = _from_cpu(src, self._cell.device.index)
    if array.dtype != want:
        array = _cast(array, want)
    if array.shape != tuple(self.shape) and (array.shape or self._view is None):
        array = _broadcast(array, tuple(self.shape))
    storage.write(self, array)
    return self


_broadcasts = {}


def _broadcast(array, shape):
    if isinstance(array, jax.core.Tracer) and not narrow.ON:
        with storage.x64(array.dtype in dtypes.WIDE):
            return _broadcast_to(array, shape)
    fn = _broadcasts.get(shape)
    if fn is None:
        fn = _broadcasts[shape] = narrow.jit(lambda x: _broadcast_to(x, shape))
    with storage.x64(array.dtype in dtypes.WIDE):
        return fn(array)


def _broadcast_to(array, shape):
    extra = array.ndim - len(shape)
    if extra > 0 and all(n == 1 for n in array.shape[:extra]):
        array = jnp.reshape(array, array.shape[extra:])
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError:
        raise RuntimeError(f"The size of tensor a {list(shape)} must match the size of tensor b {list(array.shape)}: "
                           "copy_ can't broadcast the source over the destination") from None


@special(aten._copy_from.default)
def copy_from(self, dst, non_blocking=False):
    return copy_(dst, self)  # not dst.copy_: this is reached with the Python key off


@special(aten._copy_from_and_resize.default)
def copy_from_and_resize(self, dst):
    dst.resize_(self.shape)
    return dst.copy_(self)


@special(aten._local_scalar_dense.default)
def item(self):
    return np.asarray(_concrete(storage.read(self), ".item()")).item()


@special(aten._has_same_storage_numel.default)
def has_same_storage_numel(self, other):
    return self.untyped_storage().nbytes() // self.itemsize == other.untyped_storage().nbytes() // other.itemsize


@special(aten.is_pinned.default)
def is_pinned(self, device=None):
    return False


@special(aten._pin_memory.default, aten.pin_memory.default)
def pin_memory(self, device=None):
    raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")


@special(aten.record_stream.default)
def record_stream(self, s):
    return None  # XLA knows by itself when memory is free


# ---------------------------------------------------------------- lazy bits


@special(aten._conj.default)
def conj(self):
    out = T.alias(self, *T.geometry(self), flip=jnp.conj)
    torch._C._set_conj(out, not self.is_conj())
    return out


@special(aten._neg_view.default)
def neg_view(self):
    out = T.alias(self, *T.geometry(self), flip=jnp.negative)
    torch._C._set_neg(out, not self.is_neg())
    return out


# ---------------------------------------------------------------- copy.deepcopy


def copy_cell(source, memo):
    """The copy of a storage in one copy.deepcopy: one for all tensors and storage objects that show it."""
    cell = memo.get(id(source))
    if cell is None:
        cell = storage.Cell(None if source.array is None else storage.cell_array(source), source.wide, source.device)
        cell.perm, cell.lazy = source.perm, source.lazy
        if tracing.active is not None:
            tracing.active.created(cell)
        memo[id(source)] = cell
    return cell


# ---------------------------------------------------------------- metadata mutation


def _reshaped_in_place(view_op):
    def run(self, *args, **kwargs):
        adopt(self, view_op(self, *args, **kwargs))
        return self

    return run


for _inplace, _view in ((aten.t_.default, aten.t.default), (aten.transpose_.default, aten.transpose.int),
                        (aten.squeeze_.default, aten.squeeze.default), (aten.squeeze_.dim, aten.squeeze.dim),
                        (aten.squeeze_.dims, aten.squeeze.dims), (aten.unsqueeze_.default, aten.unsqueeze.default),
                        (aten.as_strided_.default, aten.as_strided.default), (aten.swapaxes_.default, aten.transpose.int),
                        (aten.swapdims_.default, aten.transpose.int), (aten.detach_.default, aten.detach.default)):
    special(_inplace)(_reshaped_in_place(_view))


def memory_dtype(cell):
    """The numpy dtype of a cell's array."""
    return cell.array.dtype if cell.array is not None else np.dtype(cell.lazy[1])


def _sole(tensor):
    """Whether no other tensor shares the storage."""
    return sys.getrefcount(tensor._cell) <= 2


def _pin(cell):
    """Give every tensor that is the whole cell a view of its geometry: the array is about to change shape."""
    size = cell.array.shape if cell.array is not None else cell.lazy[0]
    stride = T.contiguous(size) if cell.perm is None else T.permuted_strides(size, cell.perm)
    for attributes in gc.get_referrers(cell):  # the tensors' instance dicts
        if type(attributes) is dict and attributes.get("_cell") is cell and attributes.get("_view") is None:
            attributes["_view"] = storage.View(size, stride, 0, memory_dtype(cell))


def grow(cell, numel, dtype, alone=False, shrink=False):
    """Make the storage hold at least (``shrink``: exactly) ``numel`` elements of ``dtype``; contents stay in front.

    ``alone`` says that only one tensor shows the storage, and that its geometry is set afterwards.
    """
    own = memory_dtype(cell)
    need, have = -(-numel * np.dtype(dtype).itemsize // own.itemsize), storage.storage_numel(cell, own)
    if have == need or have > need and not shrink:
        return
    if not alone:
        _pin(cell)
    if cell.array is None:
        cell.lazy, cell.perm = ((need,), own), None
        return
    with storage.x64(cell.wide):
        array = narrow.bare(storage.cell_array(cell))
        flat = jnp.reshape(array if cell.perm is None else jnp.transpose(array, cell.perm), (-1,))
        if tracing.active is not None:
            tracing.active.note(cell)
        flat = flat[:need] if have > need else jnp.concatenate([flat, jnp.zeros(need - have, flat.dtype)])
        cell.array, cell.perm = narrow.hold(flat, own), None
    cell.version += 1


@special(aten.resize_.default)
def resize_(self, size, memory_format=None):
    size = tuple(size)
    if min(size, default=0) < 0:
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")
    perm = T.format_order(len(size), memory_format)
    if size == tuple(self.shape) and perm is None:
        return self
    stride = T.contiguous(size) if perm is None else T.permuted_strides(size, perm)
    alone, whole = _sole(self), self._view is None
    cell, numel, dtype = self._cell, math.prod(size), dtypes.to_jax(self.dtype)
    offset = T.geometry(self)[2]
    if alone and whole and numel >= storage.storage_numel(cell, dtype):
        if cell.array is not None:
            grow(cell, numel, dtype, alone=True)
            with storage.x64(cell.wide):
                memory = narrow.bare(storage.cell_array(cell))
                memory = memory if cell.perm is None else jnp.transpose(memory, cell.perm)
                memory = jnp.reshape(memory, [size[p] for p in perm] if perm else size)
                if perm:
                    memory = jnp.transpose(memory, np.argsort(perm).tolist())
                cell.array = narrow.hold(memory, dtype)
        else:
            cell.lazy = (size, cell.lazy[1])
        cell.perm = perm
    else:
        grow(cell, strides.extent(size, stride, offset), dtype, alone=alone)
    adopt(self, T.alias(self, size, stride, offset))
    return self


@special(aten.resize_as_.default)
def resize_as_(self, the_template, memory_format=None):
    return self.resize_(the_template.shape, memory_format=memory_format)


@special(aten.is_set_to.default)
def is_set_to(self, tensor):
    return self._cell is tensor._cell and T.geometry(self) == T.geometry(tensor)


@special(aten.set_.source_Tensor)
def set_tensor(self, source):
    adopt(self, T.alias(source, *T.geometry(source)))
    return self


@special(aten.set_.source_Tensor_storage_offset)
def set_tensor_geometry(self, source, storage_offset, size, stride=()):
    size = tuple(size)
    stride = tuple(stride) or T.contiguous(size)
    grow(source._cell, strides.extent(size, stride, storage_offset), dtypes.to_jax(self.dtype))
    adopt(self, T.alias(source, size, stride, storage_offset))
    return self


@special(aten.set_.default)
def set_empty(self):
    adopt(self, T.lazy((0,), self.dtype, self._cell.device))
    return self
