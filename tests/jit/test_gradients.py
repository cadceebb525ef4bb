"""What becomes of `.grad` around a jitted function: whatever the order of calls, as without jit."""

import numpy as np
import pytest
import torch

import torchax_tpu
from torchax_tpu.errors import TraceError


def _make(device, optimizer="sgd"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(device)
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adam": lambda p: torch.optim.AdamW(p, lr=0.01)}
    return model, make[optimizer](model.parameters()), torch.linspace(-1, 1, 12, device=device).view(4, 3)


def _grads(model):
    return [None if p.grad is None else p.grad.detach().cpu().clone() for p in model.parameters()]


def _reset_last(model, optimizer, x):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return step


def _reset_first(model, optimizer, x):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step


def _step_first(model, optimizer, x):
    def step(x):
        optimizer.step()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()
    return step


def _by_hand(model, optimizer, x):
    def step(x):
        for p in model.parameters():
            p.grad = None
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        return loss.detach()
    return step


def _by_hand_last(model, optimizer, x):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss.detach()
    return step


def _accumulate(model, optimizer, x):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()
    return step


def _zeros(model, optimizer, x):
    def step(x):
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step


def _update(model, optimizer, x):
    def step(x):
        optimizer.step()
        optimizer.zero_grad()
        return x.sum()
    return step


STEPS = [_reset_last, _reset_first, _step_first, _by_hand, _by_hand_last, _accumulate, _zeros, _update]


def _follow(device, make, optimizer, wrap):
    """The same calls around a step: alone, after an outside backward, after a reset, twice after each."""
    model, optimizer, x = _make(device, optimizer)
    step, record, held = wrap(make(model, optimizer, x)), [], []
    for act in ("", "", "backward", "", "reset", "", "backward", "backward", "", "zeros", "replace", ""):
        if act == "backward":
            (model(x) * 3).sum().backward()
        elif act in ("reset", "zeros"):
            optimizer.zero_grad(set_to_none=act == "reset")
        elif act == "replace":
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        held.append([p.grad for p in model.parameters()])  # somebody keeps the gradients of before
        record.append((step(x).cpu(), _grads(model), [p.detach().cpu().clone() for p in model.parameters()]))
    return record, [[None if g is None else g.cpu() for g in grads] for grads in held], step


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("make", STEPS, ids=lambda f: f.__name__[1:])
def test_any_order_of_calls_is_as_without_jit(make, optimizer):
    expected, held, _ = _follow("cpu", make, optimizer, lambda f: f)
    record, kept, step = _follow("jax", make, optimizer, torchax_tpu.jit)
    torch.testing.assert_close(record, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept, held, rtol=1e-4, atol=1e-5)
    assert step.traces <= 3


def test_an_update_of_outside_gradients_is_traced_once():
    model, optimizer, x = _make("jax")
    update = torchax_tpu.jit(_update(model, optimizer, x))
    other, reference, y = _make("cpu")
    for _ in range(4):
        model(x).square().sum().backward()
        update(x)
        other(y).square().sum().backward()
        reference.step()
        reference.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close([p.detach().cpu() for p in model.parameters()], [p.detach() for p in other.parameters()])
    assert update.traces == 1


class Trainer:
    def __init__(self, model):
        self.model = model

    def norm(self):
        return sum(p.grad.square().sum() for p in self.model.parameters())


@pytest.mark.parametrize("route", ["closure", "method"])
def test_a_function_that_only_reads_gradients(route):
    model, _, x = _make("jax")

    def norm():
        return sum(p.grad.square().sum() for p in model.parameters())

    norm = torchax_tpu.jit(norm if route == "closure" else Trainer(model).norm)
    for scale in (1.0, 2.0, 3.0):
        model.zero_grad()
        (model(x) * scale).sum().backward()
        want = sum(p.grad.square().sum() for p in model.parameters())
        torch.testing.assert_close(norm(), want)
    assert norm.traces == 1


@pytest.mark.parametrize("hold", ["tensor", "view", "detached", "storage", "array", "nothing"])
def test_a_gradient_that_somebody_holds_stays(hold):
    model, optimizer, x = _make("jax")
    step = torchax_tpu.jit(_reset_first(model, optimizer, x))
    step(x)
    weight = model[0].weight
    keep = {"tensor": lambda g: g, "view": lambda g: g[1:], "detached": lambda g: g.detach(), "array": lambda g: g.jax(),
            "storage": lambda g: g.untyped_storage(), "nothing": lambda g: None}[hold]
    for _ in range(3):
        held, before = keep(weight.grad), weight.grad.cpu().clone()
        step(x)
        assert not torch.equal(weight.grad.cpu(), before)
        if hold == "storage":
            held = torch.empty(0, device="jax").set_(held, 0, (4, 3), (3, 1))
        if held is not None:
            got = torch.from_numpy(np.array(held)) if hold == "array" else held.cpu()
            assert torch.equal(got, before[1:] if hold == "view" else before)
    assert step.traces == 1


def test_a_gradient_changed_by_its_reader_starts_anew():
    model, optimizer, x = _make("jax")
    step = torchax_tpu.jit(_reset_first(model, optimizer, x))
    step(x)
    model[0].weight.grad.requires_grad_()
    model[0].bias.grad.resize_(2)
    step(x)
    assert not model[0].weight.grad.requires_grad
    assert model[0].bias.grad.shape == (4,)


def test_a_result_that_is_the_gradient_shares_its_storage():
    model, optimizer, x = _make("jax")

    @torchax_tpu.jit
    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        return model[0].weight.grad

    for _ in range(2):
        grad = step(x)
        grad.zero_()
        assert model[0].weight.grad.abs().sum().item() == 0


def test_zero_grad_without_backward_leaves_the_result_differentiable():
    model, optimizer, x = _make("jax")

    @torchax_tpu.jit
    def loss(x):
        optimizer.zero_grad()
        return model(x).sum()

    for _ in range(2):
        loss(x).backward()
        torch.testing.assert_close(model[2].bias.grad.cpu(), torch.full((2,), 4.0))


def test_an_error_while_tracing_leaves_gradients_as_they_were():
    model, optimizer, x = _make("jax")
    model(x).sum().backward()
    before = [p.grad for p in model.parameters()]
    values = _grads(model)

    @torchax_tpu.jit
    def step(x):
        model(x).sum().backward()
        optimizer.zero_grad()
        return model(x).sum().item()

    with pytest.raises(TraceError):
        step(x)
    assert all(p.grad is g for p, g in zip(model.parameters(), before))
    torch.testing.assert_close(_grads(model), values)


def test_gradients_that_the_step_resets_last_are_no_output():
    model, optimizer, x = _make("jax")
    steps = [torchax_tpu.jit(make(model, optimizer, x)) for make in (_reset_last, _reset_first)]
    for step in steps:
        step(x)
        optimizer.zero_grad()
    without, within = (len(jaxpr_outputs(step, x)) for step in steps)
    assert within - without == len(list(model.parameters()))


def jaxpr_outputs(step, x):
    import jax

    pure, avals, _ = step.lower_for(x)
    return jax.make_jaxpr(pure)(*avals).out_avals
