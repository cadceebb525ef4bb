"""Special functions: gamma and error functions, Bessel and Airy functions, xlogy and the like."""

import math

import jax.numpy as jnp
import jax.scipy.special as jsp
from jax import lax

from ..registry import aten, op
from . import _cephes as C
from ._pointwise import constant, float_only, floating


def _declare(overload, fn):
    op(overload, dtype=float_only, layout="elementwise")(fn)


def polynomial(x, coefficients):
    """Horner's rule, highest power first."""
    out = jnp.zeros_like(x)
    for c in coefficients:
        out = out * x + constant(x, c)
    return out


def chebyshev(x, coefficients):
    """Clenshaw's sum of a Chebyshev expansion, highest order first."""
    last, before, out = jnp.zeros_like(x), jnp.zeros_like(x), jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        last, before = before, out
        out = x * before - last + constant(x, c)
    return 0.5 * (out - last)


# ---------------------------------------------------------------- error functions


def erfcx(x):
    """exp(x**2) * erfc(x) without overflow; a rational function where erfc is nearly exp(-x**2)."""
    a = jnp.abs(x)
    bounded = jnp.minimum(a, 1)
    near = jnp.exp(bounded * bounded) * lax.erfc(bounded)
    middle = polynomial(jnp.minimum(a, 8), C.ERFCX_P) / polynomial(jnp.minimum(a, 8), C.ERFCX_Q)
    t = 1 / jnp.maximum(a, 8)  # as a function of 1/x the quotient can't overflow
    far = t * polynomial(t, C.ERFCX_R[::-1]) / polynomial(t, C.ERFCX_S[::-1])
    out = jnp.where(a < 1, near, jnp.where(a < 8, middle, far))
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, 2 * jnp.exp(a * a) - out, out))


def entr(x):
    """-x log x, 0 at 0, -inf below."""
    return jnp.where(jnp.isnan(x), x, jnp.where(x > 0, -x * jnp.log(jnp.where(x > 0, x, 1)),
                                               jnp.where(x == 0, constant(x, 0), constant(x, -math.inf))))


_declare(aten.erf.default, lax.erf)
_declare(aten.erfc.default, lax.erfc)
_declare(aten.erfinv.default, lax.erf_inv)
_declare(aten.special_erfcx.default, erfcx)
_declare(aten.special_entr.default, entr)
_declare(aten.special_ndtri.default, lambda self: jsp.ndtri(self))
_declare(aten.special_log_ndtr.default, lambda self: jsp.log_ndtr(self))

# ---------------------------------------------------------------- gamma functions


def digamma(x):
    """Derivative of log gamma: -+inf at +-0, nan at negative integers."""
    return jnp.where(x == 0, jnp.copysign(constant(x, math.inf), -x), lax.digamma(x))


def trigamma(x):
    """Second derivative of log gamma: reflected for x < 1/2, then recurrence and the asymptotic series."""
    small = x < 0.5
    y = jnp.where(small, 1 - x, x)
    total = jnp.zeros_like(x)
    for _ in range(6):
        total, y = total + 1 / (y * y), y + 1
    ixx = 1 / (y * y)
    total = total + (1 + 1 / (2 * y) + ixx * (1 / 6 - ixx * (1 / 30 - ixx * (1 / 42)))) / y
    sine = jnp.sin(math.pi * x)
    return jnp.where(small, math.pi**2 / (sine * sine) - total, total)


# (2k)! / B_2k, the denominators of the Euler-Maclaurin correction
_EULER = (12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10,
          -2.950130727918164224e12, 1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17,
          -7.1661652561756670113e18)


def zeta(x, q):
    """Hurwitz zeta by Euler-Maclaurin, summing until q + i > 9: also right for negative, non-integer q."""
    x, q = jnp.broadcast_arrays(x, q)
    usable = (x > 1) & jnp.isfinite(x) & jnp.isfinite(q) & ((q > 0) | (q != jnp.floor(q)) & (x == jnp.floor(x)))
    base = jnp.where(usable, q, 10)
    x_safe = jnp.where(usable, x, 2)

    def add(state):
        i, a, b, total = state
        go = (i < 9) | (a <= 9)
        a = jnp.where(go, a + 1, a)
        b = jnp.where(go, jnp.power(a, -x_safe), b)
        return i + 1, a, b, jnp.where(go, total + b, total)

    first = jnp.power(base, -x_safe)
    start = (jnp.asarray(0, jnp.int32), base, first, first)
    _, w, b, total = lax.while_loop(lambda s: (s[0] < 9) | jnp.any(s[1] <= 9), add, start)
    total = total + b * w / (x_safe - 1) - 0.5 * b
    factor, k = jnp.ones_like(x), 0
    for denominator in _EULER:
        factor, b = factor * (x_safe + k), b / w
        total = total + factor * b / denominator
        factor, b = factor * (x_safe + k + 1), b / w
        k += 2
    # beyond the float range of the powers the first term is all there is
    total = jnp.where(jnp.isfinite(total), total, first)
    poles = (x == 1) | (x > 1) & (q <= 0) & (q == jnp.floor(q))
    total = jnp.where((x == math.inf) & (q > 0) & (q <= 1), jnp.where(q == 1, constant(x, 1), constant(x, math.inf)),
                      jnp.where(usable, total, constant(x, math.nan)))
    return jnp.where(poles, constant(x, math.inf), total)


@op(aten.polygamma.default, dtype=float_only("self"), layout="elementwise")
def polygamma(n, self):
    if n < 0:
        raise RuntimeError("polygamma(n, x) does not support negative n.")
    if n < 2:
        return trigamma(self) if n else digamma(self)
    return (1 if n % 2 else -1) * math.factorial(n) * zeta(jnp.full_like(self, n + 1), self)


@op(aten.polygamma_.default, dtype=float_only("self"), layout="elementwise")
def polygamma_(self, n):
    return polygamma(n, self)


@op(aten.mvlgamma.default, dtype=float_only("self"), layout="elementwise")
def mvlgamma(self, p):
    if p < 1:
        raise RuntimeError("p has to be greater than or equal to 1")
    return sum((lax.lgamma(self - 0.5 * j) for j in range(p)), constant(self, p * (p - 1) / 4 * math.log(math.pi)))


_declare(aten.lgamma.default, lax.lgamma)
_declare(aten.digamma.default, digamma)


def _incomplete(fn, at_infinity):
    """A regularised incomplete gamma function, with its limit for an infinite order."""
    def impl(self, other):
        self, other = jnp.broadcast_arrays(self, other)
        limit = jnp.where(jnp.isinf(other), constant(self, math.nan), constant(self, at_infinity))
        return jnp.where((self == math.inf) & (other > 0), limit, fn(self, other))
    return impl


op(aten.igamma.default, dtype=floating, layout="elementwise")(_incomplete(jsp.gammainc, 0))
op(aten.igammac.default, dtype=floating, layout="elementwise")(_incomplete(jsp.gammaincc, 1))


def _binary(packet, names, fn):
    op(*(getattr(packet, n) for n in names), dtype=float_only, layout="elementwise")(fn)


_binary(aten.special_zeta, ("default", "self_scalar", "other_scalar"),
        lambda self, other: zeta(self, other))


def _product_with_log(log):
    def fn(self, other):
        safe = jnp.where(self == 0, constant(other, 1), other)
        return jnp.where(jnp.isnan(other), other, jnp.where(self == 0, constant(self, 0), self * log(safe)))
    return fn


_binary(aten.xlogy, ("Tensor", "Scalar_Self", "Scalar_Other"), _product_with_log(jnp.log))
_binary(aten.special_xlog1py, ("default", "self_scalar", "other_scalar"), _product_with_log(jnp.log1p))

# ---------------------------------------------------------------- Bessel functions


def _phase(x, p, q, qp, qq, shift, second):
    """The asymptotic form sqrt(2 / (pi x)) (P cos - Q sin) of J, or (P sin + Q cos) of Y, for x > 5."""
    z = 25 / (x * x)
    amplitude = polynomial(z, p) / polynomial(z, q)
    minor = 5 / x * (polynomial(z, qp) / polynomial(z, qq))
    c, s = jnp.cos(x - shift), jnp.sin(x - shift)
    return (amplitude * s + minor * c if second else amplitude * c - minor * s) * math.sqrt(2 / math.pi) / jnp.sqrt(x)


def _order0(x, second):
    return _phase(x, C.J0_PP, C.J0_PQ, C.J0_QP, C.J0_QQ, math.pi / 4, second)


def _order1(x, second):
    return _phase(x, C.J1_PP, C.J1_PQ, C.J1_QP, C.J1_QQ, 3 * math.pi / 4, second)


def bessel_j0(x):
    a = jnp.abs(x)
    z = jnp.minimum(a, 5) ** 2
    near = (z - 5.78318596294678452118) * (z - 30.4712623436620863991) * polynomial(z, C.J0_RP) / polynomial(z, C.J0_RQ)
    return jnp.where(a < 1e-5, 1 - z / 4, jnp.where(a <= 5, near, _order0(jnp.maximum(a, 5), False)))


def bessel_j1(x):
    a = jnp.abs(x)
    low = jnp.minimum(a, 5)
    z = low * low
    near = polynomial(z, C.J1_RP) / polynomial(z, C.J1_RQ) * low * (z - 14.6819706421238932572) * (
        z - 49.2184563216946036703)
    out = jnp.where(a <= 5, near, _order1(jnp.maximum(a, 5), False))
    return jnp.where(x < 0, -out, out)


def _second_kind(x, near, far):
    out = jnp.where(x <= 5, near, far)
    return jnp.where(x == 0, constant(x, -math.inf), jnp.where(x < 0, constant(x, math.nan), out))


def bessel_y0(x):
    low = jnp.clip(x, 0, 5)
    z = low * low
    near = polynomial(z, C.Y0_YP) / polynomial(z, C.Y0_YQ) + 2 / math.pi * jnp.log(low) * bessel_j0(low)
    return _second_kind(x, near, _order0(jnp.maximum(x, 5), True))


def bessel_y1(x):
    low = jnp.clip(x, 0, 5)
    z = low * low
    near = low * (polynomial(z, C.Y1_YP) / polynomial(z, C.Y1_YQ)) + 2 / math.pi * (
        bessel_j1(low) * jnp.log(low) - 1 / low)
    return _second_kind(x, near, _order1(jnp.maximum(x, 5), True))


def _scaled_i(x, a_coefficients, b_coefficients):
    """exp(-|x|) I(|x|), where the expansion for small x lacks its factor |x| in order 1."""
    a = jnp.abs(x)
    near = chebyshev(jnp.minimum(a, 8) / 2 - 2, a_coefficients)
    far = jnp.maximum(a, 8)
    return a, near, chebyshev(32 / far - 2, b_coefficients) / jnp.sqrt(far)


def i0e(x):
    a, near, far = _scaled_i(x, C.I0_A, C.I0_B)
    return jnp.where(a <= 8, near, far)


def i1e(x):
    a, near, far = _scaled_i(x, C.I1_A, C.I1_B)
    out = jnp.where(a <= 8, near * a, far)
    return jnp.where(x < 0, -out, out)


def i0(x):
    return i0e(x) * jnp.exp(jnp.abs(x))


def i1(x):
    return i1e(x) * jnp.exp(jnp.abs(x))


def _k(x, near, b_coefficients, scaled):
    """K from its form for x <= 2 (unscaled) and the Chebyshev expansion beyond."""
    far = jnp.maximum(x, 2)
    out = chebyshev(8 / far - 2, b_coefficients) / jnp.sqrt(far)
    out = jnp.where(x <= 2, near * jnp.exp(x), out) if scaled else jnp.where(x <= 2, near, out * jnp.exp(-x))
    return jnp.where(x == 0, constant(x, math.inf), jnp.where(x < 0, constant(x, math.nan), out))


def k0(x, scaled=False):
    low = jnp.clip(x, 0, 2)
    near = chebyshev(low * low - 2, C.K0_A) - jnp.log(0.5 * low) * i0(low)
    return _k(x, near, C.K0_B, scaled)


def k1(x, scaled=False):
    low = jnp.clip(x, 0, 2)
    near = jnp.log(0.5 * low) * i1(low) + chebyshev(low * low - 2, C.K1_A) / low
    return _k(x, near, C.K1_B, scaled)


def spherical_j0(x):
    z = x * x
    series = polynomial(z, [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)])
    big = jnp.where(jnp.isinf(x), 1, x)
    return jnp.where(jnp.isinf(x), constant(x, 0), jnp.where(jnp.abs(x) < 0.5, series, jnp.sin(big) / big))


def airy_ai(x):
    """Asymptotic forms beyond 2.09 on both sides, the Maclaurin series between."""
    minus = jnp.maximum(-x, 2.09)
    phase = 2 * minus * jnp.sqrt(minus) / 3
    z = 1 / phase
    zz = z * z
    t = phase + math.pi / 4
    inv_root_pi = 1 / math.sqrt(math.pi)
    left = inv_root_pi / jnp.sqrt(jnp.sqrt(minus)) * (
        jnp.sin(t) * (1 + zz * polynomial(zz, C.AIRY_AFN) / polynomial(zz, C.AIRY_AFD))
        - jnp.cos(t) * (z * polynomial(zz, C.AIRY_AGN) / polynomial(zz, C.AIRY_AGD)))
    plus = jnp.clip(x, 2.09, 103.892)
    zeta = 2 * plus * jnp.sqrt(plus) / 3
    right = inv_root_pi * (polynomial(1 / zeta, C.AIRY_AN) / polynomial(1 / zeta, C.AIRY_AD)) / (
        2 * jnp.sqrt(jnp.sqrt(plus)) * jnp.exp(zeta))
    low = jnp.clip(x, -2.09, 2.09)
    cube = low * low * low
    f, g, m, n = jnp.ones_like(x), low, jnp.ones_like(x), low
    for k in range(1, 16):
        m = m * cube / ((3 * k - 1) * (3 * k))
        n = n * cube / ((3 * k) * (3 * k + 1))
        f, g = f + m, g + n
    centre = 0.355028053887817239260 * f - 0.258819403792806798405 * g
    out = jnp.where(x < -2.09, left, jnp.where(x >= 2.09, jnp.where(x > 103.892, constant(x, 0), right), centre))
    return jnp.where(jnp.isinf(x), constant(x, math.nan), out)


for _name, _fn in {
    "i0": i0, "special_i0e": i0e, "special_i1": i1, "special_i1e": i1e, "special_bessel_j0": bessel_j0,
    "special_bessel_j1": bessel_j1, "special_bessel_y0": bessel_y0, "special_bessel_y1": bessel_y1,
    "special_modified_bessel_i0": i0, "special_modified_bessel_i1": i1, "special_modified_bessel_k0": k0,
    "special_modified_bessel_k1": k1, "special_spherical_bessel_j0": spherical_j0, "special_airy_ai": airy_ai,
    "special_scaled_modified_bessel_k0": lambda x: k0(x, True),
    "special_scaled_modified_bessel_k1": lambda x: k1(x, True),
}.items():
    _declare(getattr(aten, _name).default, _fn)
