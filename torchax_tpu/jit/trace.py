"""Tracing one call: every tensor that is reached becomes an input, every write an output.

While a `Trace` is active (`storage.tracing.active`), reading a storage cell for the first time
lifts it: its array stands in the jaxpr as a constant, which is recognised afterwards by
identity and turned into an input. What tensors, modules, optimizers, CPU tensors, learning
rates and random streams the function met is recorded, so that a later call can check that the
program still fits and feed it the values of that moment.
"""

import contextlib
import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .. import convert, narrow, random as streams, storage
from ..errors import TraceError
from .gradients import Gradients


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
        # autograd numbers its nodes: what is below this one was computed before the trace
        self.first_node = torch.ones((), requires_grad=True).view(()).grad_fn
        self.sources = []
        self.lifted = {}  # id(cell) -> (cell, source, first tracer)
        self.originals = {}  # id(cell) -> (cell, array, perm, lazy) as they were at entry
        self.fresh = {}  # id(cell) -> weakref of a cell made during the trace
        self.consts = {}  # id(array) that already stands for a source
        self.tensors = {}  # id(tensor) -> (tensor, cell): persistent tensors met
        self.versions = {}  # id(tensor) -> autograd's version of it when it was met
        self.hosts = {}  # id(CPU tensor) -> (tensor, its version when it was met)
        self.plain = []  # tensors that required no gradient when they were met
        self.counters = []  # (object, its attributes, the numbers among them when it was met)
        self.cpu_random = torch.random.default_generator.get_state()
        self.gradients = Gradients(self)
        self.modules = {}  # id(module) -> (module, training)
        self.optimizers = {}
        self.numbers = {}  # tagged float -> tracer
        self.draws = {}  # device index -> [key tracer, counter tracer, draws so far]

    # -- the interface that storage and tensor.py call

    def lift(self, cell):
        array = cell.array
        if narrow.is_traced(array):
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
        dtype, array = array.dtype, narrow.bare(array)
        with storage.x64(array.dtype.itemsize >= 8):
            if array.ndim == 0 or id(array) in self.consts:
                with jax.ensure_compile_time_eval():
                    array = jnp.reshape(array, (1,)) if array.ndim == 0 else jnp.array(array, copy=True)
            self.consts[id(array)] = source
            source.const = array
            return narrow.hold(jnp.reshape(array, source.shape) if source.shape == () else jnp.copy(array), dtype)

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
            self.gradients.enter(tensor)
            if not tensor.requires_grad:
                self.plain.append(tensor)
            elif not tensor.is_leaf and tensor._is_view():
                self.saw(tensor._base)  # a parameter that is only read through views is an input as well
            if not tensor.is_inference():
                self.versions[id(tensor)] = tensor._version

    def outside_result(self, tensor):
        """Whether a tensor was computed before the trace (a view of a parameter may be made in it)."""
        return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() < self.first_node._sequence_nr()

    def overwritten(self):
        """Persistent tensors whose version moved: later calls must move it as well."""
        return [t for t, _ in self.tensors.values() if id(t) in self.versions and t._version != self.versions[id(t)]]

    def watch_object(self, owner):
        """Remember the numbers among an object's attributes, and a module's CPU buffers."""
        table = getattr(owner, "__dict__", None) or {}
        self.counters.append((owner, table, {k: v for k, v in table.items() if type(v) in (int, float)}))
        if isinstance(owner, torch.nn.Module):
            for buffer in owner._buffers.values():
                if type(buffer) is torch.Tensor and buffer.device.type == "cpu":
                    self.watch_host(buffer)

    def watch_host(self, tensor):
        if not tensor.is_inference():
            self.hosts.setdefault(id(tensor), (tensor, tensor._version))

    def number(self, value):
        """A Python number that goes into an op: a tagged one is the tracer it stands for."""
        if type(value) is float and self.numbers:
            return self.numbers.get(value, value)
        return value

    def value(self, function, shape, dtype):
        """An input whose value is asked of ``function`` at every call."""
        source = Source("value", function, shape)
        with storage.x64(np.dtype(dtype).itemsize >= 8), jax.ensure_compile_time_eval():
            array = jnp.zeros(shape or (1,), narrow.stored(np.dtype(dtype)))
        tracer = self._stand_in(source, narrow.hold(array, np.dtype(dtype)))
        self.sources.append(source)
        return tracer

    def host_tensor(self, tensor):
        """A CPU tensor used inside: read afresh at every call."""
        self.watch_host(tensor)
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
        return [c for c in (r() for r in self.fresh.values()) if c is not None and narrow.is_traced(c.array)]

    def written(self):
        """Persistent cells whose array is not the one they entered with."""
        out = []
        for cell, array, _, _ in self.originals.values():
            entry = self.lifted.get(id(cell))
            first = entry[2] if entry else array
            if cell.array is not first and cell.array is not None:
                out.append(cell)
        return out

    def check_host(self):
        """What only this one call does: a written CPU tensor is a TraceError; changed numbers and CPU draws warn."""
        for tensor, version in self.hosts.values():
            if tensor._version != version:
                raise refuse(f"the function writes a CPU tensor of shape {tuple(tensor.shape)}, which no later call would "
                             "do again. Move it to the device, or write it outside the jitted function")

        for owner, table, numbers in self.counters:
            for k, v in numbers.items():
                now = table.get(k)
                if type(now) in (int, float) and now != v:
                    warnings.warn(f"torchax_tpu.jit: the function changes {type(owner).__name__}.{k} from {v} to {now}; later "
                                  "calls run the compiled program and won't. Count in a tensor on the device, or outside.",
                                  stacklevel=2)
        if not torch.equal(self.cpu_random, torch.random.default_generator.get_state()):
            warnings.warn("torchax_tpu.jit: the function draws random numbers on the CPU; later calls repeat those. Draw "
                          "them on the device (device=...), or outside.", stacklevel=2)

    def restore(self):
        """Give every persistent cell and .grad back what it held before the trace."""
        for cell, array, perm, lazy in self.originals.values():
            cell.array, cell.perm, cell.lazy = array, perm, lazy
        self.gradients.close()


@contextlib.contextmanager
def activate(trace):
    """Make ``trace`` the active one on this thread, and watch modules, optimizers and backward."""
    from . import optimizers

    outer = storage.tracing.active
    storage.tracing.active = trace
    hooks = [torch.nn.modules.module.register_module_forward_pre_hook(_watch_module)]
    try:
        with optimizers.watching(trace), _no_value_checks():
            yield trace
        trace.check_host()
    finally:
        storage.tracing.active = outer
        for h in hooks:
            h.remove()


@contextlib.contextmanager
def _no_value_checks():
    """Leave out what torch's Python code asks of values without need.

    Distributions validate their parameters; nn.Transformer looks whether a mask is the causal one, a mere hint.
    """
    distribution, transformer = torch.distributions.Distribution, torch.nn.modules.transformer
    validate, detect = distribution._validate_args, transformer._detect_is_causal_mask
    distribution._validate_args = False
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        distribution._validate_args, transformer._detect_is_causal_mask = validate, detect


def _watch_module(module, args):
    trace = storage.tracing.active
    if isinstance(trace, Trace) and id(module) not in trace.modules:
        trace.modules[id(module)] = (module, module.training)
        trace.watch_object(module)


def refuse(what):
    """The error for something that can't be part of a traced program."""
    return TraceError(f"torchax_tpu.jit: {what}")
