"""Pointwise arithmetic, comparison and elementary functions."""

import jax.numpy as jnp

from ..dtypes import promote, to_bool, to_float
from ..registry import aten, op


@op(aten.add.Tensor, aten.add.Scalar, dtype=promote, layout="elementwise")
def add(self, other, alpha=1):
    if self.dtype == jnp.bool_:
        return self | other
    return self + other if isinstance(alpha, int) and alpha == 1 else self + alpha * other


@op(aten.sub.Tensor, aten.sub.Scalar, dtype=promote, layout="elementwise")
def sub(self, other, alpha=1):
    return self - (other if isinstance(alpha, int) and alpha == 1 else alpha * other)


op(aten.mul.Tensor, aten.mul.Scalar, dtype=promote, layout="elementwise")(jnp.multiply)
op(aten.div.Tensor, aten.div.Scalar, dtype=to_float, layout="elementwise")(jnp.true_divide)
op(aten.sin.default, dtype=to_float, layout="elementwise")(jnp.sin)
op(aten.cos.default, dtype=to_float, layout="elementwise")(jnp.cos)
op(aten.eq.Tensor, aten.eq.Scalar, dtype=to_bool, layout="elementwise")(jnp.equal)


@op(aten.fill_.Scalar, aten.fill_.Tensor, shape_only=("self",))
def fill_(self, value):
    return jnp.broadcast_to(value, self.shape)


@op(aten.mm.default, dtype=promote)
def mm(self, mat2):
    return self @ mat2


@op(aten.sum.default, aten.sum.dim_IntList, wide="int")
def sum_(self, dim=None, keepdim=False, dtype=None):
    if dtype is None and self.dtype.kind in "iub":
        self = self.astype(jnp.int64)
    return jnp.sum(self, axis=(tuple(dim) if dim and self.ndim else None), keepdims=keepdim)


@op(aten.ones_like.default, shape_only=("self",))
def ones_like(self, dtype=None):
    return jnp.ones(self.shape, self.dtype)


@op(aten.normal_.default, shape_only=("self",), random=True)
def normal_(key, self, mean=0.0, std=1.0):
    import jax
    return jax.random.normal(key, self.shape) * std + mean
