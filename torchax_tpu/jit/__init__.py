"""torchax_tpu.jit: a whole PyTorch function as one compiled program. See README.md here."""

from .. import device as _device

_device.load()  # tracing needs the op tables

from .function import JitFunction, jit, trace_count  # noqa: E402

__all__ = ["JitFunction", "jit", "trace_count"]
