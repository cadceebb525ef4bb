"""Scans along one axis: running sums, products, extremes and log-sum-exps."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import cast, default_float, opmath
from ..registry import aten, op
from ._reduce import accumulator, at_least_1d, axis, widen


def _scan(fn, self, dim, dtype):
    a = axis(dim, self.ndim)
    x, result = accumulator(self, dtype)
    x, scalar = at_least_1d(x)
    out = cast(fn(x, a), result)
    return out.reshape(()) if scalar else out


@op(aten.cumsum.default, wide="int")
def cumsum(self, dim, dtype=None):
    return _scan(lax.cumsum, self, dim, dtype)


@op(aten.cumprod.default, wide="int")
def cumprod(self, dim, dtype=None):
    return _scan(lax.cumprod, self, dim, dtype)


def _running_extreme(self, dim, largest):
    """Values and the *last* position that held each: torch takes later ties and later NaNs."""
    a = axis(dim, self.ndim)
    x, scalar = at_least_1d(self)
    if x.dtype.kind == "c":
        raise RuntimeError("cummax and cummin do not support complex input")
    work = x.astype(np.int8) if x.dtype == np.bool_ else x
    values = (lax.cummax if largest else lax.cummin)(work, a)
    hit = work == values
    if x.dtype.kind not in "iub":
        nan = jnp.isnan(x)
        seen = lax.cummax(nan.astype(np.int8), a) != 0
        values = jnp.where(seen, jnp.asarray(np.nan, x.dtype), values)
        hit = nan | (hit & ~seen)
    position = lax.broadcasted_iota(np.int32, x.shape, a)
    index = lax.cummax(jnp.where(hit, position, 0), a)
    values = values.astype(x.dtype)
    return (values.reshape(()), widen(index.reshape(()))) if scalar else (values, widen(index))


@op(aten.cummax.default, wide=True)
def cummax(self, dim):
    return _running_extreme(self, dim, True)


@op(aten.cummin.default, wide=True)
def cummin(self, dim):
    return _running_extreme(self, dim, False)


@op(aten._cummax_helper.default, wide=True, shape_only=("values", "indices"))
def cummax_helper(self, values, indices, dim):
    return _running_extreme(self, dim, True)


@op(aten._cummin_helper.default, wide=True, shape_only=("values", "indices"))
def cummin_helper(self, values, indices, dim):
    return _running_extreme(self, dim, False)


@op(aten.logcumsumexp.default, aten._logcumsumexp.default)
def logcumsumexp(self, dim):
    a = axis(dim, self.ndim)
    result = default_float() if self.dtype.kind in "iub" else self.dtype
    x, scalar = at_least_1d(cast(self, opmath(result)))
    if x.dtype.kind == "c":
        out = _log_sums_complex(x, a)
    else:
        out = lax.cumlogsumexp(x, a)
    out = cast(out, result)
    return out.reshape(()) if scalar else out


def _log_sums_complex(x, a):
    """One element after another: how often the imaginary part has gone round depends on the order of the sum."""
    def step(total, item):
        smaller = item.real < total.real
        low, high = jnp.where(smaller, item, total), jnp.where(smaller, total, item)
        new = jnp.log1p(jnp.exp(low - high)) + high
        both = low.real == high.real
        new = jnp.where(both & (low.real == -jnp.inf), low, new)
        new = jnp.where(both & (low.real == jnp.inf), jnp.log(jnp.exp(low) + jnp.exp(high)), new)
        return new, new

    moved = jnp.moveaxis(x, a, 0)
    start = jnp.full(moved.shape[1:], -jnp.inf, x.dtype)
    return jnp.moveaxis(lax.scan(step, start, moved)[1], 0, a)
