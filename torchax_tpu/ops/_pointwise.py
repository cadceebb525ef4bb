"""Shared by the pointwise families: dtype rules that refuse, conditional promotion, small helpers."""

import jax.numpy as jnp
import numpy as np

from ..dtypes import (
    KIND,
    TO_TORCH,
    Rule,
    cast,
    default_float,
    promote,
    promote_exact,
    to_bool,
    to_float,
)


def kind(x):
    """numpy's kind letter of an array, dtype or Python number; halves count as "f"."""
    dtype = np.dtype(getattr(x, "dtype", type(x) if isinstance(x, (bool, int, float, complex)) else x))
    return "f" if dtype.kind == "V" else dtype.kind


class Only(Rule):
    """A rule for the dtype kinds that torch's kernel has; the others raise, as there."""

    def __init__(self, rule, kinds):
        super().__init__(rule.label, rule.kind, rule.names)
        self.rule, self.kinds = rule, kinds

    def __call__(self, *names):
        return Only(self.rule(*names), self.kinds)

    def resolve(self, operands):
        compute, result = self.rule.resolve(operands)
        if kind(compute) not in self.kinds:
            raise NotImplementedError(f"not implemented for {TO_TORCH[compute]}")
        return compute, result


class _ToFloatReal(Rule):
    """Integers become the default float, complex numbers their real counterpart (angle)."""

    def resolve(self, operands):
        compute, result = super().resolve(operands)
        return (compute, result) if kind(result) == "f" else (default_float(),) * 2


class _Exact(Rule):
    """Compare in the promoted dtype itself: a scalar is rounded to a half type first, as in torch."""

    def resolve(self, operands):
        _, compute = promote_exact.resolve(operands)
        return compute, np.dtype(np.bool_)


compare = _Exact("to_bool", to_bool.kind)
angle_rule = _ToFloatReal("to_float", KIND.COMPLEX_TO_FLOAT)
floating = Only(promote, "f")
float_or_complex = Only(promote, "fc")
integral = Only(promote, "iu")
bits = Only(promote, "iub")
real = Only(promote, "iuf")
float_only = Only(to_float, "f")


def run(rule, fn, *operands):
    """Apply ``fn`` under a dtype rule chosen while tracing (div by rounding mode, ldexp)."""
    compute, result = rule.resolve(operands)
    return cast(fn(*(cast(x, compute) for x in operands)), result)


def one(value):
    """Whether a scale factor is the literal default, so that no multiplication is needed."""
    return type(value) is int and value == 1


def constant(x, value):
    """``value`` in the dtype of ``x``."""
    return jnp.asarray(value, x.dtype)
