"""Activations, softmax and their backward ops against CPU torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests import ledger, oracle

DEVICE = oracle.DEVICE
NAMES = ["nn.functional.relu", "nn.functional.relu6", "nn.functional.gelu", "nn.functional.silu", "nn.functional.elu", "nn.functional.celu", "nn.functional.selu", "nn.functional.hardtanh", "nn.functional.hardswish", "nn.functional.hardsigmoid", "nn.functional.hardshrink", "nn.functional.leaky_relu", "nn.functional.prelu", "nn.functional.softplus", "nn.functional.softshrink", "nn.functional.softsign", "nn.functional.softmin", "nn.functional.threshold", "nn.functional.logsigmoid", "nn.functional.glu", "nn.functional.mish", "nn.functional.tanhshrink", "softmax", "softmax.with_dtype", "log_softmax", "log_softmax.with_dtype", "logit", "sigmoid", "tanh", "_softmax_backward_data"]
OPS = [o for o in oracle.ops(set(NAMES)) if oracle.full_name(o) in NAMES]
CASES = [(mode, o, d) for o in OPS for mode, d in (("forward", torch.float32), ("grad", torch.float32), ("inplace", torch.float32),
                                                  ("out", torch.float32), ("forward", torch.bfloat16), ("grad", torch.float64))
         if oracle.applicable(o, mode, d)]


@pytest.mark.parametrize("mode,op,dtype", CASES, ids=lambda x: x if isinstance(x, str) else str(
    x).removeprefix("torch.") if isinstance(x, torch.dtype) else oracle.full_name(x))
def test_database(mode, op, dtype):
    ledger.check(mode, oracle.full_name(op), str(dtype).removeprefix("torch."),
                 lambda **kw: oracle.CHECKS[mode](op, dtype, limit=3, **kw))


def test_the_names_exist():
    assert {oracle.full_name(o) for o in OPS} == set(NAMES)


ACTIVATIONS = {
    "relu": F.relu, "relu6": F.relu6, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "elu": lambda x: F.elu(x, 0.7), "celu": lambda x: F.celu(x, 0.7), "selu": F.selu, "hardtanh": lambda x: F.hardtanh(x, -0.5, 2),
    "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "hardshrink": F.hardshrink, "softshrink": F.softshrink,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "softplus": lambda x: F.softplus(x, 2, 5), "mish": F.mish,
    "threshold": lambda x: F.threshold(x, 0.1, 20), "logsigmoid": F.logsigmoid, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "logit": lambda x: torch.logit(x, 0.1), "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, training=False),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients_at_the_corners(name):
    values = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 2.5, 100.0, -100.0, math.inf, -math.inf, math.nan]
    if name in ("mish", "gelu", "gelu_tanh", "silu", "hardswish"):
        values = [v for v in values if not math.isinf(v)]  # inf * 0: torch's own forms differ between vector and scalar code
    results = []
    for device in ("cpu", DEVICE):
        x = torch.tensor(values, device=device).requires_grad_()
        y = ACTIVATIONS[name](x)
        y.sum().backward()
        results.append((y, x.grad))
    oracle.assert_same(results[1], results[0], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "elu", "softplus", "silu", "mish", "hardsigmoid", "leaky_relu", "logsigmoid"])
def test_integers_are_refused(name):
    x = torch.tensor([1, 2])
    with pytest.raises((RuntimeError, NotImplementedError)):
        ACTIVATIONS[name](x)
    with pytest.raises((RuntimeError, NotImplementedError)):
        ACTIVATIONS[name](x.to(DEVICE))


def test_rrelu_in_training_draws_slopes_and_passes_gradients():
    x = torch.full((1000,), -1.0, device=DEVICE).requires_grad_()
    torch.manual_seed(0)
    y = F.rrelu(x, 0.2, 0.4, training=True)
    y.sum().backward()
    slopes = -y.detach().cpu()
    assert slopes.min() >= 0.2 and slopes.max() <= 0.4 and slopes.std() > 0.04
    oracle.assert_same(x.grad, slopes)
    torch.manual_seed(0)
    oracle.assert_same(F.rrelu(x.detach(), 0.2, 0.4, training=True), y)
    oracle.assert_same(F.rrelu(x.detach().abs(), 0.2, 0.4, training=True), torch.ones(1000))
    z = x.detach().clone()
    F.rrelu(z, 0.2, 0.4, training=True, inplace=True)
    assert z.max() <= -0.2


def test_softmax_of_rows_without_any_finite_value():
    x = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf], [1e4, -1e4]])
    for fn in (torch.softmax, torch.log_softmax):
        oracle.assert_same(fn(x.to(DEVICE), 1), fn(x, 1))
    oracle.assert_same(torch.softmax(torch.zeros(0, 3, device=DEVICE), 0), torch.softmax(torch.zeros(0, 3), 0))
    oracle.assert_same(torch.softmax(torch.tensor(2.0, device=DEVICE), 0), torch.tensor(1.0))


def test_softmax_computes_halves_in_float32():
    x = torch.randn(4, 512).to(torch.bfloat16)
    got, want = torch.softmax(x.to(DEVICE), -1), torch.softmax(x.double(), -1)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu().double(), want, rtol=4e-3, atol=1e-6)
    assert torch.softmax(x.to(DEVICE), -1, dtype=torch.float32).dtype == torch.float32


def test_in_place_on_a_view():
    results = []
    for device in ("cpu", DEVICE):
        x = torch.linspace(-2, 2, 12).reshape(3, 4).to(device)
        F.relu_(x[1])
        F.elu_(x[:, 0])
        F.leaky_relu_(x.t()[2], 0.5)
        results.append(x)
    oracle.assert_same(results[1], results[0])


def test_forward_mode_of_glu():
    from torch.func import grad, jvp
    x, v = torch.randn(3, 4), torch.randn(3, 4)
    results = [jvp(grad(lambda t: (F.glu(t) ** 2).sum()), (x.to(d),), (v.to(d),)) for d in ("cpu", DEVICE)]
    oracle.assert_same(results[1], results[0], rtol=1e-5, atol=1e-6)
