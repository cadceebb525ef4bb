"""Read the text of a program compiled for TPU, as XLA prints it: computations, instructions, shapes with their layouts
and memory spaces. Only text is read: neither JAX nor libtpu is imported. `costs.py` counts."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

HBM, VMEM = 0, 1  # memory spaces as printed in layouts, S(n); 0 is not printed

_ITEM_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
    "f4e2m1fn": 4,
}  # fmt: skip

_SHAPE = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of a program: element type, dimensions, layout (minor to major), first tile and memory space."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tile: tuple[int, ...]
    space: int

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes it occupies, with the padding of its tile (what the chip moves and what memory statistics count)."""
        dims = [self.dims[i] for i in reversed(self.minor_to_major)] if self.minor_to_major else list(self.dims)
        if dims and self.tile:
            dims = [1] * (len(self.tile) - len(dims)) + dims
            for i, tile in enumerate(reversed(self.tile), 1):
                dims[-i] = -(-dims[-i] // tile) * tile
        bits = _ITEM_BITS.get(self.dtype, 8)  # the unlisted ones are the float8 family
        return math.prod(dims) * bits // 8


@functools.lru_cache(maxsize=None)
def shapes_of(text: str) -> tuple[Shape, ...]:
    """The arrays in a printed type, tuples flattened in order."""
    shapes = []
    for dtype, dims, layout in _SHAPE.findall(text):
        order, _, rest = layout.partition(":")
        tile = re.match(r"T\(([^)]*)\)", rest)
        space = re.search(r"S\((\d+)\)", rest)
        shapes.append(
            Shape(
                dtype,
                tuple(int(d.strip("<= ")) for d in dims.split(",") if d),
                tuple(int(d) for d in order.split(",") if d),
                tuple(1 if d == "*" else int(d) for d in tile[1].split(",")) if tile else (),
                int(space[1]) if space else HBM,
            )
        )
    return tuple(shapes)


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a computation. `rest` is what follows the operands: attributes, metadata, backend_config."""

    name: str
    opcode: str
    type: str
    operands: list[str]
    literal: str  # the text between the parentheses (a constant's value, a parameter's number)
    rest: str
    root: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return shapes_of(self.type)

    def attribute(self, name: str) -> str | None:
        """The computation an attribute such as `calls=` or `body=` names."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    @property
    def target(self) -> str:
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def estimated_cycles(self) -> int:
        found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(found[1]) if found else 0

    @property
    def op_name(self) -> str:
        """Where it comes from in the traced program."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


class Computation:
    """A named list of instructions in the order they run."""

    def __init__(self, name: str):
        self.name = name
        self.instructions: dict[str, Instruction] = {}

    @functools.cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions.values() if i.root), list(self.instructions.values())[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions.values() if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.instructions[instruction.operands[index]]


@dataclasses.dataclass
class Module:
    computations: dict[str, Computation]
    entry: Computation

    def called(self, instruction: Instruction, attribute: str = "calls") -> Computation | None:
        return self.computations.get(instruction.attribute(attribute) or "")


def parse(text: str) -> Module:
    """Parse the text of a compiled HLO module (`compiled.as_text()`).

    Raises ValueError if it holds no entry computation."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = computations[header[2]] = Computation(header[2])
                if header[1]:
                    entry = current
        elif line.startswith("}"):
            current = None
        else:
            match = _INSTRUCTION.match(line)
            if match:
                root, name, type_, opcode, tail = match.groups()
                inside, rest = _split_operands(tail)
                operands = [] if opcode in ("constant", "parameter") else _OPERAND.findall(inside)
                current.instructions[name] = Instruction(name, opcode, type_, operands, inside, rest, bool(root))
    if entry is None:
        raise ValueError("this text has no ENTRY computation: not the text of a compiled HLO module")
    return Module(computations, entry)


def _split_operands(tail: str) -> tuple[str, str]:
    depth = 1
    for match in re.finditer(r"[()]", tail):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return tail[: match.start()], tail[match.end() :]
    return tail, ""
