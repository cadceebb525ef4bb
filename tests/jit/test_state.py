"""jit: tensors reached by any route are inputs, writes land in the same objects, results alias as in eager."""

import copy

import pytest
import torch
from torch import nn

import torchax_tpu
from torchax_tpu.errors import TraceError
from torchax_tpu.jit import jit

DEVICE = "jax"


def on(x):
    return x.to(DEVICE)


def same(a, b, **kw):
    torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), **kw)


weight = None  # a global that tests rebind


def test_argument_and_global_and_closure():
    global weight
    torch.manual_seed(0)
    x, weight, bias = on(torch.randn(3, 3)), on(torch.randn(3, 3)), on(torch.randn(3))

    @jit
    def f(a):
        return a @ weight + bias

    same(f(x), x.cpu() @ weight.cpu() + bias.cpu())
    weight.mul_(2)
    bias.add_(1)
    same(f(x), x.cpu() @ weight.cpu() + bias.cpu())
    weight = on(torch.randn(3, 3))
    bias = on(torch.randn(3))
    same(f(x), x.cpu() @ weight.cpu() + bias.cpu())
    assert f.traces == 1


def test_plain_global_number_is_part_of_the_signature():
    scale = 2.0

    @jit
    def f(a):
        return a * scale

    x = on(torch.ones(3))
    same(f(x), torch.full((3,), 2.0))
    scale = 5.0
    same(f(x), torch.full((3,), 5.0))
    assert f.traces == 2


def test_write_to_argument_through_views():
    def f(a):
        a[1:3].add_(1)
        b = a.t()
        b[0].mul_(3)
        return b

    x = torch.arange(16.0).reshape(4, 4)
    ours, ref = on(x), x.clone()
    got, want = jit(f)(ours), f(ref)
    same(ours, ref)
    same(got, want)
    got.add_(1)
    want.add_(1)
    same(ours, ref)  # the result still aliases the argument


def test_view_argument_writes_its_base():
    base, ref = on(torch.zeros(4, 4)), torch.zeros(4, 4)
    f = jit(lambda v: v.add_(1))
    for i in range(3):
        f(base[:, 1])
        ref[:, 1].add_(1)
    same(base, ref)
    assert f.traces == 1


def test_results_that_alias_each_other():
    f = jit(lambda a: (lambda b: (b, b[1:], b.t()))(a * 2))
    b, tail, t = f(on(torch.ones(3, 3)))
    b.add_(1)
    same(tail, torch.full((2, 3), 3.0))
    same(t, torch.full((3, 3), 3.0))


def test_result_that_is_an_argument_is_that_object():
    x = on(torch.ones(3))
    f = jit(lambda a: (a, a.add_(1)))
    a, b = f(x)
    assert a is x and b is x
    same(x, torch.full((3,), 2.0))


def test_aliased_arguments():
    f = jit(lambda a, b: (a.add_(1), b * 1)[1])
    x = on(torch.zeros(3))
    y = on(torch.zeros(3))
    same(f(x, x), torch.ones(3))
    same(f(y, on(torch.zeros(3))), torch.zeros(3))
    same(f(x, x), torch.full((3,), 2.0))


def test_clones_that_share_an_array_are_separate_inputs():
    x = on(torch.ones(3))
    y = x.clone()
    f = jit(lambda: x * 10 + y)
    same(f(), torch.full((3,), 11.0))
    y.mul_(2)
    same(f(), torch.full((3,), 12.0))
    x.mul_(3)
    same(f(), torch.full((3,), 32.0))
    assert f.traces == 1


def test_zero_dim_state_is_not_baked():
    count = on(torch.tensor(0.0))

    @jit
    def f(x):
        count.add_(1)
        return x * count

    x = on(torch.ones(2))
    assert [f(x).tolist()[0] for _ in range(3)] == [1.0, 2.0, 3.0]
    assert count.item() == 3 and f.traces == 1


def test_cpu_tensor_inside_is_read_at_each_call():
    host = torch.tensor(2.0)
    vector = torch.ones(3)
    f = jit(lambda x: x * host + vector.to(DEVICE))
    x = on(torch.ones(3))
    same(f(x), torch.full((3,), 3.0))
    host.fill_(5)
    vector.fill_(7)
    same(f(x), torch.full((3,), 12.0))
    assert f.traces == 1


def test_module_rebinding_and_data_assignment():
    m = nn.Linear(3, 2).to(DEVICE)
    f = jit(lambda x: m(x))
    x = on(torch.randn(4, 3))
    same(f(x), m(x))
    m.weight.data = on(torch.randn(2, 3))
    same(f(x), m(x))
    m.weight = nn.Parameter(on(torch.randn(2, 3)))
    same(f(x), m(x))
    m.load_state_dict(nn.Linear(3, 2).state_dict())
    same(f(x), m(x))


def test_module_wrapper_keeps_state_dict_and_mode():
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(DEVICE)
    ref = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    ref.load_state_dict({k: v.cpu() for k, v in m.state_dict().items()})
    j = jit(m)
    assert isinstance(j, type(m)) and list(j.state_dict()) == list(m.state_dict())
    assert list(j.parameters())[0] is list(m.parameters())[0]
    x = torch.randn(8, 4)
    j.eval()
    ref.eval()
    same(j(on(x)), ref(x))
    j.train()
    out = j(on(x))
    assert (out == 0).any() and out.requires_grad
    j.eval()
    assert not torch.allclose(j(on(x)).cpu(), ref(x))  # running statistics moved


def test_static_arguments_and_structures():
    @jit(static_argnames="mode")
    def f(d, mode="a", *, n):
        y = d["x"] * n + (1 if mode == "a" else 2)
        return {"y": y, "pair": (y, n, None)}

    x = on(torch.ones(2))
    out = f({"x": x}, n=3)
    same(out["y"], torch.full((2,), 4.0))
    assert out["pair"][1:] == (3, None) and isinstance(out["pair"], tuple)
    same(f({"x": x}, mode="b", n=3)["y"], torch.full((2,), 5.0))
    same(f({"x": x}, mode="b", n=4)["y"], torch.full((2,), 6.0))
    assert f.traces == 3


def test_method_and_nested_jit():
    class Model:
        def __init__(self, k):
            self.k = on(torch.tensor(k))

        @jit
        def scale(self, x):
            return inner(x) * self.k

    inner = jit(lambda x: x + 1)
    a, b = Model(2.0), Model(3.0)
    x = on(torch.ones(2))
    same(a.scale(x), torch.full((2,), 4.0))
    same(b.scale(x), torch.full((2,), 6.0))
    assert inner.traces == 0  # traced as part of the outer program


@pytest.mark.parametrize("f", [lambda x: x.item(), lambda x: x if x.sum() > 0 else -x, lambda x: x.nonzero(),
                               lambda x: x.tolist(), lambda x: x.cpu(), lambda x: float(x.sum())])
def test_value_dependence_is_a_named_error(f):
    with pytest.raises(TraceError, match="torch.where|masks|concrete"):
        jit(f)(on(torch.ones(1)))


def test_failure_while_tracing_leaves_state_as_it_was():
    w = nn.Parameter(on(torch.ones(2)))

    @jit
    def f(x):
        with torch.no_grad():
            w.mul_(2)
        (w * x).sum().backward()
        return w.sum().item()

    with pytest.raises(TraceError):
        f(on(torch.ones(2)))
    same(w, torch.ones(2))
    assert w.grad is None
    same((w * 3).sum(), torch.tensor(6.0))


def test_donated_state_is_not_lost_to_other_holders():
    x = on(torch.zeros(1000))
    held, clone, view = x.jax(), x.clone(), x[10:20]
    f = jit(lambda: x.add_(1))
    f()
    f()
    same(x, torch.full((1000,), 2.0))
    assert float(held[0]) == 0.0
    same(clone, torch.zeros(1000))
    same(view, torch.full((10,), 2.0))


def test_donation_frees_the_old_buffer():
    x = on(torch.zeros(1000)) + 1
    f = jit(lambda: x.add_(1))
    f()
    old = x._cell.array
    import weakref
    gone = weakref.ref(old)
    del old
    f()
    assert gone() is None
    same(x, torch.full((1000,), 3.0))


def test_random_stream_advances_and_matches_eager():
    def draw(x):
        return torch.nn.functional.dropout(x, 0.5, training=True), torch.rand(4, device=DEVICE)

    x = on(torch.ones(64))
    f = jit(draw)
    torch.manual_seed(3)
    eager = [draw(x) for _ in range(3)]
    torch.manual_seed(3)
    jitted = [f(x) for _ in range(3)]
    for (a, b), (c, d) in zip(eager, jitted):
        same(a, c)
        same(b, d)
    assert not torch.equal(jitted[0][0].cpu(), jitted[1][0].cpu())
    assert not torch.equal(jitted[0][1].cpu(), jitted[1][1].cpu())
    assert f.traces == 1


def test_int64_state():
    n = on(torch.tensor(2**40))
    f = jit(lambda x: (n.add_(1), x + n)[1])
    x = on(torch.arange(3))
    assert f(x).tolist() == [2**40 + 1, 2**40 + 2, 2**40 + 3]
    assert f(x).tolist() == [2**40 + 2, 2**40 + 3, 2**40 + 4]
    assert n.item() == 2**40 + 2 and f.traces == 1


def test_trace_count_is_public():
    before = torchax_tpu.jit.trace_count() if hasattr(torchax_tpu.jit, "trace_count") else None
    f = jit(lambda x: x + 1)
    f(on(torch.ones(2)))
    f(on(torch.ones(2)))
    f(on(torch.ones(3)))
    assert f.traces == 2
    assert before is None or torchax_tpu.jit.trace_count() == before + 2


def test_attribute_of_an_object_is_seen():
    class Box:
        def __init__(self):
            self.k, self.scale = on(torch.ones(2)), 2.0

    box = Box()
    f = jit(lambda x: x * box.k * box.scale)
    x = on(torch.ones(2))
    same(f(x), torch.full((2,), 2.0))
    box.scale = 3.0
    same(f(x), torch.full((2,), 3.0))
    box.k = on(torch.full((2,), 5.0))
    same(f(x), torch.full((2,), 15.0))


def test_rebinding_state_inside_stays_right():
    class Box:
        def __init__(self):
            self.k = on(torch.zeros(2))

        @jit
        def step(self, x):
            self.k = self.k + x
            return self.k * 1

    box, x = Box(), on(torch.ones(2))
    for n in range(1, 4):
        same(box.step(x), torch.full((2,), float(n)))
        same(box.k, torch.full((2,), float(n)))


def test_many_retraces_warn_with_the_reason():
    state = {"n": 0}
    f = jit(lambda x: x + state["n"])
    x = on(torch.ones(2))
    with pytest.warns(UserWarning, match="n changed from"):
        for i in range(12):
            state["n"] = i
            same(f(x), torch.full((2,), 1.0 + i))


def test_many_signatures_warn_with_the_difference():
    f = jit(lambda x, n: x + n)
    x = on(torch.ones(2))
    with pytest.warns(UserWarning, match="argument 1 changed"):
        for n in range(9):
            same(f(x, n), torch.full((2,), 1.0 + n))


def test_copies_of_a_jitted_module_are_independent():
    m = jit(nn.Linear(3, 2).to(DEVICE))
    x = on(torch.ones(1, 3))
    same(m(x), nn.functional.linear(x, m.weight, m.bias))
    n = copy.deepcopy(m)
    with torch.no_grad():
        n.weight.zero_()
        n.bias.fill_(7)
    same(n(x), torch.full((1, 2), 7.0))
    same(m(x), nn.functional.linear(x, m.weight, m.bias))


def test_inference_mode_hooks_and_keyword_structures():
    m = nn.Linear(3, 2).to(DEVICE)
    m.register_forward_hook(lambda mod, args, out: out + 1)
    f = jit(lambda *, batch: {"out": m(batch["x"]), "n": len(batch)})
    x = on(torch.ones(1, 3))
    with torch.inference_mode():
        got = f(batch={"x": x})
    same(got["out"], nn.functional.linear(x, m.weight, m.bias) + 1)
    assert got["n"] == 1
