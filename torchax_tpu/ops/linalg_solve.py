"""LU, linear systems, inverses, determinants, least squares."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..registry import aten, op, special
from ._linalg import is_traced, matrices, mh, mm, private, real_dtype, together
from .linalg import _svd

# ---------------------------------------------------------------- LU

_lu_factor = private("lu_factor(Tensor A) -> (Tensor, Tensor, Tensor)")


def _lu(a):
    """(LU, 0-based pivots, permutation, info) as LAPACK gives them."""
    k = min(a.shape[-2:])
    if a.size == 0:
        batch, m = a.shape[:-2], a.shape[-2]
        return (a, jnp.zeros((*batch, k), jnp.int32), jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (*batch, m)),
                jnp.zeros(batch, jnp.int32))
    lu, pivots, perm = lax.linalg.lu(a)
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    info = jnp.where(zero.any(-1), jnp.argmax(zero, -1).astype(jnp.int32) + 1, 0)
    return lu, pivots.astype(jnp.int32), perm.astype(jnp.int32), info.astype(jnp.int32)


@op(_lu_factor)
def lu_factor(A):
    matrices(A, "torch.linalg.lu_factor")
    lu, pivots, _, info = _lu(A)
    return lu, pivots + 1, info


def _needs_pivot(pivot, name):
    if not pivot:
        raise RuntimeError(f"{name}: LU without pivoting is not implemented on the CPU")


@special(aten.linalg_lu_factor_ex.default)
def linalg_lu_factor_ex(A, *, pivot=True, check_errors=False):
    _needs_pivot(pivot, "linalg.lu_factor")
    out = _lu_factor(A)
    if check_errors:
        aten._linalg_check_errors(out[2], "torch.linalg.lu_factor_ex", is_matrix=A.dim() == 2)
    return out


def _unpack(lu, n):
    m, k = lu.shape[-2], min(lu.shape[-2:])
    low = jnp.tril(lu[..., :k], -1) + jnp.eye(m, k, dtype=lu.dtype)
    return low, jnp.triu(lu[..., :k, :])


def _permutation_matrix(perm, dtype):
    """P of A = P L U: column i has its one in row perm[i]."""
    rows = jnp.arange(perm.shape[-1], dtype=perm.dtype)
    return (rows[:, None] == perm[..., None, :]).astype(dtype)


@op(aten.linalg_lu.default)
def linalg_lu(A, pivot=True):
    matrices(A, "linalg.lu")
    _needs_pivot(pivot, "linalg.lu")
    lu, _, perm, _ = _lu(A)
    return (_permutation_matrix(perm, A.dtype), *_unpack(lu, A.shape[-1]))


def _order(pivots, m):
    """The row order that 1-based successive swaps lead to."""
    if pivots.shape[-1] == 0 or 0 in pivots.shape:
        return jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (*pivots.shape[:-1], m))
    return lax.linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, m)


@op(aten.lu_unpack.default)
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    if LU_pivots.dtype != jnp.int32:
        raise RuntimeError("torch.lu_unpack: LU_pivots is expected to be a contiguous tensor of torch.int32 dtype.")
    none = jnp.zeros((0,), LU_data.dtype)
    low, up = _unpack(LU_data, LU_data.shape[-1]) if unpack_data else (none, none)
    p = _permutation_matrix(_order(LU_pivots, LU_data.shape[-2]), LU_data.dtype) if unpack_pivots else none
    return p, low, up


def _triangular(a, b, lower, unit=False, adjoint=False, left=True):
    if a.size == 0 or b.size == 0:
        return jnp.zeros_like(b)
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=lower, unit_diagonal=unit, transpose_a=adjoint,
                                       conjugate_a=adjoint and a.dtype.kind == "c")


def _rows(b, perm):
    if b.size == 0:
        return b
    return jnp.take_along_axis(b, jnp.broadcast_to(perm[..., None], b.shape), -2)


def _lu_solve(lu, perm, b, adjoint=False):
    """X with A X = B or A^H X = B, where A[perm] = L U."""
    if not adjoint:
        return _triangular(lu, _triangular(lu, _rows(b, perm), True, unit=True), False)
    x = _triangular(lu, _triangular(lu, b, False, adjoint=True), True, unit=True, adjoint=True)
    return _rows(x, jnp.argsort(perm, -1).astype(jnp.int32))


@op(aten.linalg_lu_solve.default)
def linalg_lu_solve(LU, pivots, B, left=True, adjoint=False):
    matrices(LU, "torch.linalg.lu_solve", square=True)
    matrices(B, "torch.linalg.lu_solve")
    if LU.dtype != B.dtype or pivots.dtype != jnp.int32:
        raise RuntimeError("linalg.lu_solve: expected LU and B of the same dtype and int32 pivots")
    if LU.shape[-1] != B.shape[-2 if left else -1]:
        raise RuntimeError(f"linalg.lu_solve: incompatible shapes {list(LU.shape)} and {list(B.shape)}")
    batch = np.broadcast_shapes(LU.shape[:-2], B.shape[:-2])
    LU, B = together(LU, B)
    perm = jnp.broadcast_to(_order(pivots, LU.shape[-1]), (*batch, LU.shape[-1]))
    if left:
        return _lu_solve(LU, perm, B, adjoint)
    return mh(_lu_solve(LU, perm, mh(B), not adjoint))


_solve = private("solve(Tensor A, Tensor B, bool left) -> (Tensor, Tensor, Tensor, Tensor)")


@op(_solve)
def solve(A, B, left):
    matrices(A, "linalg.solve", square=True)
    vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    if vector and not left:
        raise RuntimeError("linalg.solve: Vector broadcasting of the left hand side is not supported for left=False.")
    if A.dtype != B.dtype:
        raise RuntimeError(f"linalg.solve: Expected A and B to have the same dtype, but found {A.dtype.name} and "
                           f"{B.dtype.name} instead")
    lu, pivots, _, info = _lu(A)
    x = linalg_lu_solve(lu, pivots + 1, B[..., None] if vector else B, left)
    return (x[..., 0] if vector else x), lu, pivots + 1, info


@special(aten._linalg_solve_ex.default)
def _linalg_solve_ex(A, B, *, left=True, check_errors=False):
    out = _solve(A, B, left)
    if check_errors:
        aten._linalg_check_errors(out[3], "torch.linalg.solve_ex", is_matrix=A.dim() == 2)
    return out


def _factor(A):
    """LU of A^T where A is contiguous and real: torch's determinants do so, and their gradients count on it."""
    return _lu_factor(A.mT if A.is_contiguous() and not A.is_complex() else A)


_det_of_lu = private("det_of_lu(Tensor LU, Tensor pivots) -> (Tensor, Tensor, Tensor)")


@op(_det_of_lu)
def det_of_lu(LU, pivots):
    """(determinant, its sign, log of its size) from a factorisation."""
    diag = jnp.diagonal(LU, axis1=-2, axis2=-1)
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype), -1) % 2
    turn = jnp.where(swaps == 1, -1, 1).astype(LU.dtype)
    size = jnp.abs(diag)
    unit = jnp.where(size == 0, 0, diag / jnp.where(size == 0, 1, size).astype(LU.dtype))
    return turn * jnp.prod(diag, -1), turn * jnp.prod(unit, -1), jnp.sum(jnp.log(size), -1)


def _square(A, name):
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        raise RuntimeError(f"{name}: A must be batches of square matrices, but it has shape {list(A.shape)}")


@special(aten._linalg_det.default)
def _linalg_det(A):
    _square(A, "linalg.det")
    LU, pivots, _ = _factor(A)
    return _det_of_lu(LU, pivots)[0], LU, pivots


@special(aten._linalg_slogdet.default)
def _linalg_slogdet(A):
    _square(A, "linalg.slogdet")
    LU, pivots, _ = _factor(A)
    _, sign, logabs = _det_of_lu(LU, pivots)
    return sign, logabs, LU, pivots


# ---------------------------------------------------------------- inverses

_inverse = private("inverse(Tensor A) -> (Tensor, Tensor)")


@op(_inverse)
def inverse(A):
    matrices(A, "linalg.inv", square=True)
    lu, _, perm, info = _lu(A)
    eye = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
    return _lu_solve(lu, perm, eye), info


@special(aten.linalg_inv_ex.default)
def linalg_inv_ex(A, *, check_errors=False):
    out, info = _inverse(A)
    if check_errors:
        aten._linalg_check_errors(info, "linalg.inv_ex", is_matrix=A.dim() == 2)
    return out, info


@op(aten.linalg_pinv.atol_rtol_tensor)
def linalg_pinv(self, atol=None, rtol=None, hermitian=False):
    matrices(self, "linalg.pinv", square=hermitian)
    m, n = self.shape[-2:]
    if self.size == 0:
        return jnp.zeros((*self.shape[:-2], n, m), self.dtype)
    real = real_dtype(self.dtype)
    default = np.asarray(np.finfo(real).eps * max(m, n), real)
    if rtol is None:
        rtol = default if atol is None else jnp.where(atol > 0, 0, default)
    atol = jnp.asarray(0 if atol is None else atol, real)
    rtol = jnp.asarray(rtol, real)
    if hermitian:
        v, w = lax.linalg.eigh(jnp.tril(self) + mh(jnp.tril(self, -1)), symmetrize_input=False)
        size = jnp.abs(w)
        tol = jnp.maximum(atol, rtol * jnp.max(size, -1))
        keep = size > tol[..., None]
        return mm(v * jnp.where(keep, 1 / jnp.where(keep, w, 1), 0)[..., None, :].astype(v.dtype), mh(v))
    u, s, vh = _svd(self)
    tol = jnp.maximum(atol, rtol * s[..., 0])
    keep = s > tol[..., None]
    return mm(mh(vh) * jnp.where(keep, 1 / jnp.where(keep, s, 1), 0)[..., None, :].astype(u.dtype), mh(u))


# ---------------------------------------------------------------- triangular and Cholesky systems


@op(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(self, B, upper, left=True, unitriangular=False):
    matrices(self, "linalg.solve_triangular", square=True)
    matrices(B, "linalg.solve_triangular")
    if self.shape[-1] != B.shape[-2 if left else -1]:
        raise RuntimeError(f"linalg.solve_triangular: Incompatible shapes of A and B for the equation "
                           f"{'AX = B' if left else 'XA = B'} ({list(self.shape)} and {list(B.shape)})")
    a, b = together(self, B)
    return _triangular(a, b, not upper, unitriangular, left=left)


@op(aten.triangular_solve.default)
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False):
    matrices(A, "triangular_solve", square=True)
    a, b = together(A, self)
    if a.size == 0 or b.size == 0:
        return jnp.zeros_like(b), a
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=not upper, transpose_a=transpose,
                                       unit_diagonal=unitriangular), a


@op(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
def cholesky_solve(self, input2, upper=False):
    matrices(input2, "cholesky_solve", square=True)
    a, b = together(input2, self)
    if upper:
        return _triangular(a, _triangular(a, b, False, adjoint=True), False)
    return _triangular(a, _triangular(a, b, True), True, adjoint=True)


@op(aten.cholesky_inverse.default)
def cholesky_inverse(self, upper=False):
    matrices(self, "cholesky_inverse", square=True)
    return cholesky_solve(jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape), self, upper)


# ---------------------------------------------------------------- least squares

_lstsq = private("lstsq(Tensor A, Tensor B, float? rcond, str driver) -> (Tensor, Tensor, Tensor, Tensor)")


@op(_lstsq, wide=True)
def lstsq(A, B, rcond, driver):
    """Minimal-norm solution by SVD, the same for all drivers; what is reported differs."""
    m, n = A.shape[-2:]
    a, b = together(A, B)
    u, s, vh = _svd(a)
    real = s.dtype
    cut = jnp.asarray(np.finfo(real).eps * max(m, n) if rcond is None else rcond, real)
    top = s[..., :1] if s.shape[-1] else jnp.zeros((*s.shape[:-1], 1), real)
    keep = s > jnp.where(cut < 0, np.finfo(real).eps, cut).astype(real) * top
    if driver == "gels":  # assumes full rank
        keep = jnp.ones_like(keep)
    scaled = jnp.where(keep, 1 / jnp.where(keep, s, 1), 0)[..., None].astype(a.dtype) * mm(mh(u), b)
    x = mm(mh(vh), scaled)
    if m > n and driver != "gelsy":
        left = b - mm(a, x)
        residuals = jnp.sum((left * jnp.conj(left)).real, -2)
    else:
        residuals = jnp.zeros((0,), real)
    rank = jnp.sum(keep, -1, dtype=jnp.int64)
    return x, residuals, rank, s


@special(aten.linalg_lstsq.default)
def linalg_lstsq(self, b, rcond=None, *, driver=None):
    driver = driver or "gelsy"
    if driver not in ("gels", "gelsy", "gelsd", "gelss"):
        raise RuntimeError(f"torch.linalg.lstsq: parameter `driver` should be one of (gels, gelsy, gelsd, gelss), got {driver}")
    if self.dim() < 2 or b.dim() < 1 or self.dtype != b.dtype:
        raise RuntimeError("torch.linalg.lstsq: input must have at least 2 dimensions, and input and other the same dtype")
    vector = b.dim() == 1 or (self.dim() - 1 == b.dim() and b.shape == self.shape[:-1])
    if self.shape[-2] != (b.shape[-1] if vector else b.shape[-2]):
        raise RuntimeError(f"torch.linalg.lstsq: input.size(-2) should match other.size({-1 if vector else -2})")
    x, residuals, rank, s = _lstsq(self, b.unsqueeze(-1) if vector else b, rcond, driver)
    if vector:
        x, residuals = x.squeeze(-1), residuals.squeeze(-1) if residuals.dim() > 1 or residuals.numel() else residuals
    m, n = self.shape[-2:]
    if m > n and driver in ("gelsd", "gelss") and not is_traced(rank) and (np.asarray(rank.jax()) < n).any():
        residuals = residuals.new_empty(0)  # torch reports residuals of full-rank systems only
    if driver == "gels":
        rank = rank.new_empty(0)
    if driver in ("gels", "gelsy"):
        s = s.new_empty(0)
    return x, residuals, rank, s



