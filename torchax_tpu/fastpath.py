"""The shortest way through an eager op: tensors and plain arguments in, tensors out.

For each op and number of positional arguments two small functions are generated, with the loop over
arguments unrolled. "fast" takes whole row-major tensors of 32 bits and less, the first one also as a view of such;
"viewed" takes any views, 64-bit tensors and lists as well. Both only look up a program that the general handler has built and call it;
whatever is unusual (keyword arguments, a trace, an error, ...) goes to the general handler, so all build the
same cache keys.
"""

import jax
import torch

from . import dispatch, dtypes, narrow, results, storage
from . import tensor as T
from .registry import SCALAR, STATIC, TENSOR, TENSORS
from .storage import Cell, tracing


def make(op, general):
    """A handler for ``op`` that tries the short way first, or ``general`` where there is none."""
    kinds = op.positional_kinds()
    plain = (op.jit and not (op.random or op.host or op.shape_only or op.inline) and kinds
             and (kinds[0] == TENSOR or kinds[0] == TENSORS and SCALAR not in kinds))
    finish = _finish(op)
    if not plain or finish is None:
        return general
    arguments = [a for a in op.overload._schema.arguments if not a.kwarg_only]
    optional = [str(a.type).startswith("Optional") for a in arguments]
    usual = sum(not a.has_default_value() for a in arguments)  # torch leaves out trailing defaults
    table = {}

    def other(args):
        """Calls with another number of arguments."""
        n = len(args)
        fn = table.get(n)
        if fn is None:
            fn = table[n] = _generate(op, general, None, finish, kinds[:n], optional)
        return fn(args, {})

    return _generate(op, general, other, finish, kinds[:usual], optional)


def _finish(op):
    """Source lines that turn ``out`` into the result, or None if that needs the general handler."""
    general, into = results.make_finish(op)
    if into:
        return () if general in (results._finish_inplace, results._finish_idempotent) else None
    returns = op.overload._schema.returns
    if op.mutates or any(str(r.type) != "Tensor" for r in returns):
        return None
    if len(returns) == 1:
        return ("aval = out.aval",
                "dtype, wide = WRAP[aval.dtype]",
                "tensor = make(Tensor, aval.shape, None, None, None, dtype, strided, device)",
                "tensor._cell = Cell(out, wide, device)",
                "return tensor")
    return ("return finish_many(out, None, None, device)",)


def _generate(op, general, other, finish, kinds, optional):
    """The handler for ``len(kinds)`` positional arguments, others go to ``other``: "fast", with "viewed" behind it."""
    scope = {"Tensor": T.Tensor, "Cell": Cell, "WRAP": dtypes.WRAP, "make": T._make, "strided": torch.strided,
             "general": general, "elsewhere": other, "tracing": tracing, "read": storage.read,
             "ints": dispatch.numbers[0][int].get,
             "floats": dispatch.numbers[0][float].get, "tables": dispatch.numbers, "get": op.cache.get,
             "dtype_type": torch.dtype, "finish_many": results._finish_many, "fusible": storage.fusible, "x64": jax.enable_x64,
             "start_arrays": storage.start_arrays, "BOOL": dispatch._BOOL}
    only = op.wide is True or TENSORS in kinds
    for viewed in (True,) if only else (True, False):
        lines = _source(op, finish, kinds, optional, viewed, entry=viewed == only)
        if lines is None:
            return general
        exec("\n".join(lines), scope)  # noqa: S102  (the text is made from the op's schema alone)
    return scope["viewed" if only else "fast"]


_GIVE_UP = "return general(args, kwargs)"


def _source(op, finish, kinds, optional, viewed, entry):
    n, into = len(kinds), bool(op.mutates)
    listed = viewed or any(k == TENSOR and optional[i] for i, k in enumerate(kinds))
    lines = [f"def {'viewed' if viewed else 'fast'}(args, kwargs):"]
    if entry:
        lines += ["    if kwargs or tracing.active is not None:", "        return general(args, kwargs)"]
    lines += [f"    if len(args) != {n}:", "        return elsewhere(args)", "    " + ", ".join(f"a{i}" for i in range(n)) + ", = args"]
    if listed:
        lines += ["    arrays = []", f"    key = ({n},)"]
    if viewed:
        lines += [f"    wide = {op.wide is True}", *(f"    f{i} = None" for i, k in enumerate(kinds) if k == TENSOR)]
    arrays, key = [], []
    for i, kind in enumerate(kinds):
        if kind == TENSOR:
            lines += _tensor(i, op, optional[i], listed, viewed, into)
            arrays.append(f"x{i}")
        elif kind == TENSORS:
            lines += _tensors(i)
        elif kind == SCALAR:
            lines += _number(i, listed, viewed, "if")
            arrays.append(f"x{i}")
        elif kind == STATIC:
            lines += [f"    k{i} = a{i}", f"    t = type(a{i})", "    if t is list:", f"        k{i} = tuple(a{i})",
                      "    elif t is float or t is dtype_type:", f"        {_GIVE_UP}"]
            if listed:
                lines.append(f"    key += ({i}, k{i})")
            key += [str(i), f"k{i}"]
        else:
            return None
    written = ["view.fused = version"] if not into else []
    whole = ["cell.array = out", "cell.version += 1", "return a0"] if into else []
    if viewed:  # views read inside this program: the next reader keeps a copy
        lines += _call(f"key if len(key) > 1 else {n}", "*arrays", wide=True, first=[
            f"if f{i} is not None:\n        f{i}.fused = v{i}" for i, k in enumerate(kinds) if k == TENSOR])
    elif listed:
        first = [f"if view is not None:\n        {line}" for line in written]
        lines += _call(f"key if len(key) > 1 else {n}", "*arrays", first=first)
    else:
        lines += ["    if view is None:"]
        lines += _call(f"({n}, {', '.join(key)})" if key else str(n), ", ".join(arrays), indent="    ")
        lines += ["    else:"]
        rest = "".join(f", {x}" for x in arrays[1:])
        lines += _call(f"({', '.join([str(n), '0', 'token', 'None', *key])})", f"x0, *starts{rest}", indent="    ",
                       first=written, one=f"x0, starts[0]{rest}")
    return lines + ["    " + line for line in whole or finish]


def _call(key, arrays, indent="", first=(), wide=False, one=None):
    """Lines that find the program, do ``first``, and call it; ``one``: the arguments with a single start (unpacking costs more)."""
    call = f"out = program.call({arrays})"
    lines = [f"program = get({key})", "if program is None:", f"    {_GIVE_UP}", *first, "try:"]
    if wide:
        lines += (["    if wide:", f"        {call.replace('program.call', 'program.wide')}"] if narrow.ON else
                  ["    if wide:", "        with x64(True):", f"            {call}"])
        lines += ["    else:", f"        {call}"]
    elif one:
        lines += ["    if len(starts) == 1:", f"        out = program.call({one})", "    else:", f"        {call}"]
    else:
        lines.append(f"    {call}")
    return [f"{indent}    {line}" for line in [*lines, "except Exception:", f"    {_GIVE_UP}"]]


def _slice(op, listed, into):
    """Lines for a first argument that is a view which was read before, of this or another tensor with its geometry.

    Of an in-place op the program gives back the whole cell with the view written.
    """
    needs = " or not g.distinct" if into else " or not g.dense" if op.layout else ""
    stale = "" if into else " or view.version == version or view.fused == version"
    lines = ["g, version = view.geometry, cell.version", f"if g is None{needs}:", "    return viewed(args, kwargs)",
             "aval, plan = g.reading", f"if plan is None or aval is not x0.aval{stale}:", "    return viewed(args, kwargs)",
             "token, starts = plan.token, plan.start_arrays or start_arrays(plan)"]
    return lines + (["key += (0, token, None)", "arrays += (x0, *starts)"] if listed else [])


def _tensor(i, op, optional, listed, viewed, into):
    a, cell, x = f"a{i}", "cell" if i == 0 else "other", f"x{i}"
    lines = [f"    if type({a}) is Tensor:", f"        {cell} = {a}._cell"]
    if i:
        refused = [f"{cell}.perm is not None", "other.device is not device"]
        if op.mutates:  # an input that shares memory with what is written
            refused.append("other is cell" + (f" and {a} is not a0" if op.layout == "elementwise" else ""))
        lines += [f"        if {' or '.join(refused if viewed else [*refused, 'other.wide', f'{a}._view is not None'])}:",
                  f"            {_GIVE_UP if viewed else 'return viewed(args, kwargs)'}"]
    elif viewed:
        lines += [f"        if cell.perm is not None{' or a0._view is not None' if into else ''}:", f"            {_GIVE_UP}",
                  "        device = cell.device"]
    else:
        lines += ["        if cell.perm is not None or cell.wide:", "            return viewed(args, kwargs)",
                  "        device = cell.device"]
    lines += [f"        {x} = {cell}.array", f"        if {x} is None:", f"            {_GIVE_UP}"]
    if viewed:
        lines += [f"        if {cell}.wide:", "            wide = True", f"        view = {a}._view", "        if view is None:",
                  f"            arrays.append({x})"]
        if op.layout:  # results of non-contiguous inputs get strides of their own
            lines += ["        elif view.geometry is None or not view.geometry.dense:", f"            {_GIVE_UP}"]
        lines += [f"        elif view.version == {cell}.version:", "            arrays.append(view.array)", "        else:",
                  f"            plan = fusible({cell}, view)", "            if plan is None:",
                  f"                arrays.append(read({a}))", "            else:",
                  f"                f{i}, v{i} = view, {cell}.version", f"                key += ({i}, plan.token, None)",
                  f"                arrays.append({x})", "                arrays += plan.start_arrays or start_arrays(plan)"]
    elif not i:
        lines += ["        view = a0._view", "        if view is not None:", *("            " + line for line in _slice(op, listed, into))]
        lines += ["        else:", "            arrays.append(x0)"] if listed else []
    elif listed:
        lines.append(f"        arrays.append({x})")
    if i == 0:
        if op.wide == "int":
            lines += [f"        if {x}.dtype.kind in 'iub':", "            wide = True" if viewed else "            return viewed(args, kwargs)"]
        return [*lines, "    else:", f"        {_GIVE_UP}"]
    if optional:
        return [*lines, f"    elif {a} is None:", f"        key += ({i}, None)", "    else:", f"        {_GIVE_UP}"]
    return lines + _number(i, listed, viewed, "elif")


def _tensors(i):
    """Lines for a list of tensors; one with a None in it (as in x[:, i]) is left to the general handler."""
    a = f"a{i}"
    lines = [f"    for t in {a}:", "        if type(t) is not Tensor:", f"            {_GIVE_UP}",
             "        other = t._cell"]
    if i == 0:
        lines[:0] = ["    if not a0 or type(a0[0]) is not Tensor:", f"        {_GIVE_UP}", "    device = a0[0]._cell.device"]
    return [*lines, "        if other.device is not device:", f"            {_GIVE_UP}",
            "        if other.wide:", "            wide = True",
            "        x = other.array", "        arrays.append(read(t) if x is None or t._view is not None else x)",
            f"    key += ({i}, len({a}), False)"]


def _number(i, listed, viewed, word):
    a = f"a{i}"
    ints, floats = ("tables[wide][int].get", "tables[wide][float].get") if viewed else ("ints", "floats")
    lines = []
    for test, table in ((f"{word} type({a}) is int", ints), (f"elif type({a}) is float and {a}", floats)):  # -0.0 is another key
        bools = " or x0.dtype is BOOL" if i and table is ints else ""  # bool + 1 is int64
        lines += [f"    {test}:", f"        x{i} = {table}({a})", f"        if x{i} is None{bools}:", f"            {_GIVE_UP}"]
        lines += [f"        arrays.append(x{i})"] if listed else []
    return [*lines, "    else:", f"        {_GIVE_UP}"]
