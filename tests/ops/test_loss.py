"""Losses: the op database, class targets with weights and ignored rows, margins, extremes, half precision."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests import ledger, oracle

DEVICE = oracle.DEVICE
NAMES = [f"nn.functional.{n}" for n in (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "nll_loss", "cross_entropy", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "poisson_nll_loss", "gaussian_nll_loss",
    "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss",
    "triplet_margin_with_distance_loss", "ctc_loss")]


@pytest.mark.parametrize("mode", ["forward", "grad"])
@pytest.mark.parametrize("name", NAMES)
def test_op_database(name, mode):
    op = oracle.ops([name])[0]
    assert oracle.applicable(op, mode, torch.float32)
    assert ledger.check(mode, name, "float32", lambda **kw: oracle.CHECKS[mode](op, torch.float32, limit=8, **kw)) != 0


def both(fn, tensors, rtol=1e-4, atol=1e-6):
    """fn on CPU and on the device, forward and gradients by its first tensor."""
    results = []
    for device in ("cpu", DEVICE):
        moved = [None if t is None else t.detach().clone().to(device) for t in tensors]
        moved[0].requires_grad_()
        out = fn(*moved)
        cotangent = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
        results.append((out, torch.autograd.grad(out, moved[0], cotangent.to(device))))
    oracle.assert_same(results[1], results[0], rtol, atol)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3), (2, 5, 3, 4), (5,)], ids=str)
def test_cross_entropy(shape, weighted, reduction):
    torch.manual_seed(0)
    x = torch.randn(shape)
    target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if target.dim():
        target.view(-1)[1] = -100
    weight = torch.rand(5) + 0.1 if weighted else None
    for smoothing in (0.0, 0.2):
        both(lambda a, t, w, s=smoothing: F.cross_entropy(a, t, w, reduction=reduction, label_smoothing=s),
             (x, target, weight))
    both(lambda a, t, w: F.cross_entropy(a, t, w, reduction=reduction, ignore_index=2), (x, target.clamp(min=0), weight))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_with_probabilities(smoothing):
    torch.manual_seed(0)
    x, target = torch.randn(4, 5, 3), torch.randn(4, 5, 3).softmax(1)
    both(lambda a, t, w: F.cross_entropy(a, t, w, label_smoothing=smoothing), (x, target, torch.rand(5)))


def test_cross_entropy_with_every_target_ignored():
    x, target = torch.randn(3, 4), torch.full((3,), -100)
    both(lambda a, t: F.cross_entropy(a, t), (x, target))
    both(lambda a, t: F.cross_entropy(a, t, reduction="sum"), (x, target))


def test_a_target_that_names_no_class_gives_nan():
    loss = F.nll_loss(torch.randn(3, 4).to(DEVICE), torch.tensor([0, 7, 1]).to(DEVICE), reduction="none")
    assert loss.isnan().tolist() == [False, True, False]


def test_nll_backward_has_no_scatter():
    """The gradient of cross entropy is a comparison with an iota: no scatter, no gather in the program."""
    import jax
    import jax.numpy as jnp

    from torchax_tpu.ops import loss

    x, t = jnp.zeros((4, 7)), jnp.zeros((4,), jnp.int32)
    text = str(jax.make_jaxpr(lambda x, t: loss.nll_loss_backward(
        jnp.ones(()), x, t, None, 1, -100, loss.nll_loss_forward(x, t, None, 1, -100)[1]))(x, t))
    assert "scatter" not in text and "gather" not in text


@pytest.mark.parametrize("p,reduction", list(itertools.product([1, 2], ["none", "mean", "sum"])))
@pytest.mark.parametrize("shape", [(4, 5), (5,)], ids=str)
def test_multi_margin(shape, p, reduction):
    torch.manual_seed(0)
    target = torch.randint(0, 5, shape[:-1])
    both(lambda x, t, w: F.multi_margin_loss(x, t, p=p, margin=0.7, weight=w, reduction=reduction),
         (torch.randn(shape), target, torch.rand(5)))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multilabel_margin(reduction):
    torch.manual_seed(0)
    target = torch.tensor([[3, 0, -1, 1], [-1, 2, 1, 0], [0, 1, 2, 3], [2, 2, -1, -1]])
    both(lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), (torch.randn(4, 4), target))
    both(lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), (torch.randn(4), target[0]))


def test_extremes():
    """Saturated probabilities and logits, zero beta, equal values."""
    p = torch.tensor([0.0, 1.0, 0.5, 1e-30])
    both(lambda a, t: F.binary_cross_entropy(a, t), (p, torch.tensor([0.0, 1.0, 1.0, 1.0])))
    both(lambda a, t: F.binary_cross_entropy_with_logits(a, t), (torch.tensor([100.0, -100.0, 0.0]), torch.ones(3)))
    x = torch.tensor([1.0, 1.0, -2.0])
    both(lambda a, t: F.smooth_l1_loss(a, t, beta=0.0), (x, torch.ones(3)))
    both(lambda a, t: F.huber_loss(a, t, delta=0.5), (x, torch.ones(3)))
    both(lambda a, t: F.mse_loss(a, t), (torch.zeros(0), torch.zeros(0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=lambda d: str(d)[6:])
def test_other_dtypes(dtype):
    torch.manual_seed(0)
    x, y, t = torch.randn(6, 5, dtype=dtype), torch.rand(6, 5, dtype=dtype), torch.randint(0, 5, (6,))
    tolerance = (1e-9, 1e-10) if dtype == torch.float64 else (2e-2, 2e-2)
    both(lambda a, b: F.cross_entropy(a, b), (x, t), *tolerance)
    both(lambda a, b: F.mse_loss(a, b), (x, y), *tolerance)
    both(lambda a, b: F.binary_cross_entropy_with_logits(a, b), (x, y), *tolerance)
    both(lambda a, b: F.smooth_l1_loss(a, b), (x, y), *tolerance)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_cross_entropy(bias, reduction):
    """torch's chunked op in one program: chunks that don't divide the rows, ignored rows, class weights."""
    torch.manual_seed(0)
    loss = torch.nn.LinearCrossEntropyLoss(6, 9, bias=bias, reduction=reduction)
    import copy
    twin = copy.deepcopy(loss).to(DEVICE)
    x, t = torch.randn(7, 6), torch.tensor([0, 8, -100, 3, 3, 1, 5])
    results = []
    for m, device in ((loss, "cpu"), (twin, DEVICE)):
        y = x.clone().to(device).requires_grad_()
        out = m(y, t.to(device))
        out.sum().backward()
        results.append((out, y.grad, [p.grad for p in m.parameters()]))
    oracle.assert_same(results[1], results[0], 1e-4, 1e-6)


@pytest.mark.parametrize("call", [
    lambda x: F.nll_loss(x, torch.zeros(3, dtype=torch.long, device=x.device)),
    lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device), x[0, :3]),
    lambda x: F.multi_margin_loss(x, torch.zeros(4, dtype=torch.long, device=x.device), p=3),
    lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 2, dtype=torch.long, device=x.device)),
    lambda x: F.binary_cross_entropy(x.sigmoid(), x[:2])])
def test_refuses_as_torch_does(call):
    x = torch.randn(4, 5)
    with pytest.raises(Exception) as cpu:
        call(x)
    with pytest.raises(cpu.type):
        call(x.to(DEVICE))
