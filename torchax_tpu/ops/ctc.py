"""Connectionist temporal classification: the forward-backward recursions as scans over time.

Labels are laid out with blanks between them (2 S + 1 states); states past a sequence's own
length, and steps past its input length, are masked, so lengths may be arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..registry import aten, op


def _lengths(values):
    return jnp.asarray(values, np.int32) if isinstance(values, (tuple, list)) else values.astype(np.int32)


def _padded(targets, target_lengths, static_lengths):
    """Targets as (N, S): a concatenated vector is cut at the lengths."""
    if targets.ndim == 2:
        return targets.astype(np.int32)
    if targets.ndim != 1:
        raise RuntimeError(f"targets should be 1 or 2 dimensional, got {targets.ndim}")
    width = max(static_lengths, default=0) if static_lengths is not None else targets.size
    if not width:
        return jnp.zeros((target_lengths.shape[0], 0), np.int32)
    start = jnp.cumsum(target_lengths) - target_lengths
    at = start[:, None] + jax.lax.broadcasted_iota(np.int32, (1, width), 1)
    return jnp.take(targets, jnp.clip(at, 0, max(targets.size - 1, 0))).astype(np.int32)


def _check(log_probs, input_lengths, target_lengths, blank):
    steps, batch, classes = log_probs.shape
    if log_probs.dtype not in (np.float32, np.float64):
        raise RuntimeError(f'"ctc_loss_cpu" not implemented for {log_probs.dtype}')
    if not 0 <= blank < classes:
        raise RuntimeError("blank must be in label range")
    for name, lengths in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
        count = len(lengths) if isinstance(lengths, (tuple, list)) else lengths.size
        if count != batch:
            raise RuntimeError(f"{name} must be of size batch_size, got {count} for a batch of {batch}")
    if isinstance(input_lengths, (tuple, list)) and max(input_lengths, default=0) > steps:
        raise RuntimeError(f"Expected input_lengths to have value at most {steps}, but got value {max(input_lengths)}")


class _States:
    """The states of a batch: labels with blanks between, which may be skipped to, where each ends."""

    def __init__(self, log_probs, targets, input_lengths, target_lengths, blank):
        static = target_lengths if isinstance(target_lengths, (tuple, list)) else None
        self.input_lengths, self.target_lengths = _lengths(input_lengths), _lengths(target_lengths)
        labels = _padded(targets, self.target_lengths, static)
        batch, width = labels.shape
        n = 2 * width + 1
        self.index = jax.lax.broadcasted_iota(np.int32, (batch, n), 1)
        self.labels = jnp.full((batch, n), blank, np.int32).at[:, 1::2].set(labels)
        self.labels = jnp.clip(self.labels, 0, log_probs.shape[2] - 1)
        before = jnp.pad(self.labels, ((0, 0), (2, 0)), constant_values=blank)[:, :n]
        # From two states back only onto another label, never onto a blank or a repeated label.
        self.skip = (self.index % 2 == 1) & (self.index >= 2) & (self.labels != before)
        self.valid = self.index < (2 * self.target_lengths + 1)[:, None]
        at = jnp.broadcast_to(self.labels[None], (log_probs.shape[0], batch, n))
        self.emit = jnp.where(self.valid, jnp.take_along_axis(log_probs, at, axis=2), -jnp.inf)  # (T, N, states)
        self.steps = jnp.arange(log_probs.shape[0], dtype=np.int32)


def _logsumexp(*terms):
    top = terms[0]
    for t in terms[1:]:
        top = jnp.maximum(top, t)
    safe = jnp.where(top == -jnp.inf, jnp.zeros((), top.dtype), top)
    return jnp.where(top == -jnp.inf, top, safe + jnp.log(sum(jnp.exp(t - safe) for t in terms)))


def _shift(x, by):
    """States moved ``by`` places to the right (left if negative), -inf coming in."""
    n = x.shape[1]
    wide = jnp.pad(x, ((0, 0), (max(by, 0), max(-by, 0))), constant_values=-np.inf)
    return wide[:, :n] if by > 0 else wide[:, -n:]


def _alphas(s):
    """log of the probability of all path beginnings that end in a state at a time: (T, N, states)."""
    low = jnp.full((), -jnp.inf, s.emit.dtype)

    def step(alpha, at):
        t, emit = at
        start = jnp.where(s.index < 2, emit, low)
        moved = emit + _logsumexp(alpha, _shift(alpha, 1), jnp.where(s.skip, _shift(alpha, 2), low))
        new = jnp.where(t == 0, start, moved)
        new = jnp.where((t < s.input_lengths)[:, None], new, low)
        return new, new

    return jax.lax.scan(step, jnp.full_like(s.emit[0], -jnp.inf), (s.steps, s.emit))[1]


def _betas(s):
    """log of the probability of all path ends that start in a state at a time, its emission included."""
    low = jnp.full((), -jnp.inf, s.emit.dtype)
    last = 2 * s.target_lengths[:, None]
    ends = (s.index == last) | (s.index == last - 1)
    skip_next = jnp.pad(s.skip, ((0, 0), (0, 2)))[:, 2:]

    def step(beta, at):
        t, emit = at
        moved = emit + _logsumexp(beta, _shift(beta, -1), jnp.where(skip_next, _shift(beta, -2), low))
        final = t == s.input_lengths - 1
        new = jnp.where(final[:, None], jnp.where(ends, emit, low), moved)
        new = jnp.where((t < s.input_lengths)[:, None], new, low)
        return new, new

    return jax.lax.scan(step, jnp.full_like(s.emit[0], -jnp.inf), (s.steps, s.emit), reverse=True)[1]


@op(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    _check(log_probs, input_lengths, target_lengths, blank)
    s = _States(log_probs, targets, input_lengths, target_lengths, blank)
    low = jnp.full((), -jnp.inf, log_probs.dtype)
    if not log_probs.shape[0]:
        alphas = jnp.zeros((0, *s.labels.shape), log_probs.dtype)
        end = jnp.full(s.labels.shape, -jnp.inf, log_probs.dtype)
    else:
        alphas = _alphas(s)
        final = (s.steps[:, None] == s.input_lengths - 1)[:, :, None]
        end = jnp.max(jnp.where(final, alphas, low), axis=0)
    last = 2 * s.target_lengths[:, None]
    ends = (s.index == last) | (s.index == last - 1)
    end = jnp.where(ends, end, low)
    top = jnp.max(end, axis=1)
    safe = jnp.where(top == -jnp.inf, jnp.zeros((), top.dtype), top)
    loss = -(safe + jnp.log(jnp.sum(jnp.exp(end - safe[:, None]), axis=1)))
    empty = jnp.where(s.target_lengths == 0, jnp.zeros((), loss.dtype), -low)
    return jnp.where(s.input_lengths == 0, empty, loss), jnp.transpose(alphas, (1, 0, 2))


@op(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def ctc_loss_backward(grad, log_probs, targets, input_lengths, target_lengths, neg_log_likelihood, log_alpha, blank,
                      zero_infinity=False):
    if not log_probs.shape[0]:
        return jnp.zeros_like(log_probs)
    s = _States(log_probs, targets, input_lengths, target_lengths, blank)
    both = jnp.transpose(log_alpha, (1, 0, 2)) + _betas(s)
    # Each is the probability of being in that state at that time, given the labels: at most 1.
    reached = both > -jnp.inf
    through = jnp.where(reached, both - jnp.where(reached, s.emit, 0) + neg_log_likelihood[None, :, None], -jnp.inf)
    weight = jnp.exp(through)
    one_hot = (s.labels[:, :, None] == jax.lax.broadcasted_iota(np.int32, (1, 1, log_probs.shape[2]), 2))
    share = jnp.einsum("tns,nsc->tnc", weight, one_hot.astype(weight.dtype), precision=jax.lax.Precision.HIGHEST)
    # As torch has it: log_probs are taken to be normalised, so exp(log_probs) stands for their own gradient.
    out = (jnp.exp(log_probs) - share) * grad[None, :, None]
    out = jnp.where((s.steps[:, None] < s.input_lengths)[:, :, None], out, jnp.zeros((), out.dtype))
    if zero_infinity:
        out = jnp.where(jnp.isinf(neg_log_likelihood)[None, :, None], jnp.zeros((), out.dtype), out)
    return out
