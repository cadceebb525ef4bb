"""Recurrent layers: a whole LSTM, GRU or RNN as one program (scans over time), and the fused cells.

`torchax_tpu::rnn` and its backward are this project's own ops: torch has no op with a formula for
a whole recurrent stack outside cuDNN. `..fused` brings the composites (`aten::lstm.input` ...) here.
Backward runs the recurrence again and differentiates it; nothing but the inputs is kept.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..dtypes import cast, opmath
from ..registry import aten, op

_STATIC = "str mode, bool has_biases, int num_layers, float dropout, bool bidirectional, bool batch_first"
_INPUTS = "Tensor input, Tensor? batch_sizes, Tensor[] weights, Tensor hx, Tensor? cx, Tensor? seed"
library = torch.library.Library("torchax_tpu", "FRAGMENT")
library.define(f"rnn({_INPUTS}, {_STATIC}) -> (Tensor, Tensor, Tensor)")
library.define(f"rnn_backward(Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, {_INPUTS}, {_STATIC}) "
               "-> (Tensor, Tensor, Tensor, Tensor[])")


# ---------------------------------------------------------------- cells, on activations in the compute dtype


def _lstm_step(gates, c):
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru_step(x_gates, h_gates, h):
    xr, xz, xn = jnp.split(x_gates, 3, axis=-1)
    hr, hz, hn = jnp.split(h_gates, 3, axis=-1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + r * hn)
    return n + z * (h - n)


_ACTIVATION = {"tanh": jnp.tanh, "relu": jax.nn.relu}


def _project(x, weight, bias, dtype):
    """x W^T + b, accumulated in the compute dtype."""
    y = jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=dtype)
    return y if bias is None else y + cast(bias, dtype)


def _layer(x, mask, weights, h, c, mode, reverse):
    """One layer in one direction over (T, B, I): (outputs, last h, last c)."""
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    dtype, compute = x.dtype, opmath(x.dtype)
    h = cast(h, compute)
    c = None if c is None else cast(c, compute)
    x_gates = _project(x, w_ih, b_ih, compute)
    if mode != "gru" and b_hh is not None:
        x_gates = x_gates + cast(b_hh, compute)

    def step(carry, at):
        h, c = carry
        gates, on = at
        h_gates = _project(cast(h, dtype), w_hh, b_hh if mode == "gru" else None, compute)
        new_c = c
        if mode == "lstm":
            new_h, new_c = _lstm_step(gates + h_gates, c)
            if w_hr is not None:
                new_h = _project(cast(new_h, dtype), w_hr, None, compute)
        elif mode == "gru":
            new_h = _gru_step(gates, h_gates, h)
        else:
            new_h = _ACTIVATION[mode](gates + h_gates)
        if on is not None:  # a sequence that has ended (or, backwards, not begun) keeps its state
            new_h = jnp.where(on[:, None], new_h, h)
            new_c = None if c is None else jnp.where(on[:, None], new_c, c)
        return (new_h, new_c), cast(new_h, dtype)

    (h, c), out = jax.lax.scan(step, (h, c), (x_gates, mask), reverse=reverse)
    return out, cast(h, dtype), None if c is None else cast(c, dtype)


class _Packing:
    """Where the rows of a packed sequence stand in (time, batch)."""

    def __init__(self, rows, batch_sizes, batch):
        sizes = batch_sizes.astype(np.int32)
        ends = jnp.cumsum(sizes)
        starts = ends - sizes
        lane = jax.lax.broadcasted_iota(np.int32, (sizes.shape[0], batch), 1)
        self.mask = lane < sizes[:, None]
        self.source = jnp.clip(starts[:, None] + lane, 0, max(rows - 1, 0))
        row = jnp.arange(rows, dtype=np.int32)
        self.time = jnp.sum(ends[None, :] <= row[:, None], axis=1, dtype=np.int32)
        self.lane = row - starts[self.time]

    def unpack(self, data):
        return jnp.where(self.mask[:, :, None], data[self.source], jnp.zeros((), data.dtype))

    def pack(self, padded):
        return padded[self.time, self.lane]


def _dropped(x, seed, layer, p):
    if p >= 1:
        return jnp.zeros_like(x)
    key = jax.random.fold_in(jax.random.wrap_key_data(cast(seed, np.uint32)), layer)
    kept = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(kept, x / np.asarray(1 - p, opmath(x.dtype)), jnp.zeros((), x.dtype)).astype(x.dtype)


def _stack(input, batch_sizes, weights, hx, cx, seed, mode, has_biases, num_layers, dropout, bidirectional,
           batch_first):
    """(output, hy, cy or None) of a whole recurrent stack."""
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    packing = None if batch_sizes is None else _Packing(input.shape[0], batch_sizes, hx.shape[1])
    x = packing.unpack(input) if packing else jnp.swapaxes(input, 0, 1) if batch_first else input
    hs, cs = [], []
    for layer in range(num_layers):
        outs = []
        for d in range(directions):
            k = layer * directions + d
            own = list(weights[k * each:(k + 1) * each])
            w_hr = own.pop() if len(own) in (3, 5) else None
            w_ih, w_hh, b_ih, b_hh = own if has_biases else (*own, None, None)
            out, h, c = _layer(x, packing.mask if packing else None, (w_ih, w_hh, b_ih, b_hh, w_hr), hx[k],
                               None if cx is None else cx[k], mode, d == 1)
            outs.append(out)
            hs.append(h)
            cs.append(c)
        x = outs[0] if directions == 1 else jnp.concatenate(outs, axis=-1)
        if seed is not None and layer < num_layers - 1:
            x = _dropped(x, seed, layer, dropout)
    x = packing.pack(x) if packing else jnp.swapaxes(x, 0, 1) if batch_first else x
    return x, jnp.stack(hs), None if cx is None else jnp.stack(cs)


@op(torch.ops.torchax_tpu.rnn.default, static=("dropout",))
def rnn(input, batch_sizes, weights, hx, cx, seed, mode, has_biases, num_layers, dropout, bidirectional, batch_first):
    return _stack(input, batch_sizes, weights, hx, cx, seed, mode, has_biases, num_layers, dropout, bidirectional,
                  batch_first)


@op(torch.ops.torchax_tpu.rnn_backward.default, static=("dropout",))
def rnn_backward(grad_output, grad_hy, grad_cy, input, batch_sizes, weights, hx, cx, seed, mode, has_biases,
                 num_layers, dropout, bidirectional, batch_first):
    def forward(input, weights, hx, cx):
        return _stack(input, batch_sizes, weights, hx, cx, seed, mode, has_biases, num_layers, dropout, bidirectional,
                      batch_first)

    outs, back = jax.vjp(forward, input, list(weights), hx, cx)
    given = [None if o is None else jnp.zeros_like(o) if g is None else cast(g, o.dtype)
             for o, g in zip(outs, (grad_output, grad_hy, grad_cy))]
    g_input, g_weights, g_hx, g_cx = back(tuple(given))
    return g_input, g_hx, g_cx, list(g_weights)


# ---------------------------------------------------------------- fused cells (nn.LSTMCell, nn.GRUCell)


def _sum_gates(compute, *parts):
    parts = [cast(p, compute) for p in parts if p is not None]
    out = parts[0]
    for p in parts[1:]:
        out = out + p
    return out


@op(aten._thnn_fused_lstm_cell.default)
def thnn_fused_lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    compute = opmath(cx.dtype)
    gates = _sum_gates(compute, input_gates, hidden_gates, input_bias, hidden_bias)
    hy, cy = _lstm_step(gates, cast(cx, compute))
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    sigmoid = jax.nn.sigmoid
    workspace = jnp.concatenate([sigmoid(i), sigmoid(f), jnp.tanh(g), sigmoid(o)], axis=-1)
    return cast(hy, cx.dtype), cast(cy, cx.dtype), cast(workspace, cx.dtype)


@op(aten._thnn_fused_lstm_cell_backward_impl.default)
def thnn_fused_lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    if grad_hy is None and grad_cy is None:
        return None, None, None
    compute = opmath(cx.dtype)
    i, f, g, o = jnp.split(cast(workspace, compute), 4, axis=-1)
    t = jnp.tanh(cast(cy, compute))
    gh = jnp.zeros_like(t) if grad_hy is None else cast(grad_hy, compute)
    gc = gh * o * (1 - t * t)
    if grad_cy is not None:
        gc = gc + cast(grad_cy, compute)
    gates = jnp.concatenate([gc * g * i * (1 - i), gc * cast(cx, compute) * f * (1 - f), gc * i * (1 - g * g),
                             gh * t * o * (1 - o)], axis=-1)
    bias = cast(jnp.sum(gates, axis=0), cx.dtype) if has_bias else None
    return cast(gates, cx.dtype), cast(gc * f, cx.dtype), bias


@op(aten._thnn_fused_gru_cell.default)
def thnn_fused_gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    compute = opmath(hx.dtype)
    x = _sum_gates(compute, input_gates, input_bias)
    h_gates = _sum_gates(compute, hidden_gates, hidden_bias)
    h = cast(hx, compute)
    xr, xz, xn = jnp.split(x, 3, axis=-1)
    hr, hz, hn = jnp.split(h_gates, 3, axis=-1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + r * hn)
    workspace = jnp.concatenate([r, z, n, h, hn], axis=-1)
    return cast(n + z * (h - n), hx.dtype), cast(workspace, hx.dtype)


@op(aten._thnn_fused_gru_cell_backward.default)
def thnn_fused_gru_cell_backward(grad_hy, workspace, has_bias):
    dtype, compute = workspace.dtype, opmath(workspace.dtype)
    r, z, n, h, hn = jnp.split(cast(workspace, compute), 5, axis=-1)
    g = cast(grad_hy, compute)
    gn = g * (1 - z) * (1 - n * n)
    gz = g * (h - n) * z * (1 - z)
    gr = gn * hn * r * (1 - r)
    gx = jnp.concatenate([gr, gz, gn], axis=-1)
    gh = jnp.concatenate([gr, gz, gn * r], axis=-1)
    bias = [cast(jnp.sum(t, axis=0), dtype) if has_bias else None for t in (gx, gh)]
    return cast(gx, dtype), cast(gh, dtype), cast(g * z, dtype), *bias
