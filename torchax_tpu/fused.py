"""Composite ops which reach JAX whole, although torch has no derivative formula for them.

torch would take `scaled_dot_product_attention` or `lstm` apart above us. A kernel at the device's
autograd key is asked first: it calls one op with a formula (one program forward, one backward).
The same functions answer in inference mode, where the composite itself reaches the tensor.
"""

import torch

from .registry import special

aten = torch.ops.aten
KERNELS = {}  # overload -> kernel


def kernel(*overloads):
    """Declare a kernel of composite overloads: takes and returns tensors."""
    def register(fn):
        for overload in overloads:
            KERNELS[overload] = fn
            special(overload)(fn)
        return fn
    return register


def register(library):
    """Put the kernels where the device's autograd looks for them."""
    for overload, fn in KERNELS.items():
        library.impl(overload, fn, "AutogradPrivateUse1")


# ---------------------------------------------------------------- attention


def _check_attention(query, key, value, attn_mask, is_causal, enable_gqa):
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError("Expected query, key, and value to have the same dtype, but got query.dtype: "
                           f"{query.dtype} key.dtype: {key.dtype} and value.dtype: {value.dtype} instead.")
    if not query.device == key.device == value.device:
        raise RuntimeError("Expected query, key, and value to have the same device type, but got query.device: "
                           f"{query.device} key.device: {key.device} and value.device: {value.device} instead.")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError("Expected query, key, and value to all be at least 2 dimensional, but got query.dim: "
                           f"{query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()} instead.")
    if attn_mask is not None:
        if is_causal:
            raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
        if attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
            raise RuntimeError("Expected attn_mask dtype to be bool or float or to match query dtype, but got "
                               f"attn_mask.dtype: {attn_mask.dtype} and  query.dtype: {query.dtype} instead.")
    if query.dim() > 2 and query.shape[-3] != key.shape[-3]:
        heads, kv_heads = query.shape[-3], key.shape[-3]
        if enable_gqa:
            if heads % kv_heads or heads % value.shape[-3]:
                raise RuntimeError(f"Number of heads in key and value must divide the number of heads in query, "
                                   f"got {heads}, {kv_heads} and {value.shape[-3]}")
        elif 1 not in (heads, kv_heads):
            raise RuntimeError(f"The size of tensor a ({heads}) must match the size of tensor b ({kv_heads}) at "
                               "non-singleton dimension 1 (scaled_dot_product_attention; enable_gqa=True lets query "
                               "heads share key heads)")


@kernel(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
                                 enable_gqa=False):
    _check_attention(query, key, value, attn_mask, is_causal, enable_gqa)
    trained_mask = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    if dropout_p > 0 or trained_mask:
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


# ---------------------------------------------------------------- norms


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    return aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]


KERNELS[aten.rms_norm.default] = _rms_norm  # in inference mode ops/norm.py answers


# ---------------------------------------------------------------- recurrent layers
