"""Changing a tensor object's contents for ones on another device or of another dtype: module.to, .data = on the way.

The object stays (tied weights, optimizers and hooks hold on to it), with its class, attributes and hooks. torch does
so by swapping what two objects point to, and refuses while anything in C++ holds the old contents, such as a live
autograd graph. Here the graph keeps the old contents, and the gradients it computes come to the object.
"""

import functools
import sys

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, UninitializedTensorMixin

from . import copies, serialization
from . import tensor as T

# ---------------------------------------------------------------- users' tensor classes on the device

_classes = {}
_disabled = torch._C._disabled_torch_function_impl


def torch_class(tensor):
    """The class that the tensor would have on the CPU."""
    own = type(tensor)
    if own is T.Tensor:
        return torch.nn.Parameter if getattr(tensor, "_is_param", False) else torch.Tensor
    return own.__dict__.get("_torch_class", own)


def device_class(cls):
    """The class of a device tensor that is a ``cls`` to the user: T.Tensor, or one that derives from both."""
    if cls in (torch.Tensor, torch.nn.Parameter, T.Tensor) or issubclass(cls, T.Tensor):
        return T.Tensor if cls in (torch.Tensor, torch.nn.Parameter) else cls
    found = _classes.get(cls)
    if found is None:
        members = {"_torch_class": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        for name in ("__repr__", "__deepcopy__", "__reduce_ex__"):  # as torch defines them, they know of no cells
            if getattr(cls, name) in (getattr(torch.Tensor, name), getattr(torch.nn.Parameter, name)):
                members[name] = getattr(T.Tensor, name)
        if cls.__torch_function__ is _disabled:
            members["__torch_function__"] = _disabled
        else:
            members["__torch_function__"] = classmethod(_torch_function)
        if issubclass(cls, UninitializedTensorMixin):
            members["cls_to_become"] = device_class(cls.cls_to_become)
            members["__reduce_ex__"] = lambda self, protocol: (cls, (self.requires_grad,))
            members["__torch_dispatch__"] = staticmethod(_dispatch_lazy)
        found = _classes[cls] = type(cls)(cls.__name__, (cls, T.Tensor), members)
    return found


def _torch_function(cls, func, types, args=(), kwargs=None):
    # As the class does on the CPU; its results become device tensors of the class through as_subclass.
    types = tuple(t.__dict__.get("_torch_class", t) for t in types)
    return cls._torch_class.__torch_function__(func, types, args, kwargs or {})


def _dispatch_lazy(func, types, args=(), kwargs=None):
    # Ops see a plain tensor: an uninitialized one refuses to tell its shape.
    args = [T.alias(a, *T.geometry(a)) if isinstance(a, UninitializedTensorMixin) else a for a in args]
    return T.Tensor.__torch_dispatch__(func, types, args, kwargs)


def as_subclass(self, cls):
    """An alias of this tensor that is an instance of ``cls``."""
    with torch._C.DisableTorchFunctionSubclass():
        out = torch.ops.aten.alias(self)
        out.__class__ = device_class(cls)
        if issubclass(cls, torch.nn.Parameter):
            out._is_param = True
    return out


T.Tensor.as_subclass = as_subclass


def _lazy_on_device(cls):
    """Let an uninitialized parameter or buffer be made with device="jax"."""
    own = cls.__new__

    @functools.wraps(own)
    def new(cls, requires_grad=cls is UninitializedParameter, device=None, dtype=None, **kwargs):
        probe = torch.empty(0, device=device, dtype=dtype)
        if not isinstance(probe, T.Tensor):
            return own(cls, requires_grad, device, dtype, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            out = as_subclass(probe, cls.__dict__.get("_torch_class", cls)).requires_grad_(requires_grad)
        if issubclass(cls, UninitializedBuffer):
            out.persistent, out._is_buffer = kwargs.get("persistent", True), True
        return out

    cls.__new__ = new


for _cls in (UninitializedParameter, UninitializedBuffer):
    _lazy_on_device(_cls)


# ---------------------------------------------------------------- new contents for an object


def move(held, fresh):
    """Give ``held`` the contents of ``fresh``, a leaf that nobody else holds."""
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(held, T.Tensor) and isinstance(fresh, T.Tensor):
            before, after = T.geometry(held), T.geometry(fresh)
            if held._cell is fresh._cell and before == after and held.dtype == fresh.dtype:
                return
            if held.dtype == fresh.dtype and held.device == fresh.device and before[0] == after[0]:
                copies.adopt(held, fresh)  # a live graph goes on with the new contents, as on the CPU
                return
        cls, param = torch_class(held), isinstance(held, torch.nn.Parameter)
        attributes = serialization.attributes(held)
        held.__class__, fresh.__class__ = fresh.__class__, held.__class__
        held.__dict__, fresh.__dict__ = fresh.__dict__, held.__dict__
        torch._C._swap_tensor_impl(held, fresh)
        held.__dict__.update(attributes)
        if "_cell" in held.__dict__:
            held.__class__ = device_class(cls)
            if param:
                held._is_param = True
        else:
            held.__class__ = cls
        if held._backward_hooks is not None:
            held._backward_hooks = held._backward_hooks  # the assignment tells C++ of them
        if held._post_accumulate_grad_hooks is not None:
            held._post_accumulate_grad_hooks = held._post_accumulate_grad_hooks
        if fresh.requires_grad and fresh._use_count() > 1:
            fresh._post_accumulate_grad_hooks = None
            fresh.register_post_accumulate_grad_hook(functools.partial(_deliver, held))


def _deliver(held, old):
    """Bring a gradient that a graph computed for old contents to the object, and run the object's hooks."""
    grad, old.grad = old.grad.to(held.device, held.dtype), None
    if held.grad is None:
        held.grad = grad
    elif torch.is_grad_enabled():
        held.grad = held.grad + grad
    else:
        held.grad += grad
    for hook in (held._post_accumulate_grad_hooks or {}).values():
        hook(held)


def set_data(self, value):
    """``tensor.data = value``: the object shows other values; it may change device."""
    if isinstance(self, T.Tensor) and isinstance(value, T.Tensor):
        if value.dtype != self.dtype and self.grad_fn is not None:
            raise RuntimeError(f"incompatible tensor type: .data of a {self.dtype} result takes the same dtype, got {value.dtype}")
        copies.adopt(self, value)
        return
    if self.grad_fn is not None:
        raise RuntimeError(f"incompatible tensor type: .data of a result on {self.device} takes a tensor there, got one on "
                           f"{value.device}")
    grad, self.grad = self.grad, None
    move(self, value.detach().requires_grad_(self.requires_grad))
    if grad is not None:
        if grad.device != self.device:
            grad.data = grad.detach().to(self.device)
        self.grad = grad


_swap = torch.utils.swap_tensors


@functools.wraps(_swap)
def swap_tensors(t1, t2):
    if isinstance(t1, T.Tensor) or isinstance(t2, T.Tensor):
        # Modules swap wrapper subclasses where they assign .data (moving) or call set_ (parametrizations) otherwise.
        caller = sys._getframe(1).f_code.co_name
        if caller == "_apply" and not torch.__future__.get_swap_module_params_on_conversion():
            return move(t1, t2)
        if caller == "_maybe_set" and not torch.__future__.get_swap_module_params_on_conversion():
            return t1.set_(t2)
    return _swap(t1, t2)


torch.utils.swap_tensors = swap_tensors

# ---------------------------------------------------------------- cpu_tensor.data = device_tensor

_assign = torch._C.TensorBase.data.__set__


def _set_data_of_any(self, value):
    if isinstance(value, T.Tensor):
        set_data(self, value)
    else:
        _assign(self, value)


# C++ takes a CPU tensor and one of a Python backend for incompatible; between other devices the assignment works.
torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data_of_any, doc=torch._C.TensorBase.data.__doc__)
