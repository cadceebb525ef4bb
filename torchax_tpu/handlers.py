"""The general handler of an op: unwrap arguments, find or build the program, call it, hand on its results."""

import jax
import torch
from jax import ShapeDtypeStruct

from . import dispatch, dtypes, errors, storage
from . import random as streams
from .dispatch import ARRAY, CONST, LIST, VIEWED, Program
from .explain import explain
from .registry import DROP, GENERATOR, SCALAR, SCALARS, STATIC, TENSOR, TENSORS
from .results import make_finish
from .storage import tracing
from .tensor import _known, foreign, place


_NUMBERS = frozenset({int, float, bool, complex})


def _placed(finish):
    """``finish`` for programs that may take no array (or run by hand): their results would stay on the first device."""
    def place_and_finish(out, args, kwargs, device):
        if device.index and tracing.active is None:
            out = jax.device_put(out, jax.devices()[device.index])
        return finish(out, args, kwargs, device)

    return place_and_finish


def make_handler(op):
    """The function that runs ``op``: collects arrays and static arguments, finds the program, calls it."""
    kinds, kwkinds, cache, func = op.positional_kinds(), op.kinds, op.cache, op.overload
    names, shape_only = op.names, op.shape_only
    finish, into = make_finish(op)
    always, on_int = op.wide is True, op.wide == "int"
    random, jit, inline = op.random, op.jit, op.inline
    read, get, scalar_array = storage.read, cache.get, dispatch.scalar_array
    fusible, writable, start_arrays = storage.fusible, storage.writable, storage.start_arrays
    shaped = bool(shape_only)
    if random or shaped or not jit or not {TENSOR, TENSORS} & set(op.kinds.values()):
        finish = _placed(finish)

    def handler(args, kwargs):
        active = tracing.active
        arrays, statics = [], []
        device, wide, scalars, fused, generator, through = None, always, None, None, None, None
        i = 0
        for a in args:
            kind = kinds[i]
            if kind == TENSOR:
                cell = getattr(a, "_cell", None)
                if cell is not None:
                    if device is None:
                        device = cell.device
                    elif device is not cell.device:
                        raise _two_devices(func, device, cell.device)
                    wide = wide or cell.wide
                    arr, view, plan = cell.array, a._view, None
                    if into and not i and view is not None and active is None and arr is not None and jit:
                        plan = writable(cell, view)
                    if plan is not None:  # the program gets the whole cell, and gives it back with the view written
                        through, fused = cell, {0: (len(arrays), plan, cell.perm)}
                        statics += (0, plan.token, cell.perm)
                        arrays.append(arr)
                        arrays += plan.start_arrays or start_arrays(plan)
                    if shaped and names[i] in shape_only:
                        statics += (i, tuple(a.shape), a.dtype)
                    elif plan is None:
                        if active is not None or arr is None:
                            arrays.append(read(a))
                        elif view is None:
                            arrays.append(arr)
                        elif view.version == cell.version:
                            arrays.append(view.array)
                        else:
                            plan = fusible(cell, view) if jit and (i or not into) else None
                            if plan is None:
                                arrays.append(read(a))
                            else:
                                fused, view.fused = fused or {}, cell.version
                                fused[i] = (len(arrays), plan, cell.perm)
                                statics += (i, plan.token, cell.perm)
                                arrays.append(arr)
                                arrays += plan.start_arrays or start_arrays(plan)
                elif a is None:
                    statics += (i, None)
                elif type(a) in _NUMBERS and type(a) is not bool and not inline:
                    if scalars is None:
                        scalars = []
                    scalars.append(len(arrays))
                    arrays.append(a)
                elif type(a) in _NUMBERS:
                    statics += (i, type(a), repr(a))
                else:
                    arr = foreign(a, device, func)
                    wide = wide or arr.dtype in dtypes.WIDE
                    arrays.append(arr)
            elif kind == STATIC:
                t = type(a)
                statics += (i, tuple(a) if t is list else repr(a) if t is float else a)
                if a in dtypes.WIDE_TORCH if t is torch.dtype else False:
                    wide = True
            elif kind == SCALAR:
                if type(a) is bool or a is None:
                    statics += (i, repr(a))
                else:
                    if scalars is None:
                        scalars = []
                    scalars.append(len(arrays))
                    arrays.append(a)
            elif kind == TENSORS:
                device, wide = _gather(a, i, arrays, statics, device, wide, active, func)
            elif kind == SCALARS:
                statics += (i, "n", len(a))
                if scalars is None:
                    scalars = []
                for v in a:
                    scalars.append(len(arrays))
                    arrays.append(v)
            elif kind == GENERATOR:
                generator = a
            i += 1
        if kwargs:
            for name, a in kwargs.items():
                kind = kwkinds[name]
                if kind == STATIC:
                    t = type(a)
                    statics += (name, tuple(a) if t is list else repr(a) if t is float else a)
                    if t is torch.dtype and a in dtypes.WIDE_TORCH:
                        wide = True
                elif kind == SCALAR:
                    if type(a) is bool or a is None:
                        statics += (name, repr(a))
                    else:
                        statics += (name, "s")
                        if scalars is None:
                            scalars = []
                        scalars.append(len(arrays))
                        arrays.append(a)
                elif kind == GENERATOR:
                    generator = a
                elif kind == DROP:
                    if name == "device" and a is not None and device is None:
                        device = place(a)
                elif kind == TENSOR and name not in op.mutates:
                    statics += (name, a is None)
                    if a is not None:
                        cell = getattr(a, "_cell", None)
                        if cell is None:
                            arr = foreign(a, device, func)
                            wide = wide or arr.dtype in dtypes.WIDE
                        else:
                            device = cell.device if device is None else device
                            wide = wide or cell.wide
                            arr = read(a)
                        arrays.append(arr)
                elif kind == TENSORS and name not in op.mutates:
                    device, wide = _gather(a, name, arrays, statics, device, wide, active, func)
                elif kind == SCALARS:
                    statics += (name, "n", len(a))
                    scalars = scalars or []
                    for v in a:
                        scalars.append(len(arrays))
                        arrays.append(v)
        if on_int and not wide:
            for arr in arrays:
                if hasattr(arr, "dtype"):
                    wide = arr.dtype.kind in "iub"
                    break
        if scalars is not None:
            if not wide:
                for k in scalars:
                    if type(arrays[k]) is int and dispatch.makes_int64(arrays, arrays[k]):
                        wide = True
            if active is None:
                for k in scalars:
                    arrays[k] = scalar_array(arrays[k], wide)
            else:
                for k in scalars:
                    arrays[k] = active.number(arrays[k])
        if device is None or device not in _known:
            device = place(device)
        key = (i, *statics) if statics else i
        program = get(key)
        if program is None:
            program = cache[key] = build(op, args, kwargs, into, fused)
        if random:
            arrays[:0] = draw(active, device, generator)
        if not jit and active is not None and active.lifts:
            raise errors.TraceError(f"{func} has a result whose shape depends on values; it can't be part of a traced "
                                    f"program. {ADVICE.get(func._schema.name, 'Use masks or torch.where instead.')}")
        try:
            if wide:
                out = program.wide(*arrays)
            else:
                out = program.call(*arrays)
        except Exception as error:
            cause = explain(func, args, kwargs, error)
            if cause is error:
                raise
            raise cause from error
        if through is not None:
            through.array = out
            through.version += 1
            return args[0]
        return finish(out, args, kwargs, device)

    return handler


ADVICE = {"aten::nonzero": "Use torch.where(mask, a, b), or torch.nonzero_static(mask, size=...)."}
def _two_devices(func, a, b):
    return RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {a} and {b}! "
                        f"({func})")


def _gather(tensors, where, arrays, statics, device, wide, active, func):
    """Collect a list of (optional) tensors; its pattern of Nones becomes part of the key."""
    pattern = []
    for t in tensors or ():
        if t is None:
            pattern.append(None)
            continue
        cell = getattr(t, "_cell", None)
        if cell is None:
            arr = foreign(t, device, func)
            wide = wide or arr.dtype in dtypes.WIDE
        else:
            if device is None:
                device = cell.device
            elif device is not cell.device:
                raise _two_devices(func, device, cell.device)
            wide = wide or cell.wide
            arr = cell.array
            if t._view is not None or active is not None or arr is None:
                arr = storage.read(t)
        pattern.append(True)
        arrays.append(arr)
    statics += (where, len(pattern) if None not in pattern else tuple(pattern), tensors is None)
    return device, wide


def draw(active, device, generator):
    """Key data and counter for one random op."""
    if active is not None:
        return active.draw(device.index, generator)
    if generator is not None:
        return streams.generator_draw(generator)
    return streams.next_draw(device.index)


def build(op, args, kwargs, into, fused=None):
    """The program for the static arguments of this call; ``fused``: positional views it reads by itself."""
    count = 0
    fused = fused or {}

    def array():
        nonlocal count
        count += 1
        return (ARRAY, count - 1)

    def slot(name, kind, a):
        if kind == TENSOR:
            if a is None:
                return (CONST, None)
            if name in op.shape_only:
                return (CONST, ShapeDtypeStruct(tuple(a.shape), dtypes.to_jax(a.dtype)))
            if type(a) in _NUMBERS and (op.inline or type(a) is bool):
                return (CONST, a)
            return array()
        if kind == SCALAR:
            return (CONST, a) if a is None or type(a) is bool else array()
        if kind == TENSORS:
            return (CONST, None) if a is None else (LIST, [(CONST, None) if t is None else array() for t in a])
        if kind == SCALARS:
            return (LIST, [array() for _ in a])
        return (CONST, tuple(a) if type(a) is list else a)

    slots = []
    for i, (n, k, a) in enumerate(zip(op.names, op.positional_kinds(), args)):
        if i in fused:
            count += 1 + len(fused[i][1].run_starts())
            slots.append(slot(n, k, a) if n in op.shape_only else (VIEWED, fused[i]))
        elif k not in (DROP, GENERATOR):
            slots.append(slot(n, k, a))
    keyword = [(n, slot(n, op.kinds[n], a)) for n, a in kwargs.items()
               if op.kinds[n] not in (DROP, GENERATOR) and not (n in op.mutates and n in op.kwonly)]
    return Program(op, slots, keyword, into, fused.get(0) if into else None)
