"""Helpers of reductions, scans and sorts: axes as torch reads ``dim``, and accumulation dtypes."""

import numpy as np

from ..dtypes import cast, opmath, to_jax


def axis(dim, ndim, name=""):
    """One non-negative axis; IndexError as in torch. A 0-d tensor takes 0 and -1."""
    n = max(ndim, 1)
    if not -n <= dim < n:
        raise IndexError(f"{name}Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})")
    return dim % n


def axes(dim, ndim, name=""):
    """The axes to reduce: None and an empty list mean all of them."""
    if dim is None or dim == ():
        return tuple(range(ndim))
    out = tuple(axis(d, ndim, name) for d in ((dim,) if isinstance(dim, int) else dim))
    if len(set(out)) != len(out):
        raise RuntimeError(f"{name}dim {max(out, key=out.count)} appears multiple times in the list of dims")
    return out if ndim else ()


def accumulator(x, dtype=None, integers=np.int64):
    """(x in the dtype it is summed in, the result's dtype): integers widen, halves sum in float32."""
    if dtype is not None:
        result = to_jax(dtype)
    else:
        result = np.dtype(integers) if x.dtype.kind in "iub" else x.dtype
    x = cast(x, result)
    return cast(x, opmath(result)), result


def nonempty(x, ax, name):
    """Refuse to take an extreme of nothing, with torch's IndexError."""
    for a in ax:
        if x.shape[a] == 0:
            raise IndexError(f"{name}(): Expected reduction dim {a} to have non-zero size.")


def at_least_1d(x):
    """(x with one axis at least, whether it was 0-d): scans and sorts of a 0-d tensor act on one element."""
    return (x.reshape(1), True) if x.ndim == 0 else (x, False)


def widen(index):
    """Indices as torch returns them: int64, computed in int32 where they fit."""
    return cast(index, np.int64)
