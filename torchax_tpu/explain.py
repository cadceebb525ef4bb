"""The error a user should see when an op fails: torch's own class and words, with the op, shapes and dtypes."""

import jax
import torch

from . import errors


def explain(func, args, kwargs, error):
    """The error a user should see: torch's own from its meta kernel if it refuses too, else ours."""
    if isinstance(error, (errors.TorchaxTpuError, IndexError, NotImplementedError)):
        return error
    if type(error) is RuntimeError:  # said by our own impl; meta kernels written in Python may stumble elsewhere
        return _ours(func, args, kwargs, error)
    try:
        _on_meta(func, args, kwargs)
    except Exception as torch_error:  # torch's class, and torch's words with the op and shapes added
        if isinstance(torch_error, NotImplementedError):
            return _ours(func, args, kwargs, error)
        return _with_context(torch_error, func, args, kwargs)
    return _ours(func, args, kwargs, error)


def _with_context(error, func, args, kwargs):
    message = f"{error} (in {func}, called with {signature(args, kwargs)})"
    try:
        return type(error)(message)
    except Exception:
        return RuntimeError(message)


def _ours(func, args, kwargs, error):
    if isinstance(error, jax.errors.JAXTypeError):  # a tracer where Python needs a value
        return errors.TraceError(
            f"{func} needs a concrete value while a program is being traced ({str(error).splitlines()[0]}). "
            "Use torch.where, torch.cond or masks instead of Python control flow on tensor values.")
    kind = type(error) if isinstance(error, (RuntimeError, IndexError, ValueError, TypeError)) else RuntimeError
    if kind not in (RuntimeError, IndexError, ValueError, TypeError):
        kind = RuntimeError
    if isinstance(error, (TypeError, ValueError)):
        # jax.numpy's word for a dim that there isn't, where torch says IndexError
        kind = IndexError if "is out of bounds for array of dimension" in str(error) else RuntimeError
    return kind(f"{func}: {error} (called with {signature(args, kwargs)})")


def _to_meta(x):
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, (list, tuple)):
        return type(x)(map(_to_meta, x))
    if isinstance(x, torch.device):
        return torch.device("meta")
    return x


def _on_meta(func, args, kwargs):
    return func(*_to_meta(args), **{k: _to_meta(v) for k, v in kwargs.items() if k != "generator"})


def signature(args, kwargs):
    """Shapes, dtypes and values of a call, for messages."""
    parts = [_show(a) for a in args] + [f"{k}={_show(v)}" for k, v in kwargs.items()]
    return "(" + ", ".join(parts) + ")"


def _show(x):
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(_show, x)) + "]"
    return repr(x)
