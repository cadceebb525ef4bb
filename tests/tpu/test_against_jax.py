"""Small torch programs against the same by hand in JAX, both compiled for TPU: what `benchmarks/tpu_models.py` does at length."""

import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import torchax_tpu
from torchax_tpu.tpu import dry_run

from .test_dry_run import needs_libtpu

pytestmark = needs_libtpu
array = jax.ShapeDtypeStruct


def _close(ours, hand, spare=4096):
    """Within the project's targets: matmul cycles, HBM traffic, temporaries."""
    assert ours.matmul_cycles <= 1.03 * hand.matmul_cycles
    assert ours.hbm_bytes <= 1.10 * hand.hbm_bytes
    assert ours.memory.temporaries <= 1.10 * hand.memory.temporaries + spare


@pytest.mark.parametrize("keep_grads", [False, True])
def test_a_train_step_fuses_its_update(keep_grads):
    widths = (256, 512, 512, 128)

    def hand(ws, ms, x, y):
        def loss(ws):
            for i, w in enumerate(ws):
                x_ = jnp.einsum("ni,oi->no", x_ if i else x, w)
                x_ = jax.nn.relu(x_) if i < len(ws) - 1 else x_
            return jnp.mean((x_ - y) ** 2)

        value, grads = jax.value_and_grad(loss)(ws)
        ms = [0.9 * m + g for m, g in zip(ms, grads)]
        out = [w - 0.1 * m for w, m in zip(ws, ms)], ms, value
        return (*out, grads) if keep_grads else out

    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(a, b, bias=False), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1]).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torchax_tpu.jit
    def step(x, y):
        if keep_grads:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if not keep_grads:
            optimizer.zero_grad()
        return loss.detach()

    x, y = torch.randn(128, 256, device="jax"), torch.randn(128, 128, device="jax")
    step(x, y)
    ours = dry_run(step, x, y)
    ws = [array((b, a), jnp.float32) for a, b in zip(widths, widths[1:])]
    theirs = dry_run(jax.jit(hand, donate_argnums=(0, 1)), ws, ws, array((128, 256), jnp.float32), array((128, 128), jnp.float32))
    _close(ours, theirs)
    assert ours.memory.outputs <= theirs.memory.outputs + 4096


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_with_its_backward(groups):
    b, t, heads, d = 4, 128, 4, 32
    kv = heads // groups

    def hand(x, w):
        q, k, v = jnp.split((x @ w).reshape(b, t, heads + 2 * kv, d), (heads, heads + kv), axis=2)
        q = q.reshape(b, t, kv, groups, d)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / math.sqrt(d)
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
        return jnp.sum(jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), v) ** 2)

    @torchax_tpu.jit
    def ours(x, w):
        w = w.detach().requires_grad_()
        q, k, v = (x @ w).view(b, t, heads + 2 * kv, d).split((heads, kv, kv), dim=2)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1).square().sum().backward()
        return w.grad

    shapes = (b, t, 128), (128, (heads + 2 * kv) * d)
    report = dry_run(ours, *(torch.randn(s, device="jax") for s in shapes))
    theirs = dry_run(jax.grad(hand, argnums=1), *(array(s, jnp.float32) for s in shapes))
    _close(report, theirs)


def test_cross_entropy_compares_classes_in_32_bits():
    n, width, classes = 1024, 256, 1024

    def hand(h, w, t):
        logp = jax.nn.log_softmax(h @ w)
        return -jnp.mean(jnp.take_along_axis(logp, t[:, None], 1))

    @torchax_tpu.jit
    def ours(h, w, t):
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
        F.cross_entropy(h @ w, t).backward()
        return h.grad, w.grad

    h, w = torch.randn(n, width, device="jax"), torch.randn(width, classes, device="jax")
    report = dry_run(ours, h, w, torch.zeros(n, dtype=torch.int64, device="jax"))
    theirs = dry_run(jax.grad(hand, argnums=(0, 1)), array((n, width), jnp.float32), array((width, classes), jnp.float32),
                     array((n,), jnp.int32))  # fmt: skip
    _close(report, theirs, spare=2**18)  # some vectors of a number per row


def test_random_draws_are_a_few_kernels():
    """The key of each draw is made of single numbers, which the scalar unit computes without launching anything."""

    @torchax_tpu.jit
    def draw(x):
        return F.dropout(F.dropout(x, 0.5), 0.5)

    assert dry_run(draw, torch.ones(64, 256, device="jax")).kernels < 25
