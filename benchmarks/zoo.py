"""The benchmark models, each twice: as a plain torch module, and by hand in plain JAX.

`MODELS[name]` gives a `Model`. The JAX side takes its parameters from the torch module's
`state_dict`, under the same names and in the same layout, so results can be compared and
neither side is helped or hurt by a layout. Nothing here knows torchax_tpu.
"""

import math
from dataclasses import dataclass
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn
from torch.nn import functional as F

LR, MOMENTUM, WEIGHT_DECAY, BETAS, EPS = 1e-2, 0.9, 1e-2, (0.9, 0.999), 1e-8


# ------------------------------------------------------------------ torch


def mlp(width=512, depth=3):
    layers = [nn.Linear(256, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.down = None
        if stride != 1 or cin != cout:
            self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    WIDTHS = (16, 32, 64)

    def __init__(self, blocks=2):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        layers, cin = [], 16
        for width in self.WIDTHS:
            for i in range(blocks):
                layers.append(Block(cin, width, 2 if i == 0 and width != 16 else 1))
                cin = width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(cin, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab=256, dim=128, heads=4, layers=4, length=128):
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.token.weight  # tied
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def torch_optimizer(kind, parameters):
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def torch_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def torch_step(model, optimizer, keep_grads=True):
    """A train step that resets gradients first and leaves them in p.grad, or resets them last and leaves none."""

    def step(x, y):
        if keep_grads:
            optimizer.zero_grad()
        loss = torch_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if not keep_grads:
            optimizer.zero_grad()
        return loss.detach()

    return step


# ------------------------------------------------------------------ JAX
# forward(p, s, x, train) -> logits, new s: parameters and buffers are flat dicts by torch's names.


def _linear(p, name, x):
    y = jnp.einsum("...i,oi->...o", x, p[name + ".weight"])
    return y + p[name + ".bias"] if name + ".bias" in p else y


def jax_mlp(p, s, x, train):
    last = len(p) - 2
    for i in range(0, last, 2):
        x = jax.nn.relu(_linear(p, str(i), x))
    return _linear(p, str(last), x), s


def jax_resnet(p, s, x, train, layout="NCHW"):
    axes = tuple(i for i, c in enumerate(layout) if c != "C")
    spread = (slice(None), None, None) if layout == "NCHW" else ()
    s = dict(s)

    def conv(name, x, stride, pad):
        w = p[name + ".weight"]
        return lax.conv_general_dilated(
            x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=(layout, "OIHW", layout)
        )

    def norm(name, x):
        if train:
            mean, var = jnp.mean(x, axes), jnp.var(x, axes)
            n = x.size / mean.size
            s[name + ".running_mean"] = 0.9 * s[name + ".running_mean"] + 0.1 * mean
            s[name + ".running_var"] = 0.9 * s[name + ".running_var"] + 0.1 * var * (n / (n - 1))
        else:
            mean, var = s[name + ".running_mean"], s[name + ".running_var"]
        scale = p[name + ".weight"] * lax.rsqrt(var + 1e-5)
        return (x - mean[spread]) * scale[spread] + p[name + ".bias"][spread]

    if layout == "NHWC":
        x = x.transpose(0, 2, 3, 1)
    x = jax.nn.relu(norm("bn", conv("stem", x, 1, 1)))
    i, cin = 0, 16
    while f"blocks.{i}.conv1.weight" in p:
        b = f"blocks.{i}."
        stride = 1 if p[b + "conv1.weight"].shape[0] == cin else 2
        cin = p[b + "conv1.weight"].shape[0]
        y = jax.nn.relu(norm(b + "bn1", conv(b + "conv1", x, stride, 1)))
        y = norm(b + "bn2", conv(b + "conv2", y, 1, 1))
        x = jax.nn.relu(y + (norm(b + "down.1", conv(b + "down.0", x, stride, 0)) if stride == 2 else x))
        i += 1
    return _linear(p, "head", jnp.mean(x, axes[1:])), s


def jax_gpt(p, s, ids, train, heads=4):
    def norm(name, x):
        mean = jnp.mean(x, -1, keepdims=True)
        var = jnp.var(x, -1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-5) * p[name + ".weight"] + p[name + ".bias"]

    b, t = ids.shape
    x = p["token.weight"][ids] + p["position.weight"][:t]
    causal = jnp.tril(jnp.ones((t, t), bool))
    i = 0
    while f"layers.{i}.qkv.weight" in p:
        n = f"layers.{i}."
        q, k, v = jnp.moveaxis(_linear(p, n + "qkv", norm(n + "ln1", x)).reshape(b, t, 3, heads, -1), 2, 0)
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(causal, logits, -jnp.inf), axis=-1)
        a = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + _linear(p, n + "out", a.reshape(b, t, -1))
        x = x + _linear(p, n + "down", jax.nn.gelu(_linear(p, n + "up", norm(n + "ln2", x)), approximate=True))
        i += 1
    return jnp.einsum("...i,oi->...o", norm("norm", x), p["token.weight"]), s


def jax_optimizer(kind):
    """init(p) -> o and update(p, g, o) -> p, o: torch's SGD with momentum and AdamW."""
    tmap = jax.tree.map

    def sgd(p, g, o):
        o = tmap(lambda m, g: MOMENTUM * m + g, o, g)
        return tmap(lambda p, m: p - LR * m, p, o), o

    def adamw(p, g, o):
        t = o["t"] + 1
        m = tmap(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, o["m"], g)
        v = tmap(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, o["v"], g)
        rate, root = LR / (1 - BETAS[0] ** t), jnp.sqrt(1 - BETAS[1] ** t)
        p = tmap(lambda p, m, v: p * (1 - LR * WEIGHT_DECAY) - rate * m / (jnp.sqrt(v) / root + EPS), p, m, v)
        return p, {"t": t, "m": m, "v": v}

    zeros = lambda p: tmap(jnp.zeros_like, p)
    if kind == "sgd":
        return zeros, sgd
    return lambda p: {"t": jnp.zeros((), jnp.float32), "m": zeros(p), "v": zeros(p)}, adamw


def jax_step(forward, update, keep_grads=False):
    """A train step; with ``keep_grads`` it also returns the gradients, as torch leaves them in p.grad."""

    def loss_of(p, s, x, y):
        logits, s = forward(p, s, x, True)
        logp = jax.nn.log_softmax(logits.reshape(-1, logits.shape[-1]))
        return -jnp.mean(jnp.take_along_axis(logp, y.reshape(-1, 1), 1)), s

    def step(p, s, o, x, y):
        (loss, s), g = jax.value_and_grad(loss_of, has_aux=True)(p, s, x, y)
        p, o = update(p, g, o)
        return (p, s, o, loss, g) if keep_grads else (p, s, o, loss)

    return step


# ------------------------------------------------------------------ both


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    forward: Callable  # JAX: (p, s, x, train) -> logits, s
    optimizer: str
    inputs: Callable[[np.random.Generator], tuple]
    # other hand-written forms of the same, which may be faster somewhere
    others: tuple = ()

    def module(self, seed=0):
        torch.manual_seed(seed)
        return self.build()

    def batch(self, seed=0):
        """x, y as numpy arrays."""
        return self.inputs(np.random.default_rng(seed))

    def state(self, module):
        """The module's values as two dicts of jax arrays: parameters, buffers."""
        convert = lambda named: {k: jnp.array(v.detach().cpu().numpy()) for k, v in named if v.is_floating_point()}
        return convert(module.named_parameters()), convert(module.named_buffers())


MODELS = {
    "mlp": Model(
        mlp,
        jax_mlp,
        "sgd",
        lambda r: (r.standard_normal((128, 256), np.float32), r.integers(0, 10, (128,)).astype(np.int32)),
    ),
    "resnet": Model(
        ResNet,
        jax_resnet,
        "sgd",
        lambda r: (r.standard_normal((32, 3, 32, 32), np.float32), r.integers(0, 10, (32,)).astype(np.int32)),
        others=(("nhwc", lambda p, s, x, train: jax_resnet(p, s, x, train, "NHWC")),),
    ),
    "gpt": Model(
        GPT,
        jax_gpt,
        "adamw",
        lambda r: tuple(r.integers(0, 256, (8, 128)).astype(np.int32) for _ in range(2)),
    ),
}
