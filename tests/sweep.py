"""Sweep op_db on the device against CPU torch and print what differs.

    python tests/sweep.py [--ops add,linalg.*] [--modes forward,grad,inplace,out] [--dtypes float32]
                          [--limit N samples] [--shard I/N] [--json OUT] [--verbose]
    python tests/sweep.py --route aten.cos.default     how an overload is resolved
"""

import argparse
import fnmatch
import json
import os
import sys
import traceback

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ops", default="*")
    ap.add_argument("--modes", default="forward")
    ap.add_argument("--dtypes", default="float32")
    ap.add_argument("--limit", type=int)
    ap.add_argument("--shard", default="0/1")
    ap.add_argument("--json")
    ap.add_argument("--verbose", action="store_true")
    ap.add_argument("--route")
    a = ap.parse_args()

    import torch

    from tests import oracle
    from torchax_tpu import routes

    if a.route:
        obj = torch.ops
        for part in a.route.split("."):
            obj = getattr(obj, part)
        print(a.route, routes.resolve(obj)[1])
        return 0
    globs = a.ops.split(",")
    i, n = map(int, a.shard.split("/"))
    chosen = [o for o in oracle.ops() if any(fnmatch.fnmatch(oracle.full_name(o), g) or fnmatch.fnmatch(o.name, g)
                                             for g in globs)][i::n]
    failures, totals = {}, {}
    for mode in a.modes.split(","):
        for name in a.dtypes.split(","):
            dtype = getattr(torch, name)
            good = total = 0
            for op in chosen:
                if not oracle.applicable(op, mode, dtype):
                    continue
                total += 1
                try:
                    oracle.CHECKS[mode](op, dtype, limit=a.limit)
                    good += 1
                except Exception as e:  # noqa: BLE001
                    failures[f"{mode} {name} {oracle.full_name(op)}"] = text = " ".join(f"{type(e).__name__}: {e}".split())[:300]
                    print(f"FAIL {mode} {name} {oracle.full_name(op)}: {text}", flush=True)
                    if a.verbose:
                        traceback.print_exc()
            totals[f"{mode} {name}"] = (good, total)
    for k, (good, total) in totals.items():
        print(f"{k}: {good} of {total}")
    if routes.host_calls:
        print("on the host:", ", ".join(f"{k} ({v})" for k, v in sorted(routes.host_calls.items())))
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"totals": totals, "failures": failures, "host": routes.host_calls}, f, indent=1)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
