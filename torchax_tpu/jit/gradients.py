"""The `.grad` of parameters across a traced call: what it must be at entry, and what it is afterwards."""

import sys
import types

import torch

from .. import tensor as T
from .guards import SET, Like


class Gradients:
    """Follows the `.grad` of every leaf that one trace meets.

    A program is right for a later call if the gradients it used are what they were when it was traced. It used one if an
    optimizer stepped, if backward() added to it or replaced it, or if an op read it. `zero_grad()` before any of that makes
    whatever is there at entry irrelevant.
    """

    def __init__(self, trace):
        self.trace = trace
        self.entry = {}  # id(leaf) -> (leaf, its .grad at entry)
        self.used = set()  # ids of leaves whose .grad at entry an optimizer or backward() used
        self.fresh_start = set()  # ids of leaves whose .grad was reset before any use
        self.hooks, self.bare = [], []  # our hooks; the tensors that had none

    def enter(self, tensor):
        if id(tensor) in self.entry or not (isinstance(tensor, T.Tensor) and tensor.requires_grad and tensor.is_leaf):
            return
        self.entry[id(tensor)] = tensor, tensor.grad
        self.bare += [tensor] if tensor._post_accumulate_grad_hooks is None else []
        self.hooks.append(tensor.register_post_accumulate_grad_hook(lambda p: self.use([p])))

    def enter_reached(self, objects):
        """Enter the parameters of what the function reaches, before it can set their .grad."""
        for value in objects:
            if isinstance(value, torch.nn.Module):
                self.enter_reached(value.parameters())
            elif isinstance(value, torch.optim.Optimizer):
                for group in value.param_groups:
                    self.enter_reached(group["params"])
            elif isinstance(value, (list, tuple, dict)):
                self.enter_reached(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, torch.Tensor):
                self.enter(value)
            elif not isinstance(value, (type, types.ModuleType, types.FunctionType)):
                held = getattr(value, "__dict__", None) or {}
                self.enter_reached(v for v in held.values() if isinstance(v, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)))

    def use(self, tensors):
        for tensor in tensors:
            self.enter(tensor)
            if id(tensor) not in self.fresh_start:
                self.used.add(id(tensor))

    def reset(self, tensors):
        """zero_grad(set_to_none=True) is about to run over ``tensors``."""
        for tensor in tensors:
            self.enter(tensor)
            if id(tensor) in self.entry and not self._touched(*self.entry[id(tensor)]):
                self.fresh_start.add(id(tensor))

    def _touched(self, tensor, entry):
        return id(tensor) in self.used or tensor.grad is not entry or self._met(entry)

    def _met(self, grad):
        return isinstance(grad, T.Tensor) and id(grad._cell) in self.trace.originals

    def inside(self):
        """Whether the function itself made gradients."""
        return bool(self.used) or any(t.grad is not None and t.grad is not entry for t, entry in self.entry.values())

    def ends(self):
        """[(leaf, its .grad at the end)] where it is not the one at entry; every .grad is then that again."""
        ends = [(t, t.grad) for t, entry in self.entry.values()
                if (t.grad is not None if id(t) in self.fresh_start else t.grad is not entry)]
        self.touched = [(t, entry, t.grad is entry) for t, entry in self.entry.values()
                        if id(t) not in self.fresh_start and self._touched(t, entry)]
        self.restore()
        return ends

    def dropped(self):
        """Leaves whose .grad at entry is of no use: it is reset first."""
        return [tensor for tensor, _ in self.entry.values() if id(tensor) in self.fresh_start]

    def conditions(self, identities):
        """[(leaf, what its .grad must be at entry)], and the leaves whose .grad of the moment is an input.

        ``identities`` are the ids of cells whose identity the program depends on.
        """
        cells = [id(entry._cell) for _, entry in self.entry.values() if isinstance(entry, T.Tensor)]
        conditions, inputs = [], []
        for tensor, entry, kept in self.touched:
            if entry is not None and not kept and not self._met(entry):
                entry = SET
            elif isinstance(entry, T.Tensor) and entry._view is None and not entry.requires_grad \
                    and id(entry._cell) not in identities and cells.count(id(entry._cell)) == 1:
                inputs.append((tensor, entry))
                entry = Like(entry)
            conditions.append((tensor, entry))
        return conditions, inputs

    def restore(self):
        for tensor, entry in self.entry.values():
            if tensor.grad is not entry:
                tensor.grad = entry

    def close(self):
        self.restore()
        for hook in self.hooks:
            hook.remove()
        for tensor in self.bare:
            tensor._post_accumulate_grad_hooks = None
        self.hooks.clear()


def _references(tensors, i):
    tensor = tensors[i]
    return sys.getrefcount(tensor), sys.getrefcount(tensor._cell)


_ALONE = _references([types.SimpleNamespace(_cell=object())], 0)


def spare_gradient(tensors, i, shape):
    """``tensors[i]``, emptied to be filled again, if nobody else holds it or its storage and it is as it was made; or None."""
    if _references(tensors, i) != _ALONE:
        return None
    tensor = tensors[i]
    if tensor._use_count() != 1 or tensor._view is not None or tensor.requires_grad or tensor.shape != shape:
        return None
    tensor._cell.array = None
    return tensor
