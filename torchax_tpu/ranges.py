"""torch.arange: its length depends on its values, so it is worked out before any program runs.

In eager mode numpy computes the values and they are copied in: no new end or start compiles
anything. Under a trace the same values come from an iota, with nothing baked into the program.
"""

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from . import convert, dtypes, narrow, storage
from . import tensor as T
from .registry import aten, special
from .results import write_out
from .storage import tracing


def _arange(start, end, step, dtype, device):
    integers = all(isinstance(v, int) for v in (start, end, step))
    if dtype is None:
        dtype = torch.int64 if integers else torch.get_default_dtype()
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if not all(math.isfinite(v) for v in (start, end)):
        raise RuntimeError(f"unsupported range: {start} -> {end}")
    if (step > 0) != (end >= start) and end != start:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    want = dtypes.to_jax(dtype)
    if want.kind == "b":
        raise NotImplementedError('"arange" not implemented for torch.bool')
    if want.kind in "iu":
        start, end, step = int(start), int(end), int(step)
        if step == 0:
            raise ValueError("step must be nonzero")
        length = -((start - end) // step)
    else:
        length = math.ceil((end - start) / step)
    length = max(length, 0)
    place = T.place(device)
    if tracing.active is not None:
        return T.wrap(_traced(active_number(start), active_number(step), length, want), place)
    # torch steps in double precision, and rounds once
    values = np.arange(length, dtype=np.int64 if want.kind in "iu" else np.float64) * step + start
    return T.wrap(convert.numpy_to_array(values.astype(want), place.index), place)


def active_number(value):
    """A Python number, or the traced one it stands for."""
    return tracing.active.number(value)


def _traced(start, step, length, want):
    wide = want.kind not in "iu" or want.itemsize > 4
    with storage.x64(wide):
        compute = np.dtype(np.float64) if want.kind not in "iu" else want if want.itemsize > 4 else np.dtype(np.int32)
        compute, start, step = narrow.stored(compute), narrow.bare(start), narrow.bare(step)
        values = dtypes.cast(lax.iota(np.int32, length), compute) * jnp.asarray(step, compute) + jnp.asarray(start, compute)
        return narrow.hold(dtypes.cast(values, narrow.stored(want)), want)


@special(aten.arange.default)
def arange(end, dtype=None, layout=None, device=None, pin_memory=None):
    return _arange(0, end, 1, dtype, device)


@special(aten.arange.start)
def arange_start(start, end, dtype=None, layout=None, device=None, pin_memory=None):
    return _arange(start, end, 1, dtype, device)


@special(aten.arange.start_step)
def arange_start_step(start, end, step=1, dtype=None, layout=None, device=None, pin_memory=None):
    return _arange(start, end, step, dtype, device)


@special(aten.arange.start_out)
def arange_out(start, end, step=1, out=None):
    write_out(out, storage.read(_arange(start, end, step, out.dtype, out.device)), aten.arange.start_out)
    return out


@special(aten.range.out)
def range_out(start, end, step=1, out=None):
    """torch.range: its end belongs to it."""
    if step == 0:
        raise RuntimeError("step must be nonzero")
    count = math.floor((end - start) / step) + 1
    if count < 1:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    values = _arange(0, count, 1, torch.int64, out.device).to(torch.float64) * step + start
    write_out(out, storage.read(values.to(out.dtype)), aten.range.out)
    return out
