"""`torchax_tpu.jit`: signatures, the program cache, and what is traced inline instead."""

import functools
import inspect
import warnings

import jax
import torch
from torch.utils import _pytree as pytree

from .. import narrow, storage
from .. import tensor as T
from .guards import PLAIN
from .program import Program
from .trace import Trace, refuse

_count = [0]


def trace_count():
    """How many times a function has been traced in this process (for tests and curiosity)."""
    return _count[0]


class JitFunction:
    """A PyTorch function compiled as one program per signature; call it as the function itself.

    Attributes:
        traces: number of Python traces of this function so far.
    """

    def __init__(self, function, static_argnums=(), static_argnames=(), donate=True):
        functools.update_wrapper(self, function, updated=())
        self._function, self._donate = function, donate
        self._static_nums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums or ())
        self._static_names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames or ())
        self._static_nums += tuple(i for i, n in enumerate(_parameters(function)) if n in self._static_names)
        self._programs = {}
        self._bound = {}
        self.traces = self._retraces = 0

    def __reduce__(self):
        # copies and pickles start without programs: those are tied to the original's tensors
        return JitFunction, (self._function, self._static_nums, self._static_names, self._donate)

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        key = id(instance)
        if key not in self._bound:
            method = self._function.__get__(instance, owner)
            self._bound[key] = JitFunction(method, tuple(i - 1 for i in self._static_nums if i > 0),
                                           self._static_names, self._donate)
        return self._bound[key]

    def __call__(self, *args, **kwargs):
        if storage.tracing.active is not None:
            return self._function(*args, **kwargs)  # part of an enclosing trace
        leaves, key, spec = self._flatten(args, kwargs)
        if any(isinstance(leaf, torch.Tensor) and _inline(leaf) for leaf in leaves):
            return self._function(*args, **kwargs)
        program = self._find(key, leaves, spec)
        flat = program.run(leaves)
        return program.rebuild(flat)

    def _find(self, key, leaves, spec):
        programs = self._programs.get(key)
        if programs is None:
            if len(self._programs) == _WARN_AFTER:
                self._warn(f"for {_WARN_AFTER + 1} different signatures; last because {_difference(self._last, key)}")
            programs = self._programs[key] = []
            self._last = key
        reason = None
        for program in programs:
            reason = program.broken()
            if reason is None:
                return program
        program = self._make(leaves, spec)
        programs[:] = [program] + [p for p in programs if not p.spent][:_KEPT]
        if reason is not None:
            self._retraced(reason)
        return program

    def _retraced(self, reason):
        self._retraces += 1
        if self._retraces == _WARN_AFTER:
            self._warn(f"again {_WARN_AFTER} times for the same arguments; last because {reason}")

    def _warn(self, what):
        warnings.warn(f"torchax_tpu.jit: {getattr(self, '__name__', self._function)} has been traced {what}.", stacklevel=5)

    def _make(self, leaves, spec):
        self.traces += 1
        _count[0] += 1

        def function(leaves):
            args, kwargs = spec.rebuild(leaves)
            return _split(self._function(*args, **kwargs))

        roots = [value for _, tree, value in spec.plan if tree is None] + list(self._objects())
        return Program(function, leaves, self._donate, spec.given(), roots)

    def _flatten(self, args, kwargs):
        """(tensor leaves, hashable signature, how to rebuild the arguments)."""
        leaves, parts = [], [torch.is_grad_enabled(), torch.get_default_dtype(), _autocast()]
        holders = [(i, a) for i, a in enumerate(args)] + list(kwargs.items())
        plan = []
        for name, a in holders:
            if name in self._static_nums or name in self._static_names:
                parts.append((name, _static(a)))
                plan.append((name, None, a))
                continue
            if isinstance(a, torch.Tensor):
                parts.append((name, _describe(a, leaves)))
                plan.append((name, len(leaves) - 1, None))
            elif isinstance(a, (list, tuple, dict)):
                flat, tree = pytree.tree_flatten(a)
                places = []
                for x in flat:
                    if isinstance(x, torch.Tensor):
                        parts.append((name, _describe(x, leaves)))
                        places.append((True, len(leaves) - 1))
                    else:
                        parts.append((name, _static(x)))
                        places.append((False, x))
                parts.append((name, str(tree)))
                plan.append((name, tree, places))
            else:
                parts.append((name, _static(a)))
                plan.append((name, None, a))
        for key, value in self._reached():
            if isinstance(value, torch.Tensor):
                parts.append((key, _describe(value, leaves)))
            else:
                parts.append((key, _static(value)))
        first = {}
        pattern = tuple(first.setdefault(id(t._cell), i) if isinstance(t, T.Tensor) else -1 for i, t in enumerate(leaves))
        return leaves, (tuple(parts), pattern), _Spec(plan, len(args))

    def _reached(self):
        """Tensors and plain values that the function reaches as globals and closure variables."""
        for key, value in self._variables():
            if isinstance(value, (T.Tensor, *PLAIN)):
                yield key, value

    def _objects(self):
        """The other objects among them, and the method's own."""
        if getattr(self._function, "__self__", None) is not None:
            yield self._function.__self__
        for _, value in self._variables():
            if not isinstance(value, (T.Tensor, *PLAIN)):
                yield value

    def _variables(self):
        function = inspect.unwrap(self._function)
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None:
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                yield ("closure", name), cell.cell_contents
            except ValueError:  # not bound yet
                continue
        names = function.__globals__
        for name in code.co_names:
            if name in names:
                yield ("global", name), names[name]

    def lower_for(self, *args, **kwargs):
        """(pure function over flat arrays, their avals, donated positions): the program of a call, not run."""
        leaves, key, spec = self._flatten(args, kwargs)
        program = self._find(key, leaves, spec)
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.inputs(leaves)]
        if program.half is not None:  # what runs is the forward, which also keeps what its backward needs
            return program.half.forward, avals, ()
        return program.pure, avals, program.donated


_KEPT = 7  # programs kept per signature besides the newest
_WARN_AFTER = 8


def _difference(old, new):
    """What in a signature is not as in the one before, in words."""
    for a, b in zip(old[0][3:], new[0][3:]):
        if a != b:
            name = " ".join(map(str, a[0])) if isinstance(a[0], tuple) else f"argument {a[0]}"
            return f"{name} changed from {a[1]} to {b[1]}"
    return "the arguments' structure, grad mode, autocast or default dtype changed"


class _Spec:
    """How to call the function again with (other) leaves."""

    __slots__ = ("plan", "count")

    def __init__(self, plan, count):
        self.plan, self.count = plan, count

    def given(self):
        """Positions of the leaves that are arguments; the function reaches the others by itself."""
        for _, tree, what in self.plan:
            if isinstance(tree, int):
                yield tree
            elif tree is not None:
                yield from (v for is_tensor, v in what if is_tensor)

    def rebuild(self, leaves):
        values = []
        for _, tree, what in self.plan:
            if tree is None:
                values.append(what)
            elif isinstance(tree, int):
                values.append(leaves[tree])
            else:
                values.append(pytree.tree_unflatten([leaves[v] if is_t else v for is_t, v in what], tree))
        names = [n for n, _, _ in self.plan[self.count:]]
        return values[: self.count], dict(zip(names, values[self.count:]))


def _describe(tensor, leaves):
    """A tensor leaf's part of the signature; a CPU tensor goes to the device first."""
    if not isinstance(tensor, T.Tensor) and not _inline(tensor):
        if tensor.device.type != "cpu":
            raise refuse(f"an argument is on {tensor.device}; jit takes tensors on {T.devices[0].type!r} (or the CPU)")
        tensor = tensor.to(T.devices[0])
    leaves.append(tensor)
    if not isinstance(tensor, T.Tensor):
        return None
    view = tensor._view
    shape = None if view is None else (storage.memory_shape(tensor._cell), view.size, view.stride, view.offset,
                                       view.flip)
    parameter = id(tensor) if tensor.requires_grad and tensor.is_leaf else None
    return tuple(tensor.shape), tensor.dtype, tensor._cell.device.index, shape, tensor._cell.perm, \
        tensor.requires_grad, parameter


def _inline(tensor):
    """Tensors under another transform (vmap, grad, an enclosing jax.jit): no program of our own."""
    if isinstance(tensor, T.Tensor):
        return narrow.is_traced(tensor._cell.array)
    return type(tensor) is torch.Tensor and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


class _Identity:
    """An unhashable (or mutable) argument in a signature: the very object, kept alive."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return id(self.value)

    def __eq__(self, other):
        return isinstance(other, _Identity) and other.value is self.value


def _static(value):
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return type(value), repr(value) if isinstance(value, float) else value
    if isinstance(value, torch.nn.Module) or not _hashable(value):
        return _Identity(value)
    return type(value), value


def _hashable(value):
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _autocast():
    return torch.is_autocast_enabled(T.devices[0].type) and torch.get_autocast_dtype(T.devices[0].type)


def _split(result):
    """(flat leaves, function that puts leaves back into the result's structure)."""
    if isinstance(result, torch.Tensor) or result is None:
        return [result], lambda flat: flat[0]
    flat, tree = pytree.tree_flatten(result)
    return flat, lambda leaves: pytree.tree_unflatten(leaves, tree)


def _parameters(function):
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _twin(module, static_argnums, static_argnames, donate):
    """A module that is ``module`` in everything (they have one ``__dict__``) but whose forward is compiled."""
    own = type(module)
    options = {"static_argnums": static_argnums, "static_argnames": static_argnames, "donate": donate}
    # copies and pickles: of the module itself, compiled afresh
    cls = type(own.__name__, (own,), {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__,
                                      "__reduce_ex__": lambda self, protocol: (_rebuild, (module, options))})
    twin = cls.__new__(cls)
    object.__setattr__(twin, "__dict__", module.__dict__)
    cls.forward = JitFunction(own.forward.__get__(twin), static_argnums, static_argnames, donate)
    return twin


def _rebuild(module, options):
    return jit(module, **options)


def jit(fn=None, *, static_argnums=(), static_argnames=(), donate=True):
    """Compile a PyTorch function or module into one XLA program per signature.

    Args:
        fn: a function or nn.Module. Tensors it reaches by any route (argument, closure, global,
            module, optimizer) are inputs; writes to them land in the same tensor objects.
        static_argnums, static_argnames: arguments baked into the program (a retrace per value);
            Python numbers, strings and other non-tensors are static anyway.
        donate: let XLA reuse the memory of state that the function overwrites.

    Returns:
        A callable with the function's signature; for a module, a module of a subclass that shares
        everything with it: parameters, submodules, mode, attributes.

    Raises:
        TraceError: when Python needs a tensor's value (`.item()`, `if tensor:`) or a shape
            depends on values.
    """
    if fn is None:
        return functools.partial(jit, static_argnums=static_argnums, static_argnames=static_argnames, donate=donate)
    if isinstance(fn, torch.nn.Module):
        return _twin(fn, static_argnums, static_argnames, donate)
    if not callable(fn):
        raise TypeError(f"torchax_tpu.jit takes a function or an nn.Module, got {type(fn).__name__}")
    return JitFunction(fn, static_argnums, static_argnames, donate)


jit.trace_count = trace_count  # torchax_tpu.jit is this function; the count stays at hand


__all__ = ["JitFunction", "Trace", "jit", "trace_count"]
