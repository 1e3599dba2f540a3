"""The rules of other shapes of the same elements, of joins, and of constants like a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from unidist.propagation.choosing import Option
from unidist.propagation.layouts import PARTIAL, WHOLE, Cut, Shape, State


def view(states: Sequence[State], shapes: Sequence[Shape], shape: Shape) -> Iterator[Option]:
    """Keeps a cut dim cut where the elements of each place stay one block.

    The lengths of its parts are whole numbers of what comes behind the new dim, and add up to it. Then the dims before
    both hold as many elements.
    """
    (state,) = states
    if state == PARTIAL:
        yield Option((PARTIAL,), PARTIAL)
    if isinstance(state, Cut):
        to = _kept(state, shapes[0], shape)
        if to is not None:
            yield Option((state,), to)


def _kept(cut: Cut, old: Shape, new: Shape) -> Cut | None:
    inner = prod(old[cut.dim + 1 :])
    for dim in range(len(new)):
        behind = prod(new[dim + 1 :])
        if behind and all(n * inner % behind == 0 for n in cut.sizes):
            sizes = tuple(n * inner // behind for n in cut.sizes)
            if sum(sizes) == new[dim]:
                return Cut(dim, sizes)
    return None


def resolved(shape: Sequence[int], elements: int) -> Shape:
    """A shape with its -1 found."""
    known = prod(n for n in shape if n != -1)
    return tuple(elements // max(known, 1) if n == -1 else int(n) for n in shape)


def joined(states: Sequence[State], shapes: Sequence[Shape], dim: int, new: bool) -> Iterator[Option]:
    """cat along a dim; `new`: stack along a new one."""
    if PARTIAL in states and not any(isinstance(state, Cut) for state in states):
        yield Option((PARTIAL,) * len(states), PARTIAL)
    for state in states:
        if isinstance(state, Cut) and (new or state.dim != dim) and _fits(state, shapes):
            yield Option((state,) * len(states), Cut(state.dim + (new and state.dim >= dim), state.sizes))


def _fits(cut: Cut, shapes: Sequence[Shape]) -> bool:
    """cat takes empty vectors beside tensors of any dims: such a list has no rule."""
    return all(len(shape) > cut.dim and shape[cut.dim] == sum(cut.sizes) for shape in shapes)


def like(states: Sequence[State], shapes: Sequence[Shape]) -> Iterator[Option]:
    """The values of the tensor are not read, so a partial one stays as it is and what comes is whole."""
    (state,) = states
    yield Option((state,), state if isinstance(state, Cut) else WHOLE)
