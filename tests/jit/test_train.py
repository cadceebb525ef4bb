"""jit: the unmodified train step, and gradients through a jitted function from outside."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchax_tpu.jit import jit

DEVICE = "jax"


class Net(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)  # a bias before batch norm has only noise for a gradient
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(p)
        self.fc = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(self.drop(x.flatten(1)))


def make_step(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam single": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_train_step_follows_cpu(name):
    torch.manual_seed(0)
    ref = Net()
    model = copy.deepcopy(ref).to(DEVICE)
    data = [(torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))) for _ in range(5)]
    ref_opt, opt = OPTIMIZERS[name](ref.parameters()), OPTIMIZERS[name](model.parameters())
    ref_sched = torch.optim.lr_scheduler.StepLR(ref_opt, 2, 0.5)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    ref_step, step = make_step(ref, ref_opt), jit(make_step(model, opt))
    for x, y in data:
        a, b = ref_step(x, y), step(x.to(DEVICE), y.to(DEVICE))
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=2e-4, atol=2e-5)
        ref_sched.step()
        sched.step()
    for (k, p), (_, q) in zip(ref.state_dict().items(), model.state_dict().items()):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-3, atol=2e-4, msg=lambda m, k=k: f"{k}: {m}")
    for p, q in zip(ref.parameters(), model.parameters()):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-2, atol=1e-3)
    # With dampening the first step differs from the later ones, so it has a program of its own.
    assert step.traces == (2 if name == "dampening" else 1)
    assert model.bn.num_batches_tracked.item() == len(data)


def test_optimizer_keeps_its_settings_and_works_eagerly_afterwards():
    torch.manual_seed(0)
    ref = Net()
    model = copy.deepcopy(ref).to(DEVICE)
    ref_opt, opt = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (ref, model))
    ref_step, eager = make_step(ref, ref_opt), make_step(model, opt)
    step = jit(eager)
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))
    for i in range(4):
        ref_step(x, y)
        (step if i % 2 == 0 else eager)(x.to(DEVICE), y.to(DEVICE))
    assert opt.param_groups[0]["capturable"] is False and type(opt.param_groups[0]["lr"]) is float
    for p, q in zip(ref.parameters(), model.parameters()):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-3, atol=2e-4)
    assert step.traces == 1


def test_gradients_accumulate_without_zero_grad():
    w = nn.Parameter(torch.ones(3, device=DEVICE))
    f = jit(lambda x: (w * x).sum().backward())
    x = torch.arange(3.0).to(DEVICE)
    for n in range(1, 5):
        f(x)
        assert w.grad.tolist() == [0.0, 1.0 * n, 2.0 * n]
    assert f.traces <= 2
    w.grad = None
    f(x)
    assert w.grad.tolist() == [0.0, 1.0, 2.0]


def test_changed_hyperparameter_is_seen():
    w = nn.Parameter(torch.ones(2, device=DEVICE))
    opt = torch.optim.SGD([w], lr=0.1, weight_decay=0.0)

    @jit
    def step():
        opt.zero_grad()
        w.sum().backward()
        opt.step()

    step()
    opt.param_groups[0]["weight_decay"] = 1.0
    step()
    torch.testing.assert_close(w.detach().cpu(), torch.full((2,), 0.9 - 0.1 * (1 + 0.9)))


def test_frozen_parameters_are_seen():
    w, v = (nn.Parameter(torch.ones(2, device=DEVICE)) for _ in range(2))

    @jit
    def step():
        w.grad = v.grad = None
        (w * v).sum().backward()

    step()
    assert v.grad is not None
    v.requires_grad_(False)
    step()
    assert v.grad is None and w.grad is not None


def test_differentiable_from_outside():
    torch.manual_seed(0)
    ref = Net()
    model = copy.deepcopy(ref).to(DEVICE)
    x = torch.randn(8, 1, 8, 8)
    y = torch.randint(0, 3, (8,))
    f = jit(model)
    for _ in range(2):
        ref.zero_grad()
        model.zero_grad()
        xr, xd = x.clone().requires_grad_(), x.to(DEVICE).requires_grad_()
        F.cross_entropy(ref(xr), y).backward()
        F.cross_entropy(f(xd), y.to(DEVICE)).backward()
        torch.testing.assert_close(xd.grad.cpu(), xr.grad, rtol=1e-3, atol=1e-5)
        for p, q in zip(ref.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-5)
    assert torch.equal(model.bn.num_batches_tracked.cpu(), ref.bn.num_batches_tracked)


def test_differentiable_through_non_leaf_argument():
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    f = jit(lambda a: (a.sin(), a.detach().cos()))
    s, c = f(w * 2)
    s.sum().backward()
    torch.testing.assert_close(w.grad.cpu(), 2 * torch.cos(torch.full((3,), 2.0)))
    assert not c.requires_grad
    with torch.no_grad():
        assert not f(w * 2)[0].requires_grad


def test_grad_inside():
    f = jit(lambda x: torch.autograd.grad((x.detach().requires_grad_() ** 2).sum(), x, allow_unused=True)[0])
    assert f(torch.ones(2, device=DEVICE, requires_grad=True)) is None

    @jit
    def g(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x**3).sum(), x)[0]

    torch.testing.assert_close(g(torch.full((2,), 2.0).to(DEVICE)).cpu(), torch.full((2,), 12.0))


@pytest.mark.parametrize("reset", ["load_state_dict", "clear"])
def test_optimizer_state_replaced_between_calls(reset):
    torch.manual_seed(0)
    ref = nn.Linear(3, 3)
    model = copy.deepcopy(ref).to(DEVICE)
    ref_opt, opt = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (ref, model))

    def make(m, o):
        def step(x):
            o.zero_grad()
            loss = m(x).pow(2).mean()
            loss.backward()
            o.step()
            return loss
        return step

    ref_step, step = make(ref, ref_opt), jit(make(model, opt))
    for i in range(5):
        if i == 1:
            saved = copy.deepcopy(ref_opt.state_dict()), copy.deepcopy(opt.state_dict())
        if i == 3:
            for o, s in ((ref_opt, saved[0]), (opt, saved[1])):
                o.load_state_dict(s) if reset == "load_state_dict" else o.state.clear()
        x = torch.randn(4, 3)
        torch.testing.assert_close(step(x.to(DEVICE)).cpu(), ref_step(x).detach(), rtol=1e-4, atol=1e-5)
        for p, q in zip(ref.parameters(), model.parameters()):
            torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-4, atol=1e-5)
