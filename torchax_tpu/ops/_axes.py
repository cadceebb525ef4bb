"""Dimension and index helpers that the shape and indexing families share."""

import jax.numpy as jnp
import numpy as np


def axis(dim, ndim):
    """A non-negative dimension; IndexError as in torch. 0-d tensors have one dimension, number 0."""
    n = max(ndim, 1)
    if not -n <= dim < n:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})")
    return dim % n


def axes(dims, ndim):
    """Non-negative dimensions without repeats."""
    out = [axis(d, ndim) for d in dims]
    if len(set(out)) != len(out):
        raise RuntimeError(f"dim {sorted(out)} appears multiple times in the list of dims")
    return out


def bounded(index, n, negative=False):
    """An int32 (if ``n`` allows) index in [0, n]: ``n`` stands for whatever is out of range."""
    if index.dtype.kind not in "iu":
        # x[index] takes negative indices; gather and its kin don't, and refuse other dtypes by another class
        raise (IndexError if negative else RuntimeError)(
            f"tensors used as indices must be long, int, byte or bool tensors, got {index.dtype}")
    if index.dtype.itemsize < 4:
        index = index.astype(np.int32)
    if index.dtype.kind == "u":
        index = jnp.minimum(index, index.dtype.type(n))
    else:
        # Minimum and maximum come before the cast: a huge int64 must not wrap into the range.
        lo = -n if negative else 0
        index = jnp.where((index < lo) | (index >= n), index.dtype.type(n), index)
    if n < 2**31 - 1:
        index = index.astype(np.int32)
    return jnp.where(index < 0, index + index.dtype.type(n), index) if negative else index


def same_dtype(name, a, b):
    """RuntimeError if a write's source has another dtype than its target."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"{name}: expected self and source to have the same dtype, got {a.dtype} and {b.dtype}")
