"""A sample of the sweep (tests/sweep.py) that covers every op.

Forward, and one more mode and dtype, which differ from op to op.

What the ledger expects to fail is left to the sweep: one sample may not show it."""

import zlib

import pytest
import torch

from tests import ledger, oracle

ONLY_ON_CUDA = {
    "torch._scaled_mm",
    "torch._scaled_mm_v2",
    "torch.ops.aten._flash_attention_forward",
    "torch.ops.aten._efficient_attention_forward",
    "nn.functional.batch_norm.without_cudnn",
}


def _another(name, op):
    """A (mode, dtype) besides float32 forward, always the same for an op."""
    choices = [
        (m, d)
        for m in ("grad", "inplace", "out", "noncontiguous", "forward", "errors")
        for d in (("float32",) if m in ("grad", "errors") else ("float32", "bfloat16", "int64", "complex64", "bool"))
        if (m, d) != ("forward", "float32")
        and (m, name, d) not in ledger.EXPECTED_FAILURES
        and oracle.applicable(op, m, getattr(torch, d))
    ]
    return choices[zlib.crc32(name.encode()) % len(choices)] if choices else None


CASES = []
for _name, _op in oracle.BY_NAME.items():
    if (
        oracle.applicable(_op, "forward", torch.float32)
        and ("forward", _name, "float32") not in ledger.EXPECTED_FAILURES
    ):
        CASES.append(("forward", "float32", _name))
    if _another(_name, _op):
        CASES.append((*_another(_name, _op), _name))


def test_every_op_has_a_case():
    expected = {name for _, name, _ in ledger.EXPECTED_FAILURES}
    assert set(oracle.BY_NAME) - {c[2] for c in CASES} - expected == ONLY_ON_CUDA


@pytest.mark.parametrize("mode,dtype,name", CASES, ids=lambda x: x)
def test_sample(mode, dtype, name):
    check = oracle.CHECKS[mode]
    ledger.check(mode, name, dtype, lambda **kw: check(oracle.BY_NAME[name], getattr(torch, dtype), limit=1, **kw))
