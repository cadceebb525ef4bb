"""The `_foreach_` list ops: every overload, functional and in place, one program for the list."""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
)

from tests import ledger, oracle
from tests.test_optim import _Counter
from torchax_tpu import routes

DEVICE = oracle.DEVICE
OPS = foreach_unary_op_db + foreach_binary_op_db + foreach_pointwise_op_db + foreach_reduce_op_db + foreach_other_op_db
CASES = [(o, d, inplace) for o in OPS for d in (torch.float32, torch.int32, torch.bfloat16) if d in o.supported_dtypes("cpu")
         for inplace in (False, True) if (o.inplace_variant if inplace else o.op) is not None]


def _few(op, dtype):
    """A few samples of each form of the arguments."""
    torch.manual_seed(0)
    seen = {}
    with oracle.quiet():
        for s in op.sample_inputs("cpu", dtype, num_input_tensors=[3]):
            form = str([[type(x).__name__ for x in a] if isinstance(a, (list, tuple)) else type(a).__name__ for a in s.args]) + str(
                sorted(s.kwargs))
            seen[form] = seen.get(form, 0) + 1
            if seen[form] <= 2:
                yield s


def compare(op, dtype, inplace, rtol=None, atol=None):
    fn = op.inplace_variant if inplace else op.op
    for s in _few(op, dtype):
        here, there = oracle.clone_sample(s), oracle.to_device(oracle.clone_sample(s))
        with oracle.quiet():
            try:
                want = fn(here[0], *here[1], **here[2])
            except Exception:  # noqa: BLE001  (whatever the CPU raises is the reference)
                with pytest.raises((RuntimeError, NotImplementedError, ValueError, TypeError, IndexError)):
                    fn(there[0], *there[1], **there[2])
                continue
            got = fn(there[0], *there[1], **there[2])
        oracle.assert_same(there[0] if inplace else got, here[0] if inplace else want, rtol, atol)


@pytest.mark.parametrize("op,dtype,inplace", CASES, ids=lambda x: oracle.full_name(x) if hasattr(x, "name") else str(
    x).removeprefix("torch.") if isinstance(x, torch.dtype) else "inplace" if x else "functional")
def test_database(op, dtype, inplace):
    ledger.check("inplace" if inplace else "forward", op.name, str(dtype).removeprefix("torch."),
                 lambda **kw: compare(op, dtype, inplace, **kw))


def lists(*shapes):
    torch.manual_seed(1)
    return [torch.rand(s) + 0.5 for s in shapes]


def both(fn, *args):
    want = fn(*oracle.clone_sample(type("S", (), {"input": args, "args": (), "kwargs": {}}))[0])
    got = fn(*oracle.to_device(args))
    oracle.assert_same(got, want)


def test_scale_factors_in_a_tensor():
    a, b, c = (lists((2, 3), (4,)) for _ in range(3))
    factors = torch.tensor([0.5, 2.0])
    for fn in (torch._foreach_addcmul, torch._foreach_addcdiv):
        both(fn, a, b, c, factors)
        want, device = fn(a, b, c, factors), oracle.to_device((a, b, c))
        oracle.assert_same(fn(*device, factors), want)  # the factors on the CPU, as CUDA wants them
        with pytest.raises(RuntimeError):
            fn(*device, torch.ones(3))
    device = oracle.to_device((a, b, c))
    torch._foreach_addcdiv_(*device, factors.to(DEVICE))
    oracle.assert_same(device[0], torch._foreach_addcdiv(a, b, c, factors))


def test_positional_scale_factor_is_not_lost():
    a, b, c = (lists((2, 3), (4,)) for _ in range(3))
    both(lambda *x: torch._foreach_addcdiv(*x, value=-0.3), a, b, c)
    both(lambda *x: torch._foreach_addcmul(*x, [2.0, -1.0]), a, b, c)


def test_norms_and_powers():
    a = lists((2, 3), (4,), ())
    with pytest.raises(RuntimeError):
        torch._foreach_norm([torch.zeros(0, device=DEVICE)], float("inf"))
    for order in (0, 1, 2, 3.5, float("inf"), float("-inf")):
        both(lambda *x, order=order: torch._foreach_norm(list(x), order), *a)
    both(lambda *x: torch._foreach_norm(list(x), 2, dtype=torch.float64), *a)
    both(lambda *x: torch._foreach_pow(2.0, list(x)), *a)
    both(lambda *x: torch._foreach_max(list(x)), *a[:3])


def test_copies_of_lists():
    a, b = lists((2, 3), (4,)), lists((2, 3), (4,))
    device = oracle.to_device(a)
    torch._foreach_copy_(device, oracle.to_device(b))
    oracle.assert_same(device, b)
    halves = [t.to(torch.bfloat16) for t in device]
    torch._foreach_copy_(halves, device)
    oracle.assert_same(halves, [t.to(torch.bfloat16) for t in b])
    torch._foreach_zero_(device)
    oracle.assert_same(device, [torch.zeros(2, 3), torch.zeros(4)])


def test_copies_across_devices():
    a, b = lists((2, 3), (4,)), lists((2, 3), (4,))
    device = oracle.to_device(a)
    torch._foreach_copy_(device, b)
    oracle.assert_same(device, b)
    torch._foreach_copy_(a, oracle.to_device(a))
    oracle.assert_same(device, b)


def test_lists_of_different_lengths_are_refused():
    a = oracle.to_device(lists((2,), (3,)))
    with pytest.raises(RuntimeError):
        torch._foreach_add(a, a[:1])


def test_one_program_and_no_recompilation():
    a = oracle.to_device(lists((2, 3), (4,), (5,)))
    torch._foreach_add_(a, a, alpha=0.5)
    torch._foreach_mul_(a, 0.5)
    for overload in (torch.ops.aten._foreach_add_.List, torch.ops.aten._foreach_mul_.Scalar):
        assert routes.resolve(overload)[1] == "derived"
    before = _Counter.count
    for i in range(5):
        torch._foreach_add_(a, a, alpha=0.1 * i + 0.01)
        torch._foreach_mul_(a, 0.3 + i)
    assert _Counter.count == before


def test_views_are_written_through():
    base = torch.arange(6.0).to(DEVICE)
    torch._foreach_add_([base[:3], base[3:]], [torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE) * 2])
    oracle.assert_same(base, torch.tensor([1.0, 2, 3, 5, 6, 7]))
