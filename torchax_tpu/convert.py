"""Copies between torch CPU tensors, numpy and JAX arrays. Arrays in are always real copies."""

import jax
import numpy as np
import torch

from . import dtypes, narrow, storage

_BITS = {2: (np.int16, torch.int16), 1: (np.int8, torch.int8)}
_put = jax.jit(lambda x: x)


def cpu_to_numpy(tensor):
    """A numpy array with a CPU tensor's values; shares memory where it can."""
    t = tensor.detach().resolve_conj().resolve_neg()
    if t.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data! Use torch.nn.Module.to_empty() instead of "
                                  "torch.nn.Module.to() when moving module from meta to a different device.")
    if t.layout != torch.strided:
        raise NotImplementedError(f"torchax_tpu holds dense tensors only, got one of layout {t.layout}: keep it on the CPU, or "
                                  "move .to_dense()")
    if t.dtype is torch.bfloat16 or t.dtype.is_floating_point and t.dtype.itemsize == 1:
        _, middle = _BITS[t.dtype.itemsize]
        return t.view(middle).numpy().view(dtypes.to_jax(t.dtype)) if t.dim() else (
            t.reshape(1).view(middle).numpy().view(dtypes.to_jax(t.dtype)).reshape(()))
    if t.dim() > 64:
        raise RuntimeError(f"only tensors with up to 64 dims are supported, got {t.dim()}")
    dtypes.to_jax(t.dtype)  # a clear error for dtypes JAX has not
    return t.numpy()


def numpy_to_array(values, index=0):
    """A jax.Array on device ``index`` with a copy of a numpy array's values, dtype kept."""
    wide = values.dtype in dtypes.WIDE
    copy = np.array(narrow.from_numpy(values) if wide else values, copy=True, order="C")
    with storage.x64(wide):
        array = _put(copy) if index == 0 else jax.device_put(copy, jax.devices()[index])
    return narrow.hold(array, values.dtype)


def cpu_to_array(tensor, index=0):
    """A jax.Array with a copy of a CPU tensor's values."""
    return numpy_to_array(cpu_to_numpy(tensor), index)


def array_to_cpu(array):
    """A CPU tensor with a copy of a jax.Array's values."""
    values = np.array(array, copy=True, order="C")
    dtype = dtypes.TO_TORCH[values.dtype]
    if values.dtype.kind == "V" or values.dtype.name.startswith(("bfloat16", "float8")):
        bits, _ = _BITS[values.dtype.itemsize]
        shape = values.shape
        return torch.from_numpy(values.reshape(-1).view(bits)).view(dtype).reshape(shape)
    return torch.from_numpy(values)


def to_array_on(array, index):
    """``array`` moved to device ``index``."""
    return jax.device_put(array, jax.devices()[index])
