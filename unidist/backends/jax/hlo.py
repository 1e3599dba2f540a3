"""Reads what a compiled program communicates from its HLO text (after partitioning).

    text = jax.jit(f).lower(x).compile().as_text()
    collectives_of(text, device_count=8)

This is the program as compiled: XLA may have merged, split or replaced collectives that the plan predicted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations

from unidist.algebra import Axes, Mesh, ring_bytes
from unidist.backends.jax.hlo_groups import Groups, groups_of, pairs_of
from unidist.events import Event

_OPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class CompiledCollective:
    """One collective instruction of a compiled program. Start and done of an asynchronous one are one.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter, all_to_all, permute or broadcast.
        groups: the places in the device assignment that take part together; for permute its (source, target) pairs.
        full_bytes: bytes of the full tensor as `ring_bytes` counts them: a device's input, for all_gather its output.
        count: how often it runs in one execution of the program.
        is_exact: whether `count` is known: not in a branch, nor in a loop whose trips XLA does not know (counted once).
        purpose: the operation of the traced program that it came from, as JAX names it.
    """

    op: str
    groups: Groups
    full_bytes: int
    count: int
    is_exact: bool
    purpose: str

    @cached_property
    def group_size(self) -> int:
        """Devices in a group. A permute that moves anything is counted as between two."""
        if self.op == "permute":
            return 2 if any(source != target for source, target in self.groups) else 1
        return max(map(len, self.groups), default=1)

    @cached_property
    def bytes(self) -> Fraction:
        """The bytes that a device sends in one execution, by the ring bound.

        For permute they are those of one that sends.
        """
        return self.count * ring_bytes(self.op, self.group_size, self.full_bytes)

    def bytes_of(self, place: int) -> Fraction:
        """Bytes that the device at a place of the assignment sends."""
        if self.op == "permute":
            return self.bytes * sum(source == place != target for source, target in self.groups)
        return self.bytes if any(place in group for group in self.groups) else Fraction(0)


def collectives_of(text: str, device_count: int) -> list[CompiledCollective]:
    """The collectives of a compiled program, in the order of the text, loops multiplied.

    Args:
        text: HLO after partitioning, as `jax.stages.Compiled.as_text()` gives.
        device_count: number of devices of the program.

    Raises:
        ValueError: the text has no entry computation, or replica groups in an unknown form.
    """
    computations, entry = _parsed(text)
    found: list[CompiledCollective] = []

    def visit(name: str, times: int, is_exact: bool) -> None:
        for instruction in computations.get(name, {}).values():
            if instruction.collective is not None:
                found.append(_collective(instruction, computations[name], device_count, times, is_exact))
            for called, more, known in instruction.calls():
                visit(called, times * more, is_exact and known)

    visit(entry, 1, True)
    return found


def events_of(collectives: Sequence[CompiledCollective], mesh: Mesh, rank: int) -> list[Event]:
    """The collectives as the events of one rank, each as often as it runs.

    Args:
        collectives: of a program whose devices are those of the mesh, in its order.
        mesh: gives the names of the axes; a collective over a group that no axes make has none.
        rank: whose view it is.
    """
    place = mesh.devices.index(rank)
    out = []
    for collective in collectives:
        axes, ranks = _members(collective, mesh, place)
        if ranks:
            sent = collective.bytes_of(place) / collective.count
            out += [Event(collective.op, axes, ranks, sent, collective.purpose)] * collective.count
    return out


def _members(collective: CompiledCollective, mesh: Mesh, place: int) -> tuple[Axes, tuple[int, ...]]:
    ranks = tuple(tuple(mesh.devices[p] for p in group) for group in collective.groups)
    for size in range(len(mesh.axes) + 1):
        for axes in combinations(mesh.axis_names, size):
            along = mesh.groups(axes)
            if collective.op == "permute":
                if all(any(set(pair) <= set(group) for group in along) for pair in ranks):
                    return axes, mesh.group(axes, mesh.devices[place]).ranks
            elif {frozenset(group) for group in ranks} == {frozenset(group) for group in along}:
                break
        else:
            continue
        return axes, next(group for group in ranks if mesh.devices[place] in group)
    return (), next((group for group in ranks if mesh.devices[place] in group), ())


# Reading the text


@dataclass(frozen=True)
class _Instruction:
    type: str
    op: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def collective(self) -> str | None:
        return _OPS.get(self.op.removesuffix("-start"))

    def calls(self) -> Iterator[tuple[str, int, bool]]:
        """(computation, how often, whether that is known) of each computation that the instruction runs."""
        if self.op == "while":
            trips = re.search(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)', self.attributes)
            count = int(trips[1]) if trips else 1
            for role, times in (("body", count), ("condition", count + 1 if trips else 1)):
                for name in re.findall(rf"\b{role}=%?([\w.\-]+)", self.attributes):
                    yield name, times, trips is not None
        elif self.op == "conditional":
            for name in self._named("true_computation", "false_computation", "branch_computations"):
                yield name, 1, False
        elif self.collective is None and self.op not in ("async-update", "async-done"):
            for name in self._named("calls", "to_apply", "called_computations"):
                yield name, 1, True

    def _named(self, *roles: str) -> Iterator[str]:
        for role in roles:
            for many, one in re.findall(rf"\b{role}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes):
                yield from re.findall(r"[\w.\-]+", many or one)


_Computation = dict[str, _Instruction]


def _parsed(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = None, None
    for line in text.splitlines():
        if line[:1] not in (" ", "\t") and line.rstrip().endswith("{") and not line.startswith("HloModule"):
            head = re.match(r"(ENTRY\s+)?%?([\w.\-]+)", line)
            if head is not None:
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
        elif current is not None and (start := re.match(r"\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*", line)) is not None:
            current[start[1]] = _instruction(line[start.end() :])
    if entry is None:
        raise ValueError("the text is no HLO module with an ENTRY computation: give compiled.as_text()")
    return computations, entry


def _instruction(text: str) -> _Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    type_, rest = text[:end], text[end:].lstrip()
    opening = rest.find("(")
    closing = _closing(rest, opening)
    names = (part.rsplit(" ", 1)[-1].rsplit("/", 1)[-1].lstrip("%") for part in _split(rest[opening + 1 : closing]))
    return _Instruction(type_, rest[:opening], tuple(name for name in names if name), rest[closing + 1 :])


def _closing(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    return len(text)


def _split(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    yield text[begin:].strip()


def _collective(
    instruction: _Instruction, computation: _Computation, device_count: int, times: int, is_exact: bool
) -> CompiledCollective:
    op = _OPS[instruction.op.removesuffix("-start")]
    permutes = op == "permute"
    attributes = instruction.attributes
    groups = pairs_of(attributes) if permutes else groups_of(attributes, device_count)
    held = sum(_bytes(computation[name].type) for name in instruction.operands if name in computation)
    full = held * max(map(len, groups), default=1) if op == "all_gather" else held
    origin = re.search(r'op_name="([^"]*)"', attributes)
    return CompiledCollective(op, groups, full, times, is_exact, origin[1] if origin else "")


def _bytes(type_: str) -> int:
    """Bytes of an array type, or of all arrays of a tuple type: "f32[8,16]{1,0}", "(bf16[2], s4[3])"."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", type_):
        elements = 1
        for size in re.findall(r"\d+", dims):
            elements *= int(size)
        total += -(-elements * _bits(dtype) // 8)
    return total


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    size = re.search(r"\d+", dtype)
    return int(size[0]) if size else 0
