"""Convolutions, transposed and grouped, and their backward.

Every direction is a plain `conv_general_dilated`, the form the TPU's matrix unit takes as it is.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..dtypes import opmath
from ..registry import aten, op


def _spread(values, n):
    """A per-axis list of n numbers (torch lets one number stand for all axes)."""
    values = list(values)
    return values * n if len(values) == 1 else values


def _numbers(n):
    """Dimension numbers of the channels-first layout for n spatial axes."""
    axes = tuple(range(n + 2))
    return lax.ConvDimensionNumbers(axes, axes, axes)


def _check(input, weight, transposed, groups):
    n = weight.ndim - 2
    if input.dtype != weight.dtype:
        raise RuntimeError(f"Input type ({input.dtype.name}) and weight type ({weight.dtype.name}) should be the same")
    if n < 1 or input.ndim != n + 2:
        raise RuntimeError(f"expected a {n + 2}D input for a {weight.ndim}D weight, got {input.ndim}D")
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if input.shape[1] != channels:
        raise RuntimeError(f"Given groups={groups}, weight of size {list(weight.shape)}, expected input "
                           f"{list(input.shape)} to have {channels} channels, but got {input.shape[1]} channels instead")
    if weight.shape[0] % groups:
        raise RuntimeError(f"Given groups={groups}, the weight's first size {weight.shape[0]} must be divisible by it")
    return n


def _plain(x, w, stride, padding, dilation, groups, preferred=None):
    n = x.ndim - 2
    return lax.conv_general_dilated(x, w, stride, [(p, p) for p in padding], rhs_dilation=dilation,
                                    dimension_numbers=_numbers(n), feature_group_count=groups,
                                    preferred_element_type=preferred)


def _turned(w, groups):
    """The weight of a transposed convolution as that of a plain one: axes swapped per group, taps reversed."""
    spatial = w.shape[2:]
    w = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    w = jnp.swapaxes(w, 1, 2).reshape(-1, w.shape[1], *spatial)
    return lax.rev(w, tuple(range(2, w.ndim)))


def _transposed(x, w, stride, padding, dilation, output_padding, groups, preferred=None):
    n = x.ndim - 2
    pads = []
    for k, s, p, d, o in zip(w.shape[2:], stride, padding, dilation, output_padding):
        if o >= s and o >= d:
            raise RuntimeError(f"output padding must be smaller than either stride or dilation, but got {o}")
        edge = d * (k - 1) - p
        pads.append((edge, edge + o))
    return lax.conv_general_dilated(x, _turned(w, groups), (1,) * n, pads, lhs_dilation=stride, rhs_dilation=dilation,
                                    dimension_numbers=_numbers(n), feature_group_count=groups,
                                    preferred_element_type=preferred)


def _forward(x, w, stride, padding, dilation, transposed, output_padding, groups, preferred=None):
    if transposed:
        return _transposed(x, w, stride, padding, dilation, output_padding, groups, preferred)
    for size, k, p, d in zip(x.shape[2:], w.shape[2:], padding, dilation):
        if size + 2 * p < d * (k - 1) + 1:
            raise RuntimeError(f"Calculated padded input size per channel: ({size + 2 * p}). Kernel size: "
                               f"({d * (k - 1) + 1}). Kernel size can't be greater than actual input size")
    return _plain(x, w, stride, padding, dilation, groups, preferred)


def _settings(n, stride, padding, dilation, output_padding):
    out = [_spread(v, n) for v in (stride, padding, dilation, output_padding)]
    if any(s <= 0 for s in out[0]):
        raise RuntimeError("non-positive stride is not supported")
    if any(p < 0 for p in out[1]):
        raise RuntimeError("negative padding is not supported")
    if any(d <= 0 for d in out[2]):
        raise RuntimeError("dilation should be greater than zero")
    return out


@op(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    n = _check(input, weight, transposed, groups)
    stride, padding, dilation, output_padding = _settings(n, stride, padding, dilation, output_padding)
    preferred = opmath(input.dtype)
    out = _forward(input, weight, stride, padding, dilation, transposed, output_padding, groups,
                   preferred if preferred != input.dtype else None)
    if bias is not None:
        if bias.dtype != input.dtype:
            raise RuntimeError(f"Input type ({input.dtype.name}) and bias type ({bias.dtype.name}) should be the same")
        out = out + bias.astype(out.dtype).reshape(1, -1, *(1,) * n)
    return out.astype(input.dtype)


@op(aten._convolution.default, aten._convolution.deprecated)
def _convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, benchmark=False,
                 deterministic=False, cudnn_enabled=True, allow_tf32=True):
    return convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _backward(grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups, output_mask):
    n = weight.ndim - 2
    stride, padding, dilation, output_padding = _settings(n, stride, padding, dilation, output_padding)
    complex_ = input.dtype.kind == "c"
    x, w = (jnp.conj(input), jnp.conj(weight)) if complex_ else (input, weight)
    ct = grad_output.astype(input.dtype)
    into_input = into_weight = into_bias = None
    if output_mask[0]:
        _, pull = jax.vjp(lambda v: _forward(v, w, stride, padding, dilation, transposed, output_padding, groups), x)
        into_input = pull(ct)[0]
    if output_mask[1]:
        _, pull = jax.vjp(lambda v: _forward(x, v, stride, padding, dilation, transposed, output_padding, groups), w)
        into_weight = pull(ct)[0]
    if output_mask[2]:
        axes = (0, *range(2, grad_output.ndim))
        into_bias = jnp.sum(grad_output.astype(opmath(grad_output.dtype)), axes).astype(grad_output.dtype)
    return into_input, into_weight, into_bias


@op(aten.convolution_backward.default)
def convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
                         groups, output_mask):
    return _backward(grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups,
                     output_mask)


@op(aten.convolution_backward_overrideable.default)
def convolution_backward_overrideable(grad_output, input, weight, stride, padding, dilation, transposed,
                                      output_padding, groups, output_mask):
    return _backward(grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups,
                     output_mask)


def _one(n):
    return (1,) * n


@op(aten._slow_conv2d_forward.default, aten.slow_conv3d_forward.default)
def slow_conv_forward(self, weight, kernel_size, bias, stride, padding):
    n = self.ndim - 2
    if weight.ndim == 2:
        weight = weight.reshape(weight.shape[0], self.shape[1], *kernel_size)
    return convolution(self, weight, bias, stride, padding, _one(n), False, (0,) * n, 1)


@op(aten._slow_conv2d_backward.output_mask)
def _slow_conv2d_backward(grad_output, self, weight, kernel_size, stride, padding, output_mask):
    return _backward(grad_output, self, weight, stride, padding, (1, 1), False, (0, 0), 1, output_mask)


@op(aten.conv_depthwise3d.default, aten._conv_depthwise2d.default)
def conv_depthwise(self, weight, kernel_size, bias, stride, padding, dilation):
    n = self.ndim - 2
    return convolution(self, weight, bias, stride, padding, dilation, False, (0,) * n, self.shape[1])


@op(aten.slow_conv_dilated2d.default, aten.slow_conv_dilated3d.default)
def slow_conv_dilated(self, weight, kernel_size, bias=None, stride=1, padding=0, dilation=1):
    n = weight.ndim - 2
    stride, padding, dilation = (v if isinstance(v, (tuple, list)) else (v,) for v in (stride, padding, dilation))
    return convolution(self, weight, bias, stride, padding, dilation, False, (0,) * n, 1)


@op(aten.slow_conv_transpose2d.default, aten.slow_conv_transpose3d.default)
def slow_conv_transpose(self, weight, kernel_size, bias=None, stride=1, padding=0, output_padding=0, dilation=1):
    stride, padding, output_padding, dilation = (
        v if isinstance(v, (tuple, list)) else (v,) for v in (stride, padding, output_padding, dilation))
    return convolution(self, weight, bias, stride, padding, dilation, True, output_padding, 1)


@op(aten.conv_tbc.default)
def conv_tbc(self, weight, bias, pad=0):
    """Convolution over (time, batch, channel): weight is (time, in, out)."""
    wide = opmath(self.dtype)
    out = lax.conv_general_dilated(self, weight, (1,), [(pad, pad)], dimension_numbers=("WNC", "WIO", "WNC"),
                                   preferred_element_type=wide if wide != self.dtype else None)
    return (out + bias.astype(out.dtype)).astype(self.dtype)


@op(aten.conv_tbc_backward.default)
def conv_tbc_backward(self, input, weight, bias, pad):
    def forward(x, w):
        return lax.conv_general_dilated(x, w, (1,), [(pad, pad)], dimension_numbers=("WNC", "WIO", "WNC"))

    _, pull = jax.vjp(forward, input, weight)
    into_input, into_weight = pull(self)
    return into_input, into_weight, jnp.sum(self.astype(opmath(self.dtype)), (0, 1)).astype(bias.dtype)
