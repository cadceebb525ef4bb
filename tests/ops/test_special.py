"""Special functions and orthogonal polynomials against CPU torch."""

import math

import pytest
import torch

from tests import ledger, oracle

DEVICE = oracle.DEVICE
NAMES = ["erf", "erfc", "erfinv", "lgamma", "digamma", "igamma", "igammac", "polygamma.polygamma_n_0", "polygamma.polygamma_n_1", "polygamma.polygamma_n_2", "mvlgamma.mvlgamma_p_3", "i0", "special.i0e", "special.i1", "special.i1e", "special.entr", "special.erfcx", "special.ndtri", "special.log_ndtr", "special.bessel_j0", "special.bessel_j1", "special.bessel_y0", "special.bessel_y1", "special.modified_bessel_i0", "special.modified_bessel_i1", "special.modified_bessel_k0", "special.modified_bessel_k1", "special.scaled_modified_bessel_k0", "special.scaled_modified_bessel_k1", "special.spherical_bessel_j0", "special.airy_ai", "special.zeta", "special.xlog1py", "xlogy", "special.chebyshev_polynomial_t", "special.chebyshev_polynomial_u", "special.chebyshev_polynomial_v", "special.chebyshev_polynomial_w", "special.shifted_chebyshev_polynomial_t", "special.shifted_chebyshev_polynomial_w", "special.hermite_polynomial_h", "special.hermite_polynomial_he", "special.laguerre_polynomial_l", "special.legendre_polynomial_p"]
OPS = [o for o in oracle.ops(set(NAMES)) if oracle.full_name(o) in NAMES]
CASES = [(mode, o, d) for o in OPS for mode, d in (("forward", torch.float32), ("grad", torch.float32), ("forward", torch.float64),
                                                  ("forward", torch.int64))
         if oracle.applicable(o, mode, d)]


def test_the_names_exist():
    assert {oracle.full_name(o) for o in OPS} == set(NAMES)


@pytest.mark.parametrize("mode,op,dtype", CASES, ids=lambda x: x if isinstance(x, str) else str(
    x).removeprefix("torch.") if isinstance(x, torch.dtype) else oracle.full_name(x))
def test_database(mode, op, dtype):
    ledger.check(mode, oracle.full_name(op), str(dtype).removeprefix("torch."),
                 lambda **kw: oracle.CHECKS[mode](op, dtype, limit=2, **kw))


FUNCTIONS = ["i0", "i0e", "i1", "i1e", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0", "airy_ai", "erfcx", "entr", "ndtri", "log_ndtr", "digamma", "gammaln", "erfinv", "sinc"]
POINTS = [0.0, 1.0, -1.0, 2.5, -2.5, -8.3, 0.3, 5.0, 8.0, 30.0, 1e-5, 100.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_over_the_whole_line(name, dtype):
    x, fn = torch.tensor(POINTS, dtype=dtype), getattr(torch.special, name)
    tolerance = {"rtol": 2e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    oracle.assert_same(fn(x.to(DEVICE)), fn(x), **tolerance)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7])
def test_polygamma_at_negative_arguments(n):
    x = torch.tensor([0.5, 2.0, -0.5, -8.3, -2.7, 30.0, -1.0, 0.0], dtype=torch.float64)
    oracle.assert_same(torch.polygamma(n, x.to(DEVICE)), torch.polygamma(n, x), rtol=1e-8, atol=1e-10)


def test_polygamma_in_place():
    x = torch.tensor([0.5, 2.0, 3.5])
    oracle.assert_same(x.to(DEVICE).polygamma_(1), torch.polygamma(1, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fn", [torch.special.gammainc, torch.special.gammaincc, torch.special.zeta, torch.special.xlog1py],
                         ids=lambda f: f.__name__)
def test_two_arguments_at_the_corners(fn):
    x = torch.tensor([0.0, 1.0, 2.5, 10.0, math.inf], dtype=torch.float64)
    oracle.assert_same(fn(x[:, None].to(DEVICE), x[None].to(DEVICE)), fn(x[:, None], x[None]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v",
                                    "chebyshev_polynomial_w", "shifted_chebyshev_polynomial_t",
                                    "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
                                    "shifted_chebyshev_polynomial_w", "hermite_polynomial_h", "hermite_polynomial_he",
                                    "laguerre_polynomial_l", "legendre_polynomial_p"])
def test_polynomials_of_a_degree_per_element(family):
    fn = getattr(torch.special, family)
    x = torch.tensor([-1.5, -1.0, -0.6, 0.0, 0.25, 0.5, 1.0, 1.7], dtype=torch.float64)
    n = torch.tensor([-1, 0, 1, 2, 3, 5, 9, 12])
    oracle.assert_same(fn(x[:, None].to(DEVICE), n[None].to(DEVICE)), fn(x[:, None], n[None]), rtol=1e-9, atol=1e-9)
    oracle.assert_same(fn(x.to(DEVICE), 4), fn(x, 4), rtol=1e-12, atol=1e-12)
    oracle.assert_same(fn(0.3, n.to(DEVICE)), fn(0.3, n), rtol=1e-5, atol=1e-5)
