"""What one eager op on device "jax" costs, against the floor of its design.

    python benchmarks/dispatch.py [--quick] [--ops add,mul,...]    the table
    python benchmarks/dispatch.py --compiles                       nothing recompiles
    python benchmarks/dispatch.py --cpu                            plain CPU torch, with and without the import

The floor is made here: the least `__torch_dispatch__` wrapper subclass around a cached `jax.jit`, on
the same device, in the same process. Forms of an op are timed in turns; a figure is the lower quartile
over rounds, ratios and differences are taken of those. Without a mode, all three run.
"""

import argparse
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

DEVICE = os.environ.get("TORCHAX_TPU_DEVICE", "jax")
FLOOR_TARGET, JIT_TARGET, SLICE_TARGET, VIEW_TARGET, CPU_TARGET = 1.3, 8.0, 14.0, 8.0, 1.05


# ------------------------------------------------------------------ the floor


def make_floor():
    """Every line here is there because leaving it out, or writing it so, was the fastest form found."""
    import jax
    import torch

    aten = torch.ops.aten
    device, float32 = torch.device(DEVICE, 0), torch.float32
    wrapper = torch.Tensor._make_wrapper_subclass

    class Floor(torch.Tensor):
        __slots__ = ("array",)
        __torch_function__ = torch._C._disabled_torch_function_impl

        @staticmethod  # a class method costs more
        def __torch_dispatch__(func, types, args=(), kwargs=None):
            return func._floor(*args)  # an attribute is quicker than a dict of overloads

    def wrap(array):
        tensor = wrapper(Floor, array.shape, dtype=float32, device=device)
        tensor.array = array
        return tensor

    def binary(f):
        f = jax.jit(f)

        def run(x, y):
            array = f(x.array, y.array)
            tensor = wrapper(Floor, array.shape, dtype=float32, device=device)
            tensor.array = array
            return tensor

        return run

    def unary(f):
        f = jax.jit(f)

        def run(x):
            array = f(x.array)
            tensor = wrapper(Floor, array.shape, dtype=float32, device=device)
            tensor.array = array
            return tensor

        return run

    def inplace(f):
        f = jax.jit(f)

        def run(x, y):
            x.array = f(x.array, y.array)
            return x

        return run

    aten.add.Tensor._floor = binary(lambda x, y: x + y)
    aten.mul.Tensor._floor = binary(lambda x, y: x * y)
    aten.mm.default._floor = aten.matmul.default._floor = binary(lambda x, y: x @ y)
    aten.relu.default._floor = unary(jax.nn.relu)
    aten.add_.Tensor._floor = inplace(lambda x, y: x + y)
    aten.detach.default._floor = lambda x: wrap(x.array)  # what autograd saves of relu's result
    return wrap


# ------------------------------------------------------------------ the table


def cases():
    """name, torch form, jnp form, input shapes (ints: an index array), target."""
    import jax
    import jax.numpy as jnp
    import torch
    from torch.nn import functional as F

    def layer_norm(x, w, b):
        mean = jnp.mean(x, -1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * w + b

    def sdpa(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5, -1)
        return jnp.einsum("bhqk,bhkd->bhqd", weights, v)

    def conv(x, w, b):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NCHW", "OIHW", "NCHW"))
        return y + b[:, None, None]

    sq, row = (8, 8), (8, 64)
    qkv = ((1, 2, 16, 16),) * 3
    add, mul, mm = (lambda x, y: x + y), (lambda x, y: x * y), (lambda x, y: x @ y)
    add_ = lambda x, y: x.add_(y)
    return [
        ("add", add, add, (sq, sq), "floor"),
        ("mul", mul, mul, (sq, sq), "floor"),
        ("relu", torch.relu, jax.nn.relu, (sq,), "floor"),
        ("matmul", mm, mm, (sq, sq), "floor"),
        ("add_", add_, add, (sq, sq), "floor"),
        ("layer_norm", lambda x, w, b: F.layer_norm(x, (64,), w, b), layer_norm, (row, (64,), (64,)), "jit"),
        ("softmax", lambda x: torch.softmax(x, -1), lambda x: jax.nn.softmax(x, -1), (row,), "jit"),
        ("gelu", F.gelu, lambda x: jax.nn.gelu(x, approximate=False), (row,), "jit"),
        ("linear", F.linear, lambda x, w, b: jnp.einsum("ni,oi->no", x, w) + b, (row, (64, 64), (64,)), "jit"),
        ("sdpa", F.scaled_dot_product_attention, sdpa, qkv, "jit"),
        ("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), conv, ((1, 4, 8, 8), (8, 4, 3, 3), (8,)), "jit"),
        ("x[idx]", lambda x, i: x[i], lambda x, i: x[i], (row, 4), "jit"),
        ("x[1:3]+1", lambda x: x[1:3] + 1, lambda x: x[1:3] + 1, (sq,), "slice"),
        ("view(-1)", lambda x: x.view(-1), lambda x: x.reshape(-1), (sq,), "view"),
        ("x[1:3]", lambda x: x[1:3], lambda x: x[1:3], (sq,), "view"),
        ("x[2]", lambda x: x[2], lambda x: x[2], (sq,), "view"),
        ("t()", lambda x: x.t(), lambda x: x.T, (sq,), "view"),
    ]


def forms_of(case, grad):
    """{form: repeat(n)}. Inputs are made anew for each turn, since add_ changes its own."""
    import jax
    import numpy as np
    import torch

    name, torch_fn, jnp_fn, shapes, target = case
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 8, (s,), np.int64) if isinstance(s, int) else rng.standard_normal(s, np.float32) for s in shapes
    ]

    def torch_args(make):
        args = [make(a) for a in arrays]
        # add_ accumulates into a tensor that needs no gradient itself
        for t in (args[1:] if name == "add_" else args) if grad else ():
            if t.is_floating_point():
                t.requires_grad_(True)
        return args

    def jnp_args():
        return [jax.numpy.asarray(a.astype(np.int32) if a.dtype == np.int64 else a) for a in arrays]

    def repeats(fn, make_args, wait):
        def repeat(n):
            args, out = make_args(), None
            if len(args) == 1:
                (x,) = args
                for _ in range(n):
                    out = fn(x)
            elif len(args) == 2:
                x, y = args
                for _ in range(n):
                    out = fn(x, y)
            else:
                for _ in range(n):
                    out = fn(*args)
            wait(out)

        return repeat

    on_device = lambda a: torch.from_numpy(a).to(DEVICE)
    block = jax.block_until_ready
    made = {"ours": repeats(torch_fn, lambda: torch_args(on_device), lambda t: block(t.detach().jax()))}
    if target == "floor":
        wrap = forms_of.floor
        floor_args = lambda: torch_args(lambda a: wrap(jax.numpy.asarray(a)))
        made["floor"] = repeats(torch_fn, floor_args, lambda t: block(t.array))
    made["jit"] = repeats(jax.jit(jnp_fn), jnp_args, block)
    made["cpu"] = repeats(torch_fn, lambda: torch_args(torch.from_numpy), lambda t: None)
    made["jnp"] = repeats(jnp_fn, jnp_args, block)
    return made


def verdict(target, times):
    from timing import excess, ratio, typical

    if target == "floor":
        value, limit, text = ratio(times, "ours", "floor"), FLOOR_TARGET, "x floor"
    elif target == "view":
        value, limit, text = typical(times["ours"]) * 1e6, VIEW_TARGET, "us"
    else:
        limit = JIT_TARGET if target == "jit" else SLICE_TARGET
        value, text = excess(times, "ours", "jit") * 1e6, "us over jit"
    return value <= limit, f"{value:.2f} of {limit:g} {text}"


def table(args):
    from timing import interleaved, ratio, typical

    import torch

    torch.set_num_threads(1)  # threads are no help at this size
    forms_of.floor = make_floor()
    wanted = args.ops.split(",") if args.ops else None
    print(f"\n{'us per call':22}" + "".join(f"{f:>8}" for f in ("ours", "floor", "jit", "cpu", "jnp")), end="")
    print(f"{'/floor':>8}{'/jit':>7}{'/cpu':>7}{'/jnp':>7}   target")
    all_met = True
    for case in cases():
        if wanted and case[0] not in wanted:
            continue
        for grad in (False, True) if case[4] in ("floor", "jit") else (False,):
            label = case[0] + (" requires_grad" if grad else "")
            try:
                times = interleaved(forms_of(case, grad), args.rounds, args.seconds)
            except Exception as error:  # one broken op must not hide the others
                print(f"{label:22} {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}")
                all_met = False
                continue
            us = lambda f: f"{typical(times[f]) * 1e6:8.2f}" if f in times else f"{'':8}"
            by = lambda f, w=7: f"{ratio(times, 'ours', f):{w}.2f}" if f in times else " " * w
            met, text = verdict(case[4], times)
            # A gradient adds torch's own C++ autograd, which a bare jit has no part in.
            counted = not grad or case[4] == "floor"
            all_met &= met or not counted
            mark = "met" if met else "NOT MET" if counted else "over, not counted"
            print(
                f"{label:22}" + "".join(us(f) for f in ("ours", "floor", "jit", "cpu", "jnp"))
                + by("floor", 8) + by("jit") + by("cpu") + by("jnp") + f"   {mark}: {text}",
                flush=True,
            )
    return all_met


# ------------------------------------------------------------------ compiles


def compiles(args):
    """Warm each loop with two values, then count XLA compiles over fifty new ones."""
    import jax
    import torch
    from torch.nn import functional as F

    import torchax_tpu

    count = {"compile": 0, "trace": 0}

    def listen(event, duration, **kw):
        if event == "/jax/core/compile/backend_compile_duration":
            count["compile"] += 1
        elif event == "/jax/core/compile/jaxpr_trace_duration":
            count["trace"] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    torch.manual_seed(0)
    x, y = torch.randn(64, 8, device=DEVICE), torch.randn(64, 8, device=DEVICE)

    def write(i):
        x[i] = float(i)

    def optimizer(make, compiled):
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(DEVICE)
        opt = make(net.parameters())

        def step(a, b):
            opt.zero_grad()
            loss = F.mse_loss(net(a), b)
            loss.backward()
            opt.step()
            return loss

        step = torchax_tpu.jit(step) if compiled else step

        def run(i):
            for group in opt.param_groups:
                group["lr"] = 1e-3 / (i + 1)
            step(x.detach(), y[:, :4])

        return run

    sgd = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)
    loops = {
        "x[i]": lambda i: x[i],
        "x[i] * 2": lambda i: x[i] * 2,
        "x[i:i+3].sum()": lambda i: x[i : i + 3].sum(),
        "x[:, i % 8] read": lambda i: x[:, i % 8] + 1,
        "x[i] = value": write,
        "x.narrow(0, i, 2) read": lambda i: x.narrow(0, i, 2) + 1,
        "x.select(0, i).item()": lambda i: x.select(0, i).sum().item(),
        "x * value": lambda i: x * (i + 0.5),
        "x + int": lambda i: x + i,
        "add(alpha=value)": lambda i: torch.add(x, y, alpha=i + 0.5),
        "sub_(alpha=value)": lambda i: x.sub_(y, alpha=1e-3 * i),
        "addcmul(value=value)": lambda i: torch.addcmul(x, x, y, value=0.1 * i),
        "clamp(value)": lambda i: x.clamp(-0.1 * i, 0.2 * i),
        "lerp(value)": lambda i: torch.lerp(x, y, i / 64),
        "full_like(value)": lambda i: torch.full_like(x, i + 0.5),
        "dropout(p)": lambda i: F.dropout(x, 0.01 * (i + 1)),
        "leaky_relu(slope)": lambda i: F.leaky_relu(x, 0.01 * (i + 1)),
        "SGD step, lr": optimizer(sgd, False),
        "AdamW step, lr": optimizer(torch.optim.AdamW, False),
        "SGD jit step, lr": optimizer(sgd, True),
        "AdamW jit step, lr": optimizer(torch.optim.AdamW, True),
    }
    print(f"\n{'50 new values of':24}{'XLA compiles':>14}{'JAX traces':>12}")
    all_met = True
    for label, run in loops.items():
        try:
            for i in (0, 1, 2):
                run(i)
            before = dict(count)
            for i in range(3, 53):
                run(i)
        except Exception as error:
            print(f"{label:24} {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}")
            all_met = False
            continue
        new = {k: count[k] - before[k] for k in count}
        met = not new["compile"] and not new["trace"]
        all_met &= met
        print(f"{label:24}{new['compile']:14}{new['trace']:12}   {'met' if met else 'NOT MET'}", flush=True)
    return all_met


# ------------------------------------------------------------------ plain CPU torch


def child(imported):
    """Time plain CPU ops in this process; with the package imported and used, if asked."""
    started = time.perf_counter()
    import torch

    cost = {"import torch": time.perf_counter() - started}
    if imported:
        started = time.perf_counter()
        import torchax_tpu  # noqa: F401

        cost["import torchax_tpu"] = time.perf_counter() - started
        cost["jax imported"] = "jax" in sys.modules
        (torch.ones(2, device=DEVICE) + 1).sum().item()
    from timing import interleaved, loop

    torch.set_num_threads(1)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    g = torch.randn(8, 8, requires_grad=True)
    net = torch.nn.Linear(8, 8)
    ops = {
        "add": lambda: x + y,
        "add requires_grad": lambda: x + g,
        "add_": lambda: x.add_(y),
        "matmul": lambda: x @ y,
        "x[1:3]": lambda: x[1:3],
        "zeros": lambda: torch.zeros(8, 8),
        "Linear": lambda: net(x),
        "backward": lambda: (g * g).sum().backward(),
    }
    times = interleaved({k: loop(f) for k, f in ops.items()}, 15, 0.01)
    print(json.dumps({"ops": {k: min(v) for k, v in times.items()}, "cost": cost}))


def cpu(args):
    best, cost = {}, {}
    for _ in range(3 if args.quick else 5):
        for mode in ("plain", "imported"):
            env = dict(os.environ)
            if mode == "plain":
                env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
            done = subprocess.run(
                [sys.executable, os.path.abspath(__file__), "--child", mode], env=env, capture_output=True, text=True
            )
            if done.returncode:
                print(done.stderr[-2000:])
                return False
            got = json.loads(done.stdout.splitlines()[-1])
            for k, v in got["ops"].items():
                best.setdefault(k, {}).setdefault(mode, []).append(v)
            for k, v in got["cost"].items():
                cost.setdefault(k, []).append(v)
    print(f"\n{'CPU torch, us':22}{'plain':>9}{'imported':>10}{'ratio':>8}   (best of all processes)")
    all_met = True
    for k, v in best.items():
        plain, imported = min(v["plain"]), min(v["imported"])
        met = imported <= plain * CPU_TARGET
        all_met &= met
        mark = "met" if met else "NOT MET"
        print(f"{k:22}{plain * 1e6:9.3f}{imported * 1e6:10.3f}{imported / plain:8.2f}   {mark}: {CPU_TARGET:g}")
    ms = min(cost["import torchax_tpu"]) * 1e3
    met = ms < 50 and not any(cost["jax imported"])
    print(
        f"import torch {min(cost['import torch']) * 1e3:.0f} ms, import torchax_tpu {ms:.0f} ms more, "
        f"jax {'' if any(cost['jax imported']) else 'not '}imported by it   {'met' if met else 'NOT MET'}: 50 ms, lazily"
    )
    return all_met and met


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiles", action="store_true", help="only count compiles")
    parser.add_argument("--cpu", action="store_true", help="only plain CPU torch before and after the import")
    parser.add_argument("--table", action="store_true", help="only the table")
    parser.add_argument("--quick", action="store_true", help="few short rounds")
    parser.add_argument("--ops", help="rows of the table, comma-separated")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--child", choices=("plain", "imported"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child == "imported")
    args.rounds = args.rounds or (9 if args.quick else 31)
    args.seconds = 0.005 if args.quick else 0.01
    every = not (args.compiles or args.cpu or args.table)

    import torchax_tpu  # noqa: F401
    from timing import environment

    print(environment())
    met = True
    if args.table or every:
        met &= table(args)
    if args.compiles or every:
        met &= compiles(args)
    if args.cpu or every:
        met &= cpu(args)
    print("\nall targets met" if met else "\nsome target missed")
    return 0 if met or not args.strict else 1


if __name__ == "__main__":
    sys.exit(main())
