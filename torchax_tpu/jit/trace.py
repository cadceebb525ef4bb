"""Tracing one call: every tensor that is reached becomes an input, every write an output.

While a `Trace` is active (`storage.tracing.active`), reading a storage cell for the first time
lifts it: its array stands in the jaxpr as a constant, which is recognised afterwards by
identity and turned into an input. What tensors, modules, optimizers, CPU tensors, learning
rates and random streams the function met is recorded, so that a later call can check that the
program still fits and feed it the values of that moment.
"""

import contextlib
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .. import convert, random as streams, storage
from ..errors import TraceError


class Source:
    """Where an input of the program comes from at each call.

    kind: "cell" (a storage), "value" (a function that gives a numpy value or array).
    """

    __slots__ = ("kind", "what", "shape", "const")

    def __init__(self, kind, what, shape):
        self.kind, self.what, self.shape = kind, what, shape
        self.const = None  # the concrete array that stands for it in the traced jaxpr


class Trace:
    """What `storage.tracing.active` is while a function is traced."""

    lifts = True

    def __init__(self):
        self.sources = []
        self.lifted = {}  # id(cell) -> (cell, source, first tracer)
        self.originals = {}  # id(cell) -> (cell, array, perm, lazy) as they were at entry
        self.fresh = {}  # id(cell) -> weakref of a cell made during the trace
        self.consts = {}  # id(array) that already stands for a source
        self.tensors = {}  # id(tensor) -> (tensor, cell): persistent tensors met
        self.reset = set()  # ids of tensors whose .grad the function itself resets before use
        self.modules = {}  # id(module) -> (module, training)
        self.optimizers = {}
        self.numbers = {}  # tagged float -> tracer
        self.draws = {}  # device index -> [key tracer, counter tracer, draws so far]

    # -- the interface that storage and tensor.py call

    def lift(self, cell):
        array = cell.array
        if isinstance(array, jax.core.Tracer):
            return array
        source = Source("cell", cell, array.shape)
        tracer = self._stand_in(source, array)
        self.sources.append(source)
        self.lifted[id(cell)] = (cell, source, tracer)
        self._remember(cell)
        cell.array = tracer
        return tracer

    def _remember(self, cell):
        if id(cell) not in self.originals:
            self.originals[id(cell)] = (cell, cell.array, cell.perm, cell.lazy)

    def _stand_in(self, source, array):
        # A 0-d constant would be inlined as a literal: it stands in as a 1-vector.
        with storage.x64(array.dtype.itemsize >= 8):
            if array.ndim == 0 or id(array) in self.consts:
                with jax.ensure_compile_time_eval():
                    array = jnp.reshape(array, (1,)) if array.ndim == 0 else jnp.array(array, copy=True)
            self.consts[id(array)] = source
            source.const = array
            return jnp.reshape(array, source.shape) if source.shape == () else jnp.copy(array)

    def note(self, cell):
        """A write is about to replace the cell's array."""
        if not self.is_fresh(cell):
            self._remember(cell)

    def created(self, cell):
        if id(cell) not in self.originals:
            self.fresh[id(cell)] = weakref.ref(cell)

    def is_fresh(self, cell):
        """Whether the cell was made during this trace (ids may be reused, so the object decides)."""
        ref = self.fresh.get(id(cell))
        return ref is not None and ref() is cell

    def saw(self, tensor):
        """A tensor from outside is read: remember it for the checks of later calls."""
        if id(tensor) not in self.tensors and not self.is_fresh(tensor._cell):
            self.tensors[id(tensor)] = (tensor, tensor._cell)

    def number(self, value):
        """A Python number that goes into an op: a tagged one is the tracer it stands for."""
        if type(value) is float and self.numbers:
            return self.numbers.get(value, value)
        return value

    def value(self, function, shape, dtype):
        """An input whose value is asked of ``function`` at every call."""
        source = Source("value", function, shape)
        with storage.x64(np.dtype(dtype).itemsize >= 8), jax.ensure_compile_time_eval():
            array = jnp.zeros(shape or (1,), dtype)
        tracer = self._stand_in(source, array)
        self.sources.append(source)
        return tracer

    def host_tensor(self, tensor):
        """A CPU tensor used inside: read afresh at every call."""
        values = convert.cpu_to_numpy(tensor)
        return self.value(lambda: convert.cpu_to_numpy(tensor), values.shape, values.dtype)

    def draw(self, index, generator):
        if generator is not None:
            state = {}

            def key():
                state["draw"] = streams.generator_draw(generator)
                return state["draw"][0]

            return self.value(key, (2,), np.uint32), self.value(lambda: state["draw"][1], (), np.uint32)
        if index not in self.draws:
            self.draws[index] = [self.value(lambda: streams.stream(index).key_data, (2,), np.uint32),
                                 self.value(lambda: np.uint32(streams.stream(index).counter & 0xFFFFFFFF), (), np.uint32),
                                 0]
        entry = self.draws[index]
        entry[2] += 1
        return entry[0], entry[1] + np.uint32(entry[2] - 1)

    # -- after the function has returned

    def escaped(self):
        """Cells made during the trace that something outside still holds."""
        gc.collect()
        return [c for c in (r() for r in self.fresh.values()) if c is not None and isinstance(c.array, jax.core.Tracer)]

    def written(self):
        """Persistent cells whose array is not the one they entered with."""
        out = []
        for cell, array, _, _ in self.originals.values():
            entry = self.lifted.get(id(cell))
            first = entry[2] if entry else array
            if cell.array is not first and cell.array is not None:
                out.append(cell)
        return out

    def restore(self):
        """Give every persistent cell back what it held before the trace."""
        for cell, array, perm, lazy in self.originals.values():
            cell.array, cell.perm, cell.lazy = array, perm, lazy


@contextlib.contextmanager
def activate(trace):
    """Make ``trace`` the active one on this thread, and watch modules, optimizers and backward."""
    from . import optimizers

    outer = storage.tracing.active
    storage.tracing.active = trace
    hooks = [torch.nn.modules.module.register_module_forward_pre_hook(_watch_module)]
    try:
        with optimizers.watching(trace):
            yield trace
    finally:
        storage.tracing.active = outer
        for h in hooks:
            h.remove()


def _watch_module(module, args):
    trace = storage.tracing.active
    if isinstance(trace, Trace) and id(module) not in trace.modules:
        trace.modules[id(module)] = (module, module.training)


def refuse(what):
    """The error for something that can't be part of a traced program."""
    return TraceError(f"torchax_tpu.jit: {what}")
