"""gather and scatter: reads and writes at an index of the same rank as the tensor."""

import jax.numpy as jnp
import numpy as np

from .. import dtypes
from ..registry import aten, op
from ._axes import axis, bounded, same_dtype
from .indexing import _READ, _WRITE, add_at, reduce_at


def _check(self, dim, index, name, src=None):
    dim = axis(dim, self.ndim)
    a, b = max(self.ndim, 1), max(index.ndim, 1)
    if index.size and a != b:
        raise RuntimeError(
            f"{name}(): Index tensor must have the same number of dimensions as self tensor, got {b} and {a}"
        )
    if src is not None and index.size and max(src.ndim, 1) != b:
        raise RuntimeError(
            f"{name}(): Index tensor must have the same number of dimensions as src tensor, got {b} and "
            f"{max(src.ndim, 1)}"
        )
    if not index.size:
        return dim
    shape, ishape = self.shape or (1,), index.shape or (1,)
    if any(i > n for d, (i, n) in enumerate(zip(ishape, shape)) if d != dim):
        raise RuntimeError(
            f"{name}(): Expected index {list(ishape)} to be no larger than self {list(shape)} apart from "
            f"dimension {dim}"
        )
    if src is not None and any(i > n for i, n in zip(ishape, src.shape or (1,))):
        raise RuntimeError(f"{name}(): Expected index {list(ishape)} to be no larger than src {list(src.shape)}")
    return dim


def _key(index, dim, n):
    """Open-grid indices with ``index`` at ``dim``."""
    key = []
    for d, size in enumerate(index.shape):
        shape = [1] * index.ndim
        shape[d] = size
        key.append(bounded(index, n) if d == dim else np.arange(size, dtype=np.int32).reshape(shape))
    return tuple(key)


@op(aten.gather.default)
def gather(self, dim, index, sparse_grad=False):
    dim = _check(self, dim, index, "gather")
    if index.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    whole, at = jnp.reshape(self, self.shape or (1,)), jnp.reshape(index, index.shape or (1,))
    whole = whole[tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(at.shape))]
    out = jnp.take_along_axis(whole, bounded(at, whole.shape[dim]), dim, **_READ)
    return jnp.reshape(out, index.shape)


def _scatter(self, dim, index, src, name, write):
    dim = _check(self, dim, index, name, src if getattr(src, "ndim", 0) or src is None else None)
    if index.size == 0:
        return self
    whole, at = jnp.reshape(self, self.shape or (1,)), jnp.reshape(index, index.shape or (1,))
    src = jnp.asarray(src)
    if src.ndim:
        src = src[tuple(slice(n) for n in at.shape)]
    else:
        src = jnp.broadcast_to(src, at.shape)
    return jnp.reshape(write(whole, _key(at, dim, whole.shape[dim]), src), self.shape)


def _set(whole, key, src):
    return whole.at[key].set(src, **_WRITE)


@op(aten.scatter.src)
def scatter_src(self, dim, index, src):
    same_dtype("scatter", self, src)
    return _scatter(self, dim, index, src, "scatter", _set)


@op(aten.scatter.value)
def scatter_value(self, dim, index, value):
    return _scatter(self, dim, index, dtypes.cast(value, self.dtype), "scatter", _set)


_OLD = {"add": "sum", "multiply": "prod"}


@op(aten.scatter.reduce)
def scatter_with(self, dim, index, src, reduce):
    if reduce not in _OLD:
        raise RuntimeError(f"reduce argument must be either add or multiply, got {reduce!r}")
    same_dtype("scatter", self, src)
    return _scatter(self, dim, index, src, "scatter", lambda s, k, v: reduce_at(s, k, v, _OLD[reduce], True))


@op(aten.scatter.value_reduce)
def scatter_value_with(self, dim, index, value, reduce):
    if reduce not in _OLD:
        raise RuntimeError(f"reduce argument must be either add or multiply, got {reduce!r}")
    return _scatter(
        self,
        dim,
        index,
        dtypes.cast(value, self.dtype),
        "scatter",
        lambda s, k, v: reduce_at(s, k, v, _OLD[reduce], True),
    )


@op(aten.scatter_add.default)
def scatter_add(self, dim, index, src):
    same_dtype("scatter_add", self, src)
    return _scatter(self, dim, index, src, "scatter_add", add_at)


@op(aten.scatter_reduce.two)
def scatter_reduce(self, dim, index, src, reduce, include_self=True):
    if reduce not in ("sum", "prod", "mean", "amax", "amin"):
        raise RuntimeError(f"reduce argument must be either sum, prod, mean, amax or amin, got {reduce!r}")
    same_dtype("scatter_reduce", self, src)
    return _scatter(self, dim, index, src, "scatter_reduce", lambda s, k, v: reduce_at(s, k, v, reduce, include_self))
