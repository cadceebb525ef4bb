"""Matrix products and distances: the op database, and what it misses."""

import pytest
import torch

from tests import ledger, oracle

NAMES = ["mm", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "addr", "mv", "dot", "vdot", "outer", "matmul",
         "__rmatmul__", "nn.functional.linear", "nn.functional.bilinear", "tensordot", "einsum", "inner", "kron",
         "cdist", "nn.functional.pdist", "nn.functional.cosine_similarity", "linalg.multi_dot", "linalg.vecdot"]
HALVES = ["mm", "bmm", "addmm", "addmv", "baddbmm", "mv", "dot", "matmul", "nn.functional.linear"]
CASES = [(m, n, "float32") for n in NAMES for m in ("forward", "grad", "inplace", "out")]
CASES += [("forward", n, d) for n in HALVES for d in ("bfloat16", "float16", "int64", "int8", "complex64", "float64")]


@pytest.mark.parametrize("mode,name,dtype", CASES)
def test_op_database(mode, name, dtype):
    limit = 3 if mode == "out" else 12
    found = oracle.ops([name])
    assert found
    for op in found:
        if oracle.applicable(op, mode, getattr(torch, dtype)):
            ledger.check(mode, oracle.full_name(op), dtype,
                         lambda op=op, **kw: oracle.CHECKS[mode](op, getattr(torch, dtype), limit=limit, **kw))


def compare(fn, *tensors, **tolerance):
    """fn on CPU and on the device: results and first gradients."""
    results = []
    for move in (lambda t: t.clone(), lambda t: t.to(oracle.DEVICE)):
        inputs = [move(t).requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
        out = fn(*inputs)
        leaves = [t for t in inputs if t.requires_grad]
        grads = torch.autograd.grad(out.abs().square().sum(), leaves) if out.requires_grad else ()
        results.append((out, *grads))
    oracle.assert_same(results[1], results[0], **tolerance)


@pytest.mark.parametrize("beta", [0, 0.0])
def test_beta_zero_ignores_nan(beta):
    bad = torch.full((2, 2), float("nan"))
    a, b = torch.randn(2, 3), torch.randn(3, 2)
    compare(lambda a, b: torch.addmm(bad.to(a.device), a, b, beta=beta), a, b)
    compare(lambda a, b: torch.baddbmm(bad.to(a.device), a[None], b[None], beta=beta), a, b)


def test_int64_products_are_exact():
    a = torch.tensor([[2**40, 3], [-(2**33), 2**31]])
    b = torch.tensor([[5, 2**20], [7, -1]])
    assert torch.equal((a.to(oracle.DEVICE) @ b.to(oracle.DEVICE)).cpu(), a @ b)


SHAPES = [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (3,)),
          ((2, 3), (5, 3, 4)), ((3,), (5, 3, 4)), ((5, 1, 2, 3), (6, 3, 4)), ((1, 2, 3), (5, 3, 4)),
          ((5, 0, 3), (3, 4)), ((2, 0), (0, 4)), ((1, 1, 3), (1, 3, 1)), ((5, 1, 1, 3), (1, 6, 3, 1))]


@pytest.mark.parametrize("a,b", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_matmul_shapes_and_gradients(a, b, dtype):
    torch.manual_seed(0)
    compare(torch.matmul, torch.randn(a, dtype=dtype), torch.randn(b, dtype=dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("x,w", [((3,), (4, 3)), ((2, 5, 3), (4, 3)), ((0, 3), (4, 3)), ((2, 3), (3,)), ((2, 3, 0), (5, 0))])
def test_linear_shapes_and_gradients(x, w):
    torch.manual_seed(0)
    compare(torch.nn.functional.linear, torch.randn(x), torch.randn(w), rtol=1e-4, atol=1e-4)
    if len(w) == 2:
        compare(torch.nn.functional.linear, torch.randn(x), torch.randn(w), torch.randn(w[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fn,w,dtype", [(torch.nn.functional.linear, (4, 3), torch.float32),
                                        (torch.matmul, (3, 4), torch.float32), (torch.matmul, (3, 4), torch.complex64)])
def test_second_derivatives(fn, w, dtype):
    def penalty(x, w):
        grads = torch.autograd.grad(fn(x, w).abs().square().sum(), (x, w), create_graph=True)
        return sum(g.abs().square().sum() for g in grads)

    torch.manual_seed(0)
    compare(penalty, torch.randn(2, 5, 3, dtype=dtype), torch.randn(w, dtype=dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fn", [lambda x, w: x @ w.mT, torch.nn.functional.linear])
def test_forward_mode(fn):
    torch.manual_seed(0)
    x, w, t = torch.randn(2, 3), torch.randn(4, 3), torch.randn(2, 3)
    d = oracle.DEVICE
    got = torch.func.jvp(lambda x: fn(x, w.to(d)), (x.to(d),), (t.to(d),))
    oracle.assert_same(got, torch.func.jvp(lambda x: fn(x, w), (x,), (t,)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fn", [
    lambda d: torch.ones(2, 3, device=d) @ torch.ones(4, 3, device=d),
    lambda d: torch.mm(torch.ones(2, 3, device=d), torch.ones(3, 2, device=d, dtype=torch.float64)),
    lambda d: torch.dot(torch.ones(3, device=d), torch.ones(1, device=d)),
    lambda d: torch.bmm(torch.ones(2, 2, 3, device=d), torch.ones(3, 3, 2, device=d)),
    lambda d: torch.nn.functional.linear(torch.ones(2, 3, device=d), torch.ones(4, 2, device=d)),
    lambda d: torch.addmm(torch.ones(5, device=d), torch.ones(2, 3, device=d), torch.ones(3, 4, device=d))])
def test_bad_operands_raise(fn):
    with pytest.raises(RuntimeError):
        fn("cpu")
    with pytest.raises(RuntimeError):
        fn(oracle.DEVICE)


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("rows", [4, 30])
def test_cdist(p, rows):
    torch.manual_seed(0)
    compare(lambda a, b: torch.cdist(a, b, p=p), torch.randn(2, rows, 3), torch.randn(rows + 1, 3), rtol=1e-3, atol=1e-3)
