"""The lookup order: declared, derived from the schema, decomposed, host fallback, named error.

`find(overload)` returns the handler that `__torch_dispatch__` memoises.
"""


import torch
from torch._decomp import decomposition_table

from . import arguments, dtypes, errors, fastpath, indices, overlap, registry, storage, views
from . import tensor as T
from .convert import cpu_to_array
from .handlers import make_handler
from .host import host_handler
from .registry import SPECIAL, TABLE, VIEWS, Op, aten
from .results import OVERLAP_OK, t_struct, write_out
from .storage import Inline, tracing

CompositeImplicit = torch._C.DispatchKey.CompositeImplicitAutograd
resolved = {}  # overload -> how it was resolved, for documents and tests
HOST_ONLY = set()  # overloads whose decomposition must not be used (ops/host.py)


def find(func):
    """The memoised handler of ``func``."""
    handler, how = resolve(func)
    resolved[func] = how
    func._torchax_tpu = handler
    return handler


def resolve(func):
    """(handler, how it came about) along the lookup order."""
    if func in SPECIAL:
        fn = SPECIAL[func]
        return getattr(fn, "handler", None) or (lambda args, kwargs: fn(*args, **kwargs)), "special"
    if func in VIEWS or func in views.BY_META:
        return make_view_handler(func, VIEWS.get(func)), "view"
    op = TABLE.get(func)
    how = "declared"
    if op is None:
        op, how = derive(func), "derived"
    if op is not None:
        return arguments.checked(func, indices.checked(func, fastpath.make(op, overlap.checked(op, make_handler(op))))), how
    if func in HOST_ONLY:
        return host_handler(func), "fallback"
    if func in _TWINS:
        return through_twin(func, _TWINS[func]), "derived"
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), CompositeImplicit):
        return (lambda args, kwargs: func.decompose(*args, **kwargs)), "composite"
    if func in decomposition_table and not registry.mutated_args(func):
        return decomposed(func, decomposition_table[func]), "decomposed"
    if func.namespace == "prims" and hasattr(func, "_overloadpacket"):
        return (lambda args, kwargs: func.prim_impl(*args, **kwargs) if hasattr(func, "prim_impl")
                else func.op.impl_aten(*args, **kwargs)), "decomposed"
    if registry.mutated_args(func) and registry.factory_twin(func) is not None:
        return factory_out(func, registry.factory_twin(func)), "derived"
    if registry.mutated_args(func) and registry.functional_twin(func) is not None:
        return through_twin(func, registry.functional_twin(func)), "derived"
    explicit = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutograd")
    if explicit or str(func).endswith("_copy.default"):
        return (lambda args, kwargs: func.redispatch(_BACKEND, *args, **kwargs)), "composite"
    return host_handler(func), "fallback"


_TWINS = {
    # composites which compare C++ storages or swap C++ tensors, where wrappers have neither
    aten.matmul.out: aten.matmul.default,
    aten.linalg_matrix_rank.out: aten.linalg_matrix_rank.default,
    aten.linalg_matrix_rank.out_tol_tensor: aten.linalg_matrix_rank.tol_tensor,
    aten.linalg_matrix_rank.atol_rtol_tensor_out: aten.linalg_matrix_rank.atol_rtol_tensor,
    aten.linalg_matrix_rank.atol_rtol_float_out: aten.linalg_matrix_rank.atol_rtol_float,
    aten.adaptive_avg_pool3d_backward.grad_input: aten._adaptive_avg_pool3d_backward.default,
}
_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)  # where torch puts kernels made of other ops


# ---------------------------------------------------------------- views


def make_view_handler(func, fast):
    """A view: new geometry over the same storage, no device work."""
    geometry, view_of = T.geometry, T.view_of
    strided = func is aten.as_strided.default  # only there can the caller ask for more than the storage holds

    memo = {}  # (geometry, arguments) -> Geometry

    def work_out(self, size, stride, offset, args, kwargs):
        g = views.Geometry(size, stride, offset)
        try:
            if fast is None:
                raise views.Unsure
            return fast(g, *args[1:], **kwargs)
        except views.Unsure:
            g.dtype = self.dtype
            held = storage.storage_numel(self._cell, dtypes.to_jax(self.dtype))
            out = views.by_meta(func, g, held, args[1:], kwargs)
            for o in out if type(out) is list else (out,):
                if o.dtype == self.dtype:
                    o.dtype = None  # memoised for tensors of any dtype
            return out

    def handler(args, kwargs):
        self = args[0]
        view, cell = self._view, self._cell
        if fast is None or kwargs:
            out = work_out(self, *geometry(self), args, kwargs)
        else:
            rest = args[1:]
            if len(rest) == 1 and type(rest[0]) is list:
                rest = tuple(rest[0])
            if view is not None:
                key = (view.size, view.stride, view.offset, rest)
            elif cell.perm is None and cell.array is not None:
                key = (cell.array.shape, rest)
            else:
                key = (*geometry(self), rest)
            try:
                out = memo.get(key)
                if out is None:
                    if len(memo) > 8192:
                        memo.clear()
                    out = memo[key] = work_out(self, *geometry(self), args, kwargs)
            except TypeError:  # a list among the arguments doesn't hash
                out = work_out(self, *geometry(self), args, kwargs)
        if type(out) is list:
            return [view_of(self, o) for o in out]
        if strided and strides_exceed(self, out):
            raise RuntimeError(f"{func}: size {list(out.size)}, stride {list(out.stride)}, offset {out.offset} need more "
                               "elements than the storage holds")
        return view_of(self, out)

    return handler


def strides_exceed(tensor, g):
    from .strides import extent
    return extent(g.size, g.stride, g.offset) > storage.storage_numel(
        tensor._cell, dtypes.to_jax(g.dtype or tensor.dtype))


# ---------------------------------------------------------------- derivation


def derive(func):
    """An Op for an in-place, out= or foreach overload, from the functional op it belongs to."""
    if func in TABLE:
        return TABLE[func]
    twin = registry.functional_twin(func)
    if twin is not None:
        base = TABLE.get(twin) or derive(twin)
        if base is not None and not base.host:
            return _like(func, base)
    element = registry.foreach_element(func)
    if element is not None:
        base = TABLE.get(element) or derive(element)
        if base is not None:
            return foreach_op(func, base)
    return None


def _like(func, base):
    return Op(func, base.impl, rule=base.rule, static=base.static, jit=base.jit, random=base.random, wide=base.wide,
              layout=base.layout, shape_only=base.shape_only & {a.name for a in func._schema.arguments},
              origin="derived")


def foreach_op(func, base):
    """One program for a whole list: the element op mapped over it inside the jit."""
    from .dispatch import apply

    kinds = {a.name: str(a.type) for a in func._schema.arguments}
    names = [a.name for a in func._schema.arguments if not a.kwarg_only]

    keyword_only = list(base.kwonly)

    def impl(*args, **kwargs):
        listed = [kinds[n].startswith("List") for n, _ in zip(names, args)]
        lists = [a for is_list, a in zip(listed, args) if is_list]
        count = len(lists[0])
        for a in lists:
            if len(a) != count:
                raise RuntimeError(f"Tensor lists must have the same number of tensors, got {count} and {len(a)}")
        positional = len(base.names)
        out = []
        for i in range(count):
            row = [a[i] if is_list else a for is_list, a in zip(listed, args)]
            # what is positional here can be keyword-only there (addcmul's value)
            out.append(apply(base, row[:positional], kwargs | dict(zip(keyword_only, row[positional:]))))
        return out

    return Op(func, impl, static=base.static, wide=base.wide, origin="derived")


def through_twin(func, twin):
    """In-place or out= of an op that has no declared form: run the functional op, then write."""
    written = registry.mutated_args(func)
    schema = func._schema
    out_names = [a.name for a in schema.arguments if a.name in written and a.kwarg_only]

    def handler(args, kwargs):
        given = dict(kwargs)
        outs = [given.pop(n) for n in out_names]
        result = twin(*args, **given)
        if not out_names:
            target = args[0]
            if isinstance(target, (list, tuple)):
                for t, r in zip(target, result):
                    _write_checked(t, r, func)
                torch.autograd.graph.increment_version(target)
                return None
            _write_checked(target, result, func)
            return target
        results = result if isinstance(result, (tuple, list)) else (result,)
        if len(outs) == 1 and isinstance(outs[0], (list, tuple)):
            outs = list(outs[0])
        for t, r in zip(outs, results):
            write_out(t, storage.read(r), func)
        if not schema.returns:
            return None
        return outs[0] if len(outs) == 1 else tuple(outs)

    return handler


def factory_out(func, twin):
    """``out=`` of a factory: made with out's dtype on out's device, then written."""
    name = registry.mutated_args(func)[0]

    def handler(args, kwargs):
        given = dict(kwargs)
        out = given.pop(name)
        write_out(out, storage.read(twin(*args, **given, dtype=out.dtype, device=out.device)), func)
        return out

    return handler


def _write_checked(target, result, func):
    from .dispatch import fit
    array = storage.read(result)
    with storage.x64(target._cell.wide or result._cell.wide):
        storage.write(target, fit(array, t_struct(target), Op(func, None)),
                      func._schema.name.split("::")[1] in OVERLAP_OK)


# ---------------------------------------------------------------- decomposition


class NeedsEager(Exception):
    """A decomposition can't be one program (it draws random numbers or reads values)."""


class Circular(Exception):
    """A decomposition leads back to its own op."""


_open = []  # overloads whose decompositions are being traced


class _Inline(Inline):
    def number(self, value):
        return value

    def draw(self, index, generator):
        raise NeedsEager


def decomposed(func, decomposition):
    """torch's own decomposition, run once over tracers so that it becomes one compiled program."""
    def impl(*args, **kwargs):
        outer, tracing.active = tracing.active, _Inline()
        _open.append(func)
        try:
            with torch.no_grad():
                out = decomposition(*map(_tensors, args), **{k: _tensors(v) for k, v in kwargs.items()})
        finally:
            tracing.active = outer
            _open.remove(func)
        return _arrays(out)

    program = make_handler(Op(func, impl, inline=True, wide="int", origin="decomposed"))
    eager, host = [], []

    def handler(args, kwargs):
        if func in _open:  # the decomposition came back to the op itself: there is no other way than the host
            raise Circular
        if host:
            return host[0](args, kwargs)
        if not eager:
            try:
                return program(args, kwargs)
            except Exception as e:
                causes = []
                while e is not None:
                    causes.append(e)
                    e = e.__cause__
                if any(isinstance(c, Circular) for c in causes):
                    if _open:
                        raise
                    host.append(host_handler(func))
                    resolved[func] = "fallback"
                    return host[0](args, kwargs)
                if not any(isinstance(c, (NeedsEager, errors.TraceError)) for c in causes):
                    raise
                eager.append(True)
        return decomposition(*args, **kwargs)

    return handler


def _tensors(x):
    if hasattr(x, "aval") or type(x).__name__ == "ArrayImpl":
        return T.wrap(x, T.devices[0])
    if isinstance(x, (list, tuple)):
        return list(map(_tensors, x))  # torch gives lists, and some decompositions add lists to them
    return x


def _arrays(x):
    if isinstance(x, T.Tensor):
        return storage.read(x)
    if isinstance(x, torch.Tensor):
        return cpu_to_array(x)
    if isinstance(x, (list, tuple)):
        return [_arrays(v) for v in x] if isinstance(x, list) else tuple(map(_arrays, x))
    return x


T.find = find
