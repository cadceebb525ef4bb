"""Copying and scattering twins of views, and the gradients of views.

They go through the view and a read or write of it, so geometry and start offsets are treated
once, in storage.py, and a new offset compiles nothing new.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import narrow, storage, strides
from . import tensor as T
from .copies import owned
from .handlers import make_handler
from .registry import SPECIAL, TABLE, aten, special


def fresh(tensor):
    """A contiguous tensor with the values of ``tensor`` and memory of its own."""
    return owned(storage.read(tensor), tensor._cell.device)


def _copier(view):
    def copy(*args, **kwargs):
        out = view(*args, **kwargs)
        return [fresh(o) for o in out] if isinstance(out, (list, tuple)) else fresh(out)

    return copy


for _name in (
    "alias",
    "as_strided",
    "diagonal",
    "expand",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "view",
    "view_as_real",
    "view_as_complex",
    "detach",
    "narrow",
    "lift_fresh",
    "_reshape_alias",
):
    _copies, _views = getattr(aten, _name + "_copy", None), getattr(aten, _name)
    for _overload in _copies.overloads() if _copies is not None else ():
        _copy = getattr(_copies, _overload)
        if not _overload.endswith("out") and _overload in _views.overloads() and _copy is not aten.view_copy.default:
            SPECIAL[_copy] = _copier(getattr(_views, _overload))


@special(aten.view_copy.default, aten._reshape_copy.default)
def view_copy(self, size):
    """Also where no view of that shape exists, as in torch."""
    return fresh(self.reshape(size))


# ---------------------------------------------------------------- scatter


def _same_geometry(self):
    """A copy of the whole storage, seen with the geometry of ``self``; a fresh tensor for expanded ones."""
    if not strides.distinct(*T.geometry(self)[:2]):
        return fresh(self)
    cell = self._cell
    out = T.wrap_permuted(storage.cell_array(cell), cell.device, cell.perm)
    return T.alias(out, *T.geometry(self), dtype=self.dtype)


def _scatterer(view):
    def scatter(self, src, *args, **kwargs):
        out = _same_geometry(self)
        target = view(out, *args, **kwargs)
        if target.shape != src.shape:
            raise RuntimeError(
                f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, "
                f"slice size = {list(target.shape)}"
            )
        target.copy_(src)
        return out

    return scatter


for _copy, _view in (
    (aten.select_scatter.default, aten.select.int),
    (aten.slice_scatter.default, aten.slice.Tensor),
    (aten.diagonal_scatter.default, aten.diagonal.default),
):
    SPECIAL[_copy] = _scatterer(_view)


@special(aten.as_strided_scatter.default)
def as_strided_scatter(self, src, size, stride, storage_offset=None):
    out = _same_geometry(self)
    target = aten.as_strided(out, size, stride, storage_offset)
    if target.shape != src.shape:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, "
            f"slice size = {list(target.shape)}"
        )
    target.copy_(src)
    return out


# ---------------------------------------------------------------- gradients


@functools.partial(narrow.jit, static_argnums=(2, 3, 4))
def _placed(grad, start, sizes, dim, step):
    """Zeros of ``sizes`` with ``grad`` at start, start + step, ... along ``dim``."""
    if grad.ndim != len(sizes):
        grad = jnp.expand_dims(grad, dim)
    if step != 1:
        grad = lax.pad(grad, jnp.zeros((), grad.dtype), [(0, 0, step - 1 if d == dim else 0) for d in range(grad.ndim)])
    starts = [np.int32(0)] * len(sizes)
    starts[dim] = start
    return lax.dynamic_update_slice(jnp.zeros(sizes, grad.dtype), grad, starts)


def _place(grad, start, sizes, dim, step):
    array = storage.read(grad)
    sizes = tuple(sizes)
    if 0 in array.shape:
        out = storage.fill_lazy(T.lazy(sizes, grad.dtype, grad._cell.device)._cell)
    elif isinstance(array, jax.core.Tracer):
        array = array if array.ndim == len(sizes) else jnp.expand_dims(array, dim)
        after = sizes[dim] - start - (array.shape[dim] - 1) * step - 1
        out = lax.pad(
            array,
            jnp.zeros((), array.dtype),
            [(start, after, step - 1) if d == dim else (0, 0, 0) for d in range(len(sizes))],
        )
    else:
        with storage.x64(grad._cell.wide):
            out = _placed(array, storage._start(start), sizes, dim, step)
    return T.wrap(out, grad._cell.device)


@special(aten.select_backward.default)
def select_backward(grad_output, input_sizes, dim, index):
    dim = dim % len(input_sizes)
    return _place(grad_output, index % input_sizes[dim], input_sizes, dim, 1)


@special(aten.slice_backward.default)
def slice_backward(grad_output, input_sizes, dim, start, end, step):
    dim = dim % len(input_sizes)
    n = input_sizes[dim]
    start = min(max(start + n if start < 0 else start, 0), n)
    return _place(grad_output, start, input_sizes, dim, step)


# ---------------------------------------------------------------- written through views


@special(aten.fill_diagonal_.default)
def fill_diagonal_(self, fill_value, wrap=False):
    if self.dim() < 2:
        raise RuntimeError("dimensions must larger than 1")
    if self.dim() > 2 and len(set(self.shape)) != 1:
        raise RuntimeError("all dimensions of input must be of equal length")
    rows, columns = self.shape[0], self.shape[1]
    step = sum(self.stride())
    self.as_strided((min(self.shape),), (step,)).fill_(fill_value)
    if wrap and self.dim() == 2 and rows > columns + 1:
        # numpy's rule: the diagonal starts again one row after it ran out.
        start = self.storage_offset() + step * columns + self.stride(0)
        rest = rows - columns - 1
        while rest > 0:
            n = min(rest, columns)
            self.as_strided((n,), (step,), start).fill_(fill_value)
            start += step * columns + self.stride(0)
            rest -= columns + 1
    return self


@special(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats, output_size=None):
    if output_size is None:
        if repeats.numel() and repeats.dim() == 1 and not repeats.is_floating_point():
            total, least = int(repeats.sum()), int(repeats.min())
            if least < 0:
                raise RuntimeError("repeats can not be negative")
        else:
            total = 0
        output_size = total
    return _repeat((repeats,), {"output_size": output_size})


_repeat = make_handler(TABLE[aten.repeat_interleave.Tensor])
