"""Storage: the cell which aliases share, the view metadata, reading and write-through.

A `Cell` holds one immutable jax.Array; a write replaces the array. Every tensor that aliases
a storage points at the same cell, so a write through any of them is seen by all. A tensor
with ``_view is None`` is the whole cell; other tensors carry a `View` with torch's own size,
stride and offset. While a program is traced (`tracing.active`), cells are lifted to inputs.
"""

import functools
import itertools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np

from . import dtypes, narrow, strides
from .narrow import x64

_numbers = itertools.count(1)


class Cell:
    """One storage: ``array`` (None: not yet filled; ``lazy`` then holds shape and dtype).

    Attributes:
        array: the jax.Array (or tracer), dense, in the owner's shape.
        perm: None if memory order is row-major, else the axes order of memory.
        wide: whether the dtype needs 64-bit mode.
        device: the torch.device.
        version: counts writes; views compare it to know whether what they read is fresh.
    """

    __slots__ = ("array", "perm", "wide", "device", "version", "lazy", "number", "proxy", "__weakref__")

    def __init__(self, array, wide, device):
        self.array, self.wide, self.device = array, wide, device
        self.perm, self.version, self.lazy, self.number = None, 0, None, None

    def address(self):
        """A stable fake address: what data_ptr() shows, unique per storage, never 0."""
        if self.number is None:
            self.number = next(_numbers)
        return self.number << 36


class View:
    """How a tensor that isn't the whole cell reads it; ``dtype`` is the tensor's numpy dtype.

    ``flip`` is None, or a function which is its own inverse (conj, neg): torch's lazy bits.
    ``geometry`` is the view op's memoised result, where the strides.Plan is kept for the next view like this one.
    """

    __slots__ = ("size", "stride", "offset", "dtype", "flip", "array", "version", "fused", "geometry")

    def __init__(self, size, stride, offset, dtype, flip=None, geometry=None):
        self.size, self.stride, self.offset, self.dtype, self.flip = size, stride, offset, dtype, flip
        self.geometry = geometry
        self.array, self.version = None, -1
        self.fused = -1  # the cell version at which an op read the view inside its own program


class Tracing(threading.local):
    """Per thread: ``active`` is the object which lifts cells while a program is traced, or None."""

    active = None


tracing = Tracing()


class Inline:
    """Tracing of one op's own torch-level decomposition: nothing is lifted, nothing recorded."""

    lifts = False

    def lift(self, cell):
        return cell.array

    def note(self, cell):
        pass

    def created(self, cell):
        pass

    def saw(self, tensor):
        pass


def memory_shape(cell):
    """Shape of the cell's array in memory order."""
    shape = cell.array.shape if cell.array is not None else cell.lazy[0]
    return shape if cell.perm is None else tuple(shape[p] for p in cell.perm)


def fill_lazy(cell):
    """Give an uninitialised cell its zeros (torch.empty promises nothing)."""
    shape, dtype = cell.lazy
    with x64(cell.wide):
        array = _zeros(shape, dtype)
    index = cell.device.index or 0
    cell.array = array if index == 0 or tracing.active is not None else jax.device_put(array, jax.devices()[index])
    if tracing.active is not None:
        tracing.active.created(cell)
    return cell.array


_zeros_cache = {}


def _zeros(shape, dtype):
    if tracing.active is not None:
        return narrow.hold(jnp.zeros(shape, narrow.stored(dtype)), dtype)
    fn = _zeros_cache.get((shape, dtype))
    if fn is None:
        fn = _zeros_cache[shape, dtype] = narrow.jit(lambda: jnp.zeros(shape, dtype))
    return fn()


def cell_array(cell):
    """The cell's array, lifted when a program is being traced."""
    if cell.array is None:
        fill_lazy(cell)
    if tracing.active is not None:
        return tracing.active.lift(cell)
    return cell.array


def read(tensor):
    """The tensor's values as a jax.Array (or tracer) of its shape and dtype."""
    cell, view = tensor._cell, tensor._view
    if tracing.active is not None:
        tracing.active.saw(tensor)
    if view is None:
        return cell_array(cell)
    if view.version == cell.version and view.array is not None and tracing.active is None:
        return view.array
    base = cell_array(cell)
    with x64(cell.wide or view.dtype in dtypes.WIDE):
        out = read_view(base, cell.perm, view)
        if view.flip is not None:
            out = narrow.hold(view.flip(narrow.bare(out)), view.dtype)
    if tracing.active is None:
        view.array, view.version = out, cell.version
    return out


def _concrete(array):
    return not narrow.is_traced(array)


_start_cache = {}


def _start(i):
    """A cached 0-d int32 array: passing it costs less than passing a Python int."""
    a = _start_cache.get(i)
    if a is None:
        if len(_start_cache) > 65536:
            _start_cache.clear()
        a = _start_cache[i] = jax.jit(lambda: jnp.full((), i, jnp.int32))() if i < 0 else jax.device_put(np.int32(i))
    return a


def read_view(base, perm, view):
    """Read ``view`` of a cell array; one compiled call when ``base`` is concrete."""
    p = strides.plan(_memory_dims(base, perm, view.dtype), view.size, view.stride, view.offset)
    starts = p.run_starts()
    narrow.refuse_bits(base.dtype, view.dtype)
    if narrow.ON or _concrete(base):
        reader = _reader(p.key, p.moving, perm, view.dtype if view.dtype != base.dtype else None)
        return reader(base, *map(_start, starts))
    return strides.read(p.key, p.moving, _memory(base, perm, view.dtype), *starts)


def _memory_dims(base, perm, dtype):
    """Shape in which `_memory` shows a cell array."""
    shape = base.shape
    if base.dtype != dtype:
        return (math.prod(shape) * base.dtype.itemsize // dtype.itemsize,)
    return shape if perm is None else tuple(shape[p] for p in perm)


def _memory(base, perm, dtype):
    """A cell array in memory order; as a vector of ``dtype`` over the same bytes if that is another dtype."""
    if narrow.ON:
        dtype = narrow.stored(dtype)
    if perm is not None:
        base = jnp.transpose(base, perm)
    return base if dtype is None or base.dtype == dtype else _bits(base, dtype)


@functools.lru_cache(maxsize=16384)
def _reader(key, moving, perm, dtype):
    return narrow.jit(lambda base, *starts: strides.read(key, moving, _memory(base, perm, dtype), *starts))


def fusible(cell, view):
    """The plan by which an op's program can read the view itself, or None if it should be read on its own.

    The first reader at a cell version slices inside its own program (and marks ``view.fused``); a second
    one makes a copy to keep, so that a view that is used often is read once.
    """
    if view.fused == cell.version or view.flip is not None or cell.array.dtype != view.dtype:
        return None
    plan = strides.plan(_memory_dims(cell.array, cell.perm, view.dtype), view.size, view.stride, view.offset)
    if view.geometry is not None and cell.perm is None:
        view.geometry.reading = cell.array.aval, plan
    return plan


def writable(cell, view):
    """The plan by which an in-place op's program can read and write the view itself, or None if it is written on its own."""
    g = view.geometry
    if view.flip is not None or cell.array.dtype != view.dtype or not (
            strides.distinct(view.size, view.stride) if g is None else g.distinct):
        return None
    plan = strides.plan(_memory_dims(cell.array, cell.perm, view.dtype), view.size, view.stride, view.offset)
    if g is not None and cell.perm is None:
        g.reading = cell.array.aval, plan
    return plan


def start_arrays(plan):
    """The starts a compiled read or write takes, as cached device arrays."""
    arrays = plan.start_arrays
    if arrays is None:
        arrays = plan.start_arrays = tuple(map(_start, plan.run_starts()))
    return arrays


def write(tensor, value, overlap=False):
    """Put ``value`` (same dtype and shape as the tensor; of a view also a 0-d array) where the tensor points.

    RuntimeError for an expanded tensor, whose elements share memory, unless ``overlap`` says it is harmless.
    """
    cell, view = tensor._cell, tensor._view
    trace = tracing.active
    if trace is not None:
        trace.note(cell)
    if view is None:
        cell.array = value
        cell.version += 1
        return
    shared = 0 in view.stride and 0 not in view.size and any(s == 0 and n > 1 for s, n in zip(view.stride, view.size))
    if shared and not overlap:
        raise RuntimeError("unsupported operation: more than one element of the written-to tensor refers to a single "
                           "memory location. Please clone() the tensor before performing the operation.")
    base = cell_array(cell)
    with x64(cell.wide or view.dtype in dtypes.WIDE):
        stored = value if view.flip is None else narrow.hold(view.flip(narrow.bare(value)), view.dtype)
        cell.array = write_view(base, cell.perm, view, stored)
    cell.version += 1
    if trace is None and value.shape == view.size and strides.distinct(view.size, view.stride):
        view.array, view.version = value, cell.version


def write_view(base, perm, view, value):
    """The cell array with ``value`` written through ``view``; one compiled call for concrete arrays."""
    p = strides.plan(_memory_dims(base, perm, view.dtype), view.size, view.stride, view.offset)
    starts = p.run_starts()
    narrow.refuse_bits(base.dtype, view.dtype)
    if narrow.ON or _concrete(base) and _concrete(value):
        return _writer(p.key, p.moving, perm, view.dtype)(base, value, *map(_start, starts))
    return _write(p.key, p.moving, perm, view.dtype, base, value, *starts)


def _write(key, moving, perm, dtype, base, value, *starts):
    if narrow.ON:
        dtype = narrow.stored(dtype)
    ordered = base if perm is None else jnp.transpose(base, perm)
    value = jnp.broadcast_to(value, key[4])
    out = strides.write(key, moving, _memory(ordered, None, dtype), value, *starts)
    if base.dtype != dtype:
        out, old = _bits(out, base.dtype), jnp.reshape(ordered, (-1,))
        if out.size < old.size:  # bytes at the end that make no whole element
            out = jnp.concatenate([out, old[out.size:]])
        out = jnp.reshape(out, ordered.shape)
    return out if perm is None else jnp.transpose(out, np.argsort(perm).tolist())


@functools.lru_cache(maxsize=16384)
def _writer(key, moving, perm, dtype):
    return narrow.jit(functools.partial(_write, key, moving, perm, dtype))


def _bits(array, dtype):
    flat = jnp.reshape(array, (-1,))
    if flat.dtype.kind == "c" and flat.dtype != dtype:
        flat = jnp.reshape(jnp.stack([flat.real, flat.imag], -1), (-1,))
    if flat.dtype == dtype:
        return flat
    target = dtype if dtype.kind != "c" else np.dtype(f"f{dtype.itemsize // 2}")
    if flat.dtype != target:
        if flat.dtype == np.bool_:
            flat = flat.astype(np.uint8)
        middle = np.dtype(np.uint8) if target == np.bool_ else target
        ratio = flat.dtype.itemsize / middle.itemsize
        if ratio < 1:
            flat = jnp.reshape(flat[: flat.size - flat.size % int(1 / ratio)], (-1, int(1 / ratio)))
        flat = jnp.reshape(jax.lax.bitcast_convert_type(flat, middle), (-1,)) if flat.dtype != middle else flat
        if target == np.bool_:
            flat = flat != 0
    if dtype.kind == "c":
        pairs = jnp.reshape(flat, (-1, 2))
        flat = jax.lax.complex(pairs[:, 0], pairs[:, 1])
    return flat


def storage_numel(cell, dtype):
    """Elements of ``dtype`` that the storage holds."""
    if cell.array is not None:
        size, itemsize = cell.array.size, cell.array.dtype.itemsize
    else:
        size, itemsize = math.prod(cell.lazy[0]), np.dtype(cell.lazy[1]).itemsize
    return size * itemsize // np.dtype(dtype).itemsize
