"""Differentiating a jitted function from outside: a compiled forward and a compiled backward.

While the function is traced, torch.autograd.grad of its results is traced with it, for
cotangents that are inputs. JAX's partial evaluation then splits that one jaxpr: what doesn't
depend on cotangents is the forward (its results, and residuals), the rest is the backward.
So gradients are torch's own formulas.
"""

import contextlib

import jax
import torch
from jax.extend.core import jaxpr_as_fun
from jax._src.interpreters.partial_eval import partial_eval_jaxpr_nounits

from .. import dtypes, narrow, storage
from .. import tensor as T
from .trace import refuse


class Differentiable:
    """The backward half of a program: what it differentiates, and by which results."""

    def __init__(self):
        self.outs = []  # positions of the results that carry gradients
        self.ins = []  # ("leaf", i) or ("tensor", tensor) per differentiated input
        self.avals = []  # aval of each cotangent
        self.present = []  # whether the input gets a gradient

    def trace(self, trace, flat, leaves, cuts):
        """Trace the backward; returns the gradient arrays (without the absent ones)."""
        outs = [(i, t) for i, t in enumerate(flat) if isinstance(t, T.Tensor) and t.requires_grad and t.grad_fn is not None
                and trace.is_fresh(t._cell)]
        inputs, known = [], {id(stand_in) for _, stand_in, _ in cuts.values()}
        for i, t in enumerate(leaves):
            if isinstance(t, T.Tensor) and t.requires_grad and id(t) not in known:
                known.add(id(t))
                inputs.append((("leaf", i), cuts[id(t)][0] if id(t) in cuts else t))
        inputs += [(("tensor", t), t) for t, _ in trace.tensors.values()
                   if t.requires_grad and (t.is_leaf or trace.outside_result(t)) and id(t) not in known]
        if not outs or not inputs:
            return []
        _check_apart([t for _, t in inputs])
        cotangents = []
        for _, t in outs:
            array = trace.value(None, tuple(t.shape), dtypes.to_jax(t.dtype))
            trace.sources[-1].kind = "cotangent"
            cotangents.append(T.wrap(array, t._cell.device))
            self.avals.append((tuple(t.shape), t.dtype))
        with _without_hooks([t for _, t in inputs]):
            grads = torch.autograd.grad([t for _, t in outs], [t for _, t in inputs], cotangents, allow_unused=True)
        self.outs = [i for i, _ in outs]
        self.ins = [k for k, _ in inputs]
        self.present = [g is not None for g in grads]
        arrays = [storage.read(g) for g in grads if g is not None]
        self.stand_for = [a.dtype for a in arrays]
        return arrays

    def split(self, pure, avals, unknown, count, wide):
        """Compile forward and backward from the joint program with ``count`` forward outputs."""
        with storage.x64(wide):
            joint = jax.make_jaxpr(pure)(*avals)
            total = len(joint.out_avals)
            forward, backward, out_unknown, residuals = partial_eval_jaxpr_nounits(
                joint, unknown, [False] * count + [True] * (total - count))
        if any(out_unknown[:count]):
            raise RuntimeError("a forward result depends on a cotangent; this is a fault of torchax_tpu.jit")
        self.forward = jax.jit(jaxpr_as_fun(forward))
        self.backward = jax.jit(jaxpr_as_fun(backward))
        self.count, self.wide = count, wide

    def run(self, program, leaves):
        """Execute the forward under autograd; returns the result leaves."""
        inputs = [leaves[w] if k == "leaf" else w for k, w in self.ins]
        rest = []
        carried = _Call.apply(self, program, leaves, rest, *inputs)
        flat = rest[0]
        for i, t in zip(self.outs, carried):
            flat[i] = t
        return flat


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf):
        return T.alias(leaf, *T.geometry(leaf))

    @staticmethod
    def backward(ctx, grad):
        return grad


def cut(leaves, given):
    """(leaves for the trace, {id(leaf): (new leaf, stand-in, its grad_fn)}): arguments without their history.

    Autograd walks past an input into the graph that made it where that graph leads to another input, a parameter
    say; its part would be counted in the program and again outside.
    """
    inner, cuts = list(leaves), {}
    for i in given:
        t = leaves[i]
        if isinstance(t, T.Tensor) and t.requires_grad and not t.is_leaf and torch.is_grad_enabled():
            if id(t) not in cuts:
                leaf = T.alias(t, *T.geometry(t)).requires_grad_()
                stand_in = _Cut.apply(leaf)
                cuts[id(t)] = leaf, stand_in, stand_in.grad_fn
            inner[i] = cuts[id(t)][1]
    return inner, cuts


def check_history(trace, cuts, grads):
    """TraceError for what would change the history of tensors that outlive the call."""
    if any(leaf.grad is not None for leaf, _, _ in cuts.values()):
        raise refuse("backward() inside the function reaches an argument that was computed outside with gradients. Call "
                     "backward() outside, or pass the argument detached")
    written = any(stand_in.grad_fn is not node for _, stand_in, node in cuts.values())
    if written or not grads and any(t.grad_fn is not None for t in trace.plain):
        raise refuse("the function writes in place into a tensor from outside, and gradients pass through that write. Write "
                     "into a clone and return it, or write under torch.no_grad()")


def _check_apart(inputs):
    """TraceError if an input was computed, before the trace, from another one."""
    leaves = {id(t) for t in inputs if t.is_leaf}
    nodes = {t.grad_fn for t in inputs if not t.is_leaf}
    queue = [n for node in nodes for n, _ in node.next_functions if n is not None]
    done = set()
    while queue:
        node = queue.pop()
        if node in done:
            continue
        done.add(node)
        if node in nodes or id(getattr(node, "variable", None)) in leaves:
            raise refuse("the function reaches (as a global, closure variable or attribute) a tensor that was computed outside "
                         "from another of its inputs. Pass it as an argument")
        queue += [n for n, _ in node.next_functions if n is not None]


@contextlib.contextmanager
def _without_hooks(tensors):
    """Keep tensors' own gradient hooks out of the trace: autograd calls them when the gradients leave the program."""
    held = [(t._backward_hooks, dict(t._backward_hooks)) for t in tensors if t._backward_hooks]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, half, program, leaves, rest, *inputs):
        arrays = program.inputs(leaves)
        with storage.x64(half.wide):
            out = half.forward(*arrays)
        flat = program.land(out[: half.count], leaves)
        ctx.half, ctx.residuals = half, out[half.count:]
        ctx.device, ctx.inputs = inputs[0]._cell.device, inputs
        rest.append(flat)
        ctx.set_materialize_grads(True)
        return tuple(flat[i] for i in half.outs)

    @staticmethod
    def backward(ctx, *cotangents):
        half = ctx.half
        with torch.no_grad():
            arrays = [narrow.bare(storage.read(c)) for c in cotangents]
            with storage.x64(half.wide):
                out = list(map(narrow.hold, half.backward(*ctx.residuals, *arrays), half.stand_for))
            grads = [T.wrap(out.pop(0), ctx.device) if p else None for p in half.present]
        if torch.is_grad_enabled():  # create_graph: these gradients depend on the inputs, but not for autograd
            grads = [None if g is None else _Once.apply(g, *cotangents, *ctx.inputs) for g in grads]
        return (None, None, None, None, *grads)


class _Once(torch.autograd.Function):
    """Gradients made under create_graph: they hang on all inputs and cotangents, so that no second derivative can miss them."""

    @staticmethod
    def forward(ctx, grad, *inputs):
        return grad

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "torchax_tpu.jit: the backward of a jitted function can't be differentiated again; call torch.autograd.grad(..., "
            "create_graph=True) inside the jitted function, or leave this function out of jit")
