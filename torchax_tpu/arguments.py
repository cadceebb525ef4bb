"""Checks of Python arguments which a compiled program can't make, since numbers reach it as traced values.

They run before the op, in eager and under a trace alike, and raise what torch raises.
"""

import math

import torch

from .registry import aten

CHECKS = {}  # overload -> check(*args, **kwargs) of the op's own arguments


def check(*overloads):
    """Declare a check; it may leave arguments it has no use for to ``**_``."""
    def register(fn):
        for overload in overloads:
            CHECKS[overload] = fn
        return fn
    return register


def checked(func, handler):
    """``handler`` behind the check of ``func``, and told torch's default dtype, if ``func`` asks for either."""
    fn = CHECKS.get(func)
    if func in DEFAULTED:
        handler = _defaulted(handler)
    if func in (aten.cumsum.out, aten.cumprod.out):
        handler = _in_dtype_of_out(handler)
    if fn is None:
        return handler

    def run(args, kwargs):
        fn(*args, **kwargs)
        return handler(args, kwargs)

    return run


# ---------------------------------------------------------------- default dtype

# Factories whose dtype follows torch.get_default_dtype(): programs are kept per dtype, so it has to be named.
DEFAULTED = frozenset({
    aten.zeros.default, aten.ones.default, aten.full.default, aten.scalar_tensor.default, aten.eye.default, aten.eye.m,
    aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor,
    aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor,
    aten.rand.default, aten.rand.generator, aten.randn.default, aten.randn.generator, aten.normal.float_float,
    aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta})
_COMPLEX = {torch.float64: torch.complex128, torch.float16: torch.complex32}


def _in_dtype_of_out(handler):
    """Sums without a dtype of their own are made in the dtype of ``out=``."""
    def run(args, kwargs):
        return handler(args, kwargs if kwargs.get("dtype") is not None else {**kwargs, "dtype": kwargs["out"].dtype})

    return run


def _defaulted(handler):
    def run(args, kwargs):
        default = torch.get_default_dtype()
        if default is not torch.float32 and kwargs.get("dtype") is None:
            values = args[:2]
            if any(type(v) is complex or isinstance(v, torch.Tensor) and v.is_complex() for v in values):
                default = _COMPLEX.get(default, torch.complex64)
            if len(args) < 2 or type(args[0]) not in (tuple, list, torch.Size) or type(args[1]) not in (bool, int):
                kwargs = {**kwargs, "dtype": default}  # not torch.full's integers: they name their own dtype
        return handler(args, kwargs)

    return run


# ---------------------------------------------------------------- fill values

_INTEGERS = {d: (torch.iinfo(d).min, torch.iinfo(d).max) for d in (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)}
_REAL = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_FLOATS = {d: torch.finfo(d).max for d in (torch.float32, torch.float16, torch.bfloat16)}
_SINGLE = {torch.float32: _FLOATS[torch.float32]}


def fits(value, dtype, tops=_FLOATS):
    """RuntimeError if a number can't be held by ``dtype``, as torch sees it: negative numbers wrap in unsigned types.

    ``tops``: the floating dtypes whose largest number counts.
    """
    bounds = _INTEGERS.get(dtype)
    real = dtype in _REAL
    if type(value) is complex and (bounds is not None or real):
        value = value.real if value.imag == 0 else None
    if value is None:
        raise RuntimeError(f"value cannot be converted to type {dtype} without overflow: it is complex")
    if bounds is not None:
        low, high = bounds
        if not (-high if low == 0 and type(value) is int else low) <= value <= high:
            raise RuntimeError(f"value cannot be converted to type {dtype} without overflow: {value}")
    elif dtype is torch.complex64 and any(tops[torch.float32] < abs(v) < math.inf for v in (complex(value).real, complex(value).imag)):
        raise RuntimeError(f"value cannot be converted to type {dtype} without overflow: {value}")
    elif dtype in tops and tops[dtype] < abs(value) < math.inf:
        raise RuntimeError(f"value cannot be converted to type {dtype} without overflow: {value}")


@check(aten.fill_.Scalar, aten.fill.Scalar)
def fill_(self, value):
    fits(value, self.dtype)


@check(aten.full.default, aten.full.out)
def full(size, fill_value, *, dtype=None, **_):
    if dtype is not None:
        fits(fill_value, dtype)


@check(aten.scalar_tensor.default)
def scalar_tensor(s, *, dtype=None, **_):
    if dtype is not None:
        fits(s, dtype, _SINGLE)  # half types go to infinity here


@check(aten.full_like.default)
def full_like(self, fill_value, *, dtype=None, **_):
    fits(fill_value, dtype or self.dtype)


@check(aten.new_full.default)
def new_full(self, size, fill_value, *, dtype=None, **_):
    fits(fill_value, dtype or self.dtype)


# ---------------------------------------------------------------- parameters of distributions


def _floating(dtype, name):
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise NotImplementedError(f'"{name}" not implemented for {dtype}')


def _positive(value, name, what):
    if not value > 0:
        raise RuntimeError(f"{name} expects {what} > 0.0, but found {what}={value}")


def _std(std):
    if type(std) in (int, float) and not std >= 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")


@check(aten.rand.default, aten.rand.generator, aten.randn.default, aten.randn.generator)
def rand(size, *, dtype=None, **_):
    _floating(dtype, "rand")


@check(aten.rand_like.default, aten.rand_like.generator, aten.randn_like.default, aten.randn_like.generator)
def rand_like(self, *, dtype=None, **_):
    _floating(dtype or self.dtype, "rand_like")


@check(aten.normal_.default, aten.normal_functional.default)
def normal_(self, mean=0.0, std=1.0, **_):
    _std(std)
    _floating(self.dtype, "normal_")


@check(aten.normal.Tensor_float, aten.normal.Tensor_float_out)
def normal(mean, std=1.0, **_):
    _std(std)


@check(aten.normal.float_float, aten.normal.float_float_out)
def normal_sized(mean, std, size, **_):
    _std(std)


@check(aten.uniform_.default, aten.uniform.default)
def uniform_(self, low=0.0, high=1.0, **_):
    _floating(self.dtype, "uniform_")
    if not low <= high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")


@check(aten.exponential_.default, aten.exponential.default)
def exponential_(self, lambd=1.0, **_):
    _positive(lambd, "exponential_", "lambda")
    _floating(self.dtype, "exponential_")


@check(aten.geometric_.default, aten.geometric.default)
def geometric_(self, p, **_):
    if not 0 < p < 1:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}")


@check(aten.cauchy_.default, aten.cauchy.default)
def cauchy_(self, median=0.0, sigma=1.0, **_):
    _positive(sigma, "cauchy_", "sigma")
    _floating(self.dtype, "cauchy_")


@check(aten.log_normal_.default, aten.log_normal.default)
def log_normal_(self, mean=1.0, std=2.0, **_):
    _positive(std, "log_normal_", "std")
    _floating(self.dtype, "log_normal_")


@check(aten.bernoulli_.float, aten.bernoulli.p)
def bernoulli_(self, p=0.5, **_):
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")


@check(aten.bernoulli.default, aten.bernoulli.out, aten.poisson.default)
def bernoulli(self, *_args, **_):
    _floating(self.dtype, "bernoulli or poisson")


def _range(low, high, dtype):
    """Bounds of [low, high) as random_ and randint check them."""
    if high is not None and low >= high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    if dtype is torch.bool:
        bounds = (0, 1)
    else:
        bounds = _INTEGERS.get(dtype)
    if bounds is None:
        top = torch.finfo(dtype).max if dtype in _REAL else None
        bounds = (-top, top) if top is not None else (-math.inf, math.inf)
    for what, value in (("from", low), ("to - 1", None if high is None else high - 1)):
        if value is not None and not bounds[0] <= value <= bounds[1]:
            raise RuntimeError(f"{what} is out of bounds for {dtype}: {value}")


@check(aten.random_.to, aten.random.to)
def random_to(self, to, **_):
    _range(0, to, self.dtype)


@check(getattr(aten.random_, "from"), getattr(aten.random, "from"))
def random_from(self, low, to=None, **_):
    _range(low, to, self.dtype)


@check(aten.randint.default, aten.randint.generator)
def randint(high, size, *, dtype=torch.int64, **_):
    _range(0, high, dtype or torch.int64)


@check(aten.randint.low, aten.randint.low_generator)
def randint_low(low, high, size, *, dtype=torch.int64, **_):
    _range(low, high, dtype or torch.int64)


@check(aten.randint_like.default, aten.randint_like.generator)
def randint_like(self, high, *, dtype=None, **_):
    _range(0, high, dtype or self.dtype)


@check(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like_low(self, low, high, *, dtype=None, **_):
    _range(low, high, dtype or self.dtype)


# ---------------------------------------------------------------- histograms


@check(aten.histc.default, aten.histc.out)
def histc(self, bins=100, min=0, max=0, **_):
    if not (math.isfinite(min) and math.isfinite(max)):
        raise RuntimeError(f"histc: range of [{min}, {max}] is not finite")
    if min > max:
        raise RuntimeError(f"torch.histc(): max must be larger than min, got [{min}, {max}]")


# ---------------------------------------------------------------- dtypes of out=


def _out_is(out, *dtypes):
    if out.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise RuntimeError(f"Expected out tensor to have dtype {wanted}, but got {out.dtype} instead")


@check(aten.gather.out, aten.aminmax.out)
def _like_self(self, *args, out=None, min=None, max=None, **_):
    for o in (out, min, max):
        if isinstance(o, torch.Tensor):
            _out_is(o, self.dtype)


@check(aten.signbit.out, aten.isposinf.out, aten.isneginf.out, aten.isin.Tensor_Tensor_out, aten.isin.Tensor_Scalar_out,
       aten.isin.Scalar_Tensor_out)
def _bool_out(*args, out, **_):
    _out_is(out, torch.bool)


@check(aten.all.out, aten.any.out, aten.all.all_out, aten.any.all_out, aten.all.dims_out, aten.any.dims_out)
def _truth_out(*args, out, **_):
    _out_is(out, torch.bool, torch.uint8)


@check(aten.multinomial.out)
def _multinomial_out(*args, out, **_):
    _out_is(out, torch.int64)


@check(aten.complex.out)
def _complex_out(real, imag, *, out):
    _out_is(out, _COMPLEX.get(real.dtype, torch.complex64))


# ---------------------------------------------------------------- parameters of activations and losses


@check(aten.softshrink.default, aten.softshrink.out, aten.softshrink_backward.default)
def softshrink(*args, lambd=0.5, out=None):
    value = args[-1] if not isinstance(args[-1], torch.Tensor) else lambd
    if not value >= 0:
        raise RuntimeError(f"lambda must be greater or equal to 0, but found to be {value}.")


@check(aten.huber_loss.default, aten.huber_loss.out)
def huber_loss(self, target, reduction=1, delta=1.0, **_):
    if not delta > 0:
        raise RuntimeError(f"huber_loss does not support non-positive values for delta, got {delta}")


# ---------------------------------------------------------------- integer division


@check(aten.floor_divide.default, aten.floor_divide.Scalar, aten.floor_divide_.Tensor, aten.floor_divide_.Scalar,
       aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder_.Tensor, aten.remainder_.Scalar,
       aten.fmod.Tensor, aten.fmod.Scalar, aten.fmod_.Tensor, aten.fmod_.Scalar,
       aten.div.Tensor_mode, aten.div.Scalar_mode, aten.div_.Tensor_mode, aten.div_.Scalar_mode)
def integer_division(self, other, rounding_mode="floor", **_):
    """Division of integers by the number 0; of a zero in a tensor a compiled program can't tell."""
    if type(other) is int and other == 0 and rounding_mode and not self.is_floating_point() and not self.is_complex():
        raise RuntimeError("ZeroDivisionError")
