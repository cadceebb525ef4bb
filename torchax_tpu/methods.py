"""Python-level methods of the tensor subclass: .jax(), .data, data_ptr, repr, pickling, numpy, DLPack, flattening."""

import torch

from . import convert, copies, moves, narrow, serialization, storage
from . import tensor as T


def to_jax(tensor, *, copy=False):
    """The jax.Array with a tensor's values (a CPU tensor is copied)."""
    if isinstance(tensor, T.Tensor):
        return narrow.bare(storage.read(tensor))
    return narrow.bare(convert.cpu_to_array(tensor.detach().cpu(), T.current.index))


def _get_data(self):
    return torch._C.TensorBase.data.__get__(self)


def _data_ptr(self):
    if self.numel() == 0:
        return 0
    return self._cell.address() + T.geometry(self)[2] * self.element_size()


def _repr(self, *, tensor_contents=None):
    array = narrow.bare(storage.read(self))
    if not hasattr(array, "addressable_shards") or type(array).__name__.endswith("Tracer"):
        return f"tensor(<traced {tuple(self.shape)} {self.dtype}>, device='{self.device}')"
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        if tensor_contents is None:
            cpu = copies.to_cpu(self.detach())
            tensor_contents = torch._tensor_str._tensor_str(cpu, 7) if cpu.numel() else "[]"
        text = torch._tensor_str._str_intern(self, tensor_contents=tensor_contents)
    if getattr(self, "_is_param", False):
        text = text.removeprefix("Parameter(")[:-1]
    if type(self) is T.Tensor:
        text = "tensor" + text[len("Tensor"):]  # torch prints a function that makes it
    return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text


def _format(self, spec):
    if self.dim() == 0:
        return self.detach().item().__format__(spec)
    return object.__format__(self, spec)


def _tolist(self):
    return copies.to_cpu(self.detach(), ".tolist()").tolist()


def _numpy(self, *, force=False):
    if force:
        return copies.to_cpu(self.detach().resolve_conj().resolve_neg(), ".numpy()").numpy()
    raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                    "memory first.")


def _array(self, dtype=None, copy=None):
    return _numpy(self)


def _jax_array(self):
    return storage.read(self)


def _dlpack(self, *, stream=None, max_version=None, dl_device=None, copy=None):
    if self.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if self.is_conj():
        raise BufferError("Can't export tensors with the conjugate bit set")
    stream = None if stream == -1 else stream
    return storage.read(self).__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)


def _dlpack_device(self):
    return storage.read(self).__dlpack_device__()


def _flatten(self):
    """What makes it a traceable wrapper subclass: modules swap tensors in place when they move."""
    return [], (self._cell, self._view, tuple(self.shape), self.stride(), self.storage_offset(), self.dtype)


def _unflatten(inner, meta, outer_size, outer_stride):
    cell, view, size, stride, offset, dtype = meta
    out = T._make(T.Tensor, size, stride, offset, dtype=dtype, device=cell.device)
    out._cell, out._view = cell, view
    return out


def _share_memory(self):
    return self  # as for other accelerators: device memory is not moved


def _contains(self, element):
    if isinstance(element, (torch.Tensor, int, float, bool, complex)):
        return bool((element == self).any().item())
    raise RuntimeError(f"Tensor.__contains__ only supports Tensor or scalar, but you passed in a {type(element)}.")


T.Tensor.data = property(_get_data, moves.set_data)
for _name, _method in {
        "data_ptr": _data_ptr, "__repr__": _repr, "__format__": _format, "tolist": _tolist, "numpy": _numpy,
        "__array__": _array, "__jax_array__": _jax_array, "__dlpack__": _dlpack, "__dlpack_device__": _dlpack_device,
        "__tensor_flatten__": _flatten, "__tensor_unflatten__": staticmethod(_unflatten),
        "share_memory_": _share_memory, "is_shared": lambda self: False, "__contains__": _contains,
        "__copy__": serialization.shallow_copy, "__deepcopy__": serialization.deepcopy,
        "__reduce_ex__": serialization.reduce_ex}.items():
    setattr(T.Tensor, _name, _method)
