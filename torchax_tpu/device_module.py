"""`torch.jax`: what torch and users expect of an accelerator's module, and what torch.accelerator needs of it.

Light: JAX is imported inside the functions that need it.
"""

import sys
import threading
import time
import types

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils import _device as device_context

seed_to_come = None  # a seed set before the device was first used
_state = threading.local()  # .stream: what current_stream() answers
_peaks = {}  # device index -> highest number of bytes seen, where the runtime keeps no count
_name = "jax"
_load = None


def _devices():
    _load()
    import jax
    return jax.devices()


def _tensor():
    return sys.modules[f"{__package__}.tensor"]


def _streams():
    _load()
    return sys.modules[f"{__package__}.random"]


class Current(threading.local):
    """The current device: one for each thread, as in torch.cuda."""

    index = 0


current = Current()


def index_of(device=None):
    """The index that a device argument (None, int, str, torch.device) means; RuntimeError if there is no such device."""
    if device is None:
        return current_device()
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != _name:
            raise ValueError(f"Expected a {_name} device, but got: {device}")
        device = current_device() if device.index is None else device.index
    count = device_count()
    if not 0 <= device < count:
        raise RuntimeError(f"{_name} error: invalid device ordinal {device}: this process has {count} {_name!r} device(s)")
    return device


# ---------------------------------------------------------------- devices


def init():
    """Bring the device up now (the first use does so otherwise)."""
    _load()


def is_initialized():
    """Whether the device has been used in this process."""
    from . import device
    return device.loaded()


def is_available():
    """True: where there is no TPU or GPU, JAX runs on the CPU."""
    return True


def is_bf16_supported(including_emulation=True):
    """True: XLA computes in bfloat16 everywhere."""
    return True


def current_device():
    """Index of the current device."""
    return current.index


def set_device(device):
    """Make a device the current one; a negative index changes nothing."""
    if isinstance(device, int) and device < 0:
        return
    before, current.index = current.index, index_of(device)
    if (before == 0) != (current.index == 0):
        _follow(current.index != 0)


class _Placing(TorchFunctionMode):
    """Gives the current index to a "jax" without one, which torch's C++ takes for index 0 in .to and torch.tensor.

    In force only in threads whose current device isn't 0.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None:
            if func is torch.Tensor.to:
                if len(args) > 1 and _unplaced(args[1]):
                    args = (args[0], torch.device(_name, current.index), *args[2:])
            elif func in (torch.tensor, torch.as_tensor, torch.asarray) and func in device_context._device_constructors() \
                    and _unplaced(device_context.CURRENT_DEVICE):
                kwargs["device"] = torch.device(_name, current.index)
        elif _unplaced(device):
            kwargs["device"] = torch.device(_name, current.index)
        return func(*args, **kwargs)


def _unplaced(device):
    if isinstance(device, torch.device):
        return device.index is None and device.type == _name
    return device == _name if type(device) is str else False


def _follow(on):
    """Put ``_Placing`` below all modes of this thread (but torch's default device, which must lie lowest), or take it out."""
    stack = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    stack = [mode for mode in stack if type(mode) is not _Placing]
    if on:
        lowest = stack and isinstance(stack[-1], device_context.DeviceContext)
        stack.insert(len(stack) - bool(lowest), _Placing())
    for mode in reversed(stack):
        _push_mode(mode)


def device_count():
    """How many devices JAX has."""
    return len(_devices())


def get_device_name(device=None):
    """The kind of a device, such as 'TPU v5 lite' or 'cpu'."""
    return _devices()[index_of(device)].device_kind


def get_device_properties(device=None):
    """Name, platform, memory and place of a device."""
    d = _devices()[index_of(device)]
    stats = d.memory_stats() or {}
    return types.SimpleNamespace(name=d.device_kind, platform=d.platform, total_memory=stats.get("bytes_limit", 0), id=d.id,
                                 process_index=d.process_index, coords=getattr(d, "coords", None), multi_processor_count=1)


def get_device_capability(device=None):
    """(0, 0): CUDA's compute capabilities have no counterpart."""
    index_of(device)
    return (0, 0)


def can_device_access_peer(device, peer_device):
    """True: XLA copies between any two of its devices."""
    return index_of(device) >= 0 and index_of(peer_device) >= 0


class device:
    """Context in which ``device`` is the current one."""

    def __init__(self, device):
        self.idx = device if isinstance(device, int) and device < 0 else index_of(device)
        self.prev_idx = -1

    def __enter__(self):
        self.prev_idx = current_device()
        set_device(self.idx)
        return self

    def __exit__(self, *exc):
        set_device(self.prev_idx)
        return False


class device_of(device):
    """Context in which the device of a tensor is the current one."""

    def __init__(self, obj):
        super().__init__(obj.get_device() if obj.device.type == _name else -1)


def synchronize(device=None):
    """Wait for all work on a device (default: the current one); errors of that work are raised here."""
    import jax
    place = _devices()[index_of(device)]
    for array in jax.live_arrays():
        if not array.is_deleted() and place in array.devices():
            array.block_until_ready()
    jax.effects_barrier()


def _exchange_device(index):
    """Make ``index`` current and return what was; for torch._dynamo and FSDP."""
    before = current_device()
    set_device(index)
    return before


_maybe_exchange_device = _exchange_device


def _is_in_bad_fork():
    from . import device
    return device.forked()


# ---------------------------------------------------------------- random numbers


def manual_seed(seed):
    """Seed the current device."""
    _streams().stream(current_device()).reseed(int(seed))


def manual_seed_all(seed):
    """Seed every device; torch.manual_seed calls this."""
    global seed_to_come
    if is_initialized():
        _streams().manual_seed_all(int(seed))
    else:
        seed_to_come = int(seed)


def seed():
    """Seed the current device from the operating system's randomness."""
    manual_seed(int.from_bytes(__import__("os").urandom(8), "little"))


def seed_all():
    """Seed every device from the operating system's randomness."""
    manual_seed_all(int.from_bytes(__import__("os").urandom(8), "little"))


def initial_seed():
    """The seed of the current device."""
    return _streams().stream(current_device()).seed


def get_rng_state(device=None):
    """The random state of a device, a CPU uint8 tensor."""
    return _streams().get_state(index_of(device))


def get_rng_state_all():
    """The random states of all devices."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state(new_state, device=None):
    """Put a device's random stream into a state that get_rng_state gave."""
    _streams().set_state(new_state, index_of(device))


def set_rng_state_all(new_states):
    """Put all devices' random streams into saved states."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


# ---------------------------------------------------------------- memory


def _memory(device):
    """(bytes in use, peak, limit)"""
    index = index_of(device)
    d = _devices()[index]
    stats = d.memory_stats() or {}
    if "bytes_in_use" in stats:
        used = stats["bytes_in_use"]
        return used, stats.get("peak_bytes_in_use", used), stats.get("bytes_limit", 0)
    import jax
    used = sum(a.nbytes // len(a.devices()) for a in jax.live_arrays() if not a.is_deleted() and d in a.devices())
    _peaks[index] = max(_peaks.get(index, 0), used)
    return used, _peaks[index], 0


def memory_stats(device=None):
    """torch's memory statistics, those that JAX knows, by their dotted names."""
    used, peak, limit = _memory(device)
    out = {}
    for kind, current, top in (("allocated_bytes", used, peak), ("reserved_bytes", limit or used, limit or peak),
                               ("active_bytes", used, peak)):
        out |= {f"{kind}.all.current": current, f"{kind}.all.peak": top, f"{kind}.all.allocated": current,
                f"{kind}.all.freed": 0}
    return out


def memory_allocated(device=None):
    """Bytes that live arrays take."""
    return _memory(device)[0]


def max_memory_allocated(device=None):
    """Highest number of bytes taken so far."""
    return _memory(device)[1]


def memory_reserved(device=None):
    """Bytes that the runtime holds."""
    used, _, limit = _memory(device)
    return limit or used


def max_memory_reserved(device=None):
    """Highest number of bytes held so far."""
    _, peak, limit = _memory(device)
    return limit or peak


def mem_get_info(device=None):
    """(free, total) bytes; of host memory where the device is the CPU."""
    used, _, limit = _memory(device)
    if limit:
        return limit - used, limit
    import os
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def reset_peak_memory_stats(device=None):
    """Start the peak anew (where the runtime itself keeps it, it stays)."""
    _peaks.pop(index_of(device), None)


reset_max_memory_allocated = reset_accumulated_memory_stats = reset_peak_memory_stats


def empty_cache():
    """Nothing to do: XLA's allocator reuses what is free."""


def ipc_collect():
    """Nothing to do: device memory isn't shared between processes."""


def memory_summary(device=None, abbreviated=False):
    """The memory figures of a device as text."""
    used, peak, limit = _memory(device)
    rows = [("allocated", used), ("highest so far", peak), *([("limit", limit)] if limit else [])]
    return "\n".join([f"Memory of {_name}:{index_of(device)} ({get_device_name(device)})",
                      *(f"{name:>16}  {size / 2**20:12.1f} MiB" for name, size in rows)])


# ---------------------------------------------------------------- streams and events


class Stream(torch.Stream):
    """JAX orders the work of a device by itself: there is one stream, and it is always the current one."""

    def __new__(cls, device=None, priority=0, **kwargs):
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device(_name, index_of(device)))

    def synchronize(self):
        synchronize(self.device)

    def query(self):
        return True

    def wait_stream(self, stream):
        return None

    def wait_event(self, event):
        return None

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point in time on the device: recording waits for the work before it when timing is on."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.enable_timing, self._at = enable_timing, None

    def record(self, stream=None):
        if self.enable_timing:
            synchronize()
        self._at = time.perf_counter()

    def wait(self, stream=None):
        return None

    def query(self):
        return True

    def synchronize(self):
        synchronize()

    def elapsed_time(self, end_event):
        """Milliseconds from this event to ``end_event``."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return (end_event._at - self._at) * 1e3


def current_stream(device=None):
    """The device's only stream."""
    return Stream(device)


default_stream = current_stream


def set_stream(stream):
    """Nothing to do: there is one stream."""


def is_current_stream_capturing():
    """False: there are no graphs to capture; torchax_tpu.jit compiles."""
    return False


class stream:
    """Context for work on a stream; there is one, so nothing changes."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        return self.stream

    def __exit__(self, *exc):
        return False


StreamContext = stream


# ---------------------------------------------------------------- automatic mixed precision


def get_amp_supported_dtype():
    """The dtypes autocast may compute in."""
    return [torch.bfloat16, torch.float16]


def _amp_module():
    amp = types.ModuleType(f"torch.{_name}.amp", "Automatic mixed precision on the JAX device.")

    class autocast(torch.amp.autocast):
        """torch.amp.autocast for this device."""

        def __init__(self, enabled=True, dtype=torch.bfloat16, cache_enabled=True):
            super().__init__(_name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    class GradScaler(torch.amp.GradScaler):
        """torch.amp.GradScaler for this device."""

        def __init__(self, *args, **kwargs):
            super().__init__(_name, *args, **kwargs)

    amp.autocast, amp.GradScaler = autocast, GradScaler
    return amp


# ---------------------------------------------------------------- assembly

_PRIVATE = ("_is_in_bad_fork", "_exchange_device", "_maybe_exchange_device")


def make(name, load):
    """The module object for ``torch.<name>``."""
    global _name, _load
    _name, _load = name, load
    module = types.ModuleType(f"torch.{name}", __doc__)
    here = globals()
    for key, value in here.items():
        public = callable(value) and getattr(value, "__module__", None) == __name__ and not key.startswith("_")
        if public and key not in ("make", "serve_accelerator", "index_of", "Current") or key in _PRIVATE:
            setattr(module, key, value)
    module.amp = _amp_module()
    sys.modules[f"torch.{name}.amp"] = module.amp
    return module


def serve_accelerator():
    """torch.accelerator's C++ knows no current device and no memory of a Python backend: answer in Python."""
    c = torch._C
    c._accelerator_getDeviceIndex = current_device
    c._accelerator_setDeviceIndex = set_device
    c._accelerator_exchangeDevice = _exchange_device
    c._accelerator_maybeExchangeDevice = _exchange_device
    c._accelerator_synchronizeDevice = synchronize
    c._accelerator_isAllocatorInitialized = lambda: True
    c._accelerator_emptyCache = empty_cache
    c._accelerator_emptyHostCache = empty_cache
    c._accelerator_getDeviceStats = memory_stats
    c._accelerator_resetAccumulatedStats = reset_peak_memory_stats
    c._accelerator_resetPeakStats = reset_peak_memory_stats
    c._accelerator_getMemoryInfo = mem_get_info
    c._accelerator_getDeviceCapability = lambda index: {"supported_dtypes": set(_dtypes())}
    c._accelerator_getStream = Stream
    c._accelerator_setStream = set_stream


def _dtypes():
    _load()
    return sys.modules[f"{__package__}.dtypes"].TO_JAX
