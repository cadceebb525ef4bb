"""Random draws. Every impl receives its PRNG key; none makes its own."""

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import cast, default_float, opmath, to_jax
from ..registry import aten, op
from ._pointwise import kind


def _float(dtype):
    return to_jax(dtype) if dtype is not None else default_float()


def _uniform(key, shape, dtype):
    """Uniform on [0, 1) in ``dtype``, with as many random bits as its mantissa: never 1."""
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        a, b = jax.random.split(key)
        return jax.lax.complex(jax.random.uniform(a, shape, part), jax.random.uniform(b, shape, part))
    if dtype.kind != "f" and dtype.name != "bfloat16":
        raise RuntimeError(f"uniform random numbers need a floating-point dtype, got {dtype}")
    return jax.random.uniform(key, shape, dtype)


def _normal(key, shape, dtype):
    """Standard normal in ``dtype``; a complex one has variance 1/2 in each part, as in torch."""
    if dtype.kind in "iub":
        raise RuntimeError(f"normal random numbers need a floating-point dtype, got {dtype}")
    return cast(jax.random.normal(key, shape, opmath(dtype)), dtype)


def _open(key, shape, dtype):
    """Uniform on the open interval (0, 1), for logarithms."""
    compute = opmath(dtype)
    # The middles of 2**23 (or 2**52) equal steps. A plain uniform lifted off zero would now and then give the
    # smallest float, and an exponential draw of 87 with it.
    digits = 23 if compute.itemsize == 4 else 52
    word = np.dtype(f"u{compute.itemsize}")
    bits = jax.random.bits(key, shape, word) >> word.type(8 * compute.itemsize - digits)
    return (bits.astype(compute) + compute.type(0.5)) * compute.type(2.0**-digits)


# ---------------------------------------------------------------- factories


@op(aten.rand.default, aten.rand.generator, random=True)
def rand(key, size, dtype=None):
    return _uniform(key, size, _float(dtype))


@op(aten.randn.default, aten.randn.generator, random=True)
def randn(key, size, dtype=None):
    return _normal(key, size, _float(dtype))


@op(aten.rand_like.default, aten.rand_like.generator, random=True, shape_only=("self",))
def rand_like(key, self, dtype=None):
    return _uniform(key, self.shape, to_jax(dtype) if dtype is not None else np.dtype(self.dtype))


@op(aten.randn_like.default, aten.randn_like.generator, random=True, shape_only=("self",))
def randn_like(key, self, dtype=None):
    return _normal(key, self.shape, to_jax(dtype) if dtype is not None else np.dtype(self.dtype))


def _integers(key, shape, low, high, dtype):
    """Integers in [low, high) as ``dtype``; the range may span all of int64."""
    if low >= high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    if high - low > 2**63 - 1:
        bits = jax.random.bits(key, shape, np.uint64)
        span = high - low
        bits = bits if span >= 2**64 else bits % np.uint64(span)
        return cast(jax.lax.bitcast_convert_type(bits, np.int64) + np.int64(low), dtype)
    draw = jax.random.randint(key, shape, 0, high - low, dtype=np.int64) if high - low > 2**31 - 1 else (
        jax.random.randint(key, shape, 0, high - low, dtype=np.int32).astype(np.int64))
    return cast(draw + np.int64(low), dtype)


@op(aten.randint.default, aten.randint.generator, random=True, wide=True)
def randint(key, high, size, dtype=None):
    return _integers(key, size, 0, high, to_jax(dtype) if dtype is not None else np.dtype(np.int64))


@op(aten.randint.low, aten.randint.low_generator, random=True, wide=True)
def randint_low(key, low, high, size, dtype=None):
    return _integers(key, size, low, high, to_jax(dtype) if dtype is not None else np.dtype(np.int64))


@op(aten.randint_like.default, aten.randint_like.generator, random=True, wide=True, shape_only=("self",))
def randint_like(key, self, high, dtype=None):
    return _integers(key, self.shape, 0, high, to_jax(dtype) if dtype is not None else np.dtype(self.dtype))


@op(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype, random=True, wide=True, shape_only=("self",))
def randint_like_low(key, self, low, high, dtype=None):
    return _integers(key, self.shape, low, high, to_jax(dtype) if dtype is not None else np.dtype(self.dtype))


@op(aten.randperm.default, aten.randperm.generator, random=True, wide=True)
def randperm(key, n, dtype=None):
    if n < 0:
        raise RuntimeError(f"n must be non-negative, got {n}")
    return cast(jax.random.permutation(key, n), to_jax(dtype) if dtype is not None else np.dtype(np.int64))


# ---------------------------------------------------------------- in-place fills

_MANTISSA = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


def _between(key, self, low, high):
    dtype = np.dtype(self.dtype)
    unit = _uniform(key, self.shape, dtype)
    if dtype.kind == "c":  # both parts from the range
        low, high = cast(low, unit.real.dtype), cast(high, unit.real.dtype)
        return unit * (high - low) + jax.lax.complex(low, low)
    compute = opmath(dtype)
    low, high = cast(low, compute), cast(high, compute)
    out = cast(cast(unit, compute) * (high - low) + low, dtype)
    # rounding may reach the open end
    return jnp.where((out >= cast(high, dtype)) & (high > low), jnp.nextafter(cast(high, dtype), cast(low, dtype)), out)


@op(aten.uniform_.default, aten.uniform.default, random=True, shape_only=("self",))
def uniform(key, self, low=0.0, high=1.0):  # ATen's names are from (a keyword of Python) and to
    return _between(key, self, low, high)


def _both_parts(mean, dtype):
    """The mean of complex numbers: torch takes a real one for either part."""
    return cast(mean, dtype) * (1 + 1j) if np.dtype(dtype).kind == "c" else mean


@op(aten.normal_.default, random=True, shape_only=("self",))
def normal_(key, self, mean=0.0, std=1.0):
    mean = _both_parts(mean, self.dtype)
    return _gauss(key, self.shape, np.dtype(self.dtype), mean, std)


@op(aten.normal_functional.default, random=True, shape_only=("self",))
def normal_functional(key, self, mean=0.0, std=1.0):
    mean = _both_parts(mean, self.dtype)
    return _gauss(key, self.shape, np.dtype(self.dtype), mean, std)


def _gauss(key, shape, dtype, mean, std):
    compute = opmath(dtype)
    draw = _normal(key, shape, compute) * cast(std, compute) + cast(mean, compute)
    # A std tensor with a negative element is an error in torch; a compiled program can only refuse to answer.
    bad = cast(jnp.where(cast(std, compute).real < 0, np.nan, 0), compute)
    return cast(draw + bad, dtype)


@op(aten.normal.Tensor_float, random=True)
def normal_tensor_float(key, mean, std=1.0):
    return _gauss(key, mean.shape, np.dtype(mean.dtype), mean, std)


@op(aten.normal.float_Tensor, random=True)
def normal_float_tensor(key, mean, std):
    return _gauss(key, std.shape, std.dtype, mean, std)


@op(aten.normal.Tensor_Tensor, random=True)
def normal_tensor_tensor(key, mean, std):
    return _gauss(key, jnp.broadcast_shapes(mean.shape, std.shape), np.dtype(mean.dtype), mean, std)


@op(aten.normal.float_float, random=True)
def normal_float_float(key, mean, std, size, dtype=None):
    return _gauss(key, size, _float(dtype), mean, std)


def _coin(key, p, shape):
    p = cast(p, np.dtype(np.float32)) if np.dtype(getattr(p, "dtype", np.float32)).itemsize < 4 else p
    drawn = jax.random.uniform(key, shape, getattr(p, "dtype", None) or np.float32) < p
    return jnp.where((p >= 0) & (p <= 1), drawn, jnp.nan)  # NaN (where the dtype has it) for what is no probability


@op(aten.bernoulli.default, random=True)
def bernoulli(key, self):
    return cast(_coin(key, self, self.shape), self.dtype)


@op(aten.bernoulli.p, random=True, shape_only=("self",))
def bernoulli_p(key, self, p):
    return cast(_coin(key, p, self.shape), np.dtype(self.dtype))


@op(aten.bernoulli_.float, random=True, shape_only=("self",))
def bernoulli_float_(key, self, p=0.5):
    return cast(_coin(key, p, self.shape), np.dtype(self.dtype))


@op(aten.bernoulli_.Tensor, aten.bernoulli.Tensor, random=True, shape_only=("self",))
def bernoulli_tensor(key, self, p):
    return cast(_coin(key, jnp.broadcast_to(p, self.shape), self.shape), np.dtype(self.dtype))


def _top(dtype):
    """One past the largest integer that random_() draws for a dtype."""
    if dtype == np.bool_:
        return 2
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max) + 1
    return 2 ** _MANTISSA[dtype.name] + 1


@op(aten.random_.default, aten.random.default, random=True, wide=True, shape_only=("self",))
def random_(key, self):
    dtype = np.dtype(self.dtype)
    return _integers(key, self.shape, 0, _top(dtype), dtype)


@op(aten.random_.to, aten.random.to, random=True, wide=True, shape_only=("self",))
def random_to(key, self, to):
    return _integers(key, self.shape, 0, to, np.dtype(self.dtype))


@op(getattr(aten.random_, "from"), getattr(aten.random, "from"), random=True, wide=True, shape_only=("self",))
def random_from(key, self, low, to):
    dtype = np.dtype(self.dtype)
    return _integers(key, self.shape, low, _top(dtype) if to is None else to, dtype)


@op(aten.exponential_.default, aten.exponential.default, random=True, shape_only=("self",))
def exponential_(key, self, lambd=1.0):
    dtype = np.dtype(self.dtype)
    return cast(-jnp.log(_open(key, self.shape, dtype)) / lambd, dtype)


@op(aten.geometric_.default, aten.geometric.default, random=True, shape_only=("self",))
def geometric_(key, self, p):
    dtype = np.dtype(self.dtype)
    compute = opmath(dtype) if dtype.kind == "f" or dtype.name == "bfloat16" else np.dtype(np.float32)
    draw = jnp.ceil(jnp.log(_open(key, self.shape, compute)) / jnp.log1p(-cast(p, compute)))
    return cast(jnp.maximum(draw, 1), dtype)


@op(aten.cauchy_.default, aten.cauchy.default, random=True, shape_only=("self",))
def cauchy_(key, self, median=0.0, sigma=1.0):
    dtype = np.dtype(self.dtype)
    return cast(jnp.tan(np.pi * (_open(key, self.shape, dtype) - 0.5)) * sigma + median, dtype)


@op(aten.log_normal_.default, aten.log_normal.default, random=True, shape_only=("self",))
def log_normal_(key, self, mean=1.0, std=2.0):
    dtype = np.dtype(self.dtype)
    return cast(jnp.exp(_gauss(key, self.shape, opmath(dtype), mean, std)), dtype)


# ---------------------------------------------------------------- dropout


@op(aten.native_dropout.default, random=True)
def native_dropout(key, input, p, train=None):
    if train is False:
        return input, jnp.ones(input.shape, np.bool_)
    keep = jax.random.uniform(key, input.shape, np.float32) >= p
    compute = opmath(input.dtype)
    p = cast(p, compute)
    scale = jnp.where(p == 1, cast(0.0, compute), 1 / (1 - p))
    # A product, not a choice: NaN and infinity don't vanish by being dropped, as in torch.
    return cast(cast(input, compute) * (cast(keep, compute) * scale), input.dtype), keep


@op(aten.native_dropout_backward.default)
def native_dropout_backward(grad_output, mask, scale):
    result = grad_output.dtype if kind(grad_output) in "fc" else default_float()
    compute = opmath(result)
    return cast(jnp.where(mask, cast(grad_output, compute) * cast(scale, compute), cast(0.0, compute)), result)
