"""Writes into memory that an input shares: computed or refused as on the CPU."""

import pytest
import torch

from tests import oracle

CASES = """
x[1:].copy_(x[:-1])
x.copy_(x.t())
x.copy_(x[:1].expand(4, 4))
x[:, :] = x.t()
x[1:] = x[:-1]
x[::2] = x[1::2]
x[1:].index_copy_(0, rows[:2], x[:2])
x.index_add_(0, rows, x)
x.scatter_(0, index, x)
x.scatter_add_(0, index, x)
torch.mm(x, x, out=x)
torch.cumsum(x, 0, out=x)
torch.cumsum(x[1:], 0, out=x[:-1])
torch.add(x[1:], 1, out=x[:-1])
torch.cat([x, x], out=x)
torch.gather(x, 0, index, out=x)
torch.index_select(x, 0, rows, out=x)
torch.take(x, index, out=x)
torch.masked_select(x, x > 0, out=x)
torch.max(x, 0, out=(x[0], rows.clone()))
torch.kthvalue(x, 1, out=(x[0], rows.clone()))
torch.clamp(x[1:], 0, 1, out=x[:-1])
torch.maximum(x, x[:1], out=x)
x[:1].add_(x[0])
x.add_(x[:1])
x.sub_(x[0])
x.add_(x)
x.add_(x.t())
x.div_(x[0, 0])
x[0].add_(x[:, 0])
x[:, 0].add_(x[:, 1])
x[::2].add_(x[1::2])
x[0].add_(x[1])
x[0, 1:].add_(x[0, :-1])
x[1:].lerp_(x[:-1], 0.5)
x[1:].addcmul_(x[:-1], x[:-1])
x[1:].pow_(x[:-1])
x[1:].eq_(x[:-1])
torch._foreach_add_([x[1:]], [x[:-1]])
x[:1].expand(4, 4).normal_()
x[:1].expand(4, 4).add_(1)
x[:1].expand(4, 4).fill_(1)
torch.add(x, 1, out=x[:1].expand(4, 4))
""".strip().splitlines()


@pytest.mark.parametrize("statement", CASES)
def test_as_on_the_cpu(statement):
    def run(device):
        torch.manual_seed(0)
        x = torch.rand(4, 4).to(device)
        scope = {
            "torch": torch,
            "x": x,
            "rows": torch.arange(4, device=device),
            "index": torch.zeros(4, 4, dtype=torch.int64, device=device),
        }
        try:
            with oracle.quiet():
                exec(statement, scope)
        except RuntimeError as e:
            return str(e)[:60]
        return x.cpu()

    want, got = run("cpu"), run(oracle.DEVICE)
    if isinstance(want, str):
        assert got == want
    else:
        oracle.assert_same(got, want)
