"""The native device: torch's PrivateUse1 Python backend under the name "jax".

`setup()` runs on import and is light: JAX and the op tables are loaded by `load()`, at the first
use of the device. Nothing here is a mode; plain CPU operations pass as before.
"""

import ctypes
import functools
import importlib
import os
import sys
import threading

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from . import device_module, errors, parallel
from .errors import backward as _backward

NAME = os.environ.get("TORCHAX_TPU_DEVICE", "jax")
# What the first use brings in: everything that registers ops or methods.
HEAVY = ("ops", "copies", "methods", "ranges", "routes", "untyped", "viewcopies", "serialization", "autocast", "sparse_adam")


class Hook(torch._C._acc.PrivateUse1Hooks):
    """What torch's C++ asks of an accelerator."""

    def is_available(self):
        return True

    def has_primary_context(self, dev_id):
        return True

    def is_built(self):
        return True


_DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1
_touch = ctypes.pythonapi.PyErr_Occurred  # ctypes raises whatever exception is set after a call
_touch.restype = ctypes.c_void_p


class Guard(torch._C._acc.DeviceGuard):
    """Tells torch's C++ that the device type exists; the current device is kept in Python."""

    def type_(self):
        if _backward.running:  # an exception of an op or a hook may be on its way: see errors.Backward
            try:
                _touch()
            except BaseException as error:  # noqa: BLE001
                _backward.error = error
        return _DEVICE_TYPE


# ---------------------------------------------------------------- first use

_lock = threading.RLock()
_loaded = _loading = False
_forked = False


def loaded():
    """Whether the device has been used in this process (JAX is up)."""
    return _loaded


def loading():
    """Whether the device is coming up right now."""
    return _loading


def load():
    """Bring up JAX and the op tables; called by everything that touches the device."""
    global _loaded, _loading
    if _forked:
        _refuse()
    if _loaded:
        return
    with _lock:
        if _loaded or _loading:
            return
        _loading = True
        try:
            _bring_up()
            _loaded = True
            for call in _listeners:
                call()
        finally:
            _loading = False


_listeners = []


def on_load(call):
    """Call ``call()`` once the device is up (now, if it is)."""
    call() if _loaded else _listeners.append(call)


def _bring_up():
    for name in HEAVY:
        importlib.import_module(f"{__package__}.{name}")
    import jax

    from . import fused
    from . import random as streams
    from . import tensor as T
    T.devices[:] = [torch.device(NAME, i) for i in range(len(jax.devices()))]
    T._known.update(T.devices)
    fused.register(_libraries[1])
    if device_module.seed_to_come is not None:
        streams.manual_seed_all(device_module.seed_to_come)


def _refuse(*args, **kwargs):
    raise errors.ForkError(
        f"device {NAME!r} was used before this process was forked; JAX can't be used in the child of a fork. Start workers "
        "with multiprocessing_context='spawn' or 'forkserver' (DataLoader), torch.multiprocessing.set_start_method('spawn'), "
        f"or keep {NAME!r} tensors out of the workers: return CPU tensors and move them in the main process.")


def forked():
    """Whether this process is the child of a fork after JAX had started."""
    return _forked


def _after_fork():
    global _forked
    bridge = sys.modules.get("jax._src.xla_bridge")
    if _loaded or bridge is not None and bridge.backends_are_initialized():
        _forked = True
        if _loaded:
            tensor = sys.modules[f"{__package__}.tensor"].Tensor
            tensor.__torch_dispatch__ = staticmethod(_refuse)
            for name in ("__repr__", "jax", "tolist", "__format__", "__reduce_ex__", "__deepcopy__"):
                setattr(tensor, name, _refuse)


# ---------------------------------------------------------------- factories

_libraries = []

# Tensorless ops whose default kernels would decompose: they arrive whole.
FACTORIES = ("ones", "zeros", "full", "rand", "randn", "randint", "randint.low", "randperm", "arange.start_step",
             "arange", "arange.start", "linspace", "logspace", "eye", "eye.m", "scalar_tensor", "rand.generator",
             "randn.generator", "kaiser_window", "kaiser_window.periodic", "kaiser_window.beta", "tril_indices", "triu_indices", "randint.generator", "randint.low_generator", "randperm.generator")
# Composite ops with an autograd formula: a backend kernel keeps them whole (DESIGN section 3).
WHOLE = ("linear", "_fused_rms_norm", "matmul.out", "embedding_sparse_backward", "linalg_matrix_rank.out",
         "linalg_matrix_rank.out_tol_tensor", "linalg_matrix_rank.atol_rtol_tensor_out", "linalg_matrix_rank.atol_rtol_float_out")
# Reached with the Python key off (torch.tensor, x[[0, 1]]): the fallback alone doesn't serve ops with tensor arguments there.
UNDER = ("_copy_from", "_local_scalar_dense")


def factory(op, *args, **kwargs):
    """Ops without a tensor argument reach the backend key, not __torch_dispatch__."""
    if not _loaded or _forked:
        load()
    handler = getattr(op, "_torchax_tpu", None)
    if handler is None:
        handler = sys.modules[f"{__package__}.tensor"].find(op)
    try:
        return handler(args, kwargs)
    except BaseException as error:
        if _backward.running:
            _backward.error = error
        raise


def _kernel(name):
    packet, _, overload = name.partition(".")
    found = []

    def kernel(*args, **kwargs):
        if not found:  # looking an overload up takes longer than registering it
            found.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
        return factory(found[0], *args, **kwargs)

    return kernel


def _pin_memory(self, device=None):
    """A CPU copy: JAX moves ordinary host memory as fast as it moves pinned memory."""
    return self.clone()


# ---------------------------------------------------------------- autograd


def _run_cpu_backward():
    """Let the autograd engine start its worker threads (one per accelerator) while it knows of none.

    Backward runs on the calling thread, and an idle worker thread would abort the process at exit
    or hang a forked child.
    """
    if torch.backends.cuda.is_built():  # there the engine needs its threads
        return
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True).mul(1).backward()


def _single_thread_backward():
    """Run backward on the calling thread: faster, and a JAX trace lives on its thread."""
    run = torch.autograd.graph._engine_run_backward

    def engine_run_backward(*args, **kwargs):
        torch._C._set_multithreading_enabled(False)
        outer, _backward.running = _backward.running, True
        try:
            return run(*args, **kwargs)
        except SystemError:
            if _backward.error is None:
                raise
            error = _backward.error
        finally:
            _backward.running, _backward.error = outer, None
        raise error

    torch.autograd.graph._engine_run_backward = engine_run_backward
    torch.autograd._engine_run_backward = engine_run_backward


# ---------------------------------------------------------------- methods of torch's own classes


def _array(self):
    """The jax.Array with this tensor's values (a CPU tensor is copied)."""
    load()
    from .methods import to_jax
    return to_jax(self)


def _move_module(self, device=None):
    """Move all parameters and buffers to the JAX device."""
    index = device_module.index_of(device)
    return self.to(torch.device(NAME, index))


def _compatible(own):
    # Dynamo compares the signature with its own substitute's.
    def _has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:
        if input.device.type == NAME and from_.device.type != NAME and "_cell" in input.__dict__:
            return True  # module.cpu(): `.data =` keeps the Parameter objects, as between other devices
        return own(input, from_)
    return _has_compatible_shallow_copy_type


def _tag(obj):
    return sys.modules[f"{__package__}.serialization"].tag(obj) if _loaded else None


def _restore(storage, location):
    if location != NAME and not location.startswith(NAME + ":"):
        return None
    load()
    return sys.modules[f"{__package__}.serialization"].restore(storage, location)


def _storage_to(own):
    """Storages of the CPU move to the device as bytes for it: torch.load's ``map_location=lambda s, _: s.jax()``."""
    @functools.wraps(own)
    def to(self, device, non_blocking=False):
        device = torch.device(device)
        if device.type != NAME or not isinstance(self, torch.UntypedStorage):
            return own(self, device, non_blocking)
        return _restore(self.clone(), str(device))

    return to


def _storage_jax(self, device=None, non_blocking=False):
    """A copy of this storage on the device."""
    return self.to(device=torch.device(NAME, device_module.index_of(device)))


_thread = threading.local()


def _default_autocast_dtype():
    """bfloat16 is what torch.autocast takes without a dtype, as on the CPU; torch keeps that per thread."""
    own = torch.get_autocast_dtype

    @functools.wraps(own)
    def get_autocast_dtype(device_type):
        if device_type == NAME and not getattr(_thread, "chosen", False):
            _thread.chosen = True
            if not torch.is_autocast_enabled(device_type):
                torch.set_autocast_dtype(device_type, torch.bfloat16)
        return own(device_type)

    torch.get_autocast_dtype = get_autocast_dtype


def setup():
    """Register the device with torch; called once on import."""
    _run_cpu_backward()
    module = device_module.make(NAME, load)
    _setup_privateuseone_for_python_backend(NAME, module, Hook(), Guard())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(factory, "PrivateUse1")
    lib = torch.library.Library("aten", "IMPL")
    _libraries[:] = [fallback, lib]
    for name in FACTORIES + WHOLE + UNDER:
        lib.impl(name, _kernel(name), "PrivateUse1")
    if not torch.backends.cuda.is_built():
        lib.impl("_pin_memory", _pin_memory, "CPU")
    _single_thread_backward()
    _default_autocast_dtype()
    device_module.serve_accelerator()
    parallel.setup(NAME)
    torch.storage._to = _storage_to(torch.storage._to)
    setattr(torch.UntypedStorage, NAME, _storage_jax)
    torch.Tensor.jax = _array
    torch.nn.Module.jax = _move_module
    torch._has_compatible_shallow_copy_type = _compatible(torch._has_compatible_shallow_copy_type)
    torch.serialization.register_package(5, _tag, _restore)
    os.register_at_fork(after_in_child=_after_fork)
