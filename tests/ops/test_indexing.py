"""Indexing: op_db entries, every form of x[...] read and write, out-of-range indices, masks, dtypes."""

import pytest
import torch

import torchax_tpu
from tests import ledger, oracle

NAMES = (
    "__getitem__",
    "gather",
    "scatter",
    "scatter_add",
    "scatter_reduce.sum",
    "scatter_reduce.prod",
    "scatter_reduce.mean",
    "scatter_reduce.amax",
    "scatter_reduce.amin",
    "index_select",
    "index_add",
    "index_copy",
    "index_fill",
    "index_put",
    "index_reduce.prod",
    "index_reduce.mean",
    "index_reduce.amax",
    "index_reduce.amin",
    "take",
    "take_along_dim",
    "put",
    "masked_select",
    "masked_scatter",
    "nonzero_static",
    "argwhere",
    "_unsafe_masked_index",
    "_unsafe_masked_index_put_accumulate",
    "select_scatter",
    "slice_scatter",
    "diagonal_scatter",
    "as_strided_scatter",
)
ENTRIES = [o for o in oracle.ops() if oracle.full_name(o) in NAMES]


def test_names_are_known():
    assert {oracle.full_name(o) for o in ENTRIES} == set(NAMES)


CASES = [
    (o, m) for o in ENTRIES for m in ("forward", "grad", "inplace", "out") if oracle.applicable(o, m, torch.float32)
]


@pytest.mark.parametrize("op,mode", CASES, ids=[f"{oracle.full_name(o)}-{m}" for o, m in CASES])
def test_op_db(op, mode):
    def run(**tolerance):
        oracle.CHECKS[mode](op, torch.float32, limit=4, **tolerance)

    ledger.check(mode, oracle.full_name(op), "float32", run)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.uint8, torch.int16, torch.bool, torch.float64, torch.complex64]
)
@pytest.mark.parametrize(
    "name", ["gather", "scatter", "scatter_add", "index_select", "index_put", "take", "index_add", "masked_scatter"]
)
def test_dtypes_are_kept(name, dtype):
    op = next(o for o in ENTRIES if oracle.full_name(o) == name)
    if not oracle.applicable(op, "forward", dtype):
        assert dtype not in op.supported_dtypes("cpu")
        return
    oracle.CHECKS["forward"](op, dtype, limit=4)


def source(device, shape=(4, 5, 6), dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype).to(device)


def ix(device, *values):
    return torch.tensor(values if len(values) > 1 else values[0]).to(device)


KEYS = {
    "int": lambda d: 2,
    "negative": lambda d: -1,
    "slice": lambda d: slice(1, 3),
    "ellipsis": lambda d: (..., 0),
    "none": lambda d: (None, 1, None),
    "tensor": lambda d: ix(d, 0, 2, 1),
    "tensor_negative": lambda d: ix(d, -1, 0),
    "tensor_0d": lambda d: ix(d, 3),
    "tensor_2d": lambda d: ix(d, [0, 1], [3, 2]),
    "tensor_int32": lambda d: ix(d, 0, 2).int(),
    "cpu_tensor": lambda d: ix("cpu", 0, 2),
    "two": lambda d: (ix(d, 0, 2), ix(d, 1, 3)),
    "two_broadcast": lambda d: (ix(d, [0], [2]), ix(d, 1, 3)),
    "separated": lambda d: (ix(d, 0, 2), slice(None), ix(d, 1, 3)),
    "later": lambda d: (slice(None), ix(d, 0, 2), ix(d, 1, 3)),
    "after_ellipsis": lambda d: (..., ix(d, 0, 2)),
    "int_and_tensor": lambda d: (1, ix(d, 0, 2)),
    "int_later": lambda d: (ix(d, 0, 2), 1),
    "none_and_tensor": lambda d: (None, ix(d, 0, 2)),
    "slice_and_tensor": lambda d: (slice(1, 4, 2), ix(d, 0, 2)),
    "mask": lambda d: source(d) > 50,
    "mask_rows": lambda d: torch.tensor([True, False, True, True]).to(d),
    "mask_matrix": lambda d: source(d)[:, :, 0] > 40,
    "mask_later": lambda d: (slice(None), torch.tensor([True, False, True, True, False]).to(d)),
    "mask_last": lambda d: (..., torch.tensor([True, False, True, True, False, True]).to(d)),
    "mask_and_tensor": lambda d: (torch.tensor([True, False, True, False]).to(d), ix(d, 1, 3)),
    "mask_uint8": lambda d: torch.tensor([1, 0, 1, 0], dtype=torch.uint8).to(d),
    "mask_cpu": lambda d: torch.tensor([True, False, True, True]),
    "mask_none_true": lambda d: source(d) > 1e6,
    "true": lambda d: True,
    "empty": lambda d: torch.zeros(0, dtype=torch.int64).to(d),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_read_and_write(key, dtype):
    results = []
    for device in ("cpu", "jax"):
        with oracle.quiet():
            x = source(device, dtype=dtype)
            read = x[KEYS[key](device)]
            if key == "mask_uint8":  # torch writes only through boolean masks
                results.append(read)
                continue
            x[KEYS[key](device)] = 1
            scalar = x.clone()
            x[KEYS[key](device)] = (read + read).to(dtype)
            rows = x.clone()
            y = source(device, dtype=dtype)[:, 1:]  # through a view
            if "mask" not in key:
                y[KEYS[key](device)] = torch.tensor(0, dtype=dtype)
            results.append((read, scalar, rows, y))
    oracle.assert_same(results[1], results[0])


@pytest.mark.parametrize("values", [(3.0,), (2,), (1, 6), (2, 5, 6), (5, 6)])
def test_index_put_accumulates_and_broadcasts(values):
    results = []
    for device in ("cpu", "jax"):
        x = source(device)
        v = torch.ones(()) * values[0] if isinstance(values[0], float) else torch.ones(values)
        if v.dim() == 1:
            key = (ix(device, 1, 1), ix(device, 0, 0), ix(device, 5, 2))
        else:
            key = (ix(device, 1, 1),)
        results.append((x.index_put(key, v.to(device), accumulate=True), x.index_put_(key, v.to(device) * 2)))
    oracle.assert_same(results[1], results[0])


def test_gradients_of_reads_and_writes():
    grads = []
    for device in ("cpu", "jax"):
        x = source(device).requires_grad_()
        v = torch.ones(3, 5, 6, device=device).requires_grad_()
        y = x * 2
        y[ix(device, 0, 2, 3)] = v * 3
        y[source(device) > 100] = 0
        z = y[ix(device, 1, 1), :, ix(device, 0, 3)] * 2
        (z.sum() + y[y > 20].sum() + (y[0, 1] * y[-1, ::2, 1].sum()).sum()).backward()
        grads += [x.grad, v.grad]
    oracle.assert_same(grads[2:], grads[:2])


def test_out_of_range_reads_give_nan_and_writes_are_dropped():
    bad = torch.tensor([0, 9, -7]).to("jax")
    x = source("jax", (4, 2))
    assert x[bad].isnan().cpu().tolist() == [[False] * 2, [True] * 2, [True] * 2]
    assert x.gather(0, torch.tensor([[5, 0]]).to("jax")).isnan().cpu().tolist() == [[True, False]]
    assert x.index_select(0, bad)[1:].isnan().all()
    assert torch.embedding(x, bad)[1:].isnan().all()
    assert x.int()[bad].cpu()[1].tolist() == [torch.iinfo(torch.int32).min] * 2
    assert source("jax", (4, 2), torch.uint8)[bad].cpu()[1].tolist() == [255, 255]
    for write in (
        lambda y: y.index_put_((bad,), torch.full((3, 2), 9.0).to("jax")),
        lambda y: y.index_fill_(0, bad, 9.0),
        lambda y: y.index_copy_(0, bad, torch.full((3, 2), 9.0).to("jax")),
    ):
        y = source("jax", (4, 2))
        write(y)
        assert y.cpu().tolist() == [[9, 9], [2, 3], [4, 5], [6, 7]]
    huge = torch.tensor([2**32, 1]).to("jax")
    assert x[huge].isnan().cpu().tolist() == [[True] * 2, [False] * 2]


@pytest.fixture
def checked():
    torchax_tpu.config.check_indices = True
    yield
    torchax_tpu.config.check_indices = False


def test_check_indices_raises(checked):
    x = source("jax", (4, 2))
    bad = torch.tensor([0, 4]).to("jax")
    for call in (
        lambda: x[bad],
        lambda: x.index_put_((bad,), torch.tensor(0.0)),
        lambda: x.index_select(0, bad),
        lambda: x.gather(0, bad[:, None]),
        lambda: x.take(bad + 7),
        lambda: x.scatter_(0, bad[:, None], 1.0),
        lambda: torch.embedding(x, bad),
        lambda: x.index_fill_(0, bad, 1),
        lambda: x.gather(0, bad[:, None] - 1),
    ):
        with pytest.raises(IndexError, match="out of bounds"):
            call()
    assert x[torch.tensor([3, -4]).to("jax")].cpu().tolist() == [[6, 7], [0, 1]]


ERRORS = {
    "int": lambda x, d: x[4],
    "too_many": lambda x, d: x[0, 0, 0, 0],
    "float_index": lambda x, d: x[torch.tensor([1.0]).to(d)],
    "mask_shape": lambda x, d: x[torch.tensor([True, False]).to(d)],
    "no_broadcast": lambda x, d: x[ix(d, 0, 1), ix(d, 0, 1, 2)],
    "too_many_tensors": lambda x, d: x[(ix(d, 0, 1),) * 4],
    "value_shape": lambda x, d: x.__setitem__(ix(d, 0, 1), torch.ones(3).to(d)),
    "mask_values": lambda x, d: x.__setitem__(x > 100, torch.ones(3).to(d)),
    "put_dtype": lambda x, d: x.index_put_((ix(d, 0, 1),), torch.ones(6, dtype=torch.float64).to(d)),
    "gather_dims": lambda x, d: x.gather(0, ix(d, 0, 1)),
    "select_dims": lambda x, d: x.index_select(0, ix(d, [0], [1])),
    "scatter_dtype": lambda x, d: x.scatter(
        0, torch.zeros(1, 1, 1, dtype=torch.int64).to(d), torch.ones(1, 1, 1).double().to(d)
    ),
    "dim": lambda x, d: x.index_select(3, ix(d, 0, 1)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_torchs(name):
    with pytest.raises(Exception) as ref:
        ERRORS[name](source("cpu"), "cpu")
    with pytest.raises(type(ref.value)):
        ERRORS[name](source("jax"), "jax")


def test_a_device_index_into_a_cpu_tensor_is_refused():
    with pytest.raises(RuntimeError):
        source("cpu")[ix("jax", 0, 1)]
    with pytest.raises(RuntimeError):
        source("jax").gather(0, torch.zeros(1, 1, 1, dtype=torch.int64))


def test_nonzero_forms():
    for make in (lambda d: source(d, (3, 4)) % 3, lambda d: torch.tensor(2.0).to(d), lambda d: torch.zeros(0, 3).to(d)):
        ref, got = make("cpu"), make("jax")
        oracle.assert_same(
            (torch.nonzero(got), got.argwhere(), torch.nonzero(got, as_tuple=True)),
            (torch.nonzero(ref), ref.argwhere(), torch.nonzero(ref, as_tuple=True)),
        )
    got = torch.nonzero_static((source("jax", (3, 4)) % 3), size=10)
    assert got.cpu().tolist()[-2:] == [[-1, -1]] * 2


TRACED = {
    "first": lambda x, i: x[i],
    "middle": lambda x, i: x[:, i],
    "last": lambda x, i: x[..., i],
    "two": lambda x, i: x[i, :, i],
    "none": lambda x, i: x[None, i, 1:],
    "with_tensor": lambda x, i: x[i, ix("jax", 0, 2)],
    "write": lambda x, i: x.clone().index_put_((i,), torch.tensor(5.0)),
    "mask_scalar": lambda x, i: _write(x, x > 50, 0.0),
    "mask_rows": lambda x, i: _write(x, x > 117, torch.tensor([5.0, 6.0]).to("jax")),
    "set_middle": lambda x, i: _write(x, (slice(None), i), torch.arange(6.0).to("jax")),
    "set_first": lambda x, i: _write(x, i, 3),
    "one_hot": lambda x, i: torch.nn.functional.one_hot(i[None], 4),
}


def _write(x, key, value):
    x = x.clone()
    x[key] = value
    return x


@pytest.mark.parametrize("name", TRACED)
def test_traced_indices(name):
    """The same inside one compiled program: an index stays on the device there."""
    from torchax_tpu.jit import jit

    x, i = source("jax"), torch.tensor(2).to("jax")
    oracle.assert_same(jit(TRACED[name])(x, i), TRACED[name](x, i).cpu())
