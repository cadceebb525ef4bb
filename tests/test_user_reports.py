"""Small programs of the kinds that users of PyTorch-on-XLA backends reported broken: each runs on CPU and on the device.

Every function takes the device (and `jit` for programs to compile) and returns plain results;
both runs must agree in values, dtypes and shapes.
"""

import io

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


def seeded(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------- views and in-place writes


@program
def broadcast_view_writes_one_element(device):
    base = torch.arange(4.0, device=device)
    base.expand(2, 3, 4)[1, 2, 3] = -7
    rows = torch.zeros(3, 1, device=device)
    rows.expand(3, 5)[1].fill_(2)
    return base, rows


@program
def chains_of_views_reach_the_base(device):
    a = torch.arange(24.0).to(device)
    b = a.view(4, 6).t()[1:5]
    b[::2] *= 3
    b.flatten()[0:1].add_(100)  # a copy: not contiguous
    c = a.view(2, 3, 4).permute(2, 0, 1).select(0, 3)
    c -= 1
    return a, b.clone(), c.clone()


@program
def logical_and_arithmetic_writes_through_strided_bool_views(device):
    m = torch.zeros(11, dtype=torch.bool, device=device)
    m[1:].fill_(True)
    m[::3] ^= True
    m[4:8].logical_not_()
    return m


@program
def inplace_result_is_still_the_slice(device):
    x = torch.ones(3, 4, device=device)
    h = x[:, 1:3].mul_(2).add_(1)
    h[0] = 0
    k = h.zero_() if x.shape[0] == 2 else h.neg_()
    x.add_(k.sum())
    return x, h.clone()


@program
def copy_broadcasts_and_converts(device):
    out = torch.zeros(2, 3, 4).to(device)
    out.copy_(torch.arange(3, dtype=torch.uint8).to(device).view(3, 1))
    i = torch.zeros(2, 2, dtype=torch.int16).to(device)
    i.copy_(torch.tensor([-1.9, 300.7]).to(device))
    part = torch.zeros(4, 4).to(device)
    part[1:3, ::3].copy_(torch.arange(4).view(2, 2))
    return out, i, part


@program
def slice_assignment_converts(device):
    h = torch.zeros(6, dtype=torch.float16).to(device)
    h[1:3] = torch.tensor([1, 2]).to(device)
    h[3:] = torch.tensor(True).to(device)
    i = torch.zeros(2, 3, dtype=torch.int64).to(device)
    i[:, 1] = torch.tensor([7.9, -7.9]).to(device)
    i[0] = 5
    return h, i


# ---------------------------------------------------------------- indexing


@program
def boolean_masks_of_every_rank(device):
    x = torch.arange(24, dtype=torch.int16).view(2, 3, 4).to(device)
    m = x % 5 == 0
    rows = torch.tensor([[True, False, True], [False, False, True]]).to(device)
    return x[m], x[rows], x[rows, 1:3], x[:, torch.tensor([False, True, False]).to(device)], x[x > 99], x[m[0, 0].any()]


@program
def mask_then_index_writes_a_copy_index_then_mask_the_base(device):
    b = torch.zeros(3, 4, 2).to(device)
    m = (torch.arange(12).view(3, 4) % 2 == 0).to(device)
    b[m][:, 1] = 9
    one = b.clone()
    b[..., 1][m] = 4
    b[m] += 1
    b[torch.tensor([0, 2]).to(device), 1] = torch.tensor([[1.0, 2.0]]).to(device)
    return one, b


@program
def scatter_reduce_every_reduction(device):
    src = seeded(4, 5).to(device)
    idx = torch.tensor([[0, 1, 1, 2, 0], [2, 2, 2, 0, 1], [0, 0, 0, 0, 0], [1, 2, 0, 1, 2]]).to(device)
    base = seeded(4, 3, seed=1).to(device)
    return [base.scatter_reduce(1, idx, src, reduce=r, include_self=s)
            for r in ("sum", "prod", "mean", "amax", "amin") for s in (True, False)]


@program
def flips_and_rolls(device):
    x = torch.arange(6).view(1, 2, 3).to(device)
    return x.flip(0), x.flip(-1, 1), x.flip(()), x.transpose(0, 2).flip(1), x.roll(2), x.roll((1, 1), (1, 2)), x.rot90(1, (1, 2))


@program
def selection_keeps_dtypes(device):
    i = torch.tensor([3, 0, 0]).to(device)
    out = []
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.bool, torch.complex64):
        x = (torch.arange(5) % 3).to(dtype).to(device)
        out += [x[i], x.take(i), x.index_select(0, i), x.gather(0, i), x.flip(0), x.repeat(2), x.unfold(0, 2, 1)]
    return out


# ---------------------------------------------------------------- dtypes and numerics


@program
def float_functions_promote_integers(device):
    x = torch.tensor([1, 2, 5], dtype=torch.int16).to(device)
    b = torch.tensor([True, False]).to(device)
    return (x.sin(), x.rsqrt(), b.exp(), x.sigmoid(), x / 4, x.true_divide(x), torch.atan2(x, x), torch.special.expm1(b),
            2 ** x, 0.5 - x, x.erf(), x.float().mean(), x * 1.5, x // 2, b + b, b * 2.0)


@program
def clamp_promotes_to_its_bounds(device):
    x = torch.tensor([-3, 0, 9], dtype=torch.int64).to(device)
    lo = torch.tensor(0.5).to(device)
    return x.clamp(min=-0.5), x.clamp(0.1, 5.5), x.clamp(max=4), x.clamp(lo), torch.clamp_max(x, 2.5), x.clamp(-1, None)


@program
def int64_is_exact(device):
    x = torch.tensor([2**40 + 1, -(2**62), 3]).to(device)
    return (x * 3, x >> 20, x.sum(), x.cumsum(0), x.max(), x == 2**40 + 1, x.sort().values, (x % 1000).tolist(),
            int(x[0]), torch.arange(2**33, 2**33 + 3, device=device), x.double())


@program
def nan_in_extremes(device):
    x = torch.tensor([1.0, float("nan"), -float("inf"), 2.0]).to(device)
    y = torch.tensor([float("nan"), 0.0, 5.0, float("inf")]).to(device)
    return (torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), torch.fmin(x, y), x.max(), x.amin(), x.sort().values,
            x.argmax(), x.clamp(0, 1), x.cummax(0).values)


@program
def fft_round_trips(device):
    out = []
    for n in (7, 8):
        x = seeded(2, n).to(device)
        s = torch.fft.rfft(x, norm="ortho")
        out += [torch.fft.irfft(s, n=n, norm="ortho"), s.abs(), torch.fft.ifft(torch.fft.fft(x)).real.clone()]
    return [*out, torch.fft.fftshift(torch.arange(6.0).to(device)), torch.fft.fftfreq(5, device=device)]


@program
def attention_with_blocked_rows(device):
    q, k, v = (seeded(2, 3, 4, 8, seed=s).to(device) for s in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril().to(device)
    mask[2] = False
    bias = torch.zeros(4, 4).to(device).masked_fill(~mask, float("-inf"))
    return (F.scaled_dot_product_attention(q, k, v, attn_mask=mask), F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[:, :, :2])


@program
def cross_entropy_options(device):
    target = torch.tensor([2, -100, 0, 1]).to(device)
    out = []
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.2):
            x = seeded(4, 3).to(device).requires_grad_()
            loss = F.cross_entropy(x, target, torch.tensor([0.2, 1.0, 2.0]).to(device), reduction=reduction,
                                   label_smoothing=smoothing)
            loss.sum().backward()
            out += [loss, x.grad]
    return out


# ---------------------------------------------------------------- gradients and modules


@program
def transposed_convolutions(device):
    out = []
    for args in (dict(stride=2), dict(stride=2, padding=1, output_padding=1, groups=2, dilation=2), dict(padding=2)):
        x, w = seeded(2, 4, 3, 3).to(device).requires_grad_(), seeded(4, 2, 3, 3, seed=1).to(device).requires_grad_()
        y = F.conv_transpose2d(x, w, **args)
        y.sin().sum().backward()
        out += [y, x.grad, w.grad]
    return [*out, F.conv_transpose1d(seeded(1, 2, 4).to(device), seeded(2, 1, 2, seed=2).to(device), stride=3)]


@program
def inplace_write_cuts_the_gradient(device):
    w = seeded(5, 3).to(device).requires_grad_()
    h = F.linear(seeded(2, 3, seed=1).to(device), w)
    h[:, 1:3] = 0
    h[1].mul_(3)
    h.view(-1)[9] = 5.0
    h.pow(2).sum().backward()
    return h, w.grad


@program
def expanded_cotangents(device):
    x = seeded(4, 2).to(device).requires_grad_()
    y = x.tanh() @ seeded(2, 3, seed=1).to(device)
    return [torch.autograd.grad(y, x, torch.ones((), device=device).expand(4, 3), retain_graph=True)[0],
            torch.autograd.grad(y.sum(), x, retain_graph=True)[0], torch.autograd.grad(y.mean(0).max(), x)[0]]


@program
def batch_norm_moves_its_buffers(device):
    m = nn.BatchNorm2d(3, momentum=None).to(device)
    x = seeded(4, 5, 2, 3).to(device).requires_grad_()
    y = m(x.permute(0, 3, 1, 2))
    y = y + m(x.permute(0, 3, 1, 2) * 2)
    (y * seeded(4, 3, 5, 2, seed=1).to(device)).sum().backward()
    m.eval()
    return y, x.grad, m.weight.grad, m.running_mean, m.running_var, m.num_batches_tracked, m(seeded(1, 3, 2, 2).to(device))


@program
def tied_parameters_stay_tied(device):
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    with torch.no_grad():
        a.weight.copy_(seeded(3, 3))
    b.weight = a.weight
    m = nn.Sequential(a, b)
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    m.to(device)
    with torch.no_grad():
        a.bias.zero_()
        b.bias.zero_()
    m(torch.ones(2, 3).to(device)).sum().backward()
    opt.step()
    return a.weight is b.weight, len(list(m.parameters())), m[0].weight, m[1].weight.grad


@program
def transformer_encoder_with_masks(device):
    torch.manual_seed(0)
    m = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2).eval()
    with torch.no_grad():
        for i, p in enumerate(m.parameters()):
            p.copy_(seeded(*p.shape, seed=i) * 0.3)
    m.to(device)
    x = seeded(2, 4, 8).to(device)
    pad = torch.tensor([[False, False, True, True], [False] * 4]).to(device)
    with torch.no_grad():
        return m(x, src_key_padding_mask=pad)[0, :2], m(x, mask=nn.Transformer.generate_square_subsequent_mask(4).to(device))


@program
def empty_matrix_products(device):
    def z(*s):
        return torch.zeros(*s).to(device)
    return (z(0, 3) @ z(3), z(2, 0) @ z(0, 3), F.linear(z(2, 0), z(4, 0), torch.arange(4.0).to(device)), z(0).dot(z(0)),
            torch.bmm(z(0, 2, 3), z(0, 3, 1)), torch.addmm(torch.ones(2, 2).to(device), z(2, 0), z(0, 2), beta=0.5), z(0, 3).sum(0))


# ---------------------------------------------------------------- mixing, saving, showing


@program
def zero_dim_cpu_tensors_join_in(device):
    x = torch.tensor([1.0, -2.0]).to(device)
    s, i = torch.tensor(0.5, dtype=torch.float64), torch.tensor(3)
    return (x * s, s - x, x + i, x > s, x ** i, torch.where(x > s, x, s), x.clone().mul_(s), torch.atan2(x, s),
            x.masked_fill(x < 0, s), (x * s).device.type == torch.device(device).type)


@program
def saved_tensors_load_on_the_cpu(device):
    base = torch.arange(6.0).view(2, 3).to(device)
    state = {"t": base.t(), "h": base.bfloat16(), "flag": torch.tensor(True).to(device), "n": 3, "p": nn.Parameter(base)}
    f = io.BytesIO()
    torch.save(state, f)
    f.seek(0)
    back = torch.load(f, map_location="cpu", weights_only=True)
    return [back["t"].clone(), back["h"], back["flag"], back["n"], back["p"].detach(), str(back["t"].device)]


@program
def printing(device):
    def show(t):
        return repr(t).replace(f", device='{t.device}'", "") if device != "cpu" else repr(t)
    x = torch.tensor([[0.5, -1.0], [1e-3, 100.0]]).to(device)
    return [show(x), show(x > 0), show(x.int()), show(x.half()), show(x[0, 0]), show(x[:0]), f"{x[0, 1]:.3f}", "%d" % x[1, 1],
            show(torch.arange(2000).to(device)), str(x.shape), format(x[0, 0]), show(x.t().clone().requires_grad_())]


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_program(fn):
    assert_same(fn(DEVICE), fn("cpu"), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- random numbers and jit


def test_manual_seed_covers_every_source():
    def draw(seed):
        torch.manual_seed(seed)
        return [torch.empty(40, device=DEVICE).uniform_(), torch.randn(40, device=DEVICE), torch.rand(40, device=DEVICE),
                torch.randint(0, 99, (40,), device=DEVICE), torch.randperm(40, device=DEVICE),
                F.dropout(torch.ones(40, device=DEVICE)), torch.empty(40, device=DEVICE).normal_(),
                torch.bernoulli(torch.full((40,), 0.5, device=DEVICE))]

    for a, b, c in zip(draw(1), draw(1), draw(2)):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_multinomial_keeps_to_its_weights():
    torch.manual_seed(0)
    w = torch.tensor([0.0, 3.0, 0.0, 1.0], device=DEVICE)
    n = torch.bincount(torch.multinomial(w, 4000, replacement=True), minlength=4).cpu()
    assert n[0] == n[2] == 0 and abs(n[1] / 4000 - 0.75) < 0.04
    for row in torch.multinomial(torch.ones(20, 5, device=DEVICE), 5).tolist():
        assert sorted(row) == list(range(5))
    assert {int(torch.multinomial(torch.tensor([1e-30, 0.0, 1e-30], device=DEVICE), 1)) for _ in range(20)} <= {0, 2}


def test_jitted_random_functions_draw_afresh():
    torch.manual_seed(0)
    x = torch.ones(64, 64, device=DEVICE)
    for f in (torchax_tpu.jit(lambda t: F.dropout(t, 0.5)), torchax_tpu.jit(lambda t: t + torch.randn(64, 64, device=DEVICE))):
        a, b, c = f(x), f(x), f(x)
        assert not torch.equal(a, b) and not torch.equal(b, c) and not torch.equal(a, c)


def test_jitted_inplace_through_a_flat_view():
    def f(a, b):
        c = a.exp()
        flat = c.view(-1)
        flat[1:] += b.reshape(-1)[1:]
        b.mul_(2)
        return c, flat, b

    a, b = seeded(2, 3), seeded(2, 3, seed=1)
    da, db = a.to(DEVICE), b.to(DEVICE)
    assert_same(torchax_tpu.jit(f)(da, db), f(a, b))
    assert_same(db, b)
