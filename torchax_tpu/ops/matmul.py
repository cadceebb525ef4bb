"""Matrix products: mm, bmm, addmm and their kin, linear and matmul whole, pairwise distances.

Every product is one `dot_general`: half types accumulate in float32, small integers in int32.
The precision of float32 products on TPU follows `jax.default_matmul_precision`.
"""

import string

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import TO_JAX, opmath, promote
from ..registry import aten, op


def accumulator(dtype):
    """The dtype products of ``dtype`` accumulate in: float32 for halves, int32 for small integers."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu" and dtype.itemsize < 4:
        return np.dtype(np.int32)
    if dtype.name.startswith("float8"):
        return np.dtype(np.float32)
    return opmath(dtype)


def _same_dtype(*arrays):
    if any(a.dtype != arrays[0].dtype for a in arrays):
        raise RuntimeError("expected all matrices to have the same dtype, but got " +
                           " and ".join(a.dtype.name for a in arrays))
    if arrays[0].dtype == np.bool_:
        raise RuntimeError("matrix products are not implemented for 'Bool'")


def contract(a, b, axes, batch=((), ())):
    """`lax.dot_general` in the accumulator's dtype (the caller casts back)."""
    _same_dtype(a, b)
    if a.dtype.kind in "iu" and a.dtype.itemsize == 8:
        return lax.platform_dependent(a, b, tpu=lambda a, b: _wide_int_product(a, b, axes, batch),
                                      default=lambda a, b: lax.dot_general(a, b, (axes, batch)))
    return lax.dot_general(a, b, (axes, batch), preferred_element_type=accumulator(a.dtype))


def _wide_int_product(a, b, axes, batch):
    """A product of 64-bit integers as multiply and reduce: the TPU compiler has no such dot."""
    letters = iter(string.ascii_letters)
    names_a, names_b = [None] * a.ndim, [None] * b.ndim
    shared, summed = [], []
    for into, (xs, ys) in ((shared, batch), (summed, axes)):
        for x, y in zip(xs, ys):
            names_a[x] = names_b[y] = next(letters)
            into.append(names_a[x])
    names_a = [n or next(letters) for n in names_a]
    names_b = [n or next(letters) for n in names_b]
    out = shared + [n for n in names_a if n not in shared + summed] + [n for n in names_b if n not in shared + summed]
    order = out + summed

    def spread(x, names):
        x = jnp.transpose(x, sorted(range(x.ndim), key=lambda i: order.index(names[i])))
        return jnp.expand_dims(x, [i for i, n in enumerate(order) if n not in names])

    return jnp.sum(spread(a, names_a) * spread(b, names_b), axis=tuple(range(len(out), len(order))), dtype=a.dtype)


def product(a, b):
    """``a @ b`` for matrices or equally batched matrices, accumulated but not cast back."""
    n = a.ndim - 2
    if a.ndim != b.ndim or n < 0:
        raise RuntimeError("expected two matrices or two batches of matrices")
    batch = tuple(range(n))
    return contract(a, b, ((n + 1,), (n,)), (batch, batch))


def _dims(x, n, name):
    if x.ndim != n:
        raise RuntimeError(f"{name} must be {n}D, got {x.ndim}D")


def _is_one(x):
    return not hasattr(x, "dtype") and x == 1


def scaled_sum(self, prod, beta, alpha, dtype):
    """beta * self + alpha * prod, where beta == 0 ignores nan in self, cast to ``dtype``."""
    acc = prod.dtype
    if not _is_one(alpha):
        prod = prod * jnp.asarray(alpha).astype(acc)
    self = self.astype(acc)
    if not _is_one(beta):
        b = jnp.asarray(beta).astype(acc)
        self = jnp.where(b == 0, jnp.zeros_like(self), self * b)
    out = self + prod
    if out.shape != prod.shape:
        raise RuntimeError(f"the expanded size {list(out.shape)} doesn't match the product's {list(prod.shape)}")
    return out.astype(dtype)


def _with_self(self, prod, a, beta, alpha):
    if self.dtype != a.dtype:
        raise RuntimeError(f"self must have the same dtype as the matrices, got {self.dtype.name} and {a.dtype.name}")
    return scaled_sum(self, prod, beta, alpha, a.dtype)


# ---------------------------------------------------------------- products


@op(aten.mm.default)
def mm(self, mat2):
    _dims(self, 2, "self")
    return product(self, mat2).astype(self.dtype)


@op(aten.bmm.default)
def bmm(self, mat2):
    _dims(self, 3, "batch1")
    return product(self, mat2).astype(self.dtype)


@op(aten.mm.dtype, aten.bmm.dtype)
def mm_dtype(self, mat2, out_dtype):
    return product(self, mat2).astype(TO_JAX[out_dtype])


@op(aten._int_mm.default)
def _int_mm(self, mat2):
    _dims(self, 2, "self")
    return product(self, mat2).astype(jnp.int32)


@op(aten.mv.default)
def mv(self, vec):
    _dims(self, 2, "self")
    _dims(vec, 1, "vec")
    return contract(self, vec, ((1,), (0,))).astype(self.dtype)


@op(aten.dot.default)
def dot(self, tensor):
    _dims(self, 1, "self")
    _dims(tensor, 1, "tensor")
    return contract(self, tensor, ((0,), (0,))).astype(self.dtype)


@op(aten.vdot.default)
def vdot(self, other):
    return dot(jnp.conj(self), other)


@op(aten.ger.default, aten.outer.default, dtype=promote)
def outer(self, vec2):
    _dims(self, 1, "self")
    _dims(vec2, 1, "vec2")
    return self[:, None] * vec2[None, :] if self.dtype != jnp.bool_ else self[:, None] & vec2[None, :]


@op(aten.addmm.default)
def addmm(self, mat1, mat2, beta=1, alpha=1):
    _dims(mat1, 2, "mat1")
    return _with_self(self, product(mat1, mat2), mat1, beta, alpha)


@op(aten.addmm.dtype)
def addmm_dtype(self, mat1, mat2, out_dtype, beta=1, alpha=1):
    return scaled_sum(self, product(mat1, mat2), beta, alpha, TO_JAX[out_dtype])


@op(aten._addmm_activation.default)
def _addmm_activation(self, mat1, mat2, beta=1, alpha=1, use_gelu=False):
    out = addmm(self, mat1, mat2, beta, alpha)
    return jax.nn.gelu(out, approximate=False) if use_gelu else jnp.maximum(out, 0)


@op(aten.addmv.default)
def addmv(self, mat, vec, beta=1, alpha=1):
    _dims(mat, 2, "mat")
    _dims(vec, 1, "vec")
    return _with_self(self, contract(mat, vec, ((1,), (0,))), mat, beta, alpha)


@op(aten.addbmm.default)
def addbmm(self, batch1, batch2, beta=1, alpha=1):
    _dims(batch1, 3, "batch1")
    _dims(batch2, 3, "batch2")
    prod = contract(batch1, batch2, ((0, 2), (0, 1)))
    return _with_self(self, prod, batch1, beta, alpha)


@op(aten.baddbmm.default)
def baddbmm(self, batch1, batch2, beta=1, alpha=1):
    _dims(batch1, 3, "batch1")
    return _with_self(self, product(batch1, batch2), batch1, beta, alpha)


@op(aten.baddbmm.dtype)
def baddbmm_dtype(self, batch1, batch2, out_dtype, beta=1, alpha=1):
    return scaled_sum(self, product(batch1, batch2), beta, alpha, TO_JAX[out_dtype])


@op(aten.addr.default, dtype=promote("self", "vec1", "vec2"))
def addr(self, vec1, vec2, beta=1, alpha=1):
    _dims(vec1, 1, "vec1")
    _dims(vec2, 1, "vec2")
    if self.dtype == jnp.bool_:
        prod = vec1[:, None] & vec2[None, :] & (jnp.asarray(alpha) != 0)
        out = prod | (self & (jnp.asarray(beta) != 0))
        return out
    return scaled_sum(self, vec1[:, None] * vec2[None, :], beta, alpha, self.dtype)


# ---------------------------------------------------------------- linear and matmul, whole


@op(aten.linear.default)
def linear(input, weight, bias=None):
    """One contraction over the last axes; never a transposed copy of the weight."""
    if weight.ndim > 2 or input.ndim == 0:
        raise RuntimeError(f"linear: expected a weight of 1 or 2 dimensions, got {weight.ndim}")
    out = contract(input, weight, ((input.ndim - 1,), (weight.ndim - 1,)))
    if bias is not None:
        _same_dtype(input, bias)
        out = out + bias.astype(out.dtype)
    return out.astype(input.dtype)


@op(aten.linear_backward.default)
def linear_backward(self, grad_output, weight, output_mask):
    over = tuple(range(self.ndim - 1))
    into_self = into_weight = into_bias = None
    if weight.ndim == 1:
        if output_mask[0]:
            into_self = grad_output[..., None] * jnp.conj(weight)
        if output_mask[1]:
            into_weight = contract(grad_output, jnp.conj(self), (over, over)).astype(weight.dtype)
    else:
        if output_mask[0]:
            into_self = contract(grad_output, jnp.conj(weight), ((grad_output.ndim - 1,), (0,))).astype(self.dtype)
        if output_mask[1]:
            into_weight = contract(grad_output, jnp.conj(self), (over, over)).astype(weight.dtype)
    if output_mask[2]:
        into_bias = jnp.sum(grad_output.astype(opmath(grad_output.dtype)), axis=over).astype(grad_output.dtype)
    return into_self, into_weight, into_bias


def _einsum(a, b, la, lb, lo):
    """A two-operand einsum whose axes of size 1 broadcast; accumulated, not cast back."""
    size = {}
    for names, x in ((la, a), (lb, b)):
        for n, s in zip(names, x.shape):
            size[n] = max(size.get(n, 1), s) if s != 0 and size.get(n) != 0 else 0

    def squeeze(x, names):
        drop = tuple(i for i, n in enumerate(names) if x.shape[i] == 1 and size[n] != 1)
        return jnp.squeeze(x, drop), "".join(n for i, n in enumerate(names) if i not in drop)

    a, la = squeeze(a, la)
    b, lb = squeeze(b, lb)
    # An axis of one operand alone which is summed away: sum it first, what is left is one contraction.
    for _ in range(2):
        alone = tuple(i for i, n in enumerate(la) if n not in lb and n not in lo)
        if alone:
            a = jnp.sum(a, axis=alone, dtype=a.dtype)
            la = "".join(n for i, n in enumerate(la) if i not in alone)
        a, b, la, lb = b, a, lb, la
    shared = [n for n in la if n in lb and n in lo]
    summed = [n for n in la if n in lb and n not in lo]
    out = contract(a, b, (tuple(map(la.index, summed)), tuple(map(lb.index, summed))),
                   (tuple(map(la.index, shared)), tuple(map(lb.index, shared))))
    have = "".join(shared) + "".join(n for n in la if n not in shared + summed) + "".join(
        n for n in lb if n not in shared + summed)
    return jnp.transpose(out, [have.index(n) for n in lo if n in have])


def _as_matrices(self, other):
    """Operands as batches of matrices, with the letters of their axes."""
    if self.ndim == 0 or other.ndim == 0:
        raise RuntimeError(f"both arguments to matmul need to be at least 1D, but they are {self.ndim}D and {other.ndim}D")
    a = self[None, :] if self.ndim == 1 else self
    b = other[:, None] if other.ndim == 1 else other
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"matmul: shapes {list(self.shape)} and {list(other.shape)} cannot be multiplied")
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    names = string.ascii_lowercase[: len(batch)]
    la = names[len(batch) - (a.ndim - 2):] + "IK"
    lb = names[len(batch) - (b.ndim - 2):] + "KJ"
    return a, b, la, lb, names, tuple(batch)


def _squeezed(shape, self, other):
    if other.ndim == 1:
        shape = shape[:-1]
    if self.ndim == 1:
        shape = shape[:-2] + shape[-1:] if other.ndim > 1 else shape[:-1]
    return shape


@op(aten.matmul.default)
def matmul(self, other):
    _same_dtype(self, other)
    a, b, la, lb, names, batch = _as_matrices(self, other)
    full = (*batch, a.shape[-2], b.shape[-1])
    out = _einsum(a, b, la, lb, names + "IJ").reshape(full)
    return out.reshape(_squeezed(full, self, other)).astype(self.dtype)


@op(aten.matmul_backward.default)
def matmul_backward(grad, self, other, mask):
    a, b, la, lb, names, batch = _as_matrices(self, other)
    g = grad.reshape(*batch, a.shape[-2], b.shape[-1])
    lg = names + "IJ"
    into_self = into_other = None
    if mask[0]:
        keep = "".join(n for n, s in zip(la, a.shape) if s != 1 or n in "IK")
        into_self = _einsum(g, jnp.conj(b), lg, lb, keep).reshape(self.shape).astype(self.dtype)
    if mask[1]:
        keep = "".join(n for n, s in zip(lb, b.shape) if s != 1 or n in "KJ")
        into_other = _einsum(jnp.conj(a), g, la, lg, keep).reshape(other.shape).astype(other.dtype)
    return into_self, into_other


@op(aten._trilinear.default)
def _trilinear(i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim=1):
    """Sum over ``sumdim`` of the product of three tensors, after inserting their missing axes."""
    n = i1.ndim + len(expand1)
    letters = string.ascii_lowercase[:n]
    dtype = i1.dtype
    spec = [("".join(x for i, x in enumerate(letters) if i not in e)) for e in (expand1, expand2, expand3)]
    out = "".join(x for i, x in enumerate(letters) if i not in sumdim)
    x = jnp.einsum(f"{spec[0]},{spec[1]},{spec[2]}->{out}", i1, i2, i3, preferred_element_type=accumulator(dtype))
    return x.astype(dtype)


# ---------------------------------------------------------------- distances


def _squared_distance_by_product(x1, x2):
    batch = tuple(range(x1.ndim - 2))
    dot_ = lax.dot_general(x1, x2, (((x1.ndim - 1,), (x1.ndim - 1,)), (batch, batch)), precision=lax.Precision.HIGHEST)
    sq1, sq2 = jnp.sum(x1 * x1, -1)[..., :, None], jnp.sum(x2 * x2, -1)[..., None, :]
    return jnp.maximum(sq1 + sq2 - 2 * dot_, 0)


def _norm(diff, p, axis=-1):
    size = jnp.abs(diff)
    if p == 0:
        return jnp.sum((size != 0).astype(diff.dtype), axis)
    if p == 1:
        return jnp.sum(size, axis)
    if p == 2:
        return jnp.sqrt(jnp.sum(diff * diff, axis))
    if p == float("inf"):
        return jnp.max(size, axis, initial=0)
    return jnp.power(jnp.sum(jnp.power(size, p), axis), 1 / p)


@op(aten._cdist_forward.default, static=("p",))
def _cdist_forward(x1, x2, p, compute_mode=None):
    batch = np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    x1 = jnp.broadcast_to(x1, (*batch, *x1.shape[-2:]))
    x2 = jnp.broadcast_to(x2, (*batch, *x2.shape[-2:]))
    if p == 2 and (compute_mode == 1 or not compute_mode and max(x1.shape[-2], x2.shape[-2]) > 25):
        return jnp.sqrt(_squared_distance_by_product(x1, x2))
    return _norm(x1[..., :, None, :] - x2[..., None, :, :], p)


def _norm_slope(diff, dist, grad, p):
    """Derivative of the p-norm ``dist`` of ``diff`` times ``grad``; zero where torch says so."""
    if p == 0:
        return jnp.zeros_like(diff)
    sign = jnp.sign(diff)
    if p == 1:
        return grad * sign
    if p == float("inf"):
        return jnp.where(jnp.abs(diff) == dist, grad * sign, 0)
    flat = dist == 0
    safe = jnp.where(flat, 1, dist)
    if p == 2:
        return jnp.where(flat, 0, grad * diff / safe)
    size = jnp.abs(diff)
    power = jnp.where(size == 0, 0, jnp.power(jnp.where(size == 0, 1, size), p - 1))
    return jnp.where(flat, 0, sign * power * grad / jnp.power(safe, p - 1))


@op(aten._cdist_backward.default, static=("p",))
def _cdist_backward(grad, x1, x2, p, cdist):
    if 0 in x1.shape or 0 in x2.shape:
        return jnp.zeros_like(x1)
    if p == 2 and x1.shape[-2] * x2.shape[-2] > 625:
        # diff / dist summed over x2's rows, as two products instead of a rank-3 difference
        ratio = jnp.where(cdist == 0, 0, grad / jnp.where(cdist == 0, 1, cdist))
        out = x1 * jnp.sum(ratio, -1)[..., None] - jnp.matmul(ratio, x2, precision=lax.Precision.HIGHEST)
    else:
        diff = x1[..., :, None, :] - x2[..., None, :, :]
        out = jnp.sum(_norm_slope(diff, cdist[..., None], grad[..., None], p), -2)
    extra = out.ndim - x1.ndim
    out = jnp.sum(out, tuple(range(extra))) if extra else out
    folded = tuple(i for i in range(out.ndim) if x1.shape[i] == 1 and out.shape[i] != 1)
    return jnp.sum(out, folded, keepdims=True) if folded else out


@op(aten._pdist_forward.default, static=("p",))
def _pdist_forward(self, p=2.0):
    i, j = np.triu_indices(self.shape[0], 1)
    return _norm(self[i] - self[j], p)


@op(aten._pdist_backward.default, static=("p",))
def _pdist_backward(grad, self, p, pdist):
    i, j = np.triu_indices(self.shape[0], 1)
    slope = _norm_slope(self[i] - self[j], pdist[:, None], grad[:, None], p)
    return jnp.zeros_like(self).at[i].add(slope).at[j].add(-slope)
