"""A traced function: its compiled XLA program, what feeds it, and where its results go."""

import gc
import sys
import types
import weakref

import jax
import numpy as np
import torch
from jax.extend.core import jaxpr_as_fun

from .. import dtypes, narrow, random as streams, storage
from .. import tensor as T
from ..storage import Cell
from .grad import Differentiable, check_history, cut
from .gradients import spare_gradient
from .guards import Guards
from .trace import Trace, activate, refuse


class Result:
    """How one tensor of the function's result is rebuilt at each call.

    kind: "same" (a tensor that outlives the call), "arg" (argument number), "new" (fresh storage
    from output ``slot``), "view" (of argument number), "old" (of a persistent cell); geometry as (size, stride, offset).
    """

    __slots__ = ("kind", "what", "geometry", "dtype", "flip", "whole", "requires_grad", "__weakref__")

    def __init__(self, kind, what, tensor=None):
        self.kind, self.what = kind, what
        if tensor is not None:
            self.geometry, self.dtype = T.geometry(tensor), tensor.dtype
            self.whole = tensor._view is None
            self.flip = None if self.whole else tensor._view.flip
            self.requires_grad = tensor.requires_grad


class Program:
    """One trace of one function, compiled.

    ``run(args)`` takes the flat list of argument tensors, executes, writes state back and
    returns the flat list of result leaves.
    """

    def __init__(self, function, leaves, donate, given, roots=()):
        self.donate_wanted, self.given, self.roots, self.spent = donate, given, roots, False
        self.trace = trace = Trace()
        for root in roots:
            if not isinstance(root, (type, types.ModuleType, types.FunctionType)):
                trace.watch_object(root)
        self.arg_cells = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, T.Tensor):
                self.arg_cells.setdefault(id(leaf._cell), i)
        self.modes = [(r, r.training) for r in roots if isinstance(r, torch.nn.Module)]
        self._trace(trace, function, leaves)

    # ---------------------------------------------------------------- tracing

    def _trace(self, trace, function, leaves):
        trace.gradients.enter_reached([*leaves, *self.roots])
        inner, cuts = cut(leaves, self.given)
        by_id = {id(t): i for given in (leaves, inner) for i, t in enumerate(given) if isinstance(t, T.Tensor)}
        outputs = []

        def traced():
            with activate(trace):
                flat, self.rebuild = function(inner)
                inside = trace.gradients.inside()
                check_history(trace, cuts, inside)
                half = Differentiable()
                grads = half.trace(trace, flat, leaves, cuts) if torch.is_grad_enabled() and not inside else []
                results, arrays = self._describe(trace, flat, by_id)
                self._link(trace, results, flat)
                ends = trace.gradients.ends()
                described, more = self._describe(trace, [grad for _, grad in ends], by_id)
                arrays.update(more)
                self.grads = [(tensor, r) for (tensor, _), r in zip(ends, described)]
                held = {id(t._cell) for t in [*flat, *(g for _, g in ends)] if isinstance(t, T.Tensor)} | set(self.arg_cells)
                entries = {id(grad) for _, grad in trace.gradients.entry.values()}
                held |= {id(c) for i, (_, c) in trace.tensors.items() if i not in entries}
                self.conditions, self.grad_inputs = trace.gradients.conditions(held)
                self.dropped = trace.gradients.dropped()
                del flat, ends
                escaped = trace.escaped()
                self.overwritten = [(by_id.get(id(t)), None if id(t) in by_id else t) for t in trace.overwritten()]
            self._collect(results + described, arrays, trace.written(), escaped, outputs)
            self.results = results
            self.half = half if grads else None
            self.forward_count = len(outputs)
            self.stand_for = [o.dtype for o in outputs]  # 64-bit ones are held in less if config.int64 says so
            return outputs + grads

        frozen = not gc.get_freeze_count()
        if frozen:  # what is older than the trace needs no look when its garbage is collected
            gc.freeze()
        try:
            closed = jax.make_jaxpr(traced)()
        finally:
            if frozen:
                gc.unfreeze()
            trace.restore()
        self._finish(trace, closed)

    def _describe(self, trace, flat, by_id):
        results, arrays = [], {}
        for leaf in flat:
            if not isinstance(leaf, T.Tensor):
                results.append(Result("same", leaf))
            elif id(leaf) in by_id:
                results.append(Result("arg", by_id[id(leaf)]))
            elif id(leaf) in trace.tensors:
                results.append(Result("same", leaf))
            elif trace.is_fresh(leaf._cell):
                cell = leaf._cell
                # only a weak reference: whoever still holds the cell afterwards is outside
                results.append(Result("new", weakref.ref(cell), leaf))
                arrays[results[-1].what] = (id(cell), storage.cell_array(cell), cell.wide, cell.device, cell.perm)
            elif id(leaf._cell) in self.arg_cells:
                results.append(Result("view", self.arg_cells[id(leaf._cell)], leaf))
            else:
                results.append(Result("old", leaf._cell, leaf))
        return results, arrays

    def _link(self, trace, results, flat):
        """Which results are views, with gradients, of an argument or of a persistent tensor: (position, result, tensor)."""
        self.linked = []
        for i, r in enumerate(results):
            if r.kind not in ("view", "old") or not r.requires_grad:
                continue
            bases = [t for t, c in trace.tensors.values() if c is r.what and t.requires_grad]
            if r.kind == "old":  # a parameter that was viewed or returned, but never read
                bases += [flat[i]._base] if flat[i]._is_view() else [flat[i]] if flat[i].is_leaf else []
            if r.flip is not None or r.kind == "old" and not any(t.dtype is r.dtype for t in bases):
                raise refuse("a result is a view, with gradients, of a tensor from outside that is no longer there or reads "
                             "it as another dtype. Return a clone of it")
            self.linked.append((i, r, next((t for t in bases if t.is_leaf), bases[0] if bases else None)))

    def _collect(self, results, arrays, written, escaped, outputs):
        slots = {}

        def slot(key, array):
            if key not in slots:
                slots[key] = len(outputs)
                outputs.append(array)
            return slots[key]

        self.updates = [(c, slot(id(c), c.array), c.perm) for c in written]
        self.births = [(weakref.ref(c), slot(id(c), c.array)) for c in escaped]
        # Tensors born here that Python objects hold now (other than as .grad): the next call meets another world.
        self.once = bool(escaped)
        for r in results:
            if r.kind == "new":
                key, array, wide, device, perm = arrays[r.what]
                cell = r.what()
                if cell is not None:
                    r.kind, r.what = "old", cell
                else:
                    r.what = (slot(("result", key), array), wide, device, perm)
        used = [r.what[0] for r in results if r.kind == "new"]
        self.own = [r.kind == "new" and r.whole and used.count(r.what[0]) == 1 for _, r in self.grads]
        self.spare = [None] * len(self.grads)

    # ---------------------------------------------------------------- compiling

    def _finish(self, trace, closed):
        used = []
        consts = list(closed.consts)
        for k, c in enumerate(consts):
            source = trace.consts.get(id(c))
            if source is not None and source.const is c:
                used.append((k, source))
                consts[k] = None
        for source in trace.sources:
            source.const = None
        self.sources = [s for _, s in used]
        positions = [k for k, _ in used]
        inner = jaxpr_as_fun_of(closed)
        shapes = list(self.sources)

        def pure(*inputs):
            values = list(consts)
            for k, s, x in zip(positions, shapes, inputs):
                values[k] = x if s.shape != () else x.reshape((1,))
                if s.shape != () and hasattr(x, "shape") and x.shape != s.shape:
                    raise refuse(f"an input changed its shape from {s.shape} to {x.shape} without a retrace")
            return inner(values)

        self.pure = pure
        self.half_unknown = [s.kind == "cotangent" for s in self.sources]
        updated = {id(c): slot for c, slot, _ in self.updates}
        self.donated = tuple(i for i, s in enumerate(self.sources)
                             if s.kind == "cell" and id(s.what) in updated and not (narrow.ON and s.what.wide)) if self.donate_wanted else ()
        self.avals = [jax.ShapeDtypeStruct(s.shape, np.dtype(a.dtype)) for s, a in zip(
            self.sources, (closed.jaxpr.constvars[k].aval for k in positions))]
        self.wide = any(v.aval.dtype in dtypes.WIDE for v in closed.jaxpr.constvars) or any(
            getattr(v.aval, "dtype", None) in dtypes.WIDE for e in closed.jaxpr.eqns for v in e.outvars)
        self.call = jax.jit(pure, donate_argnums=self.donated)
        self.draw_counts = {i: e[2] for i, e in trace.draws.items()}
        for _, grad in self.grad_inputs:
            trace.tensors.pop(id(grad), None)
        self.guards = Guards(trace, self.conditions, self.roots, self.arg_cells, self.modes)
        self.arg_sources = [(i, self.arg_cells[id(s.what)]) for i, s in enumerate(self.sources)
                            if s.kind == "cell" and id(s.what) in self.arg_cells]
        self.arg_updates = {slot: self.arg_cells[id(c)] for c, slot, _ in self.updates if id(c) in self.arg_cells}
        for i, _ in self.arg_sources:
            self.sources[i] = _Argument(self.sources[i])
        self._read_gradients_by_leaf(trace)
        self.updates = [u for u in self.updates if u[1] not in self.arg_updates]
        if self.half is not None:
            self.half.split(self.pure, self.avals, self.half_unknown, self.forward_count, self.wide)
            self.sources = [s for s in self.sources if s.kind != "cotangent"]
        self.trace = self.roots = None

    def _read_gradients_by_leaf(self, trace):
        """Let a .grad that the program uses be the one of the moment, whichever tensor that is."""
        leaves = {id(grad._cell): tensor for tensor, grad in self.grad_inputs}
        grads = {id(grad): tensor for tensor, grad in self.grad_inputs}
        self.grad_sources = [(i, leaves[id(s.what)]) for i, s in enumerate(self.sources)
                             if s.kind == "cell" and id(s.what) in leaves]
        self.grad_updates = [(leaves[id(c)], slot, perm) for c, slot, perm in self.updates if id(c) in leaves]
        self.updates = [u for u in self.updates if id(u[0]) not in leaves]
        self.grads_overwritten = [grads[id(t)] for _, t in self.overwritten if id(t) in grads]
        self.overwritten = [e for e in self.overwritten if id(e[1]) not in grads]
        for i, _ in self.grad_sources:
            self.sources[i] = _Argument(self.sources[i])
        self.grad_inputs = [tensor for tensor, _ in self.grad_inputs]

    # ---------------------------------------------------------------- running

    def broken(self):
        """None if the program serves the next call, else why it doesn't."""
        if self.spent:
            return "the function bound tensors of its own making to Python objects; write in place (copy_) instead"
        return self.guards.broken()

    def inputs(self, leaves):
        """The arrays of this moment, in the order of ``sources``."""
        values = []
        for s in self.sources:
            if s.kind == "cell":
                array = s.what.array
                values.append(storage.fill_lazy(s.what) if array is None else array)
            else:
                values.append(s.what() if s.kind == "value" else None)
        for i, a in self.arg_sources:
            values[i] = storage.cell_array(leaves[a]._cell)
        for i, leaf in self.grad_sources:
            values[i] = storage.cell_array(leaf.grad._cell)
        return [narrow.bare(v) for v in values] if narrow.ON else values

    def run(self, leaves):
        self.spent = self.once
        for tensor in self.dropped:  # as zero_grad() does at the start: the memory is free for the program
            tensor.grad = None
        for i, (_, r) in enumerate(self.grads):
            if self.spare[i] is not None:
                self.spare[i] = spare_gradient(self.spare, i, r.geometry[0])
        flat = self._execute(leaves) if self.half is None else self.half.run(self, leaves)
        for i, r, base in self.linked:
            flat[i] = (leaves[r.what] if base is None else base).as_strided(*r.geometry)
        return flat

    def _execute(self, leaves):
        inputs = self.inputs(leaves)
        for i in self.donated:
            # held by the cell, this list and the call below: any other holder would lose its array
            if sys.getrefcount(inputs[i]) > 3:
                with storage.x64(self.wide):
                    inputs[i] = jax.numpy.copy(inputs[i])
        with storage.x64(self.wide):
            out = self.call(*inputs)
        del inputs
        return self.land(out, leaves)

    def land(self, out, leaves):
        """Write outputs into the tensors that the function wrote, and build its results."""
        if narrow.ON:
            out = [narrow.hold(o, dtype) for o, dtype in zip(out, self.stand_for)]
        for cell, slot, perm in self.updates:
            cell.array, cell.perm = out[slot], perm
            cell.version += 1
        for slot, a in self.arg_updates.items():
            cell = leaves[a]._cell
            cell.array = out[slot]
            cell.version += 1
        for leaf, slot, perm in self.grad_updates:
            cell = leaf.grad._cell
            cell.array, cell.perm = out[slot], perm
            cell.version += 1
        if self.grads_overwritten:
            torch.autograd.graph.increment_version([leaf.grad for leaf in self.grads_overwritten])
        for ref, slot in self.births:
            cell = ref()
            if cell is not None:
                cell.array = out[slot]
                cell.version += 1
        if self.overwritten:
            torch.autograd.graph.increment_version([leaves[i] if t is None else t for i, t in self.overwritten])
        for index, n in self.draw_counts.items():
            streams.stream(index).counter += n
        made = {}
        for i, (tensor, r) in enumerate(self.grads):  # a new tensor if somebody holds the .grad of the last call
            grad = self.spare[i]
            if grad is None:
                grad = self._result(r, out, leaves, made)
                self.spare[i] = grad if self.own[i] else None
            else:
                cell = grad._cell
                cell.array, cell.perm = out[r.what[0]], r.what[3]
                cell.version += 1
            tensor.grad = grad
        return [self._result(r, out, leaves, made) for r in self.results]

    def _result(self, r, out, leaves, made):
        if r.kind == "same":
            return r.what
        if r.kind == "arg":
            return leaves[r.what]
        if r.kind in ("old", "view"):
            cell = r.what if r.kind == "old" else leaves[r.what]._cell
            shell = T.Tensor._make_wrapper_subclass(T.Tensor, (), dtype=r.dtype, device=cell.device)
            shell._cell, shell._view = cell, None
            return T.alias(shell, *r.geometry, dtype=r.dtype, flip=r.flip)
        slot, wide, device, perm = r.what
        cell = made.get(slot)
        if cell is None:
            cell = made[slot] = Cell(out[slot], wide, device)
            cell.perm = perm
        size, stride, offset = r.geometry
        tensor = T._make(T.Tensor, size, stride, offset, dtype=r.dtype, device=device)
        tensor._cell = cell
        tensor._view = None if r.whole else storage.View(size, stride, offset, dtypes.TO_JAX[r.dtype], r.flip)
        return tensor


class _Argument:
    """The input that an argument's own storage feeds."""

    __slots__ = ("shape",)
    kind = "argument"
    what = None

    def __init__(self, source):
        self.shape = source.shape


def jaxpr_as_fun_of(closed):
    """A function of the list of constants, evaluating a jaxpr without arguments."""
    from jax.extend.core import ClosedJaxpr

    jaxpr = closed.jaxpr
    opened = jaxpr.replace(constvars=[], invars=list(jaxpr.constvars), debug_info=jaxpr.debug_info.with_unknown_names()
                           if hasattr(jaxpr.debug_info, "with_unknown_names") else jaxpr.debug_info)
    fun = jaxpr_as_fun(ClosedJaxpr(opened, ()))
    return lambda values: fun(*values)


__all__ = ["Program", "Result", "torch"]
