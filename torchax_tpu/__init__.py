"""torchax_tpu: PyTorch on whatever JAX runs on. Importing it makes device "jax" work; JAX itself loads at the first use."""

import importlib.util as _importlib_util
from importlib import import_module as _import_module
import os as _os
import sys as _sys
import types as _types


def _tpu_present():
    """Whether this machine has a TPU that JAX would use; looks at the PCI bus only."""
    if "tpu" not in _os.environ.get("JAX_PLATFORMS", "tpu").split(",") or not _importlib_util.find_spec("libtpu"):
        return False
    chips = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
    root = "/sys/bus/pci/devices"
    for entry in _os.listdir(root) if _os.path.isdir(root) else ():
        try:
            with open(f"{root}/{entry}/vendor") as vendor, open(f"{root}/{entry}/device") as device:
                if vendor.read().strip() == "0x1ae0" and device.read().strip() in chips:
                    return True
        except OSError:
            continue
    return False


def _wanted():
    """Whether torch's autoload should make the device: asked for, or there is a TPU."""
    asked = _os.environ.get("TORCHAX_TPU_AUTOLOAD")
    return asked not in ("0", "") if asked is not None else _tpu_present()


_torch = _sys.modules.get("torch")
# torch imports us at the end of its own import (backend autoload). Then, unless wanted, nothing happens.
_by_torch = _torch is not None and getattr(_torch.__spec__, "_initializing", False)
_stay_out = _by_torch and not _wanted()


def _autoload():
    """Entry point of torch's backend autoload."""
    if _stay_out:
        del _sys.modules[__name__]  # a later `import torchax_tpu` starts afresh


# Public names, and where each is defined: loaded at first use.
_PUBLIC = {
    "Tensor": "tensor",
    "Generator": "random",
    "jit": "jit",
    "dry_run": "tpu",
}
__all__ = ["config", "errors", "metrics", *_PUBLIC]


def __getattr__(name):
    if name in _PUBLIC:
        if name != "dry_run":
            _device.load()
        value = getattr(_import_module(f"{__name__}.{_PUBLIC[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(_types.ModuleType):
    def __setattr__(self, name, value):
        # Importing the room torchax_tpu.jit must not hide the function of that name.
        if name not in _PUBLIC or not isinstance(value, _types.ModuleType):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package


def __dir__():
    return sorted({*globals(), *__all__})


if not _stay_out:
    import torch as _torch  # noqa: F811

    from . import config, errors, metrics
    from . import device as _device

    _device.setup()
