"""Sorting and order statistics: sort, topk, kthvalue, median, mode. NaN is the largest value, as in torch."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..registry import aten, op
from ._reduce import at_least_1d, axis, nonempty, widen

# ---------------------------------------------------------------- sort


def order(x, a, descending=False):
    """(sorted values, int32 positions) along axis ``a``, stable in both directions."""
    if x.dtype.kind == "c":
        raise RuntimeError("Sort does not support complex dtypes on CPU")
    position = lax.broadcasted_iota(np.int32, x.shape, a)
    if not descending:
        return lax.sort((x, position), dimension=a, num_keys=1, is_stable=True)
    # Backwards in and out again: equal elements keep their first order.
    values, index = lax.sort((lax.rev(x, (a,)), lax.rev(position, (a,))), dimension=a, num_keys=1, is_stable=True)
    return lax.rev(values, (a,)), lax.rev(index, (a,))


def _sorted(self, dim, descending):
    a = axis(dim, self.ndim)
    x, scalar = at_least_1d(self)
    values, index = order(x, a, descending)
    return (values.reshape(()), widen(index.reshape(()))) if scalar else (values, widen(index))


@op(aten.sort.default, wide=True)
def sort(self, dim=-1, descending=False):
    return _sorted(self, dim, descending)


@op(aten.sort.stable, wide=True)
def sort_stable(self, dim=-1, descending=False, *, stable=None):
    return _sorted(self, dim, descending)


# ---------------------------------------------------------------- topk


def _rank_key(x):
    """Integers in the order of ``x`` (NaN on top), one to one with its bits."""
    if x.dtype.kind == "u":
        wide = np.dtype(np.int64 if x.dtype.itemsize == 8 else np.int32)
        if x.dtype.itemsize < 4:
            return x.astype(wide)
        signed = lax.bitcast_convert_type(x, np.dtype(f"i{x.dtype.itemsize}"))
        return signed ^ np.iinfo(signed.dtype).min
    if x.dtype.kind == "i":
        return x
    # -0.0 becomes 0.0 in the key only: the two are ties.
    x = jnp.where(jnp.isnan(x), jnp.asarray(np.nan, x.dtype), jnp.where(x == 0, jnp.zeros((), x.dtype), x))
    bits = lax.bitcast_convert_type(x, np.dtype(f"i{x.dtype.itemsize}"))
    return jnp.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


@op(aten.topk.default, wide=True)
def topk(self, k, dim=-1, largest=True, sorted=True):
    if self.dtype.kind in "cb":
        raise RuntimeError(f"topk is not implemented for {self.dtype}")
    a = axis(dim, self.ndim)
    x, scalar = at_least_1d(self)
    if k < 0 or k > x.shape[a]:
        raise RuntimeError("selected index k out of range")
    if scalar:
        return self, jnp.zeros((), np.int64)
    if x.dtype == np.float32:  # XLA has a fast top_k for this one; it puts NaN first
        moved = jnp.moveaxis(x, a, -1)
        # By the sign of its NaNs: the largest values of x, or of -x, where they come last.
        lifted = jnp.where(jnp.isnan(moved), lax.bitcast_convert_type(jnp.uint32(0x7FC00000 if largest else 0xFFC00000),
                                                                      np.float32), moved if largest else -moved)
        values, index = lax.top_k(lifted, k)
        values, index = (jnp.moveaxis(t, -1, a) for t in (values if largest else -values, index))
        return values, widen(index)
    key = _rank_key(x)
    moved = jnp.moveaxis(key if largest else ~key, a, -1)
    _, index = lax.top_k(moved, k)
    index = jnp.moveaxis(index, -1, a)
    return jnp.take_along_axis(x, index, a, mode="promise_in_bounds"), widen(index)


# ---------------------------------------------------------------- order statistics


def _pick(values, index, where, a, keepdim):
    """Values and positions at place ``where`` (0-d, or one per slice) of sorted slices."""
    if isinstance(where, int):
        v, i = (lax.index_in_dim(t, where, a, keepdims=True) for t in (values, index))
    else:
        v, i = (jnp.take_along_axis(t, where, a, mode="promise_in_bounds") for t in (values, index))
    if not keepdim:
        v, i = jnp.squeeze(v, a), jnp.squeeze(i, a)
    return v, i


def _out(values, index, scalar):
    return (values.reshape(()), widen(index.reshape(()))) if scalar else (values, widen(index))


@op(aten.kthvalue.default, wide=True)
def kthvalue(self, k, dim=-1, keepdim=False):
    a = axis(dim, self.ndim)
    x, scalar = at_least_1d(self)
    if not 1 <= k <= max(x.shape[a], 0):
        if x.shape[a] == 0:
            raise IndexError(f"kthvalue(): Expected reduction dim {a} to have non-zero size.")
        raise RuntimeError("kthvalue(): selected number k out of range for dimension " + str(a))
    values, index = order(x, a)
    return _out(*_pick(values, index, k - 1, a, keepdim), scalar)


def _median(x, a, keepdim, ignore_nan):
    """The lower median along ``a``. A NaN is the median of its slice unless NaNs are ignored."""
    values, index = order(x, a)
    n = x.shape[a]
    if x.dtype.kind in "iub":
        return _pick(values, index, (n - 1) // 2, a, keepdim)
    nan = jnp.isnan(values)
    good = jnp.sum(~nan, axis=a, keepdims=True, dtype=np.int32)
    if ignore_nan:
        where = jnp.maximum(good - 1, 0) // 2
    else:  # sorting is stable: the first NaN of the slice stands at place `good`
        where = jnp.where(good < n, jnp.minimum(good, n - 1), (n - 1) // 2)
    return _pick(values, index, where, a, keepdim)


def _median_all(self, ignore_nan, name):
    if self.dtype.kind in "bc":
        raise RuntimeError(f"{name} is not implemented for {self.dtype}")
    if self.size == 0:
        fill = np.nan if self.dtype.kind not in "iu" else np.iinfo(self.dtype).min
        return jnp.asarray(fill, self.dtype)
    return _median(self.reshape(-1), 0, False, ignore_nan)[0]


def _median_dim(self, dim, keepdim, ignore_nan, name):
    if self.dtype.kind in "bc":
        raise RuntimeError(f"{name} is not implemented for {self.dtype}")
    a = axis(dim, self.ndim)
    x, scalar = at_least_1d(self)
    nonempty(x, (a,), name)
    return _out(*_median(x, a, keepdim, ignore_nan), scalar)


@op(aten.median.default)
def median(self):
    return _median_all(self, False, "median")


@op(aten.nanmedian.default)
def nanmedian(self):
    return _median_all(self, True, "nanmedian")


@op(aten.median.dim, wide=True)
def median_dim(self, dim, keepdim=False):
    return _median_dim(self, dim, keepdim, False, "median")


@op(aten.nanmedian.dim, wide=True)
def nanmedian_dim(self, dim, keepdim=False):
    return _median_dim(self, dim, keepdim, True, "nanmedian")


@op(aten.mode.default, wide=True)
def mode(self, dim=-1, keepdim=False):
    a = axis(dim, self.ndim)
    x, scalar = at_least_1d(self)
    nonempty(x, (a,), "mode")
    values, index = order(x, a)
    place = lax.broadcasted_iota(np.int32, x.shape, a)
    previous = jnp.roll(values, 1, a)
    start = lax.cummax(jnp.where((values != previous) | (place == 0), place, 0), a)
    # the longest run, the first of equally long ones (the smallest value); its last place is what torch reports
    where = lax.argmax(place - start, a, np.int32)
    return _out(*_pick(values, index, jnp.expand_dims(where, a), a, keepdim), scalar)
