"""torchax_tpu: PyTorch on whatever JAX runs on. Importing it makes device "jax" work."""

from . import config, errors
from . import ops as _ops
from . import copies as _copies, device as _device, methods as _methods, ranges as _ranges, routes as _routes, untyped as _untyped, viewcopies as _viewcopies
from .tensor import Tensor

_device.setup()

from .jit import jit  # noqa: E402  (the function; the room's other names are in torchax_tpu.jit as a module)
from .tpu import dry_run  # noqa: E402

__all__ = ["Tensor", "config", "dry_run", "errors", "jit"]


def _autoload():
    """Entry point of torch's backend autoload."""
