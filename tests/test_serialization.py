"""Files and copies keep aliases, strides and objects; old formats load; workers may return device tensors."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

DEVICE = "jax"
DTYPES = (torch.bool, torch.uint8, torch.uint16, torch.int64, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2)


def through_file(obj, save=(), **load):
    f = io.BytesIO()
    torch.save(obj, f, **dict(save))
    f.seek(0)
    return torch.load(f, **load)


@pytest.mark.parametrize("source,where", [("jax", None), ("jax", "cpu"), ("cpu", "jax")])
def test_aliases_and_strides_survive_a_file(source, where):
    base = torch.arange(12.0, device=source).reshape(3, 4)
    b, row, t = through_file([base, base[1], base.t()], map_location=where)
    assert b.device.type == (where or source) and t.stride() == (1, 4)
    row.fill_(9)
    assert b[1].tolist() == [9.0] * 4 and t[:, 1].tolist() == [9.0] * 4
    assert base[1].tolist() == [4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    x = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    for back in (through_file(x.to(DEVICE)), pickle.loads(pickle.dumps(x.to(DEVICE)))):
        assert back.dtype is dtype and back.device == torch.device(DEVICE, 0)
        assert torch.equal(back.cpu().view(torch.uint8), x.view(torch.uint8))


def test_legacy_format():
    x = torch.arange(6.0, device=DEVICE).reshape(2, 3)
    back = through_file([x, x[1]], {"_use_new_zipfile_serialization": False})
    assert back[0].tolist() == x.tolist() and back[1].tolist() == [3.0, 4.0, 5.0] and back[0].device == x.device


def test_a_storage_is_saved_once():
    x = torch.zeros(50_000, device=DEVICE)
    f, g = io.BytesIO(), io.BytesIO()
    torch.save([x], f)
    torch.save([x, x.view(50, 1000), x[7:]], g)
    assert len(g.getvalue()) < len(f.getvalue()) + 2000


def test_modules_whole():
    m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(DEVICE)
    m[1].weight = m[0].weight
    for back in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), through_file(m, weights_only=False)):
        assert back[0].weight is back[1].weight and isinstance(back[0].weight, nn.Parameter)
        assert back[0].weight.requires_grad and back[0].weight.tolist() == m[0].weight.tolist()
        assert back[0].weight is not m[0].weight


def test_attributes_survive():
    x = torch.ones(2, device=DEVICE)
    x.note = "kept"
    assert pickle.loads(pickle.dumps(x)).note == "kept" and copy.deepcopy(x).note == "kept"
    assert not hasattr(x + 1, "note")


def test_device_that_is_not_there():
    with pytest.raises(RuntimeError, match="jax:99"):
        through_file(torch.ones(1), map_location="jax:99")


def test_moving_keeps_the_parameter_objects():
    m = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
    before, objects = m.weight.detach().clone(), [id(p) for p in m.parameters()]
    m(torch.ones(1, 2)).sum().backward()
    for device in (DEVICE, "cpu", DEVICE):
        m.to(device)
        assert [id(p) for p in m.parameters()] == objects
        assert m.weight.device.type == device == m.weight.grad.device.type and m.weight.requires_grad
        assert m.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]] and type(m.weight.grad.cpu()) is torch.Tensor
    optimizer.step()
    assert not torch.equal(m.weight.detach().cpu(), before)


def test_map_location_may_move_storages():
    back = through_file(torch.arange(3.0), map_location=lambda storage, _: storage.jax())
    assert back.device == torch.device(DEVICE, 0) and back.tolist() == [0.0, 1.0, 2.0]
    back = through_file(torch.arange(3.0, device=DEVICE), map_location=lambda storage, _: storage)
    assert back.device.type == "cpu" and back.tolist() == [0.0, 1.0, 2.0]


def plus_one(x, queue):
    queue.put(x + 1)


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_tensors_go_to_other_processes_and_back(context):
    mp = torch.multiprocessing.get_context(context)
    queue = mp.Queue()
    x = torch.arange(3.0, device=DEVICE, dtype=torch.float64)
    process = mp.Process(target=plus_one, args=(x, queue))
    process.start()
    y = queue.get(timeout=120)
    process.join()
    assert y.device.type == DEVICE and y.dtype is torch.float64 and y.tolist() == [1.0, 2.0, 3.0]


class Held(torch.utils.data.Dataset):
    """A dataset whose tensor lives on the device."""

    def __init__(self):
        self.x = torch.arange(4.0, device=DEVICE)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.x[i]


def test_a_dataset_on_the_device():
    held = Held()
    for how in ({}, {"num_workers": 1, "multiprocessing_context": "spawn", "timeout": 120}):
        batches = list(torch.utils.data.DataLoader(held, batch_size=2, **how))
        assert [b.device.type for b in batches] == [DEVICE] * 2 and [b.tolist() for b in batches] == [[0.0, 1.0], [2.0, 3.0]]
    with pytest.raises(RuntimeError, match="multiprocessing_context='spawn'"):
        list(torch.utils.data.DataLoader(held, num_workers=1, multiprocessing_context="fork", timeout=120))
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        list(torch.utils.data.DataLoader(held, pin_memory=True))


class OnDevice(torch.utils.data.Dataset):
    """Items live on the device already in the worker."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        import torchax_tpu  # noqa: F401
        return torch.full((2,), float(i), device=DEVICE)


def test_a_spawned_worker_returns_device_tensors():
    torch.ones(1, device=DEVICE)
    loader = torch.utils.data.DataLoader(OnDevice(), batch_size=2, num_workers=1, multiprocessing_context="spawn", timeout=120)
    batches = list(loader)
    assert [b.device.type for b in batches] == ["jax", "jax"]
    assert [b[:, 0].tolist() for b in batches] == [[0.0, 1.0], [2.0, 3.0]]
