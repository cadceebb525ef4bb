"""List ops without an element twin; all other `_foreach_` overloads are derived (routes.foreach_op)."""

import jax.numpy as jnp
import numpy as np
import torch

from ..dtypes import cast, opmath, promote_exact, to_jax
from ..registry import aten, op, special
from ._pointwise import kind, run


def _each(a, b):
    if isinstance(b, (list, tuple)):
        if len(a) != len(b):
            raise RuntimeError(f"Tensor lists must have the same number of tensors, got {len(a)} and {len(b)}")
        return list(zip(a, b))
    return [(x, b) for x in a]


# clamp_max and minimum are one thing to the list ops, but `minimum` itself takes no numbers
for _packet, _fn in ((aten._foreach_maximum, jnp.maximum), (aten._foreach_minimum, jnp.minimum)):
    op(_packet.Scalar)(lambda self, scalar, f=_fn: [run(promote_exact, f, a, scalar) for a in self])
    op(_packet.ScalarList)(lambda self, scalars, f=_fn: [run(promote_exact, f, a, b) for a, b in _each(self, scalars)])


@op(aten._foreach_copy.default)
def foreach_copy(self, src, non_blocking=False):
    return [jnp.broadcast_to(cast(b, a.dtype), a.shape) for a, b in _each(self, src)]


@special(aten._foreach_copy_.default)
def foreach_copy_(self, src, non_blocking=False):
    """One program, or copies one by one where the sources lie on other devices."""
    if len(self) == len(src) and any(a.device != b.device for a, b in zip(self, src)):
        for a, b in zip(self, src):
            a.copy_(b, non_blocking)
    else:
        aten._foreach_copy.out(self, src, out=self)
        torch.autograd.graph.increment_version(self)


@op(aten._foreach_zero.default)
def foreach_zero(self):
    return [jnp.zeros(a.shape, a.dtype) for a in self]


@op(aten._foreach_clone.default)
def foreach_clone(self):
    return list(self)


@op(aten._foreach_max.default)
def foreach_max(self):
    for a in self:
        if not a.size:
            raise RuntimeError("max(): Expected reduction dim to be specified for input.numel() == 0.")
    return [jnp.max(a) for a in self]


def _real(dtype):
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def _powers(a, ord, dtype):
    """(|a| ** ord summed, in the accumulation dtype; result dtype), for a float or complex tensor."""
    if kind(a) not in "fc":
        raise RuntimeError(f"foreach_norm: expected floating point or complex tensors, got {a.dtype}")
    size = jnp.abs(a)
    result = _real(size.dtype if dtype is None else to_jax(dtype))
    x = cast(size, opmath(result))
    if ord == 2:
        return jnp.sum(x * x), result
    if ord == 1:
        return jnp.sum(x), result
    if ord == 0:
        return jnp.sum((x != 0).astype(x.dtype)), result
    return jnp.sum(jnp.power(x, cast(ord, x.dtype))), result


def _norm(a, ord, dtype):
    if kind(a) not in "fc":
        raise RuntimeError(f"linalg.vector_norm: Expected a floating point or complex tensor as input. Got {a.dtype}")
    if ord in (float("inf"), float("-inf")):
        size = jnp.abs(a)
        if not a.size:
            raise RuntimeError("_foreach_norm cannot compute the infinity norm on an empty tensor because the operation "
                               "does not have an identity")
        out = jnp.max(size) if ord > 0 else jnp.min(size)
        return out if dtype is None else cast(out, _real(to_jax(dtype)))
    total, result = _powers(a, ord, dtype)
    root = total if ord in (0, 1) else jnp.sqrt(total) if ord == 2 else jnp.power(total, cast(1 / ord, total.dtype))
    return cast(root, result)


@op(aten._foreach_norm.Scalar, static=("ord",))
def foreach_norm(self, ord=2, dtype=None):
    return [_norm(a, ord, dtype) for a in self]


@op(aten._foreach_powsum.Scalar, static=("ord",))
def foreach_powsum(self, ord=2, dtype=None):
    return [cast(*_powers(a, ord, dtype)) for a in self]


# ---------------------------------------------------------------- scale factors in a tensor


def _factors(scalars, count):
    if scalars.dim() != 1 or scalars.numel() != count:
        raise RuntimeError(f"Expected scalars to be a 1-D tensor with {count} elements, got shape {list(scalars.shape)}")
    return scalars.tolist() if scalars.device.type == "cpu" else scalars.unbind()


def _with_tensor(packet, inplace, combine):
    """addcmul and addcdiv with the scale factors in one tensor: numbers if it is on the CPU, else traced."""
    def functional(self, tensor1, tensor2, scalars):
        factors = _factors(scalars, len(self))
        if isinstance(factors, list):
            return packet.ScalarList(self, tensor1, tensor2, factors)
        return torch._foreach_add(self, torch._foreach_mul(combine(tensor1, tensor2), factors))

    def written(self, tensor1, tensor2, scalars):
        factors = _factors(scalars, len(self))
        if isinstance(factors, list):
            return inplace.ScalarList(self, tensor1, tensor2, factors)
        torch._foreach_add_(self, torch._foreach_mul(combine(tensor1, tensor2), factors))
        return None

    special(packet.Tensor)(functional)
    special(inplace.Tensor)(written)


_with_tensor(aten._foreach_addcmul, aten._foreach_addcmul_, torch._foreach_mul)
_with_tensor(aten._foreach_addcdiv, aten._foreach_addcdiv_, torch._foreach_div)
