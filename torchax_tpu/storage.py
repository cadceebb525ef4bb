"""Storage: the cell which aliases share, the view metadata, reading and write-through.

A `Cell` holds one immutable jax.Array; a write replaces the array. Every tensor that aliases
a storage points at the same cell, so a write through any of them is seen by all. A tensor
with ``_view is None`` is the whole cell; other tensors carry a `View` with torch's own size,
stride and offset. While a program is traced (`tracing.active`), cells are lifted to inputs.
"""

import itertools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np

from . import dtypes, strides

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

    __slots__ = ("array", "perm", "wide", "device", "version", "lazy", "number", "__weakref__")

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
    """

    __slots__ = ("size", "stride", "offset", "dtype", "flip", "array", "version", "fused")

    def __init__(self, size, stride, offset, dtype, flip=None):
        self.size, self.stride, self.offset, self.dtype, self.flip = size, stride, offset, dtype, flip
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
        return jnp.zeros(shape, dtype)
    fn = _zeros_cache.get((shape, dtype))
    if fn is None:
        fn = _zeros_cache[shape, dtype] = jax.jit(lambda: jnp.zeros(shape, dtype))
    return fn()


class _Off:
    def __enter__(self):
        return None

    def __exit__(self, *exc):
        return None


_OFF = _Off()


def x64(wide):
    """A context with JAX's 64-bit mode on when ``wide``, else one that does nothing."""
    return jax.enable_x64(True) if wide else _OFF


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
            out = view.flip(out)
    if tracing.active is None:
        view.array, view.version = out, cell.version
    return out


def _concrete(array):
    return not isinstance(array, jax.core.Tracer)


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
    shape = base.shape
    if perm is not None:
        base = jnp.transpose(base, perm)
        shape = base.shape
    if base.dtype != view.dtype:
        base = _memory_as(base, view.dtype)
        shape = base.shape
    p = strides.plan(shape, view.size, view.stride, view.offset)
    starts = p.run_starts()
    if _concrete(base):
        if len(base.devices()) == 1 and base.device != _default_device():
            return strides.compiled_read(p.key, p.moving)(base, *map(np.int32, starts))
        return strides.compiled_read(p.key, p.moving)(base, *map(_start, starts))
    return strides.read(p.key, p.moving, base, *starts)


_first = []


def _default_device():
    if not _first:
        _first.append(jax.devices()[0])
    return _first[0]


def fusible(cell, view):
    """The plan by which an op's program can read the view itself, or None if it should be read on its own.

    The first reader at a cell version slices inside its own program (and marks ``view.fused``); a second
    one makes a copy to keep, so that a view that is used often is read once.
    """
    if view.fused == cell.version or view.flip is not None or cell.array.dtype != view.dtype:
        return None
    shape = cell.array.shape
    if cell.perm is not None:
        shape = tuple(shape[p] for p in cell.perm)
    return strides.plan(shape, view.size, view.stride, view.offset)


def write(tensor, value):
    """Put ``value`` (same shape and dtype as the tensor) where the tensor points."""
    cell, view = tensor._cell, tensor._view
    trace = tracing.active
    if trace is not None:
        trace.note(cell)
    if view is None:
        cell.array = value
        cell.version += 1
        return
    base = cell_array(cell)
    with x64(cell.wide or view.dtype in dtypes.WIDE):
        stored = value if view.flip is None else view.flip(value)
        cell.array = write_view(base, cell.perm, view, stored)
    cell.version += 1
    if trace is None:
        overlapping = 0 in view.stride and any(s == 0 and n > 1 for s, n in zip(view.stride, view.size))
        if not overlapping:
            view.array, view.version = value, cell.version


def write_view(base, perm, view, value):
    """The cell array with ``value`` written through ``view``."""
    original = base
    if perm is not None:
        base = jnp.transpose(base, perm)
    ordered = base
    if base.dtype != view.dtype:
        base = _memory_as(base, view.dtype)
    p = strides.plan(base.shape, view.size, view.stride, view.offset)
    starts = p.run_starts()
    if _concrete(base) and _concrete(value):
        out = strides.compiled_write(p.key, p.moving)(base, value, *map(np.int32, starts))
    else:
        out = strides.write(p.key, p.moving, base, value, *starts)
    if original.dtype != view.dtype:
        out = jnp.reshape(_memory_as(out, original.dtype), ordered.shape)
    if perm is not None:
        out = jnp.transpose(out, np.argsort(perm).tolist())
    return out


def _memory_as(array, dtype):
    """Memory reinterpreted: a 1-d array of ``dtype`` over the same bytes, complex as (re, im) pairs."""
    return _reinterpret(array, np.dtype(dtype)) if _concrete(array) else _bits(array, np.dtype(dtype))


def _bits(array, dtype):
    flat = jnp.reshape(array, (-1,))
    if flat.dtype.kind == "c" and dtype.kind != "c":
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


_reinterpret = jax.jit(_bits, static_argnums=1)


def storage_numel(cell, dtype):
    """Elements of ``dtype`` that the storage holds."""
    if cell.array is not None:
        size, itemsize = cell.array.size, cell.array.dtype.itemsize
    else:
        size, itemsize = math.prod(cell.lazy[0]), np.dtype(cell.lazy[1]).itemsize
    return size * itemsize // np.dtype(dtype).itemsize
