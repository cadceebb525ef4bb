"""Pointwise arithmetic and elementary functions."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import Rule, cast, complex_to_float, promote, promote_exact, to_float
from ..registry import aten, op
from ._pointwise import (
    Only,
    constant,
    float_only,
    float_or_complex,
    floating,
    integral,
    kind,
    one,
    real,
    run,
)

# ---------------------------------------------------------------- arithmetic


def _scaled(other, alpha, what):
    """alpha * other, refusing the alphas that torch refuses."""
    if kind(other) in "iu" and kind(alpha) in "fc":
        raise RuntimeError(f"For integral input tensors, argument {what} must not be a floating point number.")
    if kind(other) == "f" and kind(alpha) == "c":
        raise RuntimeError(f"For non-complex input tensors, argument {what} must not be a complex number.")
    return cast(alpha, other.dtype) * other


@op(aten.add.Tensor, aten.add.Scalar, dtype=promote, layout="elementwise")
def add(self, other, alpha=1):
    if self.dtype == jnp.bool_:
        return self | (other if one(alpha) else other & cast(alpha, np.bool_))
    return self + (other if one(alpha) else _scaled(other, alpha, "alpha"))


class _NoBool(Rule):
    """Promotion which refuses bool operands even next to other dtypes."""

    def resolve(self, operands):
        if any(kind(x) == "b" for x in operands):
            raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying "
                               "to invert a mask, use the `~` or `logical_not()` operator instead.")
        return super().resolve(operands)


_difference = _NoBool("promote", promote.kind)


@op(aten.sub.Tensor, aten.sub.Scalar, dtype=_difference, layout="elementwise")
def sub(self, other, alpha=1):
    return self - (other if one(alpha) else _scaled(other, alpha, "alpha"))


@op(aten.rsub.Tensor, aten.rsub.Scalar, dtype=_difference, layout="elementwise")
def rsub(self, other, alpha=1):
    return sub(other, self, alpha)


@op(aten._add_relu.Tensor, aten._add_relu.Scalar, dtype=promote, layout="elementwise")
def add_relu(self, other, alpha=1):
    return jnp.maximum(add(self, other, alpha), 0)


op(aten.mul.Tensor, aten.mul.Scalar, dtype=promote, layout="elementwise")(jnp.multiply)
op(aten.div.Tensor, aten.div.Scalar, dtype=to_float, layout="elementwise")(jnp.true_divide)


def _int_floor_divide(a, b):
    q = lax.div(a, b)
    return q if kind(a) == "u" else q - ((lax.rem(a, b) != 0) & ((a < 0) != (b < 0))).astype(q.dtype)


def floor_div(a, b):
    """torch's floor division: exact for floats (by fmod), toward minus infinity for integers."""
    a, b = jnp.broadcast_arrays(a, b)
    if kind(a) in "iu":
        return _int_floor_divide(a, b)
    mod = lax.rem(a, b)
    div = (a - mod) / b
    div = jnp.where((mod != 0) & ((b < 0) != (mod < 0)), div - 1, div)
    floor = jnp.floor(div)
    floor = jnp.where(div - floor > 0.5, floor + 1, floor)
    floor = jnp.where(div != 0, floor, jnp.copysign(constant(a, 0), a / b))
    return jnp.where(b == 0, a / b, floor)


def trunc_div(a, b):
    """Division rounded toward zero."""
    a, b = jnp.broadcast_arrays(a, b)
    return lax.div(a, b) if kind(a) in "iu" else jnp.trunc(a / b)


@op(aten.div.Tensor_mode, aten.div.Scalar_mode, layout="elementwise")
def div_mode(self, other, rounding_mode):
    if rounding_mode is None:
        return run(to_float, jnp.true_divide, self, other)
    if rounding_mode not in ("floor", "trunc"):
        raise RuntimeError("div expected rounding_mode to be one of None, 'trunc', or 'floor' but found "
                           f"'{rounding_mode}'")
    return run(real, floor_div if rounding_mode == "floor" else trunc_div, self, other)


op(aten.floor_divide.default, aten.floor_divide.Scalar, dtype=real, layout="elementwise")(
    lambda self, other: floor_div(self, other))


@op(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor, dtype=real, layout="elementwise")
def remainder(self, other):
    self, other = jnp.broadcast_arrays(self, other)
    mod = lax.rem(self, other)
    return mod if kind(self) == "u" else jnp.where((mod != 0) & ((mod < 0) != (other < 0)), mod + other, mod)


@op(aten.fmod.Tensor, aten.fmod.Scalar, dtype=real, layout="elementwise")
def fmod(self, other):
    return lax.rem(*jnp.broadcast_arrays(self, other))


@op(aten.addcmul.default, dtype=promote, layout="elementwise")
def addcmul(self, tensor1, tensor2, value=1):
    return self + (tensor1 * tensor2 if one(value) else _scaled(tensor1, value, "value") * tensor2)


@op(aten.addcdiv.default, dtype=float_or_complex, layout="elementwise")
def addcdiv(self, tensor1, tensor2, value=1):
    return self + (tensor1 if one(value) else cast(value, self.dtype) * tensor1) / tensor2


@op(aten.lerp.Scalar, aten.lerp.Tensor, dtype=float_or_complex, layout="elementwise")
def lerp(self, end, weight):
    # the form nearer to the end point that dominates, as torch has it: exact at weight 0 and 1
    return jnp.where(jnp.abs(weight) < 0.5, self + weight * (end - self), end - (end - self) * (1 - weight))


# ---------------------------------------------------------------- powers


def int_pow(base, exponent):
    """Integer powers by squaring, wrapping on overflow; a negative exponent leaves 1, -1 or 0."""
    base, exponent = jnp.broadcast_arrays(base, exponent)
    negative = exponent < 0
    count = jnp.where(negative, 0, exponent)

    def step(state):
        acc, square, left = state
        return jnp.where(left & 1 == 1, acc * square, acc), square * square, lax.shift_right_logical(left, jnp.ones_like(left))

    power = lax.while_loop(lambda s: jnp.any(s[2] > 0), step, (jnp.ones_like(base), base, count))[0]
    one_ = jnp.ones_like(base)
    inverse = jnp.where(base == 1, one_, jnp.zeros_like(base))
    if kind(base) == "i":
        inverse = jnp.where(base == -1, jnp.where(exponent & 1 == 1, -one_, one_), inverse)
    return jnp.where(negative, inverse, power)


@op(aten.pow.Tensor_Tensor, aten.pow.Scalar, dtype=Only(promote, "iufc"), layout="elementwise")
def pow_(self, exponent):
    return int_pow(self, exponent) if kind(self) in "iu" else _float_pow(self, exponent)


def _float_pow(base, exponent):
    out = jnp.power(base, exponent)
    if kind(base) != "c":
        return out
    return jnp.where((base == 0) & (exponent.real > 0), constant(base, 0), out)  # XLA goes through the log


@op(aten.pow.Tensor_Scalar, static=("exponent",), wide="int", layout="elementwise")
def pow_scalar(self, exponent):
    if kind(self) in "iub" and isinstance(exponent, int) and exponent < 0:
        raise RuntimeError("Integers to negative integer powers are not allowed.")

    def power(x):
        if x.dtype == jnp.bool_:
            return x | (not exponent)
        if exponent in (0.5, -0.5) and kind(x) in "fc":
            return jnp.sqrt(x) if exponent > 0 else lax.rsqrt(x)
        if not isinstance(exponent, complex) and exponent == int(exponent if abs(exponent) < 1e9 else 0.5) and (
                kind(x) in "iu" or abs(exponent) <= 3):
            return lax.integer_pow(x, int(exponent))
        if kind(x) in "iu":
            return int_pow(x, cast(exponent, x.dtype))
        return _float_pow(x, cast(exponent, x.dtype))

    compute, result = promote.resolve([self, exponent])
    return cast(power(cast(self, compute)), result)


op(aten.sqrt.default, dtype=to_float, layout="elementwise")(jnp.sqrt)
op(aten.rsqrt.default, dtype=to_float, layout="elementwise")(lax.rsqrt)
op(aten.reciprocal.default, dtype=to_float, layout="elementwise")(lambda self: 1 / self)
op(aten.square.default, dtype=Only(promote, "iufc"), layout="elementwise")(lambda self: self * self)

# ---------------------------------------------------------------- elementary functions

for _name, _fn in {
    "exp": jnp.exp, "expm1": jnp.expm1, "log": jnp.log, "log2": jnp.log2, "log10": jnp.log10,
    "log1p": jnp.log1p, "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "asin": jnp.arcsin, "acos": jnp.arccos,
    "atan": jnp.arctan, "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh, "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh, "atanh": jnp.arctanh, "sinc": jnp.sinc, "sigmoid": jax.nn.sigmoid, "exp2": jnp.exp2,
}.items():
    op(getattr(aten, _name).default, dtype=to_float, layout="elementwise")(_fn)

op(aten.deg2rad.default, dtype=float_only, layout="elementwise")(lambda self: self * constant(self, np.pi / 180))
op(aten.rad2deg.default, dtype=float_only, layout="elementwise")(lambda self: self * constant(self, 180 / np.pi))


op(aten.atan2.default, dtype=float_only, layout="elementwise")(lambda self, other: jnp.arctan2(self, other))
op(aten.hypot.default, dtype=floating, layout="elementwise")(lambda self, other: jnp.hypot(self, other))
op(aten.nextafter.default, dtype=Only(promote_exact, "f"), layout="elementwise")(
    lambda self, other: jnp.nextafter(self, other))


@op(aten.logaddexp.default, dtype=float_or_complex, layout="elementwise")
def logaddexp(self, other):
    if kind(self) != "c":
        return jnp.logaddexp(self, other)
    # the branch of the larger operand is kept: its imaginary part may leave (-pi, pi]
    first = self.real >= other.real
    big, small = jnp.where(first, self, other), jnp.where(first, other, self)
    out = jnp.log1p(jnp.exp(small - big)) + big
    same = (small.real == big.real) & jnp.isinf(big.real)
    return jnp.where(same, jnp.where(big.real < 0, small, jnp.log(jnp.exp(small) + jnp.exp(big))), out)


op(aten.logaddexp2.default, dtype=float_or_complex, layout="elementwise")(
    lambda self, other: jnp.logaddexp2(self, other))


@op(aten.copysign.Tensor, aten.copysign.Scalar, dtype=float_only, layout="elementwise")
def copysign(self, other):
    return jnp.copysign(self, other)


@op(aten.ldexp.Tensor, layout="elementwise")
def ldexp(self, other):
    return run(promote, jnp.multiply, self, run(to_float, jnp.exp2, other))


@op(aten.frexp.Tensor)
def frexp(self):
    if kind(self) != "f":
        raise RuntimeError(f"torch.frexp() only supports floating-point dtypes, got {self.dtype}")
    wide = self if self.dtype.itemsize > 2 else self.astype(jnp.float32)
    mantissa, exponent = jnp.frexp(wide)
    return mantissa.astype(self.dtype), exponent.astype(jnp.int32)


@op(aten.heaviside.default, dtype=Only(promote_exact, "iufb"), layout="elementwise")
def heaviside(self, values):
    step = (self > 0).astype(self.dtype) if self.dtype != jnp.bool_ else self
    return jnp.where(self == 0, values, step)


@op(aten.gcd.default, dtype=integral, layout="elementwise")
def gcd(self, other):
    return jnp.gcd(self, other)


@op(aten.lcm.default, dtype=integral, layout="elementwise")
def lcm(self, other):
    return jnp.lcm(self, other)


# ---------------------------------------------------------------- rounding and sign


def _round_op(fn):
    """Integers are whole already; bool and complex have no rounding in torch."""
    return lambda self: self if kind(self) in "iu" else fn(self)


for _name, _fn in {"ceil": jnp.ceil, "floor": jnp.floor, "trunc": jnp.trunc,
                   "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)}.items():
    op(getattr(aten, _name).default, dtype=real, layout="elementwise")(_round_op(_fn))

op(aten.frac.default, dtype=floating, layout="elementwise")(lambda self: self - jnp.trunc(self))


@op(aten.round.decimals, dtype=real("self"), layout="elementwise")
def round_decimals(self, decimals):
    nearest = lax.RoundingMethod.TO_NEAREST_EVEN
    if decimals == 0:
        return self if kind(self) in "iu" else lax.round(self, nearest)
    if kind(self) in "iu":
        raise NotImplementedError(f"round with decimals is not implemented for {self.dtype}")
    ten = constant(self, 10.0 ** abs(decimals))
    return lax.round(self * ten, nearest) / ten if decimals > 0 else lax.round(self / ten, nearest) * ten


@op(aten.neg.default, dtype=Only(promote, "iufc"), layout="elementwise")
def neg(self):
    return -self


@op(aten.abs.default, dtype=Only(complex_to_float, "iufc"), layout="elementwise")
def abs_(self):
    return jnp.abs(self)


@op(aten.sign.default, dtype=Only(promote, "iufb"), layout="elementwise")
def sign(self):
    # nan has no sign in torch: 0
    return self if self.dtype == jnp.bool_ else jnp.where(jnp.isnan(self), constant(self, 0), jnp.sign(self))


@op(aten.sgn.default, dtype=promote, layout="elementwise")
def sgn(self):
    if kind(self) == "c":
        size = jnp.abs(self)
        return jnp.where(size == 0, constant(self, 0), self / jnp.where(size == 0, 1, size))
    return sign(self)
