"""Fourier transforms: the three ATen kernels every torch.fft function is made of."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..registry import aten, op

_NONE, _BY_ROOT_N, _BY_N = range(3)  # torch's fft_norm_mode


def _scaled(x, n, normalization):
    if normalization == _NONE:
        return x
    scale = 1 / np.sqrt(n) if normalization == _BY_ROOT_N else 1 / n
    return x * np.asarray(scale, x.real.dtype)


def _sizes(x, dim):
    return int(np.prod([x.shape[d] for d in dim], dtype=np.int64))


def _check(x, kind, name):
    if x.dtype.kind != kind or x.dtype.itemsize < 4:
        raise RuntimeError(f"{name}: Unsupported dtype {x.dtype.name}")


def _over_last(x, dim, transform):
    """Apply a transform of the last len(dim) axes to the axes ``dim``."""
    last = tuple(range(x.ndim - len(dim), x.ndim))
    return jnp.moveaxis(transform(jnp.moveaxis(x, dim, last)), last, dim)


def _c2c(x, dim, forward):
    """Unnormalised complex transform over any number of axes (XLA takes three at a time)."""
    kind = lax.FftType.FFT if forward else lax.FftType.IFFT
    for i in range(0, len(dim), 3):
        part = [d % x.ndim for d in dim[i: i + 3]]
        sizes = tuple(x.shape[d] for d in part)
        x = _over_last(x, part, lambda v, sizes=sizes: lax.fft(v, kind, sizes))
        if not forward:  # XLA divides by n
            x = x * np.asarray(np.prod(sizes), x.real.dtype)
    return x


@op(aten._fft_c2c.default)
def _fft_c2c(self, dim, normalization, forward):
    _check(self, "c", "_fft_c2c")
    if not dim or self.size == 0:
        return self
    return _scaled(_c2c(self, dim, forward), _sizes(self, dim), normalization)


@op(aten._fft_r2c.default)
def _fft_r2c(self, dim, normalization, onesided):
    _check(self, "f", "_fft_r2c")
    n = _sizes(self, dim)
    to = np.dtype(np.complex128 if self.dtype == np.float64 else np.complex64)
    dim = [d % self.ndim for d in dim]
    if self.size == 0:
        shape = list(self.shape)
        if onesided:
            shape[dim[-1]] = shape[dim[-1]] // 2 + 1
        return jnp.zeros(shape, to)
    if not onesided:
        return _scaled(_c2c(self.astype(to), dim, True), n, normalization)
    last = dim[-1]
    out = _over_last(self, [last], lambda v: lax.fft(v, lax.FftType.RFFT, (v.shape[-1],)))
    return _scaled(_c2c(out, dim[:-1], True) if dim[:-1] else out, n, normalization)


@op(aten._fft_c2r.default)
def _fft_c2r(self, dim, normalization, last_dim_size):
    _check(self, "c", "_fft_c2r")
    if last_dim_size < 1:
        raise RuntimeError(f"Invalid number of data points ({last_dim_size}) specified")
    dim = [d % self.ndim for d in dim]
    shape = list(self.shape)
    shape[dim[-1]] = last_dim_size
    if 0 in shape:
        return jnp.zeros(shape, self.real.dtype)
    n = int(np.prod([shape[d] for d in dim], dtype=np.int64))
    x = _c2c(self, dim[:-1], False) if dim[:-1] else self
    last = dim[-1]
    half = last_dim_size // 2 + 1
    have = x.shape[last]
    if have > half:
        x = lax.slice_in_dim(x, 0, half, axis=last)
    elif have < half:
        x = jnp.pad(x, [(0, half - have) if i == last else (0, 0) for i in range(x.ndim)])
    out = _over_last(x, [last], lambda v: lax.fft(v, lax.FftType.IRFFT, (last_dim_size,)))
    return _scaled(out * np.asarray(last_dim_size, out.dtype), n, normalization)
