"""Shape ops which make new memory: joining, repeating, flipping, triangles, diagonals, shuffles.

What only re-reads memory is a view (views.py); the copying twins of views are in viewcopies.py.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import promote_exact
from ..registry import aten, op
from ._axes import axes, axis, bounded


def _legacy(x):
    return x.shape == (0,)


@op(aten.cat.default, dtype=promote_exact)
def cat(tensors, dim=0):
    if not tensors:
        raise ValueError("expected a non-empty list of Tensors")
    for i, t in enumerate(tensors):
        if t.ndim == 0:
            raise RuntimeError(f"zero-dimensional tensor (at position {i}) cannot be concatenated")
    full = [t for t in tensors if not _legacy(t)]  # torch lets empty vectors stand among tensors of any rank
    if not full:
        return tensors[0]
    dim = axis(dim, full[0].ndim)
    for t in full:
        if t.ndim != full[0].ndim or any(a != b for d, (a, b) in enumerate(zip(t.shape, full[0].shape)) if d != dim):
            raise RuntimeError(
                f"Sizes of tensors must match except in dimension {dim}. Got {[list(t.shape) for t in full]}"
            )
    return lax.concatenate(full, dim) if len(full) > 1 else full[0]


@op(aten.stack.default, dtype=promote_exact)
def stack(tensors, dim=0):
    if not tensors:
        raise RuntimeError("stack expects a non-empty TensorList")
    dim = axis(dim, tensors[0].ndim + 1)
    for i, t in enumerate(tensors):
        if t.shape != tensors[0].shape:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(tensors[0].shape)} at entry 0 "
                f"and {list(t.shape)} at entry {i}"
            )
    return lax.concatenate([jnp.expand_dims(t, dim) for t in tensors], dim)


@op(aten.block_diag.default, dtype=promote_exact)
def block_diag(tensors):
    blocks = []
    for t in tensors:
        if t.ndim > 2:
            raise RuntimeError(f"torch.block_diag: Input tensors must have 2 or fewer dimensions. Got {t.ndim}")
        blocks.append(jnp.reshape(t, (1,) * (2 - t.ndim) + t.shape))
    if not blocks:
        return jnp.zeros((1, 0), np.float32)
    width, left, rows = sum(b.shape[1] for b in blocks), 0, []
    for b in blocks:
        rows.append(jnp.pad(b, ((0, 0), (left, width - left - b.shape[1]))))
        left += b.shape[1]
    return lax.concatenate(rows, 0)


# ---------------------------------------------------------------- order and repetition


@op(aten.flip.default)
def flip(self, dims):
    return lax.rev(self, axes(dims, self.ndim)) if self.ndim else self


@op(aten.roll.default)
def roll(self, shifts, dims=()):
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if not shifts:
        raise RuntimeError("`shifts` required")
    if not dims:
        if len(shifts) != 1:
            raise RuntimeError(f"shifts and dimensions must align. shifts: {len(shifts)}, dims:0")
        return jnp.reshape(jnp.roll(jnp.reshape(self, (-1,)), shifts[0]), self.shape)
    if len(dims) != len(shifts):
        raise RuntimeError(f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}")
    if not self.size:
        return self
    for s, d in zip(shifts, dims):
        self = jnp.roll(self, s, axis(d, self.ndim))
    return self


@op(aten.rot90.default)
def rot90(self, k=1, dims=(0, 1)):
    if len(dims) != 2:
        raise RuntimeError(f"expected total rotation dims == 2, but got dims = {len(dims)}")
    if self.ndim < 2:
        raise RuntimeError(f"expected total dims >= 2, but got total dims = {self.ndim}")
    a, b = axis(dims[0], self.ndim), axis(dims[1], self.ndim)
    if a == b:
        raise RuntimeError(f"expected rotation dims to be different, but got dim0 = {dims[0]} and dim1 = {dims[1]}")
    return jnp.rot90(self, k, (a, b))


@op(aten.repeat.default)
def repeat(self, repeats):
    if len(repeats) < self.ndim:
        raise RuntimeError("Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    if any(r < 0 for r in repeats):
        raise RuntimeError(f"Trying to create tensor with negative dimension: repeats {list(repeats)}")
    shape = (1,) * (len(repeats) - self.ndim) + self.shape
    # One broadcast and one reshape: (1, n) -> (r, n) -> r * n for every dimension.
    pairs = [n for r, s in zip(repeats, shape) for n in (r, s)]
    ones = [n for s in shape for n in (1, s)]
    return jnp.reshape(jnp.broadcast_to(jnp.reshape(self, ones), pairs), [r * s for r, s in zip(repeats, shape)])


@op(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats, output_size=None):
    if repeats.ndim != 1:
        raise RuntimeError(f"repeat_interleave only accept 1D vector as repeat, got {repeats.ndim} dimensions")
    if repeats.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise RuntimeError(f"repeats has to be Long or Int tensor, got {repeats.dtype}")
    if not repeats.size:
        return jnp.zeros(0, repeats.dtype)
    ends = jnp.cumsum(repeats)
    return jnp.searchsorted(ends, jnp.arange(output_size, dtype=repeats.dtype), side="right").astype(repeats.dtype)


# ---------------------------------------------------------------- triangles and diagonals


def _offsets(shape):
    """Column number minus row number for the last two dims."""
    rows = lax.broadcasted_iota(np.int32, shape[-2:], 0)
    return lax.broadcasted_iota(np.int32, shape[-2:], 1) - rows


def _matrix(self, name):
    if self.ndim < 2:
        raise RuntimeError(f"{name}: input tensor must have at least 2 dimensions")


@op(aten.tril.default)
def tril(self, diagonal=0):
    _matrix(self, "tril")
    return jnp.where(_offsets(self.shape) <= diagonal, self, jnp.zeros((), self.dtype))


@op(aten.triu.default)
def triu(self, diagonal=0):
    _matrix(self, "triu")
    return jnp.where(_offsets(self.shape) >= diagonal, self, jnp.zeros((), self.dtype))


def spread_diagonal(values, shape, offset):
    """Zeros of ``shape`` with ``values`` (..., n) on the diagonal ``offset`` of the last two dims."""
    rows, cols = shape[-2:]
    n = values.shape[-1]
    before = (max(-offset, 0), max(offset, 0))
    column = lax.pad(
        values, jnp.zeros((), values.dtype), [(0, 0, 0)] * (values.ndim - 1) + [(before[1], cols - n - before[1], 0)]
    )
    return jnp.where(_offsets((rows, cols)) == offset, column[..., None, :], jnp.zeros((), values.dtype))


@op(aten.diag_embed.default)
def diag_embed(self, offset=0, dim1=-2, dim2=-1):
    ndim = self.ndim + 1
    a, b = axis(dim1, ndim), axis(dim2, ndim)
    if a == b:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    n = self.shape[-1] + abs(offset)
    out = spread_diagonal(self, self.shape[:-1] + (n, n), offset)
    return jnp.moveaxis(out, (-2, -1), (a, b))


@op(aten.diagonal_backward.default)
def diagonal_backward(grad_output, input_sizes, offset, dim1, dim2):
    a, b = axis(dim1, len(input_sizes)), axis(dim2, len(input_sizes))
    rest = [n for d, n in enumerate(input_sizes) if d not in (a, b)]
    shape = (*rest, input_sizes[a], input_sizes[b])
    if 0 in grad_output.shape:
        return jnp.zeros(input_sizes, grad_output.dtype)
    return jnp.moveaxis(spread_diagonal(grad_output, shape, offset), (-2, -1), (a, b))


@op(aten.unfold_backward.default)
def unfold_backward(grad_in, input_sizes, dim, size, step):
    if not input_sizes:
        return jnp.sum(grad_in, -1)
    dim = axis(dim, len(input_sizes))
    windows, total = grad_in.shape[dim], input_sizes[dim]
    zero = jnp.zeros((), grad_in.dtype)
    grad = jnp.moveaxis(grad_in, (dim, -1), (-2, -1))  # (..., windows, size)
    lead = [(0, 0, 0)] * (grad.ndim - 2)
    out = jnp.zeros((*grad.shape[:-2], total), grad.dtype)
    if min(windows, size) <= 32:
        if size <= windows:  # one strided line per place in the window
            for k in range(size):
                out = out + lax.pad(grad[..., k], zero, lead + [(k, total - k - (windows - 1) * step - 1, step - 1)])
        else:
            for w in range(windows):
                out = out + lax.pad(grad[..., w, :], zero, lead + [(w * step, total - w * step - size, 0)])
    else:
        at = np.arange(windows, dtype=np.int32)[:, None] * step + np.arange(size, dtype=np.int32)
        out = out.at[..., at].add(grad)
    return jnp.moveaxis(out, -1, dim)


# ---------------------------------------------------------------- shuffles


@op(aten.pixel_shuffle.default)
def pixel_shuffle(self, upscale_factor):
    r = upscale_factor
    if self.ndim < 3 or r <= 0 or self.shape[-3] % (r * r):
        raise RuntimeError(
            f"pixel_shuffle expects at least 3 dimensions and channels divisible by the square of a positive "
            f"upscale_factor, got {list(self.shape)} and {r}"
        )
    *lead, c, h, w = self.shape
    x = jnp.reshape(self, (*lead, c // (r * r), r, r, h, w))
    n = len(lead)
    x = jnp.transpose(x, (*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return jnp.reshape(x, (*lead, c // (r * r), h * r, w * r))


@op(aten.pixel_unshuffle.default)
def pixel_unshuffle(self, downscale_factor):
    r = downscale_factor
    if self.ndim < 3 or r <= 0 or self.shape[-1] % r or self.shape[-2] % r:
        raise RuntimeError(
            f"pixel_unshuffle expects height and width divisible by a positive downscale_factor, got "
            f"{list(self.shape)} and {r}"
        )
    *lead, c, h, w = self.shape
    x = jnp.reshape(self, (*lead, c, h // r, r, w // r, r))
    n = len(lead)
    x = jnp.transpose(x, (*range(n + 1), n + 2, n + 4, n + 1, n + 3))
    return jnp.reshape(x, (*lead, c * r * r, h // r, w // r))


@op(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(self, groups):
    if self.ndim < 3 or groups <= 0 or self.shape[1] % groups:
        raise RuntimeError(
            f"channel_shuffle expects at least 3 dimensions and channels divisible by groups, got "
            f"{list(self.shape)} and {groups}"
        )
    b, c = self.shape[:2]
    x = jnp.swapaxes(jnp.reshape(self, (b, groups, c // groups, math.prod(self.shape[2:]))), 1, 2)
    return jnp.reshape(x, self.shape)


# ---------------------------------------------------------------- backward of a read along a dimension


@op(aten.value_selecting_reduction_backward.default)
def value_selecting_reduction_backward(grad, dim, indices, sizes, keepdim):
    if not sizes:
        return grad
    dim = axis(dim, len(sizes))
    if not keepdim:
        grad, indices = jnp.expand_dims(grad, dim), jnp.expand_dims(indices, dim)
    # A comparison with an iota instead of a scatter: one fused pass.
    here = lax.broadcasted_iota(np.int32, sizes, dim) == bounded(indices, sizes[dim])
    return jnp.where(here, grad, jnp.zeros((), grad.dtype))
