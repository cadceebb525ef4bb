"""The house: imports flow one way, files stay short, every impl binds its op's schema."""

import ast
import inspect
import pathlib

import pytest
import torch

import torchax_tpu

ROOT = pathlib.Path(torchax_tpu.__file__).parent
# A module imports only from its own layer's earlier entries and from layers above it in this list.
LAYERS = [
    ["errors", "config", "metrics"], ["explain", "device_module", "parallel"], ["device"], ["dtypes"], ["narrow"], ["strides"], ["random"], ["registry"], ["dispatch"], ["views"], ["storage"], ["tensor"], ["results"], ["handlers"],
    ["convert"], ["fastpath", "arguments", "overlap"], ["copies", "untyped", "ranges"], ["viewcopies", "indices"], ["host"], ["routes"],
    ["methods", "moves", "serialization", "autocast", "fused", "sparse_adam"], ["jit"], ["tpu"], ["cuda_names"], ["__main__"],
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
OPS_MAY = {"dtypes", "registry", "config", "errors"}


def imports_of(path):
    """Names of the package's modules that a file imports at module level (function bodies are late imports)."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            up = package[: len(package) - (node.level - 1)]
            if node.module:
                yield (*up, *node.module.split("."))
            else:
                yield from ((*up, a.name) for a in node.names)


FILES = sorted(p for p in ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", [p for p in FILES if p.parent == ROOT and p.stem != "__init__"], ids=lambda p: p.stem)
def test_modules_import_downwards(path):
    mine = RANK[path.stem]
    for target in imports_of(path):
        if target[0] in RANK and target[0] != path.stem:
            assert RANK[target[0]] < mine or target[0] in LAYERS[mine], f"{path.stem} imports {target[0]}, which stands above it"


@pytest.mark.parametrize("path", sorted((ROOT / "ops").glob("*.py")), ids=lambda p: p.stem)
def test_ops_import_no_tensors(path):
    for target in imports_of(path):
        assert target[0] == "ops" or target[0] in OPS_MAY, f"ops/{path.stem} imports {'.'.join(target)}"


def test_files_are_short():
    long = {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > 650}
    assert not long, f"split these by sub-family: {long}"


def test_rooms_have_a_readme():
    for room in (ROOT, ROOT / "ops", ROOT / "jit", ROOT / "tpu"):
        assert (room / "README.md").exists(), room


def test_every_impl_binds_its_schema():
    torch.ones(1, device="jax")
    from torchax_tpu.registry import DROP, GENERATOR, TABLE
    wrong = []
    for overload, op in TABLE.items():
        try:
            signature = inspect.signature(op.impl)
        except (TypeError, ValueError):  # jnp ufuncs have no signature to check
            continue
        positional = [n for n in op.names if op.kinds[n] not in (DROP, GENERATOR)]
        keyword = {n: None for n, k in op.kwonly.items() if k not in (DROP, GENERATOR) and n not in op.mutates}
        lead = [None] if op.random else []
        try:
            signature.bind(*lead, *[None] * len(positional), **keyword)
        except TypeError as e:
            wrong.append(f"{overload}: {e}")
    assert not wrong, "\n".join(wrong)
    assert len(TABLE) > 600
