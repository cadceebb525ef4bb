"""Reads and writes at tensor indices along whole dimensions: index, index_put, gather, take, masks.

Out-of-range indices never clamp: reads give NaN (or the dtype's extreme), writes are dropped.
Boolean masks that select are turned into integer indices before they get here (indices.py).
"""

import jax
import jax.numpy as jnp
import numpy as np

from .. import dtypes
from ..registry import aten, op
from ._axes import axis, bounded, same_dtype

_READ = {"mode": "fill", "wrap_negative_indices": False}
_WRITE = {"mode": "drop", "wrap_negative_indices": False}


def take(self, index, dim):
    """``self`` at in-range-or-n ``index`` (any shape) along ``dim``."""
    return self.at[(slice(None),) * dim + (index,)].get(**_READ)


def _tuple(self, indices):
    """The key for ``.at``: bounded indices of one common shape, slices in the holes."""
    if len(indices) > self.ndim:
        raise IndexError(f"too many indices for tensor of dimension {self.ndim}")
    at = [d for d, i in enumerate(indices) if i is not None]
    try:
        arrays = jnp.broadcast_arrays(*(bounded(indices[d], self.shape[d], negative=True) for d in at))
    except ValueError:
        raise IndexError(
            "shape mismatch: indexing tensors could not be broadcast together with shapes "
            f"{[list(indices[d].shape) for d in at]}"
        ) from None
    key = [slice(None)] * len(indices)
    for d, a in zip(at, arrays):
        key[d] = a
    return tuple(key)


@op(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(self, indices):
    return self.at[_tuple(self, indices)].get(**_READ)


def add_at(self, key, values):
    """Accumulating write; halves add up in float32, bools by or."""
    if self.dtype == np.bool_:
        return self.at[key].max(values, **_WRITE)
    compute = dtypes.opmath(self.dtype)
    return self.astype(compute).at[key].add(values.astype(compute), **_WRITE).astype(self.dtype)


@op(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(self, indices, values, accumulate=False):
    same_dtype("index_put", self, values)
    key = _tuple(self, indices)
    shape = jax.eval_shape(lambda s: s.at[key].get(), self).shape
    extra = values.ndim - len(shape)
    if extra > 0 and all(n == 1 for n in values.shape[:extra]):
        values = jnp.reshape(values, values.shape[extra:])
    try:
        values = jnp.broadcast_to(values, shape)
    except ValueError:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing "
            f"result of shape {list(shape)}"
        ) from None
    return add_at(self, key, values) if accumulate else self.at[key].set(values, **_WRITE)


@op(aten._index_put_impl.default)
def index_put_impl(self, indices, values, accumulate=False, unsafe=False):
    return index_put(self, indices, values, accumulate)


def masked_write(self, mask, lead, values, accumulate):
    """``x[..., mask] = values`` with the mask after ``lead`` dims, when no value depends on which True it meets.

    ``values`` broadcasts against (lead dims, 1, trailing dims).
    """
    trail = self.ndim - lead - mask.ndim
    shape = (1,) * (lead + 1 + trail - values.ndim) + values.shape
    values = jnp.reshape(values, shape[:lead] + (1,) * mask.ndim + shape[lead + 1 :])
    mask = jnp.reshape(mask != 0, mask.shape + (1,) * trail)
    new = values if not accumulate else (self | values if self.dtype == np.bool_ else self + values)
    return jnp.where(mask, new, self)


def masked_rows(self, mask, lead, values, accumulate):
    """``x[..., mask] = values`` with one row of values per True, in order: values are found by counting."""
    trail = self.ndim - lead - mask.ndim
    flat = jnp.reshape(mask != 0, (-1,))
    position = jnp.cumsum(flat, dtype=np.int32) - 1
    values = jnp.reshape(values, (1,) * (lead + 1 + trail - values.ndim) + values.shape)
    values = jnp.broadcast_to(
        values, self.shape[:lead] + values.shape[lead : lead + 1] + self.shape[self.ndim - trail :]
    )
    rows = jnp.reshape(take(values, position, lead), self.shape)
    new = rows if not accumulate else (self | rows if self.dtype == np.bool_ else self + rows)
    return jnp.where(jnp.reshape(mask != 0, mask.shape + (1,) * trail), new, self)


@op(aten._unsafe_masked_index.default)
def unsafe_masked_index(self, mask, indices, fill):
    clipped = [None if i is None else jnp.clip(i, 0, n - 1) for i, n in zip(indices, self.shape)]
    return jnp.where(mask, index(self, clipped), dtypes.cast(fill, self.dtype))


@op(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(self, mask, indices, values):
    clipped = [None if i is None else jnp.clip(i, 0, n - 1) for i, n in zip(indices, self.shape)]
    return index_put(self, clipped, jnp.where(mask, values, jnp.zeros((), values.dtype)), True)


# ---------------------------------------------------------------- one dimension


def _vector(index, name):
    if index.ndim > 1:
        raise IndexError(f"{name}(): Index is supposed to be a vector, got {index.ndim} dimensions")
    return jnp.reshape(index, (-1,))


@op(aten.index_select.default)
def index_select(self, dim, index):
    dim, index = axis(dim, self.ndim), _vector(index, "index_select")
    if self.ndim == 0:
        if index.size != 1:
            raise IndexError(f"index_select(): Index to scalar can have only 1 value, got {index.size} value(s)")
        return jnp.reshape(take(jnp.reshape(self, (1,)), bounded(index, 1), 0), ())
    return take(self, bounded(index, self.shape[dim]), dim)


def _along(self, dim, index, source, name):
    """(1-d view of self if 0-d, key, source broadcast to the selected rows)."""
    dim, index = axis(dim, self.ndim), _vector(index, name)
    whole = jnp.reshape(self, (1,)) if self.ndim == 0 else self
    if source is not None:
        same_dtype(name, self, source)
        source = jnp.reshape(source, (1,)) if source.ndim == 0 else source
        want = whole.shape[:dim] + (index.size,) + whole.shape[dim + 1 :]
        if source.size == 1 and index.size == 1 and whole.ndim == 1:
            source = jnp.reshape(source, want)
        if source.shape != want:
            kind = IndexError if source.ndim != whole.ndim and name != "index_add" else RuntimeError
            raise kind(
                f"{name}(): source of shape {list(source.shape)} doesn't fit {index.size} slices along dimension "
                f"{dim} of a tensor of shape {list(self.shape)}"
            )
    return whole, (slice(None),) * dim + (index,), source, dim


@op(aten.index_add.default)
def index_add(self, dim, index, source, alpha=1):
    whole, key, source, dim = _along(self, dim, index, source, "index_add")
    key = key[:dim] + (bounded(key[dim], whole.shape[dim]),)
    compute = dtypes.opmath(self.dtype)
    if self.dtype != np.bool_:
        source = source.astype(compute) * dtypes.cast(alpha, compute)
    return jnp.reshape(add_at(whole.astype(compute), key, source).astype(self.dtype), self.shape)


@op(aten.index_copy.default)
def index_copy(self, dim, index, source):
    whole, key, source, dim = _along(self, dim, index, source, "index_copy")
    key = key[:dim] + (bounded(key[dim], whole.shape[dim]),)
    return jnp.reshape(whole.at[key].set(source, **_WRITE), self.shape)


@op(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self, dim, index, value):
    if getattr(value, "ndim", 0):
        raise RuntimeError(
            f"index_fill_ only supports a 0-dimensional value tensor, but got tensor with {value.ndim} dimension(s)."
        )
    whole, key, _, dim = _along(self, dim, index, None, "index_fill")
    key = key[:dim] + (bounded(key[dim], whole.shape[dim], negative=True),)
    return jnp.reshape(whole.at[key].set(dtypes.cast(value, self.dtype), **_WRITE), self.shape)


@op(aten.index_reduce.default)
def index_reduce(self, dim, index, source, reduce, include_self=True):
    whole, key, source, dim = _along(self, dim, index, source, "index_reduce")
    key = key[:dim] + (bounded(key[dim], whole.shape[dim]),)
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise RuntimeError(f"index_reduce(): Expected reduce to be one of prod, mean, amax or amin but got {reduce}.")
    return jnp.reshape(reduce_at(whole, key, source, reduce, include_self), self.shape)


def _extreme(dtype, sign):
    if dtype.kind == "b":
        return np.bool_(sign > 0)
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min
    return dtype.type(sign * np.inf)


def reduce_at(self, key, source, reduce, include_self):
    """``self`` with ``source`` reduced into the places ``key``; all of torch's reductions."""
    result = self.dtype
    compute = dtypes.opmath(result)
    self, source = self.astype(compute), source.astype(compute)
    if not include_self:
        start = {"sum": 0, "mean": 0, "prod": 1, "amax": _extreme(compute, -1), "amin": _extreme(compute, 1)}[reduce]
        self = self.at[key].set(jnp.asarray(start, compute), **_WRITE)
    if reduce == "sum":
        return add_at(self, key, source).astype(result)
    if reduce == "prod":
        if compute == np.bool_:
            return self.at[key].min(source, **_WRITE)
        return self.at[key].multiply(source, **_WRITE).astype(result)
    if reduce == "amax":
        return self.at[key].max(source, **_WRITE).astype(result)
    if reduce == "amin":
        return self.at[key].min(source, **_WRITE).astype(result)
    count = jnp.full(self.shape, int(include_self), np.int32).at[key].add(jnp.ones(source.shape, np.int32), **_WRITE)
    total = add_at(self, key, source)
    count = jnp.maximum(count, 1)
    if compute.kind in "iu":
        return jnp.floor_divide(total, count.astype(compute))
    return (total / count.astype(compute)).astype(result)


# ---------------------------------------------------------------- flat


@op(aten.take.default)
def flat_take(self, index):
    return take(jnp.reshape(self, (-1,)), bounded(index, self.size, negative=True), 0)


@op(aten.put.default)
def put(self, index, source, accumulate=False):
    same_dtype("put_", self, source)
    if index.size != source.size:
        raise RuntimeError(
            f"put_(): Expected source and index to have the same number of elements, got {source.size} and {index.size}"
        )
    flat, key = jnp.reshape(self, (-1,)), (bounded(jnp.reshape(index, (-1,)), self.size, negative=True),)
    source = jnp.reshape(source, (-1,))
    out = add_at(flat, key, source) if accumulate else flat.at[key].set(source, **_WRITE)
    return jnp.reshape(out, self.shape)


# ---------------------------------------------------------------- masks


def _check_mask(mask, name):
    if mask.dtype not in (np.dtype(bool), np.dtype(np.uint8)):
        raise RuntimeError(f"{name}: expected BoolTensor for mask, got {mask.dtype}")


@op(aten.masked_select.default, jit=False)
def masked_select(self, mask):
    if mask.dtype != np.bool_:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    flat = jnp.reshape(jnp.broadcast_to(mask, shape), (-1,))
    return _take_flat(self, find_true(flat)[0], shape)


@jax.jit
def _take_here(self, where):
    return take(jnp.reshape(self, (-1,)), where, 0)


def _take_flat(self, where, shape):
    return _take_here(jnp.broadcast_to(self, shape), where)


@op(aten.masked_scatter.default)
def masked_scatter(self, mask, source):
    same_dtype("masked_scatter", self, source)
    if mask.dtype != np.bool_:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    self, mask = jnp.broadcast_to(self, shape), jnp.broadcast_to(mask, shape)
    position = jnp.cumsum(jnp.reshape(mask, (-1,)), dtype=np.int32) - 1
    values = take(jnp.reshape(source, (-1,)), jnp.maximum(position, 0), 0) if source.size else None
    return self if values is None else jnp.where(mask, jnp.reshape(values, shape), self)


@op(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output, mask, sizes):
    shape = jnp.broadcast_shapes(grad_output.shape, mask.shape)
    flat = jnp.reshape(jnp.broadcast_to(mask, shape), (-1,))
    n = int(np.prod(sizes))
    place = jnp.where(flat, jnp.cumsum(flat, dtype=np.int32) - 1, n)
    out = jnp.zeros(n, grad_output.dtype)
    return jnp.reshape(out.at[place].set(jnp.reshape(jnp.broadcast_to(grad_output, shape), (-1,)), **_WRITE), sizes)


# ---------------------------------------------------------------- where values aren't zero


def find_true(mask):
    """Index arrays (int32) of the nonzero elements of a concrete array, one per dimension.

    On a CPU numpy reads the buffer in place. Elsewhere the device counts and finds; the number is
    rounded up to a power of two so that few programs are compiled.
    """
    if next(iter(mask.devices())).platform == "cpu":
        return [jnp.asarray(a.astype(np.int32)) for a in np.nonzero(np.asarray(mask))]
    count = int(_count(mask))
    size = 1 << max(count - 1, 0).bit_length()
    return [a[:count] for a in _find(mask, size)]


@jax.jit
def _count(mask):
    return jnp.sum(mask != 0, dtype=np.int32)


def _find_impl(mask, size):
    return jnp.nonzero(mask != 0, size=size, fill_value=0)


_find = jax.jit(_find_impl, static_argnums=1)


@op(aten.nonzero.default, jit=False, wide=True)
def nonzero(self):
    if self.ndim == 0:
        return jnp.zeros((int(np.asarray(self) != 0), 0), np.int64)
    if next(iter(self.devices())).platform == "cpu":
        return jnp.asarray(np.argwhere(np.asarray(self)).astype(np.int64))
    return jnp.stack([a.astype(np.int64) for a in find_true(self)], axis=1)


@op(aten.nonzero_static.default, wide=True)
def nonzero_static(self, size, fill_value=-1):
    if self.ndim == 0:
        return jnp.zeros((size, 0), np.int64)
    found = jnp.nonzero(self != 0, size=size, fill_value=fill_value)
    return jnp.stack([a.astype(np.int64) for a in found], axis=1)
