"""What becomes of a program's arrays: new tensors, writes into given ones, numbers."""

import torch
from jax import ShapeDtypeStruct

from . import dispatch, dtypes, errors, narrow, storage, strides
from .storage import tracing
from .tensor import Tensor, devices, format_order, geometry, wrap, wrap_permuted


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
        idempotent = op.overload._schema.name.split("::")[1] in OVERLAP_OK
        return (_finish_idempotent if idempotent else _finish_inplace), True
    if mutates == (first.name,) and not returns and str(first.type) == "List[Tensor]":
        return _finish_inplace_list, True
    return _finish_mixed(op), False


def _known(array, what):
    if narrow.is_traced(array):
        raise errors.TraceError(f"{what} can't be part of a traced program: move it to the device")
    return array


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
OVERLAP_OK = frozenset({"fill_", "zero_", "masked_fill_", "index_put_", "_index_put_impl_"})


def _finish_idempotent(out, args, kwargs, device):
    storage.write(args[0], out, True)
    return args[0]


def _finish_inplace_list(out, args, kwargs, device):
    for target, o in zip(args[0], out):
        if isinstance(target, Tensor):
            storage.write(target, o)
        else:  # a number on the CPU among tensors of the device: a step count of an optimizer
            from .convert import array_to_cpu  # late: convert builds on tensors
            target.copy_(array_to_cpu(_known(o, "writing a CPU tensor")))
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
