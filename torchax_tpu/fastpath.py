"""The shortest way through an eager op: narrow tensors and plain static arguments in, tensors out.

For each op and number of positional arguments a small function is generated which has the
loop over arguments unrolled. It only looks up a program that the general handler has built and
calls it; whatever is unusual (64-bit, keyword arguments, a trace, an error, ...) goes to the
general handler, so both build the same cache keys.
"""

import torch

from . import dispatch, dtypes, storage
from . import tensor as T
from .registry import SCALAR, STATIC, TENSOR
from .storage import Cell, tracing


def make(op, general):
    """A handler for ``op`` that tries the short way first, or ``general`` where there is none."""
    kinds = op.positional_kinds()
    plain = (op.jit and not (op.random or op.host or op.shape_only or op.inline) and op.wide is not True
             and kinds and kinds[0] == TENSOR)
    finish = _finish(op)
    if not plain or finish is None:
        return general
    optional = [str(a.type).startswith("Optional") for a in op.overload._schema.arguments if not a.kwarg_only]
    table = {}

    def handler(args, kwargs):
        if kwargs or tracing.active is not None:
            return general(args, kwargs)
        fn = table.get(len(args))
        if fn is None:
            fn = table[len(args)] = _generate(op, general, finish, kinds[: len(args)], optional)
        return fn(args)

    return handler


def _finish(op):
    """Source lines that turn ``out`` into the result, or None if that needs the general handler."""
    general, into = T.make_finish(op)
    if into:
        if general not in (T._finish_inplace, T._finish_idempotent):
            return None
        return ("if a0._view is not None:", f"    write(a0, out, {general is T._finish_idempotent})", "    return a0", "cell.array = out",
                "cell.version += 1", "return a0")
    returns = op.overload._schema.returns
    if op.mutates or any(str(r.type) != "Tensor" for r in returns):
        return None
    if len(returns) == 1:
        return ("dtype, wide = WRAP[out.dtype]",
                "tensor = make(Tensor, out.shape, dtype=dtype, device=device)",
                "tensor._cell = Cell(out, wide, device)",
                "tensor._view = None",
                "return tensor")
    return ("return finish_many(out, None, None, device)",)


def _generate(op, general, finish, kinds, optional):
    """The function for ``len(kinds)`` positional arguments: straight code, and a variant that takes views."""
    scope = {"Tensor": T.Tensor, "Cell": Cell, "WRAP": dtypes.WRAP, "make": T._make, "general": general,
             "read": storage.read, "write": storage.write, "scalars": dispatch._scalars[0], "get": op.cache.get,
             "dtype_type": torch.dtype, "finish_many": T._finish_many, "fusible": storage.fusible,
             "start": storage._start, "BOOL": dispatch._BOOL, "contiguous": T.contiguous}
    lists = any(k == TENSOR and optional[i] for i, k in enumerate(kinds))
    variants = (("viewed", True), ("fast", lists))
    for name, listed in variants:
        lines = _source(name, op, finish, kinds, optional, listed)
        if lines is None:
            return lambda args: general(args, {})
        exec("\n".join(lines), scope)  # noqa: S102  (the text is made from the op's schema alone)
    return scope["fast"]


_GIVE_UP = "return general(args, {})"


def _source(name, op, finish, kinds, optional, listed):
    n = len(kinds)
    lines = [f"def {name}(args):", "    " + ", ".join(f"a{i}" for i in range(n)) + ", = args"]
    if listed:
        lines += ["    arrays = []", "    key = ()", *(["    marked = []"] if name == "viewed" else ())]
    arrays, key = [], []
    for i, kind in enumerate(kinds):
        if kind == TENSOR:
            lines += _tensor(i, op, optional[i], listed, views=name == "viewed")
            arrays.append(f"x{i}")
        elif kind == SCALAR:
            lines += _number(i, listed, "if")
            arrays.append(f"x{i}")
        elif kind == STATIC:
            lines += [f"    k{i} = a{i}", f"    t = type(a{i})", "    if t is list:", f"        k{i} = tuple(a{i})",
                      "    elif t is float or t is dtype_type:", f"        {_GIVE_UP}"]
            if listed:
                lines.append(f"    key += ({i}, k{i})")
            key += [str(i), f"k{i}"]
        else:
            return None
    if listed:
        lines.append(f"    program = get(({n}, *key) if key else {n})")
    else:
        lines.append(f"    program = get(({n}, {', '.join(key)}))" if key else f"    program = get({n})")
    mark = ["    for view, version in marked:", "        view.fused = version"] if name == "viewed" else []
    lines += ["    if program is None:", f"        {_GIVE_UP}", *mark, "    try:",
              f"        out = program.call({'*arrays' if listed else ', '.join(arrays)})",
              "    except Exception:", f"        {_GIVE_UP}"]
    return lines + ["    " + line for line in finish]


def _tensor(i, op, optional, listed, views):
    a, cell = f"a{i}", "cell" if i == 0 else "other"
    lines = [f"    if type({a}) is Tensor:", f"        {cell} = {a}._cell",
             f"        if {cell}.wide or {cell}.perm is not None{' or other.device is not device' if i else ''}:",
             f"            {_GIVE_UP}"]
    if i == 0:
        lines.append("        device = cell.device")
    lines.append(f"        x{i} = {cell}.array")
    if views:
        lines += [f"        view = {a}._view", f"        if x{i} is None:", f"            {_GIVE_UP}",
                  "        if view is None:", f"            arrays.append(x{i})"]
        if op.layout:  # results of non-contiguous inputs get strides of their own
            lines += ["        elif view.stride != contiguous(view.size):", f"            {_GIVE_UP}"]
        lines += [f"        elif view.version == {cell}.version:", "            arrays.append(view.array)", "        else:",
                  f"            plan = fusible({cell}, view)", "            if plan is None:",
                  f"                arrays.append(read({a}))", "            else:",
                  f"                key += ({i}, plan.token, None)", f"                marked.append((view, {cell}.version))", f"                arrays.append(x{i})",
                  "                for j in plan.run_starts():", "                    arrays.append(start(j))"]
    else:
        lines += [f"        if {a}._view is not None or x{i} is None:", "            return viewed(args)"]
        if listed:
            lines.append(f"        arrays.append(x{i})")
    if i == 0:
        if op.wide == "int":
            lines += ["        if x0.dtype.kind in 'iub':", f"            {_GIVE_UP}"]
        return [*lines, "    else:", f"        {_GIVE_UP}"]
    if optional:
        return [*lines, f"    elif {a} is None:", f"        key += ({i}, None)", "    else:", f"        {_GIVE_UP}"]
    return lines + _number(i, listed, "elif")


def _number(i, listed, word):
    a = f"a{i}"
    lines = [f"    {word} type({a}) is float and {a} or type({a}) is int:", f"        x{i} = scalars.get(({a}, type({a})))",
             f"        if x{i} is None:", f"            {_GIVE_UP}"]
    if i:  # bool + 1 is int64
        lines += [f"        if type({a}) is int and x0.dtype is BOOL:", f"            {_GIVE_UP}"]
    if listed:
        lines.append(f"        arrays.append(x{i})")
    return [*lines, "    else:", f"        {_GIVE_UP}"]
