"""Costs read from the text of compiled programs, on texts small enough to count by hand."""

import pytest

from torchax_tpu.tpu import costs, hlo

LAYOUT = "{1,0:T(8,128)}"


def walk(text):
    return costs.kernels_of(hlo.parse(text))


def loop(start, limit, step, direction, operands="%i, %limit"):
    return f"""
%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %p = (s32[]{{:T(128)}}, f32[8,128]{LAYOUT}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%j, %step)
  %x = f32[8,128]{LAYOUT} get-tuple-element(%p), index=1
  %y = f32[8,128]{LAYOUT} negate(%x)
  ROOT %t = (s32[]{{:T(128)}}, f32[8,128]{LAYOUT}) tuple(%next, %y)
}}

%cond (q: (s32[], f32[8,128])) -> pred[] {{
  %q = (s32[]{{:T(128)}}, f32[8,128]{LAYOUT}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  %limit = s32[] constant({limit})
  ROOT %lt = pred[] compare({operands}), direction={direction}
}}

ENTRY %main (a: f32[8,128]) -> f32[8,128] {{
  %a = f32[8,128]{LAYOUT} parameter(0)
  %zero = s32[] constant({start})
  %start = s32[] copy(%zero)
  %init = (s32[]{{:T(128)}}, f32[8,128]{LAYOUT}) tuple(%start, %a)
  %while = (s32[]{{:T(128)}}, f32[8,128]{LAYOUT}) while(%init), condition=%cond, body=%body
  ROOT %out = f32[8,128]{LAYOUT} get-tuple-element(%while), index=1
}}
"""


@pytest.mark.parametrize(
    "text, size, space",
    [
        ("f32[8,128]{1,0:T(8,128)}", 4096, 0),
        ("f32[1024,3]{0,1:T(4,128)}", 4 * 1024 * 4, 0),  # 3 padded to 4, the dimension of 1024 minor
        ("bf16[5,3]{1,0:T(8,128)(2,1)S(1)}", 8 * 128 * 2, 1),
        ("s32[]{:T(128)S(6)}", 4, 6),
        ("f32[3,9,130]{2,1,0:T(8,128)}", 3 * 16 * 256 * 4, 0),
        ("f32[7]", 28, 0),
        ("s4[16]{0}", 8, 0),
    ],
)
def test_shape_bytes_count_padding(text, size, space):
    (shape,) = hlo.shapes_of(text)
    assert (shape.bytes, shape.space) == (size, space)


def test_tuple_types_flatten():
    shapes = hlo.shapes_of("((f32[2,3]{1,0}), /*index=5*/bf16[4]{0:T(256)(128)(2,1)S(1)}, u32[]{:S(2)})")
    assert [s.dims for s in shapes] == [(2, 3), (4,), ()]


@pytest.mark.parametrize(
    "start, limit, step, direction, trips",
    [
        (0, 7, 1, "LT", 7),
        (0, 7, 2, "LT", 4),
        (1, 7, 1, "LE", 7),
        (7, 0, -1, "GT", 7),
        (7, 1, -2, "GE", 4),
        (0, 6, 2, "NE", 3),
        (5, 5, 1, "LT", 0),
    ],
)
def test_trip_count(start, limit, step, direction, trips):
    result = walk(loop(start, limit, step, direction))
    assert result.unknown_loops == 0
    assert sum(k.times for k in result.kernels if k.opcode == "negate") == trips
    assert sum(k.times for k in result.kernels if k.counted) == trips  # the counter's add is no kernel


def test_trip_count_with_the_limit_first():
    assert sum(k.times for k in walk(loop(0, 7, 1, "GT", "%limit, %i")).kernels if k.counted) == 7


def test_loop_of_unknown_length_is_said_and_counts_once():
    text = loop(0, 7, 1, "LT").replace("%start = s32[] copy(%zero)", "%start = s32[] custom-call(%zero)")
    result = walk(text)
    assert result.unknown_loops == 1
    assert sum(k.times for k in result.kernels if k.opcode == "negate") == 1


def brute_force(kernel, extent, positions, stride, low, lhs_dilate, rhs_dilate):
    last = (extent - 1) * lhs_dilate
    at = [o * stride + k * rhs_dilate - low for k in range(kernel) for o in range(positions)]
    return sum(0 <= i <= last and i % lhs_dilate == 0 for i in at)


@pytest.mark.parametrize(
    "case",
    [(3, 32, 32, 1, 1, 1, 1), (3, 32, 16, 2, 1, 1, 1), (8, 8, 8, 7, 0, 8, 1), (3, 16, 31, 1, 1, 2, 1), (3, 9, 9, 1, 2, 1, 2),
     (5, 7, 4, 3, 3, 3, 2), (2, 4, 9, 1, 3, 4, 3)],
)  # fmt: skip
def test_convolution_positions(case):
    assert costs._valid(*case) == brute_force(*case)


def one(body, signature="a: f32[1024,512]", result="f32[1024,512]", before=""):
    return f"{before}\nENTRY %main ({signature}) -> {result} {{\n{body}\n}}\n"


def test_bytes_of_dma_slices_and_updates_in_place():
    big, row = f"f32[1024,512]{LAYOUT}", f"f32[8,512]{LAYOUT}"
    text = one(f"""
  %a = {big} parameter(0)
  %u = f32[8,512]{{1,0:T(8,128)S(1)}} parameter(1)
  %i = s32[] parameter(2)
  %copy-start = (f32[1024,512]{{1,0:T(8,128)S(1)}}, {big}, u32[]{{:S(2)}}) copy-start(%a)
  %copy-done = f32[1024,512]{{1,0:T(8,128)S(1)}} copy-done(%copy-start)
  %slice-start = (({big}), f32[8,512]{{1,0:T(8,128)S(1)}}, s32[]{{:S(2)}}) slice-start(%a), slice={{[0:8], [0:512]}}
  %slice-done = f32[8,512]{{1,0:T(8,128)S(1)}} slice-done(%slice-start)
  %some = {row} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={{8,512}}
  ROOT %new = {big} dynamic-update-slice(%a, %u, %i, %i)""")
    moved = {k.opcode: k.hbm_bytes for k in walk(text).kernels}
    piece, indices = 8 * 512 * 4, 2 * 4
    assert moved == {
        "copy-start": 1024 * 512 * 4,
        "slice-start": piece,
        "dynamic-slice": 2 * piece + indices,
        "dynamic-update-slice": piece + indices,
    }


def test_fusion_reads_only_the_slice_it_takes_also_through_bitcasts():
    big = f"f32[1024,512]{LAYOUT}"
    text = f"""
%inner (b: f32[1024,512]) -> f32[1024,512] {{
  %b = {big} parameter(0)
  ROOT %c = {big} bitcast(%b)
}}
%f (x: f32[1024,512], i: s32[]) -> f32[8,512] {{
  %x = {big} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  %n = {big} fusion(%x), kind=kLoop, calls=%inner
  ROOT %s = f32[8,512]{{1,0:T(8,128)S(1)}} dynamic-slice(%n, %i, %i), dynamic_slice_sizes={{8,512}}
}}
""" + one(f"""
  %a = {big} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  ROOT %k = f32[8,512]{{1,0:T(8,128)S(1)}} fusion(%a, %i), kind=kLoop, calls=%f""", "a: f32[1024,512], i: s32[]", "f32[8,512]")
    assert walk(text).total("hbm_bytes") == 8 * 512 * 4


@pytest.mark.parametrize("fresh", [False, True])
def test_scatter_into_a_buffer_is_in_place_and_into_new_zeros_is_not(fresh):
    big = f"f32[1024,512]{LAYOUT}"
    target = f"%z = {big} broadcast(%c), dimensions={{}}" if fresh else f"%z = {big} bitcast(%x)"
    text = f"""
%add (l: f32[], r: f32[]) -> f32[] {{
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}}
%f (x: f32[1024,512], i: s32[8], u: f32[8,512]) -> f32[1024,512] {{
  %x = {big} parameter(0)
  %i = s32[8]{{0:T(128)S(1)}} parameter(1)
  %u = f32[8,512]{{1,0:T(8,128)S(1)}} parameter(2)
  %c = f32[] constant(0)
  {target}
  ROOT %s = {big} scatter(%z, %i, %u), to_apply=%add
}}
""" + one(f"""
  %a = {big} parameter(0)
  %i = s32[8]{{0:T(128)S(1)}} parameter(1)
  %u = f32[8,512]{{1,0:T(8,128)S(1)}} parameter(2)
  ROOT %k = {big} fusion(%a, %i, %u), kind=kCustom, calls=%f""")
    update = 8 * 512 * 4
    assert walk(text).total("hbm_bytes") == (1024 * 512 * 4 if fresh else 2 * update)


def test_matmul_kernel_has_the_fusions_estimate_and_exact_flops():
    text = f"""
%f (x: bf16[8,512,64], y: bf16[8,64,512]) -> bf16[8,512,512] {{
  %x = bf16[8,512,64]{{1,2,0:T(8,128)(2,1)S(1)}} parameter(0)
  %y = bf16[8,64,512]{{2,1,0:T(8,128)(2,1)S(1)}} parameter(1)
  ROOT %c = bf16[8,512,512]{{2,1,0:T(8,128)(2,1)S(1)}} convolution(%x, %y), window={{size=8 stride=7 lhs_dilate=8}}, dim_labels=0bf_0io->0bf
}}
""" + one("""
  %x = bf16[8,512,64]{1,2,0:T(8,128)(2,1)S(1)} parameter(0)
  %y = bf16[8,64,512]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %k = bf16[8,512,512]{2,1,0:T(8,128)(2,1)S(1)} fusion(%x, %y), kind=kOutput, calls=%f, metadata={op_name="jit(f)/dot"}, backend_config={"window_config":{"estimated_cycles":"34356"}}""")
    (kernel,) = walk(text).kernels
    assert (kernel.flops, kernel.matmul_cycles, kernel.hbm_bytes) == (2 * 8 * 512 * 512 * 64, 34356, 0)
    assert kernel.op_name == "jit(f)/dot"


def test_the_dearest_branch_of_a_conditional_counts():
    row = f"f32[8,128]{LAYOUT}"
    branch = lambda name, ops: (
        f"%{name} (p: f32[8,128]) -> f32[8,128] {{\n  %p.{name} = {row} parameter(0)\n"
        + "\n".join(f"  %{name}{i} = {row} negate(%p.{name})" for i in range(ops))
        + f"\n  ROOT %r.{name} = {row} negate(%p.{name})\n}}\n"
    )
    text = branch("one", 0) + branch("three", 2) + one(f"""
  %i = s32[] parameter(0)
  %a = {row} parameter(1)
  ROOT %c = {row} conditional(%i, %a, %a), branch_computations={{%one, %three}}""")
    assert sum(k.times for k in walk(text).kernels if k.counted) == 3


def test_collectives_count_the_larger_side():
    text = one(f"""
  %a = f32[128,128]{LAYOUT} parameter(0)
  %g = f32[512,128]{LAYOUT} all-gather(%a), dimensions={{0}}
  %s = ((f32[512,128]{LAYOUT}), f32[128,128]{LAYOUT}) reduce-scatter-start(%g), dimensions={{0}}
  %d = f32[128,128]{LAYOUT} reduce-scatter-done(%s)
  ROOT %r = f32[128,128]{LAYOUT} all-reduce(%d), to_apply=%add""", "a: f32[128,128]", "f32[128,128]")
    found = dict(c for k in walk(text).kernels for c in k.collectives)
    whole = 512 * 128 * 4
    assert found == {"all-gather": whole, "reduce-scatter": whole, "all-reduce": whole // 4}


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("module @jit_f {}")
