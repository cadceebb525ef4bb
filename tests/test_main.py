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
