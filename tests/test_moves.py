"""Modules and parameters that change device or dtype: the objects, what hangs on them, and autograd graphs that are alive."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

DEVICE = "jax"
MOVES = {
    "cpu to jax": ("cpu", lambda m: m.to(DEVICE)),
    "jax to cpu": (DEVICE, lambda m: m.cpu()),
    "jax half": (DEVICE, lambda m: m.half()),
    "jax double": (DEVICE, lambda m: m.to(torch.float64)),
    "jax stays": (DEVICE, lambda m: m.to(DEVICE)),
    "jax layout": (DEVICE, lambda m: m.to(memory_format=torch.channels_last)),
}


def ones(m, *size):
    p = next(m.parameters())
    return torch.ones(size, device=p.device, dtype=p.dtype)


@pytest.mark.parametrize("held", [False, True], ids=["no grad yet", "grad"])
@pytest.mark.parametrize("move", MOVES)
def test_a_live_graph_still_gives_its_gradients(move, held):
    source, go = MOVES[move]
    m = nn.Conv2d(1, 2, 1).to(source)
    if held:
        m(ones(m, 1, 1, 2, 2)).sum().backward()
    x = ones(m, 1, 1, 2, 2).requires_grad_()
    y, p = m(x), m.weight
    slope = p.detach().sum().item()
    go(m)
    assert m.weight is p
    y.sum().backward()
    for q in m.parameters():
        assert q.grad.device == q.device and q.grad.dtype == q.dtype
        assert q.grad.flatten().tolist() == [4.0 * (1 + held)] * 2
    assert x.grad.flatten().tolist() == pytest.approx([slope] * 4)
    m(ones(m, 1, 1, 2, 2)).sum().backward()
    assert m.weight.grad.flatten().tolist() == [4.0 * (2 + held)] * 2


def test_a_graph_outlives_several_moves():
    m = nn.Linear(2, 1)
    y = m(torch.ones(1, 2))
    m.to(DEVICE).double().cpu().to(DEVICE)
    z = m(ones(m, 1, 2))
    y.backward()
    z.backward()
    assert m.weight.grad.tolist() == [[2.0, 2.0]] and m.weight.grad.dtype is torch.float64
    assert m.weight.grad.device.type == DEVICE


def test_second_derivatives_of_a_live_graph():
    p = nn.Parameter(torch.tensor([3.0]))
    m = nn.Module()
    m.p = p
    y = (p ** 3).sum()
    m.to(DEVICE)
    y.backward(create_graph=True)
    assert p.grad.device.type == DEVICE and p.grad.requires_grad and p.grad.item() == 27.0


@pytest.mark.parametrize("source,target", [("cpu", DEVICE), (DEVICE, "cpu")])
def test_ties_optimizers_and_objects(source, target):
    m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(source)
    m[1].weight = m[0].weight
    optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
    reference, objects = weakref.ref(m[0].weight), list(m.parameters())
    kept = m(ones(m, 1, 2)), m[0].weight[0]  # a graph and a view that go on living
    m.to(target)
    assert reference() is m[0].weight is m[1].weight and all(a is b for a, b in zip(objects, m.parameters()))
    assert isinstance(m[0].weight, nn.Parameter) and m[0].weight.is_leaf and m[0].weight.requires_grad
    before = m[0].weight.detach().clone()
    m(ones(m, 1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(m[0].weight.detach(), before - m[0].weight.grad)
    assert kept[1].device.type == source


@pytest.mark.parametrize("source,target", [("cpu", DEVICE), (DEVICE, "cpu"), (DEVICE, torch.float64)])
def test_hooks_and_attributes_stay(source, target):
    m, calls = nn.Linear(2, 2).to(source), []
    m.weight.tag = "mine"
    handle = m.weight.register_hook(lambda g: calls.append("hook"))
    m.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p is m.weight))
    kept = m(ones(m, 1, 2))
    m.to(target)
    assert m.weight.tag == "mine"
    m(ones(m, 1, 2)).sum().backward()
    assert calls == ["hook", True]
    kept.sum().backward()
    assert calls == ["hook", True] * 2
    handle.remove()
    m(ones(m, 1, 2)).sum().backward()
    assert calls == ["hook", True] * 2 + [True]


def test_a_hook_changes_the_gradient():
    m = nn.Linear(2, 1)
    m.weight.register_hook(lambda g: g * 3)
    m.to(DEVICE)(torch.ones(1, 2, device=DEVICE)).sum().backward()
    assert m.weight.grad.tolist() == [[3.0, 3.0]]


def test_frozen_parameters_and_buffers():
    m = nn.BatchNorm1d(2)
    m.weight.requires_grad_(False)
    m(torch.ones(3, 2))
    m.to(DEVICE)
    assert not m.weight.requires_grad and m.bias.requires_grad
    assert m.running_mean.device.type == DEVICE and m.num_batches_tracked.dtype is torch.int64
    m(torch.ones(3, 2, device=DEVICE))
    assert m.num_batches_tracked.item() == 2


WRAPPED = {
    "weight_norm": parametrizations.weight_norm, "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal, "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", WRAPPED)
def test_reparametrised_modules_move_after_a_forward(name):
    m = WRAPPED[name](nn.Linear(3, 3)).eval()
    x = torch.randn(2, 3)
    y = m(x)
    m.to(DEVICE)
    z = m(x.to(DEVICE))
    torch.testing.assert_close(z.cpu(), y)
    z.sum().backward()
    assert all(p.grad.device.type == DEVICE for p in m.parameters())
    torch.testing.assert_close(m.cpu()(x), y)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_assigning_to_a_parametrised_weight_leaves_the_source_alone(device):
    m = parametrizations.weight_norm(nn.Linear(2, 2, device=device))
    source = torch.full((2, 2), 5.0, device=device)
    m.weight = source
    assert source.tolist() == [[5.0, 5.0]] * 2
    torch.testing.assert_close(m.weight.detach(), source)
    nn.utils.parametrize.remove_parametrizations(m, "weight")
    assert m.weight.tolist() == [[5.0, 5.0]] * 2


LAZY = {
    "LazyLinear": (lambda **k: nn.LazyLinear(3, **k), (2, 4)),
    "LazyConv2d": (lambda **k: nn.LazyConv2d(2, 3, **k), (1, 2, 5, 5)),
    "LazyBatchNorm1d": (lambda **k: nn.LazyBatchNorm1d(**k), (4, 3)),
}


@pytest.mark.parametrize("born", ["cpu", DEVICE, "round trip", "half"])
@pytest.mark.parametrize("name", LAZY)
def test_lazy_modules(name, born):
    make, size = LAZY[name]
    m = make(device=DEVICE) if born == DEVICE else make().to(DEVICE)
    if born == "round trip":
        m = m.cpu().to(DEVICE)
    m = m.half() if born == "half" else m
    if name != "LazyBatchNorm1d":  # torch doesn't copy an uninitialized buffer
        m = copy.deepcopy(m)
    p = m.weight
    assert isinstance(p, nn.parameter.UninitializedParameter) and m.has_uninitialized_params()
    with pytest.raises(RuntimeError, match="uninitialized"):
        p.shape  # noqa: B018
    x = torch.ones(size, device=DEVICE, dtype=torch.float16 if born == "half" else torch.float32)
    (m(x) ** 2).sum().backward()
    assert m.weight is p and type(p).__name__ == "Tensor" and isinstance(p, nn.Parameter)
    assert p.device.type == DEVICE and p.grad.shape == p.shape and p.dtype is x.dtype
    assert all(b.device.type == DEVICE for b in m.buffers())


def test_lazy_modules_load():
    full, m = nn.Linear(4, 3), nn.LazyLinear(3).to(DEVICE)
    m.load_state_dict(full.state_dict())
    assert m.weight.device.type == DEVICE and torch.equal(m.weight.detach().cpu(), full.weight.detach())


class Doubled(nn.Parameter):
    def twice(self):
        return self * 2


class Named(torch.Tensor):
    label = "named"


def test_subclasses_of_parameter():
    m = nn.Module()
    m.p = p = Doubled(torch.ones(2))
    m.to(DEVICE)
    assert m.p is p and isinstance(p, Doubled) and isinstance(p, nn.Parameter) and p.device.type == DEVICE
    p.twice().sum().backward()
    assert p.grad.tolist() == [2.0, 2.0] and isinstance(copy.deepcopy(m).p, Doubled)
    m.cpu()
    assert type(p) is Doubled and p.device.type == "cpu"


def test_subclasses_of_tensor():
    x = torch.arange(3.0).as_subclass(Named).to(DEVICE)
    for y in (x, x + 1, x[1:], copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert isinstance(y, Named) and y.device.type == DEVICE and y.label == "named"
    assert type((x + 1).cpu()) is Named and (x + 1).tolist() == [1.0, 2.0, 3.0] and repr(x).startswith("Named(")
    y = torch.ones(2, device=DEVICE).as_subclass(Named)
    assert isinstance(y, Named) and (y + y).tolist() == [2.0, 2.0]


def test_data_takes_a_tensor_of_another_device():
    m = nn.Linear(2, 2)
    m(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.Adam(m.parameters())
    optimizer.step()
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.to(DEVICE)
    for p in m.parameters():
        p.data = p.data.to(DEVICE)
        p._grad.data = p._grad.data.to(DEVICE)
    optimizer.step()
    assert {t.device.type for p in m.parameters() for t in (p, p.grad, *optimizer.state[p].values())} == {DEVICE}
    assert isinstance(m.weight, nn.Parameter)
    y = m.weight * 2
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        y.data = torch.ones(2, 2)


def test_without_contents():
    m = nn.Linear(2, 2, device="meta").to_empty(device=DEVICE)
    assert m.weight.device.type == DEVICE and m.weight.requires_grad
    with pytest.raises(NotImplementedError):
        nn.Linear(2, 2, device="meta").to(DEVICE)
    assert nn.Linear(2, 2).to(DEVICE).share_memory().weight.device.type == DEVICE  # nothing to do, as on CUDA


def test_swap_tensors_refuses_as_torch_does():
    a, b = torch.ones(2, device=DEVICE), torch.zeros(3, device=DEVICE)
    torch.utils.swap_tensors(a, b)
    assert a.tolist() == [0.0] * 3 and b.tolist() == [1.0] * 2
    p = nn.Parameter(torch.ones(2, device=DEVICE))
    y = (p * p).sum()
    with pytest.raises(RuntimeError, match="use_count"):
        torch.utils.swap_tensors(p, nn.Parameter(torch.ones(2, device=DEVICE)))
    y.backward()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        m = nn.Linear(2, 2)
        x = torch.ones(1, 2, requires_grad=True)
        y = m(x)
        with pytest.raises(RuntimeError, match="swap"):
            m.to(DEVICE)
        del y
        assert m.to(DEVICE).weight.device.type == DEVICE
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
