"""Round-robin timing: every variant in turn, many times over, so that a noisy machine hurts all alike."""

import gc
import os
import platform
import statistics
import time


def loop(run, wait=lambda result: None):
    """run() n times, then wait once for the last result: the form `interleaved` wants."""

    def repeat(n):
        result = None
        for _ in range(n):
            result = run()
        wait(result)

    return repeat


def interleaved(variants, rounds, seconds):
    """{name: repeat(n)} -> {name: [seconds per call in each round]}, each turn about `seconds` long."""
    counts = {}
    for name, repeat in variants.items():
        repeat(2)  # compiles, fills caches
        n, spent = 1, 0.0
        while spent < seconds / 4:
            n = max(n * 2, 2) if spent else n
            started = time.perf_counter()
            repeat(n)
            spent = time.perf_counter() - started
            if spent > seconds:
                break
        counts[name] = max(1, round(n * seconds / spent))
    times = {name: [] for name in variants}
    order = list(variants)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in order:
                repeat = variants[name]
                repeat(max(1, counts[name] // 10))  # caches are cold after another's turn
                started = time.perf_counter()
                repeat(counts[name])
                times[name].append((time.perf_counter() - started) / counts[name])
            order.append(order.pop(0))
            gc.collect()
    finally:
        gc.enable()
    return times


def typical(seconds):
    """The lower quartile over rounds: what others do to the machine only ever adds."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def ratio(times, a, b):
    return typical(times[a]) / typical(times[b])


def excess(times, a, b):
    """a - b, in seconds."""
    return typical(times[a]) - typical(times[b])


def environment():
    import jax
    import torch

    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            cpu = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), cpu)
    return (
        f"{cpu}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores | "
        f"Python {platform.python_version()}, torch {torch.__version__} ({torch.get_num_threads()} threads), "
        f"jax {jax.__version__} on {jax.default_backend()} ({jax.devices()[0].device_kind})"
    )
