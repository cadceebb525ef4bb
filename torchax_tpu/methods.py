"""Python-level methods of the tensor subclass: .jax(), .data, data_ptr, repr, pickling."""

import torch

from . import convert, copies, storage
from . import tensor as T


def _jax(self):
    """The jax.Array with this tensor's values (a CPU tensor is copied)."""
    if isinstance(self, T.Tensor):
        return storage.read(self)
    return convert.cpu_to_array(self)


def _get_data(self):
    return torch.Tensor.data.__get__(self)


def _set_data(self, value):
    if not isinstance(value, T.Tensor):
        raise RuntimeError(f"incompatible tensor type: .data of a {self.device} tensor takes a tensor on {T.devices[0].type!r}, "
                           f"got one on {value.device}")
    copies.adopt(self, value)


def _data_ptr(self):
    if self.numel() == 0:
        return 0
    return self._cell.address() + T.geometry(self)[2] * self.element_size()


def _repr(self, *, tensor_contents=None):
    if isinstance(storage.read(self), __import__("jax").core.Tracer):
        return f"tensor(<traced {tuple(self.shape)} {self.dtype}>, device='{self.device}')"
    cpu = copies.to_cpu(self.detach())
    text = torch._tensor_str._str(cpu)
    suffix = f"device='{self.device}'"
    if self.grad_fn is not None:
        suffix += f", grad_fn=<{type(self.grad_fn).__name__}>"
    elif self.requires_grad:
        suffix += ", requires_grad=True"
    return f"{text[:-1]}, {suffix})"


T.Tensor.jax = _jax
T.Tensor.data = property(_get_data, _set_data)
T.Tensor.data_ptr = _data_ptr
T.Tensor.__repr__ = _repr
