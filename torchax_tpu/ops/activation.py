"""Activations and softmax, with the backward ops that autograd calls."""

import math

import jax
import jax.numpy as jnp

from ..dtypes import cast, opmath, promote, to_float
from ..registry import aten, op
from ._pointwise import Only, constant, float_or_complex, floating, kind, real

_self = floating("self")
_grad = floating("grad_output", "self")
_grad_out = float_or_complex("grad_output", "output")


def pointwise(*overloads, dtype=_self, **options):
    """`op` with the usual dtype rule and layout of this family."""
    return op(*overloads, dtype=dtype, layout="elementwise", **options)


# ---------------------------------------------------------------- relu and its relatives

pointwise(aten.relu.default, dtype=Only(promote, "iuf"))(lambda self: jnp.maximum(self, 0))
pointwise(aten.relu6.default, dtype=real)(lambda self: jnp.clip(self, 0, 6))


@pointwise(aten.threshold.default, dtype=real("self"))
def threshold(self, threshold, value):
    return jnp.where(self <= threshold, cast(value, self.dtype), self)


@pointwise(aten.threshold_backward.default, dtype=real("grad_output", "self"))
def threshold_backward(grad_output, self, threshold):
    return jnp.where(self <= threshold, constant(grad_output, 0), grad_output)


@pointwise(aten.hardtanh.default, dtype=real("self"))
def hardtanh(self, min_val=-1, max_val=1):
    return jnp.minimum(jnp.maximum(self, cast(min_val, self.dtype)), cast(max_val, self.dtype))


@pointwise(aten.hardtanh_backward.default, dtype=_grad)
def hardtanh_backward(grad_output, self, min_val, max_val):
    return jnp.where((self <= min_val) | (self >= max_val), constant(grad_output, 0), grad_output)


@pointwise(aten.leaky_relu.default)
def leaky_relu(self, negative_slope=0.01):
    return jnp.where(self > 0, self, self * negative_slope)


@pointwise(aten.leaky_relu_backward.default, dtype=_grad)
def leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
    return jnp.where(self > 0, grad_output, grad_output * negative_slope)


@pointwise(aten._prelu_kernel.default, dtype=floating)
def prelu_kernel(self, weight):
    return jnp.where(self > 0, self, weight * self)


@op(aten._prelu_kernel_backward.default, dtype=floating)
def prelu_kernel_backward(grad_output, self, weight):
    positive = self > 0
    return (jnp.where(positive, grad_output, weight * grad_output),
            jnp.where(positive, constant(self, 0), self * grad_output))


def _leaky_noise(key, self, lower, upper, training):
    """(result, noise): the slope of negative elements is drawn in training, fixed otherwise."""
    dtype = opmath(self.dtype)
    if not training:
        return leaky_relu(self, cast((lower + upper) / 2, self.dtype)), None
    slope = jax.random.uniform(key, self.shape, dtype, cast(lower, dtype), cast(upper, dtype)).astype(self.dtype)
    noise = jnp.where(self <= 0, slope, constant(self, 1))
    return self * noise, noise


@op(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default, random=True)
def rrelu_with_noise(key, self, noise, lower=0.125, upper=1 / 3, training=False):
    return _leaky_noise(key, self, lower, upper, training)  # no noise: the argument stays as it was


@op(aten.rrelu_with_noise_functional.default, random=True)
def rrelu_with_noise_functional(key, self, noise, lower=0.125, upper=1 / 3, training=False):
    out, drawn = _leaky_noise(key, self, lower, upper, training)
    return out, noise if drawn is None else drawn


@pointwise(aten.rrelu_with_noise_backward.default, dtype=floating("grad_output", "self", "noise"))
def rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result):
    if training:
        return grad_output * noise
    return leaky_relu_backward(grad_output, self, (lower + upper) / 2, self_is_result)


# ---------------------------------------------------------------- exponential units


@pointwise(aten.elu.default)
def elu(self, alpha=1, scale=1, input_scale=1):
    return jnp.where(self > 0, self * scale, jnp.expm1(self * input_scale) * (alpha * scale))


@pointwise(aten.elu_backward.default, dtype=floating("grad_output", "self_or_result"))
def elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    x, negative = self_or_result, alpha * scale
    slope = input_scale * (x + negative) if is_result else input_scale * negative * jnp.exp(x * input_scale)
    return grad_output * jnp.where(x <= 0, slope, cast(scale, x.dtype))


@pointwise(aten.celu.default)
def celu(self, alpha=1.0):
    return jnp.where(self > 0, self, jnp.expm1(self / alpha) * alpha)


SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@pointwise(aten.selu.default)
def selu(self):
    return elu(self, SELU_ALPHA, SELU_SCALE)


@pointwise(aten.softplus.default)
def softplus(self, beta=1, threshold=20):
    scaled = self * beta
    # the exponent is bounded first: what `where` doesn't take must not overflow
    return jnp.where(scaled > threshold, self, jnp.log1p(jnp.exp(jnp.minimum(scaled, threshold))) / beta)


@pointwise(aten.softplus_backward.default, dtype=_grad)
def softplus_backward(grad_output, self, beta, threshold):
    scaled = self * beta
    return jnp.where(scaled > threshold, grad_output, grad_output * jax.nn.sigmoid(scaled))


@op(aten.log_sigmoid_forward.default, dtype=floating)
def log_sigmoid_forward(self):
    # the buffer is for kernels whose backward uses it; ours needs the input alone
    return jnp.minimum(self, 0) - jnp.log1p(jnp.exp(-jnp.abs(self))), jnp.zeros((0,), self.dtype)


@pointwise(aten.log_sigmoid_backward.default, dtype=_grad)
def log_sigmoid_backward(grad_output, self, buffer):
    return grad_output * jax.nn.sigmoid(-self)


@pointwise(aten.sigmoid_backward.default, dtype=_grad_out)
def sigmoid_backward(grad_output, output):
    return grad_output * jnp.conj(output * (1 - output))


@pointwise(aten.tanh_backward.default, dtype=_grad_out)
def tanh_backward(grad_output, output):
    return grad_output * jnp.conj(1 - output * output)


@pointwise(aten.logit.default, dtype=Only(to_float, "f")("self"))
def logit(self, eps=None):
    if eps is not None:
        self = jnp.minimum(jnp.maximum(self, eps), 1 - eps)
    return jnp.log(self / (1 - self))


@pointwise(aten.logit_backward.default, dtype=_grad)
def logit_backward(grad_output, self, eps=None):
    inner = grad_output / (self * (1 - self))
    if eps is None:
        return jnp.where((self < 0) | (self > 1), constant(self, math.nan), inner)
    return jnp.where((self < eps) | (self > 1 - eps), constant(self, 0), inner)


# ---------------------------------------------------------------- gelu, silu, mish

_TANH, _CUBE = math.sqrt(2 / math.pi), 0.044715


@pointwise(aten.gelu.default)
def gelu(self, approximate="none"):
    if approximate == "tanh":
        return self * (0.5 * (1 + jnp.tanh(_TANH * (self + _CUBE * (self * self * self)))))
    _gelu_form(approximate)
    return self * (0.5 * (1 + jax.lax.erf(self * math.sqrt(0.5))))


def _gelu_form(approximate):
    if approximate != "none":
        raise RuntimeError("approximate argument must be either none or tanh.")


@pointwise(aten.gelu_backward.default, dtype=_grad)
def gelu_backward(grad_output, self, approximate="none"):
    if approximate == "tanh":
        t = jnp.tanh(_TANH * (self + _CUBE * (self * self * self)))
        inner = (1 - t * t) * _TANH * (1 + 3 * _CUBE * self * self)
        return grad_output * (0.5 * (1 + t) + 0.5 * self * inner)
    _gelu_form(approximate)
    cdf = 0.5 * (1 + jax.lax.erf(self * math.sqrt(0.5)))
    return grad_output * (cdf + self * jnp.exp(-0.5 * self * self) / math.sqrt(2 * math.pi))


@pointwise(aten.silu.default, dtype=float_or_complex)
def silu(self):
    return self * jax.nn.sigmoid(self)


@pointwise(aten.silu_backward.default, dtype=float_or_complex)
def silu_backward(grad_output, self):
    s = jax.nn.sigmoid(self)
    return grad_output * s * (1 + self * (1 - s))


@pointwise(aten.mish.default)
def mish(self):
    return self * jnp.tanh(jax.nn.softplus(self))


@pointwise(aten.mish_backward.default, dtype=_grad)
def mish_backward(grad_output, self):
    t = jnp.tanh(jax.nn.softplus(self))
    return grad_output * (t + self * jax.nn.sigmoid(self) * (1 - t * t))


@op(aten.glu.default, dtype=floating)
def glu(self, dim=-1):
    a, b = _halves(self, dim)
    return a * jax.nn.sigmoid(b)


def _halves(x, dim):
    if not x.ndim:
        raise RuntimeError("glu does not support 0-dimensional tensors")
    if x.shape[dim] % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim} is size {x.shape[dim]}")
    return jnp.split(x, 2, dim)


@op(aten.glu_backward.default, dtype=_grad)
def glu_backward(grad_output, self, dim):
    a, b = _halves(self, dim)
    s = jax.nn.sigmoid(b)
    return jnp.concatenate([grad_output * s, grad_output * a * s * (1 - s)], dim)


@op(aten.glu_jvp.default, dtype=floating("glu", "x", "dx"))
def glu_jvp(glu, x, dx, dim):
    (_, b), (da, db) = _halves(x, dim), _halves(dx, dim)
    s = jax.nn.sigmoid(b)
    return da * s + glu * (db - s * db)


@op(aten.glu_backward_jvp.default, dtype=floating("grad_x", "grad_glu", "x", "dgrad_glu", "dx"))
def glu_backward_jvp(grad_x, grad_glu, x, dgrad_glu, dx, dim):
    (a, b), (da, db) = _halves(x, dim), _halves(dx, dim)
    s = jax.nn.sigmoid(b)
    slope = s * (1 - s)
    return jnp.concatenate([dgrad_glu * s + grad_glu * slope * db,
                            slope * (dgrad_glu * a + grad_glu * (da + a * (1 - 2 * s) * db))], dim)


# ---------------------------------------------------------------- hard forms


@pointwise(aten.hardsigmoid.default)
def hardsigmoid(self):
    return jnp.minimum(jnp.maximum(self + 3, 0), 6) / 6


@pointwise(aten.hardsigmoid_backward.default, dtype=_grad)
def hardsigmoid_backward(grad_output, self):
    return jnp.where((self > -3) & (self < 3), grad_output / 6, constant(self, 0))


@pointwise(aten.hardswish.default)
def hardswish(self):
    return self * jnp.minimum(jnp.maximum(self + 3, 0), 6) / 6


@pointwise(aten.hardswish_backward.default, dtype=_grad)
def hardswish_backward(grad_output, self):
    inner = grad_output * (self / 3 + 0.5)
    return jnp.where(self <= -3, constant(self, 0), jnp.where(self < 3, inner, grad_output))


@pointwise(aten.hardshrink.default)
def hardshrink(self, lambd=0.5):
    return jnp.where((self >= -lambd) & (self <= lambd), constant(self, 0), self)


@pointwise(aten.softshrink.default)
def softshrink(self, lambd=0.5):
    # nan passes: x * 0 keeps it
    return jnp.where(self > lambd, self - lambd, jnp.where(self < -lambd, self + lambd, self * 0))


@pointwise(aten.hardshrink_backward.default, dtype=floating("grad_out", "self"))
def hardshrink_backward(grad_out, self, lambd):
    return jnp.where((self >= -lambd) & (self <= lambd), constant(self, 0), grad_out)


@pointwise(aten.softshrink_backward.default, dtype=_grad)
def softshrink_backward(grad_output, self, lambd):
    return jnp.where((self >= -lambd) & (self <= lambd), constant(self, 0), grad_output)


# ---------------------------------------------------------------- softmax


def _along(fn):
    """Softmax over ``dim``; a 0-d tensor counts as one element, and half_to_float keeps float32."""
    def impl(self, dim, half_to_float):
        if kind(self) != "f":
            raise NotImplementedError(f"softmax is not implemented for {self.dtype}")
        x = cast(self, opmath(self.dtype))
        out = fn(x.reshape(1), 0).reshape(()) if not x.ndim else fn(x, dim)
        return out if half_to_float else cast(out, self.dtype)
    return impl


@_along
def _softmax(x, dim):
    e = jnp.exp(x - jnp.max(x, dim, keepdims=True, initial=-jnp.inf))
    return e / jnp.sum(e, dim, keepdims=True)


@_along
def _log_softmax(x, dim):
    top = jnp.max(x, dim, keepdims=True, initial=-jnp.inf)
    total = jnp.log(jnp.sum(jnp.exp(x - top), dim, keepdims=True))
    # One number per row: without the barrier TPU's compiler sums the rows again in every matmul that reads the gradient.
    top, total = jax.lax.optimization_barrier((top, total))
    return x - top - total


op(aten._softmax.default)(_softmax)
op(aten._log_softmax.default)(_log_softmax)


@op(aten._softmax_backward_data.default)
def softmax_backward(grad_output, output, dim, input_dtype):
    compute = opmath(grad_output.dtype)
    g, y = cast(grad_output, compute), cast(output, compute)
    product = g * y
    total = jnp.sum(product, dim, keepdims=True) if y.ndim else product
    return cast(product - y * total, input_dtype)


@op(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad_output, output, dim, input_dtype):
    compute = opmath(grad_output.dtype)
    g, y = cast(grad_output, compute), cast(output, compute)
    total = jnp.sum(g, dim, keepdims=True) if y.ndim else g
    return cast(g - jnp.exp(y) * total, input_dtype)
