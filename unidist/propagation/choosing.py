"""A rule's options for each axis; of all their combinations the one that sends the fewest bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import product
from math import prod
from typing import NamedTuple

from unidist.algebra.step import ring_bytes
from unidist.propagation.layouts import PARTIAL, WHOLE, Cut, Shape, State, States, conflict
from unidist.propagation.moves import cost


class Option(NamedTuple):
    """Names, over one axis, the states wanted of an operation's operands, and the state of all it gives."""

    wants: tuple[State, ...]
    out: State


# A rule looks at one axis: the states of the operands there and their global shapes. It knows no framework.
Rule = Callable[[Sequence[State], Sequence[Shape]], Iterable[Option]]


class Operand(NamedTuple):
    """A tensor that an operation is given: its global shape, layout, and bytes per element.

    Attributes:
        sums: whether its dtype holds parts of a sum; small integers wrap, and what an operation widens would not.
        joins: whether the gradient of a part of it is gathered: it is plain, in a space where plain is invariant.
    """

    shape: Shape
    states: States
    itemsize: int
    sums: bool = True
    joins: bool = False


class Decision(NamedTuple):
    """Holds what was chosen: each operand's wanted layout, that of what comes out, and the bytes sent.

    Attributes:
        gathers: whether a whole is made on an axis because the rule has nothing else.
    """

    wants: tuple[States, ...]
    out: States
    bytes: Fraction
    gathers: bool


def choose(rule: Rule, operands: Sequence[Operand], sizes: tuple[int, ...], in_place: bool = False) -> Decision | None:
    """The cheapest combination of options; of equals the first, so that ranks agree without a word.

    Whatever a rule says, all operands may be made whole: that is the last option of each axis.

    Args:
        rule: of the operation.
        operands: its tensors.
        sizes: of the mesh's axes.
        in_place: the first operand is written to, so it and the result keep its layout. None where no option does.
    """
    shapes = [operand.shape for operand in operands]
    # A rank that has no rows of an outer layout chooses as those that have some.
    operands = [one._replace(shape=tuple(max(1, n) for n in one.shape)) for one in operands]
    best: Decision | None = None
    for combination in product(*(_options(rule, operands, shapes, axis) for axis in range(len(sizes)))):
        wants = tuple(tuple(option.wants[k] for option in combination) for k in range(len(operands)))
        out = tuple(option.out for option in combination)
        if conflict(out) or any(map(conflict, wants)):
            continue
        if in_place and not out == wants[0] == operands[0].states:
            continue
        sent = sum(
            (cost(one.shape, one.itemsize, one.states, want, sizes) for one, want in zip(operands, wants, strict=True)),
            Fraction(0),
        )
        sent += _joined(operands, wants, out, sizes)
        if best is None or sent < best.bytes:
            gathers = any(_gathers(option, operands, axis) for axis, option in enumerate(combination))
            best = Decision(wants, out, sent, gathers)
    return best


def _joined(operands: Sequence[Operand], wants: Sequence[States], out: States, sizes: tuple[int, ...]) -> Fraction:
    """Returns the bytes that are sent later for parts of plain operands.

    They are for their gradients, and for the sum where a kernel is cut along a dim that goes.
    """
    total = Fraction(0)
    for one, states in zip(operands, wants, strict=True):
        for axis, state in enumerate(states):
            if one.joins and isinstance(state, Cut):
                total += ring_bytes("all_gather", sizes[axis], prod(one.shape) * one.itemsize)
                if out[axis] == PARTIAL:
                    most = max(prod(other.shape) * other.itemsize for other in operands)
                    total += ring_bytes("all_reduce", sizes[axis], most)
    return total


def _options(rule: Rule, operands: Sequence[Operand], shapes: list[Shape], axis: int) -> list[Option]:
    states = [operand.states[axis] for operand in operands]
    whole = Option((WHOLE,) * len(operands), WHOLE)
    if all(state == WHOLE for state in states):
        return [whole]
    given = dict.fromkeys(rule(states, shapes))
    return [*(option for option in given if _holds(option, operands)), whole]


def _holds(option: Option, operands: Sequence[Operand]) -> bool:
    return all(one.sums or want != PARTIAL for one, want in zip(operands, option.wants, strict=True))


def _gathers(option: Option, operands: Sequence[Operand], axis: int) -> bool:
    """Returns whether everything is made whole over the axis, along which something was cut."""
    cut = any(isinstance(one.states[axis], Cut) for one in operands)
    return cut and option.out == WHOLE and all(want == WHOLE for want in option.wants)
