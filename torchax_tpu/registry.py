"""The table of ops: what `@op` declares, and the lookup that derives the rest from schemas.

An impl takes JAX arrays under ATen's argument names and returns JAX arrays. It is traced by
`jax.jit` once per combination of static arguments, so Python in it costs nothing per call.
"""

import sys

import torch

from . import dtypes

aten = torch.ops.aten

# Argument kinds, from the schema.
TENSOR, TENSORS, SCALAR, SCALARS, STATIC, DROP, GENERATOR = range(7)
_DROPPED = frozenset({"device", "layout", "pin_memory", "non_blocking", "memory_format"})


_made = []  # every Op there is


def forget_programs():
    """Drop every op's compiled programs: something they were traced under has changed (the default dtype)."""
    for made in _made:
        made.cache.clear()


class Op:
    """One ATen overload's way to JAX.

    Attributes:
        impl: arrays in, arrays out; positional arguments in schema order, keyword-only by name;
            arguments the caller left out are not passed, so its defaults must be ATen's.
        rule: a dtypes.Rule, or None when the impl takes care of dtypes by itself.
        static: names of tensorless arguments which are baked into the program.
        jit: False for value-dependent result shapes (runs un-jitted, refuses to be traced).
        random: True if the impl takes a leading PRNG ``key``.
        wide: True runs it in 64-bit mode always, "int" when an input is integer or bool
            (sum of int32 gives int64), False only when an input is 64-bit.
        host: True turns a 0-d result into a Python scalar (aten.equal).
        layout: "elementwise" if results follow the inputs' strides.
        shape_only: names of tensors of which only shape and dtype matter (zeros_like); they are
            never read, and arrive as jax.ShapeDtypeStruct.
        mutates: names of the written arguments, from the schema unless the op knows better
            (native_batch_norm writes its running statistics though its schema doesn't say so).
    """

    __slots__ = ("overload", "impl", "rule", "static", "jit", "random", "wide", "host", "layout",
                 "shape_only", "origin", "names", "kinds", "kwonly", "mutates", "cache", "inline")

    def __init__(self, overload, impl, rule=None, static=(), jit=True, random=False, wide=False, host=False,
                 layout=None, shape_only=(), origin="declared", inline=False, mutates=None):
        self.overload, self.impl, self.rule = overload, impl, rule
        self.static, self.jit, self.random, self.wide = frozenset(static), jit, random, wide
        self.host, self.layout, self.shape_only, self.origin = host, layout, frozenset(shape_only), origin
        self.inline = inline  # the impl is torch code run over tracers: scalars must stay Python numbers
        self.names, self.kinds, self.kwonly = [], {}, {}
        for a in overload._schema.arguments:
            kind = STATIC if a.name in self.static or inline and _is_scalar(a) else kind_of(a)
            self.kinds[a.name] = kind
            if a.kwarg_only:
                self.kwonly[a.name] = kind
            else:
                self.names.append(a.name)
        self.mutates = mutated_args(overload) if mutates is None else tuple(mutates)
        self.cache = {}
        _made.append(self)

    def positional_kinds(self):
        return tuple(self.kinds[n] for n in self.names)

    def __repr__(self):
        return f"Op({self.overload}, {self.origin})"


def _is_scalar(argument):
    return kind_of(argument) in (SCALAR, SCALARS)


def kind_of(argument):
    """The kind of a schema argument: Tensor, Scalar and float are traced, the rest is static."""
    if argument.name in _DROPPED:
        return DROP
    t = str(argument.type)
    if t.startswith("Optional[") and t.endswith("]"):
        t = t[9:-1]
    return {"Tensor": TENSOR, "List[Tensor]": TENSORS, "List[Optional[Tensor]]": TENSORS, "number": SCALAR,
            "float": SCALAR, "List[number]": SCALARS, "List[float]": STATIC, "Generator": GENERATOR}.get(t, STATIC)


def mutated_args(overload):
    """Names of the arguments that the schema says are written."""
    return tuple(a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


TABLE = {}  # OpOverload -> Op: what was declared
VIEWS = {}  # OpOverload -> metadata function (see views.py)
WHERE = {}  # OpOverload -> name of the module that declares it
SPECIAL = {}  # OpOverload -> handler(args, kwargs) on Tensors: mutation of metadata, copies, host reads


def op(*overloads, dtype=None, **options):
    """Declare the impl of one or more overloads (same impl, same options).

    Used as ``op(aten.cos.default, dtype=to_float)(jnp.cos)`` or as a decorator.
    """
    if not overloads or not all(isinstance(o, torch._ops.OpOverload) for o in overloads):
        raise TypeError(f"op() takes OpOverloads such as aten.add.Tensor, got {overloads}")

    module = sys._getframe(1).f_globals["__name__"]

    def register(impl):
        for overload in overloads:
            WHERE[overload] = module
            if overload in TABLE:
                raise ValueError(f"{overload} is registered twice")
            TABLE[overload] = Op(overload, impl, rule=dtype, **options)
        return impl

    return register


def _declare(table, overloads):
    module = sys._getframe(2).f_globals["__name__"]

    def register(fn):
        for overload in overloads:
            WHERE[overload] = module
            if overload in table:
                raise ValueError(f"{overload} is registered twice")
            table[overload] = fn
        return fn

    return register


def view(*overloads):
    """Declare a view op by its metadata: fn(tensor, *args) -> View or list of Views."""
    return _declare(VIEWS, overloads)


def special(*overloads):
    """Declare an op which acts on Tensors, not arrays: fn(*args, **kwargs) -> result."""
    return _declare(SPECIAL, overloads)


# ---------------------------------------------------------------- derivation from schemas


def _signature(overload, skip=()):
    return [(a.name, str(a.type)) for a in overload._schema.arguments if a.name not in skip]


def _packet(namespace, name):
    return getattr(getattr(torch.ops, namespace), name, None)


def functional_twin(overload):
    """The functional overload with the same arguments as an in-place or out= overload, or None."""
    written = mutated_args(overload)
    if not written:
        return None
    namespace, name = overload._schema.name.split("::")
    out_args = [a.name for a in overload._schema.arguments if a.name in written and a.kwarg_only]
    if out_args:
        candidates, skip = [name], out_args
    elif name.startswith("__i"):
        candidates, skip = ["__" + name[3:]], ()
    elif name.endswith("_"):
        candidates, skip = [name[:-1]], ()
    else:
        return None
    wanted = _signature(overload, skip)
    for candidate in candidates:
        packet = _packet(namespace, candidate)
        for o in packet.overloads() if packet is not None else ():
            twin = getattr(packet, o)
            if twin is not overload and not mutated_args(twin) and _signature(twin) == wanted:
                return twin
    return None


FACTORY_ARGUMENTS = ("dtype", "layout", "device", "pin_memory")


def factory_twin(overload):
    """The factory that an ``out=`` overload of one belongs to (zeros.out -> zeros.default), or None."""
    written = mutated_args(overload)
    namespace, name = overload._schema.name.split("::")
    wanted = _signature(overload, written)
    packet = _packet(namespace, name[:-len("_out")] if name.endswith("_out") else name)
    for o in packet.overloads() if packet is not None and len(written) == 1 else ():
        twin = getattr(packet, o)
        if not mutated_args(twin) and _signature(twin, FACTORY_ARGUMENTS) == wanted and any(
                a.name == "device" for a in twin._schema.arguments):
            return twin
    return None


def foreach_element(overload):
    """The single-tensor overload that a functional ``_foreach_*`` overload maps over, or None."""
    namespace, name = overload._schema.name.split("::")
    if not name.startswith("_foreach_") or mutated_args(overload):
        return None
    listed = {"List[Tensor]": "Tensor", "List[number]": "number"}
    wanted = [(a.name, listed.get(str(a.type), str(a.type))) for a in overload._schema.arguments]
    renamed = {"scalars": "scalar"}
    packet = _packet(namespace, name[len("_foreach_"):])
    best = None
    for o in packet.overloads() if packet is not None else ():
        element = getattr(packet, o)
        if mutated_args(element):
            continue
        have = _signature(element)[: len(wanted)]
        rest = element._schema.arguments[len(wanted):]
        if [t for _, t in have] == [t for _, t in wanted] and all(a.has_default_value() for a in rest):
            if element in TABLE:
                return element
            best = best or element
    del renamed
    return best


def dtype_label(rule):
    """A short name of an op's dtype rule, for documents."""
    return "own" if rule is None else getattr(rule, "label", rule.__class__.__name__)


__all__ = ["Op", "op", "view", "special", "aten", "TABLE", "VIEWS", "SPECIAL", "functional_twin", "foreach_element",
           "dtypes"]
