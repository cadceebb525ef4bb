"""Named errors. Each says what was expected, what was got and what to do."""


import threading


class Backward(threading.local):
    """Per thread: whether a backward runs, and what an op raised in it.

    While an exception leaves an op that a C++ node of autograd called, torch's stream guard asks our
    Python device guard for its type, and a Python call with an exception set ends the process.
    So the guard clears it, and the caller of the engine raises it again.
    """

    running = False
    error = None


backward = Backward()


class TorchaxTpuError(RuntimeError):
    """Base of all errors that torchax_tpu raises by itself."""


class UnsupportedOpError(TorchaxTpuError, NotImplementedError):
    """No route (declared, derived, decomposed, host) leads from this ATen op to JAX."""


class FallbackError(TorchaxTpuError):
    """An op would run on the host while ``config.fallback = "error"``."""


class TraceError(TorchaxTpuError):
    """Python needed a concrete value (or shape) while a program was being traced."""


class OutOfRangeError(TorchaxTpuError, IndexError):
    """An index tensor holds a value out of range (``config.check_indices``); torch raises one or the other, by op."""


class ForkError(TorchaxTpuError):
    """The device was used in a process forked after the JAX runtime had started."""
