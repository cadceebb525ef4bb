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
        out = lax.associative_scan(_log_add_complex, x, axis=a)
    else:
        out = lax.cumlogsumexp(x, a)
    out = cast(out, result)
    return out.reshape(()) if scalar else out


def _log_add_complex(a, b):
    top = jnp.maximum(a.real, b.real)
    top = jnp.where(jnp.isfinite(top), top, jnp.zeros((), top.dtype))
    return jnp.log(jnp.exp(a - top) + jnp.exp(b - top)) + top
