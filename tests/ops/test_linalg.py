"""Linear algebra: the op database, errors, infos and conventions."""

import pytest
import torch

from tests import ledger, oracle
from tests.ops.test_matmul import compare

NAMES = ["cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "ormqr", "linalg.cholesky", "linalg.cholesky_ex",
         "linalg.det", "linalg.slogdet", "logdet", "linalg.eigvalsh", "linalg.eigh", "linalg.eig", "linalg.eigvals",
         "linalg.householder_product", "linalg.inv", "linalg.inv_ex", "linalg.lstsq", "linalg.lu", "linalg.lu_factor",
         "linalg.lu_factor_ex", "linalg.lu_solve", "lu", "lu_solve", "lu_unpack", "linalg.matrix_norm",
         "linalg.matrix_power", "linalg.pinv", "linalg.pinv.hermitian", "linalg.qr", "qr", "linalg.solve",
         "linalg.solve_ex", "linalg.solve_triangular", "triangular_solve", "linalg.svd", "linalg.svdvals",
         "linalg.tensorinv", "linalg.tensorsolve", "linalg.vander", "linalg.cross", "matrix_exp"]


@pytest.mark.parametrize("mode", ["forward", "grad"])
@pytest.mark.parametrize("name", NAMES)
def test_op_database(mode, name):
    op = next(o for o in oracle.ops() if oracle.full_name(o) == name)
    if oracle.applicable(op, mode, torch.float32):
        n = ledger.check(mode, name, "float32", lambda **kw: oracle.CHECKS[mode](op, torch.float32, limit=6, **kw))
        assert n != 0
    else:
        assert mode == "grad"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", ["linalg.solve", "linalg.inv", "linalg.qr", "linalg.cholesky", "linalg.pinv"])
def test_wide_dtypes(name, dtype):
    op = next(o for o in oracle.ops() if oracle.full_name(o) == name)
    assert oracle.CHECKS["forward"](op, dtype, limit=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("UPLO", ["L", "U"])
def test_eigh_rebuilds_its_matrix(dtype, UPLO):
    """Signs and phases of eigenvectors are each LAPACK's own; values and the product are not."""
    torch.manual_seed(0)
    a = torch.randn(2, 5, 5, dtype=dtype)
    w, v = torch.linalg.eigh(a.to(oracle.DEVICE), UPLO)
    half = a.tril() if UPLO == "L" else a.triu()
    full = half + half.mH - torch.diag_embed(half.diagonal(dim1=-2, dim2=-1))
    diag = torch.eye(5, dtype=torch.bool)
    full = torch.where(diag, full.real.to(dtype), full)
    oracle.assert_same(w, torch.linalg.eigvalsh(full), rtol=1e-4, atol=1e-4)
    oracle.assert_same(v @ torch.diag_embed(w).to(dtype) @ v.mH, full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fn", [
    lambda d: torch.linalg.inv(torch.zeros(3, 3, device=d)),
    lambda d: torch.linalg.solve(torch.zeros(2, 3, 3, device=d), torch.ones(2, 3, 1, device=d)),
    lambda d: torch.linalg.cholesky(-torch.eye(3, device=d)),
    lambda d: torch.linalg.cholesky_ex(-torch.eye(3, device=d), check_errors=True)])
def test_singular_matrices_raise(fn):
    with pytest.raises(torch.linalg.LinAlgError) as expected:
        fn("cpu")
    with pytest.raises(torch.linalg.LinAlgError) as got:
        fn(oracle.DEVICE)
    assert str(got.value).split(":")[-1] == str(expected.value).split(":")[-1]


def test_infos():
    a = torch.stack([torch.eye(4), torch.diag(torch.tensor([1.0, 2.0, -1.0, 1.0]))])
    assert torch.linalg.cholesky_ex(a.to(oracle.DEVICE)).info.tolist() == torch.linalg.cholesky_ex(a).info.tolist() == [0, 3]
    b = torch.diag(torch.tensor([1.0, 0.0, 2.0]))
    assert torch.linalg.lu_factor_ex(b.to(oracle.DEVICE)).info.item() == torch.linalg.lu_factor_ex(b).info.item() == 2


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss"])
@pytest.mark.parametrize("rank_deficient", [False, True])
def test_lstsq_reports(driver, rank_deficient):
    torch.manual_seed(0)
    a, b = torch.randn(6, 3), torch.randn(6, 2)
    if rank_deficient and driver != "gels":
        a[:, 2] = a[:, 0] + a[:, 1]
    ref = torch.linalg.lstsq(a, b, driver=driver)
    got = torch.linalg.lstsq(a.to(oracle.DEVICE), b.to(oracle.DEVICE), driver=driver)
    oracle.assert_same(tuple(got), tuple(ref), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fn", [torch.linalg.det, lambda a: torch.linalg.slogdet(a)[1], torch.linalg.inv,
                                lambda a: torch.linalg.solve(a, torch.ones(2, 3, 2).to(a.device)),
                                lambda a: torch.linalg.solve(a, torch.ones(2, 3).to(a.device)), torch.linalg.matrix_exp])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_either_layout(fn, transposed):
    torch.manual_seed(0)
    a = torch.randn(2, 3, 3) + 2 * torch.eye(3)
    compare((lambda x: fn(x.mT)) if transposed else fn, a, rtol=1e-3, atol=1e-3)


def test_result_types_have_names():
    out = torch.linalg.svd(torch.randn(3, 2).to(oracle.DEVICE), full_matrices=False)
    assert out.U.shape == (3, 2) and out.S.shape == (2,) and out.Vh.shape == (2, 2)
