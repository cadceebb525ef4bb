"""The native device: torch's PrivateUse1 Python backend, its hooks, and the torch.<name> module."""

import os

import jax
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from . import fused
from . import random as streams
from . import tensor as T

NAME = os.environ.get("TORCHAX_TPU_DEVICE", "jax")
aten = torch.ops.aten


class Module:
    """What ``torch.jax`` is: the functions torch and users expect of an accelerator's module."""

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def current_device(self):
        return T.current[0]

    def set_device(self, device):
        T.current[0] = device if isinstance(device, int) else torch.device(device).index or 0

    def device_count(self):
        return len(jax.devices())

    def _is_in_bad_fork(self):
        return False

    def manual_seed(self, seed):
        streams.stream(T.current[0]).reseed(int(seed))

    def manual_seed_all(self, seed):
        streams.manual_seed_all(seed)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device=None):
        jax.effects_barrier()


class Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self):
        return True

    def has_primary_context(self, dev_id):
        return True

    def is_built(self):
        return True


class Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


def factory(op, *args, **kwargs):
    """Ops without a tensor argument reach the backend key, not __torch_dispatch__."""
    handler = getattr(op, "_torchax_tpu", None)
    if handler is None:
        handler = T.find(op)
    return handler(args, kwargs)


_libraries = []

# Tensorless ops whose default kernels would decompose: they arrive whole.
FACTORIES = ("ones", "zeros", "full", "rand", "randn", "randint", "randint.low", "randperm", "arange.start_step",
             "arange", "arange.start", "linspace", "logspace", "eye", "eye.m", "scalar_tensor", "rand.generator",
             "randn.generator", "tril_indices", "triu_indices", "randint.generator", "randint.low_generator", "randperm.generator")
# Composite ops with an autograd formula: a backend kernel keeps them whole (DESIGN section 3).
WHOLE = ("linear", "matmul", "matmul.out", "_fused_rms_norm")


# Reached with the Python key off (torch.tensor, x[[0, 1]]): the fallback alone doesn't serve ops with tensor arguments there.
UNDER = ("_copy_from",)


def _single_thread_backward():
    """Run backward on the calling thread: faster, traceable, and no worker thread at exit."""
    run = torch.autograd.graph._engine_run_backward

    def engine_run_backward(*args, **kwargs):
        torch._C._set_multithreading_enabled(False)
        return run(*args, **kwargs)

    torch.autograd.graph._engine_run_backward = engine_run_backward
    torch.autograd._engine_run_backward = engine_run_backward


def setup():
    """Register the device with torch; called once on import."""
    _setup_privateuseone_for_python_backend(NAME, Module(), Hook(), Guard())
    T.devices[:] = [torch.device(NAME, i) for i in range(len(jax.devices()))]
    T._known.update(T.devices)
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(factory, "PrivateUse1")
    lib = torch.library.Library("aten", "IMPL")
    _libraries[:] = [fallback, lib]
    for name in FACTORIES + WHOLE + UNDER:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        lib.impl(name, lambda *a, _op=op, **k: factory(_op, *a, **k), "PrivateUse1")
    fused.register(lib)
    _single_thread_backward()
