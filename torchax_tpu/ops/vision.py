"""Resampling of images and volumes: interpolate in all modes, grid_sample.

Interpolation is separable: one small constant matrix per axis, which the TPU's matrix unit applies; its backward is
the transposed matrix. Nearest neighbours are repeats where the factor is whole.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import opmath
from ..registry import aten, op

# ---------------------------------------------------------------- weights of one axis


def _nearest(size, out, scale, exact):
    """Source index of every output position; torch computes it in float32."""
    step = np.float32(1 / scale) if scale is not None and scale > 0 else np.float32(size) / np.float32(out)
    i = np.arange(out, dtype=np.float32)
    at = np.floor((i + np.float32(0.5)) * step) if exact else np.floor(i * step)
    return np.minimum(at.astype(np.int64), size - 1)


def _step(size, out, align_corners, scale, real):
    if align_corners:
        return real(size - 1) / real(out - 1) if out > 1 else real(0)
    return real(1 / scale) if scale is not None and scale > 0 else real(size) / real(out)


def _source(size, out, align_corners, scale, real):
    step = _step(size, out, align_corners, scale, real)
    i = np.arange(out, dtype=real)
    return step * i if align_corners else step * (i + real(0.5)) - real(0.5)


def _matrix(size, out, taps, real):
    """Sum (position, weight) pairs into an (out, size) matrix."""
    w = np.zeros((out, size), real)
    for at, weight in taps:
        np.add.at(w, (np.arange(out), np.clip(at, 0, size - 1)), weight)
    return w


def _linear(size, out, align_corners, scale, real):
    at = np.maximum(_source(size, out, align_corners, scale, real), 0)
    low = np.minimum(np.floor(at).astype(np.int64), size - 1)
    t = np.clip(at - low.astype(real), 0, 1).astype(real)
    return _matrix(size, out, [(low, 1 - t), (low + 1, t)], real)


def _cubic_weights(t, a=-0.75):
    """Keys' cubic convolution weights of the four neighbours, for numpy and traced values alike."""
    def near(x):
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x):
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def _cubic(size, out, align_corners, scale, real):
    at = _source(size, out, align_corners, scale, real)
    low = np.floor(at)
    weights = _cubic_weights((at - low).astype(real))
    return _matrix(size, out, [(low.astype(np.int64) + k - 1, w) for k, w in enumerate(weights)], real)


def _hat(x):
    return np.maximum(1 - np.abs(x), 0)


def _keys(x):
    x = np.abs(x)
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x):
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _antialias(kernel, taps):
    def weights(size, out, align_corners, scale, real):
        step = _step(size, out, align_corners, scale, real)
        support = real(taps / 2) * max(step, real(1))
        inverse = real(1) / step if step >= 1 else real(1)
        w = np.zeros((out, size), real)
        for i in range(out):
            center = step * (real(i) + real(0.5))
            low = max(int(center - support + real(0.5)), 0)
            high = min(int(center + support + real(0.5)), size)
            row = kernel(((np.arange(low, high) - center + real(0.5)) * inverse).astype(real))
            total = row.sum()
            w[i, low:high] = row / total if total != 0 else row
        return w

    return weights


# ---------------------------------------------------------------- applying them


def _along(x, matrix, axis):
    """Multiply ``matrix`` (out, in) onto one axis of x, at full precision."""
    y = lax.dot_general(x, jnp.asarray(matrix, x.dtype), (((axis,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(y, -1, axis)


def _resize(x, matrices):
    for k, matrix in enumerate(matrices):
        if matrix.shape[0] != matrix.shape[1] or not (matrix == np.eye(len(matrix))).all():
            x = _along(x, matrix, 2 + k)
    return x


def _real(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def _finish(y, dtype):
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        y = jnp.clip(jnp.round(y), info.min, info.max)
    return y.astype(dtype)


def _check(shape, output_size, n):
    if len(shape) != n + 2 or any(s < 1 for s in shape[1:]) or any(o < 1 for o in output_size):
        raise RuntimeError(f"It is expected input_size equals to {n + 2} and non-empty, and output sizes greater than 0, "
                           f"but got input {list(shape)} and output {list(output_size)}")


def _bytes_along(x, matrix, axis):
    """As `_along` for bytes: torch's fixed-point weights of 16 bits, rounded to bytes after each axis."""
    top = np.abs(matrix).max()
    bits = 0
    while bits < 22 and int(0.5 + top * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    fixed = np.trunc(matrix * (1 << bits) + np.where(matrix < 0, -0.5, 0.5)).astype(np.int32)
    y = lax.dot_general(x.astype(jnp.int32), jnp.asarray(fixed), (((axis,), (1,)), ((), ())))
    y = (y + ((1 << bits) >> 1)) >> bits
    return jnp.moveaxis(jnp.clip(y, 0, 255).astype(jnp.uint8), -1, axis)


def _forward(self, output_size, weights, align_corners, scales):
    n = len(output_size)
    _check(self.shape, output_size, n)
    fixed = self.dtype == np.uint8 and n == 2
    real = np.float64 if fixed else _real(self.dtype)
    mats = [weights(s, o, align_corners, f, real) for s, o, f in zip(self.shape[2:], output_size, scales)]
    if fixed:
        for k in (1, 0):  # the last axis first
            if mats[k].shape[0] != mats[k].shape[1] or not (mats[k] == np.eye(len(mats[k]))).all():
                self = _bytes_along(self, mats[k], 2 + k)
        return self
    wide = opmath(self.dtype) if self.dtype.kind == "f" else np.dtype(np.float32)
    return _finish(_resize(self.astype(wide), mats), np.dtype(self.dtype))


def _backward(grad_output, output_size, input_size, weights, align_corners, scales):
    _check(input_size, output_size, len(output_size))
    real = _real(grad_output.dtype)
    mats = [weights(s, o, align_corners, f, real).T for s, o, f in zip(input_size[2:], output_size, scales)]
    return _resize(grad_output.astype(opmath(grad_output.dtype)), mats).astype(grad_output.dtype)


_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}


def _declare_linear(name, n, weights):
    """The forward and backward overloads of one interpolation with corners."""
    @op(getattr(aten, name).default, static=_SCALES[n])
    def forward(self, output_size, align_corners, *scales, **named):
        return _forward(self, output_size, weights, align_corners, _all_scales(n, scales, named))

    @op(getattr(aten, name + "_backward").default, static=_SCALES[n])
    def backward(grad_output, output_size, input_size, align_corners, *scales, **named):
        return _backward(grad_output, output_size, input_size, weights, align_corners, _all_scales(n, scales, named))


def _all_scales(n, scales, named):
    given = dict(zip(_SCALES[n], scales)) | named
    return [given.get(k) for k in _SCALES[n]]


for _name, _n, _weights in (("upsample_linear1d", 1, _linear), ("upsample_bilinear2d", 2, _linear),
                            ("upsample_trilinear3d", 3, _linear), ("upsample_bicubic2d", 2, _cubic),
                            ("_upsample_bilinear2d_aa", 2, _antialias(_hat, 2)),
                            ("_upsample_bicubic2d_aa", 2, _antialias(_keys, 4)),
                            ("_upsample_lanczos2d_aa", 2, _antialias(_lanczos, 6))):
    _declare_linear(_name, _n, _weights)


def _pick(x, axis, at):
    """x at the constant positions ``at`` of an axis; a repeat where they are one."""
    size, out = x.shape[axis], len(at)
    if out % size == 0 and (at == np.arange(out) // (out // size)).all():
        if out == size:
            return x
        shape = (*x.shape[: axis + 1], out // size, *x.shape[axis + 1:])
        return jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape).reshape(*x.shape[:axis], out, *x.shape[axis + 1:])
    return jnp.take(x, at, axis=axis, mode="clip")


def _unpick(g, axis, at, size):
    """The transpose of `_pick`: a sum over repeats, or a product with a one-hot matrix."""
    out = len(at)
    if out % size == 0 and (at == np.arange(out) // (out // size)).all():
        if out == size:
            return g
        return jnp.sum(g.reshape(*g.shape[:axis], size, out // size, *g.shape[axis + 1:]), axis + 1)
    return _along(g, (np.arange(size)[:, None] == at[None]).astype(np.float32), axis)


def _declare_nearest(name, n, exact):
    @op(getattr(aten, name).default, static=_SCALES[n])
    def forward(self, output_size, *scales, **named):
        _check(self.shape, output_size, n)
        for k, (o, f) in enumerate(zip(output_size, _all_scales(n, scales, named))):
            self = _pick(self, 2 + k, _nearest(self.shape[2 + k], o, f, exact))
        return self

    @op(getattr(aten, name + "_backward").default, static=_SCALES[n])
    def backward(grad_output, output_size, input_size, *scales, **named):
        _check(input_size, output_size, n)
        g = grad_output.astype(opmath(grad_output.dtype))
        for k, (o, f) in enumerate(zip(output_size, _all_scales(n, scales, named))):
            g = _unpick(g, 2 + k, _nearest(input_size[2 + k], o, f, exact), input_size[2 + k])
        return g.astype(grad_output.dtype)


for _n in (1, 2, 3):
    _declare_nearest(f"upsample_nearest{_n}d", _n, False)
    _declare_nearest(f"_upsample_nearest_exact{_n}d", _n, True)


# ---------------------------------------------------------------- grid_sample

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def _clip(x, size):
    """Clip whose derivative is zero at and outside the borders, as torch's is."""
    return jnp.where(x <= 0, 0, jnp.where(x >= size - 1, size - 1, x)).astype(x.dtype)


def _reflect(x, size, align_corners):
    low, high = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
    if low == high:
        return jnp.zeros_like(x)
    start, span = low / 2, (high - low) / 2
    x = jnp.where(x < start, start - x, x - start)
    flips = lax.stop_gradient(jnp.floor(x / span))
    extra = x - flips * span
    return jnp.where(flips % 2 == 0, extra + start, span - extra + start)


def _place(x, size, padding, align_corners):
    if padding == _REFLECTION:
        x = _reflect(x, size, align_corners)
    return x if padding == _ZEROS else _clip(x, size)


def _look(flat, sizes, index):
    """Values at integer positions (float arrays of (N, ...)), zero outside; ``flat`` is (N, C, prod(sizes))."""
    inside, at = True, 0
    for i, size in zip(index, sizes):
        inside = inside & (i >= 0) & (i <= size - 1)
        at = at * size + jnp.clip(jnp.nan_to_num(i), 0, size - 1).astype(jnp.int32)
    n, c = flat.shape[:2]
    shape = at.shape[1:]
    picked = jnp.take_along_axis(flat, at.reshape(n, 1, -1), 2, mode="clip").reshape(n, c, *shape)
    return jnp.where(inside[:, None], picked, 0)


def _sample(input, grid, interpolation, padding, align_corners):
    sizes = input.shape[2:]
    n = len(sizes)
    flat = input.reshape(*input.shape[:2], -1)
    where = []
    for axis, size in enumerate(sizes):
        x = grid[..., n - 1 - axis]  # the grid's last axis is (x, y, z), the input's (z, y, x)
        where.append((x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2)
    if interpolation == _BICUBIC:
        low = [lax.stop_gradient(jnp.floor(x)) for x in where]
        weights = [_cubic_weights(x - f) for x, f in zip(where, low)]
        total = 0
        for tap in itertools.product(range(4), repeat=n):
            at = [lax.stop_gradient(_place(f + k - 1, s, padding, align_corners)) for f, k, s in zip(low, tap, sizes)]
            weight = 1
            for w, k in zip(weights, tap):
                weight = weight * w[k]
            total = total + _look(flat, sizes, at) * weight[:, None]
        return total
    where = [_place(x, s, padding, align_corners) for x, s in zip(where, sizes)]
    if interpolation == _NEAREST:
        return _look(flat, sizes, [lax.stop_gradient(jnp.round(x)) for x in where])
    low = [lax.stop_gradient(jnp.floor(x)) for x in where]
    total = 0
    for tap in itertools.product(range(2), repeat=n):
        weight = 1
        for x, f, k in zip(where, low, tap):
            weight = weight * (x - f if k else f + 1 - x)
        total = total + _look(flat, sizes, [f + k for f, k in zip(low, tap)]) * weight[:, None]
    return total


def _check_grid(input, grid):
    n = input.ndim - 2
    if grid.ndim != input.ndim or grid.shape[-1] != n or grid.shape[0] != input.shape[0]:
        raise RuntimeError(f"grid_sampler(): expected a grid of batch size {input.shape[0]} and last dimension {n}, got "
                           f"{list(grid.shape)}")
    if input.dtype != grid.dtype:
        raise RuntimeError(f"grid_sampler(): expected input and grid of the same dtype, got {input.dtype} and {grid.dtype}")
    if 0 in input.shape[2:]:
        raise RuntimeError(f"grid_sampler(): expected input to have non-empty spatial dimensions, got {list(input.shape)}")


@op(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, aten._grid_sampler_2d_cpu_fallback.default)
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    _check_grid(input, grid)
    wide = opmath(input.dtype)
    return _sample(input.astype(wide), grid.astype(wide), interpolation_mode, padding_mode,
                   align_corners).astype(input.dtype)


@op(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    wide = opmath(input.dtype)

    def forward(x, g):
        return _sample(x, g, interpolation_mode, padding_mode, align_corners)

    _, pull = jax.vjp(forward, input.astype(wide), grid.astype(wide))
    into_input, into_grid = pull(grad_output.astype(wide))
    return into_input.astype(input.dtype) if output_mask[0] else None, into_grid.astype(grid.dtype)


@op(aten.affine_grid_generator.default)
def affine_grid_generator(theta, size, align_corners):
    n = len(size) - 2
    wide = opmath(theta.dtype)
    axes = []
    for s in reversed(size[2:]):
        line = np.linspace(-1, 1, s) if s > 1 else np.zeros(1)
        axes.append((line if align_corners else line * (s - 1) / s).astype(wide))
    grids = np.meshgrid(*reversed(axes), indexing="ij")[::-1]
    base = np.stack([*grids, np.ones_like(grids[0])], -1).reshape(1, -1, n + 1)
    out = jnp.einsum("bpk,bik->bpi", jnp.broadcast_to(base, (size[0], *base.shape[1:])), theta.astype(wide),
                     precision=lax.Precision.HIGHEST)
    return out.reshape(size[0], *size[2:], n).astype(theta.dtype)
