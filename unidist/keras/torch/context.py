"""Frame: what a rank knows while it computes. One for each thread; none outside of a step."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from unidist.keras.compat import AutocastScope

if TYPE_CHECKING:
    from unidist.keras.torch.engine import Engine
    from unidist.keras.torch.rows.regions import Region
    from unidist.keras.torch.tensor_parallel.sequence import SharedWeights
    from unidist.keras.torch.values.seen import Seen
    from unidist.keras.torch.values.units import Fetcher
    from unidist.keras.torch.world import RankWorld


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows of a batch this rank's data shard holds, and how many there are.

    Attributes:
        local: rows of this rank's shard.
        total: rows of the global batch.
        even: whether all shards hold as many.
        least: rows of the shard that holds fewest.
    """

    local: int
    total: int
    even: bool
    least: int

    @property
    def share(self) -> float:
        return self.local / self.total if self.total else 0.0


class Before:
    """What variables held before they were written.

    Attributes:
        values: id of a variable -> its value then.
    """

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}

    def note(self, variable: Any) -> None:
        """To be called once for each variable, before it is written."""
        with AutocastScope(None):
            self.values[id(variable)] = variable.value.detach().clone()


_numbers = itertools.count()


@dataclass
class Frame:
    """A rank at work.

    Attributes:
        rank: its number.
        world: its world.
        rows: the batch of this step; None outside of train, test and predict steps.
        overrides: id of a variable -> what it reads as at the moment.
        inputs: around a program, id of a place -> what its value reads as (programs.py).
        reads: if somebody asks, id of a place -> the dtypes in which these values are read.
        is_tracing: a program is being traced.
        local: variables read as the part that this rank updates (in optimizers).
        updating_whole: variables read whole, from the parts that optimizers write to.
        wholes: id of a storage -> its whole value, while one variable is updated; None: gathered for each read.
        accumulating: this step's gradients stay on their rank until the accumulation is full.
        keeps_gradients: what leaves hold waits to be reduced with this step's gradients.
        backward_done: gradients are there, and Keras's step hands them to the optimizer: read outside of a layer, a
            variable is the part that has the gradient.
        own_step: the step is the user's own: outside of layers a cut variable reads whole, and so does its gradient.
        lent: whole tensors of which such a step has views, and their versions (seen.py).
        exact_loss: the loss of this step has its global denominators.
        gathered_loss: the loss is computed on gathered outputs and needs no global denominators.
        tells_losses: the step is the model's own: losses are those of all rows, not this rank's contributions.
        sees_rows: such a step computes with rows by itself, and is given those of all shards (own_rows.py).
        is_making_gradients: a gradient that began in this step is on its way to the variables.
        has_made_gradients: one has come there.
        step: the region of such a step.
        numbers: what such a step, without that, has given a Mean of its own making; None: nobody compares them.
        tells_numbers: some of these, or of its logs, are of this rank's rows.
        trial: ids of the rules that count as paired while pairs are being proven; None: as proven.
        calls: ids of the layers that hold a pair and are being called.
        wide: layers of low precision compute in float32: what is compared must differ by more than rounding.
        probe: while pairs are being proven, called with a column rule's output or a row rule's input.
        number: no other frame's, to tell what was noted in this one (rules.py).
        shared: under sequence parallelism, the weights that are whole on every rank (sequence.py).
        region: the layer, operation or loss that is computing with the rows of all shards in view (regions.py).
        seed_place: this rank's place among the ranks that must draw different random numbers.
        fetcher: what fetches values that are stored as shards, in a step that needs it (units.py).
        written: what notes each variable before it is written: rematerialized calls that are going on (remat.py), and
            a step that may begin again (own_rows.py).
    """

    rank: int
    world: RankWorld
    rows: Rows | None = None
    overrides: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] | None = None
    reads: dict[int, list[torch.dtype]] | None = None
    is_tracing: bool = False
    local: bool = False
    updating_whole: bool = False
    wholes: dict[int, torch.Tensor] | None = None
    accumulating: bool = False
    keeps_gradients: bool = False
    backward_done: bool = False
    own_step: bool = False
    lent: list[tuple[Seen, torch.Tensor, int]] = field(default_factory=list)
    exact_loss: bool = False
    gathered_loss: bool = False
    tells_losses: bool = False
    sees_rows: bool = False
    is_making_gradients: bool = False
    has_made_gradients: bool = False
    step: Region | None = None
    numbers: list[torch.Tensor] | None = None
    tells_numbers: bool = False
    trial: frozenset[int] | None = None
    calls: tuple[int, ...] = ()
    wide: bool = False
    probe: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    shared: SharedWeights | None = None
    region: Region | None = None
    seed_place: int = 0
    fetcher: Fetcher | None = None
    written: tuple[Before, ...] = ()

    @contextlib.contextmanager
    def _having(self, **attributes: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(before)

    def reading(self, values: dict[int, torch.Tensor]) -> AbstractContextManager[None]:
        """Variables (by id) read as the given tensors."""
        return self._having(overrides={**self.overrides, **values})

    def reading_shards(self) -> AbstractContextManager[None]:
        """Every variable reads as the part that this rank updates and has its shape."""
        return self._having(local=True, updating_whole=False)

    def updating_wholes(self) -> AbstractContextManager[None]:
        """Every variable reads whole and is assigned whole, between an optimizer's steps: collectives."""
        return self._having(local=False, updating_whole=True)

    def updating_one(self) -> AbstractContextManager[None]:
        """As `updating_wholes`, for one variable and its slots: each is gathered once, and what is assigned is written
        into the tensor that was read, as on one device."""
        return self._having(local=False, updating_whole=True, wholes={})

    def widened(self) -> AbstractContextManager[None]:
        """Layers of low precision compute in float32."""
        return self._having(wide=True)

    def trying(self, trial: frozenset[int]) -> AbstractContextManager[None]:
        """The rules with these ids, and no others, count as paired."""
        return self._having(trial=trial)

    def calling(self, layer: Any) -> AbstractContextManager[None]:
        """The layer's call is going on."""
        return self._having(calls=(*self.calls, id(layer)))

    def seeds_at(self, place: int) -> AbstractContextManager[None]:
        """Random numbers are those of a place."""
        return self._having(seed_place=place)

    def looking(self, region: Region | None) -> AbstractContextManager[None]:
        """A region is computing, or none."""
        return self._having(region=region)

    def noting(self, before: Before) -> AbstractContextManager[None]:
        """What variables held before they are written inside is noted."""
        return self._having(written=(*self.written, before))

    def on_wholes(self) -> AbstractContextManager[None]:
        """What is computed is computed alike on all ranks, of the rows of all shards."""
        return self._having(gathered_loss=True, seed_place=0)

    def making_gradients(self) -> AbstractContextManager[None]:
        """A gradient that began in this step is on its way to the variables."""
        return self._having(is_making_gradients=True)

    def note_write(self, variable: Any) -> None:
        """To be called before a variable is written."""
        for before in self.written:
            if id(variable) not in before.values:
                before.note(variable)


# That of the fit, evaluate or predict that is going on.
engine_at_work: ContextVar[Engine | None] = ContextVar("unidist_engine", default=None)
_here = threading.local()
_Frame = TypeVar("_Frame", bound=Frame | None)


def frame() -> Frame | None:
    """This thread's frame, or None where no rank is at work."""
    return getattr(_here, "frame", None)


@contextlib.contextmanager
def entered(new: _Frame) -> Iterator[_Frame]:
    before = frame()
    _here.frame = new
    try:
        yield new
    finally:
        _here.frame = before


def left() -> AbstractContextManager[None]:
    """Inside no rank is at work: what is made is made for all ranks of this process."""
    return entered(None)
