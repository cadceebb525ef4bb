"""Embedding lookups, bags of embeddings, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import dtypes
from ..registry import aten, op
from ._axes import bounded
from .indexing import _READ, _WRITE, take

SUM, MEAN, MAX = range(3)
_SMALL = 4 << 20  # bytes


@op(aten.embedding.default)
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    if weight.ndim != 2:
        raise RuntimeError(f"'weight' must be 2-D, got {list(weight.shape)}")
    rows = take(weight, bounded(indices, weight.shape[0]), 0)
    # What stays in VMEM is finished once: XLA for TPU would repeat the select of out-of-range rows in every reader. Larger
    # results cost less when readers repeat it.
    return jax.lax.optimization_barrier(rows) if rows.size * rows.dtype.itemsize <= _SMALL else rows


def _counts(index, n):
    return jnp.zeros(n, np.float32).at[index].add(1.0, **_WRITE)


@op(aten.embedding_dense_backward.default)
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    index = jnp.reshape(bounded(indices, num_weights), (-1,))
    compute = dtypes.opmath(grad_output.dtype)
    width = grad_output.shape[indices.ndim :]
    grad = jnp.reshape(grad_output, (index.size, *width)).astype(compute)
    return _add_rows(grad, index, num_weights, padding_idx, scale_grad_by_freq).astype(grad_output.dtype)


@op(aten.embedding_sparse_backward.default)
def embedding_sparse_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    # The device holds dense tensors only: the same gradient, dense.
    if scale_grad_by_freq:
        raise RuntimeError("embedding_backward: scale_grad_by_freq not supported with sparse gradients")
    return embedding_dense_backward(grad, indices, num_weights, padding_idx, False)


def _add_rows(grad, index, num_weights, padding_idx, scale_grad_by_freq):
    if 0 <= padding_idx < num_weights:
        index = jnp.where(index == padding_idx, num_weights, index)  # out of range: dropped
    if scale_grad_by_freq:
        count = _counts(index, num_weights).at[index].get(**_READ)
        grad = grad / jnp.where(count > 0, count, 1.0).astype(grad.dtype)[:, None]
    return jnp.zeros((num_weights, *grad.shape[1:]), grad.dtype).at[index].add(grad, **_WRITE)


# ---------------------------------------------------------------- bags


def _bags(offsets, n, include_last_offset):
    """(number of bags, bag number of each of ``n`` positions; those after the last bag get the number of bags)."""
    bags = offsets.shape[0] - bool(include_last_offset)
    at = jnp.arange(n, dtype=offsets.dtype)
    bag = jnp.searchsorted(offsets, at, side="right") - 1
    return bags, jnp.where(bag < 0, bags, jnp.minimum(bag, bags)).astype(np.int32)


@op(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=0,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    if indices.dtype.kind not in "iu" or offsets.dtype.kind not in "iu":
        raise RuntimeError("embedding_bag: Expected indices and offsets of type Long or Int")
    if offsets.ndim != 1:
        raise ValueError(f"offsets has to be a 1D Tensor, but got Tensor of dimension {offsets.ndim}")
    if per_sample_weights is not None and mode != SUM:
        raise RuntimeError("embedding_bag: per_sample_weights only supported with mode='sum'")
    compute = dtypes.opmath(weight.dtype)
    rows = weight.shape[0]
    padding = padding_idx + rows if padding_idx < -1 else padding_idx
    bags, bag = _bags(offsets, indices.shape[0], include_last_offset)
    index = bounded(indices, rows)
    counted = jnp.where(index == padding, bags, bag) if padding >= 0 else bag
    size = jnp.zeros(bags, np.int32).at[counted].add(1, **_WRITE)
    values = take(weight, index, 0).astype(compute)
    width = weight.shape[1]
    longest = jnp.zeros((bags, width), np.int32)
    if mode == MAX:
        out = jnp.full((bags, width), -np.inf, compute).at[counted].max(values, **_WRITE)
        best = out.at[bag].get(mode="clip")
        n = indices.shape[0]
        at = jnp.arange(n, dtype=np.int32)[:, None]
        first = jnp.where((values == best) | jnp.isnan(values), at, n)
        first = jnp.full((bags, width), n, np.int32).at[counted].min(first, **_WRITE)
        longest = index.at[first].get(mode="fill", fill_value=0) if n else longest
        out = jnp.where(size[:, None] > 0, out, 0)
    else:
        if per_sample_weights is not None:
            values = values * per_sample_weights.astype(compute)[:, None]
        out = jnp.zeros((bags, width), compute).at[counted].add(values, **_WRITE)
        if mode == MEAN:
            out = out / jnp.maximum(size, 1).astype(compute)[:, None]
    kind = indices.dtype
    return out.astype(weight.dtype), bag.astype(kind), size.astype(kind), longest.astype(kind)


def _dense(
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx,
):
    compute = dtypes.opmath(grad.dtype)
    if mode == MAX:
        live = bag_size[:, None] > 0
        row = jnp.where(live, maximum_indices, num_weights)
        column = np.arange(grad.shape[1], dtype=row.dtype)[None]
        out = jnp.zeros((num_weights, grad.shape[1]), compute)
        return out.at[row, column].add(grad.astype(compute), **_WRITE).astype(grad.dtype)
    bags = grad.shape[0]
    rows = grad.astype(compute)
    if mode == MEAN:
        rows = rows / jnp.maximum(bag_size, 1).astype(compute)[:, None]
    rows = (
        rows.at[offset2bag].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        if bags
        else (jnp.zeros((indices.shape[0], grad.shape[1]), compute))
    )
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.astype(compute)[:, None]
    padding_idx = padding_idx + num_weights if padding_idx < -1 else padding_idx
    return _add_rows(rows, bounded(indices, num_weights), num_weights, padding_idx, scale_grad_by_freq).astype(
        grad.dtype
    )


@op(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx=-1,
):
    return _dense(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@op(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad,
    indices,
    offsets,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    padding_idx=-1,
):
    return _dense(  # also where sparse gradients are asked for: the device holds dense tensors only
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@op(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    if mode != SUM:
        raise RuntimeError("embedding_bag: per_sample_weights only supported with mode='sum'")
    compute = dtypes.opmath(weight.dtype)
    rows = take(weight, bounded(indices, weight.shape[0]), 0).astype(compute)
    upper = grad.astype(compute).at[offset2bag].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    out = jnp.sum(rows * upper, 1)
    padding_idx = padding_idx + weight.shape[0] if padding_idx < -1 else padding_idx
    return jnp.where(indices == padding_idx, 0, out).astype(weight.dtype)


@op(aten.embedding_renorm_.default)
def embedding_renorm_(self, indices, max_norm, norm_type):
    compute = dtypes.opmath(self.dtype)
    index = jnp.reshape(bounded(indices, self.shape[0]), (-1,))
    rows = take(self, index, 0).astype(compute)
    p = dtypes.cast(norm_type, compute)
    norm = jnp.where(
        jnp.isinf(p),
        jnp.max(jnp.abs(rows), 1),
        jnp.where(p == 2, jnp.sqrt(jnp.sum(rows * rows, 1)), jnp.sum(jnp.abs(rows) ** p, 1) ** (1 / p)),
    )
    limit = dtypes.cast(max_norm, compute)
    scale = jnp.where(norm > limit, limit / (norm + 1e-7), 1)
    return self.at[index].set((rows * scale[:, None]).astype(self.dtype), **_WRITE)
