"""The tensor subclass, how tensors over arrays are made, and their geometry.

Each ATen overload gets a handler (see handlers.py), built once and memoised; `__torch_dispatch__` only calls it.
"""

import functools

import jax
import torch
from torch.optim.optimizer import _foreach_supported_types as _optim_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_types

from . import dtypes, errors, registry, strides
from .device_module import current
from .storage import Cell, View, tracing

_make = torch.Tensor._make_wrapper_subclass
_WRAP, _strided = dtypes.WRAP, torch.strided
devices = [None]  # index -> torch.device("<name>", index), set by device.py


class Tensor(torch.Tensor):
    """A torch.Tensor whose values are a jax.Array. Made by factories with device="jax" and `.to("jax")`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _view = None  # of a tensor that is the whole cell; its own attribute costs time

    @staticmethod  # binding a class method would cost more
    def __torch_dispatch__(func, types, args=(), kwargs=None):
        try:
            handler = func._torchax_tpu  # an attribute costs a third of a dict entry here
        except AttributeError:
            handler = find(func)
        try:
            return handler(args, kwargs or {})
        except BaseException as error:
            if errors.backward.running:
                errors.backward.error = error
            raise


_set_default_dtype = torch.set_default_dtype


@functools.wraps(_set_default_dtype)
def set_default_dtype(d):
    before = torch.get_default_dtype()
    _set_default_dtype(d)
    if torch.get_default_dtype() is not before:  # programs of ops that turn integers into floats were traced under it
        registry.forget_programs()


torch.set_default_dtype = set_default_dtype

for _supported in (_optim_types, _util_types):  # optimizers and clip_grad_* take their foreach paths, as DTensor's do
    if Tensor not in _supported:
        _supported.append(Tensor)


def find(func):
    """Build and memoise the handler of an overload (routes.py puts the real one here)."""
    raise errors.UnsupportedOpError(f"{func}: the op tables are not loaded")


# ---------------------------------------------------------------- making tensors


def wrap(array, device):
    """A new tensor that owns a new storage holding ``array``."""
    dtype, wide = _WRAP[array.dtype]
    tensor = _make(Tensor, array.shape, None, None, None, dtype, _strided, device)
    cell = tensor._cell = Cell(array, wide, device)
    if tracing.active is not None:
        tracing.active.created(cell)
    return tensor


def wrap_permuted(array, device, perm):
    """A new tensor that owns ``array``, with memory that runs through its axes in the order ``perm``."""
    if perm is None:
        return wrap(array, device)
    dtype, wide = _WRAP[array.dtype]
    tensor = _make(Tensor, array.shape, permuted_strides(array.shape, perm), 0, dtype=dtype, device=device)
    cell = tensor._cell = Cell(array, wide, device)
    cell.perm = perm
    if tracing.active is not None:
        tracing.active.created(cell)
    return tensor


def from_array(array, index=0, requires_grad=False):
    """A tensor on device ``index`` that shares the (immutable) ``array``."""
    if getattr(array, "weak_type", False):
        array = jax.lax.convert_element_type(array, array.dtype)
    tensor = wrap(array, devices[index])
    return tensor.requires_grad_() if requires_grad else tensor


def lazy(size, dtype, device, stride=None):
    """An uninitialised tensor: no device work until it is read or written."""
    size = tuple(size)
    jdt = dtypes.to_jax(dtype)
    if stride is None:
        tensor = _make(Tensor, size, dtype=dtype, device=device)
    else:
        tensor = _make(Tensor, size, strides=stride, dtype=dtype, device=device)
    cell = tensor._cell = Cell(None, dtype in dtypes.WIDE_TORCH, device)
    cell.lazy = (size, jdt)
    if tracing.active is not None:
        tracing.active.created(cell)
    return tensor


_contiguous = {}


def contiguous(size):
    """Memoised row-major strides."""
    s = _contiguous.get(size)
    if s is None:
        if len(_contiguous) > 65536:
            _contiguous.clear()
        s = _contiguous[size] = strides.contiguous_strides(size)
    return s


def geometry(tensor):
    """(size, stride, offset) in elements of the tensor's dtype, as plain tuples."""
    view, cell = tensor._view, tensor._cell
    if view is not None:
        return view.size, view.stride, view.offset
    size = cell.array.shape if cell.array is not None else cell.lazy[0]
    if cell.perm is None:
        return size, contiguous(size), 0
    return size, permuted_strides(size, cell.perm), 0


def permuted_strides(size, perm):
    """Strides of a dense tensor whose memory runs through its axes in the order ``perm``."""
    inner = strides.contiguous_strides([size[p] for p in perm])
    out = [0] * len(size)
    for p, s in zip(perm, inner):
        out[p] = s
    return tuple(out)


def alias(tensor, size, stride, offset, dtype=None, flip=None):
    """A tensor over the same storage with other geometry (and dtype): what a view op returns."""
    cell = tensor._cell
    if dtype is None:
        dtype = tensor.dtype
    elif dtype in dtypes.WIDE_TORCH:
        cell.wide = True  # whoever touches the cell from now on needs 64-bit mode
    out = _make(Tensor, size, stride, offset, dtype=dtype, device=cell.device)
    out._cell = cell
    own = tensor._view
    flip = flip if own is None or own.flip is None else own.flip if flip is None else (
        None if flip is own.flip else lambda x, f=flip, g=own.flip: f(g(x)))
    out._view = None if flip is None and _is_whole(cell, size, stride, offset, dtype) else View(
        size, stride, offset, dtypes.TO_JAX[dtype], flip)
    if flip is not None and dtype is tensor.dtype:  # torch's lazy bits travel with the view
        torch._C._set_conj(out, tensor.is_conj())
        torch._C._set_neg(out, tensor.is_neg())
    return out


def view_of(tensor, g):
    """The alias of a tensor with the geometry ``g`` (of views.py), which keeps the way to read it for the next one."""
    own, cell = tensor._view, tensor._cell
    if g.dtype is not None or own is not None and own.flip is not None:
        return alias(tensor, g.size, g.stride, g.offset, g.dtype)
    size, stride, offset, dtype = g.size, g.stride, g.offset, tensor.dtype
    out = _make(Tensor, size, stride, offset, None, dtype, _strided, cell.device)
    out._cell = cell
    if offset or not _is_whole(cell, size, stride, offset, dtype):
        out._view = View(size, stride, offset, dtypes.TO_JAX[dtype] if own is None else own.dtype, None, g)
    return out


def _is_whole(cell, size, stride, offset, dtype):
    array = cell.array
    have, jdt = (array.shape, array.dtype) if array is not None else cell.lazy
    if offset or have != size or dtypes.TO_JAX[dtype] != jdt:
        return False
    return stride == (contiguous(size) if cell.perm is None else permuted_strides(size, cell.perm))


def foreign(value, device, func):
    """The array of a tensor that isn't ours: a 0-d CPU tensor joins in, others are on the wrong device."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and value.device.type == "cpu":
            from .convert import cpu_to_array  # late: convert builds on this module's tensors
            lift = getattr(tracing.active, "host_tensor", None)
            return cpu_to_array(value) if lift is None else lift(value)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{device or devices[0]} and {value.device}! ({func}; move it with .to({str(device or devices[0])!r}))")
    raise TypeError(f"{func}: expected a tensor, got {type(value).__name__}")


def format_order(ndim, memory_format):
    """Axes order of memory that a memory_format asks for; None for row-major."""
    if memory_format is torch.channels_last and ndim == 4:
        return (0, 2, 3, 1)
    if memory_format is torch.channels_last_3d and ndim == 5:
        return (0, 2, 3, 4, 1)
    return None


# ---------------------------------------------------------------- devices


_known = set()  # the torch.device objects in `devices`: results carry these very objects


def place(device):
    """The canonical device object (with an index) for what a caller gave."""
    if device is None:
        return devices[current.index]
    device = torch.device(device)
    index = current.index if device.index is None else device.index
    if index >= len(devices):
        raise RuntimeError(f"device {device} is out of range: this process has {len(devices)} "
                           f"{devices[0].type!r} device(s), 0 to {len(devices) - 1}")
    return devices[index]
