"""Losses with their backward ops. Reductions: 0 none, 1 mean, 2 sum.

Class targets are met by comparing with an iota, never by gather or scatter: the compiler fuses
the comparison into the passes around it, where a scatter would write a whole array.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import cast, narrowing, opmath, promote
from ..registry import aten, op

NONE, MEAN, SUM = range(3)


def reduced(loss, reduction):
    """The loss under ATen's reduction number."""
    if reduction == NONE:
        return loss
    return jnp.mean(loss) if reduction == MEAN else jnp.sum(loss)


def _spread(grad_output, count, reduction):
    """The gradient of the reduced loss as it meets each element."""
    return grad_output / count if reduction == MEAN else grad_output


def _pointwise(forward, backward, value, slope, **options):
    """Register ``value(self, target, *extra)`` as a loss and ``slope`` as its derivative by ``self``."""

    def loss(self, target, *extra, **named):
        return value(self, target, *extra, **named)

    def loss_backward(grad_output, self, target, *extra, **named):
        return slope(grad_output, self, target, *extra, **named)

    op(forward, dtype=promote("self", "target"), **options)(loss)
    op(backward, dtype=promote("grad_output", "self", "target"), **options)(loss_backward)


def _numel(*arrays):
    return np.prod(jnp.broadcast_shapes(*(a.shape for a in arrays)), dtype=np.int64).item()


def _mean_of(grad_output, self, target, reduction, slope):
    return slope * _spread(grad_output, _numel(self, target), reduction)


# ---------------------------------------------------------------- regression


_pointwise(
    aten.mse_loss.default, aten.mse_loss_backward.default,
    lambda self, target, reduction=MEAN: reduced(jnp.square(self - target), reduction),
    lambda g, self, target, reduction: _mean_of(g, self, target, reduction, 2 * (self - target)))


def smooth_l1(self, target, reduction=MEAN, beta=1.0):
    d = jnp.abs(self - target)
    beta = cast(beta, d.dtype)
    safe = jnp.where(beta == 0, jnp.ones((), d.dtype), beta)
    return reduced(jnp.where(d < beta, 0.5 * d * d / safe, d - 0.5 * beta), reduction)


def smooth_l1_slope(g, self, target, reduction, beta):
    d = self - target
    beta = cast(beta, d.dtype)
    safe = jnp.where(beta == 0, jnp.ones((), d.dtype), beta)
    return _mean_of(g, self, target, reduction, jnp.where(jnp.abs(d) < beta, d / safe, jnp.sign(d)))


_pointwise(aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default, smooth_l1, smooth_l1_slope)


def huber(self, target, reduction=MEAN, delta=1.0):
    d = jnp.abs(self - target)
    delta = cast(delta, d.dtype)
    return reduced(jnp.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta)), reduction)


def huber_slope(g, self, target, reduction, delta):
    d = self - target
    delta = cast(delta, d.dtype)
    return _mean_of(g, self, target, reduction, jnp.clip(d, -delta, delta))


_pointwise(aten.huber_loss.default, aten.huber_loss_backward.default, huber, huber_slope)


def soft_margin(self, target, reduction=MEAN):
    return reduced(jnp.log1p(jnp.exp(-target * self)), reduction)


def soft_margin_slope(g, self, target, reduction):
    z = jnp.exp(-target * self)
    return _mean_of(g, self, target, reduction, -target * z / (1 + z))


_pointwise(aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default, soft_margin, soft_margin_slope)


# ---------------------------------------------------------------- binary cross entropy


@op(aten.binary_cross_entropy.default, dtype=promote("self", "target"))
def binary_cross_entropy(self, target, weight=None, reduction=MEAN):
    log_p = jnp.maximum(jnp.log(self), -100.0)
    log_q = jnp.maximum(jnp.log1p(-self), -100.0)
    loss = -(target * log_p + (1 - target) * log_q)
    return reduced(loss if weight is None else loss * weight, reduction)


@op(aten.binary_cross_entropy_backward.default, dtype=promote("grad_output", "self", "target"))
def binary_cross_entropy_backward(grad_output, self, target, weight=None, reduction=MEAN):
    slope = (self - target) / jnp.maximum((1 - self) * self, 1e-12)
    return _mean_of(grad_output, self, target, reduction, slope if weight is None else slope * weight)


@op(aten.binary_cross_entropy_with_logits.default, dtype=promote)
def binary_cross_entropy_with_logits(self, target, weight=None, pos_weight=None, reduction=MEAN):
    log_sigmoid = jnp.minimum(self, 0) - jnp.log1p(jnp.exp(-jnp.abs(self)))
    scale = 1 if pos_weight is None else (pos_weight - 1) * target + 1
    loss = (1 - target) * self - scale * log_sigmoid
    return reduced(loss if weight is None else loss * weight, reduction)


# ---------------------------------------------------------------- negative log likelihood


def _one_hot(target, classes, axis):
    """target == iota along a new class axis."""
    shape = list(target.shape)
    shape.insert(axis, classes)
    if target.dtype != np.int32:  # a TPU compares 64-bit integers in two halves, bytes wrap; -1 is no class
        target = jnp.where((target < 0) | (target >= classes), -1, target).astype(np.int32)
    return jax.lax.broadcasted_iota(target.dtype, shape, axis) == jnp.expand_dims(target, axis)


def _per_row(picked, values):
    """A class vector's value at each row's target: the one-hot times the vector, summed."""
    return jnp.sum(jnp.where(picked, values, jnp.zeros((), values.dtype)), axis=1)


def _check_nll(self, target, weight):
    if self.ndim not in (1, 2):
        raise RuntimeError("input tensor should be 1D or 2D")
    if target.ndim > 1:
        raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
    if self.ndim == 2 and target.ndim == 0 or self.ndim == 2 and self.shape[0] != target.shape[0]:
        raise RuntimeError(f"size mismatch (got input: {list(self.shape)}, target: {list(target.shape)})")
    _check_weight(self, weight, self.shape[-1])


def _check_weight(self, weight, classes):
    if weight is not None and tuple(weight.shape) != (classes,):
        raise RuntimeError(f"weight tensor should be defined either for all {classes} classes or no classes but got "
                           f"weight tensor of shape: {list(weight.shape)}")


def _row_weights(picked, target, weight, ignore_index, dtype):
    """Each target's weight: its class's, 0 where ignored."""
    if weight is None:
        own = jnp.ones(target.shape, dtype)
    else:
        own = _per_row(picked, jnp.reshape(cast(weight, dtype), (1, -1) + (1,) * (picked.ndim - 2)))
    return jnp.where(target == ignore_index, jnp.zeros((), dtype), own)


def _bad_target(target, classes, ignore_index):
    """Where a target names no class: the loss there is nan, never a clamped class's."""
    return (target != ignore_index) & ((target < 0) | (target >= classes))


def _nll(x, target, weight, reduction, ignore_index):
    """(loss, total weight) of log-probabilities with classes on axis 1."""
    compute = opmath(x.dtype)
    picked = _one_hot(target, x.shape[1], 1)
    weights = _row_weights(picked, target, weight, ignore_index, compute)
    taken = _per_row(picked, cast(x, compute))
    loss = jnp.where(target == ignore_index, jnp.zeros((), compute), -weights * taken)
    loss = jnp.where(_bad_target(target, x.shape[1], ignore_index), jnp.full((), jnp.nan, compute), loss)
    if reduction == NONE:
        return cast(loss, x.dtype), jnp.zeros((), x.dtype)
    total = jnp.sum(weights)
    loss = jnp.sum(loss)
    if reduction == MEAN:
        loss = loss / total
    return cast(loss, x.dtype), cast(total, x.dtype)


def _nll_grad(grad_output, x, target, weight, reduction, ignore_index, total_weight):
    compute = opmath(x.dtype)
    picked = _one_hot(target, x.shape[1], 1)
    g = cast(grad_output, compute)
    if reduction == MEAN:
        g = g / cast(total_weight, compute)
    slope = jnp.where(target == ignore_index, jnp.zeros((), compute), -g)
    slope = jnp.expand_dims(jnp.broadcast_to(slope, target.shape), 1)
    if weight is not None:
        slope = slope * jnp.reshape(cast(weight, compute), (1, -1) + (1,) * (x.ndim - 2))
    return cast(jnp.where(picked, slope, jnp.zeros((), compute)), x.dtype)


@op(aten.nll_loss_forward.default)
def nll_loss_forward(self, target, weight, reduction, ignore_index):
    _check_nll(self, target, weight)
    if self.ndim == 1:
        loss, total = _nll(self[None], jnp.reshape(target, (1,)), weight, reduction, ignore_index)
        return jnp.reshape(loss, ()) if reduction == NONE and target.ndim == 0 else loss, total
    return _nll(self, target, weight, reduction, ignore_index)


@op(aten.nll_loss_backward.default)
def nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    _check_nll(self, target, weight)
    if self.ndim == 1:
        g = jnp.reshape(grad_output, (1,)) if reduction == NONE else grad_output
        return _nll_grad(g, self[None], jnp.reshape(target, (1,)), weight, reduction, ignore_index, total_weight)[0]
    return _nll_grad(grad_output, self, target, weight, reduction, ignore_index, total_weight)


def _check_nll2d(self, target, weight):
    if target.ndim != 3:
        raise RuntimeError("only batches of spatial targets supported (3D tensors) but got targets of dimension: "
                           f"{target.ndim}")
    if self.ndim != 4:
        raise RuntimeError(f"only batches of spatial inputs supported (4D tensors), but got input of dimension: "
                           f"{self.ndim}")
    if (self.shape[0], *self.shape[2:]) != tuple(target.shape):
        raise RuntimeError(f"size mismatch (got input: {list(self.shape)} , target: {list(target.shape)}")
    _check_weight(self, weight, self.shape[1])


@op(aten.nll_loss2d_forward.default)
def nll_loss2d_forward(self, target, weight, reduction, ignore_index):
    _check_nll2d(self, target, weight)
    return _nll(self, target, weight, reduction, ignore_index)


@op(aten.nll_loss2d_backward.default)
def nll_loss2d_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    _check_nll2d(self, target, weight)
    return _nll_grad(grad_output, self, target, weight, reduction, ignore_index, total_weight)


# ---------------------------------------------------------------- multi-class margins


def _rows(self, target):
    """Input as (N, C) and target as (N,) or (N, C)."""
    if self.ndim > 2 or not self.size and self.ndim == 2 and self.shape[1] == 0:
        raise RuntimeError(f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {list(self.shape)}")
    x = jnp.reshape(self, (1, -1)) if self.ndim < 2 else self
    return x, target


def _margins(x, target, p, margin, weight):
    """Per element margin terms before the power, each row's weight, and the one-hot."""
    picked = _one_hot(target, x.shape[1], 1)
    own = jnp.sum(jnp.where(picked, x, 0), axis=1, keepdims=True)
    z = jnp.where(picked, jnp.zeros((), x.dtype), jnp.maximum(margin - own + x, 0))
    w = None if weight is None else _per_row(picked, weight[None, :])[:, None]
    return picked, z, w


def _check_multi_margin(x, target, p, weight):
    if p not in (1, 2):
        raise RuntimeError("only p == 1 and p == 2 supported")
    if target.dtype != np.int64 and not narrowing.active:
        raise RuntimeError(f"expected scalar type Long but found {target.dtype}")
    if target.size != x.shape[0]:
        raise RuntimeError(f"inconsistent target size, expected {x.shape[0]} but got {list(target.shape)}")
    if weight is not None and weight.size != x.shape[1]:
        raise RuntimeError(f"inconsistent weight size, expected {x.shape[1]} but got {list(weight.shape)}")


@op(aten.multi_margin_loss.default, static=("p",))
def multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=MEAN):
    compute = opmath(self.dtype)
    x, _ = _rows(cast(self, compute), target)
    _check_multi_margin(x, target, p, weight)
    _, z, w = _margins(x, jnp.reshape(target, (-1,)), p, cast(margin, compute), weight if weight is None else
                       cast(weight, compute))
    z = z if p == 1 else z * z
    loss = jnp.sum(z if w is None else z * w, axis=1) / x.shape[1]
    if reduction == NONE:
        loss = jnp.reshape(loss, target.shape)
    return cast(reduced(loss, reduction), self.dtype)


@op(aten.multi_margin_loss_backward.default, static=("p",))
def multi_margin_loss_backward(grad_output, self, target, p, margin, weight=None, reduction=MEAN):
    compute = opmath(self.dtype)
    x, _ = _rows(cast(self, compute), target)
    _check_multi_margin(x, target, p, weight)
    picked, z, w = _margins(x, jnp.reshape(target, (-1,)), p, cast(margin, compute), weight if weight is None else
                            cast(weight, compute))
    slope = (z > 0).astype(compute) if p == 1 else 2 * z
    slope = (slope if w is None else slope * w) / x.shape[1]
    slope = jnp.where(picked, -jnp.sum(slope, axis=1, keepdims=True), slope)
    g = cast(grad_output, compute)
    g = g / x.shape[0] if reduction == MEAN else g
    g = jnp.reshape(g, (-1, 1)) if reduction == NONE else g
    return cast(jnp.reshape(slope * g, self.shape), self.dtype)


def _is_target(target, classes):
    """Which classes are among a row's targets: those before its first -1."""
    valid = jnp.cumprod((target >= 0).astype(np.int32), axis=1) > 0
    hits = _one_hot(target, classes, 1) & valid[:, None, :]
    return jnp.any(hits, axis=2), hits


def _multilabel(self, target):
    if self.ndim > 2 or target.shape != self.shape:
        raise RuntimeError(f"inconsistent target size: {list(target.shape)} for input of size: {list(self.shape)}")
    if self.ndim == 1 and not self.size or self.ndim == 2 and not self.shape[1]:
        raise RuntimeError(f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {list(self.shape)}")
    compute = opmath(self.dtype)
    x = jnp.reshape(cast(self, compute), (1, -1) if self.ndim < 2 else self.shape)
    is_target, hits = _is_target(jnp.reshape(target, x.shape), x.shape[1])
    own = jnp.sum(jnp.where(hits, x[:, :, None], 0), axis=1)  # (N, T): score of the t-th target
    valid = jnp.any(hits, axis=1)
    pairs = valid[:, None, :] & ~is_target[:, :, None]  # (N, C, T): class c is compared with target t
    z = jnp.where(pairs, jnp.maximum(1 - own[:, None, :] + x[:, :, None], 0), jnp.zeros((), compute))
    return x, is_target, hits, z


@op(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(self, target, reduction):
    x, is_target, _, z = _multilabel(self, target)
    loss = jnp.sum(z, axis=(1, 2)) / x.shape[1]
    if reduction == NONE:
        loss = jnp.reshape(loss, self.shape[:-1] if self.ndim == 2 else ())
    return cast(reduced(loss, reduction), self.dtype), cast(jnp.reshape(is_target, target.shape), self.dtype)


@op(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target):
    x, _, hits, z = _multilabel(self, target)
    on = (z > 0).astype(x.dtype)
    slope = jnp.sum(on, axis=2) - jnp.sum(jnp.where(hits, jnp.sum(on, axis=1)[:, None, :], 0), axis=2)
    g = cast(grad_output, x.dtype)
    g = g / x.shape[0] if reduction == MEAN else g
    g = jnp.reshape(g, (-1, 1)) if reduction == NONE else g
    return cast(jnp.reshape(slope / x.shape[1] * g, self.shape), self.dtype)
