"""Automatic mixed precision: torch's own lists (those of CUDA) for the device's autocast key.

Each op on a list gets a kernel which casts its floating-point device tensors and calls the op
again below autocast. Tensors on other devices and float64 tensors stay as they are, as in torch.
"""

import functools

import torch

from . import device

# Names as in ATen/autocast_mode.h; "op.overload" where it isn't the default one.
LOWER = """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention"""
FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div
    l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim"""
# Sums and the like: a float32 result is asked for by dtype=, unless the caller names one.
FLOAT32_RESULT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList"""
PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_library = []


def _cast(x, dtype):
    if isinstance(x, torch.Tensor):
        if x.device.type == device.NAME and x.dtype is not dtype and x.is_floating_point() and x.dtype is not torch.float64:
            return x.to(dtype)
        return x
    if isinstance(x, (list, tuple)) and x and any(isinstance(v, torch.Tensor) for v in x):
        return type(x)(_cast(v, dtype) for v in x)
    return x


def _cast_all(args, kwargs, dtype):
    return [_cast(a, dtype) for a in args], {k: _cast(v, dtype) for k, v in kwargs.items()}


def _floats(x, found):
    if isinstance(x, torch.Tensor):
        if x.device.type == device.NAME and x.is_floating_point():
            found.append(x.dtype)
    elif isinstance(x, (list, tuple)):
        for v in x:
            _floats(v, found)
    return found


def _lower(op, args, kwargs):
    args, kwargs = _cast_all(args, kwargs, torch.get_autocast_dtype(device.NAME))
    return op(*args, **kwargs)


def _float32(op, args, kwargs):
    args, kwargs = _cast_all(args, kwargs, torch.float32)
    return op(*args, **kwargs)


def _float32_result(op, args, kwargs):
    first = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(first, torch.Tensor) or first.device.type != device.NAME or first.dtype not in (
            torch.float16, torch.bfloat16, torch.float32):
        return op(*args, **kwargs)
    names = [a.name for a in op._schema.arguments if not a.kwarg_only]
    if "dtype" in names:
        place = names.index("dtype")
        if len(args) > place:
            if args[place] is None:
                args = (*args[:place], torch.float32, *args[place + 1:])
            return op(*args, **kwargs)
    if kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _promote(op, args, kwargs):
    floats = _floats(list(kwargs.values()), _floats(args, []))
    lower = torch.get_autocast_dtype(device.NAME)
    if any(f not in (lower, torch.float32) for f in floats) or not floats:
        return op(*args, **kwargs)
    args, kwargs = _cast_all(args, kwargs, torch.float32 if torch.float32 in floats else lower)
    return op(*args, **kwargs)


def _binary_cross_entropy(op, args, kwargs):
    raise RuntimeError("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
                       "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
                       "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
                       "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
                       "safe to autocast.")


def _register(library, name, how):
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    @functools.wraps(how)
    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return how(op, args, kwargs)

    library.impl(name, kernel, "AutocastPrivateUse1")


def _install():
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    _library[:] = [library, others]
    for names, how in ((LOWER, _lower), (FLOAT32, _float32), (FLOAT32_RESULT, _float32_result), (PROMOTE, _promote),
                       ("binary_cross_entropy", _binary_cross_entropy)):
        for name in names.split():
            _register(library, name, how)


_install()
