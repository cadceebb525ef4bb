"""torch and JAX dtypes: the two tables, type promotion, and which dtypes need 64-bit mode.

Promotion is torch's own (`torch._prims_common.elementwise_dtypes`); it runs while an op is
traced, never per call.
"""

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

TO_JAX = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: np.dtype(ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: np.dtype(ml_dtypes.float8_e5m2fnuz),
    torch.float8_e8m0fnu: np.dtype(ml_dtypes.float8_e8m0fnu),
}
TO_TORCH = {v: k for k, v in TO_JAX.items()}
WIDE_TORCH = frozenset({torch.int64, torch.uint64, torch.float64, torch.complex128})
WIDE = frozenset(TO_JAX[d] for d in WIDE_TORCH)
# np.dtype -> (torch dtype, needs 64-bit mode): one lookup serves both when a result is wrapped.
# 64-bit dtypes and what holds them when config.int64 is "narrow" (see narrow.py)
NARROW = {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32),
          np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.complex64)}
NARROW_TORCH = {TO_TORCH[k]: TO_TORCH[v] for k, v in NARROW.items()}


class Narrowing(threading.local):
    """Per thread, while a function is traced for narrow.py: ``inside``, and ``active`` if over narrow arrays."""

    active = inside = False


narrowing = Narrowing()
WRAP = {v: (k, v in WIDE) for k, v in TO_JAX.items()}


def to_jax(dtype):
    """The numpy dtype of the arrays that hold ``dtype``; TypeError names dtypes JAX has not."""
    try:
        return TO_JAX[dtype]
    except KeyError:
        raise TypeError(f"{dtype} has no JAX counterpart; torchax_tpu holds {sorted(map(str, TO_JAX))}") from None


def is_wide(dtype):
    """Whether a torch dtype needs JAX's 64-bit mode."""
    return dtype in WIDE_TORCH


def _weak(x):
    return not hasattr(x, "dtype") or getattr(x, "weak_type", False)


_PY = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def _probe(x):
    """What torch's promotion wants to see of an operand: a Python number, or a tensor."""
    if not hasattr(x, "dtype"):
        return type(x)(1)
    if getattr(x, "weak_type", False):
        return _PY[x.dtype.kind](1)
    return torch.empty((1,) * x.ndim, dtype=TO_TORCH[x.dtype], device="meta")


class Rule:
    """How an op's operand and result dtypes follow from its inputs.

    ``rule(operands)`` returns (compute dtype, result dtype) as numpy dtypes. ``names`` says
    which arguments take part (and are cast to the compute dtype); None means every tensor and
    every Scalar but the scale factors (alpha, beta, value, eps ...).
    """

    SCALES = frozenset({"alpha", "beta", "value", "eps", "rcond", "rtol", "atol"})

    def __init__(self, label, kind, names=None):
        self.label, self.kind, self.names = label, kind, names

    def __call__(self, *names):
        return Rule(self.label, self.kind, names)

    def takes(self, name):
        return name in self.names if self.names is not None else name not in self.SCALES

    def resolve(self, operands):
        compute, result = elementwise_dtypes(*map(_probe, operands), type_promotion_kind=self.kind)
        return TO_JAX[compute], TO_JAX[result]


promote = Rule("promote", KIND.DEFAULT)  # add: opmath for half types
promote_exact = Rule("promote_exact", KIND.NO_OPMATH)  # where, cat: no arithmetic
to_float = Rule("to_float", KIND.INT_TO_FLOAT)  # sin: integers become the default float
to_bool = Rule("to_bool", KIND.ALWAYS_BOOL)  # eq
complex_to_float = Rule("complex_to_float", KIND.COMPLEX_TO_FLOAT)  # abs
bool_to_long = Rule("bool_to_long", KIND.BOOL_TO_LONG)  # pow


class Keep(Rule):
    """Compute in the first operand's dtype (halves in float32); the result has that dtype."""

    def __init__(self, label="keep", names=None):
        super().__init__(label, None, names)

    def __call__(self, *names):
        return Keep(self.label, names)

    def resolve(self, operands):
        result = operands[0].dtype
        return opmath(result), result


keep = Keep()


def opmath(dtype):
    """The dtype torch's CPU kernels compute in: float32 for half types, else ``dtype``."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype


def _floating(dtype):
    return dtype.kind == "f" or dtype.kind == "V"  # bfloat16 and float8 are of numpy's kind "V"


def cast(x, dtype):
    """``x`` as an array of exactly ``dtype`` (numpy or torch), never weakly typed.

    Float to integer truncates, complex to real drops the imaginary part, as in torch.
    """
    dtype = TO_JAX.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype
    if not hasattr(x, "dtype"):
        return jnp.asarray(x, dtype)
    if x.dtype == dtype:
        return jax.lax.convert_element_type(x, dtype) if getattr(x, "weak_type", False) else x
    if x.dtype.kind == "c" and np.dtype(dtype).kind != "c":
        x = x != 0 if dtype == np.bool_ else x.real
    elif _floating(x.dtype) and np.dtype(dtype).kind == "u" and np.dtype(dtype).itemsize < 4:
        # torch wraps negative floats modulo 2**bits (through a wide integer); XLA saturates.
        x = jax.lax.convert_element_type(x, np.int32)
    elif _floating(x.dtype) and np.dtype(dtype).kind == "i" and np.dtype(dtype).itemsize < 4:
        x = jax.lax.convert_element_type(x, np.int32)
    if x.dtype == np.bool_ and np.dtype(dtype).kind in "fcV":
        # XLA turns convert(mask) * x into select(mask, x, 0), which forgets that 0 * inf is nan; it leaves this form alone
        return jnp.where(x, jnp.ones((), dtype), jnp.zeros((), dtype))
    if x.dtype == np.bool_ or dtype == np.bool_:
        return x.astype(dtype)
    return jax.lax.convert_element_type(x, dtype)


def default_float():
    """torch's default float dtype, as a numpy dtype."""
    dtype = TO_JAX[torch.get_default_dtype()]
    return NARROW.get(dtype, dtype) if narrowing.active else dtype
