"""torchax_tpu.jit: a whole PyTorch function as one compiled program. See README.md here."""

from .function import JitFunction, jit, trace_count

__all__ = ["JitFunction", "jit", "trace_count"]
