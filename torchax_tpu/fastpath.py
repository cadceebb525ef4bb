"""The shortest way through an eager op: narrow tensors and plain static arguments in, tensors out.

For each op and number of positional arguments a small function is generated which has the
loop over arguments unrolled. It only looks up a program that the general handler has built and
calls it; whatever is unusual (64-bit, keyword arguments, a trace, an error, ...) goes to the
general handler, so both build the same cache keys.
"""

from . import dispatch, dtypes, storage
from . import tensor as T
from .registry import SCALAR, STATIC, TENSOR
from .storage import Cell, tracing


def make(op, general):
    """A handler for ``op`` that tries the short way first, or ``general`` where there is none."""
    kinds = op.positional_kinds()
    plain = op.jit and not (op.random or op.host or op.shape_only or op.inline) and op.wide is not True and kinds and kinds[0] == TENSOR
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
        if general is not T._finish_inplace:
            return None
        return ("if a0._view is not None:", "    write(a0, out)", "    return a0", "cell.array = out", "cell.version += 1", "return a0")
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
    n = len(kinds)
    lines = ["def fast(args):", "    " + ", ".join(f"a{i}" for i in range(n)) + ", = args"]
    arrays, key, listed = [], [], any(k == TENSOR and optional[i] for i, k in enumerate(kinds))
    give_up = "return general(args, {})"
    if listed:
        lines.append("    arrays = []")
    if any(k == TENSOR and optional[i] for i, k in enumerate(kinds)):
        lines.append("    key = ()")
    for i, kind in enumerate(kinds):
        a = f"a{i}"
        if kind == TENSOR:
            lines += [f"    if type({a}) is Tensor:", f"        {'cell' if i == 0 else 'other'} = {a}._cell",
                      f"        if {'cell' if i == 0 else 'other'}.wide or {'cell' if i == 0 else 'other'}.perm is not None"
                      + (f" or {a}._view is not None" if op.layout else "")
                      + (" or other.device is not device:" if i else ":"), f"            {give_up}"]
            if i == 0:
                lines.append("        device = cell.device")
            lines += [f"        x{i} = {'cell' if i == 0 else 'other'}.array",
                      f"        if {a}._view is not None or x{i} is None:",
                      f"            if x{i} is None or {a}._view.version != {'cell' if i == 0 else 'other'}.version:", f"                {give_up}",
                      f"            x{i} = {a}._view.array"]
            if listed:
                lines.append(f"        arrays.append(x{i})")
            if i == 0:
                if op.wide == "int":
                    lines += ["        if x0.dtype.kind in 'iub':", f"            {give_up}"]
                lines += ["    else:", f"        {give_up}"]
                arrays.append("x0")
                continue
            if optional[i]:
                lines += [f"    elif {a} is None:", f"        key += ({i}, None)", "    else:", f"        {give_up}"]
            else:
                lines += [f"    elif type({a}) is float and {a} or type({a}) is int:",
                          f"        x{i} = scalars.get(({a}, type({a})))",
                          f"        if x{i} is None:", f"            {give_up}"]
                if listed:
                    lines.append(f"        arrays.append(x{i})")
                lines += ["    else:", f"        {give_up}"]
            arrays.append(f"x{i}")
        elif kind == SCALAR:
            lines += [f"    if type({a}) is float and {a} or type({a}) is int:", f"        x{i} = scalars.get(({a}, type({a})))",
                      f"        if x{i} is None:", f"            {give_up}"]
            if listed:
                lines.append(f"        arrays.append(x{i})")
            lines += ["    else:", f"        {give_up}"]
            arrays.append(f"x{i}")
        elif kind == STATIC:
            lines += [f"    k{i} = {a}", f"    t = type({a})", "    if t is list:", f"        k{i} = tuple({a})",
                      "    elif t is float or t is dtype_type:", f"        {give_up}"]
            if "    key = ()" in lines:
                lines.append(f"    key += ({i}, k{i})")
            else:
                key += [str(i), f"k{i}"]
        else:
            return lambda args: general(args, {})
    if "    key = ()" in lines:
        lines.append(f"    program = get(({n}, *key) if key else {n})")
    else:
        lines.append(f"    program = get(({n}, {', '.join(key)}))" if key else f"    program = get({n})")
    lines += ["    if program is None:", f"        {give_up}", "    try:",
              f"        out = program.call({'*arrays' if listed else ', '.join(arrays)})",
              "    except Exception:", f"        {give_up}"]
    lines += ["    " + line for line in finish]
    import torch
    scope = {"Tensor": T.Tensor, "Cell": Cell, "WRAP": dtypes.WRAP, "make": T._make, "general": general, "read": storage.read,
             "write": storage.write, "scalars": dispatch._scalars[0], "get": op.cache.get, "dtype_type": torch.dtype,
             "finish_many": T._finish_many}
    exec("\n".join(lines), scope)  # noqa: S102  (the text is built above from the op's schema alone)
    return scope["fast"]
