"""`tensor.untyped_storage()` and `set_`: the storage object that aliases share, and tensors put over it."""

import torch

from . import copies, dtypes, storage, strides
from . import tensor as T


class UntypedStorage:
    """The bytes behind a device tensor. Aliases return the same object; the bytes aren't addressable from the host."""

    def __init__(self, cell):
        self._cell = cell

    def data_ptr(self):
        """A number that is the same for all aliases and different for every other storage; not an address."""
        return self._cell.address() if self.nbytes() else 0

    def nbytes(self):
        """Size in bytes."""
        return storage.storage_numel(self._cell, dtypes.to_jax(torch.uint8))

    size = __len__ = nbytes

    @property
    def device(self):
        """The device that holds the bytes."""
        return self._cell.device

    @property
    def is_cuda(self):
        """False: CUDA tensors aren't torchax_tpu's."""
        return False

    def element_size(self):
        """1: the storage counts bytes."""
        return 1

    def is_shared(self):
        """False: device memory isn't shared between processes."""
        return False

    def is_pinned(self, device=None):
        """False: device memory isn't pinned host memory."""
        return False

    def resize_(self, nbytes):
        """Make the storage hold ``nbytes``; contents that fit stay."""
        itemsize = copies.memory_dtype(self._cell).itemsize
        copies.grow(self._cell, -(-int(nbytes) // itemsize), copies.memory_dtype(self._cell), shrink=True)
        return self

    def __repr__(self):
        return f"UntypedStorage({self.nbytes()} bytes on {self.device})"


def untyped_storage(self):
    """The storage that this tensor and its aliases share."""
    cell = self._cell
    try:
        return cell.proxy
    except AttributeError:
        cell.proxy = UntypedStorage(cell)
        return cell.proxy


def set_(self, source=None, storage_offset=0, size=None, stride=None):
    """Put this tensor over ``source``'s storage (a tensor or a storage), with the geometry given."""
    if source is None:
        with torch.no_grad():
            return torch.Tensor.set_(self)
    if isinstance(source, T.Tensor):
        if source.dtype != self.dtype:
            raise RuntimeError(f"set_: expected a source of dtype {self.dtype}, got {source.dtype}")
        cell = source._cell
        if size is None:
            geometry = T.geometry(source)
        else:
            geometry = tuple(size), tuple(stride) if stride else T.contiguous(tuple(size)), storage_offset
    elif isinstance(source, UntypedStorage):
        cell = source._cell
        size = (storage.storage_numel(cell, dtypes.to_jax(self.dtype)),) if size is None else tuple(size)
        geometry = size, tuple(stride) if stride else T.contiguous(size), storage_offset
    elif hasattr(source, "cell_for"):  # bytes from a file (serialization.py)
        size = (source.nbytes() // self.element_size(),) if size is None else tuple(size)
        geometry = size, tuple(stride) if stride else T.contiguous(size), storage_offset
        cell = source.cell_for(self.dtype, *geometry)
    else:
        raise RuntimeError(f"set_: the source must be on {self.device}, got {type(source).__name__}")
    if self.requires_grad and self.is_leaf and torch.is_grad_enabled() and self._is_view():
        raise RuntimeError("set_ of a view that requires grad is not allowed")
    copies.grow(cell, strides.extent(*geometry), dtypes.to_jax(self.dtype))
    carrier = self.detach()
    carrier._cell = cell
    carrier._view = None
    copies.adopt(self, T.alias(carrier, *geometry, dtype=self.dtype))
    torch.autograd.graph.increment_version(self)
    return self


def is_set_to(self, tensor):
    """Whether both tensors show the same storage with the same geometry."""
    return isinstance(tensor, T.Tensor) and self._cell is tensor._cell and T.geometry(self) == T.geometry(tensor)


T.Tensor.untyped_storage = untyped_storage
T.Tensor.set_ = set_
T.Tensor.is_set_to = is_set_to
