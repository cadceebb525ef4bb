"""`python -m torchax_tpu script.py`: unmodified scripts, "cuda" as the JAX device, another name, autoload, a light import."""

import os
import subprocess
import sys
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(code, tmp_path, *flags, module=True, **env):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, *(["-m", "torchax_tpu"] if module else []), str(script), *flags]
    env = {**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_script_and_cuda_as_jax(tmp_path):
    out = run("""
        import sys, threading, torch
        dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.cuda.manual_seed_all(0)
        m = torch.nn.Linear(4, 2).to(dev)
        opt = torch.optim.AdamW(m.parameters())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = m(torch.randn(3, 4, device="cuda:0"))
        y.float().sum().backward(); opt.step()
        print(sys.argv[1:], y.device, y.dtype, m.cuda().weight.grad.device, torch.ones(1).device)
        t = threading.Thread(target=lambda: print(torch.ones(2, device="cuda").device)); t.start(); t.join()
        print(torch.randn(2, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)).device)
        print(torch.zeros(2, pin_memory=True).to("cuda", non_blocking=True).device, torch.tensor([1], pin_memory=True).tolist())
        torch.cuda.synchronize()
    """, tmp_path, "--cuda-as-jax", "--epochs", "3")
    assert out.split("\n")[:4] == ["['--epochs', '3'] jax:0 torch.bfloat16 jax:0 cpu", "jax:0", "jax:0", "jax:0 [1]"]


def test_another_name(tmp_path):
    out = run("""
        import torch
        x = torch.ones(2, device="tpu")
        print(x.device, torch.tpu.is_available(), torch.accelerator.current_accelerator())
        print(x)
    """, tmp_path, TORCHAX_TPU_DEVICE="tpu")
    assert out.split("\n")[:2] == ["tpu:0 True tpu", "tensor([1., 1.], device='tpu:0')"]


def test_import_brings_no_jax(tmp_path):
    out = run("""
        import sys, torch, torchax_tpu
        print("jax" in sys.modules, (torch.ones(2) + 1).tolist(), "jax" in sys.modules)
        print((torch.ones(2, device="jax") + 1).tolist(), "jax" in sys.modules)
    """, tmp_path, module=False)
    assert out.split("\n")[:2] == ["False [2.0, 2.0] False", "[2.0, 2.0] True"]


def test_clean_exit_after_backward_on_threads(tmp_path):
    out = run("""
        import threading, torch, torchax_tpu
        done = []
        def work():
            x = torch.ones(2, device="jax", requires_grad=True)
            (x * x).sum().backward()
            done.append(x.grad.tolist())
        threads = [threading.Thread(target=work) for _ in range(2)]
        [t.start() for t in threads]; [t.join() for t in threads]
        work()
        print(done)
    """, tmp_path, module=False)
    assert out == "[[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]\n"


def test_fork_after_use_says_what_to_do(tmp_path):
    out = run("""
        import os, torch, torchax_tpu
        x = torch.ones(2, device="jax") + 1
        pid = os.fork()
        if pid == 0:
            try:
                x + 1
            except torchax_tpu.errors.ForkError as e:
                print("spawn" in str(e), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print(x.tolist())
    """, tmp_path, module=False)
    assert out.split("\n")[:2] == ["True", "[2.0, 2.0]"]


def test_several_devices(tmp_path):
    out = run("""
        import torch, torchax_tpu
        print(torch.jax.device_count())
        a = torch.arange(4.0, device="jax:3"); b = a.to("jax:1")
        print((a + 1).device, b.device, (b * 2).tolist(), sorted(d.id for d in b.jax().devices()))
        try:
            a + b
        except RuntimeError as e:
            print("same device" in str(e))
        c = torch.zeros(4, device="jax"); c.copy_(a); print(c.device, c.tolist())
        torch.jax.set_device(2); print(torch.ones(1, device="jax").device)
    """, tmp_path, module=False, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert out.split("\n")[:5] == ["4", "jax:3 jax:1 [0.0, 2.0, 4.0, 6.0] [1]", "True", "jax:0 [0.0, 1.0, 2.0, 3.0]", "jax:2"]


def test_what_cuda_scripts_do(tmp_path):
    out = run("""
        import io, torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.backends.cudnn.benchmark = True
        model = nn.DataParallel(nn.Linear(2, 2)).cuda()
        side = torch.cuda.Stream()
        for x, y in DataLoader(TensorDataset(torch.randn(8, 2), torch.randint(0, 2, (8,))), batch_size=4, pin_memory=True):
            with torch.cuda.stream(side):
                x, y = x.cuda(non_blocking=True), y.to(torch.device("cuda", 0), non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            x.record_stream(torch.cuda.current_stream())
            nn.functional.cross_entropy(model(x), y).backward()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), end.record()
        torch.cuda.synchronize()
        with torch.cuda.device("cuda:0"):
            print(model.module.weight.grad.is_cuda, x.is_cuda, torch.ones(1).is_cuda, start.elapsed_time(end) >= 0)
        old = torch.cuda.FloatTensor([1.0, 2.0])
        print(old.device, isinstance(old, torch.cuda.FloatTensor), isinstance(old, torch.cuda.LongTensor), isinstance(torch.ones(1), torch.cuda.FloatTensor))
        print(torch.ones(1).type("torch.cuda.DoubleTensor").dtype, torch.ones(1).type(torch.cuda.HalfTensor).device)
        file = io.BytesIO()
        torch.save({"a": torch.ones(1).cuda()}, file)
        places = []
        for where in (None, "cuda:0", "cpu", {"cuda:0": "cpu"}, lambda storage, _: storage.cuda(0)):
            file.seek(0)
            places.append(torch.load(file, map_location=where)["a"].device.type)
        print(*places)
        with torch.cuda.nvtx.range("step"):
            torch.cuda.nvtx.range_push("a"), torch.cuda.nvtx.range_pop()
        try:
            torch._C._cuda_getDeviceCount()
        except AttributeError:
            print("no CUDA")
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        print(torch.ones(1).device)
    """, tmp_path, "--cuda-as-jax")
    assert out.split("\n")[:-1] == ["True True False True", "jax:0 True False False", "torch.float64 jax:0", "jax jax cpu cpu jax",
                                    "no CUDA", "jax:0"]


def test_files_of_cuda_tensors_load(tmp_path):
    out = run("""
        import io, torch

        torch.serialization.register_package(0, lambda s: "cuda:0", lambda s, location: None)  # save as on a CUDA machine
        file = io.BytesIO()
        torch.save(torch.arange(3.0), file)
        file.seek(0)
        print(torch.load(file))
    """, tmp_path, "--cuda-as-jax")
    assert out == "tensor([0., 1., 2.], device='jax:0')\n"
