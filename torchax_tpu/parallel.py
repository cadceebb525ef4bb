"""What nn.DataParallel asks of torch's C++ and only a CUDA build has: pieces and copies of tensors on several devices."""

import torch

NAMES = ("_scatter", "_gather", "_broadcast", "_broadcast_coalesced")
_name = "jax"


def _real(tensor):
    # As from C++: the caller makes complex numbers of it again.
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _on(tensor, index):
    return tensor.to(torch.device("cpu") if index is None or index < 0 else torch.device(_name, index))


def _scatter(tensor, devices, chunk_sizes, dim, streams=None):
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return [_real(_on(chunk, index)) for chunk, index in zip(chunks, devices)]


def _gather(tensors, dim, destination):
    return torch.cat([_real(_on(t, destination)) for t in tensors], dim if dim >= 0 else dim + tensors[0].dim())


def _broadcast(tensor, devices):
    return [_on(tensor, index) for index in devices]


def _broadcast_coalesced(tensors, devices, buffer_size):
    return [[_real(_on(t, index)) for t in tensors] for index in devices]


def setup(name):
    """Give torch._C the functions it lacks."""
    global _name
    _name = name
    if not hasattr(torch._C, "_scatter"):
        for function in NAMES:
            setattr(torch._C, function, globals()[function])
