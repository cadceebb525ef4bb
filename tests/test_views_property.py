"""Random chains of views, writes and reads: the device must agree with CPU torch in values and geometry."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchax_tpu  # noqa: F401

SHAPES = [(6,), (4, 6), (2, 3, 4), (1, 5), (3, 1, 4), (2, 2, 2, 3)]


@st.composite
def view_step(draw):
    """A view op with parameters; those that don't fit the tensor are tried all the same: errors must agree."""
    kind = draw(
        st.sampled_from(
            [
                "select",
                "slice",
                "transpose",
                "permute",
                "unsqueeze",
                "squeeze",
                "expand",
                "narrow",
                "diagonal",
                "unfold",
                "view",
                "flatten",
                "split",
                "unbind",
                "as_strided",
                "detach",
                "t",
                "view_dtype",
            ]
        )
    )
    small = st.integers(0, 3)
    return (
        kind,
        draw(small),
        draw(small),
        draw(st.integers(1, 3)),
        draw(st.integers(-2, 2)),
        draw(st.permutations(range(4))),
    )


def apply(x, step):
    kind, a, b, c, d, order = step
    n = x.dim()
    dim = a % n if n else 0
    if kind == "select":
        return x.select(dim, d)
    if kind == "slice":
        return x[(slice(None),) * dim + (slice(b, b + 2 * c, c),)] if n else x[...]
    if kind == "transpose":
        return x.transpose(dim, b % n if n else 0)
    if kind == "permute":
        return x.permute([i for i in order if i < n]) if n <= 4 else x
    if kind == "unsqueeze":
        return x.unsqueeze(a % (n + 1))
    if kind == "squeeze":
        return x.squeeze(dim)
    if kind == "expand":
        return x.expand([c + 1 if s == 1 else s for s in x.shape]) if b else x.expand(c, *x.shape)
    if kind == "narrow":
        return x.narrow(dim, b, c)
    if kind == "diagonal":
        return x.diagonal(d, dim, b % n if n else 0)
    if kind == "unfold":
        return x.unfold(dim, c, b + 1)
    if kind == "view":
        return x.view(-1, c) if b else x.view(-1)
    if kind == "flatten":
        return x.flatten()
    if kind == "split":
        return x.split(c, dim)[0]
    if kind == "unbind":
        return x.unbind(dim)[-1]
    if kind == "as_strided":
        return x.as_strided((c, 2), (b + 1, 1), a)
    if kind == "view_dtype":
        return x.view(torch.int32)
    if kind == "t":
        return x.t()
    return x.detach()


WRITES = {
    "fill": lambda v, k: v.fill_(k),
    "add": lambda v, k: v.add_(k),
    "mul": lambda v, k: v.mul_(2),
    "copy": lambda v, k: v.copy_(torch.full(v.shape, k, dtype=v.dtype).to(v.device)),
    "item": lambda v, k: v.__setitem__((0,) * v.dim(), k),
    "out": lambda v, k: torch.mul(v.clone(), k, out=v),
}

action = st.one_of(
    st.tuples(st.just("view"), st.integers(0, 7), view_step()),
    st.tuples(st.just("write"), st.integers(0, 7), st.sampled_from(sorted(WRITES)), st.integers(-3, 9)),
    st.tuples(st.just("read"), st.integers(0, 7)),
)


def overlapping(v):
    """torch leaves arithmetic in place undefined when elements of the target share memory."""
    need = 1
    for s, n in sorted((s, n) for n, s in zip(v.shape, v.stride()) if n != 1):
        if s < need and not (s == 0 and n > 1):
            return True
        need += s * (n - 1)
    return False


def run(device, dtype, shape, actions):
    """The log of what an observer sees: geometry of each view, values at each read, error classes."""
    torch.manual_seed(0)
    tensors = [torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype).clone().to(device)]
    log = []
    for act in actions:
        x = tensors[act[1] % len(tensors)]
        try:
            if act[0] == "view":
                v = apply(x, act[2])
                tensors.append(v)
                log.append((tuple(v.shape), v.stride(), v.storage_offset(), v.is_contiguous(), v.dtype))
            elif act[0] == "write":
                if not overlapping(x) or act[2] == "fill":
                    WRITES[act[2]](x, act[3])
                log.append(x._version)
            else:
                log.append(x.clone().cpu().tolist())
        except (RuntimeError, IndexError) as e:
            log.append(type(e).__name__)
    return log, [t.cpu().tolist() for t in tensors]


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from([torch.float32, torch.int32, torch.bfloat16]),
    st.lists(action, min_size=2, max_size=10),
)
def test_chains_agree(shape, dtype, actions):
    ref_log, ref = run("cpu", dtype, shape, actions)
    got_log, got = run("jax", dtype, shape, actions)
    assert got_log == ref_log
    assert str(got) == str(ref)
