"""Count what a program compiled for TPU costs: `kernels_of(module)` walks it as the chip runs it, loops times their
trip count, one record per kernel.

What is counted, and how:

* matmul cycles: `estimated_cycles` of kernels that hold a convolution (TPU programs have no dot). For a matmul alone
  that is 3-14 % above the peak of the matrix unit on v5e, and it knows precision. The compiler's estimate for other
  kernels is a guess, so it is left out.
* flops: two per multiply-add of convolutions and dots, positions in padding or dilation holes left out (the formula of
  XLA's HloCostAnalysis), plus the second matmul of XLA's own softmax-attention kernel.
* HBM bytes: operands and results of each kernel that live in HBM (memory space 0), tile padding included. An operand of
  which a kernel reads only a slice counts as that slice; an update in place counts as the update.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from .hlo import HBM, Computation, Instruction, Module

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip

# No work of their own: names, constants, the second half of an asynchronous pair.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "copy-done", "slice-done", "dynamic-slice-done", "async-update", "async-done", "add-dependency",
    "domain", "send-done", "recv-done",
} | {f"{name}-done" for name in COLLECTIVES}  # fmt: skip

# They launch nothing. X64: halves of 64-bit values taken apart and put together.
_FREE_CUSTOM_CALLS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"}
_X64_CUSTOM_CALLS = {"X64SplitLow", "X64SplitHigh", "X64Combine"}
_PASS_THROUGH = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "optimization-barrier"}


# Flops


def flops_of(instruction: Instruction, computation: Computation) -> int:
    """Flops of one convolution or dot: two per multiply-add, holes and padding left out (XLA's HloCostAnalysis)."""
    out = instruction.shapes[0]
    lhs, rhs = (computation.operand(instruction, i).shapes[0] for i in (0, 1))
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        dims = [int(d) for d in contracted[1].split(",") if d] if contracted else []
        return 2 * math.prod(out.dims) * math.prod(lhs.dims[d] for d in dims)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    lhs_labels, rhs_labels, out_labels = labels.groups()
    window = _window(instruction.rest)
    groups = re.search(r"feature_group_count=(\d+)", instruction.rest)
    batch_groups = re.search(r"batch_group_count=(\d+)", instruction.rest)
    count = lhs.dims[lhs_labels.index("f")] // (int(groups[1]) if groups else 1)
    count *= out.dims[out_labels.index("f")]
    count *= lhs.dims[lhs_labels.index("b")] // (int(batch_groups[1]) if batch_groups else 1)
    for i in range(len(lhs_labels) - 2):
        kernel = rhs.dims[rhs_labels.index(str(i))]
        extent = lhs.dims[lhs_labels.index(str(i))]
        positions = out.dims[out_labels.index(str(i))]
        stride, low = window["stride"].get(i, 1), window["pad"].get(i, 0)
        count *= _valid(kernel, extent, positions, stride, low, window["lhs_dilate"].get(i, 1),
                        window["rhs_dilate"].get(i, 1))  # fmt: skip
    return 2 * count


def _window(rest: str) -> dict[str, dict[int, int]]:
    found = re.search(r"window=\{([^}]*)\}", rest)
    fields: dict[str, dict[int, int]] = {"stride": {}, "pad": {}, "lhs_dilate": {}, "rhs_dilate": {}}
    for item in found[1].split() if found else []:
        name, _, values = item.partition("=")
        if name in fields:  # pad is low_high per dimension: the low side sets the positions
            fields[name] = {i: int(value.split("_")[0]) for i, value in enumerate(values.split("x"))}
    return fields


@functools.lru_cache(maxsize=None)
def _valid(kernel: int, extent: int, positions: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Pairs (output position, kernel position) of one dimension that touch an element of the input."""
    last, total = (extent - 1) * lhs_dilate, 0
    for k in range(kernel):
        shift = k * rhs_dilate - low  # the input index is position * stride + shift
        first = max(0, -(shift // stride))
        end = min(positions, (last - shift) // stride + 1)
        if lhs_dilate == 1:
            total += max(0, end - first)
        else:  # holes repeat with this period
            period = lhs_dilate // math.gcd(lhs_dilate, stride)
            candidates = range(first, min(first + period, end))
            hit = next((p for p in candidates if (p * stride + shift) % lhs_dilate == 0), None)
            total += 0 if hit is None else (end - 1 - hit) // period + 1
    return total


def _inner(module: Module, computation: Computation) -> Iterator[tuple[Instruction, Computation]]:
    """Every instruction of a computation and of the fusions inside it."""
    for instruction in computation.instructions.values():
        yield instruction, computation
        called = module.called(instruction) if instruction.opcode == "fusion" else None
        if called:
            yield from _inner(module, called)


# Bytes

_PARTIAL = {"slice", "dynamic-slice", "gather"}


def _read_bytes(module: Module, computation: Computation, name: str, full: int) -> int:
    """HBM bytes a kernel body reads of its parameter `name`: all of it, or what its slices and gathers pick."""
    return min(full, _reads(module, computation, name, full)[0])


def _reads(module: Module, computation: Computation, name: str, full: int) -> tuple[int, bool]:
    """The bytes read of `name` in a computation, and whether its root hands the same array on to the caller."""
    total, handed_on = 0, computation.root.name == name
    for user in computation.users.get(name, []):
        first_only = user.operands[0] == name and name not in user.operands[1:]
        if user.opcode in _PARTIAL and first_only:
            total += user.shapes[0].bytes
        elif user.opcode == "dynamic-update-slice" and first_only:
            continue  # updated in place
        elif user.opcode == "scatter" and first_only:
            total += _update_bytes(user, computation)  # read, combine, write the updates' elements
        elif user.opcode == "tuple":
            continue  # handed on, not read
        elif user.opcode == "bitcast":
            read, through = _reads(module, computation, user.name, full)
            total, handed_on = total + read, handed_on or through
        elif user.opcode == "fusion" and (called := module.called(user)):
            for i, operand in enumerate(user.operands):
                if operand == name:
                    read, through = _reads(module, called, called.parameters[i].name, full)
                    total += read
                    if through:  # a nested fusion of bitcasts: whoever uses its result reads it
                        read, through = _reads(module, computation, user.name, full)
                        total, handed_on = total + read, handed_on or through
        else:
            return full, handed_on
    return total, handed_on


def _written_bytes(module: Module, computation: Computation, name: str, full: int, held: set[str] | None = None) -> int:
    """HBM bytes a kernel body writes of the result `name`: all of it, or the part updated in place.

    `held` names the parameters that are buffers of the kernel (all of them, in the kernel's own body)."""

    def buffer(name: str) -> Instruction:
        instruction = computation.instructions[name]
        while instruction.opcode == "bitcast":
            instruction = computation.operand(instruction, 0)
        return instruction

    def is_held(name: str) -> bool:
        found = buffer(name)
        return found.opcode == "parameter" and (held is None or found.name in held)

    instruction = buffer(name)
    if instruction.opcode == "parameter":
        return 0  # handed through, not written
    if instruction.opcode in ("dynamic-update-slice", "scatter") and is_held(instruction.operands[0]):
        return min(full, _update_bytes(instruction, computation))
    called = module.called(instruction) if instruction.opcode == "fusion" else None
    if called and called.root.opcode != "tuple":
        within = {called.parameters[i].name for i, operand in enumerate(instruction.operands) if is_held(operand)}
        return _written_bytes(module, called, called.root.name, full, within)
    return full


def _update_bytes(instruction: Instruction, computation: Computation) -> int:
    """Bytes of what a dynamic-update-slice or scatter puts into its first operand."""
    return computation.operand(instruction, 1 if instruction.opcode == "dynamic-update-slice" else -1).shapes[0].bytes


def hbm_bytes_of(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Bytes one kernel moves from and to HBM."""
    opcode, shapes = instruction.opcode, instruction.shapes
    if opcode == "copy-start":  # (destination, source, context)
        return sum(s.bytes for s in shapes[:2] if s.space == HBM)
    if opcode in ("slice-start", "dynamic-slice-start"):  # ((source, indices...), destination, context)
        destination = shapes[-2]
        return destination.bytes * ((shapes[0].space == HBM) + (destination.space == HBM))
    if opcode.endswith("-start"):  # collectives: operands, then results (an all-reduce prints its results only)
        return sum(s.bytes for s in shapes if s.space == HBM) * (2 if opcode == "all-reduce-start" else 1)
    if opcode in ("iota", "broadcast", "rng-bit-generator") and not instruction.operands:
        return sum(s.bytes for s in shapes if s.space == HBM)
    if opcode == "custom-call" and instruction.target in _X64_CUSTOM_CALLS:  # renaming, unless it crosses VMEM's border
        halves = shapes if instruction.target != "X64Combine" else [
            shape for name in instruction.operands for shape in computation.instructions[name].shapes
        ]  # fmt: skip
        wholes = [computation.operand(instruction, 0).shapes[0]] if halves is shapes else shapes
        return sum(s.bytes for s in halves if (s.space == HBM) != (wholes[0].space == HBM))
    body = module.called(instruction) if opcode == "fusion" else None
    total = 0
    for i, name in enumerate(instruction.operands):
        full = sum(s.bytes for s in computation.instructions[name].shapes if s.space == HBM)
        if not full:
            continue
        if body:
            total += _read_bytes(module, body, body.parameters[i].name, full)
        elif opcode in _PARTIAL and i == 0:
            total += min(full, shapes[0].bytes)
        elif opcode == "dynamic-update-slice" and i == 0:
            continue
        elif opcode == "scatter" and i == 0:
            total += min(full, _update_bytes(instruction, computation))
        else:
            total += full
    if body:
        root = body.root
        names = root.operands if root.opcode == "tuple" else [root.name]
        for name, shape in zip(names, shapes, strict=False):
            if shape.space == HBM:
                total += _written_bytes(module, body, name, shape.bytes)
    elif opcode in ("dynamic-update-slice", "scatter"):
        if shapes[0].space == HBM:
            total += min(shapes[0].bytes, _update_bytes(instruction, computation))
    else:
        total += sum(s.bytes for s in shapes if s.space == HBM)
    return total


# Loops


class _Unknown(Exception):
    pass


def _scalar(module: Module, computation: Computation, name: str, carried: dict[int, int]) -> int:
    """Value of an integer scalar, given the loop-carried ones by their place in the tuple. Raises _Unknown."""
    instruction = computation.instructions[name]
    opcode = instruction.opcode

    def operand(i):
        return _scalar(module, computation, instruction.operands[i], carried)

    if opcode == "constant":
        try:
            return int({"true": "1", "false": "0"}.get(instruction.literal, instruction.literal))
        except ValueError:
            raise _Unknown from None
    if opcode in _PASS_THROUGH:
        return operand(0)
    if opcode == "get-tuple-element" and computation.operand(instruction, 0).opcode == "parameter":
        index = int(re.search(r"index=(\d+)", instruction.rest)[1])
        if index in carried:
            return carried[index]
    if opcode == "parameter" and int(instruction.literal) in carried:
        return carried[int(instruction.literal)]
    if opcode in ("add", "subtract", "multiply"):
        a, b = operand(0), operand(1)
        return a + b if opcode == "add" else a - b if opcode == "subtract" else a * b
    if opcode == "fusion" and (called := module.called(instruction)):
        known = {}
        for i in range(len(instruction.operands)):
            try:
                known[i] = operand(i)
            except _Unknown:
                pass
        return _scalar(module, called, called.root.name, known)
    raise _Unknown


_COUNT = {  # trips of a loop from `start` by `step` while `start <op> limit`
    "LT": lambda start, step, limit: -((start - limit) // step) if step > 0 else None,
    "LE": lambda start, step, limit: (limit - start) // step + 1 if step > 0 else None,
    "GT": lambda start, step, limit: -((start - limit) // step) if step < 0 else None,
    "GE": lambda start, step, limit: (limit - start) // step + 1 if step < 0 else None,
    "NE": lambda start, step, limit: (limit - start) // step if step and not (limit - start) % step else None,
}


def trip_count(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """Times a while loop runs, from its condition, start and step; None where these aren't plain integers."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    body, condition = module.called(loop, "body"), module.called(loop, "condition")
    start_tuple = computation.operand(loop, 0)
    if body is None or condition is None or start_tuple.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    carried: dict[int, int] = {}
    for i, name in enumerate(start_tuple.operands):
        try:
            carried[i] = _scalar(module, computation, name, {})
        except _Unknown:
            pass
    test, tested = condition.root, condition
    places: dict[str, str] = {}  # parameters of a fused condition -> names in the condition
    if test.opcode == "fusion" and (fused := module.called(test)):
        places = {fused.parameters[i].name: name for i, name in enumerate(test.operands)}
        test, tested = fused.root, fused
    direction = re.search(r"direction=(\w+)", test.rest)
    if test.opcode != "compare" or direction is None or direction[1] not in _COUNT:
        return None

    def side(i: int, values: dict[int, int]) -> int:
        name = test.operands[i]
        return _scalar(module, condition if name in places else tested, places.get(name, name), values)

    try:
        following = dict(carried)
        for i in list(carried):
            try:
                following[i] = _scalar(module, body, body.root.operands[i], carried)
            except _Unknown:
                del following[i]
        start, limit = side(0, carried), side(1, carried)
        step, drift = side(0, following) - start, side(1, following) - limit
    except _Unknown:
        return None
    if drift and not step:  # written the other way round: limit > counter
        start, limit, step = limit, start, drift
        swapped = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}[direction[1]]
    elif drift:
        return None
    else:
        swapped = direction[1]
    trips = _COUNT[swapped](start, step, limit)
    return None if trips is None else max(0, trips)


# The walk


@dataclasses.dataclass
class Kernel:
    """One kernel of a program. `matmul_cycles`, `flops` and `hbm_bytes` are of one run; it runs `times` times."""

    name: str
    opcode: str
    op_name: str
    matmul_cycles: int
    flops: int
    hbm_bytes: int
    times: int
    counted: bool  # False for DMA copies and scalar bookkeeping, which move bytes but launch no kernel
    custom_call: str = ""
    collectives: tuple[tuple[str, int], ...] = ()  # (kind, bytes) each


@dataclasses.dataclass
class Walk:
    kernels: list[Kernel]
    unknown_loops: int  # loops whose trip count couldn't be read: counted once

    def total(self, field: str) -> int:
        """Sum of a field of the kernels, each times how often it runs."""
        return sum(getattr(k, field) * k.times for k in self.kernels)


def kernels_of(module: Module) -> Walk:
    """Every kernel of the program with the number of times it runs.

    Of a conditional the dearest branch counts (by matmul cycles, then HBM bytes)."""
    walk = Walk([], 0)
    _walk(module, module.entry, 1, walk)
    return walk


def _walk(module: Module, computation: Computation, times: int, walk: Walk) -> None:
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = trip_count(module, instruction, computation)
            walk.unknown_loops += trips is None
            body = module.called(instruction, "body")
            if body and trips != 0:
                _walk(module, body, times * (trips or 1), walk)
        elif opcode == "conditional":
            _walk_dearest(module, instruction, times, walk)
        elif opcode in ("call", "async-start"):
            called = module.called(instruction, "to_apply") or module.called(instruction)
            if called:
                _walk(module, called, times, walk)
        elif opcode not in _FREE and not (opcode == "custom-call" and instruction.target in _FREE_CUSTOM_CALLS):
            walk.kernels.append(_kernel(module, instruction, computation, times))


def _walk_dearest(module: Module, instruction: Instruction, times: int, walk: Walk) -> None:
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
    names = re.findall(r"%([\w.\-]+)", listed[1]) if listed else []
    names += [n for a in ("true_computation", "false_computation") if (n := instruction.attribute(a))]
    walks = []
    for name in names:
        branch = Walk([], 0)
        _walk(module, module.computations[name], times, branch)
        walks.append(branch)
    if walks:
        dearest = max(walks, key=lambda w: (w.total("matmul_cycles"), w.total("hbm_bytes")))
        walk.kernels += dearest.kernels
        walk.unknown_loops += dearest.unknown_loops


def _kernel(module: Module, instruction: Instruction, computation: Computation, times: int) -> Kernel:
    body = module.called(instruction) if instruction.opcode == "fusion" else None
    inner = list(_inner(module, body)) if body else [(instruction, computation)]
    flops, matmul, collectives = 0, False, []
    for part, home in inner:
        if part.opcode in ("convolution", "dot"):
            matmul = True
            flops += flops_of(part, home)
        kind = part.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            operands = sum(s.bytes for name in part.operands for s in home.instructions[name].shapes)
            results = sum(s.bytes for s in part.shapes)
            if part.opcode.endswith("-start") and kind != "all-reduce":
                results = max((s.bytes for s in part.shapes), default=0)  # its type lists operands and results
            collectives.append((kind, max(operands, results)))
    custom = ""
    if instruction.opcode == "custom-call":
        custom = instruction.target if instruction.target not in _X64_CUSTOM_CALLS else ""
        if custom == "tpu_custom_call":  # Pallas and XLA's own kernels: the instruction's name says which
            custom = re.sub(r"(\.\d+|\.clone)+$", "", instruction.name)
        if custom == "online-softmax" and len(instruction.operands) >= 2:  # softmax(scores) @ values
            scores, values = (computation.operand(instruction, i).shapes[0].dims for i in (0, 1))
            flops += 2 * math.prod(scores) * values[-1]
    dma = instruction.opcode in ("copy-start", "slice-start", "dynamic-slice-start")
    dma |= instruction.target in _X64_CUSTOM_CALLS
    operands = (computation.instructions[name].shapes for name in instruction.operands)
    scalar = not body and all(math.prod(s.dims) == 1 for shapes in (instruction.shapes, *operands) for s in shapes)
    return Kernel(
        instruction.name,
        instruction.opcode,
        instruction.op_name,
        instruction.estimated_cycles if matmul else 0,
        flops,
        hbm_bytes_of(module, instruction, computation),
        times,
        not dma and not scalar,
        custom,
        tuple(collectives),
    )
