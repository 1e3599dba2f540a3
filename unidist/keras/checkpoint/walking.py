"""Walks through a fit's data: counts what was drawn, and draws it again where a training goes on.

Keras's EpochIterator makes an iterator over the data for each epoch (for several epochs where these are given their
length). Its order hangs on the random state of the process, or on generators that the data holds. So a course is gone
again: from the random state at its beginning, batch after batch, until the place where the training stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from unidist.keras import seeds
from unidist.keras.checkpoint import position, sources
from unidist.keras.checkpoint.position import Attributes, Course, Position


def random_state() -> str:
    return seeds.state().decode()


def set_random_state(state: str) -> None:
    seeds.restore(state.encode())


class Walk:
    """The walk of one fit.

    Args:
        iterator: Keras's EpochIterator of the training data, which goes on through this.
        stepped: is called at the end of each step of the training.
        arrived: is called where the training goes on inside an epoch, before its step.

    Attributes:
        in_training: whether the steps are the training's, and not those of building the model.
        step: of the epoch: how many batches were trained on.
        trained: how many batches were trained on, in this process.
        is_last: whether the epoch is known to end with the step that was made.
    """

    def __init__(self, iterator: Any, stepped: Callable[[], None], arrived: Callable[[], None]) -> None:
        self._iterator = iterator
        self._stepped = stepped
        self._arrived = arrived
        self._make_steps = iterator._enumerate_iterator
        self._make_pass = iterator._get_iterator
        # Instead of the class's: this iterator alone is followed.
        vars(iterator).update(_enumerate_iterator=self._steps, _get_iterator=self._pass)
        self._sources = sources.sources_of(iterator.data_adapter)
        self._at_first: Attributes = {}
        self._is_early = False
        self._stacked = 1
        sources.follow_stacks(iterator.data_adapter, self._note_stacked)
        self._opening: tuple[str, Attributes] | None = None
        self._course: Course | None = None
        self._passes: list[int] = []
        self._wanted: Position | None = None
        self._ahead: _Ahead | None = None
        self.in_training = False
        self.step = 0
        self.trained = 0
        self.is_last = False

    # where it stands --------------------------------------------------------------------------------------------------

    def begin(self, wanted: Position | None) -> None:
        """From here on the steps are the training's. They go on from a position, if there is one."""
        self.in_training, self._wanted = True, wanted
        self._at_first = position.attributes(self._sources)

    def source(self) -> Attributes:
        """The data's own attributes that have changed."""
        return position.changed(position.attributes(self._sources), self._at_first)

    def course(self) -> Course | None:
        """The iterator that is under way. Between epochs there is one where it serves several."""
        spans = self._iterator.steps_per_epoch is not None and self._iterator._current_iterator is not None
        return self._course if self.step or spans else None

    @property
    def batches(self) -> int | None:
        found: int | None = self._iterator._num_batches
        return found

    @property
    def passes(self) -> list[int]:
        return self._passes.copy() if sources.tf_dataset_of(self._iterator.data_adapter) is not None else []

    def ends_here(self) -> bool:
        """Returns whether the epoch ends with the step that was made.

        Looks for another batch where the length is not known. Not so on TensorFlow, whose steps draw their batches by
        themselves.
        """
        if self.is_last or self._ahead is None:
            return self.is_last
        return not self._ahead.has_more()

    # in place of EpochIterator's --------------------------------------------------------------------------------------

    def _pass(self) -> Any:
        """In place of `_get_iterator`."""
        self._passes.append(0)
        if self.in_training:
            opening, self._opening = self._opening, None
            self._course = Course(*(opening or self._snapshot()))
            # One that is made when an epoch ends is drawn from later, from another random state.
            self._is_early = opening is None
        return self._make_pass()

    def _note_stacked(self, count: int) -> None:
        """So many batches are drawn at once, as one stack."""
        self._stacked = count

    def _snapshot(self) -> tuple[str, Attributes]:
        return random_state(), self.source()

    def _steps(self) -> Iterator[Any]:
        """In place of `_enumerate_iterator`."""
        self.step = 0
        size = self._iterator.steps_per_execution
        steps = self._gone_on() if self._wanted is not None else self._begun()
        for begin, end, batches in steps:
            # Who is made from here on is made when an epoch ends.
            self._opening = None
            if self._is_early and self._course is not None and not self._course.taken:
                self._course.first, self._course.first_source = self._snapshot()
            self._passes[-1] += size
            yield begin, end, batches
            if self.in_training:
                self._count(end, size)
                self._stepped()

    def _count(self, end: int, size: int) -> None:
        if self._course is not None:
            self._course.taken += size
        self.trained += size
        self.step = end + 1
        known = self._iterator.steps_per_epoch or self.batches
        drained = self.batches and self._iterator._steps_seen >= self.batches
        self.is_last = bool(known and self.step >= known) or bool(drained)

    def _begun(self) -> Iterator[Any]:
        """The steps of an epoch from its first on."""
        if self.in_training:
            self._opening = self._snapshot()
        return self._looking_ahead(self._make_steps())

    def _looking_ahead(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Yields the steps, with batches to look at before they are drawn where an epoch's length is unknown."""
        for begin, end, batches in steps:
            unknown = not (self._iterator.steps_per_epoch or self.batches) and not sources.draws_in_steps(batches)
            if not unknown:
                self._ahead = None
            elif self._ahead is None or self._ahead.batches is not batches:
                self._ahead = _Ahead(batches)
            yield begin, end, batches if self._ahead is None else self._ahead

    # going on ---------------------------------------------------------------------------------------------------------

    def _gone_on(self) -> Iterator[Any]:
        wanted, self._wanted = self._wanted, None
        assert wanted is not None
        # Between epochs callbacks have drawn since.
        here = wanted.random if wanted.step else random_state()
        self._open(wanted, here)
        steps = self._looking_ahead(self._make_steps())
        if wanted.course is None:
            return steps
        return self._from(steps, wanted, wanted.course, here)

    def _open(self, wanted: Position, here: str) -> None:
        """All is as it was when the position's iterator was made, or is about to be made."""
        if self._iterator._num_batches is None:
            self._iterator._num_batches = wanted.batches
        self._draw_earlier(wanted)
        course = wanted.course
        position.set_attributes(self._sources, wanted.source if course is None else course.source)
        set_random_state(here if course is None else course.random)
        self._opening = self._snapshot()

    def _draw_earlier(self, wanted: Position) -> None:
        """Makes the iterators over a tf.data.Dataset that were made before the position's.

        Shuffles count them, and some datasets what was drawn of each.
        """
        dataset = sources.tf_dataset_of(self._iterator.data_adapter)
        if dataset is None:
            return
        counted_when_made = all(type(one).__name__ in sources.DRAW_WHEN_MADE for one in sources.inside(dataset))
        for drawn in wanted.passes[len(self._passes) : len(wanted.passes) - (wanted.course is not None)]:
            batches = iter(self._make_pass())
            self._passes.append(drawn)
            # A generator makes TensorFlow's iterator with the first batch.
            lazily = not sources.draws_in_steps(batches)
            for _ in range((min(drawn, 1) if lazily else 0) if counted_when_made else drawn):
                next(batches, None)

    def _from(self, steps: Iterator[Any], wanted: Position, course: Course, here: str) -> Iterator[Any]:
        is_dropping = True
        for begin, end, batches in steps:
            if is_dropping:
                if begin == 0:
                    self._join(batches, wanted, course)
                if begin < wanted.step:
                    self._drop(batches, end + 1 - begin)
                    continue
                is_dropping = False
                self._arrive(wanted, course)
                set_random_state(here)
            yield begin, end, batches

    def _join(self, batches: Any, wanted: Position, course: Course) -> None:
        """Draws what earlier epochs have taken of the same iterator."""
        if course.first is not None:
            set_random_state(course.first)
            position.set_attributes(self._sources, course.first_source)
        earlier = course.taken - wanted.step
        self._drop(batches, earlier)
        self._iterator._steps_seen += earlier

    def _drop(self, batches: Any, count: int) -> None:
        with sources.unread(self._iterator.data_adapter):
            for _ in range(-(-count // self._stacked)):
                sources.skip(batches)
        self._passes[-1] += count

    def _arrive(self, wanted: Position, course: Course) -> None:
        self._course = course
        self._is_early = not course.taken
        self.step = wanted.step
        if sources.reads_in_step(self._iterator.data_adapter):
            position.set_attributes(self._sources, wanted.source)
        if wanted.step:
            self._arrived()


class _Ahead:
    """An iterator whose next batch can be looked at."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self._held: list[Any] = []

    def has_more(self) -> bool:
        if not self._held:
            self._held.extend([batch] if (batch := next(self.batches, self)) is not self else [])
        return bool(self._held)

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        return self._held.pop() if self._held else next(self.batches)
