"""Normalisation: layer, group, batch, RMS and weight norm, renorm, with their backward ops.

Statistics are computed in float32 for half types. The saved ones are as coarse as torch's CPU
kernels make them (a half), so backward takes them anew from the input in that case: a fused
reduction, and the compiler merges it with the forward's where both are in one program.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import cast, opmath
from ..registry import aten, op


def up(x):
    """``x`` in the dtype that torch's kernels compute in; None stays None."""
    return None if x is None else cast(x, opmath(x.dtype))


def _is_half(x):
    return opmath(x.dtype) != x.dtype


def _stat_dtype(input, *params):
    """dtype of saved statistics: the input's, or float32 when half input meets float32 parameters."""
    mixed = any(p is not None and p.dtype != input.dtype for p in params)
    return opmath(input.dtype) if mixed else input.dtype


def _moments(x, axes):
    """Mean and biased variance, kept dims; two passes, since E[x^2] - E[x]^2 cancels."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)


# ---------------------------------------------------------------- layer norm


def _layer_axes(input, normalized_shape):
    k = len(normalized_shape)
    if not k or input.ndim < k or tuple(input.shape[input.ndim - k:]) != tuple(normalized_shape):
        raise RuntimeError(f"Given normalized_shape={list(normalized_shape)}, expected input with shape "
                           f"[*, {', '.join(map(str, normalized_shape))}], but got input of size {list(input.shape)}")
    return tuple(range(input.ndim - k, input.ndim))


def _check_affine(what, param, normalized_shape):
    if param is not None and tuple(param.shape) != tuple(normalized_shape):
        raise RuntimeError(f"Expected {what} to be of same shape as normalized_shape, but got {what} of shape "
                           f"{list(param.shape)} and normalized_shape = {list(normalized_shape)}")


@op(aten.native_layer_norm.default)
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    axes = _layer_axes(input, normalized_shape)
    _check_affine("weight", weight, normalized_shape)
    _check_affine("bias", bias, normalized_shape)
    x = up(input)
    mean, var = _moments(x, axes)
    rstd = jax.lax.rsqrt(var + eps)
    out = (x - mean) * rstd
    if weight is not None:
        out = out * up(weight)
    if bias is not None:
        out = out + up(bias)
    stat = _stat_dtype(input, weight, bias)
    return cast(out, input.dtype), cast(mean, stat), cast(rstd, stat)


@op(aten.layer_norm.default)
def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


@op(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    axes = _layer_axes(input, normalized_shape)
    x, g = up(input), up(grad_out)
    if _is_half(input) and _is_half(rstd):
        # eps isn't given here; the saved rstd has it, and only the mean is worth refining.
        mean = jnp.mean(x, axis=axes, keepdims=True)
    mean, rstd = cast(mean, x.dtype), cast(rstd, x.dtype)
    xhat = (x - mean) * rstd
    lead = tuple(range(axes[0]))
    gx = gw = gb = None
    if output_mask[0]:
        gh = g if weight is None else g * up(weight)
        gx = (gh - jnp.mean(gh, axis=axes, keepdims=True)
              - xhat * jnp.mean(gh * xhat, axis=axes, keepdims=True)) * rstd
        gx = cast(gx, input.dtype)
    if output_mask[1] and weight is not None:
        gw = cast(jnp.sum(g * xhat, axis=lead), weight.dtype)
    if output_mask[2] and bias is not None:
        gb = cast(jnp.sum(g, axis=lead), bias.dtype)
    return gx, gw, gb


# ---------------------------------------------------------------- RMS norm


def _rms_rstd(x, axes, eps):
    if eps is None:
        eps = jnp.finfo(x.dtype).eps
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) + eps)


@op(aten._fused_rms_norm.default)
def fused_rms_norm(input, normalized_shape, weight, eps):
    axes = _layer_axes(input, normalized_shape)
    _check_affine("weight", weight, normalized_shape)
    x = up(input)
    rstd = _rms_rstd(x, axes, eps)
    out = x * rstd
    if weight is not None:
        out = out * up(weight)
    return cast(out, input.dtype), rstd


@op(aten.rms_norm.default)
def rms_norm(input, normalized_shape, weight=None, eps=None):
    return fused_rms_norm(input, normalized_shape, weight, eps)[0]


@op(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    axes = _layer_axes(input, normalized_shape)
    x, g = up(input), up(grad_out)
    rstd = cast(rstd, x.dtype)
    xhat = x * rstd
    gx = gw = None
    if output_mask[0]:
        gh = g if weight is None else g * up(weight)
        gx = cast((gh - xhat * jnp.mean(gh * xhat, axis=axes, keepdims=True)) * rstd, input.dtype)
    if output_mask[1] and weight is not None:
        gw = cast(jnp.sum(g * xhat, axis=tuple(range(axes[0]))), weight.dtype)
    return gx, gw


# ---------------------------------------------------------------- group norm


def _grouped(x, n, c, hxw, group):
    return jnp.reshape(x, (n, group, c // group, hxw))


@op(aten.native_group_norm.default)
def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    x = _grouped(up(input), N, C, HxW, group)
    mean, var = _moments(x, (2, 3))
    rstd = jax.lax.rsqrt(var + eps)
    out = (x - mean) * rstd
    affine = (1, group, C // group, 1)
    if weight is not None:
        out = out * jnp.reshape(up(weight), affine)
    if bias is not None:
        out = out + jnp.reshape(up(bias), affine)
    stat = _stat_dtype(input, weight, bias)
    out = cast(jnp.reshape(out, input.shape), input.dtype)
    return out, cast(jnp.reshape(mean, (N, group)), stat), cast(jnp.reshape(rstd, (N, group)), stat)


@op(aten.native_group_norm_backward.default)
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    x, g = _grouped(up(input), N, C, HxW, group), _grouped(up(grad_out), N, C, HxW, group)
    if _is_half(input) and _is_half(rstd):
        mean = jnp.mean(x, axis=(2, 3))
    mean = jnp.reshape(cast(mean, x.dtype), (N, group, 1, 1))
    rstd = jnp.reshape(cast(rstd, x.dtype), (N, group, 1, 1))
    xhat = (x - mean) * rstd
    gx = gw = gb = None
    param = input.dtype if weight is None else weight.dtype
    if output_mask[0]:
        gh = g if weight is None else g * jnp.reshape(up(weight), (1, group, C // group, 1))
        gx = (gh - jnp.mean(gh, axis=(2, 3), keepdims=True)
              - xhat * jnp.mean(gh * xhat, axis=(2, 3), keepdims=True)) * rstd
        gx = cast(jnp.reshape(gx, input.shape), input.dtype)
    if output_mask[1]:
        gw = cast(jnp.reshape(jnp.sum(g * xhat, axis=(0, 3)), (C,)), param)
    if output_mask[2]:
        gb = cast(jnp.reshape(jnp.sum(g, axis=(0, 3)), (C,)), param)
    return gx, gw, gb


# ---------------------------------------------------------------- batch norm


def _channel(v, ndim):
    """A per-channel vector shaped to broadcast along axis 1; None stays None."""
    return None if v is None else jnp.reshape(up(v), (1, -1) + (1,) * (ndim - 2))


def _batch_axes(x):
    return (0, *range(2, x.ndim))


def _affine(xhat, weight, bias, dtype):
    if weight is not None:
        xhat = xhat * _channel(weight, xhat.ndim)
    if bias is not None:
        xhat = xhat + _channel(bias, xhat.ndim)
    return cast(xhat, dtype)


def _moved(running, value, momentum):
    """A running statistic after one step; None where there is none."""
    if running is None:
        return None
    r = up(running)
    return cast((1 - momentum) * r + momentum * cast(value, r.dtype), running.dtype)


def _unbiased(var, count):
    return var * (count / (count - 1)) if count > 1 else var * jnp.nan


def _check_channels(input, **params):
    if input.ndim < 2:
        raise RuntimeError(f"batch norm expects an input of at least 2 dimensions, got {list(input.shape)}")
    for name, p in params.items():
        if p is not None and tuple(p.shape) != (input.shape[1],):
            raise RuntimeError(f"{name} should contain {input.shape[1]} elements not {p.size}")


def _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """(out, mean, invstd, new running mean, new running var); the last two None unless training."""
    _check_channels(input, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    x = up(input)
    if not training:
        if running_mean is None or running_var is None:
            raise RuntimeError("Expected running_mean and running_var to be defined when training=False")
        scale = jax.lax.rsqrt(_channel(running_var, x.ndim) + eps)
        out = _affine((x - _channel(running_mean, x.ndim)) * scale, weight, bias, input.dtype)
        return out, None, None, None, None
    mean, var = _moments(x, _batch_axes(x))
    invstd = jax.lax.rsqrt(var + eps)
    out = _affine((x - mean) * invstd, weight, bias, input.dtype)
    mean, var, invstd = jnp.ravel(mean), jnp.ravel(var), jnp.ravel(invstd)
    count = math.prod(input.shape) // max(input.shape[1], 1)
    stat = _stat_dtype(input, weight, bias, running_mean, running_var)
    return (out, cast(mean, stat), cast(invstd, stat), _moved(running_mean, mean, momentum),
            _moved(running_var, _unbiased(var, count), momentum))


def _written(result, *running):
    """An impl's result with the new values of those running statistics that exist."""
    out, mean, invstd, *new = result
    if mean is None:
        mean = invstd = jnp.zeros((0,), _stat_dtype(out, *running))
    return (out, mean, invstd, *(n for r, n in zip(running, new) if r is not None))  # None in eval mode


@op(aten.native_batch_norm.default, mutates=("running_mean", "running_var"))
def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    return _written(_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps),
                    running_mean, running_var)


@op(aten._native_batch_norm_legit.default)
def native_batch_norm_legit(input, weight, bias, running_mean, running_var, training, momentum, eps):
    return native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


def _batch_norm_out(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """out= form: what is written is in schema order, the running statistics first."""
    out, mean, invstd, *new = native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return (*new, out, mean, invstd)


op(aten._native_batch_norm_legit.out)(_batch_norm_out)
op(aten.native_batch_norm.out, mutates=("running_mean", "running_var", "out", "save_mean", "save_invstd"))(_batch_norm_out)


@op(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_no_stats(input, weight, bias, training, momentum, eps):
    return _batch_norm(input, weight, bias, None, None, training, momentum, eps)[:3]


@op(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(input, weight, bias, running_mean, running_var, training, momentum, eps):
    out, mean, invstd, new_mean, new_var = _batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps)
    if mean is None:
        mean = invstd = jnp.zeros((0,), out.dtype)
        new_mean, new_var = running_mean, running_var
    return out, mean, invstd, new_mean, new_var


@op(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(input, weight, bias, running_mean, running_var, momentum, eps):
    return native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)


@op(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps,
                               output_mask):
    x, g = up(input), up(grad_out)
    axes, n = _batch_axes(x), x.ndim
    if train:
        if _is_half(input) and _is_half(save_invstd):
            mean, var = _moments(x, axes)
            invstd = jax.lax.rsqrt(var + eps)
        else:
            mean, invstd = _channel(save_mean, n), _channel(save_invstd, n)
    else:
        mean, invstd = _channel(running_mean, n), jax.lax.rsqrt(_channel(running_var, n) + eps)
    xhat = (x - mean) * invstd
    sum_g = jnp.sum(g, axis=axes, keepdims=True)
    sum_gx = jnp.sum(g * xhat, axis=axes, keepdims=True)
    gx = gw = gb = None
    if output_mask[0]:
        scale = invstd if weight is None else invstd * _channel(weight, n)
        if train:
            count = math.prod(input.shape) // max(input.shape[1], 1)
            gx = (g - (sum_g + xhat * sum_gx) / count) * scale
        else:
            gx = g * scale
        gx = cast(gx, input.dtype)
    param = input.dtype if weight is None else weight.dtype
    if output_mask[1]:
        gw = cast(jnp.ravel(sum_gx), param)
    if output_mask[2]:
        gb = cast(jnp.ravel(sum_g), param)
    return gx, gw, gb


@op(aten._batch_norm_with_update.default)
def batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps):
    out, mean, invstd, *new = native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return (out, mean, invstd, jnp.zeros((0,), np.uint8), *new)


@op(aten.batch_norm_backward.default)
def batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask,
                        reserve):
    return native_batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_var, update,
                                      eps, output_mask)


# ------------------------------------------- batch norm in pieces (synchronised batch norm is built of them)


@op(aten.batch_norm_stats.default)
def batch_norm_stats(input, eps):
    mean, var = _moments(up(input), _batch_axes(input))
    return jnp.ravel(mean), jnp.ravel(jax.lax.rsqrt(var + eps))


@op(aten.batch_norm_update_stats.default, mutates=("running_mean", "running_var"))
def batch_norm_update_stats(input, running_mean, running_var, momentum):
    mean, var = _moments(up(input), _batch_axes(input))
    mean, var = jnp.ravel(mean), jnp.ravel(var)
    count = math.prod(input.shape) // max(input.shape[1], 1)
    new = (_moved(running_mean, mean, momentum), _moved(running_var, _unbiased(var, count), momentum))
    stat = _stat_dtype(input, running_mean, running_var)
    return (cast(mean, stat), cast(var, stat), *(n for n in new if n is not None))


@op(aten.batch_norm_elemt.default)
def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
    n = input.ndim
    return _affine((up(input) - _channel(mean, n)) * _channel(invstd, n), weight, bias, input.dtype)


@op(aten.batch_norm_gather_stats_with_counts.default, mutates=("running_mean", "running_var"))
def batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts):
    mean, invstd = up(mean), up(invstd)
    count = jnp.reshape(cast(counts, mean.dtype), (-1, 1))
    total = jnp.sum(count)
    var = 1 / jnp.square(invstd) - eps
    all_mean = jnp.sum(mean * count, axis=0) / total
    all_var = jnp.sum((var + jnp.square(mean - all_mean)) * count, axis=0) / total
    new = (_moved(running_mean, all_mean, momentum), _moved(running_var, all_var * total / (total - 1), momentum))
    return (all_mean, jax.lax.rsqrt(all_var + eps), *(n for n in new if n is not None))


@op(aten.batch_norm_gather_stats.default, mutates=("running_mean", "running_var"))
def batch_norm_gather_stats(input, mean, invstd, running_mean, running_var, momentum, eps, count):
    counts = jnp.full((mean.shape[0],), count, up(mean).dtype)
    return batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts)


@op(aten.batch_norm_backward_reduce.default)
def batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
    g, x = up(grad_out), up(input)
    axes = _batch_axes(x)
    sum_dy = jnp.sum(g, axis=axes)
    sum_dy_xmu = jnp.sum(g * (x - _channel(mean, x.ndim)), axis=axes)
    param = opmath(input.dtype) if weight is None else weight.dtype
    return (sum_dy if input_g else None, sum_dy_xmu if input_g else None,
            cast(sum_dy_xmu * up(invstd), param) if weight_g else None, cast(sum_dy, param) if bias_g else None)


@op(aten.batch_norm_backward_elemt.default)
def batch_norm_backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    g, x = up(grad_out), up(input)
    n = x.ndim
    total = jnp.sum(cast(count, x.dtype))
    inv = _channel(invstd, n)
    gx = g - _channel(sum_dy, n) / total - (x - _channel(mean, n)) * inv * inv * (_channel(sum_dy_xmu, n) / total)
    scale = inv if weight is None else inv * _channel(weight, n)
    return cast(gx * scale, input.dtype)


# ---------------------------------------------------------------- weight norm, renorm


def _other_axes(v, dim):
    return tuple(i for i in range(v.ndim) if i != dim % v.ndim) if v.ndim else ()


@op(aten._weight_norm_interface.default)
def weight_norm_interface(v, g, dim=0):
    x = up(v)
    norms = jnp.sqrt(jnp.sum(jnp.square(x), axis=_other_axes(v, dim), keepdims=True))
    return cast(x * (up(g) / norms), v.dtype), norms


@op(aten._weight_norm_interface_backward.default)
def weight_norm_interface_backward(grad_w, saved_v, saved_g, saved_norms, dim):
    gw, v, g, norms = up(grad_w), up(saved_v), up(saved_g), up(saved_norms)
    along = jnp.sum(gw * v, axis=_other_axes(v, dim), keepdims=True)
    gv = (g / norms) * (gw - v * along / jnp.square(norms))
    return cast(gv, saved_v.dtype), cast(along / norms, saved_g.dtype)


@op(aten.renorm.default, static=("p",))
def renorm(self, p, dim, maxnorm):
    if self.ndim < 2:
        raise RuntimeError(f"renorm: input needs at least 2 dimensions, got {self.ndim} dimensions")
    if p <= 0:
        raise RuntimeError("renorm: non-positive-norm not supported")
    x = up(self)
    a = jnp.abs(x)
    axes = _other_axes(self, dim)
    if p == math.inf:
        norm = jnp.max(a, axis=axes, keepdims=True)
    elif p == 2:
        norm = jnp.sqrt(jnp.sum(a * a, axis=axes, keepdims=True))
    elif p == 1:
        norm = jnp.sum(a, axis=axes, keepdims=True)
    else:
        norm = jnp.power(jnp.sum(jnp.power(a, p), axis=axes, keepdims=True), 1 / p)
    limit = cast(maxnorm, norm.dtype)
    factor = jnp.where(norm > limit, limit / (norm + 1e-7), jnp.ones((), norm.dtype))
    return cast(x * factor, self.dtype)
