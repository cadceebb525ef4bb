"""Tests run on JAX's CPU backend unless the environment asks for another."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torchax_tpu  # noqa: E402, F401  (makes the device for every test)
