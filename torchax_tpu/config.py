"""Switches of the package, read when they are used; assign to them at any time.

Attributes:
    fallback: ``"warn"`` runs an op without a JAX form on the host and warns once per op,
        ``"silent"`` runs it without a warning, ``"error"`` raises ``FallbackError``.
    check_indices: True raises IndexError for out-of-range *tensor* indices in eager mode
        (a device round trip for each indexing op); False lets reads give NaN (or the
        dtype's extreme) and drops writes.
    int64: ``"wide"``: 64-bit dtypes are real. ``"narrow"``: int64, uint64, float64 and complex128 tensors keep their torch
        dtype, but are held and computed in 32 bits, for speed and memory on TPU; integers that come from the host and don't
        fit raise OverflowError, others wrap at 32 bits. To be chosen before the device is used (or by
        ``TORCHAX_TPU_INT64=narrow`` in the environment).
"""

import os
import sys
import types

fallback = os.environ.get("TORCHAX_TPU_FALLBACK", "warn")
check_indices = False
int64 = os.environ.get("TORCHAX_TPU_INT64", "wide")

_ALLOWED = {"fallback": ("warn", "silent", "error"), "check_indices": (True, False), "int64": ("wide", "narrow")}
_LISTENERS = []  # called as f(name, value) after a change


class _Config(types.ModuleType):
    def __setattr__(self, name, value):
        allowed = _ALLOWED.get(name)
        if allowed is None and not name.startswith("_"):
            raise AttributeError(f"torchax_tpu.config has no switch {name!r}; it has {sorted(_ALLOWED)}")
        if allowed is not None and value not in allowed:
            raise ValueError(f"torchax_tpu.config.{name} takes one of {allowed}, got {value!r}")
        if name == "int64" and value != int64 and f"{__package__}.narrow" in sys.modules:
            raise RuntimeError(f"torchax_tpu.config.int64 = {value!r} comes too late: the device is in use with {int64!r}. Set it "
                               "right after the import, or TORCHAX_TPU_INT64 in the environment")
        super().__setattr__(name, value)
        for listener in _LISTENERS:
            listener(name, value)


sys.modules[__name__].__class__ = _Config
