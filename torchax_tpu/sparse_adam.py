"""torch.optim.SparseAdam over device parameters, whose sparse gradients are dense tensors.

Rows of a gradient that are exactly zero count as rows that it doesn't have.
"""

import functools
import math

import torch
from torch.optim import Optimizer, SparseAdam

from . import tensor as T


def _correction(beta, step):
    """1 - beta**step, which float32 can't subtract."""
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))


def _update(optimizer, group, p):
    grad = -p.grad if group["maximize"] else p.grad
    state = optimizer.state[p]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    elif not isinstance(state["step"], torch.Tensor):  # the CPU counts in Python, which a jitted step would not notice
        state["step"] = torch.full((), float(state["step"]), device=p.device)
    step, mean, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
    step += 1
    beta1, beta2 = group["betas"]
    there = grad != 0
    if grad.dim() > 1:
        there = there.flatten(1).any(1).view(-1, *[1] * (grad.dim() - 1))
    mean.copy_(torch.where(there, mean + (grad - mean) * (1 - beta1), mean))
    square.copy_(torch.where(there, square + (grad * grad - square) * (1 - beta2), square))
    size = group["lr"] * _correction(beta2, step).sqrt() / _correction(beta1, step)
    p.sub_(torch.where(there, size.to(p.dtype) * mean / (square.sqrt() + group["eps"]), 0))


def _replace():
    own = SparseAdam.step
    hooked = getattr(own, "hooked", False)
    own = own.__wrapped__ if hooked else own

    @functools.wraps(own)
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        mine = [(group, p, p.grad) for group in self.param_groups for p in group["params"]
                if isinstance(p, T.Tensor) and p.grad is not None]
        for _, p, _ in mine:
            p.grad = None
        try:
            own(self)
        finally:
            for _, p, grad in mine:
                p.grad = grad
        for group, p, _ in mine:
            _update(self, group, p)
        return loss

    SparseAdam.step = Optimizer.profile_hook_step(step) if hooked else step
    if hooked:
        SparseAdam.step.hooked = True


_replace()
