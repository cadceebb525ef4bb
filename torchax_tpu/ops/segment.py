"""Reductions over consecutive segments of an axis, given by lengths or offsets."""

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import cast, opmath
from ..registry import aten, op

_SEGMENTED = {
    "sum": jax.ops.segment_sum,
    "mean": jax.ops.segment_sum,
    "max": jax.ops.segment_max,
    "min": jax.ops.segment_min,
    "prod": jax.ops.segment_prod,
}
_EMPTY = {"sum": 0, "mean": np.nan, "max": -np.inf, "min": np.inf, "prod": 1}


def _plan(data, reduce, lengths, offsets, axis):
    """(data as (batch, position, rest), lengths as (batch, segment), segment of each position, shape of the result)."""
    if reduce not in _SEGMENTED:
        raise RuntimeError(f"segment_reduce(): unknown reduction {reduce!r}")
    if axis < 0 or axis >= data.ndim:
        raise RuntimeError(f"segment_reduce(): axis {axis} is out of range for data of shape {list(data.shape)}")
    if lengths is None and offsets is None:
        raise RuntimeError("segment_reduce(): Either lengths or offsets must be defined.")
    if offsets is None:
        ends = jnp.cumsum(lengths, axis=-1)
    else:
        ends, lengths = offsets[..., 1:], jnp.diff(offsets, axis=-1)
    segments = lengths.shape[-1]
    lead, positions = data.shape[:axis], data.shape[axis]
    if lengths.shape != (*lead, segments):
        raise RuntimeError(
            f"segment_reduce(): lengths or offsets of shape {list(lengths.shape)} don't fit data of shape "
            f"{list(data.shape)} at axis {axis}"
        )
    batch = int(np.prod(lead, dtype=np.int64))
    rows = ends.reshape(batch, segments)
    ids = jax.vmap(lambda e: jnp.searchsorted(e, jnp.arange(positions, dtype=e.dtype), side="right"))(rows)
    return (
        data.reshape(batch, positions, -1),
        lengths.reshape(batch, segments),
        ids,
        (*lead, segments, *data.shape[axis + 1 :]),
    )


@op(aten.segment_reduce.default)
def segment_reduce(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    x, lengths, ids, shape = _plan(data, reduce, lengths, offsets, axis)
    wide = opmath(x.dtype)
    start = cast(_EMPTY["sum" if reduce == "mean" else reduce] if initial is None else initial, wide)
    segments = lengths.shape[1]
    out = jax.vmap(lambda a, i: _SEGMENTED[reduce](a, i, num_segments=segments))(x.astype(wide), ids)
    empty = (lengths == 0)[..., None]
    if reduce in ("sum", "mean"):
        out = out + start
    elif reduce == "prod":
        out = out * start
    else:
        out = (jnp.maximum if reduce == "max" else jnp.minimum)(out, start)
    if reduce == "mean":
        out = jnp.where(
            empty, start if initial is not None else np.nan, out / jnp.maximum(lengths, 1)[..., None].astype(wide)
        )
    return out.reshape(shape).astype(data.dtype)


@op(aten._segment_reduce_backward.default)
def segment_reduce_backward(grad, output, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None):
    x, lengths, ids, _ = _plan(data, reduce, lengths, offsets, axis)
    wide = opmath(x.dtype)
    batch, segments = lengths.shape
    x = x.astype(wide)

    def spread(a):
        """Each segment's value at its positions; 0 behind the last segment."""
        return jax.vmap(lambda row, i: jnp.take(row, i, axis=0, mode="fill", fill_value=0))(a, ids)

    def total(a):
        return jax.vmap(lambda row, i: jax.ops.segment_sum(row, i, num_segments=segments))(a, ids)

    grad = grad.astype(wide).reshape(batch, segments, -1)
    output = output.astype(wide).reshape(grad.shape)
    if reduce == "mean":
        grad = grad / jnp.maximum(lengths, 1)[..., None].astype(wide)
    out = spread(grad)
    if reduce in ("max", "min"):
        chosen = (x == spread(output)) | jnp.isnan(x)
        count = total(chosen.astype(wide))
        out = jnp.where(chosen, spread(grad / jnp.maximum(count, 1)), 0)
    elif reduce == "prod":
        zeros = spread(total((x == 0).astype(wide)))
        others = jax.vmap(lambda a, i: jax.ops.segment_prod(a, i, num_segments=segments))(jnp.where(x == 0, 1, x), ids)
        others = spread(others if initial is None else others * cast(initial, wide))
        out = out * jnp.where(x == 0, jnp.where(zeros == 1, others, 0), spread(output) / jnp.where(x == 0, 1, x))
    return out.reshape(data.shape).astype(data.dtype)
