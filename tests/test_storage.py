"""The storage contract: every view op, geometry, aliasing in both directions, versions, set_, resize_, .data, out=."""

import pytest
import torch

import torchax_tpu  # noqa: F401

DEVICE = "jax"


def base(device, shape=(4, 6), dtype=torch.float32):
    n = 1
    for s in shape:
        n *= s
    return torch.arange(n).reshape(shape).to(dtype).clone().to(device)


def describe(x):
    if isinstance(x, (list, tuple)):
        return [describe(v) for v in x]
    return {
        "size": tuple(x.shape),
        "stride": x.stride(),
        "offset": x.storage_offset(),
        "contiguous": x.is_contiguous(),
        "dtype": x.dtype,
        "is_view": x._is_view(),
        "conj": x.is_conj(),
        "neg": x.is_neg(),
        "nbytes": x.untyped_storage().nbytes(),
    }


def same_values(got, ref):
    if isinstance(ref, (list, tuple)):
        for g, r in zip(got, ref):
            same_values(g, r)
        return
    torch.testing.assert_close(
        got.detach().cpu().resolve_conj().resolve_neg(), ref.detach().resolve_conj().resolve_neg()
    )


VIEWS = {
    "alias": lambda x: torch.ops.aten.alias(x),
    "view": lambda x: x.view(3, 8),
    "view_infer": lambda x: x.view(2, -1, 3),
    "reshape": lambda x: x.reshape(8, 3),
    "reshape_view_of_view": lambda x: x[:, :4].reshape(4, 2, 2),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "adjoint": lambda x: x.adjoint(),
    "transpose": lambda x: x.view(2, 2, 6).transpose(0, 2),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1),
    "movedim": lambda x: x.view(2, 2, 6).movedim(0, 2),
    "moveaxis": lambda x: x.view(2, 2, 6).moveaxis([0, 1], [2, 0]),
    "select": lambda x: x[2],
    "select_last": lambda x: x[:, -1],
    "scalar": lambda x: x[1, 2],
    "slice": lambda x: x[1:3],
    "slice_step": lambda x: x[::2, 1::3],
    "slice_empty": lambda x: x[2:2],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze_end": lambda x: x.t().unsqueeze(-1),
    "none_index": lambda x: x[:, None, 1:],
    "squeeze": lambda x: x.view(4, 1, 6, 1).squeeze(),
    "squeeze_dim": lambda x: x.view(4, 1, 6, 1).squeeze(1),
    "squeeze_dims": lambda x: x.view(4, 1, 6, 1).squeeze((1, 3)),
    "expand": lambda x: x[:, :1].expand(4, 5),
    "expand_lead": lambda x: x.expand(3, 4, 6),
    "expand_one": lambda x: x.expand(1, 4, 6),
    "broadcast_to": lambda x: x[0].broadcast_to((2, 6)),
    "expand_as": lambda x: x[0].expand_as(x),
    "diagonal": lambda x: x.diagonal(),
    "diagonal_off": lambda x: x.diagonal(-1),
    "linalg_diagonal": lambda x: torch.linalg.diagonal(x),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "unfold_overlapping": lambda x: x.unfold(1, 3, 1),
    "as_strided": lambda x: x.as_strided((3, 2), (2, 7), 1),
    "as_strided_overlapping": lambda x: x.as_strided((4, 3), (2, 1), 3),
    "split": lambda x: x.split(3, 1),
    "split_uneven": lambda x: x.split(4, 1),
    "split_sizes": lambda x: x.split([1, 3, 2], 1),
    "chunk": lambda x: x.chunk(3, 1),
    "tensor_split": lambda x: x.tensor_split(4, 1),
    "tensor_split_at": lambda x: x.tensor_split([1, 3], 1),
    "hsplit": lambda x: x.hsplit(2),
    "vsplit": lambda x: x.vsplit(2),
    "dsplit": lambda x: x.view(2, 2, 6).dsplit([2, 4]),
    "unbind": lambda x: x.unbind(1),
    "iter": lambda x: list(x),
    "flatten": lambda x: x.view(2, 2, 6).flatten(0, 1),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "ravel": lambda x: x.ravel(),
    "view_as": lambda x: x.view_as(x.view(6, 4)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view_dtype_same": lambda x: x.view(torch.int32),
    "view_dtype_small": lambda x: x.view(torch.int16),
    "view_dtype_bytes": lambda x: x[1:].view(torch.uint8),
    "view_dtype_large": lambda x: x.view(torch.int64),
    "view_as_complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    "of_transposed": lambda x: x.t()[1:4].t(),
    "deep": lambda x: x.t()[2:][::2].unsqueeze(0).expand(2, 2, 4).select(2, 1),
    "real_of_real": lambda x: x.real,
    "positive": lambda x: x.positive() if hasattr(x, "positive") else x,
    "contiguous": lambda x: x.contiguous(),
    "to_same": lambda x: x.to(torch.float32),
}

COMPLEX = {
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "view_as_real": lambda x: torch.view_as_real(x),
    "conj": lambda x: x.conj(),
    "conj_slice": lambda x: x.conj()[1:],
    "slice_conj": lambda x: x[1:].conj(),
    "conj_conj": lambda x: x.conj().conj(),
    "imag_of_conj": lambda x: x.conj().imag,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "view_real": lambda x: x.view(torch.float32),
}


def pair(fn, shape=(4, 6), dtype=torch.float32):
    ref_base, got_base = base("cpu", shape, dtype), base(DEVICE, shape, dtype)
    return ref_base, fn(ref_base), got_base, fn(got_base)


@pytest.mark.parametrize("name", VIEWS)
def test_view_geometry_and_values(name):
    _, ref, _, got = pair(VIEWS[name])
    assert describe(got) == describe(ref)
    same_values(got, ref)


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_views(name):
    def fn(x):
        return COMPLEX[name](x)

    def complex_base(device):
        return torch.complex(base("cpu"), -base("cpu") - 0.5).to(device)

    ref_base, got_base = complex_base("cpu"), complex_base(DEVICE)
    ref, got = fn(ref_base), fn(got_base)
    assert describe(got) == describe(ref)
    same_values(got, ref)
    for b, v in ((ref_base, ref), (got_base, got)):
        v[0] = 7
        v.mul_(2)
        b[1, 1] = 3 - 1j
    same_values(got, ref)
    same_values(got_base, ref_base)


WRITES = {
    "fill_": lambda v: v.fill_(7),
    "add_": lambda v: v.add_(1),
    "zero_": lambda v: v.zero_(),
    "setitem": lambda v: v.__setitem__(..., 5),
    "copy_": lambda v: v.copy_(torch.ones_like(v) * 3),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", VIEWS)
def test_write_through_view_and_base(name, write):
    """A write through the view reaches the base and a second view; a write to the base reaches both."""
    if write == "add_" and "overlapping" in name:
        write = "fill_"  # torch leaves reading and writing overlapping elements undefined
    sides = []
    for device in ("cpu", DEVICE):
        b = base(device)
        other = b.t()
        view = VIEWS[name](b)
        error = None
        for v in view if isinstance(view, (list, tuple)) else (view,):
            try:
                WRITES[write](v)
            except RuntimeError as e:
                error = type(e)
        first = [t.detach().cpu().clone() for t in (b, other)]
        b[1:3] += 10
        other[0] = -1
        sides.append((error, first, view, b, other))
    (ref_error, *ref), (got_error, *got) = sides
    assert got_error == ref_error
    for g, r in zip(got, ref):
        same_values(g, r)


def test_versions_follow_torch():
    for device in ("cpu", DEVICE):
        b = base(device)
        v, d = b[1:], b.detach()
        assert (b._version, v._version) == (0, 0)
        v.add_(1)
        assert (b._version, v._version, d._version) == (1, 1, 1)
        b.mul_(2)
        assert (b._version, v._version) == (2, 2)
        assert v._base is b and b._base is None


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_autograd_notices_illegal_inplace(device):
    x = base(device).requires_grad_()
    y = x * 2
    z = y * y
    y[1:].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x[0].zero_()
    with pytest.raises(RuntimeError):
        x.expand(2, 4, 6).detach().add_(1)


def test_gradient_through_inplace_on_views():
    grads = []
    for device in ("cpu", DEVICE):
        x = base(device).requires_grad_()
        y = x * 1
        y[1:3].mul_(3)
        y.t()[2].copy_(x[:, 0] * 2)
        y.select(0, 0).zero_()
        (y * y).sum().backward()
        grads.append(x.grad)
    same_values(grads[1], grads[0])


INTERNAL_OVERLAP = {
    "add_": lambda v: v.add_(1),
    "mul_": lambda v: v.mul_(v),
    "copy_": lambda v: v.copy_(torch.ones(3, 6, device=v.device)),
    "relu_": lambda v: v.relu_(),
    "out": lambda v: torch.add(torch.ones(3, 6, device=v.device), 1, out=v),
}


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("name", INTERNAL_OVERLAP)
def test_internal_overlap_is_refused(name, device):
    v = base(device, (6,)).expand(3, 6)
    with pytest.raises(RuntimeError):
        INTERNAL_OVERLAP[name](v)


def test_fill_of_expanded_is_allowed():
    for device in ("cpu", DEVICE):
        b = base(device, (6,))
        b.expand(3, 6).fill_(2)
        assert b.cpu().tolist() == [2.0] * 6


def both(fn):
    ref, got = fn("cpu"), fn(DEVICE)
    assert describe(got) == describe(ref)
    same_values(got, ref)


def _resize_alias(device):
    a = base(device, (2, 3))
    b, c = a.detach(), a.t()
    a.resize_(4, 4)
    a[:2] = 9.0
    a[2:] = 0.0
    return [a, b, c]


def _resize_shrink(device):
    a = base(device, (4, 6))
    b = a[1]
    a.resize_(2, 3)
    a.fill_(5)
    b.mul_(2)
    return [a, b]


def _set_source(device):
    a, b = base(device), base(device, (3,))
    c = b.detach()
    b.set_(a[1:])
    b.add_(1)
    return [a, b, c]


def _set_geometry(device):
    a, b = base(device), base(device, (3,))
    b.set_(a, 2, (3, 2), (1, 6))
    b.mul_(-1)
    return [a, b]


def _data(device):
    a, b = base(device), base(device, (5,))
    view = a[1]
    a.data = b
    a.add_(1)
    view.zero_()
    return [a, b, view]


def _data_ops(device):
    a = base(device).requires_grad_()
    a.data[1:].mul_(2)
    a.data.t()[0] = 3
    return [a.detach()]


def _out_into_view(device):
    a = base(device)
    torch.add(base(device, (2, 6)), 1, out=a[1:3])
    torch.mul(base(device, (4,)), 2, out=a[:, 0])
    torch.add(base(device, (6, 4)), 100, out=a.t())
    return [a]


def _out_resizes(device):
    a = torch.empty(0, device=device)
    b = a.detach()
    torch.add(base(device), 1, out=a)
    return [a, b]


def _metadata_inplace(device):
    a = base(device)
    b = a[1:]
    a.t_()
    a.unsqueeze_(0)
    a.add_(1)
    b.transpose_(0, 1)
    a.squeeze_(0)
    a.as_strided_((2, 2), (3, 1), 1)
    a.mul_(-1)
    return [a, b]


def _strided_scatter(device):
    a = base(device).t()
    return [
        torch.select_scatter(a, torch.zeros(4, device=device), 0, 1),
        torch.slice_scatter(a, torch.zeros(2, 4, device=device), 0, 1, 5, 2),
        torch.diagonal_scatter(a, torch.zeros(4, device=device)),
        torch.as_strided_scatter(base(device), torch.zeros(2, 2, device=device), (2, 2), (7, 2), 1),
    ]


def _copies(device):
    a = base(device).t()
    return [
        torch.select_copy(a, 0, 1),
        torch.permute_copy(a, (1, 0)),
        torch.as_strided_copy(a, (2, 2), (3, 1), 2),
        torch.diagonal_copy(a),
        torch.expand_copy(a[:1], (3, 4)),
        *torch.split_copy(a, 2),
        *torch.unbind_copy(a),
        torch.view_copy(base(device), (8, 3)),
        torch.unfold_copy(a, 0, 2, 2),
        torch.t_copy(a),
        torch.squeeze_copy(a),
    ]


def _overlapping_read_after_write(device):
    a = base(device, (8,))
    w = a.unfold(0, 3, 1)
    before = w.clone()
    a[2:5] = -1
    w[0, 1] = 50
    return [before, w, a]


def _inplace_on_overlapping(device):
    a = base(device, (8,))
    w = a.as_strided((3, 3), (1, 1))
    w[1] = 7
    return [a, w]


def _bytes(device):
    a = base(device, (4,), torch.int32)
    b = a.view(torch.uint8)
    b[4] = 255
    a[0] = 1 << 20
    return [a, b, b[2:10:3]]


def _wide_through_narrow(device):
    a = base(device, (4,), torch.int64)
    b = a.view(torch.int32)
    b[1] = 1
    b[::2] += 5
    return [a, b]


def _bool_bytes(device):
    a = base(device, (4,), torch.bool)
    b = a.view(torch.uint8)
    b[0] = 1
    return [a, b]


def _half(device):
    a = base(device, (2, 4), torch.bfloat16)
    a.view(torch.int16)[0] = 0
    a[1, ::2] *= 3
    return [a, a.t()[1:]]


SCENES = [
    _resize_alias,
    _resize_shrink,
    _set_source,
    _set_geometry,
    _data,
    _data_ops,
    _out_into_view,
    _out_resizes,
    _metadata_inplace,
    _strided_scatter,
    _copies,
    _overlapping_read_after_write,
    _inplace_on_overlapping,
    _bytes,
    _wide_through_narrow,
    _bool_bytes,
    _half,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda f: f.__name__.strip("_"))
def test_scene(scene):
    both(scene)


STRIDED = {
    "add": lambda x: x + 1,
    "mul": lambda x: x * x,
    "exp": lambda x: x.exp(),
    "relu": lambda x: x.relu(),
    "eq": lambda x: x == 1,
    "mixed": lambda x: x + x.contiguous(),
    "broadcast": lambda x: x + x[:1],
    "clone": lambda x: x.clone(),
    "clone_contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x: x.contiguous(),
    "empty_like": lambda x: torch.empty_like(x).fill_(0),
    "zeros_like": lambda x: torch.zeros_like(x),
    "ones_like": lambda x: torch.ones_like(x),
    "full_like": lambda x: torch.full_like(x, 2),
    "to": lambda x: x.to(torch.float64),
    "double": lambda x: x.double() * 2,
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "where": lambda x: torch.where(x > 3, x, -x),
    "clamp": lambda x: x.clamp(1, 5),
    "chain": lambda x: (x + 1).exp().t() * 0,
}
SOURCES = {
    "t": lambda d: base(d).t(),
    "permuted": lambda d: base(d, (2, 3, 4)).permute(2, 0, 1),
    "sliced": lambda d: base(d)[:, ::2],
    "expanded": lambda d: base(d, (4, 1)).expand(4, 6),
    "channels_last": lambda d: base(d, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
    "contiguous": lambda d: base(d),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", STRIDED)
def test_strides_of_results(name, source):
    if name == "chain" and source in ("permuted", "channels_last"):
        source = "t"  # t() takes matrices only
    ref, got = STRIDED[name](SOURCES[source]("cpu")), STRIDED[name](SOURCES[source](DEVICE))
    assert (tuple(got.shape), got.stride(), got.is_contiguous()) == (
        tuple(ref.shape),
        ref.stride(),
        ref.is_contiguous(),
    )
    same_values(got, ref)


def test_storage_identity():
    for device in ("cpu", DEVICE):
        a = base(device)
        b, c, other = a[1:], a.t(), a.clone()
        assert a.data_ptr() == c.data_ptr() and b.data_ptr() == a.data_ptr() + 6 * 4
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() == c.untyped_storage().data_ptr()
        assert a.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
        assert a.untyped_storage().nbytes() == 96 == b.untyped_storage().nbytes()
        assert a.is_set_to(a.view(4, 6)) and not a.is_set_to(b) and not a.is_set_to(other)
        assert a.untyped_storage() is b.untyped_storage()


VIEW_ERRORS = {
    "view": lambda x: x.t().view(-1),
    "view_size": lambda x: x.view(5, 5),
    "select": lambda x: x[4],
    "select_dim": lambda x: x.select(2, 0),
    "slice_dim": lambda x: x.narrow(1, 4, 5),
    "expand": lambda x: x.expand(3, 6),
    "permute": lambda x: x.permute(0, 0),
    "split": lambda x: x.split([1, 1], 1),
    "unfold": lambda x: x.unfold(0, 9, 1),
    "as_strided": lambda x: x.as_strided((10, 10), (10, 10)),
    "view_dtype": lambda x: x.t().view(torch.int64),
    "view_as_complex": lambda x: torch.view_as_complex(x),
    "t": lambda x: x.view(2, 2, 6).t(),
    "diagonal": lambda x: x.diagonal(0, 1, 1),
    "step": lambda x: x[::-1],
}


@pytest.mark.parametrize("name", VIEW_ERRORS)
def test_errors_are_torchs(name):
    with pytest.raises(Exception) as ref:
        VIEW_ERRORS[name](base("cpu"))
    with pytest.raises(type(ref.value)):
        VIEW_ERRORS[name](base(DEVICE))


def test_every_aliasing_overload_has_a_way():
    """Views of ATen are views here: only sparse and nested layouts, which the device doesn't hold, go elsewhere."""
    from torchax_tpu import registry, routes

    elsewhere = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten" or "Dimname" in rest or "dimname" in rest:
            continue
        try:
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        aliases = any(r.alias_info is not None for r in op._schema.returns) and not registry.mutated_args(op)
        if aliases and routes.resolve(op)[1] not in ("view", "special", "composite"):
            elsewhere.append(packet)
    assert set(elsewhere) <= {
        "_indices",
        "_values",
        "indices",
        "values",
        "crow_indices",
        "col_indices",
        "ccol_indices",
        "row_indices",
        "_nested_get_values",
        "_nested_view_from_buffer",
        "_nested_view_from_jagged",
        "_sparse_broadcast_to",
    }


def test_select_in_a_loop_compiles_once():
    import jax

    x = base(DEVICE, (16, 3))
    (x[0] + 1).cpu(), x[0].cpu()
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiles.append(name) if "backend_compile" in name else None
    )
    for i in range(16):
        assert x[i].cpu()[0] == 3 * i and (x[i] + 1).cpu()[0] == 3 * i + 1
    assert not compiles


# ---------------------------------------------------------------- the short ways through an op


def test_short_ways_read_what_is_there():
    """Ops whose program slices a view by itself: other offsets, other shapes, writes in between, two views at once."""
    def run(device):
        out = []
        for n in (6, 8):
            x = torch.arange(n * 4.0, device=device).reshape(n, 4)
            for i in range(3):
                out += [x[i: i + 2] + 1, x[i: i + 2] * x[i + 1: i + 3], x[i] - x[i + 1, 1], x[:4, 1] * x[2], x[1 + i:].sum(0)]
                x[i] += 1
                view = x[i: i + 2]
                out += [view + 1, view + 1, view + 1]
                x.mul_(2)
                out += [view + 1, torch.softmax(view, -1), view.t() + 1, torch.cat([view, x])]
                index = torch.arange(2, device=device)
                out += [x[index], index + index, index[:1] + 1, view[index], x[:, index]]
        return [t.cpu() for t in out]

    for ours, ref in zip(run("jax"), run("cpu")):
        torch.testing.assert_close(ours, ref)


@pytest.mark.parametrize("key", [0, slice(1, 3), ..., None, (slice(None), 1), (1, 2), (..., slice(0, 2)), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_numbers_assigned(key, dtype):
    """x[key] = number in every dtype, also where the dtype can't hold it."""
    for value in (0, 1, -1, 3, 300, 0.5, 1e6, float("nan"), True, 1j):
        results = []
        for device in ("jax", "cpu"):
            x = torch.zeros(4, 5, dtype=dtype, device=device)
            try:
                x[key] = value
                results.append(x.cpu())
            except (RuntimeError, TypeError) as error:
                results.append(type(error))
        ours, ref = results
        if isinstance(ref, type):
            assert ours == ref, (value, ours, ref)
        else:
            torch.testing.assert_close(ours, ref, equal_nan=True, msg=lambda m, v=value: f"{v}: {m}")


def test_resize_reads_memory_order():
    a, b = (torch.arange(6.0, device=d).reshape(2, 3).t().clone().resize_(2, 3) for d in ("cpu", "jax"))
    assert torch.equal(a, b.cpu())
