"""Comparing the device with CPU torch on inputs from torch's own op, module and optimizer databases."""

import contextlib
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import torchax_tpu  # noqa: F401  (makes the device)

DEVICE = "jax"
OPS = {}
for _op in op_db:
    OPS.setdefault(_op.full_name if hasattr(_op, "full_name") else _op.name, _op)


def full_name(op):
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def ops(names=None):
    """op_db entries, all or those whose full name (or name) is in ``names``."""
    return [o for o in op_db if names is None or full_name(o) in names or o.name in names]


def to_device(x):
    """The same pytree on the device: leaves keep requires_grad, non-contiguous strides are kept as views."""
    def move(t):
        if isinstance(t, torch.device) or isinstance(t, str) and t == "cpu":
            return torch.device(DEVICE)
        if not isinstance(t, torch.Tensor):
            return t
        out = t.detach().to(DEVICE)
        return out.requires_grad_() if t.requires_grad else out
    return tree_map(move, x)


def to_cpu(x):
    return tree_map(lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t, x)


def assert_same(got, ref, rtol=None, atol=None, exact=True):
    """Same structure, shapes, dtypes and values (nan equal to nan)."""
    g, gs = tree_flatten(to_cpu(got))
    r, rs = tree_flatten(to_cpu(ref))
    assert len(g) == len(r), f"structure: got {gs}, expected {rs}"
    for a, b in zip(g, r):
        if isinstance(b, torch.Tensor):
            assert isinstance(a, torch.Tensor), f"got {type(a).__name__}, expected a tensor"
            assert a.dtype == b.dtype, f"dtype: got {a.dtype}, expected {b.dtype}"
            assert a.shape == b.shape, f"shape: got {tuple(a.shape)}, expected {tuple(b.shape)}"
            kw = {} if rtol is None or not (b.is_floating_point() or b.is_complex()) else {"rtol": rtol, "atol": atol}
            torch.testing.assert_close(a.to_dense() if a.layout != torch.strided else a, b, equal_nan=True, **kw)
        elif isinstance(b, float):
            assert type(a) is float and (a == b or abs(a - b) <= 1e-5 + 1e-5 * abs(b) or a != a and b != b), f"{a} != {b}"
        else:
            assert type(a) is type(b) and a == b, f"got {a!r}, expected {b!r}"


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def samples(op, dtype, requires_grad=False, limit=None):
    torch.manual_seed(0)
    with quiet():
        out = list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    return out[:limit] if limit else out


def _call(op, s, fn=None):
    fn = fn or op.op
    return fn(s.input, *s.args, **s.kwargs)


def clone_sample(s):
    def leaf(t):
        return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
    c = tree_map(leaf, (s.input, s.args, s.kwargs))
    return c


def check_forward(op, dtype, rtol=None, atol=None, limit=None):
    """Every sample of ``op`` forward; returns how many were compared."""
    n = 0
    for s in samples(op, dtype, limit=limit):
        inp, args, kwargs = clone_sample(s)
        with quiet():
            ref = op.op(inp, *args, **kwargs)
            dinp, dargs, dkwargs = to_device(clone_sample(s))
            got = op.op(dinp, *dargs, **dkwargs)
        fn = s.output_process_fn_grad if hasattr(s, "output_process_fn_grad") else None
        del fn
        assert_same(got, ref, rtol, atol)
        n += 1
    return n


def _differentiable(tree):
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor) and t.requires_grad]


def check_grad(op, dtype, rtol=None, atol=None, limit=None):
    """First gradients of every sample against CPU torch, with the same random cotangents."""
    n = 0
    for s in samples(op, dtype, requires_grad=True, limit=limit):
        with quiet():
            ref_in = clone_sample(s)
            got_in = to_device(clone_sample(s))
            grads = []
            cts = None
            for inp, args, kwargs in (ref_in, got_in):
                out = s.output_process_fn_grad(op.op(inp, *args, **kwargs))
                outs = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor) and o.requires_grad]
                leaves = _differentiable((inp, args, kwargs))
                if not outs or not leaves:
                    grads.append([])
                    continue
                if cts is None:
                    cts = [torch.randn_like(o) for o in outs]
                where = outs[0].device
                grads.append(torch.autograd.grad(outs, leaves, [c.to(where) for c in cts], allow_unused=True))
        assert_same(grads[1], grads[0], rtol, atol)
        n += 1
    return n


def check_inplace(op, dtype, rtol=None, atol=None, limit=None):
    """The in-place variant on a view of a larger tensor: the base must see the write."""
    fn = op.inplace_variant
    n = 0
    for s in samples(op, dtype, limit=limit):
        if s.broadcasts_input or not isinstance(s.input, torch.Tensor):
            continue
        results = []
        for move in (lambda x: x, to_device):
            inp, args, kwargs = move(clone_sample(s))
            base = torch.stack([inp.detach(), inp.detach()])
            target = base[1]
            try:
                with quiet():
                    out = fn(target, *args, **kwargs)
                assert out is target
                results.append((base, target))
            except Exception as e:
                results.append(e)
        if isinstance(results[0], Exception):
            assert isinstance(results[1], type(results[0])) or isinstance(results[1], RuntimeError), (
                f"CPU raised {results[0]!r}, device gave {results[1]!r}")
            continue
        if isinstance(results[1], Exception):
            raise results[1]
        assert_same(results[1], results[0], rtol, atol)
        n += 1
    return n


def check_out(op, dtype, rtol=None, atol=None, limit=None):
    """out= into empty tensors (resized) and into right-shaped ones."""
    n = 0
    for s in samples(op, dtype, limit=limit):
        with quiet():
            ref = op.op(*_flat(clone_sample(s)), **clone_sample(s)[2])
            refs = ref if isinstance(ref, (tuple, list)) else (ref,)
            for make in (lambda r: torch.empty(0, dtype=r.dtype, device=DEVICE),
                         lambda r: torch.empty(r.shape, dtype=r.dtype, device=DEVICE)):
                outs = tuple(make(r) for r in refs)
                inp, args, kwargs = to_device(clone_sample(s))
                op.op(inp, *args, **kwargs, out=outs if len(outs) > 1 else outs[0])
                assert_same(outs, tuple(refs), rtol, atol)
        n += 1
    return n


def _flat(sample):
    return (sample[0], *sample[1])


CHECKS = {"forward": check_forward, "grad": check_grad, "inplace": check_inplace, "out": check_out}


def applicable(op, mode, dtype):
    """Whether CPU torch supports this mode of the op in this dtype."""
    if dtype not in op.supported_dtypes("cpu"):
        return False
    if mode == "grad":
        return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    if mode == "inplace":
        return op.inplace_variant is not None
    if mode == "out":
        return op.supports_out
    return True
