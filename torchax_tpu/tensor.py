"""The tensor subclass: unwrap arguments, run the op's compiled program, wrap results.

Each ATen overload gets a handler, built once and memoised; `__torch_dispatch__` only calls it.
"""

import functools

import jax
import torch
from jax import ShapeDtypeStruct
from torch.optim.optimizer import _foreach_supported_types as _optim_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_types

from . import dispatch, dtypes, errors, narrow, registry, storage, strides
from .device_module import current
from .dispatch import ARRAY, CONST, LIST, VIEWED, Program
from .explain import explain
from .registry import DROP, GENERATOR, SCALAR, SCALARS, STATIC, TENSOR, TENSORS
from .storage import Cell, View, tracing
from . import random as streams

_make = torch.Tensor._make_wrapper_subclass
_WRAP, _strided = dtypes.WRAP, torch.strided
devices = [None]  # index -> torch.device("<name>", index), set by device.py


class Tensor(torch.Tensor):
    """A torch.Tensor whose values are a jax.Array. Made by factories with device="jax" and `.to("jax")`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _view = None  # of a tensor that is the whole cell; its own attribute costs time

    @staticmethod  # binding a class method would cost more
    def __torch_dispatch__(func, types, args=(), kwargs=None):
        try:
            handler = func._torchax_tpu  # an attribute costs a third of a dict entry here
        except AttributeError:
            handler = find(func)
        try:
            return handler(args, kwargs or {})
        except BaseException as error:
            if errors.backward.running:
                errors.backward.error = error
            raise


_set_default_dtype = torch.set_default_dtype


@functools.wraps(_set_default_dtype)
def set_default_dtype(d):
    before = torch.get_default_dtype()
    _set_default_dtype(d)
    if torch.get_default_dtype() is not before:  # programs of ops that turn integers into floats were traced under it
        registry.forget_programs()


torch.set_default_dtype = set_default_dtype

for _supported in (_optim_types, _util_types):  # optimizers and clip_grad_* take their foreach paths, as DTensor's do
    if Tensor not in _supported:
        _supported.append(Tensor)


def find(func):
    """Build and memoise the handler of an overload (routes.py puts the real one here)."""
    raise errors.UnsupportedOpError(f"{func}: the op tables are not loaded")


# ---------------------------------------------------------------- making tensors


def wrap(array, device):
    """A new tensor that owns a new storage holding ``array``."""
    dtype, wide = _WRAP[array.dtype]
    tensor = _make(Tensor, array.shape, None, None, None, dtype, _strided, device)
    cell = tensor._cell = Cell(array, wide, device)
    if tracing.active is not None:
        tracing.active.created(cell)
    return tensor


def wrap_permuted(array, device, perm):
    """A new tensor that owns ``array``, with memory that runs through its axes in the order ``perm``."""
    if perm is None:
        return wrap(array, device)
    dtype, wide = _WRAP[array.dtype]
    tensor = _make(Tensor, array.shape, permuted_strides(array.shape, perm), 0, dtype=dtype, device=device)
    cell = tensor._cell = Cell(array, wide, device)
    cell.perm = perm
    if tracing.active is not None:
        tracing.active.created(cell)
    return tensor


def from_array(array, index=0, requires_grad=False):
    """A tensor on device ``index`` that shares the (immutable) ``array``."""
    if getattr(array, "weak_type", False):
        array = jax.lax.convert_element_type(array, array.dtype)
    tensor = wrap(array, devices[index])
    return tensor.requires_grad_() if requires_grad else tensor


def lazy(size, dtype, device, stride=None):
    """An uninitialised tensor: no device work until it is read or written."""
    size = tuple(size)
    jdt = dtypes.to_jax(dtype)
    if stride is None:
        tensor = _make(Tensor, size, dtype=dtype, device=device)
    else:
        tensor = _make(Tensor, size, strides=stride, dtype=dtype, device=device)
    cell = tensor._cell = Cell(None, dtype in dtypes.WIDE_TORCH, device)
    cell.lazy = (size, jdt)
    if tracing.active is not None:
        tracing.active.created(cell)
    return tensor


_contiguous = {}


def contiguous(size):
    """Memoised row-major strides."""
    s = _contiguous.get(size)
    if s is None:
        if len(_contiguous) > 65536:
            _contiguous.clear()
        s = _contiguous[size] = strides.contiguous_strides(size)
    return s


def geometry(tensor):
    """(size, stride, offset) in elements of the tensor's dtype, as plain tuples."""
    view, cell = tensor._view, tensor._cell
    if view is not None:
        return view.size, view.stride, view.offset
    size = cell.array.shape if cell.array is not None else cell.lazy[0]
    if cell.perm is None:
        return size, contiguous(size), 0
    return size, permuted_strides(size, cell.perm), 0


def permuted_strides(size, perm):
    """Strides of a dense tensor whose memory runs through its axes in the order ``perm``."""
    inner = strides.contiguous_strides([size[p] for p in perm])
    out = [0] * len(size)
    for p, s in zip(perm, inner):
        out[p] = s
    return tuple(out)


def alias(tensor, size, stride, offset, dtype=None, flip=None):
    """A tensor over the same storage with other geometry (and dtype): what a view op returns."""
    cell = tensor._cell
    if dtype is None:
        dtype = tensor.dtype
    elif dtype in dtypes.WIDE_TORCH:
        cell.wide = True  # whoever touches the cell from now on needs 64-bit mode
    out = _make(Tensor, size, stride, offset, dtype=dtype, device=cell.device)
    out._cell = cell
    own = tensor._view
    flip = flip if own is None or own.flip is None else own.flip if flip is None else (
        None if flip is own.flip else lambda x, f=flip, g=own.flip: f(g(x)))
    out._view = None if flip is None and _is_whole(cell, size, stride, offset, dtype) else View(
        size, stride, offset, dtypes.TO_JAX[dtype], flip)
    if flip is not None and dtype is tensor.dtype:  # torch's lazy bits travel with the view
        torch._C._set_conj(out, tensor.is_conj())
        torch._C._set_neg(out, tensor.is_neg())
    return out


def view_of(tensor, g):
    """The alias of a tensor with the geometry ``g`` (of views.py), which keeps the way to read it for the next one."""
    own, cell = tensor._view, tensor._cell
    if g.dtype is not None or own is not None and own.flip is not None:
        return alias(tensor, g.size, g.stride, g.offset, g.dtype)
    size, stride, offset, dtype = g.size, g.stride, g.offset, tensor.dtype
    out = _make(Tensor, size, stride, offset, None, dtype, _strided, cell.device)
    out._cell = cell
    if offset or not _is_whole(cell, size, stride, offset, dtype):
        out._view = View(size, stride, offset, dtypes.TO_JAX[dtype] if own is None else own.dtype, None, g)
    return out


def _is_whole(cell, size, stride, offset, dtype):
    array = cell.array
    have, jdt = (array.shape, array.dtype) if array is not None else cell.lazy
    if offset or have != size or dtypes.TO_JAX[dtype] != jdt:
        return False
    return stride == (contiguous(size) if cell.perm is None else permuted_strides(size, cell.perm))


def foreign(value, device, func):
    """The array of a tensor that isn't ours: a 0-d CPU tensor joins in, others are on the wrong device."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and value.device.type == "cpu":
            from .convert import cpu_to_array  # late: convert builds on this module's tensors
            lift = getattr(tracing.active, "host_tensor", None)
            return cpu_to_array(value) if lift is None else lift(value)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{device or devices[0]} and {value.device}! ({func}; move it with .to({str(device or devices[0])!r}))")
    raise TypeError(f"{func}: expected a tensor, got {type(value).__name__}")


# ---------------------------------------------------------------- handlers


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
    fusible, start = storage.fusible, storage._start
    shaped = bool(shape_only)
    if random or shaped or not jit or not {TENSOR, TENSORS} & set(op.kinds.values()):
        finish = _placed(finish)

    def handler(args, kwargs):
        active = tracing.active
        arrays, statics = [], []
        device, wide, scalars, fused, generator = None, always, None, None, None
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
                    if shaped and names[i] in shape_only:
                        statics += (i, tuple(a.shape), a.dtype)
                    else:
                        arr, view = cell.array, a._view
                        if active is not None or arr is None:
                            arrays.append(read(a))
                        elif view is None:
                            arrays.append(arr)
                        elif view.version == cell.version:
                            arrays.append(view.array)
                        else:
                            plan = fusible(cell, view) if jit else None
                            if plan is None:
                                arrays.append(read(a))
                            else:
                                fused, view.fused = fused or {}, cell.version
                                fused[i] = (len(arrays), plan, cell.perm)
                                statics += (i, plan.token, cell.perm)
                                arrays.append(arr)
                                arrays.extend(map(start, plan.run_starts()))
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
        return finish(out, args, kwargs, device)

    return handler


ADVICE = {"aten::nonzero": "Use torch.where(mask, a, b), or torch.nonzero_static(mask, size=...)."}
_known = set()  # the torch.device objects in `devices`: results carry these very objects


def place(device):
    """The canonical device object (with an index) for what a caller gave."""
    if device is None:
        return devices[current.index]
    device = torch.device(device)
    index = current.index if device.index is None else device.index
    if index >= len(devices):
        raise RuntimeError(f"device {device} is out of range: this process has {len(devices)} "
                           f"{devices[0].type!r} device(s), 0 to {len(devices) - 1}")
    return devices[index]


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
            slots.append((VIEWED, fused[i]))
            count += 1 + len(fused[i][1].run_starts())
        elif k not in (DROP, GENERATOR):
            slots.append(slot(n, k, a))
    keyword = [(n, slot(n, op.kinds[n], a)) for n, a in kwargs.items()
               if op.kinds[n] not in (DROP, GENERATOR) and not (n in op.mutates and n in op.kwonly)]
    return Program(op, slots, keyword, into)


# ---------------------------------------------------------------- results


def make_finish(op):
    """(function that turns program results into what torch expects, whether the program casts into self)."""
    returns = op.overload._schema.returns
    mutates = op.mutates
    if not mutates:
        if op.host:
            return (lambda out, args, kwargs, device: _host(out)), False
        if len(returns) == 1:
            if str(returns[0].type) == "List[Tensor]":
                return (lambda out, args, kwargs, device: [wrap(o, device) for o in out]), False
            if op.layout == "elementwise" or op.overload._schema.name.endswith("_like"):
                return _finish_elementwise, False
            return (lambda out, args, kwargs, device: wrap(out, device)), False
        return _finish_many, False
    first = op.overload._schema.arguments[0]
    if mutates == (first.name,) and len(returns) == 1 and returns[0].alias_info is not None:
        idempotent = op.overload._schema.name.split("::")[1] in _OVERLAP_OK
        return (_finish_idempotent if idempotent else _finish_inplace), True
    if mutates == (first.name,) and not returns and str(first.type) == "List[Tensor]":
        return _finish_inplace_list, True
    return _finish_mixed(op), False


def _host(out):
    if narrow.is_traced(out):
        raise errors.TraceError("a Python bool or number was asked of a traced tensor; use torch.where or torch.cond")
    return out.item()


def _finish_elementwise(out, args, kwargs, device):
    """A result whose strides follow the inputs', as TensorIterator's do."""
    for a in args:
        if type(a) is Tensor and (a._cell.perm is not None or a._view is not None):
            break
    else:
        if "memory_format" not in kwargs:
            return wrap(out, device)
    wanted = kwargs.get("memory_format")
    if wanted not in (None, torch.preserve_format):
        return wrap_permuted(out, device, format_order(len(out.shape), wanted))
    shaped = tuple(geometry(a)[:2] for a in args if type(a) is Tensor and a.dim())
    return wrap_permuted(out, device, strides.result_order(tuple(out.shape), shaped))


def format_order(ndim, memory_format):
    """Axes order of memory that a memory_format asks for; None for row-major."""
    if memory_format is torch.channels_last and ndim == 4:
        return (0, 2, 3, 1)
    if memory_format is torch.channels_last_3d and ndim == 5:
        return (0, 2, 3, 4, 1)
    return None


def _finish_many(out, args, kwargs, device):
    return tuple(None if o is None else [wrap(x, device) for x in o] if isinstance(o, list) else wrap(o, device)
                 for o in out)


def _finish_inplace(out, args, kwargs, device):
    target = args[0]
    if target._view is None and tracing.active is None:
        cell = target._cell
        cell.array = out
        cell.version += 1
    else:
        storage.write(target, out)
    return target


# In-place ops which torch allows on expanded tensors: what they write doesn't depend on the order.
_OVERLAP_OK = frozenset({"fill_", "zero_", "masked_fill_", "index_put_", "_index_put_impl_"})


def _finish_idempotent(out, args, kwargs, device):
    storage.write(args[0], out, True)
    return args[0]


def _finish_inplace_list(out, args, kwargs, device):
    for target, o in zip(args[0], out):
        storage.write(target, o)
    torch.autograd.graph.increment_version(args[0])  # torch counts writes to single tensors only


def _finish_mixed(op):
    """out= variants and ops which return fresh results next to written arguments."""
    returns, mutates, names = op.overload._schema.returns, op.mutates, op.names
    fresh = sum(r.alias_info is None for r in returns)
    args_schema = {a.name: a for a in op.overload._schema.arguments}
    outs = [m for m in mutates if args_schema[m].kwarg_only]
    is_out = len(outs) == len(mutates)
    returned = outs or mutates  # results alias these

    def finish(out, args, kwargs, device):
        given = dict(zip(names, args)) | kwargs
        out = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if is_out and len(mutates) == 1 and str(args_schema[mutates[0]].type) == "List[Tensor]":
            out = (list(out),)
        results = [wrap(o, device) if o is not None else None for o in out[:fresh]]
        values = iter(out[fresh:])
        for m in mutates:
            target = given.get(m)
            if target is None:
                continue
            value = next(values)
            if value is None:  # the op left this argument as it was
                continue
            for t, v in zip(target, value) if isinstance(target, (list, tuple)) else ((target, value),):
                write_out(t, v, op.overload) if m in outs else storage.write(t, dispatch.fit(v, t_struct(t), op))
        written = iter(given[m] for m in returned if given.get(m) is not None)
        fresh_results = iter(results)
        final = [next(written) if r.alias_info is not None else next(fresh_results) for r in returns]
        return None if not final else final[0] if len(final) == 1 else tuple(final)

    return finish


def t_struct(t):
    """Shape and array dtype of a tensor."""
    return ShapeDtypeStruct(tuple(t.shape), dtypes.to_jax(t.dtype))


_FILLS = frozenset({"linspace", "logspace"})  # out= keeps its shape if its size fits
# out= of these must have the result's very dtype, in torch too
_EXACT = frozenset("""abs addmm addmv addbmm baddbmm dot vdot bmm mm matmul bitwise_not ceil conj_physical linalg_cross cummax cummin
    expand_copy diagonal_copy alias_copy permute_copy view_copy unfold_copy squeeze_copy unsqueeze_copy transpose_copy t_copy frac floor
    kthvalue masked_select mode neg nan_to_num heaviside histogram histc gather index_copy index_select index_add index_reduce sort take
    scatter scatter_add scatter_reduce tril triu where amax amin round sign sgn trunc topk logcumsumexp _softmax _log_softmax softplus
    softshrink hardshrink gelu linalg_vector_norm linalg_inv_ex linalg_cholesky_ex linalg_qr linalg_lu _linalg_svd
    _linalg_eigh""".split())
_CATS = frozenset({"cat", "stack", "_chunk_cat"})  # torch raises TypeError here


def write_out(target, value, func):
    """Write a result into an out= tensor: resized if its shape differs, cast if torch allows it."""
    if getattr(target, "_cell", None) is None:
        raise RuntimeError(f"{func}: Expected out tensor to be on {devices[0]}, but got {target.device}")
    have, name = dtypes.TO_TORCH[value.dtype], func._schema.name.split("::")[1]
    if name in _FILLS and target.numel() == value.size:
        value = value.reshape(target.shape)
    if have != target.dtype and name in _EXACT:
        raise RuntimeError(f"{func}: Expected out tensor to have dtype {have}, but got {target.dtype} instead")
    if not torch.can_cast(have, target.dtype) and name != "bernoulli":
        raise (TypeError if name in _CATS else RuntimeError)(f"{func}: result type {dispatch._name(have)} can't be cast to the desired output type "
                           f"{dispatch._name(target.dtype)}")
    if tuple(target.shape) != tuple(value.shape):
        if target.numel():
            import warnings
            warnings.warn(f"An output with one or more elements was resized since it had shape {list(target.shape)}, "
                          f"which does not match the required output shape {list(value.shape)}.", stacklevel=2)
        target.resize_(value.shape)
    with storage.x64(target._cell.wide or value.dtype in dtypes.WIDE):
        storage.write(target, dispatch.convert(value, dtypes.to_jax(target.dtype)))
