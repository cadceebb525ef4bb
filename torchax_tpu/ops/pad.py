"""Padding: constant, reflection, replication, and the gradients of the last two."""

import jax
import jax.numpy as jnp
from jax import lax

from .. import dtypes
from ..registry import aten, op


@op(aten.constant_pad_nd.default)
def constant_pad_nd(self, pad, value=0):
    if len(pad) % 2 or len(pad) > 2 * self.ndim:
        raise RuntimeError(
            f"Length of pad must be even and no more than twice the number of dimensions of the input; got "
            f"{len(pad)} for {self.ndim} dimensions"
        )
    config = [(0, 0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        d = self.ndim - 1 - i
        config[d] = (pad[2 * i], pad[2 * i + 1], 0)
        if self.shape[d] + pad[2 * i] + pad[2 * i + 1] < 0:
            raise RuntimeError(
                f"The input size {self.shape[d]}, plus negative padding {pad[2 * i]} and {pad[2 * i + 1]}, "
                f"resulted in a negative output size (dimension {d})"
            )
    return lax.pad(self, dtypes.cast(value, self.dtype), config)


def _cut(x, dim, start, stop):
    return lax.slice_in_dim(x, start, stop, axis=dim)


def _extend(x, dim, low, high, mirror):
    """``x`` grown by ``low`` and ``high`` along ``dim``; negative amounts crop."""
    n = x.shape[dim]
    parts = [x]
    if low > 0:
        parts.insert(
            0, lax.rev(_cut(x, dim, 1, low + 1), (dim,)) if mirror else jnp.repeat(_cut(x, dim, 0, 1), low, dim)
        )
    if high > 0:
        parts.append(
            lax.rev(_cut(x, dim, n - 1 - high, n - 1), (dim,))
            if mirror
            else jnp.repeat(_cut(x, dim, n - 1, n), high, dim)
        )
    out = lax.concatenate(parts, dim) if len(parts) > 1 else x
    return _cut(out, dim, max(-low, 0), out.shape[dim] - max(-high, 0))


def _padder(n, mirror):
    name = f"{'reflection' if mirror else 'replication'}_pad{n}d"

    def forward(self, padding):
        if len(padding) != 2 * n or self.ndim not in (n + 1, n + 2) or 0 in self.shape[self.ndim - n - 1 :]:
            raise RuntimeError(
                f"{name}: expected {n + 1}D or {n + 2}D input with non-zero dimensions and {2 * n} paddings, "
                f"got {list(self.shape)} and {list(padding)}"
            )
        for i in range(n):
            dim, low, high = self.ndim - 1 - i, padding[2 * i], padding[2 * i + 1]
            size = self.shape[dim]
            if mirror and (low >= size or high >= size):
                raise RuntimeError(
                    f"{name}: Padding size should be less than the corresponding input dimension, but got: "
                    f"padding ({low}, {high}) at dimension {dim} of input {list(self.shape)}"
                )
            if size + low + high < 1:
                raise RuntimeError(
                    f"{name}: input of shape {list(self.shape)} is too small for padding {list(padding)}"
                )
            self = _extend(self, dim, low, high, mirror)
        return self

    def backward(grad_output, self, padding):
        out = jax.eval_shape(lambda x: forward(x, padding), self)
        if out.shape != grad_output.shape:
            raise RuntimeError(
                f"{name}_backward: grad_output of shape {list(grad_output.shape)}, expected {list(out.shape)}"
            )
        compute = dtypes.opmath(self.dtype)
        like = jax.ShapeDtypeStruct(self.shape, compute)
        (grad,) = jax.linear_transpose(lambda x: forward(x, padding), like)(grad_output.astype(compute))
        return grad.astype(grad_output.dtype)

    return forward, backward


for _n in (1, 2, 3):
    for _mirror, _name in ((True, "reflection"), (False, "replication")):
        _forward, _backward = _padder(_n, _mirror)
        op(getattr(aten, f"{_name}_pad{_n}d").default)(_forward)
        op(getattr(aten, f"{_name}_pad{_n}d_backward").default, shape_only=("self",))(_backward)
