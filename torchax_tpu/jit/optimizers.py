"""torch.optim inside a traced program: state made beforehand, learning rates as inputs.

The optimizers stay unmodified. While a trace is active, a global step hook (1) turns on
``capturable`` so that step counters are device tensors, (2) creates missing state outside the
program, so that the first program is already the steady one, and (3) replaces each ``lr`` by a
tagged float: a float whose exact bits name an input of the program, so that torch can carry
it through its C++ argument parser.
"""

import contextlib
import inspect
import random as pyrandom
import sys

import jax
import numpy as np
import torch
from jax._src.lax.lax import _convert_element_type
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import narrow, storage
from .. import tensor as T
from ..errors import TraceError

_wiggle = pyrandom.Random(0x7A61)


class TracedFloat(float):
    """A float that stands for a traced value; arithmetic with numbers gives another one."""

    trace: object
    tracer: object

    @staticmethod
    def make(trace, tracer, value, kind=None):
        tracer = narrow.bare(tracer)
        # A unique value near the true one: it identifies the tracer when an op receives it.
        while True:
            tagged = (value or 1e-280) * (1.0 + _wiggle.randrange(1, 1 << 20) * 2.0**-44)
            if tagged not in trace.numbers:
                break
        self = (kind or TracedFloat)(tagged)
        self.trace, self.tracer = trace, tracer
        with narrow.x64(True):
            trace.numbers[float(tagged)] = _convert_element_type(tracer, weak_type=True)
        return self

    def _with(self, other, op, value):
        if isinstance(other, TracedFloat):
            other = other.tracer
        elif not isinstance(other, (int, float)):
            return NotImplemented
        with narrow.x64(True):
            return TracedFloat.make(self.trace, op(self.tracer, other), value, type(self))

    def __add__(self, o):
        return self._with(o, lambda a, b: a + b, float.__add__(self, float(o))) if _num(o) else NotImplemented

    def __sub__(self, o):
        return self._with(o, lambda a, b: a - b, float.__sub__(self, float(o))) if _num(o) else NotImplemented

    def __rsub__(self, o):
        return self._with(o, lambda a, b: b - a, float(o) - float(self)) if _num(o) else NotImplemented

    def __mul__(self, o):
        return self._with(o, lambda a, b: a * b, float.__mul__(self, float(o))) if _num(o) else NotImplemented

    def __truediv__(self, o):
        return self._with(o, lambda a, b: a / b, float.__truediv__(self, float(o))) if _num(o) else NotImplemented

    def __rtruediv__(self, o):
        return self._with(o, lambda a, b: b / a, float(o) / float(self)) if _num(o) else NotImplemented

    def __pow__(self, o):
        return self._with(o, lambda a, b: a**b, float.__pow__(float(self), float(o))) if _num(o) else NotImplemented

    def __neg__(self):
        return self._with(0.0, lambda a, b: -a, -float(self))

    __radd__, __rmul__ = __add__, __mul__


class TracedStep(TracedFloat):
    """A step counter's value in an optimizer without ``capturable``: arithmetic only, its value is not known."""

    def _unknown(self, *_):
        raise TraceError("an optimizer without `capturable` branches on its step count; it can't be part of a traced "
                         "program. Use one with capturable=True, or call optimizer.step() outside the jitted function.")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __int__ = _unknown
    __hash__ = float.__hash__


def _step_value(trace, original):
    def get_value(x):
        if isinstance(x, T.Tensor) and storage.tracing.active is trace:
            with narrow.x64(True):
                return TracedFloat.make(trace, narrow.bare(storage.read(x)).astype(narrow.stored(np.dtype(np.float64))), 1.0, TracedStep)
        return original(x)

    return get_value


def _num(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


class Seen:
    """An optimizer that a program steps: what must still hold for the program to fit."""

    __slots__ = ("entries", "optimizer", "settings", "state", "table", "traced")

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.traced = {}  # (group index, key) -> tagged float in place during the trace
        self.settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self.state = []

    def freeze(self):
        """After the trace: remember the state tensors and the parameter lists by identity."""
        self.table = self.optimizer.state  # load_state_dict makes another one
        self.entries = list(self.table.items())
        self.state = [(s, k, v) for _, s in self.entries if isinstance(s, dict)
                      for k, v in s.items() if isinstance(v, torch.Tensor)]
        self.settings = [({k: v for k, v in g.items() if k not in ("params",) and (i, k) not in self.traced},
                          list(g["params"])) for i, g in enumerate(self.optimizer.param_groups)]

    def fits(self):
        groups = self.optimizer.param_groups
        if len(groups) != len(self.settings):
            return False
        for g, (settings, params) in zip(groups, self.settings):
            if len(g["params"]) != len(params) or any(a is not b for a, b in zip(g["params"], params)):
                return False
            for k, v in settings.items():
                now = g.get(k)
                if now is not v and (isinstance(v, torch.Tensor) or now != v):
                    return False
        table = self.optimizer.state
        if table is not self.table or len(table) != len(self.entries):
            return False
        return all(table.get(p) is s for p, s in self.entries) and all(s.get(k) is v for s, k, v in self.state)


TRACED_SETTINGS = ("lr",)


@contextlib.contextmanager
def watching(trace):
    """Install the step and zero_grad watchers for one trace."""
    restore, entry = [], []

    def before(optimizer, args, kwargs):
        if storage.tracing.active is not trace:
            return
        for group in optimizer.param_groups:
            trace.gradients.use(group["params"])
        if id(optimizer) not in trace.optimizers:
            trace.optimizers[id(optimizer)] = seen = Seen(optimizer)
            _prepare(optimizer, trace)
            for i, group in enumerate(optimizer.param_groups):
                for key in TRACED_SETTINGS:
                    value = group.get(key)
                    entry.append((group, key, value))
                    if isinstance(value, (int, float)) and not isinstance(value, bool):
                        tracer = trace.value(lambda g=group, k=key: np.float64(g[k]), (), np.float64)
                        seen.traced[i, key] = TracedFloat.make(trace, tracer, float(value))
                    elif type(value) is torch.Tensor and value.device.type == "cpu":
                        seen.traced[i, key] = T.wrap(trace.host_tensor(value), T.devices[0])
        seen = trace.optimizers[id(optimizer)]
        for (i, key), value in seen.traced.items():
            group = optimizer.param_groups[i]
            restore.append((group, key, group[key]))
            group[key] = value
        module = sys.modules[type(optimizer).__module__]
        if "capturable" not in optimizer.defaults and hasattr(module, "_get_value"):
            restore.append((module.__dict__, "_get_value", module._get_value))
            module._get_value = _step_value(trace, module._get_value)
        for group in optimizer.param_groups:
            if group.get("capturable") is False and not group.get("fused"):
                restore.append((group, "capturable", False))
                group["capturable"] = True

    def after(optimizer, args, kwargs):
        while restore:
            group, key, value = restore.pop()
            group[key] = value

    handles = [register_optimizer_step_pre_hook(before),
               register_optimizer_step_post_hook(after)]
    zero_optimizer, zero_module = torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad

    def optimizer_zero_grad(self, set_to_none=True):
        if set_to_none and storage.tracing.active is trace:
            trace.gradients.reset(p for g in self.param_groups for p in g["params"])
        return zero_optimizer(self, set_to_none)

    def module_zero_grad(self, set_to_none=True):
        if set_to_none and storage.tracing.active is trace:
            trace.gradients.reset(self.parameters())
        return zero_module(self, set_to_none)

    torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad = optimizer_zero_grad, module_zero_grad
    try:
        yield
        after(None, None, None)
        if any(group[key] is not value and group[key] != value for group, key, value in entry):
            raise TraceError("torchax_tpu.jit: the function changes a learning rate after optimizer.step(), which no later "
                             "call would do again. Call scheduler.step() outside the jitted function.")
    finally:
        torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad = zero_optimizer, zero_module
        after(None, None, None)
        for h in handles:
            h.remove()


@contextlib.contextmanager
def outside(trace):
    """Run ops concretely, as if no trace were active."""
    storage.tracing.active = None
    try:
        with jax.ensure_compile_time_eval():
            yield
    finally:
        storage.tracing.active = trace


def _prepare(optimizer, trace):
    """Create missing state and move step counters to the device, outside the program."""
    with outside(trace), torch.no_grad():
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if isinstance(p, T.Tensor) and p.grad is not None]
            missing = [p for p in params if not optimizer.state.get(p)]
            if missing and isinstance(optimizer, torch.optim.SGD):
                # momentum * 0 + grad is what the first step sets; with dampening it is not, so leave those to the trace
                if group["momentum"] and not group["dampening"]:
                    for p in missing:
                        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
            elif missing and hasattr(optimizer, "_init_group"):
                _init(optimizer, group)
        for state in optimizer.state.values():
            for key, value in list(state.items()) if isinstance(state, dict) else ():
                if key == "step" and type(value) is torch.Tensor and value.device.type == "cpu":
                    state[key] = value.to(T.devices[0])


def _init(optimizer, group):
    parameters = list(inspect.signature(optimizer._init_group).parameters)[1:]
    capturable = group.get("capturable")
    if capturable is False and not group.get("fused"):
        group["capturable"] = True
    try:
        optimizer._init_group(group, *([] for _ in parameters))
    finally:
        if capturable is not None:
            group["capturable"] = capturable
