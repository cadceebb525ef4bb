"""Every module of torch's module database: forward and backward in float32, in train and eval mode, against CPU torch."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_map

from tests import ledger, oracle

MODULES = {m.name: m for m in module_db}


def settle(module):
    """Take the chance out of a module in train mode: no dropout, one slope for RReLU."""
    for m in module.modules():
        if isinstance(m, _DropoutNd):
            m.p = 0.0
        elif isinstance(m, (nn.MultiheadAttention, nn.RNNBase)):
            m.dropout = 0.0
        elif isinstance(m, nn.RReLU):
            m.upper = m.lower


def fix_samples(module, args):
    """Fractional pooling draws where to pool: give both sides the same samples."""
    for m in module.modules():
        if isinstance(m, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
            n = 2 if isinstance(m, nn.FractionalMaxPool2d) else 3
            x = args[0]
            lead = (1, x.shape[0]) if x.dim() == n + 1 else x.shape[:2]
            m._random_samples = torch.rand(*lead, n)


def on_device(module):
    """A copy of a CPU module on the device."""
    out = copy.deepcopy(module).to(oracle.DEVICE)
    for m in out.modules():
        if getattr(m, "_random_samples", None) is not None:
            m._random_samples = m._random_samples.to(oracle.DEVICE)
    return out


def moved(tree):
    """The inputs on the device; a tensor given twice stays one tensor (its gradients add up)."""
    memo = {}
    return tree_map(lambda t: memo.setdefault(id(t), oracle.to_device(t)) if isinstance(t, torch.Tensor)
                    else oracle.to_device(t), tree)


def run(module, args, kwargs, cotangents):
    """Outputs, input and parameter gradients, buffers after one forward and backward."""
    out = module(*args, **kwargs)
    outs = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor)]
    leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    params = list(module.parameters())
    live = [o for o in outs if o.requires_grad]
    if not cotangents:
        cotangents.extend(torch.randn(o.shape).to(o.dtype) for o in live)
    grads = []
    if live and leaves + params:
        grads = torch.autograd.grad(live, leaves + params, [c.to(o.device) for c, o in zip(cotangents, live)],
                                    allow_unused=True)
    return outs, list(grads), list(module.buffers())


def cases(info, training):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True,
                                            training=training))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", sorted(MODULES))
def test_module(name, training):
    def check(rtol, atol):
        compared = 0
        for case in cases(MODULES[name], training):
            if case.forward_input is None:
                continue
            torch.manual_seed(1)
            with oracle.quiet():
                module = MODULES[name].module_cls(*case.constructor_input.args, **case.constructor_input.kwargs)
                module.train(training)
                settle(module)
                args, kwargs = case.forward_input.args, case.forward_input.kwargs
                if isinstance(module, LazyModuleMixin):
                    module(*args, **kwargs)
                fix_samples(module, args)
                twin = on_device(module)
                cotangents = []
                dargs, dkwargs = moved((args, kwargs))
                ref = run(module, args, kwargs, cotangents)
                got = run(twin, dargs, dkwargs, cotangents)
            oracle.assert_same(got, ref, rtol, atol)
            compared += 1
        assert compared, "no inputs"

    ledger.check("module", name, "float32" + (" train" if training else " eval"), check)


@pytest.mark.parametrize("cls", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
                                 nn.FeatureAlphaDropout])
def test_dropout_statistics(cls):
    """About p of the elements (or channels) go, the mean stays, and two draws differ."""
    torch.manual_seed(0)
    shape = {nn.Dropout1d: (64, 64, 2), nn.Dropout2d: (64, 64, 2, 2), nn.Dropout3d: (64, 64, 1, 2, 2),
             nn.FeatureAlphaDropout: (64, 64, 2, 2)}.get(cls, (64, 256))
    x = torch.ones(shape, device=oracle.DEVICE)
    layer = cls(0.25)
    a, b = layer(x), layer(x)
    changed = (a != a.flatten()[a.flatten().argmax()]).float().mean().item()
    assert 0.2 < changed < 0.3
    assert bool((a != b).any())
    if "Alpha" not in cls.__name__:
        assert abs(a.mean().item() - 1) < 0.05


def test_rrelu_draws_slopes():
    torch.manual_seed(0)
    x = torch.full((1000,), -1.0, device=oracle.DEVICE)
    slopes = -nn.RReLU(0.1, 0.3)(x)
    assert slopes.min().item() >= 0.1 and slopes.max().item() <= 0.3 and abs(slopes.mean().item() - 0.2) < 0.01
