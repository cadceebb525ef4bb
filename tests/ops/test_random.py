"""Random draws: same seed, same numbers; moments and distributions at fixed seeds; corners of dtype and range."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats

import torchax_tpu
from tests import oracle

DEV = oracle.DEVICE
N = 20000


def fits(sample, cdf):
    """Kolmogorov-Smirnov: the seed is fixed, so this either always holds or never."""
    return stats.kstest(sample.double().cpu().numpy(), cdf).pvalue > 1e-3


def counts_fit(sample, probabilities):
    """Chi-square of integer draws 0 .. k-1 against their probabilities (the last takes the tail)."""
    k = len(probabilities)
    seen = torch.bincount(sample.cpu().long().clamp(max=k - 1), minlength=k).double()
    return stats.chisquare(seen.numpy(), [p * sample.numel() for p in probabilities]).pvalue > 1e-3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


def new(dtype=torch.float32, n=N):
    return torch.empty(n, dtype=dtype, device=DEV)


CONTINUOUS = {
    "rand": (lambda: torch.rand(N, device=DEV), stats.uniform.cdf),
    "randn": (lambda: torch.randn(N, device=DEV), stats.norm.cdf),
    "randn64": (lambda: torch.randn(N, device=DEV, dtype=torch.float64), stats.norm.cdf),
    "rand_like": (lambda: torch.rand_like(new()), stats.uniform.cdf),
    "uniform_": (lambda: new().uniform_(-2, 3), stats.uniform(-2, 5).cdf),
    "normal_": (lambda: new().normal_(1, 3), stats.norm(1, 3).cdf),
    "normal tensors": (lambda: torch.normal(torch.full((N,), 2.0, device=DEV), torch.full((N,), 0.5, device=DEV)),
                       stats.norm(2, 0.5).cdf),
    "exponential_": (lambda: new().exponential_(2.5), stats.expon(scale=0.4).cdf),
    "cauchy_": (lambda: new().cauchy_(1, 2), stats.cauchy(1, 2).cdf),
    "log_normal_": (lambda: new().log_normal_(0.3, 0.7), stats.lognorm(0.7, scale=math.exp(0.3)).cdf),
    "gamma": (lambda: torch._standard_gamma(torch.full((N,), 0.6, device=DEV)), stats.gamma(0.6).cdf),
    "Beta": (lambda: torch.distributions.Beta(torch.tensor(2., device=DEV), torch.tensor(3., device=DEV)).sample((N,)),
             stats.beta(2, 3).cdf),
    "StudentT": (lambda: torch.distributions.StudentT(torch.tensor(4., device=DEV)).sample((N,)), stats.t(4).cdf),
    "Laplace": (lambda: torch.distributions.Laplace(torch.tensor(0., device=DEV), torch.tensor(1., device=DEV)).sample((N,)),
                stats.laplace.cdf),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name):
    draw, cdf = CONTINUOUS[name]
    assert fits(draw(), cdf)


DISCRETE = {
    "randint": (lambda: torch.randint(0, 6, (N,), device=DEV), [1 / 6] * 6),
    "random_": (lambda: new(torch.uint8).random_(0, 5), [0.2] * 5),
    "random_ bool": (lambda: new(torch.bool).random_(), [0.5, 0.5]),
    "bernoulli_": (lambda: new().bernoulli_(0.3), [0.7, 0.3]),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.2, device=DEV, dtype=torch.bfloat16)), [0.8, 0.2]),
    "geometric_": (lambda: new(torch.int64).geometric_(0.4) - 1, [0.4, 0.24, 0.144, 0.216]),
    "poisson": (lambda: torch.poisson(torch.full((N,), 1.5, device=DEV)), [*stats.poisson(1.5).pmf(range(5)), stats.poisson(1.5).sf(4)]),
    "binomial": (lambda: torch.binomial(torch.full((N,), 4.0, device=DEV), torch.full((N,), 0.3, device=DEV)),
                 list(stats.binom(4, 0.3).pmf(range(5)))),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1., 2, 0, 5], device=DEV), N, True).where(
        torch.tensor(True, device=DEV), torch.tensor(0, device=DEV)), None),
    "Categorical": (lambda: torch.distributions.Categorical(torch.tensor([.1, .2, .7], device=DEV)).sample((N,)), [.1, .2, .7]),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete(name):
    draw, probabilities = DISCRETE[name]
    sample = draw()
    if probabilities is None:
        assert not (sample == 2).any()
        sample, probabilities = torch.where(sample == 3, 2, sample), [1 / 8, 2 / 8, 5 / 8]
    assert counts_fit(sample, probabilities)


def test_same_seed_same_numbers_and_two_draws_differ():
    def draw():
        return torch.randn(5, device=DEV).tolist(), new(n=5).uniform_().tolist(), torch.randint(9999, (5,), device=DEV).tolist()
    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert draw() == first and draw() == second and first != second


def test_state_can_be_saved_and_put_back():
    state = torch.jax.get_rng_state() if hasattr(torch, "jax") else None
    a = torch.rand(4, device=DEV).tolist()
    torch.jax.set_rng_state(state)
    assert torch.rand(4, device=DEV).tolist() == a
    with torch.random.fork_rng(devices=[0], device_type=DEV):
        inside = torch.rand(4, device=DEV).tolist()
    assert torch.rand(4, device=DEV).tolist() == inside


@pytest.mark.parametrize("make", [torch.Generator, lambda: torchax_tpu.Generator(DEV)])
def test_generators_lead_and_advance(make):
    def draws(g):
        return [torch.rand(3, device=DEV, generator=g).tolist(), torch.randperm(9, device=DEV, generator=g).tolist(),
                new(n=3).normal_(generator=g).tolist(), torch.poisson(torch.ones(9, device=DEV) * 4, generator=g).tolist(),
                torch.multinomial(torch.ones(50, device=DEV), 5, generator=g).tolist()]
    g = make()
    g.manual_seed(11)
    first, second = draws(g), draws(g)
    g.manual_seed(11)
    torch.manual_seed(99)
    assert draws(g) == first and draws(g) == second
    assert all(a != b for a, b in zip(first, second))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_stays_below_its_end(dtype):
    for t in (torch.rand(100000, dtype=dtype, device=DEV), new(dtype, 100000).uniform_(1, 2)):
        low = t.min().item()
        assert low >= (1 if low >= 0.99 else 0) and t.max().item() < (2 if low >= 0.99 else 1)
    assert (new(dtype, 100000).exponential_() >= 0).all()


def test_integer_ranges():
    full = new(torch.int64).random_(-2**63, None).double()
    assert full.min() < -9e18 and full.max() > 9e18 and abs(full.mean()) < 2e17
    wide = torch.randint(-2**63, 2**63 - 1, (N,), device=DEV)
    assert wide.min() < -9 * 10**18 and wide.max() > 9 * 10**18
    for dtype, top in ((torch.uint8, 255), (torch.int8, 127), (torch.int16, 2**15 - 1), (torch.int64, 2**63 - 1),
                       (torch.bfloat16, 2**8), (torch.float16, 2**11), (torch.float32, 2**24), (torch.float64, 2**53)):
        t = new(dtype).random_()
        assert t.min() >= 0 and float(t.max()) <= top and float(t.max()) > 0.98 * top
    for low, high in ((-5, -2), (2**40, 2**40 + 3), (-2**31, 2**31)):
        t = torch.randint(low, high, (N,), device=DEV)
        assert low <= int(t.min()) and int(t.max()) < high
        if high - low < 10:
            assert t.unique().tolist() == list(range(low, high))


def test_randperm_and_sampling_without_replacement():
    assert torch.randperm(1000, device=DEV).sort()[0].tolist() == list(range(1000))
    picks = torch.multinomial(torch.tensor([0., 1, 2, 0, 3, 4], device=DEV).expand(500, 6), 4)
    assert (picks.sort(1)[0].cpu() == torch.tensor([1, 2, 4, 5])).all()
    first = torch.multinomial(torch.tensor([1., 2, 5], device=DEV).expand(N, 3), 2)[:, 0]
    assert counts_fit(first, [1 / 8, 2 / 8, 5 / 8])


def test_many_draws_never_pick_zero_weight():
    weights = torch.rand(5000, device=DEV) * (torch.rand(5000, device=DEV) < 0.1)
    picks = torch.multinomial(weights, 100000, True)
    assert (weights[picks] > 0).all() and picks.unique().numel() > 400


def test_what_torch_refuses_gives_no_answer():
    assert torch.bernoulli(torch.full((3,), 2.0, device=DEV)).isnan().all()
    assert torch.poisson(torch.full((3,), -1.0, device=DEV)).isnan().all()
    assert torch.normal(torch.zeros(3, device=DEV), torch.full((3,), -1.0, device=DEV)).isnan().all()
    assert (torch.multinomial(torch.zeros(3, device=DEV), 1) == torch.iinfo(torch.int64).min).all()


REFUSED = """new().normal_(0, -1) | new().uniform_(2, 1) | new().exponential_(-1) | new().geometric_(2) | new().cauchy_(0, -1)
new().log_normal_(0, -1) | new().bernoulli_(2) | new(torch.int64).uniform_() | new(torch.int64).normal_() | new(torch.uint8).random_(0, 300)
new(torch.int64).random_(5, 3) | torch.rand(2, dtype=torch.int64, device=d) | torch.randint(5, 5, (2,), device=d) | torch.randperm(-1, device=d)
torch.randint(0, 300, (2,), dtype=torch.uint8, device=d) | torch.normal(torch.zeros(3, device=d), -1.) | torch.multinomial(torch.ones(3, device=d), 5)
torch.multinomial(torch.ones(3, device=d), 0) | torch.multinomial(torch.ones(3, 2, 2, device=d), 1) | torch.multinomial(torch.ones(3, device=d).long(), 1)
torch.bernoulli(torch.ones(3, device=d).long()) | torch.normal(torch.zeros(3, device=d), torch.ones(2, device=d)) | F.dropout(torch.ones(3, device=d), 1.5)"""


@pytest.mark.parametrize("expression", [e.strip() for line in REFUSED.splitlines() for e in line.split("|")])
def test_same_error(expression):
    errors = []
    for d in ("cpu", DEV):
        with pytest.raises(Exception) as e:
            eval(expression, {"torch": torch, "F": F, "d": d, "new": lambda dt=torch.float32, d=d: torch.empty(9, dtype=dt, device=d)})
        errors.append(e.type)
    assert errors[0] is errors[1]


def test_dropout():
    x = torch.ones(N, device=DEV, requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert y.grad_fn.name().startswith("NativeDropout")
    kept = (y != 0).double().mean().item()
    assert abs(kept - 0.75) < 0.02 and torch.equal(x.grad, y.detach())
    assert torch.allclose(y.max().cpu(), torch.tensor(4 / 3))
    assert F.dropout(x, 0.5, training=False) is x or torch.equal(F.dropout(x, 0.5, training=False), x)
    assert not F.dropout(x, 1.0).any()
    assert F.dropout(torch.full((3,), math.nan, device=DEV), 0.9).isnan().all()
    with torch.inference_mode():
        assert abs((F.dropout(torch.ones(N, device=DEV), 0.5) != 0).double().mean().item() - 0.5) < 0.02
    planes = F.dropout2d(torch.ones(200, 10, 3, 3, device=DEV), 0.5)
    assert ((planes == 0).flatten(2).all(2) | (planes == 2).flatten(2).all(2)).all()
    z = F.alpha_dropout(torch.randn(N, device=DEV), 0.2)
    assert abs(z.mean().item()) < 0.05 and abs(z.std().item() - 1) < 0.05
    r = F.rrelu(-torch.ones(N, device=DEV), 0.1, 0.3, training=True)
    assert fits(-r, stats.uniform(0.1, 0.2).cdf)


def test_gradients_of_draws():
    alpha = torch.tensor([0.4, 1.5, 6.0, 30.0])
    x = torch.tensor([0.3, 1.2, 7.0, 28.0])
    oracle.assert_same(torch._standard_gamma_grad(alpha.to(DEV), x.to(DEV)), torch._standard_gamma_grad(alpha, x), 1e-3, 1e-4)
    p = torch.tensor([0.001, 0.1, 0.3, 0.6, 0.9, 0.999])
    for a, total in ((0.3, 1.0), (2.0, 5.0), (8.0, 20.0), (30.0, 35.0)):
        a, total = torch.full((6,), a), torch.full((6,), total)
        keep = torch.distributions.Beta(a, total - a).log_prob(p) > -12  # elsewhere no draw comes
        oracle.assert_same(torch._dirichlet_grad(p.to(DEV), a.to(DEV), total.to(DEV)).cpu()[keep],
                           torch._dirichlet_grad(p, a, total)[keep], 1e-2, 1e-3)
    c = torch.tensor([1.0, 2.0, 3.0], device=DEV, requires_grad=True)
    s = torch.distributions.Dirichlet(c).rsample((2000,))
    assert torch.allclose(s.sum(1).cpu(), torch.ones(2000)) and torch.allclose(s.mean(0).cpu(), torch.tensor([1., 2, 3]) / 6, atol=0.02)
    s[:, 0].mean().backward()
    assert torch.allclose(c.grad.cpu(), torch.tensor([5., -1, -1]) / 36, atol=0.02)  # d (a/(a+b+c)) / d (a, b, c)


def test_complex_normal_has_unit_variance():
    z = torch.randn(N, dtype=torch.complex64, device=DEV)
    assert abs(z.abs().square().mean().item() - 1) < 0.03 and abs(z.real.var().item() - 0.5) < 0.03


def test_a_jitted_function_draws_what_eager_draws():
    def draw(x):
        return (F.dropout(x, 0.5), torch.randint(0, 10, (4,), device=DEV), torch.empty(3, device=DEV).exponential_(2.0),
                torch.multinomial(torch.ones(5, device=DEV), 3), torch.randperm(6, device=DEV))
    x = torch.ones(8, device=DEV)
    torch.manual_seed(1)
    first, second = draw(x), draw(x)
    jitted = torchax_tpu.jit(draw)
    torch.manual_seed(1)
    oracle.assert_same([jitted(x), jitted(x)], [oracle.to_cpu(first), oracle.to_cpu(second)])


def test_a_tensor_filled_within_a_jitted_function_is_new_at_each_call():
    jitted = torchax_tpu.jit(lambda x: torch.empty(3, device=DEV).copy_(x))
    results = [jitted(torch.full((3,), v, device=DEV)) for v in (1.0, 2.0)]
    assert [r.tolist() for r in results] == [[1.0] * 3, [2.0] * 3]
