"""Attention: SDPA over masks, causal, grouped heads and dropout; the transformer fast path; masked softmax."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import oracle

DEVICE = oracle.DEVICE
TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-9, 1e-10), torch.bfloat16: (2e-2, 2e-2),
             torch.float16: (2e-3, 2e-3)}


def both(fn, tensors, dtype=torch.float32):
    """fn on CPU and on the device, forward and gradients by every float tensor; compared."""
    results, cotangent = [], None
    for device in ("cpu", DEVICE):
        moved = [t.detach().clone().to(device) if t is not None else None for t in tensors]
        leaves = [t.requires_grad_() for t in moved if t is not None and t.is_floating_point()]
        out = fn(*moved)
        cotangent = torch.randn(out.shape).to(out.dtype) if cotangent is None else cotangent
        results.append((out, torch.autograd.grad(out, leaves, cotangent.to(device))))
    oracle.assert_same(results[1], results[0], *TOLERANCE[dtype])
    return results[1][0]


def qkv(dtype=torch.float32, heads=4, kv_heads=4, rows=5, columns=7):
    torch.manual_seed(0)
    q = torch.randn(2, heads, rows, 8, dtype=dtype)
    return q, torch.randn(2, kv_heads, columns, 8, dtype=dtype), torch.randn(2, kv_heads, columns, 6, dtype=dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "bool4d"])
def test_sdpa(dtype, mask):
    q, k, v = qkv(dtype)
    given = {"bool": torch.rand(5, 7) > 0.4, "float": torch.randn(5, 7, dtype=dtype),
             "bool4d": torch.rand(2, 1, 5, 7) > 0.4}.get(mask)
    if given is not None and given.dtype == torch.bool:
        given[..., 0] = True
    both(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, is_causal=mask == "causal"), (q, k, v, given),
         dtype)


@pytest.mark.parametrize("mask", [None, (5, 7), (2, 4, 5, 7), (2, 1, 5, 7)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_sdpa_grouped_heads(kv_heads, mask):
    q, k, v = qkv(kv_heads=kv_heads)
    given = None if mask is None else torch.randn(mask)
    both(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.3, enable_gqa=True), (q, k, v, given))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 4, 5, 8)], ids=str)
def test_sdpa_other_ranks(shape):
    torch.manual_seed(0)
    both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [torch.randn(shape) for _ in range(3)])


def test_sdpa_row_without_keys_is_zero():
    q, k, v = (t.to(DEVICE).requires_grad_() for t in qkv())
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    out = F.scaled_dot_product_attention(q, k, v, mask.to(DEVICE))
    out.sum().backward()
    assert bool((out[:, :, 2] == 0).all())
    assert bool(torch.isfinite(q.grad).all()) and bool((q.grad[:, :, 2] == 0).all())


def test_sdpa_without_keys_is_zero():
    q, k, v = (t.to(DEVICE) for t in qkv(columns=0))
    assert F.scaled_dot_product_attention(q, k, v).tolist() == torch.zeros(2, 4, 5, 6).tolist()


def test_sdpa_float_mask_of_minus_infinity():
    q, k, v = qkv()
    mask = torch.randn(5, 7)
    mask[1, 3:] = float("-inf")
    mask[3] = float("-inf")
    both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask.to(q.device)), (q, k, v))


def test_sdpa_dropout():
    torch.manual_seed(0)
    q, k = torch.zeros(1, 2, 64, 8, device=DEVICE), torch.zeros(1, 2, 100, 8, device=DEVICE)
    v = torch.ones(1, 2, 100, 8, device=DEVICE, requires_grad=True)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    again = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    assert abs(out.mean().item() - 1) < 0.05 and bool((out != again).any())
    out.sum().backward()
    # Weights are uniform, so the gradient by v must repeat exactly what forward kept.
    torch.testing.assert_close(v.grad[..., 0].sum().item(), out[..., 0].sum().item(), rtol=1e-4, atol=1e-3)


def test_sdpa_is_one_op_forward_and_one_backward():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names = []
    q, k, v = (t.to(DEVICE).requires_grad_() for t in qkv())
    with Log():
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert [n for n in names if n != "aten::detach"] == ["aten::_scaled_dot_product_flash_attention_for_cpu"]


def test_sdpa_in_inference_mode_and_under_vmap_and_grad():
    q, k, v = qkv()
    with torch.inference_mode():
        got = F.scaled_dot_product_attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
        oracle.assert_same(got, F.scaled_dot_product_attention(q, k, v), 1e-4, 1e-5)

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sum()

    oracle.assert_same(torch.func.grad(loss)(*(t.to(DEVICE) for t in (q, k, v))), torch.func.grad(loss)(q, k, v),
                       1e-4, 1e-5)
    oracle.assert_same(torch.vmap(loss)(*(t.to(DEVICE) for t in (q, k, v))), torch.vmap(loss)(q, k, v), 1e-4, 1e-4)


@pytest.mark.parametrize("bad", ["dtype", "both", "rank", "heads"])
def test_sdpa_refuses_as_torch_does(bad):
    for device in ("cpu", DEVICE):
        q, k, v = (t.to(device) for t in qkv(kv_heads=4 if bad != "heads" else 3))
        kwargs = {}
        if bad == "dtype":
            k = k.double()
        elif bad == "both":
            kwargs = {"attn_mask": torch.ones(5, 7, dtype=torch.bool, device=device), "is_causal": True}
        elif bad == "rank":
            q = q[0, 0, 0]
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, v, **kwargs)


OPTIONS = [dict(zip(("bias", "batch_first", "add_bias_kv", "add_zero_attn"), flags))
           for flags in ((True, True, False, False), (False, False, False, False), (True, False, True, True))]


@pytest.mark.parametrize("options,needs_weights,training", [
    (OPTIONS[0], True, False), (OPTIONS[0], False, False), (OPTIONS[0], True, True), (OPTIONS[1], True, True),
    (OPTIONS[2], False, False), (OPTIONS[2], True, True)], ids=str)
def test_multihead_attention(options, needs_weights, training):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **options).train(training)
    twin = copy.deepcopy(module).to(DEVICE)
    x = torch.randn(3, 3, 8)
    padding = torch.tensor([[False, False, True], [False] * 3, [False] * 3])
    causal = torch.ones(3, 3, dtype=torch.bool).triu(1)
    for kwargs in ({}, {"key_padding_mask": padding}, {"attn_mask": causal},
                   {"attn_mask": causal, "key_padding_mask": padding, "average_attn_weights": False}):
        for grad in (torch.enable_grad, torch.no_grad):
            with grad(), oracle.quiet():
                ref = module(x, x, x, need_weights=needs_weights, **kwargs)
                y = x.to(DEVICE)
                got = twin(y, y, y, need_weights=needs_weights, **oracle.to_device(kwargs))
            oracle.assert_same(got, ref, 1e-4, 1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both"])
def test_encoder_layer_fast_path(norm_first, activation, mask):
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, norm_first=norm_first,
                                        batch_first=True).eval()
    twin = copy.deepcopy(module).to(DEVICE)
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False, False, False, True, True], [False] * 5])
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    kwargs = {"none": {}, "causal": {"src_mask": causal}, "padding": {"src_key_padding_mask": padding},
              "both": {"src_mask": causal, "src_key_padding_mask": padding}}[mask]
    with torch.no_grad(), oracle.quiet():
        ref = module(x, **kwargs)
        got = twin(x.to(DEVICE), **oracle.to_device(kwargs))
    oracle.assert_same(got, ref, 1e-4, 1e-5)


def test_masked_softmax():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5)
    mask = torch.rand(2, 3, 4, 5) > 0.6
    mask[..., 0] = False
    both(lambda x: torch._masked_softmax(x, mask.to(x.device), -1, 2), (x,))


def test_safe_softmax_row_of_minus_infinity_is_zero():
    x = torch.tensor([[float("-inf")] * 3, [1.0, 2.0, float("-inf")]])
    oracle.assert_same(torch._safe_softmax(x.to(DEVICE), -1), torch._safe_softmax(x, -1))
