"""`tensor.untyped_storage()` and `set_`: the storage object that aliases share, and tensors put over it."""

import functools

import torch

from . import copies, dtypes, storage, strides
from . import tensor as T


class UntypedStorage:
    """The bytes behind a device tensor. Aliases return the same object; the bytes aren't addressable from the host."""

    is_cuda = is_hpu = is_sparse = is_sparse_csr = False
    filename = None

    def __init__(self, cell):
        self._cell = cell

    def data_ptr(self):
        """A number that is the same for all aliases and different for every other storage; not an address."""
        return self._cell.address() if self.nbytes() else 0

    @property
    def _cdata(self):
        return self._cell.address()

    def nbytes(self):
        """Size in bytes."""
        return storage.storage_numel(self._cell, dtypes.to_jax(torch.uint8))

    size = __len__ = nbytes

    @property
    def device(self):
        """The device that holds the bytes."""
        return self._cell.device

    def get_device(self):
        """Index of the device."""
        return self.device.index

    def element_size(self):
        """1: the storage counts bytes."""
        return 1

    def resizable(self):
        """True: resize_ works."""
        return True

    def is_shared(self):
        """False: device memory isn't shared between processes."""
        return False

    def share_memory_(self):
        """Nothing to do, as for other accelerators."""
        return self

    def is_pinned(self, device=None):
        """False: device memory isn't pinned host memory."""
        return False

    def pin_memory(self, device=None):
        """Refuses: pinned memory is the host's."""
        raise TypeError(f"cannot pin a storage on {self.device}: only CPU memory can be pinned")

    def resize_(self, nbytes):
        """Make the storage hold ``nbytes``; contents that fit stay."""
        itemsize = copies.memory_dtype(self._cell).itemsize
        copies.grow(self._cell, -(-int(nbytes) // itemsize), copies.memory_dtype(self._cell), shrink=True)
        return self

    def bytes(self):
        """The bytes as a uint8 tensor over this storage."""
        return set_(torch.empty(0, dtype=torch.uint8, device=self.device), self)

    def copy_(self, source, non_blocking=None):
        """Take over the bytes of another storage of the same size."""
        self.bytes().copy_(source.bytes() if isinstance(source, UntypedStorage) else _plain_bytes(source))
        return self

    def fill_(self, value):
        """Set every byte to ``value``."""
        self.bytes().fill_(value)
        return self

    def clone(self):
        """A storage of its own with the same bytes."""
        return self.bytes().clone().untyped_storage()

    __copy__ = clone

    def __deepcopy__(self, memo):
        return storage_of(copies.copy_cell(self._cell, memo))

    def __reduce_ex__(self, protocol):
        raise TypeError("a storage on a device can't be pickled or saved by itself: save a tensor over it, or its .cpu()")

    def cpu(self):
        """A CPU storage with a copy of the bytes."""
        return self.bytes().cpu().untyped_storage()

    def to(self, *, device, non_blocking=False):
        """A storage on ``device`` with the same bytes; this one if it is there already."""
        target = torch.device(device)
        if target.type == self.device.type and target.index in (None, self.device.index):
            return self
        return self.bytes().to(target).untyped_storage()

    def untyped(self):
        """This storage."""
        return self

    def tolist(self):
        """The bytes as a list of numbers."""
        return self.bytes().tolist()

    def __iter__(self):
        return iter(self.tolist())

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.bytes()[index].clone().untyped_storage()
        return self.bytes()[index].item()

    def __setitem__(self, index, value):
        self.bytes()[index] = value

    def __repr__(self):
        return f"[torch.storage.UntypedStorage(device={self.device}) of size {self.nbytes()}]"


def _plain_bytes(source):
    return torch.empty(0, dtype=torch.uint8).set_(source)


class TypedStorage(torch.storage.TypedStorage):
    """What the deprecated ``tensor.storage()`` returns: an UntypedStorage seen as elements of one dtype."""

    def __new__(cls, untyped, dtype):
        return object.__new__(cls)

    def __init__(self, untyped, dtype):
        self._untyped_storage, self.dtype = untyped, dtype

    def _new_wrapped_storage(self, untyped):
        if isinstance(untyped, UntypedStorage):
            return TypedStorage(untyped, self.dtype)
        return torch.storage.TypedStorage(wrap_storage=untyped, dtype=self.dtype, _internal=True)

    def _to(self, dtype):
        elements = torch.empty(0, dtype=self.dtype, device=self.device).set_(self)
        return typed_storage(elements.clone() if dtype == self.dtype else elements.to(dtype))


def typed_storage(self):
    return TypedStorage(untyped_storage(self), self.dtype)


def typed_storage_of_user(self):
    """The storage of this tensor as elements of its dtype (deprecated in torch)."""
    torch.storage._warn_typed_storage_removal(stacklevel=2)
    return typed_storage(self)


def untyped_storage(self):
    """The storage that this tensor and its aliases share."""
    return storage_of(self._cell)


def storage_of(cell):
    """The one storage object of a cell."""
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
    if isinstance(source, torch.storage.TypedStorage):
        if source.dtype != self.dtype:
            raise RuntimeError(f"Expected a Storage of type {self.dtype} or an UntypedStorage, but got type {source.dtype} "
                               "for argument 1 'storage'")
        source = source._untyped_storage
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


def _by_cell(own):
    """torch's question about two tensors' storages, asked of the cells."""
    @functools.wraps(own)
    def call(a, b):
        if isinstance(a, T.Tensor) and isinstance(b, T.Tensor):
            return a._cell is b._cell
        return own(a, b)

    return call


torch._C._is_alias_of = _by_cell(torch._C._is_alias_of)
torch._C._overlaps = _by_cell(torch._C._overlaps)
T.Tensor.untyped_storage = untyped_storage
T.Tensor.storage = typed_storage_of_user
T.Tensor._typed_storage = typed_storage
T.Tensor.set_ = set_
T.Tensor.is_set_to = is_set_to
