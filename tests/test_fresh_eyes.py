"""Programs of users who try to break things: run on CPU and on the device, eagerly and jitted; all must agree."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchax_tpu
from tests.oracle import assert_same

DEVICE = "jax"
PROGRAMS = []


def program(fn):
    PROGRAMS.append(fn)
    return fn


def seeded(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def grads(module):
    return [p.grad for p in module.parameters()]


# ---------------------------------------------------------------- gradients through jitted functions from outside


@program
def a_jitted_cell_called_step_by_step(device, jit):
    cell = nn.GRUCell(3, 4).to(device)
    step, h = jit(cell), torch.zeros(2, 4, device=device)
    for i in range(3):
        h = step(seeded(2, 3, seed=i, device=device), h)
    h.sum().backward()
    return h, grads(cell)


@program
def a_jitted_block_applied_again_to_its_result(device, jit):
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    f, x = jit(block), seeded(3, 4, device=device)
    for _ in range(3):
        x = f(x) + x
    x.sum().backward()
    return x, grads(block)


@program
def one_tensor_as_several_arguments(device, jit):
    x = seeded(3, device=device).requires_grad_()
    f = jit(lambda a, b: (a * b.sin()).sum())
    f(x, x).backward()
    y = x * 2
    f(y, y[:]).backward()
    f(x, x.view(3)).backward()
    return x.grad


@program
def results_that_are_views_of_arguments_and_parameters(device, jit):
    x = seeded(2, 3, device=device).requires_grad_()
    w = seeded(3, 2, seed=1, device=device).requires_grad_()
    f = jit(lambda x: (x.t(), x[0], x * 2, w.t(), w))
    out = [o for given in (x, x * 3) for o in f(given)]
    sum((o * o).sum() for o in out).backward()
    return out, x.grad, w.grad


@program
def a_view_of_this_calls_argument(device, jit):
    f = jit(lambda x: (x[0], x + 1))
    a, b = torch.zeros(2, 3, device=device), torch.ones(2, 3, device=device)
    f(a)
    row = f(b)[0]
    row.fill_(7)
    return a, b, row


@program
def tensors_computed_outside(device, jit):
    w = torch.ones(3, device=device, requires_grad=True)
    b = torch.ones(3, device=device, requires_grad=True)
    held = {"h": w * 2}
    f = jit(lambda x: (x * held["h"] * b).sum())
    f(seeded(3, device=device)).backward()
    held["h"] = w.exp()
    f(seeded(3, device=device)).backward()
    return w.grad, b.grad


@program
def gradient_hooks_run_once(device, jit):
    m = nn.Linear(3, 2).to(device)
    m.weight.register_hook(lambda g: g * 10)
    x = seeded(4, 3, device=device).requires_grad_()
    y = x * 2
    y.register_hook(lambda g: g * 3)
    jit(m)(y).pow(2).sum().backward()
    return x.grad, grads(m)


# ---------------------------------------------------------------- what a jitted module shares with the module


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.scale = nn.ModuleList([nn.Linear(3, 3)]), 1.0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return F.dropout(x, 0.9999999, self.training) * self.scale


@program
def mode_and_attributes_of_the_module(device, jit):
    m, more = Noisy().to(device), nn.Linear(3, 3).to(device)
    f, g, x = jit(m), jit(m.forward), seeded(4, 3, device=device)
    out = [f(x), g(x)]
    m.eval()
    out += [f(x), g(x)]
    m.scale = 3.0
    out.append(f(x))
    m.layers.append(more)
    out.append(f(x))
    f.train()
    out.append(f(x))
    return out, m.training


@program
def submodules_and_hooks_that_come_later(device, jit):
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device)
    f, x = jit(m), seeded(2, 3, device=device)
    out = [f(x)]
    hook = m[0].register_forward_hook(lambda module, args, result: result * 0)
    out.append(f(x))
    hook.remove()
    m[1] = nn.Identity()
    out.append(f(x))
    m.append(nn.ReLU())
    out.append(f(x))
    return out


# ---------------------------------------------------------------- models


@program
def distributions_and_masked_transformers(device, jit):
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1).to(device)
    mask = nn.Transformer.generate_square_subsequent_mask(4, device=device)
    normal = torch.distributions.Normal

    def loss(target, memory):
        mu, spread = decoder(target, memory, tgt_mask=mask).chunk(2, -1)
        prior = normal(torch.zeros_like(mu), torch.ones_like(mu))
        return torch.distributions.kl_divergence(normal(mu, spread.exp()), prior).mean()

    out = jit(loss)(seeded(2, 4, 8, device=device), seeded(2, 5, 8, seed=1, device=device))
    out.backward()
    return out, decoder.layers[0].linear1.weight.grad


# ---------------------------------------------------------------- versions, sequences


@program
def list_ops_count_as_writes(device, jit):
    x = torch.zeros(3, device=device)
    torch._foreach_add_([x], 1)
    torch._foreach_copy_([x], [torch.ones(3, device=device)])
    torch._foreach_mul_([x[1:]], 2)
    return x._version, x


@program
def an_optimizer_step_between_forward_and_backward(device, jit):
    w = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)

    @jit
    def step():
        optimizer.zero_grad()
        (w * w).sum().backward()
        optimizer.step()

    step()
    loss = (w * w).sum()
    step()
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return "nothing raised"


@program
def tensors_out_of_lists_of_scalars(device, jit):
    x = torch.arange(3.0, device=device)
    return torch.tensor([x[0], x[2]]), torch.tensor([[x[1]], [2.0]], device=device), x[[0, 2]]


@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_program(fn, how):
    torch.manual_seed(0)
    want = fn("cpu", lambda f: f)
    torch.manual_seed(0)
    got = fn(DEVICE, torchax_tpu.jit if how == "jit" else lambda f: f)
    assert_same(got, want)


# ---------------------------------------------------------------- what can't be right says so


def test_second_derivative_from_outside_is_an_error_not_a_zero():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    loss = torchax_tpu.jit(lambda x: (x**3).sum())(x)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        (loss + g.norm()).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(loss + g.norm(), x)


def test_a_schedule_inside_is_an_error():
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step():
        optimizer.zero_grad()
        (w * w).sum().backward()
        optimizer.step()
        schedule.step()

    with pytest.raises(torchax_tpu.errors.TraceError, match="scheduler"):
        torchax_tpu.jit(step)()


def test_cpu_state_written_inside_is_an_error():
    m = nn.Linear(2, 2).to(DEVICE)
    average = torch.optim.swa_utils.AveragedModel(m)  # its counter lives on the CPU
    with pytest.raises(torchax_tpu.errors.TraceError, match="CPU tensor"):
        torchax_tpu.jit(lambda: average.update_parameters(m))()


@pytest.mark.parametrize("fn", [
    lambda x: F.relu_(x).sum(),
    lambda x: x.mul(2).sum().backward(),
], ids=["written argument", "backward into the outside"])
def test_history_that_would_be_lost_is_an_error(fn):
    x = torch.ones(3, device=DEVICE, requires_grad=True) * 2
    with pytest.raises(torchax_tpu.errors.TraceError):
        torchax_tpu.jit(fn)(x)


def test_input_computed_from_another_input_is_an_error():
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    h = w * 2
    with pytest.raises(torchax_tpu.errors.TraceError, match="as an argument"):
        torchax_tpu.jit(lambda x: (x * h * w).sum())(torch.ones(3, device=DEVICE))


def test_python_counters_and_cpu_random_numbers_warn():
    class Counter:
        def __init__(self):
            self.n = 0

        def step(self, x):
            self.n += 1
            return x * self.n + torch.randn(3).to(x.device)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torchax_tpu.jit(Counter().step)(torch.ones(3, device=DEVICE))
    text = " ".join(str(w.message) for w in caught)
    assert "Counter.n from 0 to 1" in text and "random numbers on the CPU" in text


# ---------------------------------------------------------------- views which may overlap, hooks, mixed step counts


def _masked_rows(x):
    x[1].expand(2, 3).masked_fill_(torch.ones(2, 3, dtype=torch.bool, device=x.device), 7.0)


def _indexed_rows(x):
    x[1].expand(2, 3)[torch.tensor([0, 1], device=x.device)] = 9.0


@pytest.mark.parametrize("write", [
    _masked_rows, _indexed_rows, lambda x: x.as_strided((2, 3), (1, 1)).abs_(), lambda x: x.as_strided((2, 3), (1, 1)).relu_(),
    lambda x: x.view(6).as_strided((2, 2), (3, 2)).mul_(10), lambda x: x.view(6).unfold(0, 4, 2).clamp_(-1, 2),
    lambda x: x[:0].unfold(1, 2, 1).div_(2), lambda x: x[:0].expand(2, 0, 3).mul_(2)])
@pytest.mark.filterwarnings("ignore:Use of")
def test_written_through_views_that_may_overlap(write):
    """Such a view is read and written apart from the op's program, whatever was cached for others."""
    for _ in range(2):
        results = []
        for device in ("cpu", "jax"):
            x = torch.arange(6.0, device=device).view(2, 3) - 3
            write(x)
            x.mul_(1)
            results.append(x.cpu())
        torch.testing.assert_close(results[1], results[0])


def test_hooks_that_raise():
    """An exception of a hook reaches the caller, from wherever autograd calls the hook; the device stays usable."""
    def bad(*_):
        raise ValueError("mine")

    for where in ("leaf", "inner", "accumulated", "module"):
        net = torch.nn.Linear(3, 3).to("jax")
        x = torch.ones(2, 3, device="jax", requires_grad=True)
        y = net(x) * 2
        if where == "leaf":
            x.register_hook(bad)
        elif where == "inner":
            y.register_hook(bad)
        elif where == "accumulated":
            net.weight.register_post_accumulate_grad_hook(bad)
        else:
            net.register_full_backward_hook(bad)
            y = net(x)
        with pytest.raises(ValueError, match="mine"):
            y.sum().backward()
        z = torch.ones(2, device="jax", requires_grad=True)
        (z * 3).sum().backward()
        assert z.grad.tolist() == [3, 3]


def test_jit_notices_hooks_of_tensors():
    def run(device):
        w, x = torch.ones(2, requires_grad=True, device=device), torch.ones(2, device=device)

        def step(x):
            (w * x).sum().backward()

        step = torchax_tpu.jit(step) if device == "jax" else step
        step(x)
        handle = w.register_hook(lambda g: g * 10)
        step(x)
        handle.remove()
        step(x)

        def halve(p):
            p.grad.mul_(0.5)

        w.register_post_accumulate_grad_hook(halve)
        step(x)
        return w.grad.tolist()

    assert run("jax") == run("cpu")


def test_step_counts_on_both_devices():
    """A jitted step makes one parameter's state on the device; a later eager step makes another's on the CPU."""
    def run(device):
        a, b = (torch.tensor([1.0, 2.0], requires_grad=True, device=device) for _ in range(2))
        optimizer = torch.optim.Adam([a, b], lr=0.1)

        def step():
            optimizer.zero_grad()
            (a * a).sum().backward()
            optimizer.step()

        (torchax_tpu.jit(step) if device == "jax" else step)()
        for _ in range(2):
            a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
            optimizer.step()
        return a.detach().cpu(), b.detach().cpu(), float(optimizer.state[a]["step"]), float(optimizer.state[b]["step"])

    for ours, ref in zip(run("jax"), run("cpu")):
        torch.testing.assert_close(ours, ref)


def test_half_floats_wrap_in_unsigned_integers():
    x = torch.tensor([-3.0, -1.5, 255.0, 2.5])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for target in (torch.uint8, torch.int8, torch.int16):
            assert torch.equal(x.to(dtype).to("jax").to(target).cpu(), x.to(dtype).to(target))
