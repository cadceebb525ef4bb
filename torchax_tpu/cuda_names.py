"""`--cuda-as-jax`: what a script says to "cuda" reaches the JAX device.

For whole processes that run one unmodified script (`python -m torchax_tpu`): it replaces names in torch.cuda, and
takes a TorchFunctionMode, which the package otherwise does without.
"""

import contextlib
import functools
import threading
import types

import torch
from torch.overrides import TorchFunctionMode

import torchax_tpu

from . import device as _device


def translate(x):
    """A device argument (or type name) that says cuda, as the JAX device; everything else as it is."""
    if isinstance(x, str):
        if x == "cuda" or x.startswith("cuda:"):
            return _device.NAME + x[4:]
        if x.startswith("torch.cuda.") and x.endswith("Tensor"):
            return f"torch.{_device.NAME}.{x[11:]}"
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device(_device.NAME, x.index) if x.index is not None else torch.device(_device.NAME)
    if isinstance(x, type) and isinstance(x, _Legacy):
        return f"torch.{_device.NAME}.{x.__name__}"
    if type(x) is dict:  # map_location
        return {translate(k): translate(v) for k, v in x.items()}
    return x


class CudaAsJax(TorchFunctionMode):
    """Translates device arguments of every torch function."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {k: translate(v) for k, v in kwargs.items() if k != "pin_memory"} if kwargs else {}  # ordinary memory does
        return func(*map(translate, args), **kwargs)


def _translating(function):
    """``function`` with its device arguments translated."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*map(translate, args), **{k: translate(v) for k, v in kwargs.items()})

    return call


def _translating_class(cls):
    """A subclass whose constructor translates device arguments."""
    def __new__(new, *args, **kwargs):
        if cls.__new__ is object.__new__:
            return object.__new__(new)
        return cls.__new__(new, *map(translate, args), **{k: translate(v) for k, v in kwargs.items()})

    def __init__(self, *args, **kwargs):
        if cls.__init__ is not object.__init__:
            cls.__init__(self, *map(translate, args), **{k: translate(v) for k, v in kwargs.items()})

    return type(cls.__name__, (cls,), {"__new__": __new__, "__init__": __init__, "__doc__": cls.__doc__})


# ---------------------------------------------------------------- torch.cuda.FloatTensor and its like


class _Legacy(type):
    """Metaclass of the old tensor types: they make tensors, and tensors are instances of them."""

    def __call__(cls, *args, **kwargs):
        return getattr(torch, cls.__name__)(*args, **kwargs).to(_device.NAME)

    def __instancecheck__(cls, x):
        return isinstance(x, torch.Tensor) and x.device.type == _device.NAME and x.dtype == cls.dtype


_OLD_TYPES = {"FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
              "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16,
              "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool}


def _set_default_tensor_type(own):
    @functools.wraps(own)
    def set_default_tensor_type(t):
        name = translate(t)
        if not isinstance(name, str) or not name.startswith(f"torch.{_device.NAME}."):
            return own(t)
        torch.set_default_dtype(_OLD_TYPES[name.rpartition(".")[2]])
        torch.set_default_device(_device.NAME)

    return set_default_tensor_type


# ---------------------------------------------------------------- torch.cuda


def cuda_as_jax():
    """Make "cuda" mean the JAX device, for the rest of this process; returns the mode to enter."""
    ours = torch.get_device_module(_device.NAME)
    for name in dir(ours):
        value = getattr(ours, name)
        if name.startswith("_") or not hasattr(torch.cuda, name):
            continue
        if isinstance(value, type):
            setattr(torch.cuda, name, _translating_class(value))
        elif isinstance(value, types.FunctionType):
            setattr(torch.cuda, name, _translating(value))
    for name, dtype in _OLD_TYPES.items():
        setattr(torch.cuda, name, _Legacy(name, (), {"dtype": dtype, "__module__": "torch.cuda"}))
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args: 0)
    torch.cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, device=None, non_blocking=False, memory_format=torch.preserve_format: self.to(
        _move(device), non_blocking=non_blocking, memory_format=memory_format)
    torch.nn.Module.cuda = lambda self, device=None: self.to(_move(device))
    torch.storage._StorageBase.cuda = torch.storage.TypedStorage.cuda = (
        lambda self, device=None, non_blocking=False: self.to(device=_move(device), non_blocking=non_blocking))
    autocast = _translating_class(torch.autocast)
    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = autocast
    torch.cuda.amp.autocast = functools.partial(autocast, _device.NAME)
    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = lambda device="cuda", *args, **kwargs: scaler(translate(device), *args, **kwargs)
    torch.cuda.amp.GradScaler = functools.partial(scaler, _device.NAME)
    torch.load = _translating(torch.load)
    torch.serialization.register_package(4, lambda storage: None, lambda storage, location: _device._restore(
        storage, translate(location)) if location.startswith("cuda") else None)
    torch.set_default_device = _translating(torch.set_default_device)
    torch.set_default_tensor_type = _set_default_tensor_type(torch.set_default_tensor_type)
    torch.nn.parallel.data_parallel.__globals__["_get_available_device_type"] = lambda: _device.NAME
    _device.on_load(_tensors_are_cuda)
    generator = torch.Generator

    class Generator(generator):
        def __new__(cls, device="cpu"):
            where = translate(device)
            return generator() if torch.device(where).type == "cpu" else torchax_tpu.Generator(where)

    torch.Generator = Generator
    run = threading.Thread.run

    def run_translating(self):
        with CudaAsJax():
            run(self)

    threading.Thread.run = run_translating
    return CudaAsJax()


def _tensors_are_cuda():
    from .tensor import Tensor
    Tensor.is_cuda = property(lambda self: True)


def _move(device):
    if isinstance(device, int):
        return torch.device(_device.NAME, device)
    return translate(device if device is not None else "cuda")
