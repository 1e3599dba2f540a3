"""Frame: what a rank knows while it computes. One for each thread; none outside of a step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from unidist.keras.patching.compat import AutocastScope, get_device
from unidist.keras.patching.layer_calls import Call, Stage, around

if TYPE_CHECKING:
    from unidist.keras.torch.engine import Engine
    from unidist.keras.torch.layers.sequence import SharedWeights
    from unidist.keras.torch.params.host_memory import HostStorage
    from unidist.keras.torch.params.param_groups import Fetcher
    from unidist.keras.torch.step.matrices import Asking
    from unidist.keras.torch.world import RankWorld


@dataclass(frozen=True, slots=True)
class Rows:
    """Says how many rows of a batch this rank's data shard holds, and how many there are.

    Attributes:
        local: rows of this rank's shard.
        sizes: rows of each shard, in order.
    """

    local: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Rows of the global batch."""
        return sum(self.sizes)

    @property
    def share(self) -> float:
        return self.local / self.total if self.total else 0.0


class Before:
    """Holds what variables held before they were written.

    Attributes:
        values: id of a variable -> its value then.
    """

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}

    def note(self, variable: Any) -> None:
        """To be called once for each variable, before it is written."""
        with AutocastScope(None):
            self.values[id(variable)] = variable.value.detach().clone()


class _Having:
    """A frame with other attributes, inside. No generator: layers and optimizers enter it in each call."""

    __slots__ = ("_attributes", "_before", "_inside")

    def __init__(self, frame: Frame, inside: dict[str, Any]) -> None:
        self._attributes, self._inside = vars(frame), inside

    def __enter__(self) -> None:
        self._before = {name: self._attributes[name] for name in self._inside}
        self._attributes.update(self._inside)

    def __exit__(self, *error: object) -> None:
        self._attributes.update(self._before)


@dataclass
class Frame:
    """A rank at work.

    Attributes:
        rank: its number.
        world: its world.
        rows: this rank's rows, which tensors are; None outside of train, test and predict steps.
        carried: the rows of the batch that tensors carry, which to the code are the whole (carrying.py).
        overrides: id of a variable -> what it reads as at the moment.
        is_tracing: the step is being traced: it becomes a program.
        local: variables read as the part that this rank updates (in optimizers).
        by_rules: variables read as carriers of those parts, and take what goes by rules.
        accumulating: this step's gradients stay on their rank until the accumulation is full.
        keeps_gradients: what leaves hold waits to be reduced with this step's gradients.
        backward_done: gradients are there, and Keras's step hands them to the optimizer: read outside of a layer, a
            variable is the part that has the gradient.
        own_step: the step is the user's own: outside of layers a cut variable reads whole, and so does its gradient.
        exact: layers draw one device's random numbers.
        is_making_gradients: a gradient that began in this step is on its way to the variables.
        shared: under sequence parallelism, the weights that are whole on every rank (sequence.py).
        seed_place: this rank's place among the ranks that must draw different random numbers.
        fetcher: what fetches values that are stored as shards, in a step that needs it (param_groups.py).
        written: what notes each variable before it is written: rematerialized calls that are going on (remat.py).
        away: slots that are on the device now, of those that rest in host memory (host_memory.py).
        asking: what an update that needs a whole matrix asks for it (matrices.py).
    """

    rank: int
    world: RankWorld
    rows: Rows | None = None
    carried: Rows | None = None
    overrides: dict[int, torch.Tensor] = field(default_factory=dict)
    is_tracing: bool = False
    local: bool = False
    by_rules: bool = False
    accumulating: bool = False
    keeps_gradients: bool = False
    backward_done: bool = False
    own_step: bool = False
    exact: bool = False
    is_making_gradients: bool = False
    shared: SharedWeights | None = None
    seed_place: int = 0
    fetcher: Fetcher | None = None
    written: tuple[Before, ...] = ()
    away: list[HostStorage] = field(default_factory=list)
    asking: Asking | None = None

    @property
    def is_in_step(self) -> bool:
        """In a train, test or predict step."""
        return self.rows is not None or self.carried is not None

    def _having(self, **attributes: Any) -> AbstractContextManager[None]:
        return _Having(self, attributes)

    def reading(self, values: dict[int, torch.Tensor]) -> AbstractContextManager[None]:
        """Variables (by id) read as the given tensors."""
        return self._having(overrides={**self.overrides, **values})

    def reading_shards(self) -> AbstractContextManager[None]:
        """Every variable reads as the part that this rank updates and has its shape."""
        return self._having(local=True, by_rules=False)

    def updating_by_rules(self) -> AbstractContextManager[None]:
        """Lets every variable read as a carrier of the part that this rank updates.

        What looks at whole variables sees wholes.
        """
        return self._having(local=False, by_rules=True)

    def asking_for_matrices(self, asking: Asking | None) -> AbstractContextManager[None]:
        """Updates that need whole matrices ask for them."""
        return self._having(asking=asking)

    def stepping(self) -> AbstractContextManager[None]:
        """Variables read as in a step of the user's own."""
        return self._having(own_step=True)

    def carrying_rows(self, rows: Rows) -> AbstractContextManager[None]:
        """Tensors carry which rows this rank holds. Random numbers are one device's."""
        return self._having(rows=None, carried=rows, seed_place=0)

    def having_rows(self, rows: Rows) -> AbstractContextManager[None]:
        """Tensors are this rank's rows, as they are."""
        return self._having(rows=rows, carried=None, seed_place=self.world.data_place(self.rank))

    def seeds_at(self, place: int) -> AbstractContextManager[None]:
        """Random numbers are those of a place."""
        return self._having(seed_place=place)

    def noting(self, before: Before) -> AbstractContextManager[None]:
        """Notes what variables held before they are written inside."""
        return self._having(written=(*self.written, before))

    def making_gradients(self) -> AbstractContextManager[None]:
        """A gradient that began in this step is on its way to the variables."""
        return self._having(is_making_gradients=True)

    def note_write(self, variable: Any) -> None:
        """To be called before a variable is written."""
        for before in self.written:
            if id(variable) not in before.values:
                before.note(variable)

    def put_back(self, slots: Iterable[HostStorage]) -> None:
        """Begins to bring slots home from the device."""
        for slot in slots:
            self.away.remove(slot)
            slot.put_back(self)

    @contextlib.contextmanager
    def bringing_home(self) -> Iterator[None]:
        """Behind it slots are home that came to the device inside."""
        count = len(self.away)
        try:
            yield
        finally:
            came = self.away[count:]
            self.put_back(came)
            for slot in came:
                slot.settle()


# That of the fit, evaluate or predict that is going on.
engine_at_work: ContextVar[Engine | None] = ContextVar("unidist_engine", default=None)


class _Here(threading.local):
    frame: Frame | None = None


_here = _Here()
_Frame = TypeVar("_Frame", bound=Frame | None)


def frame() -> Frame | None:
    """This thread's frame, or None where no rank is at work."""
    return _here.frame


def infers_shapes() -> bool:
    """Returns whether Keras asks for the shapes of wholes.

    A rehearsal, which has no values either, asks for those of parts.
    """
    here = frame()
    return str(get_device()) == "meta" and (here is None or not here.world.rehearses)


@contextlib.contextmanager
def entered(new: _Frame) -> Iterator[_Frame]:
    before = frame()
    _here.frame = new
    try:
        with contextlib.nullcontext() if new is None else new.bringing_home():
            yield new
    finally:
        _here.frame = before


def left() -> AbstractContextManager[None]:
    """Inside no rank is at work: what is made is made for all ranks of this process."""
    return entered(None)


def around_call(layer: Any, stage: Stage, inside: Callable[[Frame, Call, Any, Any], Any]) -> Callable[[], None]:
    """Lets inside(frame, rest, args, kwargs) stand at a stage of the layer's call, in frames alone.

    Returns:
        What takes it off again.
    """

    def link(rest: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Looked up at each call: a program runs what stands inside of it in the frames of later steps.
            here = frame()
            return rest(*args, **kwargs) if here is None else inside(here, rest, args, kwargs)

        return call

    return around(layer, stage, link)
