"""torchax_tpu/ops/COVERAGE.md: how every ATen overload is resolved, from the op tables; nothing is run.

python tests/coverage.py            fails if the file is stale
python tests/coverage.py --write    makes it anew
"""

import collections
import os
import pathlib
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch  # noqa: E402

import torchax_tpu  # noqa: E402
from tests import ledger, oracle  # noqa: E402
from torchax_tpu import device  # noqa: E402

PATH = pathlib.Path(torchax_tpu.__file__).parent / "ops" / "COVERAGE.md"
# Kernels of other backends and layouts, and torch's own machinery: no call on a dense device tensor leads to them.
_ELSEWHERE = (
    "mkldnn",
    "cudnn",
    "miopen",
    "cuda",
    "mps",
    "xnnpack",
    "metal",
    "vulkan",
    "nnpack",
    "fbgemm",
    "sparse",
    "csr",
    "csc",
    "bsr",
    "bsc",
    "coo",
    "coalesce",
    "nested",
    "jagged",
    "quantize",
    "q_per_channel",
    "q_scale",
    "q_zero",
    "qscheme",
    "int_repr",
    "_cslt",
    "cufft",
    "values",
    "indices",
    "to_padded_tensor",
    "dense_dim",
    "named",
    "_test_",
    "wrapped_linear",
    "prepack",
    "_spdiags",
    "hspmm",
    "sspaddmm",
    "_foobar",
    "thnn_fused",
    "is_pinned",
    "_pin_memory",
    "weight_int4pack",
    "dyn_quant",
    "_cutlass",
    "_scaled_grouped",
    "_grouped",
    "_triton",
    "_transformer_encoder",
    "_native_multi_head",
    "_async_error",
    "_functional_assert",
    "_functional_sym",
    "_assert_",
    "_sym_",
    "sym_",
    "_lazy_clone",
    "_make_dep_token",
    "_print",
    "_has_compatible",
    "_nnz",
    "_mixed_dtypes_linear",
    "dim.default",
    "_efficient_attention",
    "_flash_attention",
    "_fused_sdp",
    "_cudnn",
    "_linalg_check",
    "record_stream",
    "_use_",
    "_debug",
    "_convert_weight_to_int4pack",
    "_dimI",
    "_dimV",
    "_fill_mem_eff",
    "_spsolve",
    "_to_dense",
    "from_file",
    "max_pool2d_backward",
    "native_norm",
    "_slow_conv2d_backward.grad_input",
    "rrelu_with_noise.out",
    "_batch_norm_with_update.out",
)
_GROUPS = (
    ("half", ("float16", "bfloat16")),
    ("float", ("float32", "float64")),
    ("complex", ("complex64", "complex128")),
    ("int", ("int64", "int32", "int16", "int8", "uint8")),
    ("bool", ("bool",)),
)


def overloads():
    """Every ATen overload, in order."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        if namespace == "aten":
            packet, _, overload = rest.partition(".")
            try:
                yield getattr(getattr(torch.ops.aten, packet), overload or "default")
            except (AttributeError, RuntimeError):
                continue  # TorchScript builtins over Python values


def composite(func):
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def takes_tensors(func):
    """Whether a tensor goes in or comes out."""
    return any("Tensor" in str(a.type) for a in (*func._schema.arguments, *func._schema.returns))


def entries():
    """ATen name -> the databases' entries that exercise it."""
    table = collections.defaultdict(list)
    for name, o in oracle.BY_NAME.items():
        for key in {
            o.name,
            o.aten_name,
            o.name.replace(".", "_"),
            o.name.rpartition(".")[2],
            (o.aten_backward_name or ""),
        }:
            table[key].append(name)
    return table


def _dtypes(names):
    have = {str(d).removeprefix("torch.") for n in names for d in oracle.BY_NAME[n].supported_dtypes("cpu")}
    return " ".join(group for group, members in _GROUPS if have & set(members))


def rows():
    """(overload, where, how, dtypes swept, ledger) of every overload that a dense tensor can reach."""
    device.load()
    from torchax_tpu import registry, routes

    noted = collections.defaultdict(set)
    for word, table in (("tolerance", ledger.TOLERANCES), ("expected failure", ledger.EXPECTED_FAILURES)):
        for mode, name, dtype in table:
            noted[name].add(f"{word}: {mode} {dtype}")
    exercised = entries()
    for func in overloads():
        name = str(func).removeprefix("aten.")
        if not takes_tensors(func):
            continue
        whole = composite(func)
        if whole and func not in registry.TABLE and func not in registry.SPECIAL:
            continue
        how = routes.resolve(func)[1]
        if how == "fallback" and any(word in name for word in _ELSEWHERE):
            continue
        twin = registry.functional_twin(func) if how == "derived" else None
        element = registry.foreach_element(twin or func) if how == "derived" else None
        where = registry.WHERE.get(func) or registry.WHERE.get(twin) or registry.WHERE.get(element) or ""
        packet = func._schema.name.split("::")[1]
        names = (
            exercised.get(packet)
            or exercised.get(packet.rstrip("_"))
            or exercised.get(packet.removesuffix("_backward"))
            or exercised.get(packet.lstrip("_"))
            or ()
        )
        marks = sorted({m for n in names for m in noted.get(n, ())})
        yield name, where.removeprefix("torchax_tpu."), how, _dtypes(names), "; ".join(marks), whole


def document():
    table = list(rows())
    plain = [r for r in table if not r[5]]
    counts = collections.Counter(r[2] for r in plain)
    host = [r[0] for r in table if r[2] == "fallback"]
    primary = [n for n in host if not n.split(".")[-1].endswith("out") and not n.split(".")[0].endswith("_")]
    lines = [
        "# Coverage",
        "",
        "Made by `python tests/coverage.py --write` from the op tables and the ledger; a test holds it up to date.",
        "",
        f"Of {len(plain)} non-composite ATen overloads that dense tensors reach:",
        "",
        "| " + " | ".join(counts) + " |",
        "|" + "---|" * len(counts),
        "| " + " | ".join(str(n) for n in counts.values()) + " |",
        "",
        f"{len(table) - len(plain)} composite ones are declared as well, so that they run as one program. The other composites are "
        "torch's own compositions of these. Overloads for other backends, layouts and quantized tensors are left out.",
        "",
        "- declared: a JAX implementation in `where`; view: geometry only, no device work; special: acts on tensors (copies, metadata)",
        "- derived: in-place, `out=` and foreach forms of a declared op, from the schemas",
        "- decomposed: torch's decomposition, run as one compiled program; fallback: torch's CPU kernel, with a warning",
        "",
        f"On the host ({len(primary)} ops, in-place and `out=` forms aside): "
        + (", ".join(f"`{n}`" for n in primary) or "none")
        + ".",
        "",
        "dtypes: groups in which CPU torch supports the op and the sweep compares it (`python tests/sweep.py`); empty: reached "
        "through other ops' samples only.",
        "",
        "| overload | where | how | dtypes | ledger |",
        "|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(r[:5]) + " |" for r in table]
    return "\n".join(lines) + "\n"


def main():
    text = document()
    if "--write" in sys.argv:
        PATH.write_text(text)
    elif not PATH.exists() or PATH.read_text() != text:
        print("COVERAGE.md is stale: python tests/coverage.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
