"""A traced function: its compiled XLA program, what feeds it, and where its results go."""

import sys
import types
import weakref

import jax
import numpy as np
import torch
from jax.extend.core import jaxpr_as_fun

from .. import dtypes, random as streams, storage
from .. import tensor as T
from ..storage import Cell
from .grad import Differentiable, check_history, cut
from .guards import ANY, Guards
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
        inner, cuts = cut(leaves, self.given)
        by_id = {id(t): i for given in (leaves, inner) for i, t in enumerate(given) if isinstance(t, T.Tensor)}
        outputs = []

        def traced():
            with activate(trace):
                flat, self.rebuild = function(inner)
                self._gradients(trace)
                check_history(trace, cuts, self.grads)
                half = Differentiable()
                grads = half.trace(trace, flat, leaves, cuts) if torch.is_grad_enabled() and not self.grads else []
                results, arrays = self._describe(trace, flat, by_id)
                del flat
                escaped = trace.escaped()
                self.overwritten = [(by_id.get(id(t)), None if id(t) in by_id else t) for t in trace.overwritten()]
            self._collect(results, arrays, trace.written(), escaped, outputs)
            self.half = half if grads else None
            self.forward_count = len(outputs)
            return outputs + grads

        try:
            closed = jax.make_jaxpr(traced)()
        except BaseException:
            for tensor, _ in trace.tensors.values():  # what backward left behind is part of no program
                if tensor.is_leaf and tensor.grad is not None and trace.is_fresh(tensor.grad._cell):
                    tensor.grad = None
            raise
        finally:
            trace.restore()
        self._finish(trace, closed)

    def _gradients(self, trace):
        """(leaf, its .grad at the end, what .grad must be at entry): ANY, None or that tensor."""
        self.grads = []
        for tensor, _ in list(trace.tensors.values()):
            if not (tensor.requires_grad and tensor.is_leaf):
                continue
            grad, reset = tensor.grad, id(tensor) in trace.reset
            if reset:
                self.grads.append((tensor, grad, ANY))
            elif grad is not None and (trace.is_fresh(grad._cell) or id(grad._cell) in trace.originals):
                self.grads.append((tensor, grad, None if trace.is_fresh(grad._cell) else grad))

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
        self._link(trace, results, flat)
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
        # Tensors born here that Python objects hold now (other than gradients): the next call meets another world.
        gradients = {id(g._cell) for _, g, _ in self.grads if g is not None}
        self.once = any(id(c) not in gradients for c in escaped)
        for r in results:
            if r.kind == "new":
                key, array, wide, device, perm = arrays[r.what]
                cell = r.what()
                if cell is not None:
                    r.kind, r.what = "old", cell
                else:
                    r.what = (slot(("result", key), array), wide, device, perm)
        self.results = results

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
                             if s.kind == "cell" and id(s.what) in updated) if self.donate_wanted else ()
        self.avals = [jax.ShapeDtypeStruct(s.shape, np.dtype(a.dtype)) for s, a in zip(
            self.sources, (closed.jaxpr.constvars[k].aval for k in positions))]
        self.wide = any(v.aval.dtype in dtypes.WIDE for v in closed.jaxpr.constvars) or any(
            getattr(v.aval, "dtype", None) in dtypes.WIDE for e in closed.jaxpr.eqns for v in e.outvars)
        self.call = jax.jit(pure, donate_argnums=self.donated)
        self.draw_counts = {i: e[2] for i, e in trace.draws.items()}
        self.guards = Guards(trace, self.grads, self.roots, self.arg_cells, self.modes)
        self.arg_sources = [(i, self.arg_cells[id(s.what)]) for i, s in enumerate(self.sources)
                            if s.kind == "cell" and id(s.what) in self.arg_cells]
        self.arg_updates = {slot: self.arg_cells[id(c)] for c, slot, _ in self.updates if id(c) in self.arg_cells}
        for i, _ in self.arg_sources:
            self.sources[i] = _Argument(self.sources[i])
        self.updates = [u for u in self.updates if u[1] not in self.arg_updates]
        if self.half is not None:
            self.half.split(self.pure, self.avals, self.half_unknown, self.forward_count, self.wide)
            self.sources = [s for s in self.sources if s.kind != "cotangent"]
        self.trace = self.roots = None

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
        return values

    def run(self, leaves):
        self.spent = self.once
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
        for cell, slot, perm in self.updates:
            cell.array, cell.perm = out[slot], perm
            cell.version += 1
        for slot, a in self.arg_updates.items():
            cell = leaves[a]._cell
            cell.array = out[slot]
            cell.version += 1
        for ref, slot in self.births:
            cell = ref()
            if cell is not None:
                cell.array = out[slot]
                cell.version += 1
        if self.overwritten:
            torch.autograd.graph.increment_version([leaves[i] if t is None else t for i, t in self.overwritten])
        for tensor, grad, _ in self.grads:
            if tensor.grad is not grad:
                tensor.grad = grad
        for index, n in self.draw_counts.items():
            streams.stream(index).counter += n
        made = {}
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
