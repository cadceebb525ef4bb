"""Whole models on device "jax", eager and jit, against CPU torch and the same models written in JAX.

    python benchmarks/models.py [--quick] [--models mlp,resnet,gpt] [--what forward,train]

All forms are first checked to agree, then timed in turns. Times are lower quartiles over
rounds, in milliseconds per call; ratios are taken of those.
Targets: jit at most 1.10 times the same model written in JAX under jax.jit; an eager train
step of the ResNet and the GPT at most 2 times CPU torch.
"""

import argparse
import os
import sys
import time

# Spinning threads of CPU torch fight those of XLA, and lose: its steps then take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import zoo  # noqa: E402
from timing import environment, interleaved, loop, ratio, typical  # noqa: E402

JIT_TARGET, EAGER_TARGET = 1.10, 2.0


def as_numpy(x):
    return np.asarray(x.detach().cpu() if isinstance(x, torch.Tensor) else x)


def wait(result):
    """Until the device has done it: results of one program are ready together."""
    if isinstance(result, torch.Tensor) and result.device.type != "cpu":
        result = result.jax()
    if not isinstance(result, torch.Tensor):
        jax.block_until_ready(result)


class TorchForm:
    def __init__(self, model, device, jit=None):
        x, y = model.batch()
        self.x = torch.from_numpy(x).to(device)
        self.y = torch.from_numpy(y).long().to(device)
        self.module = model.module().to(device)
        self.optimizer = zoo.torch_optimizer(model.optimizer, self.module.parameters())
        step = zoo.torch_step(self.module, self.optimizer)
        forward = self.module.__call__
        if jit is not None:
            step, forward = jit(step), jit(lambda x: self.module(x))
        self._step, self._forward = step, forward

    def forward(self):
        self.module.eval()

        def run():
            with torch.no_grad():
                return self._forward(self.x)

        return run

    def train(self):
        self.module.train()
        return lambda: self._step(self.x, self.y)

    def values(self):
        return {k: as_numpy(v) for k, v in self.module.state_dict().items() if v.is_floating_point()}


class JaxForm:
    def __init__(self, model, forward, jit):
        x, y = model.batch()
        self.x, self.y = jax.numpy.asarray(x), jax.numpy.asarray(y)
        self.p, self.s = model.state(model.module())
        init, update = zoo.jax_optimizer(model.optimizer)
        self.o = init(self.p)
        step = zoo.jax_step(forward, update)
        infer = lambda p, s, x: forward(p, s, x, False)[0]
        # Donated, as one writes it by hand.
        self._step, self._forward = (jax.jit(step, donate_argnums=(0, 1, 2)), jax.jit(infer)) if jit else (step, infer)

    def forward(self):
        return lambda: self._forward(self.p, self.s, self.x)

    def train(self):
        def run():
            self.p, self.s, self.o, loss = self._step(self.p, self.s, self.o, self.x, self.y)
            return loss

        return run

    def values(self):
        return {k: np.asarray(v) for k, v in (self.p | self.s).items()}


def forms(model, device, op_by_op):
    made = {"torch cpu": lambda: TorchForm(model, "cpu")}
    if device != "cpu":
        import torchax_tpu

        made["eager"] = lambda: TorchForm(model, device)
        made["jit"] = lambda: TorchForm(model, device, torchax_tpu.jit)
    if op_by_op:
        made["jnp"] = lambda: JaxForm(model, model.forward, False)
    made["hand"] = lambda: JaxForm(model, model.forward, True)
    for name, forward in model.others:
        made["hand " + name] = lambda forward=forward: JaxForm(model, forward, True)
    return made


def check(what, made, report):
    """The forms, after one forward or three steps from the same values, must agree with CPU torch."""
    ready, reference, ok = {}, None, True
    for name, make in made.items():
        started = time.perf_counter()
        form = make()
        run = getattr(form, what)()
        outputs = [as_numpy(run()) for _ in range(1 if what == "forward" else 3)]
        got = {"out": np.stack(outputs)}
        if what == "train":
            got |= form.values()
        if reference is None:
            reference = got
        worst = max(
            float(np.max(np.abs(got[k] - v) / (1e-2 * np.abs(v).max() + 1e-3), initial=0)) for k, v in reference.items() if k in got
        )
        ok &= worst <= 1
        ready[name] = run
        report(f"  {name}: first calls {time.perf_counter() - started:.1f} s, differs by {worst:.2f} of what is allowed")
    return ready, ok


def measure(name, what, args, report):
    ready, ok = check(what, forms(zoo.MODELS[name], args.device, not args.no_jnp), report)
    if not ok:
        print(f"{name} {what}: results DISAGREE, not timed")
        return False
    times = interleaved(
        {form: loop(run, wait) for form, run in ready.items()}, args.rounds, 0.05 if args.quick else 0.25
    )
    columns = [f"{form} {typical(t) * 1e3:.2f}" for form, t in times.items()]
    print(f"{name} {what}, ms per call: " + ", ".join(columns))
    met = True
    hand = min((f for f in times if f.startswith("hand")), key=lambda f: typical(times[f]))
    verdicts = []
    if "jit" in times:
        r = ratio(times, "jit", "hand")
        met &= r <= JIT_TARGET
        verdicts.append(f"jit/hand {r:.2f} ({'met' if r <= JIT_TARGET else 'NOT MET'}: {JIT_TARGET:.2f})")
        if hand != "hand":
            verdicts.append(f"jit/{hand} {ratio(times, 'jit', hand):.2f}")
        verdicts.append(f"jit/cpu {ratio(times, 'jit', 'torch cpu'):.2f}")
        r = ratio(times, "eager", "torch cpu")
        text = f"eager/cpu {r:.2f}"
        if what == "train" and name != "mlp":
            met &= r <= EAGER_TARGET
            text += f" ({'met' if r <= EAGER_TARGET else 'NOT MET'}: {EAGER_TARGET:.1f})"
        verdicts.append(text)
    if "jnp" in times:
        verdicts.append(f"jnp/cpu {ratio(times, 'jnp', 'torch cpu'):.2f}")
        if "eager" in times:
            verdicts.append(f"eager/jnp {ratio(times, 'eager', 'jnp'):.2f}")
    verdicts.append(f"hand/cpu {ratio(times, 'hand', 'torch cpu'):.2f}")
    print("    " + ", ".join(verdicts), flush=True)
    return met


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few short rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--models", default=",".join(zoo.MODELS))
    parser.add_argument("--what", default="forward,train")
    parser.add_argument("--device", default=os.environ.get("TORCHAX_TPU_DEVICE", "jax"), help='"cpu": references only')
    parser.add_argument("--no-jnp", action="store_true", help="leave out op-by-op jnp, which is slow")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    args.rounds = args.rounds or (5 if args.quick else 15)
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    report = (lambda text: print(text, flush=True)) if args.verbose else (lambda text: None)
    print(environment())
    met = True
    for name in args.models.split(","):
        for what in args.what.split(","):
            met &= measure(name, what, args, report)
    print("all targets met" if met else "some target missed")
    return 0 if met or not args.strict else 1


if __name__ == "__main__":
    sys.exit(main())
