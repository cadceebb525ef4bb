"""Draws from named distributions: categorical, Poisson, binomial, gamma, Dirichlet."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import betainc, betaln, digamma

from ..dtypes import cast, opmath
from ..registry import aten, op
from .searching import bounds


@op(aten.multinomial.default, random=True, wide=True)
def multinomial(key, self, num_samples, replacement=False):
    if self.ndim not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if self.dtype.kind in "iub":
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {self.dtype}")
    if self.shape[-1] > 2**24:
        raise RuntimeError("number of categories cannot exceed 2^24")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    weights = cast(self, opmath(self.dtype))
    valid = jnp.all(jnp.isfinite(weights) & (weights >= 0), -1, keepdims=True) & jnp.any(weights > 0, -1, keepdims=True)
    if replacement and num_samples > 1:
        index = _by_cdf(key, weights, num_samples)
    else:
        # An exponential race: the order of weight / E draws without replacement; a weight of zero comes last.
        race = jnp.log(weights) + jax.random.gumbel(key, weights.shape, weights.dtype)
        score, index = lax.top_k(race, num_samples) if num_samples > 1 else (
            jnp.max(race, -1, keepdims=True), jnp.argmax(race, -1, keepdims=True))
        valid = valid & (score > -np.inf)
    index = index.astype(np.int64)
    return jnp.where(valid, index, np.iinfo(index.dtype).min)  # where torch would raise: no program can


def _by_cdf(key, weights, samples):
    """Indices by inversion. Zero weights repeat the bound before them exactly, so nothing falls between."""
    cdf = jnp.cumsum(weights, -1, dtype=weights.dtype)
    cdf = lax.cummax(jnp.where(weights > 0, cdf, 0), weights.ndim - 1)
    total = cdf[..., -1:]
    target = jax.random.uniform(key, (*weights.shape[:-1], samples), weights.dtype) * total
    last = jnp.sum(cdf < total, -1, keepdims=True, dtype=np.int32)
    return jnp.minimum(bounds(cdf, target, True), last)


@op(aten.poisson.default, random=True)
def poisson(key, self):
    rate = cast(self, opmath(self.dtype))
    good = rate >= 0
    drawn = jax.random.poisson(key, jnp.where(good, rate, 0), dtype=np.int32)
    return cast(jnp.where(good, cast(drawn, rate.dtype), np.nan), self.dtype)


@op(aten.binomial.default, random=True)
def binomial(key, count, prob):
    if count.dtype.kind in "iub":
        raise NotImplementedError(f"binomial is not implemented for {count.dtype}")
    compute = opmath(count.dtype)
    count, p = jnp.broadcast_arrays(cast(count, compute), cast(prob, compute))
    good = (count >= 0) & (p >= 0) & (p <= 1)
    drawn = jax.random.binomial(key, jnp.where(good, count, 0), jnp.where(good, p, 0), dtype=compute)
    return cast(jnp.where(good, drawn, np.nan), prob.dtype)


@op(aten._standard_gamma.default, random=True)
def standard_gamma(key, self):
    compute = opmath(self.dtype)
    draw = jax.random.gamma(key, cast(self, compute), dtype=compute)
    return cast(jnp.maximum(draw, jnp.finfo(compute).tiny), self.dtype)


@op(aten._standard_gamma_grad.default)
def standard_gamma_grad(self, output):
    return lax.random_gamma_grad(self, output)


@op(aten._sample_dirichlet.default, random=True)
def sample_dirichlet(key, self):
    compute = opmath(self.dtype)
    return cast(jax.random.dirichlet(key, cast(self, compute), dtype=compute), self.dtype)


def _near_zero(x, a, b):
    """dx/da of a Beta(a, b) draw by the series of the incomplete beta function in ``x``, for small ``x``."""
    factor = digamma(a) - digamma(a + b) - jnp.log(x)
    term = jnp.ones_like(x)
    series = (factor + 1 / a) / a
    for i in range(1, 11):
        term = term * (i - b) * x / i
        series = series + term / (a + i) * (factor + 1 / (a + i))
    out = x * jnp.exp(-b * jnp.log1p(-x)) * series
    return jnp.where(jnp.isnan(out), 0, out)


def _near_zero_other(x, a, b):
    """dx/db of a Beta(a, b) draw, likewise."""
    factor = digamma(a + b) - digamma(b)
    term, product, slope = jnp.ones_like(x), jnp.ones_like(x), jnp.zeros_like(x)
    series = factor / a
    for i in range(1, 9):
        term = -term * x / i
        slope = slope * (b - i) + product
        product = product * (b - i)
        series = series + term / (a + i) * (slope + factor * product)
    out = -jnp.exp((1 - b) * jnp.log1p(-x)) * series
    return jnp.where(jnp.isnan(out), 0, out)


def _by_difference(x, a, b):
    """dx/da in the bulk: -dF/da / pdf / (1 - x), the distribution function differentiated numerically."""
    h = jnp.maximum(a, 1) * (3e-3 if a.dtype == np.float32 else 1e-5)
    low = jnp.maximum(a - h, a * 0.5)
    slope = (betainc(a + h, b, x) - betainc(low, b, x)) / (a + h - low)
    log_pdf = (a - 1) * jnp.log(x) + (b - 1) * jnp.log1p(-x) - betaln(a, b)
    return -slope / jnp.exp(log_pdf) / (1 - x)


@op(aten._dirichlet_grad.default)
def dirichlet_grad(x, alpha, total):
    """d sample / d alpha of a Dirichlet, by implicit reparameterisation of its Beta marginals (Figurnov et al. 2018)."""
    result, x, alpha, total = x.dtype, *(cast(v, opmath(x.dtype)) for v in (x, alpha, total))
    beta = total - alpha
    edge = total * x * (1 - x)
    out = _by_difference(x, alpha, beta)
    out = jnp.where((x >= 0.5) & (edge < 0.75), -_near_zero_other(1 - x, beta, alpha), out)
    return cast(jnp.where((x <= 0.5) & (edge < 2.5), _near_zero(x, alpha, beta), out), result)
