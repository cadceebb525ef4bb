"""Index arguments on their way to the compiled ops: CPU index tensors, boolean masks, range checks."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import config, errors, fastpath, narrow, storage
from . import tensor as T
from .handlers import make_handler
from .ops import indexing
from .registry import SPECIAL, TABLE, Op, aten, mutated_args

_MASKS = frozenset({torch.bool, torch.uint8})
_masked_write = narrow.jit(indexing.masked_write, (2, 4))
_masked_rows = narrow.jit(indexing.masked_rows, (2, 4))


def _plain(indices):
    """Whether every index is an integer tensor on the device (the compiled path takes them as they are)."""
    for t in indices:
        if t is not None and (type(t) is not T.Tensor or t.dtype in _MASKS):
            return False
    return True


def _on_device(self, indices, func):
    if not isinstance(self, T.Tensor):
        raise RuntimeError(  # noqa: TRY004  (torch's class)
            f"indices should be either on cpu or on the same device as the indexed tensor ({self.device}) ({func})"
        )
    device = self._cell.device
    return [t if t is None or isinstance(t, T.Tensor) else t.to(device) for t in indices]


def _check_mask(self, mask, at):
    for k, n in enumerate(mask.shape):
        if at + k >= self.dim():
            raise IndexError(f"too many indices for tensor of dimension {self.dim()}")
        if n != self.shape[at + k]:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {k} does not match the shape of the "
                f"indexed tensor {list(self.shape)} at index {at + k}"
            )


def _true(mask, func):
    """Integer index tensors of a mask's true elements."""
    array = storage.read(mask)
    if narrow.is_traced(array):
        raise errors.TraceError(
            f"{func} with a boolean mask has a result whose shape depends on values; it can't be part "
            "of a traced program. Use torch.where(mask, x, 0), or x[mask] = scalar."
        )
    device = mask._cell.device
    return [T.wrap(a, device) for a in indexing.find_true(jnp.reshape(narrow.bare(array), mask.shape or (1,)))]


def expand(self, indices, func):
    """Index tensors without masks; the mask's dims become one integer index each, as in torch."""
    out = []
    for t in _on_device(self, indices, func):
        if t is None or t.dtype not in _MASKS:
            out.append(t)
            continue
        if t.dim() == 0:
            raise IndexError(f"{func}: 0-dim masks take part through unsqueeze")
        _check_mask(self, t, len(out))
        out.extend(_true(t, func))
    return out


def _derived(func):
    """The compiled handler of an overload, leaving aside that it is special."""
    op = TABLE.get(func)
    if op is None:
        base = TABLE[aten._index_put_impl.default if "impl" in str(func) else aten.index_put.default]
        op = Op(func, base.impl, origin="derived")
    return fastpath.make(op, make_handler(op))


def _reader(func):
    run = _derived(func)

    tensor, masks = T.Tensor, _MASKS

    def index(self, indices):
        if not _plain(indices) or type(self) is not tensor:
            indices = expand(self, indices, func)
        if config.check_indices:
            _check_all(self, indices)
        return run((self, indices), {})

    def handler(args, kwargs):  # x[i] with one index tensor, the shortest way
        if not kwargs and len(args) == 2 and len(args[1]) == 1 and not config.check_indices:
            (t,) = args[1]
            if type(t) is tensor and t.dtype not in masks and type(args[0]) is tensor:
                return run(args, kwargs)
        return index(*args, **kwargs)

    index.handler = handler
    return index


def _writer(func):
    run = _derived(func)
    inplace = bool(mutated_args(func))

    def index_put(self, indices, values, accumulate=False, unsafe=False):
        if not _plain(indices) or type(self) is not T.Tensor:
            indices = _on_device(self, indices, func)
            masks = [d for d, t in enumerate(indices) if t is not None]
            if len(masks) == 1 and indices[masks[0]].dtype in _MASKS and indices[masks[0]].dim():
                out = _write_masked(self, indices[masks[0]], masks[0], values, accumulate, func)
                if out is not None:
                    if not inplace:
                        return T.wrap(out, self._cell.device)
                    storage.write(self, out)
                    return self
            indices = expand(self, indices, func)
        if config.check_indices:
            _check_all(self, indices)
        return run((self, indices, values, accumulate), {})

    return index_put


def _write_masked(self, mask, lead, values, accumulate, func):
    """The new array of ``x[..., mask] = values`` if it needs no values of the mask, else None."""
    _check_mask(self, mask, lead)
    if values.dtype != self.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {self.dtype} for the "
            f"destination and {values.dtype} for the source."
        )
    array = storage.read(self)
    at = values.dim() - (self.dim() - lead - mask.dim()) - 1
    if at < 0 or values.shape[at] == 1 and at <= lead:
        write = _masked_write
    elif narrow.is_traced(storage.read(mask)):
        write = _masked_rows
    else:
        return None
    new = storage.read(values) if isinstance(values, T.Tensor) else T.foreign(values, self._cell.device, func)
    with storage.x64(self._cell.wide):
        try:
            return write(array, storage.read(mask), lead, new, bool(accumulate))
        except (ValueError, TypeError) as e:
            raise RuntimeError(
                f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to the "
                f"places of a mask of shape {list(mask.shape)} in {list(self.shape)}"
            ) from e


for _func in (aten.index.Tensor, aten._unsafe_index.Tensor):
    SPECIAL[_func] = _reader(_func)
for _func in (
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
):
    SPECIAL[_func] = _writer(_func)


# ---------------------------------------------------------------- x[i] with a traced 0-d i

# torch's own indexing asks a 0-d integer tensor for its value; under a trace it has none yet.


def _number(x):
    return type(x) is T.Tensor and x.dim() == 0 and not x.is_floating_point() and x.dtype not in _MASKS


def _parts(self, key):
    """(view with the basic parts of the key applied, 0-d indices per dim, other index tensors per dim), or None."""
    key = key if isinstance(key, tuple) else (key,)
    if not any(map(_number, key)) or any(
        isinstance(k, (list, bool)) or isinstance(k, torch.Tensor) and k.dtype in _MASKS for k in key
    ):
        return None
    if not any(k is Ellipsis for k in key):
        key = (*key, Ellipsis)
    basic = tuple(slice(None) if isinstance(k, torch.Tensor) else k for k in key)
    view, numbers, others, d = _getitem(self, basic), {}, {}, 0
    for k in key:
        if k is Ellipsis:
            d += self.dim() - sum(e is not None and e is not Ellipsis for e in key)
        elif not isinstance(k, int):
            if isinstance(k, torch.Tensor):
                (numbers if _number(k) else others)[d] = k
            d += 1
    return view, numbers, others


def _listed(places):
    return [places.get(d) for d in range(max(places) + 1)]


def getitem(self, key):
    """``x[key]``; a 0-d integer tensor in the key stays on the device while a program is traced."""
    parts = None if storage.tracing.active is None else _parts(self, key)
    if parts is None:
        return _getitem(self, key)
    view, numbers, others = parts
    out = aten.index(view, _listed(numbers))
    if others:
        out = aten.index(out, _listed({d - sum(n < d for n in numbers): t for d, t in others.items()}))
    return out


_BASIC = frozenset({int, slice, type(None), type(...)})
_SMALL = range(-128, 128)  # every integer dtype but uint8 and bool takes these


def _fills(self, key, value):
    """Whether ``x[key] = value`` is a view filled with a number that its dtype surely takes."""
    kind = type(value)
    if self._view is not None and 0 in self._view.stride:  # fill_ may write an expanded tensor, an assignment may not
        return False
    if kind is float and -6e4 < value < 6e4 and self.dtype.is_floating_point or kind is int and value in _SMALL and self.dtype in _TAKES_SMALL:
        return type(key) in _BASIC or type(key) is tuple and _BASIC.issuperset(map(type, key))
    return False


_TAKES_SMALL = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                          torch.int16, torch.int8, torch.complex64, torch.complex128})


def setitem(self, key, value):
    """``x[key] = value``, likewise."""
    if _fills(self, key, value):  # two ops, where torch makes five: it makes a tensor of the number and expands that
        getitem(self, key).fill_(value)
        return
    parts = None if storage.tracing.active is None else _parts(self, key)
    if parts is None or parts[2]:
        return _setitem(self, key, value)
    view, numbers, _ = parts
    value = (
        value.to(self.dtype)
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=self.dtype, device=self.device)
    )
    aten.index_put_(view, _listed(numbers), value)


_getitem, _setitem = torch.Tensor.__getitem__, torch.Tensor.__setitem__
T.Tensor.__getitem__, T.Tensor.__setitem__ = getitem, setitem


def _no_sequence(cls):
    """Make C's PySequence_Check say of our tensors what it says of torch's: that they are none.

    A `__getitem__` written in Python fills the type's sequence slot as well; torch.tensor([loss, loss])
    then takes 0-d tensors for lists.
    """
    get_slot = ctypes.pythonapi.PyType_GetSlot
    get_slot.restype, get_slot.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    word = ctypes.sizeof(ctypes.c_void_p)
    table = ctypes.c_void_p.from_address(id(cls) + 13 * word).value  # PyTypeObject.tp_as_sequence
    slot = ctypes.c_void_p.from_address(table + 3 * word)  # PySequenceMethods.sq_item
    if slot.value == get_slot(cls, 44):  # Py_sq_item: the layout is the one we think it is
        slot.value = None


_no_sequence(T.Tensor)


# ---------------------------------------------------------------- range checks (config.check_indices)


@jax.jit
def _bad(index, lo, hi):
    wrong = (index < lo) | (index >= hi)
    return jnp.any(wrong), jnp.reshape(index, (-1,))[jnp.argmax(jnp.reshape(wrong, (-1,)))]


def check(index, n, dim, negative=True):
    """OutOfRangeError if an index tensor holds a value out of range; nothing under a trace."""
    array = storage.read(index) if isinstance(index, T.Tensor) else None
    if array is None or narrow.is_traced(array) or not array.size or array.dtype.kind not in "iu":
        return
    array = narrow.bare(array)
    with storage.x64(array.dtype.itemsize == 8):
        wrong, value = _bad(array, np.array(-n if negative else 0, np.int32), np.array(n, np.int32))
    if wrong:
        raise errors.OutOfRangeError(f"index {int(value)} is out of bounds for dimension {dim} with size {n}")


def _check_all(self, indices):
    for d, t in enumerate(indices):
        if t is not None:
            check(t, self.shape[d], d)


# op name -> (index argument, whether negative indices count from the end); the dimension is ``dim``.
_ALONG = {
    "gather": ("index", False),
    "scatter": ("index", False),
    "scatter_add": ("index", False),
    "scatter_reduce": ("index", False),
    "index_select": ("index", False),
    "index_add": ("index", False),
    "index_copy": ("index", False),
    "index_fill": ("index", True),
    "index_reduce": ("index", False),
}
_FLAT = {"take": ("index", True), "put": ("index", True)}
_ROWS = {
    "embedding": ("weight", "indices"),
    "_embedding_bag": ("weight", "indices"),
    "_embedding_bag_forward_only": ("weight", "indices"),
    "embedding_renorm": ("self", "indices"),
}


def checked(func, handler):
    """``handler`` with the range check of config.check_indices in front, for the ops that take index tensors."""
    name = func._schema.name.split("::")[1].removesuffix("_")
    if name not in _ALONG and name not in _FLAT and name not in _ROWS:
        return handler
    names = [a.name for a in func._schema.arguments]

    def run(args, kwargs):
        if config.check_indices:
            given = dict(zip(names, args)) | kwargs
            if name in _ALONG:
                what, negative = _ALONG[name]
                shape, dim = given["self"].shape, given["dim"]
                check(given[what], shape[dim] if shape else 1, dim, negative)
            elif name in _FLAT:
                check(given["index"], given["self"].numel(), 0)
            else:
                weight, what = _ROWS[name]
                check(given[what], given[weight].shape[0], 0, False)
        return handler(args, kwargs)

    return run
