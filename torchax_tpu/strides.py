"""Strided reads and writes of a dense array, without a gather wherever XLA can slice.

A view is (size, stride, offset) over a storage's elements in memory order, exactly torch's
metadata. `plan` finds a shape ("frame") into which memory can be reshaped so that the view is
a box of it: slice, step, transpose, broadcast. Start offsets stay runtime values, so that
x[0], x[1], ... share one compiled program. Overlapping or irregular views fall back to
gather and scatter by computed indices. No project imports.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax


def contiguous_strides(size):
    """Row-major strides, in elements; size-0 dims count as 1, as in torch."""
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def extent(size, stride, offset=0):
    """Elements of memory which a view needs (0 for an empty one)."""
    if 0 in size:
        return 0
    return offset + 1 + sum((n - 1) * s for n, s in zip(size, stride))


_tokens = {}


def distinct(size, stride):
    """Whether it is certain that no two elements of a view share memory."""
    need = 1
    for s, n in sorted((s, n) for n, s in zip(size, stride) if n != 1):
        if s < need:
            return False
        need = s * (n - 1) + need
    return True


@functools.lru_cache(maxsize=16384)
def result_order(shape, operands):
    """Axes order of memory for a pointwise result of ``shape``, or None for row-major; torch's TensorIterator rule.

    ``operands`` are (size, stride) pairs, in argument order.
    """
    n = len(shape)
    padded = []
    for size, stride in operands:
        lead = n - len(size)
        padded.append([0] * lead + [0 if a == 1 and b != 1 else s for a, b, s in zip(size, shape[lead:], stride)])
    order = list(range(n - 1, -1, -1))  # fastest first

    def compare(a, b):
        for stride in padded:
            if stride[a] == 0 or stride[b] == 0:
                continue
            if stride[a] != stride[b]:
                return -1 if stride[a] < stride[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    if not all(_row_major(size, stride) for size, stride in operands if size == shape) or any(
            size != shape for size, _ in operands):
        for i in range(1, n):
            at = i
            for j in range(i - 1, -1, -1):
                c = compare(order[j], order[at])
                if c > 0:
                    order[j], order[at] = order[at], order[j]
                    at = j
                elif c < 0:
                    break
    order = tuple(reversed(order))
    return None if order == tuple(range(n)) else order


def _row_major(size, stride):
    return all(n == 1 or s == c for n, s, c in zip(size, stride, contiguous_strides(size)))


class Plan:
    """How to read and write a view of memory with ``numel`` elements.

    Attributes:
        frame: shape memory is reshaped to; None for the gather plan.
        takes: slice length per frame dim, in frame elements.
        steps: stride within the slice per frame dim.
        dims: frame dim per view dim, None for broadcast (stride 0 or size 1).
        starts: start per frame dim (runtime values; all other fields make the key).
        start_arrays: the starts that move, as device arrays, once somebody has made them.
    """

    __slots__ = ("frame", "takes", "steps", "dims", "size", "stride", "starts", "moving", "key", "token",
                 "start_arrays")

    def __init__(self, frame, takes, steps, dims, size, stride, starts):
        self.start_arrays = None
        self.frame, self.takes, self.steps, self.dims = frame, takes, steps, dims
        self.size, self.stride, self.starts = size, stride, starts
        # Only dims that are cut need a start at run time.
        self.moving = () if frame is None else tuple(j for j, (n, t) in enumerate(zip(frame, takes)) if t != n)
        self.key = (frame, takes, steps, dims, size, stride if frame is None else None)
        # A small number that stands for (key, moving): cheap in a dict key.
        self.token = _tokens.setdefault((self.key, self.moving), len(_tokens))

    def run_starts(self):
        """The starts that the compiled read or write takes as arguments."""
        return self.starts if self.frame is None else tuple(self.starts[j] for j in self.moving)


@functools.lru_cache(maxsize=65536)
def plan(shape, size, stride, offset):
    """The plan for a view of memory laid out as a dense array of ``shape``."""
    numel = math.prod(shape)
    if 0 in size:
        return Plan(None, None, None, None, size, stride, (0,))
    box = _box(numel, shape, size, stride, offset)
    if box is None:
        return Plan(None, None, None, None, size, stride, (offset,))
    return Plan(*box[:4], size, stride, box[4])


def _box(numel, shape, size, stride, offset):
    live = sorted((i for i in range(len(size)) if size[i] > 1 and stride[i] > 0), key=lambda i: (-stride[i], i))
    # Breakpoints: frame dim j spans [points[j + 1], points[j]) elements of memory.
    points = sorted({numel, 1, *(s for s in contiguous_strides(shape) if numel % s == 0)}, reverse=True)
    for i in live:
        t = stride[i]
        above = min(p for p in points if p >= t) if t <= numel else 0
        below = max(p for p in points if p <= t) if above else 0
        if above and above != t and above % t == 0 and t % below == 0:
            points = sorted({*points, t}, reverse=True)
    for _ in range(len(points) + 1):
        bad = None
        starts, rest = [], offset
        for below in points[1:]:
            starts.append(rest // below)
            rest %= below
        dims, used = {}, set()
        for i in live:
            j = max((k for k in range(len(points) - 1) if points[k + 1] <= stride[i]), key=lambda k: points[k + 1],
                    default=None)
            if j is None or stride[i] % points[j + 1] or j in used:
                return None
            n, q = points[j] // points[j + 1], stride[i] // points[j + 1]
            if starts[j] + (size[i] - 1) * q >= n:
                bad = j
                break
            used.add(j)
            dims[i] = (j, q)
        if bad is None:
            break
        if bad == 0:
            return None
        points = points[:bad] + points[bad + 1:]  # the run crosses this breakpoint: merge the two dims
    else:
        return None
    frame = tuple(points[j] // points[j + 1] for j in range(len(points) - 1))
    if any(points[j] % points[j + 1] for j in range(len(points) - 1)):
        return None
    takes, steps = [1] * len(frame), [1] * len(frame)
    for i, (j, q) in dims.items():
        takes[j], steps[j] = (size[i] - 1) * q + 1, q
    return frame, tuple(takes), tuple(steps), tuple(dims[i][0] if i in dims else None for i in range(len(size))), \
        tuple(starts)


def _indices(size, stride, start):
    index = jnp.asarray(start, np.int32)
    for i, (n, s) in enumerate(zip(size, stride)):
        shape = [1] * len(size)
        shape[i] = n
        index = index + (np.arange(n, dtype=np.int32) * np.int32(s)).reshape(shape)
    return jnp.broadcast_to(index, size)


def _all_starts(frame, moving, starts):
    if _static(starts):
        full = [0] * len(frame)
    else:  # all of one dtype, in 64-bit mode too
        full, starts = [np.int32(0)] * len(frame), [jnp.asarray(s, np.int32) for s in starts]
    for j, s in zip(moving, starts):
        full[j] = s
    return full


def _static(starts):
    return all(isinstance(s, (int, np.integer)) for s in starts)


def read(key, moving, array, *starts):
    """Traceable read: ``array`` holds memory in order; returns an array of the view's size."""
    frame, takes, steps, dims, size, stride = key
    if 0 in size:
        return jnp.zeros(size, array.dtype)
    if frame is None:
        return jnp.reshape(array, (-1,)).at[_indices(size, stride, starts[0])].get(mode="promise_in_bounds")
    box = jnp.reshape(array, frame)
    full = _all_starts(frame, moving, starts)
    if _static(full):
        box = lax.slice(box, full, [s + t for s, t in zip(full, takes)], steps)
    else:
        box = lax.dynamic_slice(box, full, takes)
        if any(q != 1 for q in steps):
            box = lax.slice(box, [0] * len(frame), takes, steps)
    order = [d for d in dims if d is not None]
    box = lax.squeeze(box, [j for j in range(len(frame)) if j not in order])
    remaining = sorted(order)
    box = lax.transpose(box, [remaining.index(d) for d in order])
    return lax.broadcast_in_dim(box, size, [i for i, d in enumerate(dims) if d is not None])


def replace(key, moving, perm, array, value, *starts):
    """Traceable write of a view of ``array``, whose memory runs through its axes in the order ``perm`` (None: row-major)."""
    ordered = array if perm is None else jnp.transpose(array, perm)
    out = write(key, moving, ordered, jnp.broadcast_to(value, key[4]), *starts)
    return out if perm is None else jnp.transpose(out, np.argsort(perm).tolist())


def write(key, moving, array, value, *starts):
    """Traceable write: memory with ``value`` (of the view's size) put in its place."""
    frame, takes, steps, dims, size, stride = key
    if 0 in size:
        return array
    if frame is None:
        flat = jnp.reshape(array, (-1,)).at[_indices(size, stride, starts[0])].set(value, mode="promise_in_bounds")
        return jnp.reshape(flat, array.shape)
    for i in reversed(range(len(dims))):
        if dims[i] is None:  # every copy of a broadcast element is the same element of memory
            value = lax.index_in_dim(value, 0, i, keepdims=False)
    order = [d for d in dims if d is not None]
    remaining = sorted(order)
    value = lax.transpose(value, [order.index(d) for d in remaining])
    lengths = [-(-t // q) for t, q in zip(takes, steps)]
    value = jnp.reshape(value, lengths)
    whole = jnp.reshape(array, frame)
    full = _all_starts(frame, moving, starts)
    if any(q != 1 for q in steps):
        old = lax.dynamic_slice(whole, full, takes)
        zero = jnp.zeros((), value.dtype)
        value = lax.pad(value, zero, [(0, t - ((n - 1) * q + 1), q - 1) for t, n, q in zip(takes, lengths, steps)])
        mask = np.ones(takes, bool)
        for j, q in enumerate(steps):
            if q != 1:
                shape = [1] * len(takes)
                shape[j] = takes[j]
                mask = mask & (np.arange(takes[j]) % q == 0).reshape(shape)
        value = jnp.where(mask, value, old)
    if tuple(takes) == frame:
        whole = value
    else:
        whole = lax.dynamic_update_slice(whole, value, full)
    return jnp.reshape(whole, array.shape)
