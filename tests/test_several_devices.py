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


def run(program):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu",
                   "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout.strip()


def test_arrays_are_where_their_tensors_say():
    assert run(PROGRAM) == "wrong: []"


CURRENT = """
import io, threading
import torch, torchax_tpu

def places():
    x, file = torch.ones(2), io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    made = [
        x.to("jax"), x.to("jax", torch.float64), x.to(device="jax"), x.to(torch.device("jax")), x.to("jax:5").to("jax"),
        torch.tensor([1, 2], device="jax"), torch.as_tensor([1.0], device="jax"), torch.asarray([1.0], device="jax"),
        torch.ones(2, device="jax"), torch.rand(2, device="jax"), torch.zeros_like(x, device="jax"), x.new_tensor([1.0], device="jax"),
        torch.nn.Linear(2, 2).to("jax").weight, torch.nn.Linear(2, 2, device="jax").weight, torch.nn.Linear(2, 2).jax().bias,
        torch.load(file, map_location="jax"),
    ]
    assert all({d.id for d in t.jax().devices()} == {t.device.index} for t in made)
    assert x.to("jax:5").device.index == 5 and torch.tensor(1, device="jax:0").device.index == 0
    with torch.device("jax"):
        made += [torch.tensor(1), torch.ones(1)]
    return {t.device.index for t in made} | {d.id for d in x.jax().devices()}

def said():
    assert torch.jax.current_device() == torch.accelerator.current_device_index()
    return torch.jax.current_device()

def depth():
    return torch._C._len_torch_function_stack()

assert places() == {0} == {said()} and depth() == 0
torch.jax.set_device(3)
assert places() == {3} == {said()}
with torch.jax.device(5):
    assert places() == {5} == {said()}
    with torch.jax.device("jax:0"):
        assert places() == {0} == {said()}
    assert places() == {5}
assert places() == {3}
torch.accelerator.set_device_index(2)
assert places() == {2} == {said()}
with torch.accelerator.device_index(4):
    assert places() == {4} == {said()}
other = []
thread = threading.Thread(target=lambda: other.append((said(), places())))
thread.start()
thread.join()
assert other == [(0, {0})], other
torch.set_default_device("jax")
assert torch.tensor(1).device.index == torch.get_default_device().index == 2
torch.jax.set_device(0)
assert torch.tensor(1).device.index == 0 and depth() == 1
torch.jax.set_device(1)
torch.set_default_device(None)
assert torch.tensor(1).device.type == "cpu" and depth() == 1
torch.jax.set_device("jax:0")
assert places() == {0} and depth() == 0
print("done")
"""


def test_an_index_left_out_means_the_current_device():
    assert run(CURRENT) == "done"


DATA_PARALLEL = """
import copy, torch, torchax_tpu
from torch import nn
torch.manual_seed(0)
reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
m = copy.deepcopy(reference).to("jax")
parallel, x = nn.DataParallel(m), torch.randn(10, 3)
assert parallel.device_ids == list(range(8))
for given in (x, x.to("jax")):
    m.zero_grad(), reference.zero_grad()
    y, want = parallel(given), reference(x)
    y.pow(2).sum().backward(), want.pow(2).sum().backward()
    torch.testing.assert_close(y.cpu(), want)
    for p, q in zip(m.parameters(), reference.parameters()):
        torch.testing.assert_close(p.grad.cpu(), q.grad)
assert nn.parallel.data_parallel(m, x.to("jax"), device_ids=[0, 2], output_device=2).device.index == 2
z = torch.complex(x, x).to("jax")
parts = nn.parallel._functions.Scatter.apply([0, 3], None, 0, z)
assert [p.device.index for p in parts] == [0, 3] and torch.equal(nn.parallel.comm.gather(parts, 0, "cpu"), torch.view_as_real(z).cpu())
print("done")
"""


def test_data_parallel():
    assert run(DATA_PARALLEL) == "done"
