"""Fused optimizer steps and loss scaling: one program for the whole list of parameters.

Hyperparameters arrive as 64-bit scalars (``wide=True``) since 1 - beta is taken of them; the
tensors are computed in their own dtype (halves in float32).
"""

import jax.numpy as jnp

from ..dtypes import cast, opmath
from ..registry import aten, op


def _mixed(fresh, old, found_inf):
    """The new values, or the old ones where the gradients were found infinite."""
    fresh = [cast(n, o.dtype) for n, o in zip(fresh, old)]
    return fresh if found_inf is None else [jnp.where(found_inf != 0, o, n) for n, o in zip(fresh, old)]


def _gradients(grads, grad_scale, maximize):
    """(unscaled gradients as they are written back or None, gradients to descend along, in the compute dtype)."""
    compute = [cast(g, opmath(g.dtype)) for g in grads]
    back = None
    if grad_scale is not None:
        compute = [g / cast(grad_scale, g.dtype) for g in compute]
        back = [cast(c, g.dtype) for c, g in zip(compute, grads)]
    return back, [-g for g in compute] if maximize else compute


def _declare(name, step, lists):
    """The in-place and functional overloads of one fused op; ``step`` returns None for unwritten lists."""
    written, functional = getattr(aten, name + "_"), getattr(aten, name)

    def whole(*args, **kwargs):
        results = step(*args, **kwargs)
        return tuple(list(a) if r is None else r for r, a in zip(results, args))

    op(written.default, written.tensor_lr, wide=True)(step)
    op(functional.default, wide=True)(whole)
    op(functional.tensor_lr, wide=True)(lambda *args, **kwargs: whole(*args, **kwargs)[:lists])


def _adam(decoupled):
    def step(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, *, lr, beta1, beta2, weight_decay, eps,
             amsgrad, maximize, grad_scale=None, found_inf=None):
        back, directions = _gradients(grads, grad_scale, maximize)
        rate, one_, two = (cast(x, jnp.float64) for x in (lr, beta1, beta2))
        params, firsts, seconds, maxima = [], [], [], []
        for i, g in enumerate(directions):
            d = g.dtype
            p, m, v = (cast(x[i], d) for x in (self, exp_avgs, exp_avg_sqs))
            if decoupled:
                p = p * cast(1 - rate * weight_decay, d)
            else:
                g = g + cast(weight_decay, d) * p
            count = cast(state_steps[i], jnp.float64)
            m = m + cast(1 - one_, d) * (g - m)
            v = cast(two, d) * v + cast(1 - two, d) * g * g
            size = rate / (1 - one_ ** count)
            root = jnp.sqrt(1 - two ** count)
            top = v
            if amsgrad:
                top = jnp.maximum(cast(max_exp_avg_sqs[i], d), v)
                maxima.append(top)
            params.append(p - cast(size, d) * m / (jnp.sqrt(top) / cast(root, d) + cast(eps, d)))
            firsts.append(m)
            seconds.append(v)
        return (_mixed(params, self, found_inf), back, _mixed(firsts, exp_avgs, found_inf),
                _mixed(seconds, exp_avg_sqs, found_inf),
                _mixed(maxima, max_exp_avg_sqs, found_inf) if amsgrad else None)
    return step


_declare("_fused_adam", _adam(False), 5)
_declare("_fused_adamw", _adam(True), 5)


def _sgd(self, grads, momentum_buffer_list, *, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step,
         grad_scale=None, found_inf=None):
    back, directions = _gradients(grads, grad_scale, maximize)
    params, buffers = [], []
    for i, g in enumerate(directions):
        d = g.dtype
        p = cast(self[i], d)
        g = g + cast(weight_decay, d) * p
        if momentum_buffer_list:
            kept = cast(1 - cast(dampening, jnp.float64), d)
            b = g if is_first_step else cast(momentum, d) * cast(momentum_buffer_list[i], d) + kept * g
            g = g + cast(momentum, d) * b if nesterov else b
            buffers.append(b)
        params.append(p - cast(lr, d) * g)
    return (_mixed(params, self, found_inf), back,
            _mixed(buffers, momentum_buffer_list, found_inf) if momentum_buffer_list else None)


_declare("_fused_sgd", _sgd, 3)


def _adagrad(self, grads, state_sums, state_steps, *, lr, lr_decay, weight_decay, eps, maximize, grad_scale=None,
             found_inf=None):
    back, directions = _gradients(grads, grad_scale, maximize)
    params, sums = [], []
    for i, g in enumerate(directions):
        d = g.dtype
        p = cast(self[i], d)
        g = g + cast(weight_decay, d) * p
        rate = cast(lr, jnp.float64) / (1 + (cast(state_steps[i], jnp.float64) - 1) * lr_decay)
        s = cast(state_sums[i], d) + g * g
        params.append(p - cast(rate, d) * g / (jnp.sqrt(s) + cast(eps, d)))
        sums.append(s)
    return _mixed(params, self, found_inf), back, _mixed(sums, state_sums, found_inf), None


_declare("_fused_adagrad", _adagrad, 3)

# ---------------------------------------------------------------- GradScaler


@op(aten._amp_foreach_non_finite_check_and_unscale.default)
def unscale(self, found_inf, inv_scale):
    bad = found_inf != 0
    out = []
    for g in self:
        bad = bad | ~jnp.all(jnp.isfinite(g))
        out.append(cast(cast(g, opmath(g.dtype)) * cast(inv_scale, opmath(g.dtype)), g.dtype))
    return out, jnp.where(bad, jnp.ones_like(found_inf), found_inf)


@op(aten._amp_update_scale.default)
def update_scale(self, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval):
    bad = found_inf != 0
    successes = growth_tracker + jnp.ones_like(growth_tracker)
    due = successes == growth_interval
    grown = self * cast(scale_growth_factor, self.dtype)
    grown = jnp.where(jnp.isfinite(grown), grown, self)  # the scale never grows past the largest float
    scale = jnp.where(bad, self * cast(scale_backoff_factor, self.dtype), jnp.where(due, grown, self))
    return scale, jnp.where(bad | due, jnp.zeros_like(successes), successes)
