"""Scaled dot-product attention: one program forward, one backward; masked softmax and its kin.

Scores and softmax are float32 for half types. Backward differentiates the same expression
again instead of keeping the weights; inside one compiled program the two merge.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import cast, opmath
from ..registry import aten, op


def causal_mask(rows, columns):
    """True where a query may look: on and below the diagonal that starts at the top left."""
    row = jax.lax.broadcasted_iota(np.int32, (rows, columns), 0)
    return row >= jax.lax.broadcasted_iota(np.int32, (rows, columns), 1)


def _softmax(scores, allowed):
    """Softmax over the last axis; a row in which nothing is allowed gives zeros, not nan."""
    if not scores.shape[-1]:
        return scores
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    alive = jnp.max(scores, axis=-1, keepdims=True) > -jnp.inf
    weights = jax.nn.softmax(jnp.where(alive, scores, jnp.zeros((), scores.dtype)), axis=-1)
    # A row with nan is not alive by the comparison, and must stay nan.
    return jnp.where(alive | jnp.any(jnp.isnan(scores), axis=-1, keepdims=True), weights, jnp.zeros((), weights.dtype))


# The two products as einsums: (heads, sequence, width) as torch has it; with the sequence first; with query heads in groups
# that share a key head. With the sequence first, as most projections leave it in memory, XLA for TPU lays scores out so that
# a softmax and its backward cost half the matmul cycles (v5e) and, of float32, up to a third less memory and traffic.
_PLAIN = "...ld,...sd->...ls", "...ls,...sd->...ld"
_SEQUENCE_FIRST = "...lhd,...shd->...hls", "...hls,...shd->...lhd"
_GROUPED = "...lhgd,...shd->...hgls", "...hgls,...shd->...lhgd"


def _contract(form, a, b, compute, precision=None):
    """einsum that accumulates in ``compute``. XLA's CPU kernels lack some products of halves into float32: widen them there."""
    def narrow(a, b):
        return jnp.einsum(form, a, b, preferred_element_type=compute, precision=precision)

    if a.dtype == compute:
        return narrow(a, b)
    return jax.lax.platform_dependent(a, b, cpu=lambda a, b: narrow(cast(a, compute), cast(b, compute)), default=narrow)


def _scores(q, k, scale, compute, form=_PLAIN[0]):
    """q k^T, scaled, in the compute dtype."""
    exact = jax.lax.Precision.HIGHEST if compute == np.float64 else None
    s = _contract(form, q, k, compute, exact)
    return s * cast(scale, compute)


def _check(q, k, v, mask, is_causal):
    """torch's own refusals; at trace time, so they cost nothing per call."""
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(f"Expected query, key, and value to have the same dtype, but got {q.dtype}, {k.dtype} and "
                           f"{v.dtype} instead.")
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise RuntimeError("Expected query, key, and value to all be at least 2 dimensional, but got query.dim: "
                           f"{q.ndim}, key.dim: {k.ndim} and value.dim: {v.ndim} instead.")
    if mask is not None and is_causal:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    if mask is not None and mask.dtype not in (np.bool_, q.dtype, np.float32):
        raise RuntimeError("Expected attn_mask dtype to be bool or float or to match query dtype, but got "
                           f"attn_mask.dtype: {mask.dtype} and  query.dtype: {q.dtype} instead.")
    if q.ndim > 2 and k.ndim > 2 and v.ndim > 2:
        heads, kv_heads = q.shape[-3], (k.shape[-3], v.shape[-3])
        if heads > 1 and any(n > 1 and heads % n for n in kv_heads):
            raise RuntimeError(f"Number of heads in key and value must divide the number of heads in query, got {heads}, "
                               f"{kv_heads[0]} and {kv_heads[1]}")


def attend(q, k, v, mask=None, is_causal=False, scale=None, keep=None):
    """softmax(q k^T * scale + mask) v. ``keep`` is None or a factor on the weights (dropout).

    Query heads (axis -3) may be a multiple of the key and value heads.
    """
    _check(q, k, v, mask, is_causal)
    compute = opmath(q.dtype)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None and q.shape[-1] else 1.0 if scale is None else scale
    heads, kv_heads = (q.shape[-3], k.shape[-3]) if q.ndim > 2 else (1, 1)
    v_heads = v.shape[-3] if v.ndim > 2 else 1
    shared = heads != kv_heads and kv_heads not in (0, 1) or heads != v_heads and v_heads not in (0, 1)
    forms = _PLAIN
    if shared and kv_heads == v_heads and heads % kv_heads == 0:
        group = heads // kv_heads
        q = jnp.moveaxis(jnp.reshape(q, (*q.shape[:-3], kv_heads, group, *q.shape[-2:])), -2, -4)
        k, v = jnp.swapaxes(k, -3, -2), jnp.swapaxes(v, -3, -2)
        mask, keep = (None if m is None else _split_heads(m, kv_heads, group) for m in (mask, keep))
        forms = _GROUPED
    else:
        if shared:
            k = jnp.repeat(k, heads // kv_heads, axis=-3)
            v = jnp.repeat(v, heads // v_heads, axis=-3)
            shared = False
        if min(q.ndim, k.ndim, v.ndim) >= 4 and q.shape[-3] == k.shape[-3] == v.shape[-3]:
            q, k, v = (jnp.swapaxes(x, -3, -2) for x in (q, k, v))
            forms = _SEQUENCE_FIRST
    scores = _scores(q, k, scale, compute, forms[0])
    # Blocked scores are the lowest finite number, so softmax needs no care about rows without keys; those rows are
    # known from the mask alone, and set to zero in the output, which is far smaller than the scores.
    lowest = jnp.asarray(jnp.finfo(compute).min, compute)
    alive = None
    if is_causal:
        scores = jnp.where(causal_mask(*scores.shape[-2:]), scores, lowest)
    if mask is not None and mask.dtype == np.bool_:
        scores = jnp.where(mask, scores, lowest)
        alive = jnp.any(mask, axis=-1, keepdims=True)
    elif mask is not None:
        bias = cast(mask, compute)
        scores = jnp.where(bias == -jnp.inf, lowest, scores + bias)
        alive = jnp.any(bias != -jnp.inf, axis=-1, keepdims=True)
    weights = jax.nn.softmax(scores, axis=-1) if scores.shape[-1] else scores
    if keep is not None:
        weights = weights * keep
    out = cast(_contract(forms[1], cast(weights, q.dtype), v, compute), q.dtype)
    if forms is not _PLAIN:
        out = jnp.moveaxis(out, -4, -2) if shared else jnp.swapaxes(out, -3, -2)
    if alive is not None:
        out = jnp.where(alive, out, jnp.zeros((), out.dtype))
    if shared:
        out = jnp.reshape(out, (*out.shape[:-4], heads, *out.shape[-2:]))
    return out


def _split_heads(m, kv_heads, group):
    """A mask that broadcasts against (..., heads, L, S), for heads split as (kv_heads, group)."""
    if m.ndim < 3:
        return m
    if m.shape[-3] == 1:
        return m[..., None, :, :]
    return jnp.reshape(m, (*m.shape[:-3], kv_heads, group, *m.shape[-2:]))


def _keep(seed, q, k, p):
    """Dropout factors of the attention weights: 0 or 1 / (1 - p), from the seed words that were saved."""
    if p >= 1:
        return jnp.zeros((), opmath(q.dtype))
    lead = jnp.broadcast_shapes(q.shape[:-3], k.shape[:-3]) + ((q.shape[-3],) if q.ndim > 2 else ())
    kept = jax.random.bernoulli(jax.random.wrap_key_data(seed), 1 - p, (*lead, q.shape[-2], k.shape[-2]))
    return kept / np.asarray(1 - p, opmath(q.dtype))


# ------------------------------------------------------------------- without dropout: no seed, two results


@op(aten._scaled_dot_product_flash_attention_for_cpu.default, static=("dropout_p",))
def attention(query, key, value, dropout_p=0.0, is_causal=False, attn_mask=None, scale=None):
    if dropout_p:
        raise RuntimeError("this attention op takes no dropout")
    return attend(query, key, value, attn_mask, is_causal, scale), None  # backward needs no logsumexp


@op(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, static=("dropout_p",))
def attention_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=None, scale=None):
    _, back = jax.vjp(lambda q, k, v: attend(q, k, v, attn_mask, is_causal, scale), query, key, value)
    return back(cast(grad_out, query.dtype))


# ------------------------------------------------------------------- with dropout, or a mask that is trained


@op(aten._scaled_dot_product_efficient_attention.default, static=("dropout_p",), random=True)
def attention_dropout(rng, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
                      scale=None):
    seed = jax.random.key_data(rng)
    keep = _keep(seed, query, key, dropout_p) if dropout_p else None
    out = attend(query, key, value, attn_bias, is_causal, scale, keep)
    return out, None, seed, None


@op(aten._scaled_dot_product_efficient_attention_backward.default, static=("dropout_p",))
def attention_dropout_backward(grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset,
                               dropout_p, grad_input_mask, is_causal=False, scale=None):
    keep = _keep(philox_seed, query, key, dropout_p) if dropout_p else None
    wants_bias = bool(grad_input_mask[3]) and attn_bias is not None and attn_bias.dtype != np.bool_
    if wants_bias:
        def forward(q, k, v, b):
            return attend(q, k, v, b, is_causal, scale, keep)
        _, back = jax.vjp(forward, query, key, value, attn_bias)
        return back(cast(grad_out_, query.dtype))
    _, back = jax.vjp(lambda q, k, v: attend(q, k, v, attn_bias, is_causal, scale, keep), query, key, value)
    return (*back(cast(grad_out_, query.dtype)), None)


# ------------------------------------------------------------------- softmax with masks


@op(aten._safe_softmax.default)
def safe_softmax(self, dim, dtype=None):
    """Softmax in which a row of -inf gives zeros."""
    x = self if dtype is None else cast(self, dtype)
    if not self.ndim:
        return jnp.where(x == -jnp.inf, 0, 1).astype(x.dtype)
    x = jnp.moveaxis(x, dim, -1)
    return jnp.moveaxis(cast(_softmax(cast(x, opmath(x.dtype)), None), x.dtype), -1, dim)


def _blocked(mask, self, mask_type):
    """The mask (True blocks) shaped to broadcast against attention scores (B, H, L, S)."""
    if mask_type == 1 and self.ndim == 4 and mask.ndim == 2 and mask.shape != self.shape:
        mask = mask[:, None, None, :]  # padding: (B, S)
    return jnp.broadcast_to(mask, self.shape)


@op(aten._masked_softmax.default)
def masked_softmax(self, mask, dim=None, mask_type=None):
    dim = -1 if dim is None else dim
    x = jnp.moveaxis(cast(self, opmath(self.dtype)), dim, -1)
    allowed = jnp.moveaxis(~_blocked(mask, self, mask_type), dim, -1)
    weights = _softmax(x, allowed)
    return jnp.moveaxis(cast(weights, self.dtype), -1, dim)


@op(aten._masked_softmax_backward.default)
def masked_softmax_backward(grad_output, output, mask, dim=None):
    dim = -1 if dim is None else dim
    g, y = cast(grad_output, opmath(output.dtype)), cast(output, opmath(output.dtype))
    gx = y * (g - jnp.sum(jnp.where(mask, 0, g * y), axis=dim, keepdims=True))
    return cast(jnp.where(mask, jnp.zeros((), gx.dtype), gx), output.dtype)


# ------------------------------------------------------------------- transformer fast path


def _linear(x, weight, bias):
    y = jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=opmath(x.dtype))
    return cast(y + cast(bias, y.dtype), x.dtype)


def _norm(x, weight, bias, eps):
    h = cast(x, opmath(x.dtype))
    mean = jnp.mean(h, axis=-1, keepdims=True)
    h = (h - mean) * jax.lax.rsqrt(jnp.mean(jnp.square(h - mean), axis=-1, keepdims=True) + eps)
    return cast(h * cast(weight, h.dtype) + cast(bias, h.dtype), x.dtype)


def _heads(x, num_heads):
    b, length, width = x.shape
    return jnp.transpose(jnp.reshape(x, (b, length, num_heads, width // num_heads)), (0, 2, 1, 3))


def _joined(x):
    b, h, length, width = x.shape
    return jnp.reshape(jnp.transpose(x, (0, 2, 1, 3)), (b, length, h * width))


def _allowed(mask, mask_type, batch, heads, rows, columns):
    """What may be looked at, from the fast path's mask: 0 attention (L, S), 1 padding (B, S), 2 both."""
    if mask is None:
        return None
    blocked = mask if mask.dtype == np.bool_ else None
    if mask_type == 1:
        mask = jnp.reshape(mask, (batch, 1, 1, columns))
    elif mask.ndim == 3:
        mask = jnp.reshape(mask, (batch, heads, rows, columns))
    return ~jnp.reshape(blocked, mask.shape) if blocked is not None else mask


def _self_attention(query, key, value, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, mask_type):
    width = query.shape[-1]
    weights = [qkv_weight[i * width:(i + 1) * width] for i in range(3)]
    biases = [qkv_bias[i * width:(i + 1) * width] for i in range(3)]
    q, k, v = (_heads(_linear(x, w, b), num_heads) for x, w, b in zip((query, key, value), weights, biases))
    allowed = _allowed(mask, mask_type, q.shape[0], num_heads, q.shape[2], k.shape[2])
    return q, k, _linear(_joined(attend(q, k, v, allowed)), proj_weight, proj_bias), allowed


@op(aten._native_multi_head_attention.default)
def native_multi_head_attention(query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias,
                                mask=None, need_weights=True, average_attn_weights=True, mask_type=None):
    q, k, out, allowed = _self_attention(query, key, value, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias,
                                         mask, mask_type)
    if not need_weights:
        return out, None
    scores = _scores(q, k, 1 / math.sqrt(q.shape[-1]), opmath(q.dtype))
    if allowed is not None and allowed.dtype != np.bool_:
        scores, allowed = scores + cast(allowed, scores.dtype), None
    weights = cast(_softmax(scores, allowed), q.dtype)
    return out, jnp.mean(weights, axis=1) if average_attn_weights else weights


@op(aten._transformer_encoder_layer_fwd.default)
def transformer_encoder_layer_fwd(src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu,
                                  norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2,
                                  ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask=None, mask_type=None):
    def attention_block(x):
        return _self_attention(x, x, x, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, mask_type)[2]

    def feed_forward(x):
        h = _linear(x, ffn_weight_1, ffn_bias_1)
        h = jax.nn.gelu(cast(h, opmath(h.dtype)), approximate=False).astype(h.dtype) if use_gelu else jax.nn.relu(h)
        return _linear(h, ffn_weight_2, ffn_bias_2)

    def norm_1(x):
        return _norm(x, norm_weight_1, norm_bias_1, eps)

    def norm_2(x):
        return _norm(x, norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attention_block(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attention_block(src))
    return norm_2(x + feed_forward(x))
