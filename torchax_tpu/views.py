"""Metadata of view ops: (size, stride, offset) in, (size, stride, offset) out, as torch defines them.

The common ops are computed here in plain Python; every other view op, and every error, comes
from running the op on a meta tensor of the same geometry.
"""

import torch

from .registry import aten, view
from .strides import contiguous_strides, distinct, extent


class Geometry:
    """Size, stride, offset and torch dtype of a tensor; the input and output of view functions.

    ``reading`` is how such a view was last read: the abstract value of the row-major array it was read from, and
    the strides.Plan (see `storage.fusible`; one tuple, so that threads see both or neither). ``dense``: row-major;
    ``distinct``: surely no two elements share memory.
    """

    __slots__ = ("size", "stride", "offset", "dtype", "reading", "dense", "distinct")

    def __init__(self, size, stride, offset, dtype=None):
        self.size, self.stride, self.offset, self.dtype = size, stride, offset, dtype
        self.reading, self.dense, self.distinct = (None, None), stride == contiguous_strides(size), distinct(size, stride)


class Unsure(Exception):
    """The fast path does not cover this call: ask the meta kernel (which also raises torch's errors)."""


def _dim(dim, n):
    if not -n <= dim < n:
        raise Unsure
    return dim if dim >= 0 else dim + n


@view(aten.view.default, aten._unsafe_view.default)
def _view(g, size):
    if g.stride != contiguous_strides(g.size):
        raise Unsure
    size = list(size)
    numel = 1
    for n in g.size:
        numel *= n
    known, free = 1, None
    for i, n in enumerate(size):
        if n == -1:
            if free is not None:
                raise Unsure
            free = i
        elif n < 0:
            raise Unsure
        else:
            known *= n
    if free is not None:
        if known == 0 or numel % known:
            raise Unsure
        size[free] = numel // known
    elif known != numel:
        raise Unsure
    size = tuple(size)
    return Geometry(size, contiguous_strides(size), g.offset)


@view(aten.select.int)
def _select(g, dim, index):
    dim = _dim(dim, len(g.size))
    n = g.size[dim]
    if not -n <= index < n:
        raise Unsure
    if index < 0:
        index += n
    return Geometry(g.size[:dim] + g.size[dim + 1:], g.stride[:dim] + g.stride[dim + 1:],
                    g.offset + index * g.stride[dim])


@view(aten.slice.Tensor)
def _slice(g, dim=0, start=None, end=None, step=1):
    dim = _dim(dim, len(g.size))
    if step <= 0:
        raise Unsure
    n = g.size[dim]
    start = 0 if start is None else start
    end = n if end is None else end
    start = min(max(start + n if start < 0 else start, 0), n)
    end = min(max(end + n if end < 0 else end, start), n)
    size = g.size[:dim] + (-(-(end - start) // step),) + g.size[dim + 1:]
    stride = g.stride[:dim] + (g.stride[dim] * step,) + g.stride[dim + 1:]
    return Geometry(size, stride, g.offset + start * g.stride[dim])


@view(aten.transpose.int)
def _transpose(g, dim0, dim1):
    n = len(g.size)
    if n == 0:
        raise Unsure
    a, b = _dim(dim0, n), _dim(dim1, n)
    size, stride = list(g.size), list(g.stride)
    size[a], size[b] = size[b], size[a]
    stride[a], stride[b] = stride[b], stride[a]
    return Geometry(tuple(size), tuple(stride), g.offset)


@view(aten.t.default)
def _t(g):
    if len(g.size) > 2:
        raise Unsure
    return Geometry(g.size[::-1], g.stride[::-1], g.offset)


@view(aten.permute.default)
def _permute(g, dims):
    n = len(g.size)
    dims = [_dim(d, n) for d in dims]
    if sorted(dims) != list(range(n)):
        raise Unsure
    return Geometry(tuple(g.size[d] for d in dims), tuple(g.stride[d] for d in dims), g.offset)


@view(aten.unsqueeze.default)
def _unsqueeze(g, dim):
    n = len(g.size)
    dim = _dim(dim, n + 1)
    step = g.size[dim] * g.stride[dim] if dim < n else 1
    return Geometry(g.size[:dim] + (1,) + g.size[dim:], g.stride[:dim] + (step,) + g.stride[dim:], g.offset)


def _drop(g, dims):
    keep = [i for i in range(len(g.size)) if not (i in dims and g.size[i] == 1)]
    return Geometry(tuple(g.size[i] for i in keep), tuple(g.stride[i] for i in keep), g.offset)


@view(aten.squeeze.default)
def _squeeze(g):
    return _drop(g, range(len(g.size)))


@view(aten.squeeze.dim)
def _squeeze_dim(g, dim):
    if not g.size:
        raise Unsure
    return _drop(g, (_dim(dim, len(g.size)),))


@view(aten.squeeze.dims)
def _squeeze_dims(g, dim):
    if not g.size:
        raise Unsure
    dims = [_dim(d, len(g.size)) for d in dim]
    if len(set(dims)) != len(dims):
        raise Unsure
    return _drop(g, dims)


@view(aten.expand.default)
def _expand(g, size, implicit=False):
    lead = len(size) - len(g.size)
    if lead < 0:
        raise Unsure
    out, stride = [], []
    for i, n in enumerate(size):
        if i < lead:
            if n < 0:
                raise Unsure
            out.append(n)
            stride.append(0)
            continue
        have, s = g.size[i - lead], g.stride[i - lead]
        if n == -1 or n == have:
            out.append(have)
            stride.append(s)
        elif have == 1 and n >= 0:
            out.append(n)
            stride.append(0)
        else:
            raise Unsure
    # torch gives new leading size-1 dims, and size-1 dims of any kind, strides of their own
    if any(n == 1 for n in out[:lead]):
        raise Unsure
    return Geometry(tuple(out), tuple(stride), g.offset)


@view(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten._fw_primal.default,
      aten._make_dual.default)
def _same(g, *_):
    return g


@view(aten.as_strided.default)
def _as_strided(g, size, stride, storage_offset=None):
    offset = g.offset if storage_offset is None else storage_offset
    if len(size) != len(stride) or offset < 0 or min(size, default=0) < 0 or min(stride, default=0) < 0:
        raise Unsure
    return Geometry(tuple(size), tuple(stride), offset)


def _pieces(g, dim, lengths):
    start, out = 0, []
    for n in lengths:
        out.append(Geometry(g.size[:dim] + (n,) + g.size[dim + 1:], g.stride, g.offset + start * g.stride[dim]))
        start += n
    return out


@view(aten.split.Tensor)
def _split(g, split_size, dim=0):
    if not g.size or split_size <= 0:
        raise Unsure
    dim = _dim(dim, len(g.size))
    n = g.size[dim]
    lengths = [min(split_size, n - i) for i in range(0, n, split_size)] or [0]
    return _pieces(g, dim, lengths)


@view(aten.split_with_sizes.default)
def _split_with_sizes(g, split_sizes, dim=0):
    if not g.size or min(split_sizes, default=0) < 0:
        raise Unsure
    dim = _dim(dim, len(g.size))
    if sum(split_sizes) != g.size[dim]:
        raise Unsure
    return _pieces(g, dim, split_sizes)


@view(aten.unbind.int)
def _unbind(g, dim=0):
    if not g.size:
        raise Unsure
    dim = _dim(dim, len(g.size))
    return [_select(g, dim, i) for i in range(g.size[dim])]


def by_meta(func, g, storage_numel, args, kwargs):
    """Run a view op on a meta tensor of the geometry ``g``; raises what torch raises."""
    need = max(storage_numel, extent(g.size, g.stride, g.offset))
    base = torch.empty(need, dtype=g.dtype, device="meta")
    out = func(base.as_strided(g.size, g.stride, g.offset), *args, **kwargs)
    if isinstance(out, torch.Tensor):
        return _of(out)
    return [_of(o) for o in out]


def _of(meta):
    return Geometry(tuple(meta.shape), meta.stride(), meta.storage_offset(), meta.dtype)


# View ops without a fast path here: geometry by the meta kernel.
BY_META = frozenset({
    aten.diagonal.default, aten.unfold.default, aten.view.dtype,
    aten.view_as_real.default, aten.view_as_complex.default,
    aten.movedim.int, aten.swapaxes.default, aten.swapdims.default, aten._reshape_alias.default, aten.narrow.default,
    aten.split.sizes, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default,
    aten.chunk.default, aten.tensor_split.sections, aten.tensor_split.indices, aten.hsplit.int, aten.vsplit.int,
    aten.dsplit.int, aten.hsplit.array, aten.vsplit.array, aten.dsplit.array, aten.expand_as.default,
    aten.unflatten.int, aten.slice_inverse.default, aten._test_autograd_multiple_dispatch_view.default,
    aten.mT.default, aten.numpy_T.default,
})
