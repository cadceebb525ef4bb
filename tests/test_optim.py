"""Every optimizer of torch, in all its implementations, follows CPU torch for ten steps."""

import copy

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

from tests import oracle

DEVICE = oracle.DEVICE
DB = {o.optim_cls.__name__: o for o in optim_db}
VARIANTS = ("default", "foreach", "fused", "capturable")


def _parameters(matrices=False):
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 4), (1, 4) if matrices else (4,), (2, 3)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def _loss(parameters):
    a, b, c = parameters
    return ((c @ a + b).tanh() ** 2).sum() + (a * a).mean() + ((b - 1) ** 2).sum()


def _pairs(make, kwargs):
    """The same problem on the CPU and on the device, each with its optimizer."""
    cpu = _parameters(make is torch.optim.Muon)  # which takes matrices only
    if make is torch.optim.LBFGS:  # whose steps amplify rounding: float32 leaves float64 on the CPU as well
        cpu = [p.detach().double().requires_grad_() for p in cpu]
    device = [p.detach().to(DEVICE).requires_grad_() for p in cpu]
    out = []
    for parameters in (cpu, device):
        here = {k: v.clone().to(parameters[0].device) if isinstance(v, torch.Tensor) and k == "lr" and parameters is device
                else copy.deepcopy(v) for k, v in kwargs.items()}
        out.append((parameters, make(parameters, **here)))
    return out


def _state(optimizer):
    return [{k: v for k, v in optimizer.state[p].items()} for g in optimizer.param_groups for p in g["params"]]


def _steps(parameters, optimizer, closure_only, count=10, scheduler=None):
    for _ in range(count):
        def closure():
            optimizer.zero_grad()
            loss = _loss(parameters)
            loss.backward()
            if isinstance(optimizer, torch.optim.SparseAdam):  # which takes sparse gradients only; the device's are dense
                for p in parameters:
                    p.grad = p.grad.to_sparse() if p.device.type == "cpu" else p.grad
            return loss
        if closure_only:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()


def _variants(info, variant):
    """Keyword arguments of the database's configurations for one implementation."""
    supported = set(info.supported_impls) | ({"capturable"} if "capturable" in getattr(
        info, "supported_impls", ()) or _takes(info.optim_cls, "capturable") else set())
    if variant != "default" and variant not in supported:
        return []
    out = []
    for item in info.optim_inputs_func(device="cpu"):
        kwargs = {k: v for k, v in item.kwargs.items() if k not in ("foreach", "fused", "capturable", "differentiable")}
        if variant == "default":
            if _takes(info.optim_cls, "foreach"):
                kwargs["foreach"] = False
        else:
            kwargs[variant] = True
        out.append((item.desc, kwargs))
    return out


def _takes(cls, name):
    import inspect
    return name in inspect.signature(cls.__init__).parameters


CASES = [(name, variant) for name, info in DB.items() for variant in VARIANTS if _variants(info, variant)]


@pytest.mark.parametrize("name,variant", CASES)
def test_follows_cpu(name, variant):
    info = DB[name]
    checked = 0
    for desc, kwargs in _variants(info, variant):
        if isinstance(kwargs.get("lr"), torch.Tensor) and variant == "foreach":
            continue  # torch refuses a tensor lr with foreach unless capturable
        closure_only = name == "LBFGS"
        if closure_only:  # more iterations amplify a change of one ulp to 1e-2, on the CPU alone too
            kwargs["max_iter"] = 2
        reference = dict(kwargs)
        if variant == "capturable":  # the CPU has no capturable form: the plain one is the reference
            reference.pop("capturable")
        (cpu, cpu_opt), (device, device_opt) = _pairs(info.optim_cls, reference)[0], _pairs(info.optim_cls, kwargs)[1]
        assert all(p.device.type == DEVICE for p in device)
        _steps(cpu, cpu_opt, closure_only)
        _steps(device, device_opt, closure_only)
        for got, want in zip(device, cpu):
            torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=2e-5, atol=2e-6, msg=lambda m, d=desc: f"{d}: {m}")
        if not closure_only:
            for got, want in zip(_state(device_opt), _state(cpu_opt)):
                assert got.keys() == want.keys()
                for k in want:
                    if isinstance(want[k], torch.Tensor):
                        torch.testing.assert_close(got[k].detach().cpu().to(want[k].dtype), want[k].detach(), rtol=1e-4, atol=1e-6,
                                                   msg=lambda m, d=desc, k=k: f"{d}, {k}: {m}")
        checked += 1
    assert checked


class _Counter:
    count = 0


def _listen():
    import jax.monitoring

    def heard(name, *args, **kwargs):
        if name == "/jax/core/compile/backend_compile_duration":
            _Counter.count += 1
    jax.monitoring.register_event_duration_secs_listener(heard)


_listen()


@pytest.mark.parametrize("name,variant", [("SGD", "foreach"), ("SGD", "fused"), ("Adam", "foreach"), ("Adam", "fused"),
                                          ("AdamW", "fused"), ("AdamW", "default"), ("Adagrad", "fused")])
def test_a_changing_learning_rate_does_not_recompile(name, variant):
    parameters = [p.detach().to(DEVICE).requires_grad_() for p in _parameters()]
    kwargs = {"foreach": False} if variant == "default" else {variant: True}
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **kwargs)
    _steps(parameters, optimizer, False, count=3)
    before = _Counter.count
    for i in range(5):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 2)
        _steps(parameters, optimizer, False, count=1)
    assert _Counter.count == before, "a new learning rate compiled a program"


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_takes_a_tensor_learning_rate(name):
    make = getattr(torch.optim, name)
    (cpu, a), (device, b) = _pairs(make, {"lr": torch.tensor(0.05), "fused": True})
    _steps(cpu, a, False)
    _steps(device, b, False)
    oracle.assert_same([p.detach() for p in device], [p.detach() for p in cpu], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_fused_in_other_dtypes(name, dtype):
    make = getattr(torch.optim, name)
    cpu = [p.detach().to(dtype).requires_grad_() for p in _parameters()]
    device = [p.detach().to(DEVICE).requires_grad_() for p in cpu]
    for parameters in (cpu, device):
        optimizer = make(parameters, lr=0.01, fused=True, weight_decay=0.1)
        for i in range(5):
            for p in parameters:
                p.grad = (p.detach() * 0.5 + i).to(dtype)
            optimizer.step()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
    oracle.assert_same([p.detach() for p in device], [p.detach() for p in cpu], **tolerance)


@pytest.mark.parametrize("variant", ["foreach", "fused"])
def test_grad_scaler_skips_infinite_gradients_and_scales_back(variant):
    parameters = [p.detach().to(DEVICE).requires_grad_() for p in _parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, **{variant: True})
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=2)
    start = [p.detach().cpu().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.full_like(p, float("inf"))
    scaler.scale(torch.ones((), device=DEVICE))
    scaler.step(optimizer)
    scaler.update()
    oracle.assert_same([p.detach() for p in parameters], start)
    assert scaler.get_scale() == 4.0
    for expected in (4.0, 8.0):  # the second good step in a row grows the scale
        scaler.scale(torch.ones((), device=DEVICE))
        for p in parameters:
            p.grad = torch.full_like(p, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
    oracle.assert_same([p.detach() for p in parameters], [s - 0.2 for s in start], rtol=1e-5, atol=1e-6)


def test_unscale_and_clip():
    results = []
    for device in ("cpu", DEVICE):
        parameters = [p.detach().to(device).requires_grad_() for p in _parameters()]
        scaler = torch.amp.GradScaler(device, init_scale=16.0)
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        scaler.scale(_loss(parameters)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        results.append((norm, [p.grad for p in parameters], [p.detach() for p in parameters]))
    oracle.assert_same(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_state_dict_moves_between_devices():
    (cpu, a), (device, b) = _pairs(torch.optim.AdamW, {"lr": 0.02})
    _steps(cpu, a, False, count=3)
    with torch.no_grad():
        for p, q in zip(device, cpu):
            p.copy_(q)
    b.load_state_dict(copy.deepcopy(a.state_dict()))  # torch shares the step counters otherwise
    assert b.state[device[0]]["exp_avg"].device.type == DEVICE
    _steps(cpu, a, False, count=3)
    _steps(device, b, False, count=3)
    oracle.assert_same([p.detach() for p in device], [p.detach() for p in cpu], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("module", [torch.nn.Embedding, torch.nn.EmbeddingBag])
@pytest.mark.parametrize("make", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_embeddings_train_as_on_the_cpu(module, make):
    torch.manual_seed(0)
    cpu = module(6, 3, sparse=True, padding_idx=0)
    device = copy.deepcopy(cpu).to(DEVICE)
    rows = torch.randint(0, 5, (10, 2, 2))  # row 5 is never looked up, others in some steps only
    weights = torch.randn(3)
    for m in (cpu, device):
        optimizer = getattr(torch.optim, make)(m.parameters(), lr=0.1)
        for x in rows.to(m.weight.device):
            optimizer.zero_grad()
            (m(x) * weights.to(x.device)).pow(2).sum().backward()
            assert m.weight.grad.is_sparse == (m is cpu)
            optimizer.step()
    oracle.assert_same(device.weight.detach(), cpu.weight.detach(), rtol=1e-5, atol=1e-6)


def test_sparse_adam_takes_up_a_cpu_state_and_runs_jitted():
    import torchax_tpu
    torch.manual_seed(0)
    cpu = torch.nn.Embedding(4, 2, sparse=True)
    device = copy.deepcopy(cpu).to(DEVICE)
    a, b = torch.optim.SparseAdam(cpu.parameters(), lr=0.1), torch.optim.SparseAdam(device.parameters(), lr=0.1)

    def step(m, optimizer, x):
        optimizer.zero_grad()
        m(x).pow(2).sum().backward()
        optimizer.step()

    step(cpu, a, torch.tensor([0, 1]))
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    with torch.no_grad():
        device.weight.copy_(cpu.weight)
    jitted = torchax_tpu.jit(lambda x: step(device, b, x))
    for x in ([1, 2], [2, 2], [0, 1], [3, 1]):
        step(cpu, a, torch.tensor(x))
        jitted(torch.tensor(x, device=DEVICE))
    oracle.assert_same(device.weight.detach(), cpu.weight.detach(), rtol=1e-5, atol=1e-6)
    assert b.state[device.weight]["step"].item() == a.state[cpu.weight]["step"] == 5
