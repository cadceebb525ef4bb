"""From bound arguments to one compiled call: program building and the per-op jit cache.

`Program` is what an op becomes for one combination of static arguments: a function over a
flat list of arrays, jitted. Only arrays pass through here; tensors are tensor.py's business.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import dtypes, narrow, strides
from .random import make_key
from .registry import SCALAR, SCALARS, STATIC, TENSOR, TENSORS

ARRAY, LIST, CONST, VIEWED = range(4)  # slot kinds of a program's structure


def apply(op, positional, keyword):
    """Run an op's impl on arrays under its dtype rule; returns arrays of the result dtypes."""
    rule = op.rule
    if rule is None:
        return op.impl(*positional, **keyword)
    names = op.names[: len(positional)] + list(keyword)
    values = list(positional) + list(keyword.values())
    operands = []
    for name, v in zip(names, values):
        if v is not None and rule.takes(name) and _is_operand(op, name, v):
            operands.extend(x for x in v if x is not None) if isinstance(v, (list, tuple)) else operands.append(v)
    compute, result = rule.resolve(operands)
    done = [_to_compute(op, rule, n, v, compute) for n, v in zip(names, values)]
    n = len(positional)
    out = op.impl(*done[:n], **dict(zip(keyword, done[n:])))
    if isinstance(out, (tuple, list)):
        return type(out)(dtypes.cast(o, result) for o in out)
    return dtypes.cast(out, result)


def _is_operand(op, name, value):
    kind = op.kinds[name]
    if kind in (TENSOR, TENSORS, SCALAR, SCALARS):
        return True
    return kind == STATIC and name in op.static and isinstance(value, (int, float, complex)) and not isinstance(
        value, bool) or (op.inline and isinstance(value, (int, float, complex)))


def _to_compute(op, rule, name, value, compute):
    if value is None:
        return None
    kind = op.kinds[name]
    if kind == TENSORS or kind == SCALARS:
        return [None if v is None else dtypes.cast(v, compute) for v in value]
    if kind == TENSOR and rule.takes(name):
        return dtypes.cast(value, compute)
    if kind == SCALAR or kind == TENSOR and not hasattr(value, "dtype"):
        if hasattr(value, "dtype") and value.dtype.kind == "c" and compute.kind != "c":
            return value
        if not rule.takes(name) and _kind(value) == "f" and compute.kind in "iub":
            return value  # e.g. value=0.5 of an integer op: torch decides, the impl sees the float
        return dtypes.cast(value, compute)
    return value


def _kind(value):
    return value.dtype.kind if hasattr(value, "dtype") else {int: "i", float: "f", complex: "c", bool: "b"}[type(value)]


class Program:
    """An op with its static arguments bound. ``call`` is jitted unless the op forbids it.

    ``through``: (index of an array, plan, perm) if the result is that array with the view of the plan written.
    """

    __slots__ = ("op", "slots", "keyword", "into", "through", "call", "wide")

    def __init__(self, op, slots, keyword, into, through=None):
        self.op, self.slots, self.keyword, self.into, self.through = op, slots, keyword, into, through
        self.call = jax.jit(self.run) if op.jit else self.run
        self.wide = narrow.program(self.call)  # the way to call it where 64-bit arrays take part

    def run(self, *arrays):
        arrays = list(arrays)
        op = self.op
        lead = ()
        if op.random:
            lead, arrays = (make_key(arrays[0], arrays[1]),), arrays[2:]
        positional = [_fetch(s, arrays) for s in self.slots]
        keyword = {n: _fetch(s, arrays) for n, s in self.keyword}
        if lead:
            out = op.impl(*lead, *positional, **keyword)
        else:
            out = apply(op, positional, keyword)
        if self.into:
            out = self.store(out, positional)
            if self.through is None:
                return out
            index, plan, perm = self.through
            return strides.replace(plan.key, plan.moving, perm, arrays[index], out,
                                   *arrays[index + 1: index + 1 + len(plan.run_starts())])
        return _strong(out)

    def store(self, out, positional):
        """Cast an in-place result to what it is written into, checking shape and castability."""
        targets = positional[0]
        if isinstance(targets, (list, tuple)):
            return [fit(o, t, self.op) for o, t in zip(out, targets)]
        return fit(out, targets, self.op)


def _fetch(slot, arrays):
    kind, what = slot
    if kind == ARRAY:
        return arrays[what]
    if kind == VIEWED:
        index, plan, perm = what
        base = arrays[index] if perm is None else jnp.transpose(arrays[index], perm)
        return strides.read(plan.key, plan.moving, base, *arrays[index + 1: index + 1 + len(plan.run_starts())])
    if kind == LIST:
        return [_fetch(s, arrays) for s in what]
    if narrow.ON and dtypes.narrowing.active:
        if type(what) is torch.dtype:
            return dtypes.NARROW_TORCH.get(what, what)
        if type(what) is jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(what.shape, narrow.stored(what.dtype))
    return what


def _strong(out):
    if isinstance(out, (tuple, list)):
        return type(out)(_strong(o) for o in out)
    if getattr(out, "weak_type", False):
        return jax.lax.convert_element_type(out, out.dtype)
    return out


def fit(out, target, op):
    """``out`` as it is written into ``target`` (array or shape struct); RuntimeError as in torch."""
    out = out if hasattr(out, "dtype") else jnp.asarray(out)
    if tuple(out.shape) != tuple(target.shape):
        raise RuntimeError(f"{op.overload}: output with shape {list(target.shape)} doesn't match the broadcast shape "
                           f"{list(out.shape)}")
    have, want = dtypes.TO_TORCH[np.dtype(out.dtype)], dtypes.TO_TORCH[np.dtype(target.dtype)]
    if not torch.can_cast(have, want):
        raise RuntimeError(f"{op.overload}: result type {_name(have)} can't be cast to the desired output type "
                           f"{_name(want)}")
    return convert(out, np.dtype(target.dtype))


_convert = narrow.jit(lambda x, dtype: _strong(dtypes.cast(x, dtype)), (1,))


def convert(array, dtype):
    """``array`` in another numpy dtype."""
    return _convert(array, dtype) if narrow.ON and not dtypes.narrowing.inside else _strong(dtypes.cast(array, dtype))


_NAMES = {torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
          torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
          torch.bool: "Bool", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble"}


def _name(dtype):
    return _NAMES.get(dtype, str(dtype))


# ---------------------------------------------------------------- scalars as cached arrays

numbers = tuple({int: {}, float: {}, complex: {}} for _ in range(2))  # [wide][type] -> {number: array}


def scalar_array(value, wide):
    """A weakly typed 0-d array for a Python number; cached, since passing an array is free."""
    if type(value) not in numbers[wide]:  # a subclass, such as numpy's float64
        value = next(kind for kind in (int, float, complex) if isinstance(value, kind))(value)
    cache = numbers[wide][type(value)]
    key = (value, math.copysign(1.0, value)) if type(value) is float and value == 0 else value
    array = cache.get(key)
    if array is None:
        if len(cache) > 8192:
            cache.clear()
        array = cache[key] = _weak_array(value, wide)
    return array


# jit keeps a Python number weakly typed, which is what makes it promote as a number; one function, so that a
# new value is a new input, not a new program
_identity = jax.jit(lambda x: x)


def _weak_array(value, wide):
    with jax.enable_x64(bool(wide and not narrow.ON)):
        return _identity(narrow.number(value))


def makes_int64(arrays, value):
    """Whether a Python int needs 64-bit mode: too large for 32 bits, or next to nothing but bools (bool + 1 is int64)."""
    return not -(2**31) <= value < 2**31 or all(getattr(a, "dtype", _BOOL) == _BOOL for a in arrays)


_BOOL = np.dtype(np.bool_)
