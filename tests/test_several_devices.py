"""With several JAX devices, what a tensor says about its device is where its array is."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import torch, torchax_tpu
D = "jax:3"
x = torch.ones(2, 2, device=D)
linear = torch.nn.Linear(2, 2, device=D)
optimizer = torch.optim.Adam(linear.parameters())
linear(x).sum().backward()
optimizer.step()
made = [
    torch.ones(2, device=D), torch.zeros(2, device=D), torch.full((2,), 3, device=D), torch.empty(2, device=D),
    torch.rand(2, device=D), torch.randn(2, device=D), torch.randint(0, 4, (2,), device=D), torch.randperm(5, device=D),
    torch.arange(5, device=D), torch.linspace(0, 1, 5, device=D), torch.eye(3, device=D), torch.tensor([1, 2], device=D),
    torch.tril_indices(3, 3, device=D), torch.zeros_like(x), torch.ones_like(x), torch.rand_like(x), x.new_full((3,), 1),
    torch.empty(3, device=D).normal_(), torch.empty(3, device=D).fill_(2), torch.empty(4, device=D)[1:].fill_(1),
    torch.bernoulli(x * 0.5), torch.dropout(x, 0.5, True), torch.nonzero(x), x[x > 0], x.unique(), x.sum(), x.argmax(),
    torch.ones(2, dtype=torch.int64, device=D), torch.ones(2, dtype=torch.complex128, device=D), torch.cat([x, x]),
    x.to("jax:5"), linear.weight.detach(), linear.weight.grad, *optimizer.state[linear.weight].values(),
]
wrong = [i for i, t in enumerate(made) if t.device.type == "jax" and [d.id for d in t.jax().devices()] != [t.device.index]]
print("wrong:", wrong)
"""


def test_arrays_are_where_their_tensors_say():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu",
                   "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], env=environment, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "wrong: []", done.stdout + done.stderr[-2000:]
