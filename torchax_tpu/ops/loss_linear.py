"""The linear layer and cross entropy in one: torch's chunked custom ops, a scan over chunks of rows.

The logits of one chunk live at a time; `jax.checkpoint` makes the gradient compute them anew.
"""

import jax
import jax.numpy as jnp
import torch
import torch.nn.modules.linear_cross_entropy  # it defines the ops

from ..dtypes import cast, opmath
from ..registry import op

ops = torch.ops.torch_nn


def _row_losses(input, linear_weight, linear_bias, target, row_weight, chunk):
    """Each row's weighted loss, ``chunk`` rows at a time."""
    compute = opmath(input.dtype)
    rows, classes = input.shape[0], linear_weight.shape[0]
    chunk = max(1, min(chunk, rows))
    count = -(-rows // chunk)
    spare = count * chunk - rows

    def cut(x):
        return jnp.reshape(jnp.pad(x, ((0, spare),) + ((0, 0),) * (x.ndim - 1)), (count, chunk, *x.shape[1:]))

    @jax.checkpoint
    def one(x, t, w):
        logits = jnp.einsum("ni,vi->nv", x, linear_weight, preferred_element_type=compute)
        if linear_bias is not None:
            logits = logits + cast(linear_bias, compute)
        picked = jax.lax.broadcasted_iota(t.dtype, (chunk, classes), 1) == t[:, None]
        own = jnp.sum(jnp.where(picked, logits, jnp.zeros((), compute)), axis=1)
        return jnp.where(w == 0, jnp.zeros((), compute), w * (jax.nn.logsumexp(logits, axis=1) - own))

    losses = jax.lax.scan(lambda carry, at: (carry, one(*at)), None, (cut(input), cut(target), cut(row_weight)))[1]
    return jnp.reshape(losses, (-1,))[:rows]


def _row_weights(target, weight, ignore_index, dtype):
    if weight is None:
        own = jnp.ones(target.shape, dtype)
    else:
        picked = jax.lax.broadcasted_iota(target.dtype, (*target.shape, weight.shape[0]), target.ndim) == target[..., None]
        own = jnp.sum(jnp.where(picked, cast(weight, dtype), jnp.zeros((), dtype)), axis=-1)
    return jnp.where(target == ignore_index, jnp.zeros((), dtype), own)


@op(ops._linear_cross_entropy_batch_chunked.default, static=("label_smoothing",))
def linear_cross_entropy(input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing,
                         batch_chunk_size, acc_policy, acc_dtype, allow_retain_graph, compute_input_grad,
                         compute_linear_weight_grad, compute_linear_bias_grad):
    """(loss, gradients by input, weight and bias): what isn't asked for comes back empty."""
    if reduction not in ("mean", "sum"):
        raise NotImplementedError(f"linear_cross_entropy does not support reduction={reduction!r}")
    if label_smoothing:
        raise NotImplementedError("linear_cross_entropy does not support label_smoothing")
    compute = opmath(input.dtype)
    row_weight = _row_weights(target, weight, ignore_index, compute)
    if not input.shape[0]:
        loss = jnp.full((), jnp.nan if reduction == "mean" else 0, compute)
        grads = [jnp.zeros_like(input), jnp.zeros(linear_weight.shape, input.dtype),
                 None if linear_bias is None else jnp.zeros(linear_bias.shape, input.dtype)]
    else:
        def total(x, w, b):
            loss = jnp.sum(_row_losses(x, w, b, target, row_weight, batch_chunk_size))
            return loss / jnp.sum(row_weight) if reduction == "mean" else loss

        loss, grads = jax.value_and_grad(total, argnums=(0, 1) if linear_bias is None else (0, 1, 2))(
            input, linear_weight, linear_bias)
    wanted = (compute_input_grad, compute_linear_weight_grad, compute_linear_bias_grad)
    shapes = ((0, 0), (0, 0), (0,))
    out = [cast(grads[i], input.dtype) if wanted[i] else jnp.zeros(shapes[i], input.dtype) for i in range(3)]
    return cast(loss, input.dtype), *out


@op(ops._linear_cross_entropy_batch_chunked_no_reduction.default)
def linear_cross_entropy_rows(input, linear_weight, target, linear_bias, weight, ignore_index, batch_chunk_size,
                              acc_policy, acc_dtype):
    if not input.shape[0]:
        return jnp.zeros((0,), input.dtype)
    row_weight = _row_weights(target, weight, ignore_index, opmath(input.dtype))
    return cast(_row_losses(input, linear_weight, linear_bias, target, row_weight, batch_chunk_size), input.dtype)
