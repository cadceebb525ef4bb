"""What must still hold for a traced program to fit: checked before every call, with a reason when it fails.

Everything the trace met is compared by identity (tensors, parameters in their modules, optimizer
state, gradients to accumulate into) or by value (modes, settings, plain attributes of the
modules and objects that the function reached).
"""

import types

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
SET = object()  # some .grad must be there at entry; its value is not used
_MISSING = object()


class Like:
    """Any .grad at entry that is laid out as this one: the program reads the .grad of the moment."""

    __slots__ = ("kind",)

    def __init__(self, grad):
        self.kind = self._kind(grad)

    @staticmethod
    def _kind(grad):
        return tuple(grad.shape), grad.dtype, grad._cell.device, grad._cell.perm

    def fits(self, grad):
        return grad is not None and grad._view is None and not grad.requires_grad and self._kind(grad) == self.kind


_TABLES = ("_modules", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hooks(tensor):
    """The hooks which autograd calls for a tensor's gradient."""
    own, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return (tuple(own) if own else (), tuple(after) if after else ())


class Guards:
    """The conditions of one program.

    Args:
        trace: the finished Trace.
        grads: (leaf, what its .grad must be at entry: None, SET, a Like or that tensor).
        roots: objects the function reaches by arguments, closure and globals.
        arg_cells: ids of cells that are arguments (they may change freely).
        modes: (module, training) of the modules among the roots, at entry.
    """

    def __init__(self, trace, grads, roots, arg_cells, modes):
        self.grads = grads
        self.tensors = [(t, c, t.requires_grad) for t, c in trace.tensors.values() if id(c) not in arg_cells]
        self.hooks = [(t, _hooks(t)) for t, _ in trace.tensors.values() if t.requires_grad]
        self.optimizers = list(trace.optimizers.values())
        for seen in self.optimizers:
            seen.freeze()
        self.same, self.equal = [], []
        modules = [m for m, _ in trace.modules.values()]
        for module in modules:
            for table in (module._parameters, module._buffers):
                self.same += [(table.get, k, v, module) for k, v in table.items()]
            self._attributes({k: v for k, v in module.__dict__.items() if k[0] != "_"}, module, trace, module.__dict__.get)
        # submodules and hooks: most tables are empty, so all of those are one look
        self.empty, self.tables = [], []
        reached = modules + [r for r in roots if isinstance(r, torch.nn.Module)]
        for module in {id(c): c for m in reached for c in m.modules()}.values():
            for name in _TABLES:
                table = getattr(module, name)
                self.tables.append((table, dict(table), module, name)) if table else self.empty.append(table)
        known = {id(m) for m in modules} | {id(s.optimizer) for s in self.optimizers}
        for root in roots:
            if id(root) not in known:
                self._root(root, trace)
        # modes as they were when the module was called, not as the function may have left them
        self.modes = [*trace.modules.values(), *(e for e in modes if id(e[0]) not in trace.modules)]

    def _root(self, root, trace):
        if isinstance(root, (list, tuple)):
            self._attributes(dict(enumerate(root)), root, trace, lambda k: root[k] if k < len(root) else _MISSING)
        elif isinstance(root, dict):
            self._attributes(root, root, trace, root.get)
        elif not isinstance(root, (type, types.ModuleType, types.FunctionType, torch.Tensor, *PLAIN)):
            table = getattr(root, "__dict__", None) or {}
            self._attributes(table, root, trace, table.get)

    def _attributes(self, table, owner, trace, get):
        for k, v in table.items():
            if isinstance(v, torch.Tensor):
                if id(v) in trace.tensors:
                    self.same.append((get, k, v, owner))
            elif isinstance(v, PLAIN) and k != "training":
                self.equal.append((get, k, v, owner))

    def broken(self):
        """None if the program fits, else the reason why it doesn't."""
        for m, training in self.modes:
            if m.training is not training:
                return f"{type(m).__name__}.training changed to {m.training}"
        if any(self.empty):
            return "a hook or a submodule was added to a module"
        for table, kept, owner, name in self.tables:
            if table != kept:
                return f"{type(owner).__name__}.{name} changed"
        for get, k, v, owner in self.same:
            if get(k) is not v:
                return f"{type(owner).__name__}.{k} is another object now"
        for get, k, v, owner in self.equal:
            now = get(k)
            if now is not v and (type(now) is not type(v) or now != v):
                return f"{type(owner).__name__}.{k} changed from {v!r} to {now!r}"
        for t, c, needs in self.tensors:
            if t._cell is not c:
                return f"a tensor of shape {tuple(t.shape)} has another storage now (.data or set_)"
            if t.requires_grad is not needs:
                return f"requires_grad of a tensor of shape {tuple(t.shape)} changed to {t.requires_grad}"
        for t, kept in self.hooks:
            if _hooks(t) != kept:
                return f"hooks of a tensor of shape {tuple(t.shape)} changed"
        for tensor, entry in self.grads:
            grad = tensor.grad
            if not entry.fits(grad) if type(entry) is Like else grad is None if entry is SET else grad is not entry:
                how = "set" if entry is None else "reset" if grad is None else "replaced"
                return f".grad of a parameter of shape {tuple(tensor.shape)} was {how}"
        for seen in self.optimizers:
            if not seen.fits():
                return f"settings, parameters or state of {type(seen.optimizer).__name__} changed"
        return None

