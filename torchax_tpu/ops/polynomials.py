"""Orthogonal polynomials of a degree per element: closed forms where torch has them, else the recurrence."""

import math

import jax.numpy as jnp
from jax import lax

from ..registry import aten, op
from ._pointwise import constant, float_only


def _recurrence(x, n, first, step):
    """P_n(x) from P_0 = 1, P_1 = first and P_k = step(k, P_(k-2), P_(k-1)), as long as a degree needs it."""
    one = jnp.ones_like(x)

    def more(state):
        k, _, last, _ = state
        return jnp.any((n >= k) & ~jnp.isnan(last))

    def advance(state):
        k, before, last, out = state
        new = step(k.astype(x.dtype), before, last)
        return k + 1, last, new, jnp.where(n >= k, new, out)

    start = (jnp.asarray(2, n.dtype), one, first, jnp.where(n == 1, first, one))
    return lax.while_loop(more, advance, start)[3]


def _family(name, first, step, ends=None, closed=None, above=None, limit=False):
    """Declare one polynomial.

    ends(x, n) gives (mask, value) pairs of exact values at the ends of the interval; closed(x, n) the
    trigonometric form, taken inside the interval for degrees over ``above``.
    """
    packet = getattr(aten, f"special_{name}")

    @op(packet.default, packet.n_scalar, packet.x_scalar, dtype=float_only, layout="elementwise")
    def impl(x, n):
        x, n = jnp.broadcast_arrays(x, n)
        degree = jnp.where(jnp.isfinite(n), n, -1).astype(jnp.int32)
        pairs = list(ends(x, degree)) if ends else []
        if closed is not None:
            inner = jnp.abs(2 * x - 1 if name.startswith("shifted") else x) < 1
            pairs.append((inner & (degree > above), closed(x, degree.astype(x.dtype))))
        if limit:  # torch gives up on Hermite polynomials of a degree that must overflow
            pairs.append((degree > (512 if x.dtype.itemsize == 8 else 128), constant(x, math.nan)))
        known = jnp.zeros(x.shape, bool)
        for mask, _ in pairs:
            known = known | mask
        out = _recurrence(x, jnp.where(known, 0, degree), first(x), lambda k, p, q: step(x, k, p, q))
        for mask, value in reversed(pairs):
            out = jnp.where(mask, value, out)
        return jnp.where(degree < 0, constant(x, 0), out)


def _signed(value, n):
    return jnp.where(n % 2 == 0, value, -value)


def _ends(at_one, at_minus_one, shifted):
    """Exact values at the right end, and (up to the sign of the degree's parity) at the left end."""
    def ends(x, n):
        left = x == (0 if shifted else -1)
        k = n.astype(x.dtype)
        return [(x == 1, at_one(k)), (left, _signed(at_minus_one(k), n))]
    return ends


def _one(n):
    return jnp.ones_like(n)


def _linear(n):
    return n + n + 1


def _trigonometric(form, shifted):
    return lambda x, n: form(n, jnp.arccos(jnp.clip(2 * x - 1 if shifted else x, -1, 1)))


def _quotient(above, below):
    # the ends of the interval, where the quotient is 0/0, have their exact values
    return lambda n, t: above(n, t) / jnp.where(below(t) == 0, 1, below(t))


_FORMS = {
    "t": (lambda s: s / 2, lambda n, t: jnp.cos(n * t), _one, _one),
    "u": (lambda s: s, _quotient(lambda n, t: jnp.sin((n + 1) * t), jnp.sin), lambda n: n + 1, lambda n: n + 1),
    "v": (lambda s: s - 1, _quotient(lambda n, t: jnp.cos((n + 0.5) * t), lambda t: jnp.cos(t / 2)), _one, _linear),
    "w": (lambda s: s + 1, _quotient(lambda n, t: jnp.sin((n + 0.5) * t), lambda t: jnp.sin(t / 2)), _linear, _one),
}
_ABOVE = {"t": 6, "u": 8, "v": 8, "w": 8, "shifted_t": 6, "shifted_u": 6, "shifted_v": 6, "shifted_w": 4}

for _letter, (_first, _form, _at_one, _at_minus_one) in _FORMS.items():
    for _shifted in (False, True):
        def _double(x, shifted=_shifted):
            return 2 * (2 * x - 1) if shifted else 2 * x

        _family(("shifted_" if _shifted else "") + f"chebyshev_polynomial_{_letter}",
                lambda x, f=_first, d=_double: f(d(x)), lambda x, k, p, q, d=_double: d(x) * q - p,
                _ends(_at_one, _at_minus_one, _shifted), _trigonometric(_form, _shifted),
                _ABOVE[("shifted_" if _shifted else "") + _letter])

_family("hermite_polynomial_h", lambda x: 2 * x, lambda x, k, p, q: 2 * x * q - 2 * (k - 1) * p, limit=True)
_family("hermite_polynomial_he", lambda x: x, lambda x, k, p, q: x * q - (k - 1) * p, limit=True)
_family("laguerre_polynomial_l", lambda x: 1 - x, lambda x, k, p, q: ((2 * k - 1 - x) * q - (k - 1) * p) / k,
        lambda x, n: [(x == 0, constant(x, 1))])
_family("legendre_polynomial_p", lambda x: x, lambda x, k, p, q: ((2 * k - 1) * x * q - (k - 1) * p) / k,
        lambda x, n: [(x == 1, constant(x, 1)), (x == -1, _signed(jnp.ones_like(x), n))])
