"""Comparing the device with CPU torch on inputs from torch's own op, module and optimizer databases.

A check runs one op_db entry in one mode and dtype: `CHECKS[mode](op, dtype)` runs every sample on the CPU and on the
device and compares what comes out, errors included. It returns how many samples were compared.
"""

import contextlib
import functools
import math
import warnings

import torch
import torch.autograd.forward_ad as fwad
from torch.testing._internal import common_methods_invocations as db
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import torchax_tpu
from tests.ledger import DTYPES  # noqa: F401  (the sweep's)

DEVICE = "jax"
db.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # draws are compared as draws, not frozen
FOREACH = [
    *db.foreach_unary_op_db,
    *db.foreach_binary_op_db,
    *db.foreach_pointwise_op_db,
    *db.foreach_reduce_op_db,
    *db.foreach_other_op_db,
]

# Results are draws: compared by distribution. Sampled at each call, whatever the arguments.
RANDOM = frozenset(
    """bernoulli cauchy exponential geometric log_normal normal uniform multinomial rand_like randint randint_like
    randn randn_like normal.in_place normal.number_mean nn.functional.dropout nn.functional.dropout2d
    nn.functional.dropout3d
    nn.functional.alpha_dropout nn.functional.feature_alpha_dropout.with_train nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d""".split()
)
# Results are uninitialised memory, or depend on draws in a way that only shapes can be compared.
SHAPES_ONLY = frozenset(
    """empty empty_like empty_permuted empty_strided new_empty new_empty_strided svd_lowrank pca_lowrank
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
    nn.functional.multi_head_attention_forward""".split()
)


# Where values tie, which of their indices comes back is free: name -> position of ``dim`` among the arguments.
TIES = {"sort": 0, "argsort": 0, "topk": 1, "kthvalue": 1}


def _rebuilt(u, s, vh):
    k = s.shape[-1]
    return s, (u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :]


# Factors that are free up to signs, phases or a basis: what of them is compared.
FREE = {
    "svd": lambda out: _rebuilt(out[0], out[1], out[2].mH),
    "linalg.svd": lambda out: _rebuilt(*out),
    "linalg.eigh": lambda out: (out[0], out[1].abs()),
    "linalg.eig": lambda out: (out[0], out[1].abs()),
}
# Whole channels are dropped together: fewer independent draws than values.
_CLUSTERED = frozenset(
    {"nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout.with_train"}
)


def full_name(op):
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


BY_NAME = {full_name(o): o for o in (*op_db, *FOREACH)}


def ops(names=None):
    """op_db entries, all or those whose full name (or name) is in ``names``."""
    return [o for o in op_db if names is None or full_name(o) in names or o.name in names]


# ---------------------------------------------------------------- inputs


def to_device(x):
    """The same pytree on the device: leaves keep requires_grad; permuted strides are kept."""

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


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def samples(op, dtype, requires_grad=False, limit=None, spread=False):
    """Sample inputs on the CPU: the first ``limit``, or ``limit`` spread over all of them."""
    torch.manual_seed(0)
    few = {"num_input_tensors": [3]} if op in FOREACH else {}
    with quiet():
        out = list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad, **few))
    if limit and spread and len(out) > limit:
        return [out[i * len(out) // limit] for i in range(limit)]
    return out[:limit] if limit else out


def clone_sample(s):
    """(input, args, kwargs) of a sample, as fresh leaves."""

    def leaf(t):
        return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t

    return tree_map(leaf, (s.input, s.args, s.kwargs))


_DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def doubled(x):
    """The same pytree in double precision, dtype arguments included."""

    def leaf(t):
        if isinstance(t, torch.dtype):
            return _DOUBLE.get(t, t)
        if not isinstance(t, torch.Tensor) or t.dtype not in _DOUBLE:
            return t
        return t.detach().to(_DOUBLE[t.dtype]).requires_grad_(t.requires_grad)

    return tree_map(leaf, x)


def cotangents(outs, dtype, seed):
    """Fixed random numbers for each of ``outs``, exactly representable in ``dtype``."""
    made = []
    for k, o in enumerate(outs):
        g = torch.Generator().manual_seed(seed + k)
        base = torch.complex64 if o.is_complex() else torch.float32
        c = torch.randn(o.shape, dtype=base, generator=g)
        made.append((c.to(dtype) if dtype.is_complex == o.is_complex() else c).to(o.dtype).to(o.device))
    return made


# ---------------------------------------------------------------- comparison


def _no_worse(a, b, exact):
    """Whether ``a`` is about as near to the double-precision result as torch's ``b``, or nearer."""
    if not isinstance(exact, torch.Tensor) or exact.shape != b.shape or exact.dtype != _DOUBLE.get(b.dtype):
        return False
    wild = ~(torch.isfinite(exact) & torch.isfinite(b))
    if (
        not torch.equal(torch.isfinite(a), torch.isfinite(b))
        or wild.any()
        and not torch.allclose(a[wild].to(exact.dtype), b[wild].to(exact.dtype), equal_nan=True)
    ):
        return False
    unit = torch.finfo(b.dtype).eps
    worst = torch.where(wild, 0, (b - exact).abs()).max()
    return bool(
        (torch.where(wild, 0, (a - exact).abs()) <= 2 * worst + 2 * unit * torch.where(wild, 0, exact.abs())).all()
    )


def assert_same(got, ref, rtol=None, atol=None, exact=None):
    """Same structure, shapes, dtypes and values (nan equal to nan).

    ``exact``: gives the result in double precision; where values differ, the device may be no further from it than
    twice what the CPU is.
    """
    g, gs = tree_flatten(to_cpu(got))
    r, rs = tree_flatten(to_cpu(ref))
    assert len(g) == len(r), f"structure: got {gs}, expected {rs}"
    for i, (a, b) in enumerate(zip(g, r)):
        if isinstance(b, torch.Tensor):
            assert isinstance(a, torch.Tensor), f"got {type(a).__name__}, expected a tensor"
            assert a.dtype == b.dtype, f"dtype: got {a.dtype}, expected {b.dtype}"
            assert a.shape == b.shape, f"shape: got {tuple(a.shape)}, expected {tuple(b.shape)}"
            kw = {} if rtol is None or not (b.is_floating_point() or b.is_complex()) else {"rtol": rtol, "atol": atol}
            a = a.to_dense() if a.layout != torch.strided else a
            b = b.to_dense() if b.layout != torch.strided else b
            try:
                torch.testing.assert_close(a, b, equal_nan=True, **kw)
            except AssertionError:
                if exact is None or b.dtype not in _DOUBLE:
                    raise
                try:
                    doubles = tree_flatten(to_cpu(exact()))[0]
                except Exception:  # noqa: BLE001  (no double-precision form of this call)
                    doubles = []
                if len(doubles) != len(r) or not _no_worse(a, b, doubles[i]):
                    raise
        elif isinstance(b, float):
            assert type(a) is float and (a == b or abs(a - b) <= 1e-5 + 1e-5 * abs(b) or a != a and b != b), (
                f"{a} != {b}"
            )
        else:
            assert type(a) is type(b) and a == b, f"got {a!r}, expected {b!r}"


def assert_shapes(got, ref):
    """Same structure, shapes and dtypes; values are free."""

    def blank(x):
        return tree_map(lambda t: torch.zeros_like(t) if isinstance(t, torch.Tensor) else t, to_cpu(x))

    assert_same(blank(got), blank(ref))


def assert_same_but_ties(name, s, got, ref):
    """As `assert_same`, but indices may be others of equal elements."""

    def chosen(out):
        values, index = (None, out) if isinstance(out, torch.Tensor) else out
        at = TIES[name]
        dim = s.kwargs.get("dim", s.args[at] if len(s.args) > at else -1)
        whole, index = s.input.detach().reshape(s.input.shape or (1,)), index.reshape(index.shape or (1,))
        if index.dim() < whole.dim() or s.input.dim() == 1 and name == "kthvalue":
            index = index.reshape(whole.movedim(dim, -1).shape[:-1]).unsqueeze(dim)
        assert index.shape[dim] < 2 or (index.sort(dim)[0].diff(dim=dim) > 0).all(), "an index comes twice"
        return values, whole.gather(dim, index)

    assert_shapes(got, ref)
    assert_same(chosen(got), chosen(ref))


def assert_same_distribution(got_draws, ref_draws, slack=1):
    """Shapes and dtypes as on the CPU, two draws unequal if they are there, and the pooled values from one distribution
    (Kolmogorov-Smirnov, at a level of 1e-6)."""
    for got, ref in zip(got_draws, ref_draws):
        assert_shapes(got, ref)

    def pool(draws, i):
        flat = [tree_flatten(d)[0][i].reshape(-1) for d in draws]
        return torch.view_as_real(torch.cat(flat).to(torch.complex128))

    for i, t in enumerate(tree_flatten(ref_draws[0])[0]):
        if not isinstance(t, torch.Tensor) or not t.numel():
            continue
        a, b = pool(got_draws, i), pool(ref_draws, i)
        for x, y in zip(a.unbind(-1), b.unbind(-1)):
            x, y = x.nan_to_num(0, 1e300, -1e300).sort()[0], y.nan_to_num(0, 1e300, -1e300).sort()[0]
            grid = torch.cat([x, y])
            gap = (
                (torch.searchsorted(x, grid, right=True) / len(x) - torch.searchsorted(y, grid, right=True) / len(y))
                .abs()
                .max()
            )
            assert gap <= slack * 2.7 * math.sqrt(2 / len(x)), (
                f"distribution: the distribution functions differ by {gap:.3f} over {len(x)} values"
            )
        if len(ref_draws) > 1 and t.numel() > 8 and not torch.equal(t, tree_flatten(ref_draws[1])[0][i]):
            first, second = (tree_flatten(d)[0][i] for d in got_draws[:2])
            assert len(b.unique()) < 50 or not torch.equal(first, second), "two draws are equal"


# ---------------------------------------------------------------- what a mode runs
#
# run(op, sample, (input, args, kwargs), dtype, i) -> pytree; the same function serves CPU and device.


def _forward(op, s, x, dtype, i):
    return op.op(x[0], *x[1], **x[2])


def _differentiable(tree):
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor) and t.requires_grad]


def _outputs(op, s, x):
    return _differentiable(s.output_process_fn_grad(op.op(x[0], *x[1], **x[2])))


def _grad(op, s, x, dtype, i):
    outs, leaves = _outputs(op, s, x), _differentiable(x)
    if not outs or not leaves:
        return []
    return torch.autograd.grad(outs, leaves, cotangents(outs, dtype, i), allow_unused=True)


def _gradgrad(op, s, x, dtype, i):
    outs, leaves = _outputs(op, s, x), _differentiable(x)
    if not outs or not leaves:
        return []
    cts = [c.requires_grad_() for c in cotangents(outs, dtype, i)]
    grads = torch.autograd.grad(outs, leaves, cts, create_graph=True, allow_unused=True)
    firsts = [g for g in grads if g is not None and g.requires_grad]
    if not firsts:
        return []
    return torch.autograd.grad(firsts, [*leaves, *cts], cotangents(firsts, dtype, i + 100), allow_unused=True)


def _forward_ad(op, s, x, dtype, i):
    with fwad.dual_level():
        count = iter(range(10**6))

        def dual(t):
            if not isinstance(t, torch.Tensor) or not t.requires_grad:
                return t
            return fwad.make_dual(t.detach(), cotangents([t], dtype, i + 10 * next(count))[0])

        inp, args, kwargs = tree_map(dual, x)
        out = s.output_process_fn_grad(op.op(inp, *args, **kwargs))
        return [fwad.unpack_dual(o).tangent if isinstance(o, torch.Tensor) else None for o in tree_flatten(out)[0]]


def _inplace(op, s, x, dtype, i):
    """In place on a row of a larger tensor: the base must see the write."""
    inp, args, kwargs = x
    if isinstance(inp, (list, tuple)):
        op.inplace_variant(inp, *args, **kwargs)
        return inp
    base = torch.stack([inp.detach(), inp.detach()])
    target = base[1]
    out = op.inplace_variant(target, *args, **kwargs)
    assert out is target
    return base, target


def _inplace_expanded(op, s, x, dtype, i):
    inp, args, kwargs = x
    if isinstance(inp, (list, tuple)) or not inp.dim() or inp.shape[0] < 2:
        raise NotImplementedError
    target = inp.detach()[:1].expand(inp.shape)
    op.inplace_variant(target, *args, **kwargs)
    return target


def _into(make):
    def run(op, s, x, dtype, i):
        inp, args, kwargs = x
        with torch.no_grad():
            fresh = op.op(*clone_tree(inp, args), **kwargs)
        refs = fresh if isinstance(fresh, (tuple, list)) else (fresh,)
        outs = tuple(map(make, refs))
        op.op(inp, *args, **kwargs, out=outs if len(outs) > 1 else outs[0])
        return outs, tuple(o._base for o in outs)

    return run


def clone_tree(inp, args):
    return tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, (inp, *args))


def _wrong(dtype):
    return (
        torch.float32
        if dtype.is_complex
        else torch.int64
        if dtype.is_floating_point
        else torch.bool
        if dtype is not torch.bool
        else (torch.int32)
    )


_out_empty = _into(lambda r: torch.empty(0, dtype=r.dtype, device=r.device))
_out_same = _into(lambda r: torch.full(r.shape, 7, device=r.device).to(r.dtype))
_out_strided = _into(lambda r: torch.full((*r.shape, 2), 1, device=r.device).to(r.dtype).select(-1, 1))
_out_long = _into(lambda r: torch.zeros((2, *r.shape, 3), device=r.device).to(r.dtype))
_out_wrong_dtype = _into(lambda r: torch.empty(r.shape, dtype=_wrong(r.dtype), device=r.device))


def _layout(t, variant):
    """A tensor of the same values with other strides."""
    if not isinstance(t, torch.Tensor) or not t.dim():
        return t
    if variant == 0:
        return torch.stack([t.detach(), t.detach()], -1).select(-1, 0)
    return t.detach().movedim(0, -1).contiguous().movedim(-1, 0)


def _strided(variant):
    def run(op, s, x, dtype, i):
        inp, args, kwargs = tree_map(lambda t: _layout(t, variant), x)
        return op.op(inp, *args, **kwargs)

    return run


_transposed = _strided(1)


def _expanded(op, s, x, dtype, i):
    inp, args, kwargs = tree_map(
        lambda t: t[:1].expand(t.shape) if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] > 1 else t, x
    )
    if not isinstance(op, (db.UnaryUfuncInfo, db.BinaryUfuncInfo)):
        raise NotImplementedError
    return op.op(inp, *args, **kwargs)


def _jit(op, s, x, dtype, i):
    inp, args, kwargs = x
    tensors = [t for t in tree_flatten(x)[0] if isinstance(t, torch.Tensor)]
    if tensors and tensors[0].device.type == DEVICE or not tensors and DEVICE in str(kwargs):
        return torchax_tpu.jit(lambda inp, args: op.op(inp, *args, **kwargs))(inp, args)
    return op.op(inp, *args, **kwargs)


def _vmap(op, s, x, dtype, i):
    inp, args, kwargs = x
    if not isinstance(inp, torch.Tensor):
        raise NotImplementedError
    return torch.func.vmap(lambda t: op.op(t, *args, **kwargs), randomness="different")(torch.stack([inp, inp]))


def _func_grad(op, s, x, dtype, i):
    inp, args, kwargs = tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, x)
    if not isinstance(inp, torch.Tensor) or not inp.is_floating_point():
        raise NotImplementedError

    def total(t):
        out = s.output_process_fn_grad(op.op(t, *args, **kwargs))
        outs = [
            o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor) and (o.is_floating_point() or o.is_complex())
        ]
        return sum(
            (o * c).real.sum() if o.is_complex() else (o * c).sum() for o, c in zip(outs, cotangents(outs, dtype, i))
        )

    return torch.func.grad(total)(inp)


# mode -> (functions run on each sample, functions run on the first sample only)
RUNS = {
    "forward": ([_forward], []),
    "grad": ([_grad], []),
    "gradgrad": ([_gradgrad], []),
    "forward_ad": ([_forward_ad], []),
    "inplace": ([_inplace], [_inplace_expanded]),
    "out": ([_out_empty, _out_same], [_out_strided, _out_long, _out_wrong_dtype]),
    "noncontiguous": ([_strided(0)], [_transposed, _expanded]),
    "jit": ([_jit], []),
    "vmap": ([_vmap], []),
    "func_grad": ([_func_grad], []),
}
_NEEDS_GRAD = frozenset({"grad", "gradgrad", "forward_ad", "func_grad"})


def _attempt(run):
    try:
        with quiet():
            return to_cpu(run())
    except Exception as e:  # noqa: BLE001  (an error is a result)
        return e


def _no_kernel(error):
    text = str(error)
    return (
        isinstance(error, NotImplementedError)
        or "not implemented for" in text
        or "not supported" in text
        or "vmap" in text
    )


def compare_errors(got, ref):
    """Both raised, the device an error of the CPU's class."""
    assert isinstance(got, Exception), f"CPU raised {type(ref).__name__}: {str(ref)[:150]}; the device gave a result"
    assert isinstance(got, type(ref)), (
        f"CPU raised {type(ref).__name__}: {str(ref)[:100]}; the device {type(got).__name__}: {str(got)[:100]}"
    )


def _draws(name, s):
    """Whether the results of a sample are random."""
    return (
        name in RANDOM
        or bool(s.kwargs.get("dropout_p"))
        or name == "nn.functional.rrelu"
        and bool(s.kwargs.get("training"))
    )


def check(mode, op, dtype, rtol=None, atol=None, limit=None, spread=False):
    """Every sample of ``op`` in ``mode``; returns how many were compared."""
    n, name = 0, full_name(op)
    every, first = RUNS[mode]
    for i, s in enumerate(samples(op, dtype, mode in _NEEDS_GRAD, limit, spread)):
        if mode == "inplace" and s.broadcasts_input:
            continue
        for run in every + first if n == 0 else every:
            ref = _attempt(lambda: run(op, s, clone_sample(s), dtype, i))
            if isinstance(ref, Exception) and (_no_kernel(ref) or mode in ("vmap", "func_grad")):
                continue
            if run is _inplace_expanded and not isinstance(ref, Exception):
                continue  # what lands there depends on the order
            got = _attempt(lambda: run(op, s, to_device(clone_sample(s)), dtype, i))
            n += 1
            if isinstance(ref, Exception):
                compare_errors(got, ref)
            elif isinstance(got, Exception):
                raise got
            elif name in SHAPES_ONLY or mode in _NEEDS_GRAD and _draws(name, s):
                assert_shapes(got, ref)
            elif _draws(name, s):
                numel = max([t.numel() for t in tree_flatten(ref)[0] if isinstance(t, torch.Tensor)], default=1)
                more = range(min(30, 1000 // max(numel, 1)))
                assert_same_distribution(
                    [got, *(_attempt(lambda: run(op, s, to_device(clone_sample(s)), dtype, i)) for _ in more)],
                    [ref, *(_attempt(lambda: run(op, s, clone_sample(s), dtype, i)) for _ in more)],
                    slack=4 if name in _CLUSTERED else 1,
                )
            elif name in FREE and run in (_forward, _jit, *RUNS["noncontiguous"][0]):
                assert_shapes(got, ref)
                assert_same(*map(FREE[name], (got, ref)), rtol, atol)
            elif name in TIES and mode == "out" and isinstance(got[0], tuple) and len(got[0]) == 2:
                assert_same_but_ties(name, s, got[0], ref[0])
            elif (
                name in TIES
                and run in (_forward, _jit, *RUNS["noncontiguous"][0], _transposed)
                and not s.kwargs.get("stable")
            ):
                assert_same_but_ties(name, s, got, ref)
            else:
                assert_same(got, ref, rtol, atol, lambda: run(op, s, doubled(clone_sample(s)), dtype, i))
    return n


def check_errors(op, dtype, rtol=None, atol=None, limit=None, spread=False):
    """torch's own list of wrong inputs: the device raises the class that CPU torch raises."""
    n = 0
    with quiet():
        inputs = list(op.error_inputs("cpu"))
    for e in inputs:
        s = e.sample_input
        ref = _attempt(lambda: _forward(op, s, clone_sample(s), dtype, 0))
        if not isinstance(ref, Exception):
            continue
        before, torchax_tpu.config.check_indices = torchax_tpu.config.check_indices, True
        got = _attempt(lambda: _forward(op, s, to_device(clone_sample(s)), dtype, 0))
        torchax_tpu.config.check_indices = before
        compare_errors(got, ref)
        n += 1
    return n


CHECKS = {mode: functools.partial(check, mode) for mode in RUNS} | {"errors": check_errors}


def applicable(op, mode, dtype):
    """Whether CPU torch supports this mode of the op in this dtype."""
    if mode == "errors":
        return op.error_inputs_func is not None and dtype is torch.float32
    if dtype not in op.supported_dtypes("cpu"):
        return False
    if mode in _NEEDS_GRAD:
        return (
            op.supports_autograd
            and dtype in op.supported_backward_dtypes("cpu")
            and (mode != "gradgrad" or op.supports_gradgrad)
            and (mode != "forward_ad" or op.supports_forward_ad)
        )
    if mode == "inplace":
        return op.inplace_variant is not None
    if mode == "out":
        return op.supports_out and op not in FOREACH
    return op.op is not None
