"""Exceptions in a backward reach the caller as they were raised, on any thread, and leave the device usable."""

import threading

import pytest
import torch

import torchax_tpu  # noqa: F401

DEVICE = "jax"


class Boom(Exception):
    pass


@pytest.fixture
def failing_sin():
    """cos has a derivative by sin, which a C++ node of autograd calls: let that raise."""
    x = torch.ones(2, device=DEVICE)
    x.sin()
    overload = torch.ops.aten.sin.default
    handler = overload._torchax_tpu

    def fail(args, kwargs):
        raise Boom("from the op")

    overload._torchax_tpu = fail
    yield
    overload._torchax_tpu = handler


def test_exception_of_an_op(failing_sin):
    for _ in range(2):
        x = torch.ones(2, device=DEVICE, requires_grad=True)
        with pytest.raises(Boom, match="from the op"):
            x.cos().sum().backward()
        with pytest.raises(Boom, match="from the op"):
            torch.autograd.grad(x.cos().sum(), x)
    x.exp().sum().backward()
    assert x.grad is not None


def test_exception_on_another_thread(failing_sin):
    seen = []

    def work():
        try:
            torch.ones(2, device=DEVICE, requires_grad=True).cos().sum().backward()
        except Boom as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(seen) == 1


def test_exception_of_a_python_function():
    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise Boom("from Python")

    with pytest.raises(Boom, match="from Python"):
        F.apply(torch.ones(2, device=DEVICE, requires_grad=True)).sum().backward()


def test_sparse_gradients_are_refused_by_name():
    x = torch.ones(3, 2, device=DEVICE, requires_grad=True)
    with pytest.raises(NotImplementedError, match="dense tensors only"):
        x.gather(0, torch.tensor([[0, 1]], device=DEVICE), sparse_grad=True).sum().backward()
