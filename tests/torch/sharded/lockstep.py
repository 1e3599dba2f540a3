"""An operation on carriers, on virtual ranks in lock step: its value and gradient against the plain call."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unidist.algebra import Mesh
from unidist.backends.sim.ranks import VirtualRanks
from unidist.backends.sim.world import VirtualWorld
from unidist.backends.torch.sharded import ShardedTensor, Space, wrap
from unidist.backends.torch.sharded.entrances import put_on
from unidist.backends.torch.sharded.moving import carried
from unidist.backends.torch.sharded.tensor import origin_of
from unidist.propagation.layouts import PARTIAL, WHOLE, Cut, State, States, chunked, conflict

Tensor = torch.Tensor


@dataclass
class Case:
    """A function of tensors.

    Attributes:
        constant: the inputs that torch has no gradient of, by their places.
        want: values and gradients of the plain call.
    """

    name: str
    function: Callable[..., Any]
    inputs: Sequence[Tensor]
    constant: frozenset[int] = frozenset()
    want: tuple[list[Tensor], list[Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.want = self.plain()

    def plain(self) -> tuple[list[Tensor], list[Tensor | None]]:
        given = [leaf(x, k not in self.constant) for k, x in enumerate(self.inputs)]
        outputs = tensors(self.function(*given))
        backward(outputs)
        return [y.detach() for y in outputs], [x.grad for x in given]


def leaf(x: Tensor, differentiable: bool = True) -> Tensor:
    x = x.detach().clone()
    return x.requires_grad_() if differentiable and (x.is_floating_point() or x.is_complex()) else x


def tensors(values: Any) -> list[Any]:
    return [y for y in tree_leaves(values) if isinstance(y, Tensor)]


def backward(outputs: list[Any]) -> None:
    for k, y in enumerate(outputs):
        if y.requires_grad:
            generator = torch.Generator().manual_seed(7 + k)
            y.backward(torch.randn(tuple(y.shape), generator=generator, dtype=y.dtype), retain_graph=True)


def states(x: Tensor, places: int, parts: Callable[[int, int], Sequence[int]] | None = None) -> list[State]:
    """Every state that a tensor can have over an axis."""
    found: list[State] = [WHOLE]
    for dim, n in enumerate(x.shape):
        found.append(chunked(dim, n, places))
        if parts is not None and n:
            found.append(Cut(dim, tuple(parts(n, places))))
    return [*found, *([] if x.dtype == torch.bool else [PARTIAL])]


def uneven(n: int, places: int) -> list[int]:
    """The last place has all but what the second has: sizes of no chunk, with an empty one."""
    sizes = [0] * places
    sizes[-1] = n
    if places > 2 and n > 1:
        sizes[1], sizes[-1] = 1, n - 1
    return sizes


def summands(x: Tensor, places: int, seed: int, at_one_place: bool = False) -> list[Tensor]:
    """Parts that add up to x exactly, in their order, so that no rounding hides a fault.

    `at_one_place`: each number is whole at one of them. Of parts of parts the sums of some would round.
    """
    if places == 1:
        return [x]
    if not (x.is_floating_point() or x.is_complex()):
        return [x - 3, torch.full_like(x, 3), *[torch.zeros_like(x)] * (places - 2)]
    patterns = [(2.0, -1.0), (0.5, 0.5), (0.0, 1.0), (1.0, 0.0)]
    if places > 2:
        patterns = [(4.0, -2.0, -1.0), (0.5, 0.25, 0.25), (2.0, -1.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
    first, generator = len(patterns) - 2 if at_one_place else 0, torch.Generator().manual_seed(seed)
    which = torch.randint(first, len(patterns), x.shape, generator=generator)
    which = torch.where(torch.isfinite(x), which, len(patterns) - 1)
    parts = []
    for place in range(places):
        factors = torch.tensor([p[place] if place < len(p) else 0.0 for p in patterns], dtype=torch.float64)[which]
        parts.append(torch.where(factors == 0, torch.zeros_like(x), (x * factors).to(x.dtype)))
    return parts


def part(x: Tensor, layout: States, space: Space, seed: int) -> Tensor:
    """This rank's share of a tensor in a layout."""
    for axis, state in enumerate(layout):
        if state == PARTIAL:
            x = summands(x, space.sizes[axis], seed + axis, PARTIAL in layout[:axis])[space.places[axis]]
    cut: States = tuple(state if isinstance(state, Cut) else WHOLE for state in layout)
    return carried(space, x, (WHOLE,) * len(cut), cut)


class World:
    """Virtual ranks on a mesh.

    Args:
        invariant: axes of an invariant space. All of them, or the last: each part in the space of the others is then a
            carrier there.
        turns: as of the last space.
    """

    def __init__(self, invariant: int = 0, turns: Any = "no", **axes: int) -> None:
        self._turns = turns
        self.mesh = Mesh(axes)
        self._outer = len(axes) - invariant
        self.backend = VirtualRanks(VirtualWorld(self.mesh.size))
        self.gathers: Counter[str] = Counter()
        self.results: Counter[str] = Counter()

    def run(self, function: Callable[[Space], Any]) -> list[Any]:
        put_on()
        return self.backend.run(lambda rank: function(self._spaces()[0]))

    def _spaces(self) -> list[Space]:
        """The outer one first."""
        lines = tuple((axis,) for axis in self.mesh.axis_names)
        own = [(lines[: self._outer], False), (lines[self._outer :], True)]
        found = [Space.of(self.backend, self.mesh, of, invariant) for of, invariant in own if of]
        found[-1].turns, found[-1].lean = self._turns, self._turns != "no"
        return found

    def fails(self, case: Case, layouts: Sequence[States], tolerance: float = 1e-7) -> str | None:
        """What is wrong with a case, or None."""
        try:
            self.run(lambda _: self._compare(case, layouts, self._spaces(), tolerance))
        except Exception as error:
            said = str(error).strip().replace("\n", " ")
            return f"{case.name} {layouts} on {dict(self.mesh.axes)}: {type(error).__name__}: {said[:300]}"
        return None

    def _compare(self, case: Case, layouts: Sequence[States], spaces: list[Space], tolerance: float) -> None:
        values, gradients = case.want
        given = []
        for k, (x, layout) in enumerate(zip(case.inputs, layouts, strict=True)):
            given.append(self._given(x, layout, spaces, 99 + 10 * k, k not in case.constant))
        outputs = tensors(case.function(*given))
        backward(outputs)
        assert len(outputs) == len(values), f"{len(outputs)} results, {len(values)} plainly"
        for y, value in zip(outputs, values, strict=True):
            assert tuple(y.shape) == tuple(value.shape), f"shape {tuple(y.shape)}, plainly {tuple(value.shape)}"
            assert y.dtype == value.dtype, f"dtype {y.dtype}, plainly {value.dtype}"
            if isinstance(y, ShardedTensor):
                stays = not y.spec.whole or origin_of(y) is not None  # what is written into a view goes back
                assert stays or not y.spec.space.invariant, "a whole that is not plain"
            if spaces[0].rank == 0 and isinstance(y, ShardedTensor):
                self.results["".join(s if isinstance(s, str) else "S" for s in y.spec.states)] += 1
            close(y.detach().whole() if isinstance(y, ShardedTensor) else y, value, tolerance, "value")
        for x, gradient in zip(given, gradients, strict=True):
            found: Any = x.grad
            if gradient is None:
                assert found is None or not whole(found).any(), "a gradient, plainly none"
            else:
                found = torch.zeros_like(gradient) if found is None else whole(found)
                close(found, gradient, tolerance, "gradient")
        if spaces[0].rank == 0:
            for space in spaces:
                self.gathers += space.gathers

    def _given(self, x: Tensor, layout: States, spaces: list[Space], seed: int, differentiable: bool) -> Tensor:
        """This rank's carrier of an input."""
        states = [layout[: self._outer], layout[self._outer :]] if len(spaces) > 1 else [layout]
        parts = [x]
        for of, space in zip(states, spaces, strict=True):
            parts.append(part(parts[-1], of, space, seed))
        out = leaf(parts[-1], differentiable)
        for whole, of, space in reversed(list(zip(parts[:-1], states, spaces, strict=True))):
            if not space.invariant or any(state != WHOLE for state in of):
                out = wrap(out, space.spec(of, tuple(whole.shape)))
        return out


def whole(x: Tensor) -> Tensor:
    return x.whole() if isinstance(x, ShardedTensor) else x


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    if not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance * 1e-1, equal_nan=True):
        raise AssertionError(f"{what} {found.flatten()[:6].tolist()}, plainly {wanted.flatten()[:6].tolist()}")


def every(inputs: Sequence[Tensor], places: int, parts: Any = None) -> Iterable[tuple[States, ...]]:
    """Every combination of layouts over one axis, but all whole."""
    for combination in itertools.product(*(states(x, places, parts) for x in inputs)):
        if any(state != WHOLE for state in combination):
            yield tuple((state,) for state in combination)


def one_at_a_time(inputs: Sequence[Tensor], places: int) -> Iterable[tuple[States, ...]]:
    """Each input in each layout beside whole ones, and all cut by rows."""
    for k, x in enumerate(inputs):
        for state in states(x, places):
            if state != WHOLE or k == 0:
                yield tuple((state if j == k else WHOLE,) for j in range(len(inputs)))
    yield tuple((chunked(0, x.shape[0], places) if x.ndim else WHOLE,) for x in inputs)


def on_two_axes(
    inputs: Sequence[Tensor], sizes: tuple[int, int], count: int, draw: Any
) -> Iterable[tuple[States, ...]]:
    """Some layouts over two axes, which cut no dim together."""
    found: dict[tuple[States, ...], None] = {}
    for _ in range(count * 4):
        layouts = tuple(
            tuple(draw.choice(states(x, n)) for n in sizes) if draw.random() < 0.7 else (WHOLE, WHOLE) for x in inputs
        )
        if not any(conflict(layout) for layout in layouts) and len(found) < count:
            found[layouts] = None
    return found
