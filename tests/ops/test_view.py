"""Shape ops that make new memory, padding, copying twins of views, gradients of views."""

import pytest
import torch
import torch.nn.functional as F

from tests import ledger, oracle
from torchax_tpu import metrics

NAMES = (
    "cat",
    "stack",
    "hstack",
    "block_diag",
    "flip",
    "roll",
    "rot90",
    "repeat",
    "tile",
    "repeat_interleave",
    "tril",
    "triu",
    "diag",
    "diag_embed",
    "diagonal_copy",
    "diagonal_scatter",
    "select_scatter",
    "slice_scatter",
    "as_strided_scatter",
    "constant_pad_nd",
    "nn.functional.pad.constant",
    "nn.functional.pad.reflect",
    "nn.functional.pad.replicate",
    "nn.functional.pad.circular",
    "nn.functional.pixel_shuffle",
    "nn.functional.pixel_unshuffle",
    "nn.functional.channel_shuffle",
    "cartesian_prod",
    "combinations",
    "meshgrid.list_of_tensors",
    "unfold_copy",
    "permute_copy",
    "expand_copy",
    "squeeze_copy",
    "t_copy",
    "unbind_copy",
    "split_with_sizes_copy",
    "view_copy",
    "alias_copy",
    "transpose_copy",
    "unsqueeze_copy",
    "as_strided_copy",
    "narrow_copy",
    "unfold",
    "diagonal",
)
ENTRIES = [o for o in oracle.ops() if oracle.full_name(o) in NAMES]
CASES = [
    (o, m) for o in ENTRIES for m in ("forward", "grad", "inplace", "out") if oracle.applicable(o, m, torch.float32)
]


@pytest.mark.parametrize("op,mode", CASES, ids=[f"{oracle.full_name(o)}-{m}" for o, m in CASES])
def test_op_db(op, mode):
    def run(**tolerance):
        oracle.CHECKS[mode](op, torch.float32, limit=4, **tolerance)

    ledger.check(mode, oracle.full_name(op), "float32", run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["cat", "stack", "flip", "roll", "repeat", "tril", "diag_embed", "constant_pad_nd"])
def test_dtypes_are_kept(name, dtype):
    op = next(o for o in ENTRIES if oracle.full_name(o) == name)
    assert dtype in op.supported_dtypes("cpu")
    oracle.CHECKS["forward"](op, dtype, limit=3)


def both(fn):
    oracle.assert_same(fn("jax"), fn("cpu"))


def test_cat_promotes_and_ignores_empty_vectors():
    both(
        lambda d: torch.cat([torch.ones(2, dtype=torch.int32, device=d), torch.ones(3, dtype=torch.float16, device=d)])
    )
    both(lambda d: torch.cat([torch.empty(0, device=d), torch.ones(2, 3, device=d)], 1))
    both(lambda d: torch.cat([torch.ones(2, 0, device=d), torch.ones(2, 3, device=d)], -1))


PADS = [
    ((1, 3, 5), (2, 1)),
    ((2, 5), (0, 3)),
    ((1, 2, 5, 4), (2, 1, 3, 0)),
    ((3, 4, 6), (-1, 2, 1, -2)),
    ((1, 2, 3, 4, 5), (1, 2, 0, 1, 2, 1)),
]


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("shape,pad", PADS)
def test_pads_and_their_gradients(mode, shape, pad):
    def run(device):
        x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(device).requires_grad_()
        y = F.pad(x, pad, mode)
        y.backward((torch.arange(y.numel(), dtype=torch.float32) % 7).reshape(y.shape).to(device))
        return y, x.grad

    both(run)


BACKWARDS = {
    "select": lambda x: x.select(1, -2),
    "slice": lambda x: x[1:4, ::2],
    "slice_negative": lambda x: x[-3:, 1:-1],
    "diagonal": lambda x: x.diagonal(1),
    "diagonal_3d": lambda x: x.view(3, 2, 5).diagonal(-1, 2, 0),
    "unfold": lambda x: x.unfold(1, 3, 1),
    "unfold_apart": lambda x: x.unfold(1, 2, 3),
    "expand": lambda x: x[:, :1].expand(6, 4),
    "as_strided": lambda x: x.as_strided((3, 3), (4, 1), 2),
    "as_strided_overlap": lambda x: x.as_strided((3, 3), (1, 1), 2),
    "split": lambda x: x.split(4, 1)[1],
    "unbind": lambda x: x.unbind(0)[3],
    "chain": lambda x: x.t()[1:, ::2].unsqueeze(0).permute(2, 0, 1),
    "empty": lambda x: x[2:2],
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_of_views(name):
    def run(device):
        x = torch.arange(30, dtype=torch.float32).reshape(6, 5).to(device).requires_grad_()
        y = BACKWARDS[name](x)
        y.backward((1 + torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape).to(device))
        return x.grad

    before = dict(metrics.host_calls)
    both(run)
    assert metrics.host_calls == before


ERRORS = {
    "cat_0d": lambda d: torch.cat([torch.ones((), device=d), torch.ones((), device=d)]),
    "cat_shapes": lambda d: torch.cat([torch.ones(2, 3, device=d), torch.ones(3, 2, device=d)]),
    "cat_dim": lambda d: torch.cat([torch.ones(2, device=d)], 1),
    "stack_shapes": lambda d: torch.stack([torch.ones(2, device=d), torch.ones(3, device=d)]),
    "flip_twice": lambda d: torch.ones(2, 2, device=d).flip(0, 0),
    "roll": lambda d: torch.ones(2, 2, device=d).roll((1, 2), (0,)),
    "repeat": lambda d: torch.ones(2, 2, device=d).repeat(2),
    "tril": lambda d: torch.ones(2, device=d).tril(),
    "reflect": lambda d: F.pad(torch.ones(1, 1, 3, device=d), (3, 0), "reflect"),
    "pad": lambda d: F.pad(torch.ones(2, device=d), (-3, 0)),
    "shuffle": lambda d: F.pixel_shuffle(torch.ones(1, 3, 2, 2, device=d), 2),
    "repeats": lambda d: torch.ones(2, device=d).repeat_interleave(torch.tensor([-1, 2]).to(d)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_torchs(name):
    with pytest.raises(Exception) as ref:
        ERRORS[name]("cpu")
    with pytest.raises(type(ref.value)):
        ERRORS[name]("jax")


def test_fill_diagonal():
    for shape, wrap in (((3, 3), False), ((7, 3), True), ((3, 7), True), ((3, 3, 3), False), ((9, 2), True)):
        both(lambda d, shape=shape, wrap=wrap: torch.zeros(shape, device=d).fill_diagonal_(5, wrap))
    both(lambda d: torch.zeros(3, 4, device=d).t().fill_diagonal_(2))
