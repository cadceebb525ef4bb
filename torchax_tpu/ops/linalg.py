"""Factorisations: Cholesky, QR, SVD, eigenvalues; matrix exponential."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..registry import aten, op, special
from ._linalg import check_errors, matrices, mh, mm, mt, private, real_dtype

# ---------------------------------------------------------------- Cholesky


def _failing_minor(a):
    """1-based order of the first leading minor that is not positive, 0 if none: LAPACK's info."""
    n = a.shape[-1]

    def column(k, state):
        a, info = state
        pivot = a[k, k].real
        bad = ~(pivot > 0)
        info = jnp.where(bad & (info == 0), k + 1, info)
        col = jnp.where(jnp.arange(n) > k, a[:, k], 0)
        return a - jnp.outer(col, jnp.conj(col)) / jnp.where(bad, 1, pivot).astype(a.dtype), info

    return lax.fori_loop(0, n, column, (a, jnp.zeros((), jnp.int32)))[1]


_cholesky_ex = private("cholesky_ex(Tensor self, bool upper) -> (Tensor, Tensor)")


@op(_cholesky_ex)
def cholesky_ex(self, upper):
    matrices(self, "linalg.cholesky", square=True)
    a = mh(self) if upper else self
    low = lax.linalg.cholesky(a, symmetrize_input=False)
    failed = jnp.isnan(jnp.diagonal(low, axis1=-2, axis2=-1)).any(-1)
    n = a.shape[-1]
    if self.size == 0:
        return self, jnp.zeros(self.shape[:-2], jnp.int32)
    flat = jnp.tril(a).reshape(-1, n, n)
    full = flat + jnp.where(jnp.eye(n, dtype=bool), 0, mh(flat))
    info = lax.cond(failed.any(), lambda: jax.vmap(_failing_minor)(full),
                    lambda: jnp.zeros(full.shape[0], jnp.int32)).reshape(failed.shape)
    info = jnp.where(failed, jnp.maximum(info, 1), 0).astype(jnp.int32)
    low = jnp.tril(low)
    return (mh(low) if upper else low), info


@special(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(self, *, upper=False, check_errors=False):
    out, info = _cholesky_ex(self, upper)
    if check_errors:
        aten._linalg_check_errors(info, "linalg.cholesky_ex", is_matrix=self.dim() == 2)
    return out, info


@special(aten.cholesky.default)
def cholesky(self, upper=False):
    out, info = _cholesky_ex(self, upper)
    check_errors(info, "cholesky", self.dim() == 2)
    return out


# ---------------------------------------------------------------- QR


@op(aten.linalg_qr.default)
def linalg_qr(A, mode="reduced"):
    matrices(A, "linalg.qr")
    if mode not in ("reduced", "complete", "r"):
        raise RuntimeError(f"qr received unrecognized mode '{mode}' but expected one of 'reduced' (default), 'r', or "
                           "'complete'")
    m, n = A.shape[-2:]
    if A.size == 0:
        k = m if mode == "complete" else min(m, n)
        q = jnp.broadcast_to(jnp.eye(m, k, dtype=A.dtype), (*A.shape[:-2], m, k))
        r = jnp.zeros((*A.shape[:-2], k, n), A.dtype)
    else:
        q, r = lax.linalg.qr(A, full_matrices=mode == "complete")
    return (jnp.zeros((0,), A.dtype) if mode == "r" else q), r


@op(aten.geqrf.default)
def geqrf(self):
    matrices(self, "geqrf")
    if self.size == 0:
        return self, jnp.zeros((*self.shape[:-2], min(self.shape[-2:])), self.dtype)
    h, tau = jnp.linalg.qr(self, mode="raw")
    return mt(h), tau


@op(aten.linalg_householder_product.default)
def linalg_householder_product(input, tau):
    matrices(input, "linalg.householder_product")
    m, n = input.shape[-2:]
    k = tau.shape[-1]
    if m < n or n < k or tau.ndim != input.ndim - 1:
        raise RuntimeError("torch.linalg.householder_product: input.shape[-2] must be greater than or equal to "
                           "input.shape[-1], and that to tau.shape[-1]")
    if input.size == 0:
        return input
    return lax.linalg.householder_product(input, tau)


@op(aten.ormqr.default)
def ormqr(self, input2, input3, left=True, transpose=False):
    """Multiply ``input3`` by the square Q of the reflectors in ``self``."""
    matrices(self, "ormqr")
    m, k = self.shape[-2:]
    if input3.shape[-2 if left else -1] != m:
        raise RuntimeError(f"ormqr: other.shape[{-2 if left else -1}] must be equal to input.shape[-2]")
    if input3.size == 0 or self.size == 0:
        return input3
    k = min(k, m)
    square = jnp.pad(self[..., :k], [(0, 0)] * (self.ndim - 1) + [(0, m - k)])
    q = lax.linalg.householder_product(square, input2)
    q = mh(q) if transpose else q
    return mm(q, input3) if left else mm(input3, q)


# ---------------------------------------------------------------- SVD, eigenvalues


def _svd(a, full_matrices=False, compute_uv=True):
    """SVD of a batch, also of empty matrices."""
    if a.size == 0:
        m, n = a.shape[-2:]
        batch, k = a.shape[:-2], min(m, n)
        s = jnp.zeros((*batch, k), real_dtype(a.dtype))
        u = jnp.broadcast_to(jnp.eye(m, m if full_matrices else k, dtype=a.dtype), (*batch, m, m if full_matrices else k))
        v = jnp.broadcast_to(jnp.eye(n if full_matrices else k, n, dtype=a.dtype), (*batch, n if full_matrices else k, n))
        return (u, s, v) if compute_uv else s
    out = jnp.linalg.svd(a, full_matrices=full_matrices, compute_uv=compute_uv)
    return tuple(out) if compute_uv else out


@op(aten._linalg_svd.default)
def _linalg_svd(A, full_matrices=False, compute_uv=True, driver=None):
    matrices(A, "linalg.svd")
    if driver is not None:
        raise RuntimeError("torch.linalg.svd: keyword argument `driver=` is only supported on CUDA inputs with cuSOLVER "
                           "backend.")
    if not compute_uv:
        return jnp.zeros((0,), A.dtype), _svd(A, compute_uv=False), jnp.zeros((0,), A.dtype)
    return _svd(A, full_matrices)


@op(aten._linalg_eigh.default)
def _linalg_eigh(A, UPLO="L", compute_v=True):
    matrices(A, "linalg.eigh", square=True)
    if UPLO.upper() not in ("L", "U"):
        raise RuntimeError(f"Expected UPLO argument to be 'L' or 'U', but got {UPLO}")
    if A.size == 0:
        w, v = jnp.zeros(A.shape[:-1], real_dtype(A.dtype)), A
    else:
        # LAPACK reads one triangle; a Hermitian matrix made of it reads the same everywhere.
        low = jnp.tril(A) if UPLO.upper() == "L" else mh(jnp.triu(A))
        eye = jnp.eye(A.shape[-1], dtype=bool)
        low = jnp.where(eye, low.real.astype(low.dtype), low)
        v, w = lax.linalg.eigh(low + jnp.where(eye, 0, mh(low)), lower=UPLO.upper() == "L", symmetrize_input=False)
    return w, (v if compute_v else jnp.zeros((0,), A.dtype))


def _complex(dtype):
    return np.dtype(np.complex128 if np.dtype(dtype).name in ("float64", "complex128") else np.complex64)


def _eig(a, vectors):
    """General eigenvalues exist on the CPU alone; other platforms ask it."""
    to = _complex(a.dtype)
    if a.size == 0:
        return jnp.zeros(a.shape[:-1], to), jnp.zeros(a.shape, to)
    if jax.default_backend() == "cpu":
        out = lax.linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=vectors)
        return out[0].astype(to), (out[1].astype(to) if vectors else None)

    def host(x):
        w, v = np.linalg.eig(np.asarray(x))
        return w.astype(to), v.astype(to)

    return jax.pure_callback(host, (jax.ShapeDtypeStruct(a.shape[:-1], to), jax.ShapeDtypeStruct(a.shape, to)), a,
                             vmap_method="expand_dims")


@op(aten.linalg_eig.default)
def linalg_eig(self):
    matrices(self, "linalg.eig", square=True)
    return _eig(self, True)


@op(aten._linalg_eigvals.default)
def _linalg_eigvals(self):
    matrices(self, "linalg.eigvals", square=True)
    return _eig(self, False)[0]


# ---------------------------------------------------------------- functions of matrices


@op(aten.linalg_matrix_exp.default)
def linalg_matrix_exp(self):
    matrices(jnp.zeros((1, 1), jnp.float32) if self.dtype.name in ("bfloat16", "float16") else self, "linalg.matrix_exp")
    if self.ndim < 2 or self.shape[-1] != self.shape[-2]:
        raise RuntimeError("linalg.matrix_exp: A must be batches of square matrices")
    if self.size == 0:
        return self
    if self.shape[-1] == 1:
        return jnp.exp(self)
    wide = self.astype(jnp.float32) if self.dtype.itemsize == 2 else self
    with jax.default_matmul_precision("highest"):
        return jax.scipy.linalg.expm(wide, max_squarings=48).astype(self.dtype)
