"""What nn.Module and torch.nn.utils do beyond forward: each scene gives the same on the CPU and on the device."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._pytree import tree_map

from tests import oracle

DEVICE = oracle.DEVICE
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def linear(device):
    torch.manual_seed(0)
    return nn.Linear(3, 2).to(device)


def net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).to(device)


def data(device, *size):
    return torch.randn(*(size or (5, 3)), generator=torch.Generator().manual_seed(1)).to(device)


def backward(m, x=None):
    x = data(next(m.parameters()).device) if x is None else x
    y = m(x)
    y.pow(2).sum().backward()
    return y


def grads(m):
    return [p.grad for p in m.parameters()]


def raised(f):
    try:
        f()
    except Exception as error:
        return type(error).__name__
    return None


# ---------------------------------------------------------------- state dicts


def loading(d):
    m, full = linear(d), {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    yield raised(lambda: m.load_state_dict({"weight": torch.ones(2, 3)}))
    yield raised(lambda: m.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}))
    yield str(m.load_state_dict({"weight": torch.ones(2, 3), "x": torch.ones(1)}, strict=False))
    weight = m.weight
    m.load_state_dict({k: v.double() for k, v in full.items()})
    yield m.weight is weight, m.weight.device.type == d, m.weight, m.bias
    source = {k: v.to(d) for k, v in full.items()}
    m.load_state_dict(source, assign=True)
    source["weight"].fill_(7)
    yield m.weight is weight, isinstance(m.weight, nn.Parameter), m.weight.requires_grad, m.weight
    meta = nn.Linear(3, 2, device="meta")
    meta.load_state_dict(linear(d).state_dict(), assign=True)
    yield isinstance(meta.weight, nn.Parameter), meta(data(d))


def cpu_tensors_assigned(d):
    m = linear(d)
    m.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, assign=True)
    yield m.weight.device.type, isinstance(m.weight, nn.Parameter), m.weight.requires_grad, m(data("cpu"))


def state_dicts(d):
    m = net(d)
    kept, plain = m.state_dict(keep_vars=True), m.state_dict()
    w = plain["0.weight"]
    yield list(plain), kept["0.weight"] is m[0].weight, w is m[0].weight, w.requires_grad, isinstance(w, nn.Parameter)
    yield w.data_ptr() == m[0].weight.data_ptr()
    w.add_(1)
    yield m[0].weight
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    other = net(d)
    other.load_state_dict(torch.load(file))
    yield other(data(d)), other[1].num_batches_tracked


def state_hooks(d):
    m, log = linear(d), []
    m.register_load_state_dict_post_hook(lambda module, keys: log.append("loaded"))
    m.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(more=1))
    yield list(m.state_dict()), str(m.load_state_dict(linear(d).state_dict())), log


# ---------------------------------------------------------------- hooks


def hooks(d):
    m, log = net(d), []
    m[0].register_forward_pre_hook(lambda module, args: log.append("before"))
    m[0].register_forward_hook(lambda module, args, out: out * 2)
    m[3].register_full_backward_pre_hook(lambda module, out: (out[0] * 3,))
    m[3].register_full_backward_hook(lambda module, into, out: log.append([[g.shape for g in gs] for gs in (into, out)]))
    m[1].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    x = data(d).requires_grad_()
    yield backward(m, x), log, x.grad, grads(m)


def hooks_with_keywords(d):
    class Times(nn.Module):
        def forward(self, x, k=1):
            return x * k

    m, log = Times(), []
    m.register_forward_pre_hook(lambda module, args, kwargs: (args, {"k": 3}), with_kwargs=True)
    m.register_forward_hook(lambda module, args, kwargs, out: log.append(kwargs["k"]), with_kwargs=True, always_call=True)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: log.append(type(module).__name__))
    yield m(data(d)), log
    handle.remove()
    m = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True)).to(d)
    m[0].register_full_backward_hook(lambda *a: None)
    yield raised(lambda: backward(m))


# ---------------------------------------------------------------- gradients


def clipping(d):
    for kwargs in ({}, {"foreach": True}, {"foreach": False}, {"norm_type": float("inf")}, {"norm_type": 1}):
        m = linear(d)
        backward(m)
        yield utils.clip_grad_norm_(m.parameters(), 0.1, **kwargs), grads(m)
    for kwargs in ({}, {"foreach": True}):
        m = linear(d)
        backward(m)
        utils.clip_grad_value_(m.parameters(), 0.1, **kwargs)
        yield grads(m)
    m = linear(d)
    backward(m)
    norm = utils.get_total_norm(grads(m))
    utils.clip_grads_with_norm_(m.parameters(), 0.1, norm)
    yield norm, grads(m)
    m.weight.grad[0, 0] = float("inf")
    yield raised(lambda: utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True))
    yield utils.clip_grad_norm_(m.parameters(), 1.0), grads(m)


def zeroing_and_freezing(d):
    m = net(d)
    m[0].requires_grad_(False)
    backward(m)
    yield grads(m), m[1].running_mean, m[1].num_batches_tracked
    m.zero_grad(set_to_none=False)
    yield grads(m)
    m.zero_grad()
    yield grads(m), [p.requires_grad for p in m.requires_grad_().parameters()]
    yield raised(lambda: (m[0].weight * 2).requires_grad_(False))


def vectors(d):
    m = linear(d)
    yield utils.parameters_to_vector(m.parameters())
    v = torch.arange(8.0, device=d)
    utils.vector_to_parameters(v, m.parameters())
    v.zero_()
    yield m.weight, m.bias, raised(lambda: utils.vector_to_parameters([1], m.parameters()))


def checkpointing(d):
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential
    for run in (lambda m, x: checkpoint(m, x, use_reentrant=False), lambda m, x: checkpoint(m, x, use_reentrant=True),
                lambda m, x: checkpoint_sequential(m, 2, x, use_reentrant=False)):
        m, x = net(d), data(d).requires_grad_()
        run(m, x).pow(2).sum().backward()
        yield x.grad, grads(m)


# ---------------------------------------------------------------- torch.nn.utils


def pruning(d):
    for how, kwargs in ((prune.l1_unstructured, {"amount": 0.5}), (prune.ln_structured, {"amount": 0.5, "n": 2, "dim": 0}),
                        (prune.identity, {}), (prune.custom_from_mask, {"mask": torch.tensor([[1, 0, 1], [0, 1, 1]], device=d)})):
        m = linear(d)
        how(m, "weight", **kwargs)
        yield backward(m), [n for n, _ in m.named_parameters()], [n for n, _ in m.named_buffers()], grads(m)
        prune.remove(m, "weight")
        yield m.weight, isinstance(m.weight, nn.Parameter)
    m = net(d)
    prune.global_unstructured([(m[0], "weight"), (m[3], "weight")], pruning_method=prune.L1Unstructured, amount=0.4)
    yield m[0].weight, m[3].weight


def reparametrising(d):
    m = parametrizations.weight_norm(linear(d))
    backward(m)
    yield grads(m), [n for n, _ in m.named_parameters()]
    parametrize.remove_parametrizations(m, "weight")
    yield m.weight, m(data(d))
    m = utils.weight_norm(linear(d))
    backward(m)
    yield grads(m), [n for n, _ in m.named_parameters()]
    utils.remove_weight_norm(m)
    yield m.weight
    m = parametrizations.orthogonal(linear(d))
    yield (m.weight @ m.weight.T).round(decimals=4)
    m = parametrizations.spectral_norm(linear(d), n_power_iterations=20).eval()
    yield torch.linalg.matrix_norm(m.weight, 2).round(decimals=3)


def fusing(d):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(2, 3, 1).to(d).eval(), nn.BatchNorm2d(3).to(d).eval()
    norm.running_mean.add_(0.5)
    fused = utils.fuse_conv_bn_eval(conv, norm)
    yield fused(data(d, 1, 2, 4, 4)), fused.weight, isinstance(fused.weight, nn.Parameter)
    norm = nn.BatchNorm1d(2).to(d).eval()
    yield utils.fuse_linear_bn_eval(linear(d).eval(), norm)(data(d))
    conv = nn.Conv2d(2, 3, 3).to(d)
    utils.convert_conv2d_weight_memory_format(conv, torch.channels_last)
    yield conv.weight.stride()
    m = utils.skip_init(nn.Linear, 3, 2, device=d)
    yield m.weight.shape, m.weight.device.type == d, m.weight.requires_grad


def sequences(d):
    packed = utils.rnn.pack_sequence([data(d, 3, 2), data(d, 2, 2)])
    out, lengths = utils.rnn.pad_packed_sequence(packed)
    yield out, lengths, packed.batch_sizes, packed.to(d).data, packed.cpu().data, packed.is_cuda
    yield utils.rnn.pad_sequence([data(d, 3, 2), data(d, 2, 2)], batch_first=True, padding_value=-1.0)
    packed = utils.rnn.pack_padded_sequence(data(d, 4, 3, 2), [2, 4, 1], enforce_sorted=False)
    out, lengths = utils.rnn.pad_packed_sequence(packed)
    yield out, lengths, packed.sorted_indices, packed.unsorted_indices, utils.rnn.unpad_sequence(out, lengths)
    torch.manual_seed(0)
    out, state = nn.LSTM(2, 3, bidirectional=True).to(d)(packed)
    yield utils.rnn.pad_packed_sequence(out)[0], state


def functional(d):
    m = linear(d)
    yield torch.func.functional_call(m, {k: v * 2 for k, v in m.named_parameters()}, (data(d),)), m.weight
    params, _ = torch.func.stack_module_state([linear(d) for _ in range(3)])
    yield torch.func.vmap(lambda p, x: torch.func.functional_call(m, p, (x,)), in_dims=(0, None))(params, data(d))
    yield params["weight"].requires_grad, params["weight"].is_leaf


# ---------------------------------------------------------------- the module itself


def dtypes(d):
    m = linear(d)
    for change in (lambda: m.type(torch.float64), m.float, m.bfloat16, m.half, m.double, lambda: m.to(torch.complex64)):
        change()
        yield m.weight.dtype, m.bias.dtype
    yield raised(lambda: m.to(torch.int32)), raised(lambda: m.cuda()), raised(lambda: torch.ones(2, device=d).cuda())


def registering(d):
    m = nn.Module()
    m.p, m.b = nn.Parameter(torch.ones(2, device=d)), nn.Buffer(torch.ones(2, device=d))
    m.register_buffer("n", torch.ones(1, device=d), persistent=False)
    m.register_parameter("q", None)
    yield raised(lambda: setattr(m, "p", torch.ones(2, device=d)))
    yield raised(lambda: m.register_parameter("t", torch.ones(2, device=d))), raised(lambda: m.register_parameter("u", m.p * 2))
    yield raised(lambda: m.register_buffer("p", torch.ones(1, device=d)))
    m.b = torch.zeros(2, device=d)
    yield list(m.state_dict()), [n for n, _ in m.named_parameters()], [n for n, _ in m.named_buffers()], m.b
    listed = nn.ParameterList([torch.ones(2, device=d), nn.Parameter(torch.zeros(1, device=d))])
    named = nn.ParameterDict({"a": torch.ones(2, device=d)})
    yield [isinstance(p, nn.Parameter) for p in (*listed, named["a"])], len(listed), list(named)


def parameters(d):
    x = torch.ones(2, device=d)
    p = nn.Parameter(x)
    x.add_(1)
    yield p, p.data_ptr() == p.data.data_ptr() == x.data_ptr(), p.grad, p.is_leaf
    yield [isinstance(t, nn.Parameter) for t in (p, p.data, p.detach(), p * 1, p.clone())]
    yield raised(lambda: p.add_(1)), raised(lambda: nn.Parameter(torch.ones(2, dtype=torch.int32, device=d)))
    yield nn.Parameter(torch.ones(2, dtype=torch.int32, device=d), False).dtype
    p.data.mul_(3)
    yield x, repr(p).replace(", device='jax:0'", "")


def structure(d):
    m = net(d)
    yield repr(m), [n for n, _ in m.named_modules()], m.get_parameter("0.weight") is m[0].weight, m.get_buffer("1.running_mean")
    m[0].apply(lambda module: nn.init.constant_(module.weight, 0.5))
    yield m.eval()(data(d)), m.train()(data(d)), m[1].running_var
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(d)
    tied[1].weight = tied[0].weight
    twin = copy.deepcopy(tied)
    yield len(list(tied.parameters())), twin[1].weight is twin[0].weight, len(tied.state_dict())
    m.set_submodule("0", nn.Identity())
    yield raised(lambda: m(data(d)))


def averaging(d):
    m = net(d)
    mean = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    mean.update_parameters(m)
    m[0].weight.data.add_(1)
    mean.update_parameters(m)
    torch.optim.swa_utils.update_bn([data(d)], mean)
    yield mean.module[0].weight, mean.n_averaged, mean.module[1].running_mean


def initialising(d):
    for fill, args in ((nn.init.zeros_, ()), (nn.init.ones_, ()), (nn.init.eye_, ()), (nn.init.constant_, (2.0,))):
        yield fill(torch.empty(3, 3, device=d), *args)
    yield nn.init.dirac_(torch.empty(3, 3, 3, device=d))
    for draw in (nn.init.uniform_, nn.init.normal_, nn.init.xavier_uniform_, nn.init.xavier_normal_, nn.init.kaiming_uniform_,
                 nn.init.kaiming_normal_, nn.init.trunc_normal_, nn.init.orthogonal_):
        torch.manual_seed(0)
        yield draw.__name__, draw(torch.empty(200, 200, device=d)).std().round(decimals=2)
    yield (nn.init.sparse_(torch.empty(10, 4, device=d), 0.3) == 0).sum(0)


SCENES = (loading, cpu_tensors_assigned, state_dicts, state_hooks, hooks, hooks_with_keywords, clipping, zeroing_and_freezing, vectors,
          checkpointing, pruning, reparametrising, fusing, sequences, functional, dtypes, registering, parameters, structure,
          averaging, initialising)


def _frozen(result):
    """A scene goes on with its tensors: keep the values they have now."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, result)


@pytest.mark.parametrize("scene", SCENES, ids=lambda f: f.__name__)
def test_same_as_cpu(scene):
    results = [[_frozen(r) for r in scene(d)] for d in ("cpu", DEVICE)]
    assert len(results[0]) == len(results[1]) > 0
    for want, got in zip(*results):
        oracle.assert_same(got, want, rtol=1e-4, atol=1e-5)


def test_data_parallel_on_one_device():
    reference = net("cpu")
    m = nn.DataParallel(copy.deepcopy(reference).to(DEVICE), device_ids=[0])
    for x in (data("cpu"), data(DEVICE)):
        torch.testing.assert_close(m(x).cpu(), reference(data("cpu")))
    assert nn.DataParallel(linear("cpu"), device_ids=[0]).module.weight.device.type == DEVICE


def test_record_stream_has_nothing_to_do():
    x = torch.ones(2, device=DEVICE)
    x.record_stream(torch.jax.current_stream())
    assert x.tolist() == [1.0, 1.0]


def test_modules_move_by_name():
    m = linear("cpu")
    assert m.jax() is m and m.weight.device == torch.device(DEVICE, 0) and m.to(torch.device(DEVICE)) is m
    with pytest.raises(RuntimeError, match="ordinal"):
        m.jax(99)
    with pytest.raises(RuntimeError, match="jax:99"):
        m.to("jax:99")
