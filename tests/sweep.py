"""Sweep torch's op databases (op_db and the foreach ones) on the device against CPU torch.

    python tests/sweep.py --modes forward,grad --dtypes float32,bfloat16 --results sweep.jsonl
    python tests/sweep.py --modes all --dtypes all --limit 12 --jobs 8 --shard 0/4 --results sweep.jsonl
    python tests/sweep.py --results sweep.jsonl --table          passes/total per mode and dtype
    python tests/sweep.py --route aten.cos.default               how an overload is resolved

Each item (mode, dtype, op) runs in a worker process under a time limit and is one line of the results file; a
restarted sweep skips the items that the file has (--redo failures, or all: runs them again). Without --results
everything runs in this process and only failures are printed. The ledger's tolerances are applied, its expected
failures must fail. The modes are those of tests/oracle.py.
JAX_COMPILATION_CACHE_DIR keeps compiled programs between sweeps.
"""

import argparse
import collections
import fnmatch
import gc
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
GOOD = ("pass", "xfail")
RESTART_AT = 4 << 20  # KiB of memory: compiled programs pile up


def one_item(mode, dtype_name, name, limit):
    """Run an item: (status, what went wrong, samples compared, ops that ran on the host)."""
    import torch

    from tests import ledger, oracle
    from torchax_tpu import metrics

    op, dtype = oracle.BY_NAME[name], getattr(torch, dtype_name)
    reason = ledger.EXPECTED_FAILURES.get((mode, name, dtype_name))
    rtol, atol = ledger.tolerance(mode, name, dtype_name)
    before = dict(metrics.host_calls)
    n, text = 0, ""
    try:
        n = oracle.CHECKS[mode](op, dtype, rtol=rtol, atol=atol, limit=limit, spread=True)
        status = "xpass" if reason else "pass" if n else "empty"
    except Exception as e:  # noqa: BLE001
        status = "xfail" if reason else "fail"
        text = " ".join(f"{type(e).__name__}: {e}".split())[:400]
        if os.environ.get("SWEEP_TRACEBACK"):
            traceback.print_exc()
    return status, text, n, sorted(k for k, v in metrics.host_calls.items() if v != before.get(k))


def worker(pipe):
    """Answer items until the pipe closes."""
    import jax

    for count in range(1, 10**9):
        try:
            item = pipe.recv()
        except EOFError:
            return
        answer = one_item(*item)
        if count == 1:
            gc.freeze()  # what is imported by now stays; jit collects garbage at each trace
        if count % 25 == 0:
            jax.clear_caches()
        pipe.send((answer, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


class Worker:
    """A process that runs items; replaced after a timeout, a crash, or when it has grown."""

    process = None

    def run(self, item, timeout):
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=worker, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
            timeout += 60  # imports
        try:
            self.pipe.send(item)
            if not self.pipe.poll(timeout):
                raise TimeoutError
            answer, grown = self.pipe.recv()
        except (TimeoutError, EOFError, OSError) as e:
            self.stop()
            return ("timeout" if isinstance(e, TimeoutError) else "crash"), f"within {timeout} s", 0, []
        if grown > RESTART_AT:
            self.stop()
        return answer

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def read_results(path):
    """key -> record; the last line of an item counts."""
    done = {}
    if path and os.path.exists(path):
        with open(path) as f:
            for line in f:
                record = json.loads(line)
                done[record["mode"], record["dtype"], record["op"]] = record
    return done


def print_table(done):
    """Passes/total per mode and dtype as Markdown; expected failures of the ledger are counted apart."""
    from tests import oracle

    cells = collections.defaultdict(collections.Counter)
    for (mode, dtype, _), r in done.items():
        cells[mode, dtype][r["status"]] += 1
    modes = [m for m in oracle.CHECKS if any(k[0] == m for k in cells)]
    dtypes = [d for d in oracle.DTYPES if any(k[1] == d for k in cells)]
    print("| mode | " + " | ".join(dtypes) + " |\n|---|" + "---|" * len(dtypes))
    for m in modes:
        row = []
        for d in dtypes:
            c = cells[m, d]
            total = sum(c.values()) - c["empty"]
            row.append(f"{c['pass']}/{total}" + (f" (+{c['xfail']} expected)" if c["xfail"] else "") if total else "")
        print(f"| {m} | " + " | ".join(row) + " |")
    host = sorted({h for r in done.values() for h in r["host"]})
    print(f"\non the host: {', '.join(host) or 'nothing'}")


def items_of(a):
    import torch

    from tests import oracle

    globs = a.ops.split(",")
    modes = list(oracle.CHECKS) if a.modes == "all" else a.modes.split(",")
    names = oracle.DTYPES if a.dtypes == "all" else a.dtypes.split(",")
    i, n = map(int, a.shard.split("/"))
    chosen = [
        k for k, o in oracle.BY_NAME.items() if any(fnmatch.fnmatch(k, g) or fnmatch.fnmatch(o.name, g) for g in globs)
    ][i::n]
    return [
        (m, d, k, a.limit)
        for m in modes
        for d in names
        for k in chosen
        if oracle.applicable(oracle.BY_NAME[k], m, getattr(torch, d))
    ]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ops", default="*", help="names or patterns")
    ap.add_argument("--modes", default="forward", help="or all")
    ap.add_argument("--dtypes", default="float32", help="or all")
    ap.add_argument("--limit", type=int, help="samples per item, spread over all there are")
    ap.add_argument("--shard", default="0/1", help="I/N: every Nth op from the Ith")
    ap.add_argument("--jobs", type=int, default=1)
    ap.add_argument("--timeout", type=float, default=120, help="seconds per item")
    ap.add_argument("--results", help="file of JSON lines, appended to")
    ap.add_argument("--redo", choices=("failures", "all"))
    ap.add_argument("--table", action="store_true")
    ap.add_argument("--route")
    a = ap.parse_args()

    if a.route:
        import torch

        import torchax_tpu.device

        torchax_tpu.device.load()
        from torchax_tpu import routes

        obj = torch.ops
        for part in a.route.split("."):
            obj = getattr(obj, part)
        print(a.route, routes.resolve(obj)[1])
        return 0
    done = read_results(a.results)
    if a.table:
        print_table(done)
        return 0
    skip = () if a.redo == "all" else {k for k, r in done.items() if a.redo is None or r["status"] in GOOD}
    queue = collections.deque(x for x in items_of(a) if x[:3] not in skip)
    lock, fresh = threading.Lock(), {}

    def note(item, answer, seconds):
        mode, dtype, name, _ = item
        status, text, n, host = answer
        record = {
            "mode": mode,
            "dtype": dtype,
            "op": name,
            "status": status,
            "text": text,
            "n": n,
            "host": host,
            "seconds": round(seconds, 2),
        }
        with lock:
            fresh[item[:3]] = record
            if a.results:
                with open(a.results, "a") as f:
                    f.write(json.dumps(record) + "\n")
            if status not in (*GOOD, "empty"):
                print(f"{status.upper()} {mode} {dtype} {name}: {text}", flush=True)

    def serve():
        one = Worker()
        while True:
            try:
                item = queue.popleft()
            except IndexError:
                break
            start = time.time()
            answer = one.run(item, a.timeout) if a.results else one_item(*item)
            note(item, answer, time.time() - start)
        one.stop()

    threads = [threading.Thread(target=serve) for _ in range(a.jobs)] if a.results else []
    for t in threads:
        t.start()
    if not threads:
        serve()
    for t in threads:
        t.join()
    print_table(fresh)
    return any(r["status"] not in (*GOOD, "empty") for r in fresh.values())


if __name__ == "__main__":
    sys.exit(main())
