"""Searching, membership, distinct values and counting into bins."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import cast, opmath, promote_exact
from ..registry import aten, op
from ._reduce import axis, widen

# ---------------------------------------------------------------- searchsorted

_COMPARE_ALL = 128  # up to so many boundaries, counting the smaller ones beats a chain of gathers


def bounds(boundaries, x, right):
    """How many ``boundaries`` (sorted along the last axis) come before each ``x``: int32.

    1-d boundaries serve any ``x``; N-d ones have the leading shape of ``x``. NaN comes last.
    """
    n = boundaries.shape[-1]
    flat = boundaries.ndim == 1
    if n == 0:
        return jnp.zeros(x.shape, np.int32)
    if n <= _COMPARE_ALL:
        b = boundaries if flat else boundaries[..., None, :]
        after = (b > x[..., None]) if right else (b >= x[..., None])
        return jnp.sum(~after, axis=-1, dtype=np.int32)

    def step(_, state):
        low, high = state
        middle = (low + high) // 2
        place = jnp.minimum(middle, n - 1)
        b = boundaries[place] if flat else jnp.take_along_axis(boundaries, place, -1)
        after = (b > x) if right else (b >= x)
        open_ = low < high
        return jnp.where(open_ & ~after, middle + 1, low), jnp.where(open_ & after, middle, high)

    start = jnp.zeros(x.shape, np.int32), jnp.full(x.shape, n, np.int32)
    return lax.fori_loop(0, math.ceil(math.log2(n + 1)) + 1, step, start)[0]


def _search(sorted_sequence, values, out_int32, right, side, sorter):
    if side is not None and side not in ("left", "right"):
        raise RuntimeError(f"torch.searchsorted(): side can only be 'left' or 'right' but got {side}")
    if side == "left" and right:
        raise RuntimeError("torch.searchsorted(): side and right can't be set to opposites, got side of left while "
                           "right was True")
    if sorted_sequence.ndim == 0:
        raise RuntimeError("torch.searchsorted(): input value tensor must have at least one dimension of boundaries")
    if sorted_sequence.ndim > 1 and (values.ndim != sorted_sequence.ndim
                                     or values.shape[:-1] != sorted_sequence.shape[:-1]):
        raise RuntimeError("torch.searchsorted(): boundaries tensor should be 1 dimension or the first N-1 dimensions "
                           f"of boundaries tensor and input value tensor must match, but we got boundaries tensor "
                           f"{list(sorted_sequence.shape)} and input value tensor {list(values.shape)}")
    if sorter is not None:
        if sorter.shape != sorted_sequence.shape:
            raise RuntimeError("torch.searchsorted(): boundary and sorter must have the same size, but got boundary "
                               f"tensor {list(sorted_sequence.shape)} and got sorter tensor {list(sorter.shape)}")
        if sorter.dtype != np.int64:
            raise RuntimeError(f"torch.searchsorted(): sorter must be a tensor of long dtype but got dtype {sorter.dtype}")
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1)
    compute, _ = promote_exact.resolve([sorted_sequence, values])
    out = bounds(cast(sorted_sequence, compute), cast(values, compute), right or side == "right")
    return out if out_int32 else widen(out)


@op(aten.searchsorted.Tensor, wide=True)
def searchsorted(sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None):
    return _search(sorted_sequence, self, out_int32, right, side, sorter)


@op(aten.searchsorted.Scalar, wide=True)
def searchsorted_scalar(sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None):
    return _search(sorted_sequence, jnp.asarray(self), out_int32, right, side, sorter)


@op(aten.bucketize.Tensor, wide=True)
def bucketize(self, boundaries, *, out_int32=False, right=False):
    if boundaries.ndim != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.ndim})")
    return _search(boundaries, self, out_int32, right, None, None)


@op(aten.bucketize.Scalar, wide=True)
def bucketize_scalar(self, boundaries, *, out_int32=False, right=False):
    return bucketize(jnp.asarray(self), boundaries, out_int32=out_int32, right=right)


# ---------------------------------------------------------------- membership


def _member(elements, test, invert):
    compute, _ = promote_exact.resolve([elements, test])
    elements, test = cast(jnp.asarray(elements), compute), cast(jnp.asarray(test), compute).reshape(-1)
    if test.size == 0:
        found = jnp.zeros(elements.shape, np.bool_)
    elif test.size <= _COMPARE_ALL:
        found = jnp.any(elements[..., None] == test, axis=-1)
    else:
        test = lax.sort(test)
        place = jnp.minimum(bounds(test, elements, False), test.size - 1)
        found = test[place] == elements
    return ~found if invert else found


@op(aten.isin.Tensor_Tensor)
def isin(elements, test_elements, *, assume_unique=False, invert=False):
    return _member(elements, test_elements, invert)


@op(aten.isin.Tensor_Scalar)
def isin_tensor_scalar(elements, test_element, *, assume_unique=False, invert=False):
    return _member(elements, test_element, invert)


@op(aten.isin.Scalar_Tensor)
def isin_scalar_tensor(element, test_elements, *, assume_unique=False, invert=False):
    return _member(element, test_elements, invert)


# ---------------------------------------------------------------- distinct values
#
# The work is one compiled program per shape, which puts the distinct elements first and counts them; only the
# final cut to that count depends on values.


def _groups(changed, position):
    """From flags "differs from its predecessor": int32 (group per place, group starts first, number of groups)."""
    n = changed.shape[0]
    changed = changed.at[0].set(True)
    group = jnp.cumsum(changed, dtype=np.int32) - 1
    place = lax.iota(np.int32, n)
    starts = lax.sort(jnp.where(changed, place, n))
    lengths = jnp.append(starts[1:], n) - starts
    inverse = jnp.zeros(n, np.int32).at[position].set(group, unique_indices=True)
    return group, starts, lengths, inverse, group[-1] + 1


@functools.partial(jax.jit, static_argnames=("consecutive",))
def _distinct(x, consecutive):
    x = x.reshape(-1)
    position = lax.iota(np.int32, x.shape[0])
    if not consecutive:
        x, position = lax.sort((x, position), num_keys=1, is_stable=True)
    _, starts, lengths, inverse, count = _groups(x != jnp.roll(x, 1), position)
    values = x[jnp.minimum(starts, x.shape[0] - 1)]
    return values, widen(inverse), widen(lengths), count


@functools.partial(jax.jit, static_argnames=("consecutive",))
def _distinct_rows(rows, consecutive):
    n = rows.shape[0]
    position = lax.iota(np.int32, n)
    if not consecutive:  # stable sorts from the last column to the first order whole rows
        columns = rows.shape[1]

        def by_column(i, order):
            return lax.sort((rows[:, columns - 1 - i][order], order), num_keys=1, is_stable=True)[1]

        position = lax.fori_loop(0, columns, by_column, position)
    ordered = rows[position]
    changed = jnp.any(ordered != jnp.roll(ordered, 1, 0), axis=1)
    _, starts, lengths, inverse, count = _groups(changed, position)
    return ordered[jnp.minimum(starts, n - 1)], widen(inverse), widen(lengths), count


def _none():
    return jnp.zeros((0,), np.int64)


def _unique_flat(self, consecutive, return_inverse, return_counts):
    if self.dtype.kind == "c":
        raise RuntimeError("unique is not implemented for complex dtypes")
    if self.size == 0:
        values = self.reshape(-1)
        return values, jnp.zeros(self.shape, np.int64) if return_inverse else _none(), _none()
    x = self.astype(np.uint8) if self.dtype == np.bool_ else self
    values, inverse, lengths, count = _distinct(x, consecutive)
    n = int(count)
    values = values[:n].astype(self.dtype)
    return values, inverse.reshape(self.shape) if return_inverse else _none(), lengths[:n] if return_counts else _none()


def _unique_rows(self, dim, consecutive, return_inverse, return_counts):
    a = axis(dim, self.ndim)
    if self.size == 0:
        if self.shape[a] == 0 and all(n for i, n in enumerate(self.shape) if i != a):
            return self, _none(), _none()
        raise RuntimeError("There are 0 sized dimensions, and they aren't selected, so unique cannot be applied")
    moved = jnp.moveaxis(self, a, 0)
    rows = moved.reshape(moved.shape[0], -1)
    rows, inverse, lengths, count = _distinct_rows(
        rows.astype(np.uint8) if rows.dtype == np.bool_ else rows, consecutive)
    n = int(count)
    values = jnp.moveaxis(rows[:n].astype(self.dtype).reshape((n, *moved.shape[1:])), 0, a)
    return values, inverse if return_inverse else _none(), lengths[:n] if return_counts else _none()


@op(aten._unique2.default, jit=False, wide=True)
def unique2(self, sorted=True, return_inverse=False, return_counts=False):
    return _unique_flat(self, False, return_inverse, return_counts)


@op(aten._unique.default, jit=False, wide=True)
def unique(self, sorted=True, return_inverse=False):
    return _unique_flat(self, False, return_inverse, False)[:2]


@op(aten.unique_dim.default, jit=False, wide=True)
def unique_dim(self, dim, sorted=True, return_inverse=False, return_counts=False):
    return _unique_rows(self, dim, False, True, True)


@op(aten.unique_consecutive.default, jit=False, wide=True)
def unique_consecutive(self, return_inverse=False, return_counts=False, dim=None):
    if dim is None or self.ndim <= 1 and self.size:
        return _unique_flat(self, True, return_inverse, return_counts)
    return _unique_rows(self, dim, True, True, True)


@op(aten.unique_dim_consecutive.default, jit=False, wide=True)
def unique_dim_consecutive(self, dim, return_inverse=False, return_counts=False):
    return _unique_rows(self, dim, True, True, True)


# ---------------------------------------------------------------- counting into bins


def tally(place, weights, bins, dtype):
    """Sum of ``weights`` (None: ones) per bin; places outside [0, bins) count nowhere."""
    place = place.reshape(-1)
    add = jnp.ones(place.shape, dtype) if weights is None else cast(weights.reshape(-1), dtype)
    if place.size * bins <= 2**18:  # a compare and a sum: no scatter, which is slow on TPU
        hit = place[:, None] == lax.iota(place.dtype, bins)
        return jnp.sum(jnp.where(hit, add[:, None], jnp.zeros((), dtype)), axis=0, dtype=dtype)
    place = jnp.where((place >= 0) & (place < bins), place, bins)
    return jnp.zeros(bins + 1, dtype).at[place].add(add)[:bins]


@op(aten.bincount.default, jit=False, wide=True)
def bincount(self, weights=None, minlength=0):
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if self.ndim != 1 or self.dtype.kind not in "iu":
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is not None and weights.shape != self.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    dtype = np.dtype(np.int64) if weights is None else (
        weights.dtype if weights.dtype == np.float32 else np.dtype(np.float64))
    if self.size == 0:
        return jnp.zeros(minlength, np.int64 if weights is None else dtype)
    low, high = (int(v) for v in _ends(self))
    if low < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    return _bincount(self, weights, max(high + 1, minlength), dtype)


@jax.jit
def _ends(x):
    return jnp.min(x), jnp.max(x)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _bincount(x, weights, bins, dtype):
    return tally(x.astype(np.int32), weights, bins, dtype)


def _range(x, low, high):
    """Ends of a histogram: the data's own where none are given, made one apart each way where they meet."""
    low, high = cast(low, x.dtype), cast(high, x.dtype)
    if x.size:
        given = low != high
        low, high = jnp.where(given, low, jnp.min(x)), jnp.where(given, high, jnp.max(x))
    same = low == high
    one = jnp.ones((), x.dtype)
    return jnp.where(same, low - one, low), jnp.where(same, high + one, high)


def _even_bin(x, low, high, bins):
    """Bin of each element among equal bins of [low, high], the last one closed; -1 outside (and for NaN)."""
    place = jnp.floor((x - low) * (bins / (high - low))).astype(np.int32)
    return jnp.where((x >= low) & (x <= high), jnp.clip(place, 0, bins - 1), -1)


@op(aten.histc.default)
def histc(self, bins=100, min=0, max=0):
    if bins <= 0:
        raise RuntimeError("bins must be > 0")
    if self.dtype.kind in "bc":
        raise RuntimeError(f"histc is not implemented for {self.dtype}")
    x = cast(self.reshape(-1), opmath(self.dtype))
    work = x if x.dtype.kind == "f" else x.astype(np.float32)
    low, high = _range(work, min, max)
    counts = tally(_even_bin(work, low, high, bins), None, bins, work.dtype)
    # torch refuses these ranges; a compiled program can only say that there is no answer.
    counts = jnp.where(jnp.isfinite(low) & jnp.isfinite(high) & (low <= high), counts, math.nan)
    return cast(counts, self.dtype)


def _edges(low, high, bins):
    """torch.linspace of bins + 1 edges."""
    i = lax.iota(np.int32, bins + 1)
    step = (high - low) / bins
    return jnp.where(i < (bins + 1) // 2, low + step * i.astype(low.dtype), high - step * (bins - i).astype(low.dtype))


def _place(x, edges):
    """Bin of each element among the given edges, the last one closed; -1 outside."""
    n = edges.shape[0] - 1
    place = bounds(edges, x, True) - 1
    place = jnp.where(x == edges[-1], n - 1, place)
    return jnp.where((x >= edges[0]) & (x <= edges[-1]), place, -1)


def _histogram(points, edges, weight, density):
    """N-d histogram of rows of ``points`` (n, d) over a list of edges."""
    sizes = [e.shape[0] - 1 for e in edges]
    flat = jnp.zeros(points.shape[0], np.int32)
    inside = jnp.ones(points.shape[0], np.bool_)
    for d, e in enumerate(edges):
        place = _place(points[:, d], e)
        inside &= place >= 0
        flat = flat * sizes[d] + place
    total = math.prod(sizes)
    hist = tally(jnp.where(inside, flat, -1), weight, total, points.dtype).reshape(sizes)
    if density:
        hist = hist / jnp.sum(hist)
        for d, e in enumerate(edges):
            shape = [1] * len(sizes)
            shape[d] = -1
            hist = hist / (e[1:] - e[:-1]).reshape(shape)
    return hist


def _float_only(x, name):
    if x.dtype.kind != "f" or x.dtype.itemsize < 4:
        raise RuntimeError(f"{name} is not implemented for {x.dtype}")


def _dd_edges(points, bins, range):
    out = []
    if len(bins) != points.shape[-1]:
        raise RuntimeError(f"histogramdd: The size of bins must be equal to the innermost dimension of the input, got {len(bins)} "
                           f"and {points.shape[-1]}")
    for d, n in enumerate(bins):
        if n <= 0:
            raise RuntimeError(f"torch.histogramdd(): bins {list(bins)} must be positive")
        if range is not None:
            low, high = float(range[2 * d]), float(range[2 * d + 1])
            if not (math.isfinite(low) and math.isfinite(high)):
                raise RuntimeError(f"torch.histogramdd(): dimension {d}'s range [{low}, {high}] is not finite")
            if low > high:
                raise RuntimeError("torch.histogramdd(): min should not exceed max, but got min "
                                   f"{low} max {high} for dimension {d}")
            low, high = jnp.asarray(low, points.dtype), jnp.asarray(high, points.dtype)
        elif points.shape[0]:
            low, high = jnp.min(points[:, d]), jnp.max(points[:, d])
        else:
            low, high = jnp.zeros((), points.dtype), jnp.ones((), points.dtype)
        half = jnp.asarray(0.5, points.dtype)
        same = low == high
        low, high = jnp.where(same, low - half, low), jnp.where(same, high + half, high)
        out.append(_edges(low, high, n))
    return out


def _points(self):
    return self.reshape(-1, self.shape[-1])


@op(aten.histogram.bin_ct)
def histogram(self, bins=100, *, range=None, weight=None, density=False):
    _float_only(self, "histogram")
    points = self.reshape(-1, 1)
    edges = _dd_edges(points, [bins], range)
    return _histogram(points, edges, weight, density), edges[0]


@op(aten.histogram.bins_tensor)
def histogram_edges(self, bins, *, weight=None, density=False):
    _float_only(self, "histogram")
    if bins.ndim != 1 or bins.shape[0] == 0 or bins.dtype != self.dtype:
        raise RuntimeError("torch.histogramdd(): bins tensor should have one dimension, at least one element and the "
                           f"dtype of the input, but got {bins.dtype}{list(bins.shape)}")
    edges = lax.sort(bins)
    return _histogram(self.reshape(-1, 1), [edges], weight, density), edges


@op(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(self, bins, *, range=None, weight=None, density=False):
    _float_only(self, "histogramdd")
    return _dd_edges(_points(self), bins, range)


@op(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_bin_cts(self, bins, *, range=None, weight=None, density=False):
    _float_only(self, "histogramdd")
    points = _points(self)
    return _histogram(points, _dd_edges(points, bins, range), weight, density)


@op(aten._histogramdd_from_bin_tensors.default)
def histogramdd_from_bin_tensors(self, bins, *, weight=None, density=False):
    _float_only(self, "histogramdd")
    return _histogram(_points(self), [lax.sort(b) for b in bins], weight, density)
