"""``python -m torchax_tpu script.py [args]``: run an unmodified script with the device ready.

``--cuda-as-jax`` (before or after the script's name) gives the script's "cuda" the JAX device. That takes a
TorchFunctionMode, which the package otherwise does without: it is active in this run only, in
every thread, and costs a microsecond or so per call.
"""

import functools
import os
import runpy
import sys
import threading
import types

import torch
from torch.overrides import TorchFunctionMode

import torchax_tpu
from torchax_tpu import device as _device

FLAG = "--cuda-as-jax"
USAGE = f"usage: python -m torchax_tpu [{FLAG}] (script.py | -m module) [arguments]"


def translate(x):
    """A device argument that says cuda, as the JAX device; everything else as it is."""
    if isinstance(x, str) and (x == "cuda" or x.startswith("cuda:")):
        return _device.NAME + x[4:]
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device(_device.NAME, x.index) if x.index is not None else torch.device(_device.NAME)
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
    def __init__(self, *args, **kwargs):
        cls.__init__(self, *map(translate, args), **{k: translate(v) for k, v in kwargs.items()})

    return type(cls.__name__, (cls,), {"__init__": __init__, "__doc__": cls.__doc__})


def cuda_as_jax():
    """Make "cuda" mean the JAX device, for the rest of this process; returns the mode to enter."""
    ours = torch.get_device_module(_device.NAME)
    for name in dir(ours):
        if not name.startswith("_") and isinstance(getattr(torch.cuda, name, None), types.FunctionType):
            setattr(torch.cuda, name, _translating(getattr(ours, name)))
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    torch.cuda._lazy_init = lambda: None
    torch.Tensor.cuda = lambda self, device=None, non_blocking=False, memory_format=torch.preserve_format: self.to(
        _move(device), non_blocking=non_blocking, memory_format=memory_format)
    torch.nn.Module.cuda = lambda self, device=None: self.to(_move(device))
    autocast = _translating_class(torch.autocast)
    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = autocast
    torch.cuda.amp.autocast = functools.partial(autocast, _device.NAME)
    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = lambda device="cuda", *args, **kwargs: scaler(translate(device), *args, **kwargs)
    torch.cuda.amp.GradScaler = functools.partial(scaler, _device.NAME)
    torch.load = _translating(torch.load)
    torch.set_default_device = _translating(torch.set_default_device)
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


def _move(device):
    if isinstance(device, int):
        return torch.device(_device.NAME, device)
    return translate(device if device is not None else "cuda")


def main(argv):
    """Run the script (or ``-m module``) named in ``argv`` as ``__main__``; returns the exit status."""
    translated = FLAG in argv
    argv = [a for a in argv if a != FLAG]
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__}")
        return 0 if argv else 2
    module = argv[0] == "-m"
    if module and len(argv) < 2:
        print(USAGE, file=sys.stderr)
        return 2
    if not module and not os.path.exists(argv[0]):
        print(f"python -m torchax_tpu: no such script: {argv[0]}\n{USAGE}", file=sys.stderr)
        return 2
    sys.argv = argv[1:] if module else argv
    sys.path[0] = "" if module else os.path.dirname(os.path.abspath(argv[0]))
    run = functools.partial(runpy.run_module, argv[1], run_name="__main__", alter_sys=True) if module else functools.partial(
        runpy.run_path, argv[0], run_name="__main__")
    if translated:
        with cuda_as_jax():
            run()
    else:
        run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
