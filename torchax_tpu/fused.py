"""Composite ops which reach JAX whole, although torch has no derivative formula for them.

torch would take `scaled_dot_product_attention` or `lstm` apart above us. A kernel at the device's
autograd key is asked first: it calls one op with a formula (one program forward, one backward).
The same functions answer in inference mode, where the composite itself reaches the tensor.
"""

import torch
from torch import is_grad_enabled
from torch._C import _len_torch_dispatch_stack

from . import tensor as T
from .errors import UnsupportedOpError
from .registry import special

aten = torch.ops.aten
KERNELS = {}  # overload -> kernel


def kernel(*overloads):
    """Declare a kernel of composite overloads: takes and returns tensors."""
    def register(fn):
        for overload in overloads:
            KERNELS[overload] = fn
            special(overload)(fn)
        return fn
    return register


def register(library):
    """Put the kernels where the device's autograd looks for them."""
    for overload, fn in KERNELS.items():
        library.impl(overload, fn, "AutogradPrivateUse1")


# ---------------------------------------------------------------- attention


def _check_heads(query, key):
    """Only enable_gqa lets query heads share key heads; the ops below can't tell. The rest is checked there, once."""
    if query.dim() > 2 and key.dim() > 2:
        heads, kv_heads = query.shape[-3], key.shape[-3]
        if heads != kv_heads and heads != 1 and kv_heads != 1:
            raise RuntimeError(f"The size of tensor a ({heads}) must match the size of tensor b ({kv_heads}) at "
                               "non-singleton dimension 1 (scaled_dot_product_attention; enable_gqa=True lets query "
                               "heads share key heads)")


_attention = aten._scaled_dot_product_flash_attention_for_cpu.default


@kernel(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
                                 enable_gqa=False):
    if not enable_gqa:
        _check_heads(query, key)
    if dropout_p > 0 or attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is None and scale is None:
        return _attention(query, key, value, 0.0, is_causal)[0]
    return _attention(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


# ---------------------------------------------------------------- dropout


@kernel(aten.dropout.default)
def dropout(input, p, train):
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    return aten.native_dropout.default(input, p, True)[0]


@special(aten._nested_tensor_from_mask_left_aligned.default)
def _nested_tensor_from_mask_left_aligned(t, mask):
    """There are no nested tensors here: nn.TransformerEncoder asks this first, and then passes the mask on instead."""
    return False


@special(aten._nested_tensor_from_mask.default)
def _nested_tensor_from_mask(t, mask, mask_check=True):
    raise UnsupportedOpError(f"nested tensors are not supported on {t.device}; "
                             "make the nn.TransformerEncoder with enable_nested_tensor=False")


# ---------------------------------------------------------------- norms


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    return aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]


KERNELS[aten.rms_norm.default] = _rms_norm  # in inference mode ops/norm.py answers


_plain_layer_norm = aten.layer_norm.default


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    """Without a gradient the statistics that would be saved for it are not made: the op has one result."""
    if type(input) is not T.Tensor or _len_torch_dispatch_stack() or is_grad_enabled() and (
            input.requires_grad or weight is not None and weight.requires_grad or bias is not None and bias.requires_grad):
        return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)[0]
    handler = getattr(_plain_layer_norm, "_torchax_tpu", None) or T.find(_plain_layer_norm)
    return handler((input, normalized_shape, weight, bias, eps), {})


KERNELS[aten.layer_norm.default] = _layer_norm


# ---------------------------------------------------------------- CTC


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    """Lengths may be lists, or tensors on any device; known lengths are checked as torch does."""
    device = log_probs.device
    batched = log_probs.dim() == 3
    if not batched:
        log_probs = log_probs.unsqueeze(1)
    lengths = []
    for name, given in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
        if not isinstance(given, torch.Tensor):
            given = torch.tensor(given, dtype=torch.int64)
        if given.is_floating_point() or given.is_complex():
            raise RuntimeError(f"{name} must be integral")
        lengths.append(given.reshape(-1))
    known = [x.tolist() if x.device.type == "cpu" else None for x in lengths]
    if known[0] and max(known[0]) > log_probs.shape[0]:
        raise RuntimeError(f"Expected input_lengths to have value at most {log_probs.shape[0]}, but got value "
                           f"{max(known[0])}")
    lengths = [x.to(device, torch.int64) for x in lengths]
    targets = targets.to(device)
    if targets.dim() == 1 and batched and known[1] and targets.numel():  # as wide as the longest, not as all together
        start = (torch.tensor(known[1]).cumsum(0) - torch.tensor(known[1])).to(device)
        at = start.unsqueeze(1) + torch.arange(max(max(known[1]), 1), device=device)
        targets = targets[at.clamp(max=targets.numel() - 1)]
    elif targets.dim() == 1 and not batched:
        targets = targets.unsqueeze(0)
    loss = aten._ctc_loss.Tensor(log_probs, targets, *lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros_like(loss), loss)
    if reduction == 1:
        return (loss / lengths[1].clamp(min=1).to(loss.dtype)).mean()
    if reduction == 2:
        return loss.sum()
    return loss if batched else loss.squeeze(0)


kernel(aten.ctc_loss.IntList, aten.ctc_loss.Tensor)(_ctc_loss)


# ---------------------------------------------------------------- recurrent layers


class _Recurrent(torch.autograd.Function):
    """A whole recurrent stack: one program forward, one backward."""

    @staticmethod
    def forward(ctx, composite, static, input, batch_sizes, hx, cx, seed, *weights):
        ctx.composite, ctx.static = composite, static
        ctx.save_for_backward(input, batch_sizes, hx, cx, seed, *weights)
        ctx.set_materialize_grads(False)
        out = torch.ops.torchax_tpu.rnn(input, batch_sizes, list(weights), hx, cx, seed, *static)
        return out[:2] if cx is None else tuple(out)

    @staticmethod
    def backward(ctx, g_output, g_hy, g_cy=None):
        input, batch_sizes, hx, cx, seed, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: differentiate torch's own step-by-step form
            if seed is not None:
                raise NotImplementedError("a recurrent layer with dropout can't be differentiated twice")
            leaves = [t for t in (input, hx, cx, *weights) if t is not None]
            wanted = [t for t in leaves if t.requires_grad]
            outs = ctx.composite(input, hx, cx, weights)
            pairs = [(o, g) for o, g in zip(outs, (g_output, g_hy, g_cy)) if g is not None]
            found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=True,
                                        allow_unused=True)
            by_id = {id(t): g for t, g in zip(wanted, found)}
            g_input, g_hx, g_cx, *g_weights = (by_id.get(id(t)) for t in (input, hx, cx, *weights))
        else:
            g_input, g_hx, g_cx, g_weights = torch.ops.torchax_tpu.rnn_backward(
                g_output, g_hy, g_cy, input, batch_sizes, weights, hx, cx, seed, *ctx.static)
        return None, None, g_input, None, g_hx, g_cx, None, *g_weights


def _recurrent(overload, mode, packed):
    is_lstm = mode == "lstm"

    def run(input, *args):
        batch_sizes, args = (args[0], args[1:]) if packed else (None, args)
        state, weights, has_biases, num_layers, dropout, train, bidirectional = args[:7]
        batch_first = False if packed else args[7]
        if torch._C._are_functorch_transforms_active():
            return overload.decompose(input, *([batch_sizes] if packed else []), *args)
        hx, cx = state if is_lstm else (state, None)
        sizes = batch_sizes
        if packed and sizes.device != input.device:  # pack_padded_sequence keeps them on the CPU
            sizes = sizes.to(input.device)
        seed = None
        if dropout > 0 and train and num_layers > 1:
            seed = torch.randint(0, 2**31 - 1, (2,), dtype=torch.int32, device=input.device)
        static = (mode, has_biases, num_layers, float(dropout), bidirectional, batch_first)
        tensors = (input, hx, cx, *weights)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            def composite(input, hx, cx, weights):
                again = (batch_sizes,) if packed else ()
                tail = () if packed else (batch_first,)
                return overload.decompose(input, *again, [hx, cx] if is_lstm else hx, list(weights), has_biases,
                                          num_layers, dropout, train, bidirectional, *tail)
            return _Recurrent.apply(composite, static, input, sizes, hx, cx, seed, *weights)
        out = torch.ops.torchax_tpu.rnn(input, sizes, list(weights), hx, cx, seed, *static)
        return tuple(out) if is_lstm else tuple(out[:2])

    return run


for _name, _mode in (("lstm", "lstm"), ("gru", "gru"), ("rnn_tanh", "tanh"), ("rnn_relu", "relu")):
    for _form in ("input", "data"):
        _overload = getattr(getattr(aten, _name), _form)
        kernel(_overload)(_recurrent(_overload, _mode, _form == "data"))


# ---------------------------------------------------------------- packed sequences


def _placed(batch_sizes, device):
    """For (time, batch): the row of the packed data, and whether there is one; built on the CPU, where sizes live."""
    sizes = batch_sizes.to("cpu", torch.int64)
    starts = sizes.cumsum(0) - sizes
    lane = torch.arange(int(sizes[0]))
    mask = lane < sizes.unsqueeze(1)
    source = torch.where(mask, starts.unsqueeze(1) + lane, 0)
    return source.to(device), mask.to(device)


@special(aten._pack_padded_sequence.default)
def _pack_padded_sequence(input, lengths, batch_first):
    """Packed rows on the device; the batch sizes stay on the CPU, as torch.nn.utils.rnn demands."""
    lengths = lengths.to("cpu", torch.int64)
    if batch_first:
        input = input.transpose(0, 1)
    if input.numel() == 0:
        raise RuntimeError("Cannot pack empty tensors.")
    if lengths.numel() != input.shape[1]:
        raise RuntimeError(f"Expected `len(lengths)` to be equal to batch_size, but got {lengths.numel()} (batch_size="
                           f"{input.shape[1]})")
    if int(lengths[-1]) <= 0:
        raise RuntimeError("Length of all samples has to be greater than 0, but found an element in 'lengths' that is "
                           "<= 0")
    if bool((lengths[1:] > lengths[:-1]).any()):
        raise RuntimeError("`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can "
                           "pass `enforce_sorted=False` to pack_padded_sequence and/or pack_sequence to sidestep this "
                           "requirement if you do not need ONNX exportability.")
    if int(lengths[0]) > input.shape[0]:
        raise RuntimeError(f"Expected lengths of at most {input.shape[0]}, got {int(lengths[0])}")
    mask = torch.arange(int(lengths[0])).unsqueeze(1) < lengths
    time, lane = mask.nonzero(as_tuple=True)
    return input[time.to(input.device), lane.to(input.device)], mask.sum(1)


@kernel(aten._pack_padded_sequence_backward.default)
def _pack_padded_sequence_backward(grad, input_size, batch_sizes, batch_first):
    source, mask = _placed(batch_sizes, grad.device)
    out = torch.where(mask.reshape(*mask.shape, *[1] * (grad.dim() - 1)), grad[source], 0)
    length = input_size[1] if batch_first else input_size[0]
    if length > out.shape[0]:
        out = torch.cat([out, out.new_zeros(length - out.shape[0], *out.shape[1:])])
    return out.transpose(0, 1) if batch_first else out


@kernel(aten._pad_packed_sequence.default)
def _pad_packed_sequence(data, batch_sizes, batch_first, padding_value, total_length):
    source, mask = _placed(batch_sizes, data.device)
    length = source.shape[0]
    if 0 < total_length < length:
        raise RuntimeError("Expected total_length to be at least the length of the longest sequence in input, but got "
                           f"total_length={total_length} and max sequence length being {length}")
    out = torch.where(mask.reshape(*mask.shape, *[1] * (data.dim() - 1)), data[source], padding_value)
    if total_length > length:
        out = torch.cat([out, out.new_full((total_length - length, *out.shape[1:]), padding_value)])
    sizes = batch_sizes.to("cpu", torch.int64)
    lengths = (torch.arange(int(sizes[0])) < sizes.unsqueeze(1)).sum(0)
    return (out.transpose(0, 1) if batch_first else out), lengths
