"""Named errors. Each says what was expected, what was got and what to do."""


class TorchaxTpuError(RuntimeError):
    """Base of all errors that torchax_tpu raises by itself."""


class UnsupportedOpError(TorchaxTpuError, NotImplementedError):
    """No route (declared, derived, decomposed, host) leads from this ATen op to JAX."""


class FallbackError(TorchaxTpuError):
    """An op would run on the host while ``config.fallback = "error"``."""


class TraceError(TorchaxTpuError):
    """Python needed a concrete value (or shape) while a program was being traced."""


class ForkError(TorchaxTpuError):
    """The device was used in a process forked after the JAX runtime had started."""
