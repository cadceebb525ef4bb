"""The device's random stream: a seed and a counter per device, keys made inside compiled ops.

A draw uses ``fold_in(key(seed), counter)``, so eager and jitted programs that start from the
same state draw the same numbers, and two draws never share a key. The state lives on the
host: seeding and saving cost no device work.
"""

import threading

import jax
import numpy as np
import torch

IMPL = "threefry2x32"


class Stream:
    """Seed and counter of one device's default generator."""

    __slots__ = ("seed", "counter", "key_data")

    def __init__(self, seed=0):
        self.reseed(seed)

    def reseed(self, seed, counter=0):
        self.seed = seed & (2**64 - 1)
        self.counter = counter
        self.key_data = seed_data(self.seed)


def seed_data(seed):
    """The two uint32 words that start a threefry key from a 64-bit seed."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


_streams = {}
_lock = threading.Lock()
_initial = [torch.default_generator.initial_seed()]


def stream(index):
    """The default stream of device ``index``."""
    s = _streams.get(index)
    if s is None:
        with _lock:
            s = _streams.setdefault(index, Stream(_initial[0]))
    return s


def manual_seed_all(seed):
    """Seed every device's stream, also those not used yet."""
    _initial[0] = int(seed)
    for s in _streams.values():
        s.reseed(int(seed))


def make_key(key_data, counter):
    """The PRNG key of one draw; traceable."""
    return jax.random.fold_in(jax.random.wrap_key_data(key_data, impl=IMPL), counter)


def next_draw(index):
    """(key data, counter) of the next draw, host values; advances the stream."""
    s = stream(index)
    with _lock:
        counter = s.counter
        s.counter = counter + 1
    return s.key_data, np.uint32(counter & 0xFFFFFFFF)


def generator_draw(generator):
    """(key data, counter) from a torch.Generator: follows its seed and advances it."""
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    return seed_data(seed & (2**64 - 1)), np.uint32(0)


def get_state(index):
    """The stream's state as a CPU uint8 tensor of 16 bytes: seed and counter, little-endian uint64."""
    s = stream(index)
    return torch.from_numpy(np.array([s.seed, s.counter], "<u8").view(np.uint8).copy())


def set_state(state, index):
    """Put a stream back into a state that `get_state` gave; RuntimeError for anything else."""
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.numel() != 16:
        raise RuntimeError("the RNG state of this device is a uint8 CPU tensor of 16 bytes, as get_rng_state() returns it")
    seed, counter = np.frombuffer(state.cpu().contiguous().numpy().tobytes(), "<u8").tolist()
    stream(index).reseed(seed, counter)


class Generator(torch.Generator):
    """A generator for ``generator=`` arguments on the device.

    torch can't build one of its own for a Python backend, so this is a CPU generator that says
    it lives on the device; ops draw their keys from it, and advance it.
    """

    def __new__(cls, device=None):
        return super().__new__(cls, "cpu")

    def __init__(self, device=None):
        self._place = device

    @property
    def device(self):
        from .tensor import place  # late: tensors build on this module
        return place(self._place)
