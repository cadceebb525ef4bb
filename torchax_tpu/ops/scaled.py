"""Products with scale factors beside the data (fp8 and int8 matrices), and small combinations."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import cast, opmath
from ..registry import aten, op


def _product(a, b):
    return lax.dot_general(
        a, b, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


@op(aten._scaled_mm.default)
def _scaled_mm(self, mat2, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    # fp8 numbers are exact in bfloat16, and so are their products in float32
    exact = jnp.bfloat16 if self.dtype.itemsize == 1 else jnp.float32
    out = _product(self.astype(exact), mat2.astype(exact)) * (scale_a * scale_b).astype(jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    if scale_result is not None and out_dtype is not None and out_dtype.itemsize == 1:
        out = out * scale_result
    return cast(out, self.dtype if out_dtype is None else out_dtype)


@op(aten._weight_int8pack_mm.default)
def _weight_int8pack_mm(self, mat2, scales):
    wide = opmath(self.dtype)
    out = _product(self.astype(wide), mat2.T.astype(wide)) * scales.astype(wide)
    return out.astype(self.dtype)


@op(aten._masked_scale.default)
def _masked_scale(self, mask, scale):
    wide = opmath(self.dtype)
    return (self.astype(wide) * mask.astype(wide) * cast(scale, wide)).astype(self.dtype)


@op(aten._compute_linear_combination.default)
def _compute_linear_combination(input, coefficients):
    rows = input.reshape(input.shape[0], -1)
    out = jnp.matmul(coefficients, rows, precision=lax.Precision.HIGHEST)
    return out.reshape((coefficients.shape[0], *input.shape[1:])).astype(input.dtype)


@op(aten.copy.default)
def copy(self, src, non_blocking=False):
    return jnp.broadcast_to(cast(src, np.dtype(self.dtype)), self.shape)


@op(aten._transform_bias_rescale_qkv.default)
def _transform_bias_rescale_qkv(qkv, qkv_bias, num_heads):
    """Query, key and value per head out of one projection, the query scaled for the attention product."""
    batch, length, width = qkv.shape
    dim = width // 3 // num_heads
    out = jnp.moveaxis((qkv + qkv_bias).reshape(batch, length, 3, num_heads, dim), (2, 3), (0, 2))
    return (out[0] / np.sqrt(dim).astype(opmath(qkv.dtype))).astype(qkv.dtype), out[1], out[2]
