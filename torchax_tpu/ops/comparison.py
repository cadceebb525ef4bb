"""Comparisons, logical and bitwise ops, minimum and maximum, clamp, where, masked_fill."""

import jax.numpy as jnp
from jax import lax

from ..dtypes import cast, promote, promote_exact, to_bool
from ..registry import aten, op
from ._pointwise import Only, bits, compare, kind, run


class _Ordered(type(compare)):
    """Comparison of ordered numbers; complex ones raise."""

    def resolve(self, operands):
        compute, result = super().resolve(operands)
        if kind(compute) == "c":
            raise NotImplementedError("complex numbers have no order")
        return compute, result


_ordered = _Ordered("to_bool", compare.kind)

for _name, _fn, _rule in (("eq", jnp.equal, compare), ("ne", jnp.not_equal, compare), ("lt", jnp.less, _ordered),
                          ("le", jnp.less_equal, _ordered), ("gt", jnp.greater, _ordered),
                          ("ge", jnp.greater_equal, _ordered)):
    _packet = getattr(aten, _name)
    op(_packet.Tensor, _packet.Scalar, dtype=_rule, layout="elementwise")(_fn)

op(aten.isnan.default, dtype=compare, layout="elementwise")(jnp.isnan)
op(aten.isinf.default, dtype=compare, layout="elementwise")(jnp.isinf)
op(aten.isposinf.default, dtype=_ordered, layout="elementwise")(jnp.isposinf)
op(aten.isneginf.default, dtype=_ordered, layout="elementwise")(jnp.isneginf)


@op(aten.signbit.default, dtype=_ordered, layout="elementwise")
def signbit(self):
    return jnp.zeros_like(self) if self.dtype == jnp.bool_ else jnp.signbit(self) if kind(self) == "f" else self < 0


# ---------------------------------------------------------------- logical and bitwise

op(aten.logical_and.default, dtype=to_bool, layout="elementwise")(jnp.logical_and)
op(aten.logical_or.default, dtype=to_bool, layout="elementwise")(jnp.logical_or)
op(aten.logical_xor.default, dtype=to_bool, layout="elementwise")(jnp.logical_xor)
op(aten.logical_not.default, dtype=to_bool, layout="elementwise")(jnp.logical_not)

for _name, _fn in (("bitwise_and", jnp.bitwise_and), ("bitwise_or", jnp.bitwise_or), ("bitwise_xor", jnp.bitwise_xor)):
    _packet = getattr(aten, _name)
    op(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor, dtype=bits, layout="elementwise")(_fn)
op(aten.bitwise_not.default, dtype=bits, layout="elementwise")(jnp.bitwise_not)


def _out_of_range(other, limit):
    return (other < 0) | (other >= limit) if kind(other) == "i" else other >= limit


def left_shift(self, other):
    """Bits pushed out are lost; a negative or too large count gives 0."""
    limit = self.dtype.itemsize * 8
    bad = _out_of_range(other, limit)
    return jnp.where(bad, 0, lax.shift_left(self, jnp.where(bad, 0, other)))


def right_shift(self, other):
    """Arithmetic for signed integers; a negative or too large count leaves the sign only."""
    limit = self.dtype.itemsize * 8 - (kind(self) == "i")
    bad = _out_of_range(other, limit)
    if kind(self) == "u":
        return jnp.where(bad, 0, lax.shift_right_logical(self, jnp.where(bad, 0, other)))
    return lax.shift_right_arithmetic(self, jnp.where(bad, limit, other))


@op(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor,
    dtype=Only(promote, "iu"), layout="elementwise")
def bitwise_left_shift(self, other):
    return left_shift(*jnp.broadcast_arrays(self, other))


@op(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor,
    dtype=Only(promote, "iu"), layout="elementwise")
def bitwise_right_shift(self, other):
    return right_shift(*jnp.broadcast_arrays(self, other))


op(aten.__lshift__.Tensor, aten.__lshift__.Scalar, dtype=Only(promote, "iu"), layout="elementwise")(bitwise_left_shift)
op(aten.__rshift__.Tensor, aten.__rshift__.Scalar, dtype=Only(promote, "iu"), layout="elementwise")(bitwise_right_shift)


# ---------------------------------------------------------------- minimum, maximum, clamp

_no_complex = Only(promote_exact, "iufb")
op(aten.maximum.default, dtype=_no_complex, layout="elementwise")(jnp.maximum)
op(aten.minimum.default, dtype=_no_complex, layout="elementwise")(jnp.minimum)


@op(aten.fmax.default, dtype=_no_complex, layout="elementwise")
def fmax(self, other):
    return jnp.fmax(self, other) if kind(self) == "f" else jnp.maximum(self, other)


@op(aten.fmin.default, dtype=_no_complex, layout="elementwise")
def fmin(self, other):
    return jnp.fmin(self, other) if kind(self) == "f" else jnp.minimum(self, other)


@op(aten.clamp.default, aten.clamp.Tensor, dtype=Only(promote_exact, "iuf"), layout="elementwise")
def clamp(self, min=None, max=None):
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    if min is not None:
        self = jnp.maximum(self, min)
    return self if max is None else jnp.minimum(self, max)


@op(aten.clamp_min.default, aten.clamp_min.Tensor, dtype=Only(promote_exact, "biuf"), layout="elementwise")
def clamp_min(self, min):
    return jnp.maximum(self, min)


@op(aten.clamp_max.default, aten.clamp_max.Tensor, dtype=Only(promote_exact, "biuf"), layout="elementwise")
def clamp_max(self, max):
    return jnp.minimum(self, max)


# ---------------------------------------------------------------- selection


@op(aten.where.self, layout="elementwise")
def where(condition, self, other):
    if condition.dtype not in (jnp.bool_, jnp.uint8):
        raise RuntimeError("where expected condition to be a boolean tensor, but got a tensor with dtype "
                           f"{condition.dtype}")
    condition = condition != 0
    return run(promote_exact, lambda a, b: jnp.where(condition, a, b), self, other)


@op(aten.masked_fill.Scalar, aten.masked_fill.Tensor, layout="elementwise")
def masked_fill(self, mask, value):
    if mask.dtype != jnp.bool_:
        raise RuntimeError(f"masked_fill only supports boolean masks, but got mask with dtype {mask.dtype}")
    if getattr(value, "ndim", 0):
        raise RuntimeError("masked_fill only supports a 0-dimensional value tensor, but got tensor with "
                           f"{value.ndim} dimension(s).")
    if kind(value) == "c" and kind(self) != "c":
        raise RuntimeError(f"value cannot be converted to type {self.dtype} without overflow")
    return jnp.where(mask, cast(value, self.dtype), self)


@op(aten.fill.Scalar, aten.fill.Tensor, shape_only=("self",), layout="elementwise")
def fill(self, value):
    if getattr(value, "ndim", 0):
        raise RuntimeError(f"fill_ only supports 0-dimension value tensor but got tensor with {value.ndim} dimensions.")
    if kind(value) == "c" and kind(self) != "c" and getattr(value, "weak_type", False):
        raise RuntimeError(f"value cannot be converted to type {self.dtype} without overflow")
    return jnp.broadcast_to(cast(value, self.dtype), self.shape)


@op(aten.nan_to_num.default, layout="elementwise")
def nan_to_num(self, nan=None, posinf=None, neginf=None):
    if kind(self) == "c":
        return lax.complex(nan_to_num(self.real, nan, posinf, neginf), nan_to_num(self.imag, nan, posinf, neginf))
    if kind(self) != "f":
        return self
    info = jnp.finfo(self.dtype)

    def pick(value, default):
        return cast(default if value is None else value, self.dtype)

    out = jnp.where(jnp.isnan(self), pick(nan, 0.0), self)
    out = jnp.where(self == jnp.inf, pick(posinf, info.max), out)
    return jnp.where(self == -jnp.inf, pick(neginf, info.min), out)
