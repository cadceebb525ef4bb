"""Recurrent layers and cells in their options, packed sequences, dropout, double backward, jit; CTC loss."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

import torchax_tpu
from tests import oracle

DEVICE = oracle.DEVICE
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}
OPTIONS = [  # num_layers, bidirectional, batch_first, bias, proj_size, packed
    (1, False, False, True, 0, False), (2, True, True, True, 3, False), (2, True, True, False, 3, True),
    (1, True, False, True, 0, True)]


def make(kind, **options):
    if kind == "relu":
        options["nonlinearity"] = "relu"
    if kind != "lstm":
        options.pop("proj_size", None)
    return KINDS[kind](4, 5, **options)


def pair(module):
    return (module, "cpu"), (copy.deepcopy(module).to(DEVICE), DEVICE)


def leaf(x, device):
    return x.detach().clone().to(device).requires_grad_()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layer(kind, options):
    torch.manual_seed(0)
    layers, bidirectional, batch_first, bias, proj, packed = options
    module = make(kind, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias,
                  proj_size=proj)
    x, results = torch.randn(3, 6, 4) if batch_first else torch.randn(6, 3, 4), []
    for m, device in pair(module):
        y = leaf(x, device)
        given = y
        if packed:
            given = rnn.pack_padded_sequence(y, torch.tensor([4, 6, 2]), batch_first=batch_first, enforce_sorted=False)
        out, state = m(given)
        if packed:
            out, lengths = rnn.pad_packed_sequence(out, batch_first=batch_first, padding_value=-1.0, total_length=7)
            assert lengths.tolist() == [4, 6, 2]
        states = state if isinstance(state, tuple) else (state,)
        (out.square().sum() + sum(s.sin().sum() for s in states)).backward()
        results.append((out, states, y.grad, [p.grad for p in m.parameters()]))
    oracle.assert_same(results[1], results[0], 1e-4, 1e-5)


@pytest.mark.parametrize("cls", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cell(cls, bias):
    torch.manual_seed(0)
    x, results = torch.randn(3, 4), []
    for m, device in pair(cls(4, 5, bias=bias)):
        y = leaf(x, device)
        state = m(y, m(y))
        states = state if isinstance(state, tuple) else (state,)
        sum(s.square().sum() for s in states).backward()
        results.append((states, y.grad, [p.grad for p in m.parameters()]))
    oracle.assert_same(results[1], results[0], 1e-4, 1e-5)


def test_cell_with_one_unused_result():
    torch.manual_seed(0)
    x, results = torch.randn(3, 4), []
    for m, device in pair(nn.LSTMCell(4, 5)):
        y = leaf(x, device)
        m(y)[1].sum().backward()
        results.append((y.grad, m.weight_hh.grad))
    oracle.assert_same(results[1], results[0], 1e-4, 1e-5)


def test_a_whole_layer_is_one_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names = []
    module, x = nn.LSTM(4, 5, 2).to(DEVICE), torch.randn(6, 3, 4).to(DEVICE)
    state = (torch.zeros(2, 3, 5, device=DEVICE),) * 2
    with Log():
        out = module(x, state)[0]
        loss = out.sum()
        names.clear()
        loss.backward()
    assert sum("rnn" in n for n in names) == 1, names


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_double_backward(kind):
    torch.manual_seed(0)
    x, results = torch.randn(4, 2, 4), []
    for m, device in pair(make(kind)):
        y = leaf(x, device)
        g, = torch.autograd.grad(m(y)[0].square().sum(), y, create_graph=True)
        g.square().sum().backward()
        results.append((y.grad, [p.grad for p in m.parameters()]))
    oracle.assert_same(results[1], results[0], 1e-4, 1e-5)


def test_modes_agree():
    """Inference mode, jit, and torch.func's functional call give what eager gives."""
    torch.manual_seed(0)
    module = nn.GRU(4, 5)
    twin, x = copy.deepcopy(module).to(DEVICE), torch.randn(6, 3, 4)
    ref = module(x)[0]
    with torch.inference_mode():
        oracle.assert_same(twin(x.to(DEVICE))[0], ref, 1e-4, 1e-5)
    oracle.assert_same(torchax_tpu.jit(lambda t: twin(t)[0])(x.to(DEVICE)), ref, 1e-4, 1e-5)
    got = torch.func.functional_call(twin, dict(twin.named_parameters()), (x.to(DEVICE),))[0]
    oracle.assert_same(got, ref, 1e-4, 1e-5)


def test_dropout_between_layers():
    torch.manual_seed(0)
    module, x = nn.GRU(4, 64, 2, dropout=0.5).to(DEVICE), torch.randn(6, 3, 4).to(DEVICE)
    a, b = module(x)[0], module(x)[0]
    assert bool((a != b).any())
    torch.manual_seed(3)
    a = module(x)[0]
    torch.manual_seed(3)
    assert torch.equal(a, module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


def test_dropout_gradient_uses_the_same_mask():
    """With everything dropped between the layers, no gradient reaches the first one."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.RNN(4, 5, 2, dropout=1.0).to(DEVICE)
    module(torch.randn(6, 3, 4).to(DEVICE))[0].sum().backward()
    assert bool((module.weight_ih_l0.grad == 0).all()) and bool((module.weight_ih_l1.grad == 0).all())
    assert bool((module.weight_hh_l1.grad != 0).any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_other_dtypes(dtype):
    torch.manual_seed(0)
    module, x = nn.LSTM(4, 5, bidirectional=True).to(dtype), torch.randn(6, 3, 4, dtype=dtype)
    ref = module(x)
    got = copy.deepcopy(module).to(DEVICE)(x.to(DEVICE))
    oracle.assert_same(got, ref, *((1e-9, 1e-10) if dtype == torch.float64 else (3e-2, 3e-2)))


def test_unsorted_lengths_are_refused():
    for device in ("cpu", DEVICE):
        with pytest.raises(RuntimeError, match="decreasing"):
            rnn.pack_padded_sequence(torch.zeros(4, 2, 3, device=device), torch.tensor([2, 4]))


# ---------------------------------------------------------------- CTC


@pytest.mark.parametrize("form", ["padded", "flat", "lists", "cpu lengths", "single"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss(form, reduction):
    """Padded and concatenated targets, repeated labels, an empty and an impossible one, short inputs."""
    torch.manual_seed(0)
    logits = torch.randn(9, 4, 5)
    rows = [[1, 1, 2], [3, 3, 3, 3, 3], [], [4, 2, 4, 1]]
    lengths, targets = [9, 6, 7, 8], [len(r) for r in rows]
    padded = torch.tensor([r + [0] * (5 - len(r)) for r in rows])
    results = []
    for device in ("cpu", DEVICE):
        x = leaf(logits, device)
        label, sizes = padded, (torch.tensor(lengths), torch.tensor(targets))
        if form == "flat":
            label = torch.tensor([label for row in rows for label in row])
        elif form == "lists":
            sizes = (tuple(lengths), tuple(targets))
        log_probs = x.log_softmax(-1)
        if form == "single":
            log_probs, label, sizes = log_probs[:, 3], padded[3, :4], (torch.tensor(8), torch.tensor(4))
        if form != "cpu lengths" and form != "lists":
            sizes = tuple(s.to(device) for s in sizes)
        loss = F.ctc_loss(log_probs, label.to(device), *sizes, reduction=reduction, zero_infinity=True)
        loss.sum().backward()
        results.append((loss, x.grad))
    oracle.assert_same(results[1], results[0], 1e-4, 1e-5)


def test_ctc_loss_of_an_impossible_target_is_infinite():
    log_probs = torch.zeros(3, 1, 4, device=DEVICE).log_softmax(-1)
    loss = F.ctc_loss(log_probs, torch.tensor([[1, 1, 2]], device=DEVICE), (3,), (3,), reduction="none")
    assert loss.item() == float("inf")
    with pytest.raises(RuntimeError, match="input_lengths"):
        F.ctc_loss(log_probs, torch.tensor([[1, 1, 2]], device=DEVICE), (4,), (3,))
