"""Complex numbers: building, parts, conjugates (the views real, imag, view_as_* are view ops)."""

import jax.numpy as jnp
from jax import lax

from ..dtypes import promote, promote_exact
from ..registry import aten, op
from ._pointwise import angle_rule, kind


@op(aten.angle.default, dtype=angle_rule, layout="elementwise")
def angle(self):
    if kind(self) == "c":
        return jnp.arctan2(self.imag, self.real)
    return jnp.where(jnp.isnan(self), self, jnp.where(self < 0, jnp.pi, 0).astype(self.dtype))


def _same(a, b, what):
    if a.dtype != b.dtype:
        raise RuntimeError(f"Expected object of scalar type {a.dtype} but got scalar type {b.dtype} for second argument")
    if kind(a) != "f" or a.dtype.itemsize == 2 and a.dtype != jnp.float16:
        raise RuntimeError(f"Expected both inputs of {what} to be Half, Float or Double tensors but got {a.dtype}")


@op(aten.complex.default, layout="elementwise")
def complex_(real, imag):
    _same(real, imag, "complex")
    if real.dtype == jnp.float16:
        raise NotImplementedError("torch.complex32 has no JAX counterpart")
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@op(aten.polar.default, layout="elementwise")
def polar(abs, angle):
    _same(abs, angle, "polar")
    return lax.complex(*jnp.broadcast_arrays(abs * jnp.cos(angle), abs * jnp.sin(angle)))


op(aten._conj_physical.default, dtype=promote_exact, layout="elementwise")(jnp.conj)
op(aten.conj_physical.default, dtype=promote_exact, layout="elementwise")(jnp.conj)
op(aten.conj_physical_.default, dtype=promote, layout="elementwise")(jnp.conj)
