"""config.int64 = "narrow": int64, uint64, float64 and complex128 tensors held, and computed, in 32 bits.

Such a tensor keeps its torch dtype; its storage cell holds a `Narrow`: an array of the narrow dtype which says that it
stands for the wide one. A program that meets one runs on the narrow arrays, and what torch dtypes its results have is
asked of the same function on wide abstract values. Whatever is not 64-bit takes the usual ways.
"""

import functools
import warnings

import jax
import numpy as np

from . import config
from .dtypes import NARROW, WIDE, narrowing
from .errors import UnsupportedOpError

ON = config.int64 == "narrow"

if ON:  # every wide dtype an op names is one here
    warnings.filterwarnings("ignore", "Explicitly requested dtype")


@jax.tree_util.register_pytree_node_class
class Narrow:
    """An array of 32 bits that stands for one of ``dtype``."""

    __slots__ = ("array", "dtype", "__weakref__")
    weak_type = False

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype

    shape = property(lambda self: self.array.shape)
    ndim = property(lambda self: self.array.ndim)
    size = property(lambda self: self.array.size)
    aval = property(lambda self: self)  # shape and dtype, as of a jax.Array

    def devices(self):
        return self.array.devices()

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array).astype(self.dtype if dtype is None else dtype)

    def tree_flatten(self):
        return (self.array,), self.dtype

    @classmethod
    def tree_unflatten(cls, dtype, children):
        return cls(children[0], dtype)


class _Off:
    def __enter__(self):
        return None

    def __exit__(self, *exc):
        return None


_OFF = _Off()


def x64(wide):
    """A context with JAX's 64-bit mode on when ``wide`` asks for it, else one that does nothing."""
    return jax.enable_x64(True) if wide and not ON else _OFF


def bare(array):
    """The jax.Array (or tracer) itself."""
    return array.array if type(array) is Narrow else array


def hold(array, dtype):
    """``array`` as what stands for ``dtype``; inside a function that is being traced arrays are plain."""
    return Narrow(bare(array), dtype) if ON and dtype in WIDE and not narrowing.inside else array


def stored(dtype):
    """The dtype in which ``dtype`` is held, here and now."""
    return NARROW.get(dtype, dtype) if ON and (narrowing.active or not narrowing.inside) else dtype


def number(value):
    """A Python number from the host: the extremes of int64, which often mean infinity, become those of int32."""
    return _EXTREMES.get(value, value) if ON and type(value) is int else value


_EXTREMES = {np.iinfo(np.int64).max: np.iinfo(np.int32).max, np.iinfo(np.int64).min: np.iinfo(np.int32).min}


def is_traced(array):
    """Whether an array has no values yet, because a program is being traced."""
    return isinstance(bare(array), jax.core.Tracer)


def from_numpy(values):
    """Numpy values in the dtype they are held in; OverflowError for integers that 32 bits can't hold."""
    held = stored(values.dtype)
    if held != values.dtype and held.kind in "iu" and values.size:
        bounds = np.iinfo(held)
        if values.dtype == np.int64:
            for extreme, to in _EXTREMES.items():
                values = np.where(values == extreme, np.int64(to), values)
        if values.min() < bounds.min or values.max() > bounds.max:
            raise OverflowError(f"a value of {values.dtype} ({values.min()} to {values.max()}) doesn't fit into 32 bits, and "
                                "torchax_tpu.config.int64 is 'narrow'; keep it on the CPU, or use int64 = 'wide'")
    return values.astype(held)


def jit(function, static_argnums=()):
    """`jax.jit`, for functions that may be given or may give 64-bit arrays."""
    return _Jit(function, static_argnums) if ON else jax.jit(function, static_argnums=static_argnums)


class _Jit:
    """A function compiled once per signature: narrow arrays in, results that know what they stand for."""

    def __init__(self, function, static_argnums=(), compiled=True):
        self.function, self.static, self.compiled, self.cache = function, static_argnums, compiled, {}

    def __call__(self, *args):
        if narrowing.inside:  # an op inside one that is being traced: it is traced with it
            with jax.enable_x64(not narrowing.active):
                return self.function(*args)
        if not self.compiled:
            return self._widened(args)
        key = tuple(a if i in self.static else _kind(a) for i, a in enumerate(args))
        entry = self.cache.get(key)
        if entry is None:
            entry = self.cache[key] = self._prepare(args)
        call, wanted = entry
        out = call(*[number(bare(a)) for i, a in enumerate(args) if i not in self.static])
        return jax.tree.map(hold, out, wanted)

    def _prepare(self, args):
        """(compiled function of the arrays, dtypes that its results stand for)."""
        arrays = [a for i, a in enumerate(args) if i not in self.static]

        def whole(*given, active=False):
            given = iter(given)
            outer = narrowing.active, narrowing.inside
            narrowing.active, narrowing.inside = active, True
            try:
                return self.function(*[a if i in self.static else next(given) for i, a in enumerate(args)])
            finally:
                narrowing.active, narrowing.inside = outer

        with jax.enable_x64(True):
            logical = jax.eval_shape(whole, *map(_wide, arrays))
        wanted = jax.tree.map(lambda s: s.dtype, logical)

        def narrow(*given):
            return jax.tree.map(_fit, whole(*given, active=True), logical)

        return jax.jit(narrow), wanted

    def _widened(self, args):
        """Run on 64-bit copies: a function whose result shapes depend on values can't be asked for its dtypes first."""
        with jax.enable_x64(True):
            out = self.function(*[a.array.astype(a.dtype) if type(a) is Narrow else a for a in args])
            return jax.tree.map(lambda o: Narrow(o.astype(NARROW[o.dtype]), o.dtype) if o.dtype in WIDE else o, out)


def _kind(a):
    """What of an argument makes another program: shape and dtypes, or the type of a number (while a program is traced)."""
    return (a.shape, a.dtype, getattr(a, "weak_type", False)) if hasattr(a, "dtype") else type(a)


_NUMBERS = {int: np.dtype(np.int64), float: np.dtype(np.float64), complex: np.dtype(np.complex128)}


def _wide(array):
    if not hasattr(array, "dtype"):
        return jax.ShapeDtypeStruct((), _NUMBERS[type(array)], weak_type=True)
    weak = getattr(array, "weak_type", False)
    dtype = _WEAK.get(array.dtype, array.dtype) if weak else array.dtype
    return jax.ShapeDtypeStruct(array.shape, dtype, weak_type=weak)


_WEAK = {v: k for k, v in NARROW.items()}


def _fit(out, logical):
    if out.shape != logical.shape:
        raise UnsupportedOpError("an op looks at the bits of a 64-bit tensor, and torchax_tpu.config.int64 is 'narrow'")
    want = NARROW.get(logical.dtype, logical.dtype)
    return out if out.dtype == want else out.astype(want)


def program(call):
    """``call``, an op's program (jitted, unless its results depend on values), for 64-bit arrays."""
    if ON:
        return _Jit(getattr(call, "__wrapped__", call), compiled=hasattr(call, "lower"))
    return functools.partial(_with_x64, call)


def _with_x64(call, *arrays):
    with jax.enable_x64(True):
        return call(*arrays)


def refuse_bits(have, want):
    """UnsupportedOpError for a view that shows a 64-bit tensor's bits as another type."""
    if ON and have != want and (have in WIDE or want in WIDE) and {have.name, want.name} != {"complex128", "float64"}:
        raise UnsupportedOpError(f"{have} viewed as {want}: torchax_tpu.config.int64 is 'narrow', so there are no 64 bits")


__all__ = ["ON", "Narrow", "bare", "from_numpy", "hold", "is_traced", "jit", "program", "refuse_bits", "stored", "x64"]
