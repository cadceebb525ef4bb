"""Draws from named distributions: categorical, Poisson, binomial, gamma, Dirichlet."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import cast, opmath
from ..registry import aten, op


@op(aten.multinomial.default, random=True, wide=True)
def multinomial(key, self, num_samples, replacement=False):
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    compute = opmath(self.dtype)
    logits = jnp.log(cast(self, compute))  # a weight of zero is -inf: never the maximum
    if replacement:
        shape = (num_samples, *self.shape[:-1])
        draws = jax.random.categorical(key, logits, axis=-1, shape=shape)
        return jnp.moveaxis(draws, 0, -1).astype(np.int64)
    # Gumbel top-k: the order of perturbed log-weights is a draw without replacement
    noisy = logits + jax.random.gumbel(key, self.shape, compute)
    return lax.top_k(noisy, num_samples)[1].astype(np.int64)


@op(aten.poisson.default, random=True)
def poisson(key, self):
    rate = cast(self, opmath(self.dtype))
    return cast(jax.random.poisson(key, rate, dtype=np.int32), self.dtype)


@op(aten.binomial.default, random=True)
def binomial(key, count, prob):
    compute = opmath(jnp.promote_types(count.dtype, prob.dtype))
    return cast(jax.random.binomial(key, cast(count, compute), cast(prob, compute), dtype=compute), count.dtype)


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


@op(aten._dirichlet_grad.default)
def dirichlet_grad(x, alpha, total):
    """d sample / d alpha of a Dirichlet, by implicit reparameterisation of its Beta marginals.

    Figurnov et al. 2018, "Implicit Reparameterization Gradients": -dF/dalpha / pdf of Beta(alpha, total - alpha),
    the derivative of the regularised incomplete beta function taken by a central difference in alpha.
    """
    beta = total - alpha
    h = jnp.maximum(alpha, 1) * (1e-3 if alpha.dtype == np.float32 else 1e-6)
    low = jnp.maximum(alpha - h, alpha * 0.5)
    slope = (jax.scipy.special.betainc(alpha + h, beta, x) - jax.scipy.special.betainc(low, beta, x)) / (alpha + h - low)
    log_pdf = (alpha - 1) * jnp.log(x) + (beta - 1) * jnp.log1p(-x) - jax.scipy.special.betaln(alpha, beta)
    return -slope / jnp.exp(log_pdf) / (1 - x)
