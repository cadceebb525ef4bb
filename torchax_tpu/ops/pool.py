"""Pooling: max (with indices), average, adaptive, fractional, and their backward.

Max pooling with indices runs axis by axis over strided slices: no gather, and as many passes as the kernel is
long, not as it has taps. Averages are window sums (or plain reshapes where windows tile the input).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import opmath
from ..registry import aten, op


def _spread(values, n):
    if isinstance(values, int):
        return [values] * n
    values = list(values)
    return values * n if len(values) == 1 else values


def _output(size, k, s, p, d, ceil_mode):
    """Number of windows along an axis: torch drops a last one that starts in the right padding."""
    span = size + 2 * p - d * (k - 1) - 1
    out = (-(-span // s) if ceil_mode else span // s) + 1
    if ceil_mode and (out - 1) * s >= size + p:
        out -= 1
    return out


def _settings(n, kernel_size, stride, padding, dilation=1):
    kernel = _spread(kernel_size, n)
    stride = _spread(stride, n) if stride is not None and len(_spread(stride, n)) else kernel
    padding, dilation = _spread(padding, n), _spread(dilation, n)
    if any(s <= 0 for s in stride):
        raise RuntimeError("stride should not be zero")
    if any(k <= 0 for k in kernel):
        raise RuntimeError("kernel size should be greater than zero")
    if any(d <= 0 for d in dilation):
        raise RuntimeError("dilation should be greater than zero")
    for k, p in zip(kernel, padding):
        if p < 0 or p > k // 2:
            raise RuntimeError(f"pad should be non-negative and at most half of kernel size, but got pad={p} and "
                               f"kernel_size={k}")
    return kernel, stride, padding, dilation


def _outputs(sizes, kernel, stride, padding, dilation, ceil_mode):
    out = [_output(*v, ceil_mode) for v in zip(sizes, kernel, stride, padding, dilation)]
    if any(o < 1 for o in out):
        raise RuntimeError(f"Given input size {list(sizes)}. Calculated output size: {out}. Output size is too small")
    return out


def _lowest(dtype):
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.array(np.iinfo(dtype).min, dtype)
    return np.array(-np.inf).astype(dtype)


# ---------------------------------------------------------------- max


class _Axis:
    """Where the windows of one axis lie: at ``starts``, of taps ``dilation`` apart, inside ``size``."""

    def __init__(self, size, k, s, p, d, out):
        self.size, self.k, self.s, self.p, self.d, self.out = size, k, s, p, d, out

    def taps(self, x, axis, fill):
        """For each tap: its values over all windows, positions, and whether it is a window's first valid one."""
        start = np.arange(self.out) * self.s - self.p
        last = int(start[-1]) + (self.k - 1) * self.d
        x = lax.pad(x, jnp.asarray(fill, x.dtype), [(self.p, max(last - self.size + 1, 0), 0) if i == axis else (0, 0, 0)
                                                    for i in range(x.ndim)])
        seen = np.zeros(self.out, bool)
        for t in range(self.k):
            at = start + t * self.d
            valid = (at >= 0) & (at < self.size)
            first = valid & ~seen
            seen |= valid
            low = t * self.d
            yield lax.slice_in_dim(x, low, low + (self.out - 1) * self.s + 1, self.s, axis), at, first


class _Ranges:
    """Windows of an adaptive axis: from floor(i size / out) to ceil((i + 1) size / out)."""

    def __init__(self, size, out):
        i = np.arange(out)
        self.size, self.out = size, out
        self.start, self.end = i * size // out, -(-(i + 1) * size // out)

    def taps(self, x, axis, fill):
        for t in range(int((self.end - self.start).max())):
            at = self.start + t
            valid = at < self.end
            v = jnp.take(x, np.minimum(at, self.size - 1), axis=axis, mode="clip")
            if not valid.all():
                v = jnp.where(_along(valid, axis, x.ndim), v, jnp.asarray(fill, x.dtype))
            yield v, at, np.full(self.out, t == 0)


class _Starts:
    """Windows of k taps that start at traced positions (fractional pooling); ``start`` broadcasts against x."""

    def __init__(self, start, k, size):
        self.start, self.k, self.size = start, k, size

    def taps(self, x, axis, fill):
        for t in range(self.k):
            at = self.start + t
            shape = [a if i == axis else b for i, (a, b) in enumerate(zip(at.shape, x.shape))]
            yield jnp.take_along_axis(x, jnp.broadcast_to(at, shape), axis, mode="clip"), at, t == 0


def _along(vector, axis, ndim):
    """A 1-d constant laid along ``axis``."""
    shape = [1] * ndim
    shape[axis] = -1
    return np.asarray(vector).reshape(shape)


def _max_by_axis(x, axes):
    """(largest value, its flat index among the pooled axes) of every window; nan wins, and the first of equals."""
    n = len(axes)
    index = None
    for i in reversed(range(n)):
        axis = x.ndim - n + i
        stride = int(np.prod([later.size for later in axes[i + 1:]], dtype=np.int64))
        values = axes[i].taps(x, axis, _lowest(x.dtype))
        carried = axes[i].taps(index, axis, 0) if index is not None else None
        best = where = None
        for v, at, first in values:
            at = jnp.asarray(_along(at, axis, x.ndim) if isinstance(at, np.ndarray) else at, jnp.int32) * stride
            j = at if carried is None else next(carried)[0] + at
            j = jnp.broadcast_to(j, v.shape)
            if best is None:
                best, where = v, j
                continue
            take = v > best
            if v.dtype.kind not in "iu":
                take = take | jnp.isnan(v)
            if not isinstance(first, bool) and first.any():
                take = take | _along(first, axis, x.ndim)
            best, where = jnp.where(take, v, best), jnp.where(take, j, where)
        x, index = best, where
    return x, index.astype(jnp.int64)


def _max_pool(self, n, kernel_size, stride, padding, dilation, ceil_mode):
    if self.ndim not in (n + 1, n + 2) or 0 in self.shape[-n - 1:]:
        raise RuntimeError(f"max_pool{n}d: expected a {n + 1}D or {n + 2}D input with non-zero sizes, got "
                           f"{list(self.shape)}")
    settings = _settings(n, kernel_size, stride, padding, dilation)
    sizes = self.shape[-n:]
    out = _outputs(sizes, *settings, ceil_mode)
    return _max_by_axis(self, [_Axis(*v) for v in zip(sizes, *settings, out)])


@op(aten.max_pool2d_with_indices.default, wide=True)
def max_pool2d_with_indices(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    return _max_pool(self, 2, kernel_size, stride, padding, dilation, ceil_mode)


@op(aten.max_pool3d_with_indices.default, wide=True)
def max_pool3d_with_indices(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    return _max_pool(self, 3, kernel_size, stride, padding, dilation, ceil_mode)


def _scatter_into(grad_output, indices, shape, n):
    """Each output's gradient added at its index among the last n axes of ``shape``."""
    lead = shape[:-n]
    rows = int(np.prod(lead, dtype=np.int64))
    size = int(np.prod(shape[-n:], dtype=np.int64))
    if not rows:
        return jnp.zeros(shape, grad_output.dtype)
    g, j = grad_output.reshape(rows, -1), indices.reshape(rows, -1).astype(jnp.int32)
    zero = jnp.zeros((size,), opmath(g.dtype))
    out = jax.vmap(lambda g, j: zero.at[j].add(g.astype(zero.dtype)))(g, j)
    return out.reshape(shape).astype(grad_output.dtype)


def _by_taps(grad_output, indices, shape, kernel, stride, padding, dilation):
    """The same without a scatter: for each tap of the kernel, the outputs that chose it, spread to the input's grid."""
    n = len(kernel)
    sizes, outs = shape[-n:], grad_output.shape[-n:]
    indices = indices.astype(jnp.int32)
    wide = opmath(grad_output.dtype)
    total = None
    full = [max(s + 2 * p, (o - 1) * t + d * (k - 1) + 1)
            for s, p, o, t, d, k in zip(sizes, padding, outs, stride, dilation, kernel)]
    for tap in np.ndindex(*kernel):
        flat = 0
        for i in range(n):
            at = np.arange(outs[i]) * stride[i] - padding[i] + tap[i] * dilation[i]
            at = np.where((at >= 0) & (at < sizes[i]), at, -(2**24))  # outside: no index equals it
            flat = flat * sizes[i] + _along(at, i, n)
        flat = np.where(flat < 0, -1, flat).astype(np.int32)
        chosen = jnp.where(indices == flat, grad_output.astype(wide), 0)
        edges = [(0, 0, 0)] * (grad_output.ndim - n)
        for i in range(n):
            low = tap[i] * dilation[i]
            edges.append((low, full[i] - low - (outs[i] - 1) * stride[i] - 1, stride[i] - 1))
        part = lax.pad(chosen, jnp.zeros((), wide), edges)
        total = part if total is None else total + part
    for i in range(n):
        total = lax.slice_in_dim(total, padding[i], padding[i] + sizes[i], axis=total.ndim - n + i)
    return total.astype(grad_output.dtype)


def _select_and_scatter(grad_output, self, kernel, stride, padding, ceil_mode, outs):
    """The TPU's own kernel for the gradient of a window maximum."""
    n = len(kernel)
    lead = (1,) * (self.ndim - n)
    pads = [(0, 0)] * len(lead) + [(p, max((o - 1) * s + k - size - p, 0))
                                   for p, o, s, k, size in zip(padding, outs, stride, kernel, self.shape[-n:])]

    def forward(x):
        return lax.reduce_window(x, _lowest(x.dtype), lax.max, (*lead, *kernel), (*lead, *stride), pads)

    return jax.vjp(forward, self)[1](grad_output)[0]


def _max_pool_backward(grad_output, self, n, kernel_size, stride, padding, dilation, ceil_mode, indices):
    settings = kernel, stride, padding, dilation = _settings(n, kernel_size, stride, padding, dilation)
    outs = grad_output.shape[-n:]
    if grad_output.size == 0:
        return jnp.zeros_like(self)

    def general(grad_output, self, indices):
        if np.prod(kernel) <= 64:
            return _by_taps(grad_output, indices, self.shape, *settings)
        return _scatter_into(grad_output, indices, self.shape, n)

    def on_tpu(grad_output, self, indices):
        return _select_and_scatter(grad_output, self, kernel, stride, padding, ceil_mode, outs)

    if all(d == 1 for d in dilation) and self.dtype.kind == "f" and self.dtype.itemsize <= 4:
        return lax.platform_dependent(grad_output, self, indices, tpu=on_tpu, default=general)
    return general(grad_output, self, indices)


@op(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    return _max_pool_backward(grad_output, self, 2, kernel_size, stride, padding, dilation, ceil_mode, indices)


@op(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    return _max_pool_backward(grad_output, self, 3, kernel_size, stride, padding, dilation, ceil_mode, indices)


def _adaptive_max(self, n, output_size):
    output_size = _spread(output_size, n)
    if min(output_size) < 0:
        raise RuntimeError(f"adaptive_max_pool{n}d: output size {list(output_size)} has a negative dimension")
    if self.ndim not in (n + 1, n + 2) or 0 in self.shape[-n - 1:]:
        raise RuntimeError(f"adaptive_max_pool{n}d: expected a {n + 1}D or {n + 2}D input with non-zero sizes, got "
                           f"{list(self.shape)}")
    sizes = self.shape[-n:]
    if 0 in output_size or self.size == 0:
        shape = (*self.shape[:-n], *output_size)
        return jnp.zeros(shape, self.dtype), jnp.zeros(shape, jnp.int64)
    axes = [_Axis(s, s // o, s // o, 0, 1, o) if s % o == 0 else _Ranges(s, o) for s, o in zip(sizes, output_size)]
    return _max_by_axis(self, axes)


@op(aten.adaptive_max_pool2d.default, wide=True)
def adaptive_max_pool2d(self, output_size):
    return _adaptive_max(self, 2, output_size)


@op(aten.adaptive_max_pool3d.default, wide=True)
def adaptive_max_pool3d(self, output_size):
    return _adaptive_max(self, 3, output_size)


def _adaptive_max_backward(grad_output, self, indices, n):
    sizes, outs = self.shape[-n:], grad_output.shape[-n:]
    if grad_output.size == 0:
        return jnp.zeros_like(self)
    if all(s % o == 0 for s, o in zip(sizes, outs)):
        kernel = [s // o for s, o in zip(sizes, outs)]
        if np.prod(kernel) <= 64:
            return _by_taps(grad_output, indices, self.shape, kernel, kernel, [0] * n, [1] * n)
    return _scatter_into(grad_output, indices, self.shape, n)


@op(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(grad_output, self, indices):
    return _adaptive_max_backward(grad_output, self, indices, 2)


@op(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(grad_output, self, indices):
    return _adaptive_max_backward(grad_output, self, indices, 3)


def _fractional(self, n, kernel_size, output_size, random_samples, order):
    kernel, output_size = _spread(kernel_size, n), _spread(output_size, n)
    x = self if self.ndim == n + 2 else self[None]
    axes = []
    for i in range(n):
        size, k, out = x.shape[2 + i], kernel[i], output_size[i]
        if out + k - 1 > size:
            raise RuntimeError(f"fractional_max_pool{n}d: pool size {k} too large relative to input size {size}")
        dtype = opmath(random_samples.dtype)
        sample = random_samples[:, :, order[i]].astype(dtype)[..., None]
        if out > 1:
            alpha = np.asarray((size - k) / (out - 1), dtype)
            at = jnp.trunc((jnp.arange(out - 1, dtype=dtype) + sample) * alpha) - jnp.trunc(sample * alpha)
            at = at.astype(jnp.int32)
        else:
            at = jnp.zeros((*sample.shape[:2], 0), jnp.int32)
        at = jnp.concatenate([at, jnp.full((*at.shape[:2], 1), size - k, jnp.int32)], -1)
        shape = [1] * (n + 2)
        shape[:2], shape[2 + i] = at.shape[:2], out
        axes.append(_Starts(at.reshape(shape), k, size))
    values, index = _max_by_axis(x, axes)
    return (values, index) if self.ndim == n + 2 else (values[0], index[0])


@op(aten.fractional_max_pool2d.default, wide=True)
def fractional_max_pool2d(self, kernel_size, output_size, random_samples):
    return _fractional(self, 2, kernel_size, output_size, random_samples, (1, 0))


@op(aten.fractional_max_pool3d.default, wide=True)
def fractional_max_pool3d(self, kernel_size, output_size, random_samples):
    return _fractional(self, 3, kernel_size, output_size, random_samples, (0, 1, 2))


@op(aten.fractional_max_pool2d_backward.default)
def fractional_max_pool2d_backward(grad_output, self, kernel_size, output_size, indices):
    return _scatter_into(grad_output, indices, self.shape, 2)


@op(aten.fractional_max_pool3d_backward.default)
def fractional_max_pool3d_backward(grad_output, self, kernel_size, output_size, indices):
    return _scatter_into(grad_output, indices, self.shape, 3)


# ---------------------------------------------------------------- average


def _window_sum(x, kernel, stride, pads):
    """Sums of the windows of the last axes; plain reshapes where they tile the input."""
    n = len(kernel)
    lead = x.ndim - n
    if kernel == stride and all(p == (0, 0) for p in pads) and all(s % k == 0 for s, k in zip(x.shape[lead:], kernel)):
        shape = list(x.shape[:lead])
        for s, k in zip(x.shape[lead:], kernel):
            shape += [s // k, k]
        return jnp.sum(x.reshape(shape), tuple(range(lead + 1, lead + 2 * n, 2)))
    ones = (1,) * lead
    pads = [(0, 0)] * lead + list(pads)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (*ones, *kernel), (*ones, *stride), pads)


def _average_plan(shape, n, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    """(kernel, stride, pads, divisors of the windows)."""
    if divisor_override == 0:
        raise RuntimeError("divisor must be not zero")
    kernel, stride, padding, dilation = _settings(n, kernel_size, stride, padding)
    sizes = shape[-n:]
    outs = _outputs(sizes, kernel, stride, padding, dilation, ceil_mode)
    divisor, pads = np.ones((1,) * n, np.int64), []
    for i, (size, k, s, p, o) in enumerate(zip(sizes, kernel, stride, padding, outs)):
        start = np.arange(o) * s - p
        end = np.minimum(start + k, size + p)
        count = end - start if count_include_pad else np.minimum(end, size) - np.maximum(start, 0)
        divisor = divisor * _along(count, i, n)
        # Windows may end before the input does; a negative padding cuts the rest off.
        pads.append((p, (o - 1) * s + k - size - p))
    if divisor_override is not None:
        divisor = np.full((1,) * n, divisor_override)
    if (divisor == divisor.flat[0]).all():
        divisor = divisor.flat[0]
    return kernel, stride, pads, divisor


def _average(self, n, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    if self.ndim not in (n + 1, n + 2) or 0 in self.shape[-n - 1:]:
        raise RuntimeError(f"avg_pool{n}d: expected a {n + 1}D or {n + 2}D input with non-zero sizes, got "
                           f"{list(self.shape)}")
    kernel, stride, pads, divisor = _average_plan(self.shape, n, kernel_size, stride, padding, ceil_mode,
                                                  count_include_pad, divisor_override)
    total = _sum_cut(self.astype(opmath(self.dtype)), kernel, stride, pads)
    if self.dtype.kind in "iu":
        return lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, total.dtype), total.shape))
    return (total / jnp.asarray(divisor, total.dtype)).astype(self.dtype)


def _sum_cut(x, kernel, stride, pads):
    for i, (_, high) in enumerate(pads):
        if high < 0:  # no window reaches the end
            axis = x.ndim - len(pads) + i
            x = lax.slice_in_dim(x, 0, x.shape[axis] + high, axis=axis)
    return _window_sum(x, kernel, stride, [(low, max(high, 0)) for low, high in pads])


def _average_backward(grad_output, self, n, kernel_size, stride, padding, ceil_mode, count_include_pad,
                      divisor_override):
    kernel, stride, pads, divisor = _average_plan(self.shape, n, kernel_size, stride, padding, ceil_mode,
                                                  count_include_pad, divisor_override)
    wide = opmath(grad_output.dtype)
    g = grad_output.astype(wide) / jnp.asarray(divisor, wide)
    like = jax.ShapeDtypeStruct(self.shape, wide)
    return jax.linear_transpose(lambda x: _sum_cut(x, kernel, stride, pads), like)(g)[0].astype(grad_output.dtype)


@op(aten.avg_pool2d.default)
def avg_pool2d(self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    return _average(self, 2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@op(aten.avg_pool3d.default)
def avg_pool3d(self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    return _average(self, 3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@op(aten.avg_pool2d_backward.default, shape_only=("self",))
def avg_pool2d_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad,
                        divisor_override):
    return _average_backward(grad_output, self, 2, kernel_size, stride, padding, ceil_mode, count_include_pad,
                             divisor_override)


@op(aten.avg_pool3d_backward.default, shape_only=("self",))
def avg_pool3d_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad,
                        divisor_override):
    return _average_backward(grad_output, self, 3, kernel_size, stride, padding, ceil_mode, count_include_pad,
                             divisor_override)


def _averaging(size, out, dtype):
    """The (out, size) matrix which averages the adaptive windows of one axis."""
    r = _Ranges(size, out)
    at = np.arange(size)[None]
    inside = (at >= r.start[:, None]) & (at < r.end[:, None])
    return (inside / (r.end - r.start)[:, None]).astype(dtype)


def _adaptive_average(x, output_size):
    """Averages over adaptive windows of the last axes (linear in x): reshapes, or a small matrix per axis."""
    n = len(output_size)
    for i, out in enumerate(output_size):
        axis = x.ndim - n + i
        size = x.shape[axis]
        if out and size % out == 0:
            if size != out:
                x = jnp.mean(x.reshape(*x.shape[:axis], out, size // out, *x.shape[axis + 1:]), axis + 1)
        else:
            x = jnp.moveaxis(jnp.tensordot(x, _averaging(size, out, x.dtype).T, ((axis,), (0,)),
                                           precision=lax.Precision.HIGHEST), -1, axis)
    return x


def _adaptive_average_op(self, output_size, n):
    output_size = _spread(output_size, n)
    if self.ndim not in (n + 1, n + 2) or 0 in self.shape[-n:]:
        raise RuntimeError(f"adaptive_avg_pool{n}d(): Expected {n + 1}D or {n + 2}D input with non-zero sizes for "
                           f"non-batch dimensions, but got {list(self.shape)}")
    return _adaptive_average(self.astype(opmath(self.dtype)), output_size).astype(self.dtype)


def _adaptive_average_backward(grad_output, self, n):
    wide = opmath(grad_output.dtype)
    like = jax.ShapeDtypeStruct(self.shape, wide)
    pull = jax.linear_transpose(lambda x: _adaptive_average(x, grad_output.shape[-n:]), like)
    return pull(grad_output.astype(wide))[0].astype(grad_output.dtype)


@op(aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool2d(self, output_size):
    return _adaptive_average_op(self, output_size, 2)


@op(aten._adaptive_avg_pool3d.default)
def _adaptive_avg_pool3d(self, output_size):
    return _adaptive_average_op(self, output_size, 3)


@op(aten._adaptive_avg_pool2d_backward.default, shape_only=("self",))
def _adaptive_avg_pool2d_backward(grad_output, self):
    return _adaptive_average_backward(grad_output, self, 2)


@op(aten._adaptive_avg_pool3d_backward.default, shape_only=("self",))
def _adaptive_avg_pool3d_backward(grad_output, self):
    return _adaptive_average_backward(grad_output, self, 3)


# ---------------------------------------------------------------- unpooling


def _unpool(self, indices, output_size, n):
    lead = self.shape[:-n]
    size = int(np.prod(output_size, dtype=np.int64))
    rows = int(np.prod(lead, dtype=np.int64))
    zero = jnp.zeros((size,), self.dtype)
    out = jax.vmap(lambda v, j: zero.at[j].set(v, mode="drop"))(self.reshape(rows, -1), indices.reshape(rows, -1))
    return out.reshape(*lead, *output_size)


@op(aten.max_unpool2d.default)
def max_unpool2d(self, indices, output_size):
    return _unpool(self, indices, tuple(output_size), 2)


@op(aten.max_unpool3d.default)
def max_unpool3d(self, indices, output_size, stride, padding):
    return _unpool(self, indices, tuple(output_size), 3)
