"""Tensors from nothing: constants, ranges, identity matrices, index grids."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import i0

from ..dtypes import cast, default_float, opmath, to_jax
from ..registry import aten, op


def _dtype(dtype, like):
    return to_jax(dtype) if dtype is not None else like.dtype


@op(aten.zeros.default, aten._efficientzerotensor.default)
def zeros(size, dtype=None):
    return jnp.zeros(size, to_jax(dtype) if dtype is not None else default_float())


@op(aten.ones.default)
def ones(size, dtype=None):
    return jnp.ones(size, to_jax(dtype) if dtype is not None else default_float())


def _inferred(value):
    """torch.full's dtype for a fill value: bool, int64, the default float or its complex."""
    kind = "b" if isinstance(value, bool) else value.dtype.kind if hasattr(value, "dtype") else np.asarray(value).dtype.kind
    if kind == "c":
        return np.dtype(np.complex128 if default_float() == np.float64 else np.complex64)
    return {"b": np.dtype(np.bool_), "i": np.dtype(np.int64), "u": np.dtype(np.int64)}.get(kind, default_float())


@op(aten.full.default, wide=True)
def full(size, fill_value, dtype=None):
    return jnp.broadcast_to(cast(fill_value, to_jax(dtype) if dtype is not None else _inferred(fill_value)), size)


@op(aten.scalar_tensor.default)
def scalar_tensor(s, dtype=None):
    return cast(s, to_jax(dtype) if dtype is not None else default_float())


@op(aten.zeros_like.default, shape_only=("self",))
def zeros_like(self, dtype=None):
    return jnp.zeros(self.shape, _dtype(dtype, self))


@op(aten.ones_like.default, shape_only=("self",))
def ones_like(self, dtype=None):
    return jnp.ones(self.shape, _dtype(dtype, self))


@op(aten.full_like.default, shape_only=("self",))
def full_like(self, fill_value, dtype=None):
    return jnp.broadcast_to(cast(fill_value, _dtype(dtype, self)), self.shape)


@op(aten.new_zeros.default, shape_only=("self",))
def new_zeros(self, size, dtype=None):
    return jnp.zeros(size, _dtype(dtype, self))


@op(aten.new_ones.default, shape_only=("self",))
def new_ones(self, size, dtype=None):
    return jnp.ones(size, _dtype(dtype, self))


@op(aten.new_full.default, shape_only=("self",))
def new_full(self, size, fill_value, dtype=None):
    return jnp.broadcast_to(cast(fill_value, _dtype(dtype, self)), size)


@op(aten.zero_.default, shape_only=("self",))
def zero_(self):
    return jnp.zeros(self.shape, self.dtype)


@op(aten.eye.default)
def eye(n, dtype=None):
    return eye_m(n, n, dtype)


@op(aten.eye.m)
def eye_m(n, m, dtype=None):
    if n < 0 or m < 0:
        raise RuntimeError(f"n and m must be greater or equal to 0, got {n} and {m}")
    return jnp.eye(n, m, dtype=to_jax(dtype) if dtype is not None else default_float())


def _grid(start, end, steps, dtype):
    """torch.linspace's values: from both ends, so that the last one is ``end`` exactly."""
    for name, v in (("start", start), ("end", end)):
        if getattr(v, "ndim", 0):
            raise RuntimeError(f"linspace only supports 0-dimensional start and end tensors, but got {name} with {v.ndim} "
                               "dimension(s)")
    if steps < 0:
        raise RuntimeError("number of steps must be non-negative")
    dtype = to_jax(dtype) if dtype is not None else default_float() if not _complex(start, end) else np.dtype(np.complex64)
    compute = np.dtype(np.float64) if dtype.kind in "iu" else np.dtype(np.float32) if dtype.itemsize < 4 else dtype
    # integers step between truncated ends
    start, end = (cast(cast(v, dtype), compute) for v in (start, end))
    if steps == 1:
        return start[None], compute, dtype
    i = lax.iota(np.int32, steps)
    step = (end - start) / cast(steps - 1, compute)
    below, above = cast(i, compute), cast(steps - 1 - i, compute)
    return jnp.where(i < steps // 2, start + step * below, end - step * above), compute, dtype


def _complex(*values):
    return any(isinstance(v, complex) or getattr(getattr(v, "dtype", None), "kind", "") == "c" for v in values)


@op(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor, wide=True)
def linspace(start, end, steps, dtype=None):
    values, _, dtype = _grid(start, end, steps, dtype)
    return cast(values, dtype)


@op(aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor, wide=True,
    static=("base",))
def logspace(start, end, steps, base=10.0, dtype=None):
    values, compute, dtype = _grid(start, end, steps, dtype)
    wide = np.dtype(np.complex128 if compute.kind == "c" else np.float64)
    return cast(jnp.power(cast(base, wide), cast(values, wide)), dtype)


def _triangle(row, col, offset, dtype, lower):
    full_grid = np.ones((row, col), bool)
    index = np.nonzero(np.tril(full_grid, offset) if lower else np.triu(full_grid, offset))
    return jnp.asarray(np.stack(index), to_jax(dtype) if dtype is not None else np.dtype(np.int64))


@op(aten.tril_indices.default, wide=True)
def tril_indices(row, col, offset=0, dtype=None):
    return _triangle(row, col, offset, dtype, lower=True)


@op(aten.triu_indices.default, wide=True)
def triu_indices(row, col, offset=0, dtype=None):
    return _triangle(row, col, offset, dtype, lower=False)


@op(aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta)
def kaiser_window(window_length, periodic=True, beta=12.0, dtype=None):
    if window_length < 0:
        raise RuntimeError(f"kaiser_window requires non-negative window_length, got window_length={window_length}")
    dtype = to_jax(dtype) if dtype is not None else default_float()
    if dtype.kind in "iubc":
        raise RuntimeError(f"kaiser_window expects floating point dtypes, got: {dtype}")
    if window_length < 2:
        return jnp.ones(window_length, dtype)
    compute = opmath(dtype)
    last = window_length if periodic else window_length - 1
    x = lax.iota(np.int32, window_length).astype(compute) * compute.type(2 / last) - 1
    beta = cast(beta, compute)
    return cast(i0(beta * jnp.sqrt(jnp.maximum(1 - x * x, 0))) / i0(beta), dtype)
