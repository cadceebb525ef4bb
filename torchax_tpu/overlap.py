"""Writes into memory that an input shares, refused where torch does so: the result would depend on the order."""

import functools

from . import strides
from . import tensor as T

# Any shared element is refused, also where input and output are the very same tensor.
_ANY = frozenset(
    {
        "gather.out",
        "index_select.out",
        "take.out",
        "masked_select.out",
        "cat.out",
        "kthvalue.values",
        "max.dim_max",
        "min.dim_min",
        "scatter.src_out",
        "scatter.value_out",
        "scatter_.src",
        "index_copy_",
        "index_add_",
        "index_copy.out",
        "index_add.out",
        "scatter_add_",
        "scatter_add.out",
        "scatter_reduce_.two",
        "scatter_reduce.two_out",
        "mode.values",
        "median.dim_values",
        "nanmedian.dim_values",
    }
)
# Pointwise in torch though not declared so here.
_PARTIAL = frozenset({"cumsum.out", "cumprod.out", "lerp.Tensor_out", "lerp.Scalar_out"})


@functools.lru_cache(maxsize=16384)
def _dense(size, stride):
    """Whether a view's elements fill a range of memory, each once."""
    need = 1
    for s, n in sorted((s, n) for n, s in zip(size, stride) if n != 1):
        if s != need:
            return False
        need *= n
    return True


def status(a, b):
    """Of two tensors: "no", "full" (the same elements in order), "partial", "hard"; torch's get_overlap_status."""
    if a is b:
        return "full"
    if a._cell is not b._cell:
        return "no"
    (size, stride, start), (other_size, other_stride, other_start) = T.geometry(a), T.geometry(b)
    if 0 in size or 0 in other_size:
        return "no"
    if not _dense(size, stride) or not _dense(other_size, other_stride):
        return "hard"
    end, other_end = strides.extent(size, stride, start), strides.extent(other_size, other_stride, other_start)
    first, second = (start * a.itemsize, end * a.itemsize), (other_start * b.itemsize, other_end * b.itemsize)
    if first == second:
        return "full" if stride == other_stride else "partial"
    return "partial" if first[0] < second[1] and second[0] < first[1] else "no"


def refuse(target, source, refused=("partial",)):
    """RuntimeError if writing ``target`` would change ``source`` while it is read."""
    if status(target, source) in refused:
        raise RuntimeError(
            "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
            "memory location. Please clone() the tensor before performing the operation."
        )


def checked(op, handler):
    """``handler`` behind the check, if torch makes it for the op."""
    overload = str(op.overload).removeprefix("aten.").removesuffix(".default")
    refused = (
        ("full", "partial")
        if overload in _ANY
        else ("partial",)
        if op.layout == "elementwise" or overload in _PARTIAL or overload.startswith("_foreach_")
        else ()
    )
    if not op.mutates or not refused:
        return handler
    names, mutates = op.names, op.mutates

    def run(args, kwargs):
        given = dict(zip(names, args)) | kwargs
        targets = [given[n] for n in mutates if given.get(n) is not None]
        for name, source in given.items():
            if name in mutates:
                continue
            for target in targets:
                _pair(target, source, refused)
        return handler(args, kwargs)

    return run


def _pair(target, source, refused):
    if isinstance(target, (list, tuple)):  # of a foreach op: pairs
        for t, s in zip(target, source) if isinstance(source, (list, tuple)) else ():
            if t is not s and getattr(s, "_cell", None) is t._cell:
                refuse(t, s, refused)
    elif isinstance(source, (list, tuple)):
        for s in source:
            _pair(target, s, refused)
    elif isinstance(source, T.Tensor) and isinstance(target, T.Tensor) and source._cell is target._cell:
        refuse(target, source, refused)
