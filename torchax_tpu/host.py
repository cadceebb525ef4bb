"""Ops without a JAX form: torch's CPU kernel on copies, in eager mode and, by a callback, inside traced programs."""

import warnings

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from . import config, convert, copies, dtypes, errors, explain, narrow, registry, storage
from . import tensor as T
from .metrics import host_calls
from .storage import tracing

_warned = set()


def host_handler(func):
    """Run torch's CPU kernel on copies; counted, warned once per op, refusable."""
    name = str(func)
    written = registry.mutated_args(func)

    def handler(args, kwargs):
        if config.fallback == "error":
            raise errors.FallbackError(f"{func} has no JAX form and torchax_tpu.config.fallback is 'error' "
                                       f"(called with {explain.signature(args, kwargs)})")
        if name not in _warned:
            _warned.add(name)
            if config.fallback == "warn":
                warnings.warn(f"torchax_tpu: {func} runs on the host (no JAX form); the data moves to the CPU and back. "
                              "torchax_tpu.config.fallback = 'error' makes this an error.", stacklevel=3)
        if getattr(tracing.active, "lifts", False) and not written:
            return in_program(func, args, kwargs)
        _count(name)
        return run(func, args, kwargs, written)

    return handler


def _count(name):
    host_calls[name] = host_calls.get(name, 0) + 1


def run(func, args, kwargs, written):
    """``func`` on CPU copies of its tensors; what it wrote is copied back."""
    moved, device = [], [None]

    def down(x):
        if isinstance(x, T.Tensor):
            device[0] = device[0] or x._cell.device
            c = copies.to_cpu(x, f"{func} on the host")
            moved.append((x, c))
            return c
        if isinstance(x, (list, tuple)):
            return type(x)(map(down, x))
        if isinstance(x, torch.device) and x.type == T.devices[0].type:
            device[0] = device[0] or T.place(x)
            return torch.device("cpu")
        return x

    names = [a.name for a in func._schema.arguments]
    cargs, ckwargs = down(args), {k: down(v) for k, v in kwargs.items()}
    try:
        out = func(*cargs, **ckwargs)
    except NotImplementedError as e:
        raise errors.UnsupportedOpError(f"{func} has neither a JAX form nor a CPU kernel: {e}") from None
    place = device[0] or T.devices[0]
    given, cgiven = dict(zip(names, args)) | kwargs, dict(zip(names, cargs)) | ckwargs
    for n in written:
        if given.get(n) is not None:
            for t, c in zip(given[n], cgiven[n]) if isinstance(given[n], (list, tuple)) else ((given[n], cgiven[n]),):
                if t.shape != c.shape:
                    t.resize_(c.shape)
                t.copy_(c)
    by_id = {id(c): t for t, c in moved}

    def up(x):
        if isinstance(x, torch.Tensor):
            return by_id[id(x)] if id(x) in by_id else T.wrap(convert.cpu_to_array(x, place.index), place)
        if isinstance(x, (list, tuple)):
            return type(x)(map(up, x)) if type(x) in (list, tuple) else type(x)(map(up, x))
        return x

    return up(out)


def in_program(func, args, kwargs):
    """``func`` as a callback of the program that is being traced; the shapes of its results come from torch's meta kernel."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, T.Tensor)]
    device = leaves[at[0]]._cell.device if at else T.devices[0]
    kinds = [leaves[i].dtype for i in at]
    leaves = [torch.device("cpu") if isinstance(x, torch.device) else x for x in leaves]

    def call(make):
        given = list(leaves)
        for k, i in enumerate(at):
            given[i] = make(k, given[i])
        a, k = pytree.tree_unflatten(given, spec)
        with torch.no_grad():
            return pytree.tree_flatten(func(*a, **k))

    try:
        likes, out_spec = call(lambda k, t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))
    except NotImplementedError:
        raise errors.TraceError(f"{func} runs on the host and torch can't tell the shapes of its results beforehand; it can't be "
                                "part of a traced program. Call it outside the jitted function.") from None

    def on_host(*values):
        _count(str(func))
        out, _ = call(lambda k, _: convert.array_to_cpu(np.asarray(values[k])).to(kinds[k]))
        return tuple(convert.cpu_to_numpy(o.contiguous()).astype(s.dtype) for o, s in zip(out, structs))

    wants = [dtypes.to_jax(o.dtype) for o in likes]
    structs = tuple(jax.ShapeDtypeStruct(tuple(o.shape), narrow.stored(w)) for o, w in zip(likes, wants))
    arrays = [narrow.bare(storage.read(leaves[i])) for i in at]
    with storage.x64(any(w in dtypes.WIDE for w in wants) or any(a.dtype in dtypes.WIDE for a in arrays)):
        out = jax.pure_callback(on_host, structs, *arrays)
    return pytree.tree_unflatten([T.wrap(narrow.hold(o, w), device) for o, w in zip(out, wants)], out_spec)
