"""Reductions: sums, moments, extremes, truth, norms. Halves accumulate in float32, integers in int64."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import cast, default_float, opmath, promote, to_jax
from ..registry import aten, op
from ._reduce import accumulator, axes, axis, nonempty, widen

# ---------------------------------------------------------------- sums and products


@op(aten.sum.default, aten.sum.dim_IntList, wide="int")
def sum_(self, dim=None, keepdim=False, dtype=None):
    x, result = accumulator(self, dtype)
    return cast(jnp.sum(x, axis=axes(dim, x.ndim), keepdims=keepdim, dtype=x.dtype), result)


@op(aten.nansum.default, wide="int")
def nansum(self, dim=None, keepdim=False, dtype=None):
    if self.dtype.kind == "c":
        raise RuntimeError("nansum does not support complex inputs")
    x, result = accumulator(self, dtype)
    if self.dtype.kind not in "iub":
        x = jnp.where(jnp.isnan(self), jnp.zeros((), x.dtype), x)
    return cast(jnp.sum(x, axis=axes(dim, x.ndim), keepdims=keepdim, dtype=x.dtype), result)


@op(aten.mean.default, aten.mean.dim)
def mean(self, dim=None, keepdim=False, dtype=None):
    given = self.dtype if dtype is None else to_jax(dtype)
    if np.dtype(given).kind in "iub":
        what = "infer output dtype. Input" if dtype is None else "use the requested dtype. Output"
        raise RuntimeError(f"mean(): could not {what} dtype must be either a floating point or complex dtype. "
                           f"Got: {np.dtype(given).name}")
    x, result = accumulator(self, dtype)
    ax = axes(dim, x.ndim)
    count = math.prod(x.shape[a] for a in ax)
    total = jnp.sum(x, axis=ax, keepdims=keepdim, dtype=x.dtype)
    return cast(total / count if count else total * math.nan, result)


@op(aten.prod.default, aten.prod.dim_int, wide="int")
def prod(self, dim=None, keepdim=False, dtype=None):
    x, result = accumulator(self, dtype)
    return cast(jnp.prod(x, axis=axes(dim, x.ndim), keepdims=keepdim, dtype=x.dtype), result)


@op(aten.trace.default, wide="int")
def trace(self):
    if self.ndim != 2:
        raise RuntimeError("trace: expected a matrix")
    x, result = accumulator(self)
    n = min(x.shape)
    return cast(jnp.sum(jnp.diagonal(x[:n, :n]), dtype=x.dtype), result)


@op(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, wide=True)
def count_nonzero(self, dim=None):
    return widen(jnp.sum(self != 0, axis=axes(dim, self.ndim), dtype=np.int32))


# ---------------------------------------------------------------- moments


def _moments(self, dim, correction, keepdim, name):
    """(variance in the compute dtype, mean in the compute dtype, real result dtype)."""
    if self.dtype.kind in "iub":
        raise RuntimeError(f"{name} only support floating point and complex dtypes")
    x = cast(self, opmath(self.dtype))
    ax = axes(dim, x.ndim)
    count = math.prod(x.shape[a] for a in ax)
    mean_ = jnp.sum(x, axis=ax, keepdims=True, dtype=x.dtype) / count if count else jnp.full(
        [1 if a in ax else n for a, n in enumerate(x.shape)], math.nan, x.dtype)
    d = x - mean_
    squares = jnp.square(d.real) + jnp.square(d.imag) if x.dtype.kind == "c" else jnp.square(d)
    total = jnp.sum(squares, axis=ax, keepdims=keepdim, dtype=squares.dtype)
    free = max(count - (1 if correction is None else correction), 0)
    # XLA would divide a float by zero as torch does; an empty slice has no variance at all.
    var_ = total / jnp.asarray(free, total.dtype) if count else total * math.nan
    mean_ = mean_ if keepdim else jnp.squeeze(mean_, ax)
    return var_, mean_, self.real.dtype if self.dtype.kind == "c" else self.dtype


@op(aten.var.correction, static=("correction",))
def var(self, dim=None, correction=None, keepdim=False):
    v, _, result = _moments(self, dim, correction, keepdim, "std and var")
    return cast(v, result)


@op(aten.std.correction, static=("correction",))
def std(self, dim=None, correction=None, keepdim=False):
    v, _, result = _moments(self, dim, correction, keepdim, "std and var")
    return cast(jnp.sqrt(v), result)


@op(aten.var_mean.correction, static=("correction",))
def var_mean(self, dim=None, correction=None, keepdim=False):
    v, m, result = _moments(self, dim, correction, keepdim, "var_mean")
    return cast(v, result), cast(m, self.dtype)


@op(aten.std_mean.correction, static=("correction",))
def std_mean(self, dim=None, correction=None, keepdim=False):
    v, m, result = _moments(self, dim, correction, keepdim, "std_mean")
    return cast(jnp.sqrt(v), result), cast(m, self.dtype)


# ---------------------------------------------------------------- extremes


def _real(x, name):
    if x.dtype.kind == "c":
        raise NotImplementedError(f"{name} is not implemented for {x.dtype}")
    return x


def _extreme(reduce, x, dim, keepdim, name):
    _real(x, name)
    ax = axes(dim, x.ndim)
    if dim is None or dim == ():
        if x.size == 0:
            raise RuntimeError(f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
                               "reduction dim with the 'dim' argument.")
    else:
        nonempty(x, ax if x.ndim else (), name)
    return reduce(x, axis=ax, keepdims=keepdim)


@op(aten.amax.default)
def amax(self, dim=(), keepdim=False):
    return _extreme(jnp.max, self, tuple(dim), keepdim, "amax")


@op(aten.amin.default)
def amin(self, dim=(), keepdim=False):
    return _extreme(jnp.min, self, tuple(dim), keepdim, "amin")


@op(aten.aminmax.default, aten._aminmax.default, aten._aminmax.dim)
def aminmax(self, dim=None, keepdim=False):
    if dim is None and self.size == 0:
        raise RuntimeError("aminmax(): cannot compute aminmax over an empty dimension as the operation has no identity.")
    if dim is None and keepdim:
        dim = tuple(range(self.ndim))
    return (_extreme(jnp.min, self, dim, keepdim, "aminmax"), _extreme(jnp.max, self, dim, keepdim, "aminmax"))


def _whole(reduce, x, name):
    if x.size == 0:
        raise RuntimeError(f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
                           "reduction dim with the 'dim' argument.")
    return reduce(_real(x, name))


op(aten.max.default)(lambda self: _whole(jnp.max, self, "max"))
op(aten.min.default)(lambda self: _whole(jnp.min, self, "min"))


def _argextreme(x, dim, keepdim, largest, name):
    """First index of the extreme, NaN counting as extreme; found in int32."""
    _real(x, name)
    x = x.astype(np.int8) if x.dtype == np.bool_ else x
    shape = x.shape
    if dim is None:
        if x.size == 0:
            raise IndexError(f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
                             "reduction dim with the 'dim' argument.")
        x, a = x.reshape(-1), 0
    else:
        a = axis(dim, x.ndim)
        nonempty(x, (a,) if x.ndim else (), name)
        x = x.reshape(1) if x.ndim == 0 else x
    index = np.int32 if x.shape[a] < 2**31 else np.int64
    i = (lax.argmax if largest else lax.argmin)(x, a, index)
    if not keepdim or not shape:
        return i.reshape(()) if not shape else i
    return i.reshape([1] * len(shape)) if dim is None else jnp.expand_dims(i, a)


def _no_bool(x, name):
    if x.dtype == np.bool_:
        raise RuntimeError(f"{name}(): does not support bool input")


@op(aten.argmax.default, wide=True)
def argmax(self, dim=None, keepdim=False):
    _no_bool(self, "argmax")
    return widen(_argextreme(self, dim, keepdim, True, "argmax"))


@op(aten.argmin.default, wide=True)
def argmin(self, dim=None, keepdim=False):
    _no_bool(self, "argmin")
    return widen(_argextreme(self, dim, keepdim, False, "argmin"))


@op(aten.max.dim, wide=True)
def max_dim(self, dim, keepdim=False):
    index = _argextreme(self, dim, keepdim, True, "max")
    return jnp.max(self, axis=axes((dim,), self.ndim), keepdims=keepdim), widen(index)


@op(aten.min.dim, wide=True)
def min_dim(self, dim, keepdim=False):
    index = _argextreme(self, dim, keepdim, False, "min")
    return jnp.min(self, axis=axes((dim,), self.ndim), keepdims=keepdim), widen(index)


# ---------------------------------------------------------------- truth


def _truth(x):
    """The dtype of any() and all(): bool, but uint8 for uint8."""
    return x.dtype if x.dtype == np.uint8 else np.dtype(np.bool_)


def _dims(dim):
    return tuple(dim) if isinstance(dim, (tuple, list)) else dim


@op(aten.any.default, aten.any.dim)
def any_(self, dim=None, keepdim=False):
    return jnp.any(self != 0, axis=axes(dim, self.ndim), keepdims=keepdim).astype(_truth(self))


@op(aten.all.default, aten.all.dim)
def all_(self, dim=None, keepdim=False):
    return jnp.all(self != 0, axis=axes(dim, self.ndim), keepdims=keepdim).astype(_truth(self))


def _listed(reduce, x, dim, keepdim):
    if dim == ():  # an empty list reduces nothing here, unlike in sum
        return (x != 0).astype(_truth(x))
    return reduce(x != 0, axis=axes(dim, x.ndim), keepdims=keepdim).astype(_truth(x))


@op(aten.any.dims)
def any_dims(self, dim=None, keepdim=False):
    return _listed(jnp.any, self, _dims(dim), keepdim)


@op(aten.all.dims)
def all_dims(self, dim=None, keepdim=False):
    return _listed(jnp.all, self, _dims(dim), keepdim)


op(aten._is_all_true.default)(lambda self: jnp.all(self))
op(aten._is_any_true.default)(lambda self: jnp.any(self))


@op(aten.equal.default, host=True)
def equal(self, other):
    return jnp.all(self == other) if self.shape == other.shape else jnp.zeros((), np.bool_)


def _close(a, b, rtol, atol, equal_nan):
    close = a == b
    if equal_nan and a.dtype.kind not in "iub":
        close = close | (jnp.isnan(a) & jnp.isnan(b))
    if a.dtype.kind in "iub":
        a, b = cast(a, default_float()), cast(b, default_float())
    else:
        a, b = cast(a, opmath(a.dtype)), cast(b, opmath(b.dtype))
    allowed = atol + jnp.abs(rtol * b)
    difference = jnp.abs(a - b)
    return close | (jnp.isfinite(difference) & (difference <= allowed))


@op(aten.allclose.default, host=True)
def allclose(self, other, rtol=1e-5, atol=1e-8, equal_nan=False):
    if self.dtype != other.dtype:
        raise RuntimeError(f"{self.dtype} did not match {other.dtype}")
    return jnp.all(_close(self, other, rtol, atol, equal_nan))


# ---------------------------------------------------------------- norms


def _vector_norm(x, p, dim, keepdim):
    """The p-norm in the dtype of ``x`` (real for complex); ``p`` is a Python number."""
    ax = axes(dim, x.ndim)
    p = 2.0 if p is None else float(p)
    sizes = [x.shape[a] for a in ax]
    if 0 in sizes and (p < 0 or p == math.inf):
        raise RuntimeError(f"linalg.vector_norm cannot compute the {p:g} norm on an empty dimension because the "
                           "operation does not have an identity")
    size = jnp.abs(x)
    if p == math.inf:
        return jnp.max(size, axis=ax, keepdims=keepdim)
    if p == -math.inf:
        return jnp.min(size, axis=ax, keepdims=keepdim)
    if not ax and p != 0:  # a 0-d input: the power and the root cancel
        return size
    if p == 0:
        return jnp.sum(size != 0, axis=ax, keepdims=keepdim).astype(size.dtype)
    if p == 1:
        return jnp.sum(size, axis=ax, keepdims=keepdim)
    if p == 2:
        square = jnp.square(x.real) + jnp.square(x.imag) if x.dtype.kind == "c" else jnp.square(x)
        return jnp.sqrt(jnp.sum(square, axis=ax, keepdims=keepdim))
    return jnp.sum(size**p, axis=ax, keepdims=keepdim) ** (1.0 / p)


def _norm(x, p, dim, keepdim, dtype, name):
    given = x.dtype if dtype is None else to_jax(dtype)
    if np.dtype(given).kind in "iub":
        raise RuntimeError(f"{name}: Expected a floating point or complex tensor as input. Got {given}")
    if dtype is not None and x.dtype.kind == "c" and np.dtype(given).kind != "c":
        raise RuntimeError(f"{name}: the desired dtype must be complex when the input is complex, got {given}")
    result = np.zeros((), given).real.dtype if np.dtype(given).kind == "c" else given
    return cast(_vector_norm(cast(x, opmath(given)), p, dim, keepdim), result)


@op(aten.linalg_vector_norm.default, static=("ord",))
def linalg_vector_norm(self, ord=2, dim=None, keepdim=False, dtype=None):
    return _norm(self, ord, dim, keepdim, dtype, "linalg.vector_norm")


@op(aten.norm.Scalar, static=("p",))
def norm_scalar(self, p=2):
    return _norm(self, p, None, False, None, "norm()")


@op(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, static=("p",))
def norm_dim(self, p, dim, keepdim=False, dtype=None):
    return _norm(self, p, dim, keepdim, dtype, "norm()")


@op(aten.norm.ScalarOpt_dtype, static=("p",))
def norm_dtype(self, p, dtype=None):
    return _norm(self, p, None, False, dtype, "norm()")


@op(aten.dist.default, static=("p",))
def dist(self, other, p=2):
    compute, result = promote.resolve([self, other])
    size = _vector_norm(cast(self, compute) - cast(other, compute), p, None, False)
    return cast(size, np.zeros((), result).real.dtype)


@op(aten.logsumexp.default)
def logsumexp(self, dim, keepdim=False):
    result = default_float() if self.dtype.kind in "iub" else self.dtype
    x = cast(self, opmath(result))
    ax = axes(dim, x.ndim)
    if any(x.shape[a] == 0 for a in ax):
        return jnp.full([1 if a in ax else n for a, n in enumerate(x.shape) if keepdim or a not in ax], -math.inf, result)
    top = jnp.max(x.real, axis=ax, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, jnp.zeros((), top.dtype))
    out = jnp.log(jnp.sum(jnp.exp(x - top), axis=ax, keepdims=True)) + top
    return cast(out if keepdim else jnp.squeeze(out, ax), result)


@op(aten.hash_tensor.default, wide=True)
def hash_tensor(self, dim=(), keepdim=False, mode=0):
    if mode != 0:
        raise RuntimeError(f"hash_tensor: mode {mode} is not known, 0 (xor) is")
    if self.dtype.kind in "iub":
        words = self.astype(np.int64)
    else:
        words = lax.bitcast_convert_type(cast(self, np.float64), np.int64)
    ax = axes(tuple(dim), self.ndim)
    out = lax.reduce(lax.bitcast_convert_type(words, np.uint64), np.uint64(0), lax.bitwise_xor, ax)
    return jnp.expand_dims(out, ax) if keepdim else out
