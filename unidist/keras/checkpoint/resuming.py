"""`unidist.Checkpoint`: a training that goes on where it stood, inside of an epoch too."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from unidist.errors import ArgumentError, CapabilityError
from unidist.flight.recorder import recorder
from unidist.keras import hooks
from unidist.keras.checkpoint import api as checkpoints
from unidist.keras.checkpoint import position, walking
from unidist.keras.checkpoint.copies import Copies
from unidist.keras.checkpoint.fetching import Source
from unidist.keras.checkpoint.leaving import Leaving
from unidist.keras.checkpoint.position import Attributes, Position
from unidist.keras.checkpoint.turns import Every, turn
from unidist.keras.checkpoint.walking import Walk
from unidist.keras.consistency.processes import ALONE, taking_part
from unidist.keras.fit_observer import Follower
from unidist.keras.patching.compat import Callback, CallbackList, tree


class Checkpoint(Follower):
    """Saves the training, as a callback of `fit`, and goes on with it when the program starts again.

    The next batch is then the one that would have come, also inside of an epoch and where data is shuffled. Weights,
    optimizer, metrics, random numbers and the history go on as if nothing had been. The mesh, the strategy, the number
    of processes and ZeRO's stage may be others than before. A training that has ended does nothing more; with more
    epochs it goes on.

    The program must come to `fit` as it did before: the same model, the same data, the same callbacks. Each fit of a
    program has a directory of its own.

    SIGTERM or SIGUSR1 to any process, by which schedulers say that the time is over, lets all processes save at the
    same step and end with exit code 75. Started again the training goes on there. What is not kept: weights that
    EarlyStopping(restore_best_weights=True) holds, and attributes of callbacks that are neither numbers nor arrays.

    Args:
        directory: where checkpoints are, and are looked for.
        every: "epoch"; a number of batches, as an int; or seconds, as a float or as "30s". The training's end is saved
            in any case. What falls due in an epoch's last batch is saved when the epoch has ended.
        keep: how many checkpoints stay; None: all of them.
        asynchronous: whether training goes on while files are written.
        memory_every: a number of batches, as an int; or seconds, as a float or as "30s": how often each node keeps the
            training in its memory besides, its own part and that of the node before it. `unidist run --max-restarts`
            goes on from there where that is newer than what is on the disk; without it nothing is kept. Takes twice
            the bytes of both parts. None: never.
        resume: whether to go on with what is in the directory. If not, the training starts from the beginning, and
            what it saves comes after what is there.

    Raises:
        ArgumentError: `every` or `memory_every` is none of these.

    Example:
        >>> import keras, numpy as np, tempfile, unidist
        >>> keras.utils.set_random_seed(1)
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x, y = np.ones((8, 2)), np.ones((8, 1))
        >>> checkpoint = unidist.Checkpoint(tempfile.mkdtemp(), every=3)
        >>> history = model.fit(x, y, batch_size=2, epochs=2, callbacks=[checkpoint], verbose=0)
        >>> again = model.fit(x, y, batch_size=2, epochs=3, callbacks=[checkpoint], verbose=0)
        >>> again.epoch, again.history["loss"][:2] == history.history["loss"]
        ([0, 1, 2], True)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: Every = "epoch",
        keep: int | None = 3,
        asynchronous: bool = False,
        resume: bool = True,
        memory_every: int | float | str | None = None,
    ) -> None:
        super().__init__()
        self.directory = os.fspath(directory)
        self.every = every
        self.keep = keep
        self.asynchronous = asynchronous
        self.resume = resume
        self.memory_every = memory_every
        self._turn = turn(every)
        if memory_every == "epoch":
            raise ArgumentError('memory_every="epoch": give a number of batches (100), or seconds (30.0 or "30s")')
        self._turn_of_memory = None if memory_every is None else turn(memory_every)
        self._fit: _Fit | None = None
        hooks.table().turn_on_all_there_are()

    @property
    def steps_before(self) -> int:
        return 0 if self._fit is None else self._fit.steps_before

    def fit_begins(self, model: Any, epochs: int) -> None:
        self._fit = _Fit(self, model, epochs)

    def data_is_ready(self, iterator: Any) -> None:
        self.fit.follow(iterator)

    def training_begins(self, callbacks: Any, others: Callable[[], None]) -> None:
        self.fit.begin(callbacks, others)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._fit is None:
            raise CapabilityError(
                "unidist.Checkpoint follows the fit of Keras's own trainers, and this is none: in a loop of your own "
                "use unidist.save and unidist.restore. Make the callback in a line before that of fit: checkpoint = "
                "unidist.Checkpoint(...); after unidist.shutdown() make it anew"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.fit.epoch = epoch

    def on_train_end(self, logs: Any = None) -> None:
        self.fit.end()

    def epoch_ended(self, epoch: int, callbacks: Any) -> None:
        self.fit.end_epoch(epoch)

    def fit_ended(self) -> None:
        if self._fit is not None:
            # A later fit has an initial epoch of its own.
            self._fit.model._initial_epoch = None
            self._fit.leaving.end()
            if self._fit.copies is not None:
                self._fit.copies.close()
        self._fit = None

    @property
    def fit(self) -> _Fit:
        assert self._fit is not None
        return self._fit


class _Fit:
    """One call of fit: where it began, where it stands, and what is due."""

    def __init__(self, checkpoint: Checkpoint, model: Any, epochs: int) -> None:
        self.model = model
        self._epochs = epochs
        self.epoch = 0
        self._own = checkpoint
        self._turn = checkpoint._turn()
        self.copies: Copies | None = None
        self._turn_of_memory = turn("epoch")()
        self._copy_is_due = False
        self._in_memory: Source | None = None
        number, facts = position.found(checkpoint.directory, checkpoint.resume)
        if checkpoint._turn_of_memory is not None:
            self.copies, self._turn_of_memory = Copies(checkpoint.directory), checkpoint._turn_of_memory()
            if checkpoint.resume:
                self._in_memory = self.copies.find(taking_part.get() or ALONE, number)
            if self._in_memory is not None:
                number, facts = self._in_memory.step, position.position_in(self._in_memory.facts)
        self._resumed = None if facts is None else Position.of_json(facts, checkpoint.directory)
        if self._resumed is None:
            # Numbers of checkpoints grow, so that the latest is the one that was written last.
            self._before, self._made = number, walking.random_state()
        else:
            self._before, self._made = number - self._resumed.total, self._resumed.made
            walking.set_random_state(self._made)
        self._number = number
        self.steps_before = 0 if self._resumed is None else self._resumed.total
        self._walk: Walk | None = None
        self._is_due = self._is_leaving = False
        self.leaving = Leaving()
        self.leaving.begin()

    # beginning --------------------------------------------------------------------------------------------------------

    def follow(self, iterator: Any) -> None:
        if self._walk is None:
            self._walk = Walk(iterator, self._step, self._arrive)
            self._iterator = iterator

    @property
    def walk(self) -> Walk:
        assert self._walk is not None
        return self._walk

    def begin(self, callbacks: Any, others: Callable[[], None]) -> None:
        found = self._resumed
        if found is not None:
            _build(self.model, self._iterator)
            if self._in_memory is not None:
                checkpoints.restore_from(self.model, self._in_memory)
            else:
                with position.named(self._own.directory, self._number):
                    checkpoints.restore(self.model, self._own.directory, step=self._number)
            small = _of_an_epoch(self.model)
            self._small = [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in small]
        others()
        self._history = callbacks._history
        self._counting = _counting(callbacks)
        self._at_first = position.attributes(self._counting)
        self.walk.begin(found)
        if found is None:
            return
        for name, one in self._counting:
            if found.callbacks.get(name) and getattr(one, "monitor_op", self) is None:
                # Keras's callbacks that monitor a metric set this when the first epoch ends, and begin to count anew.
                one._set_monitor_op()
        position.set_attributes(self._counting, found.callbacks)
        # Records count what is executed together as one step.
        recorder.went_on(found.total // self._iterator.steps_per_execution)
        self._history.epoch[:] = found.history["epoch"]
        self._history.history |= {name: position.unpacked(values) for name, values in found.history["logs"].items()}
        self.model._initial_epoch = self._epochs if found.ended else found.epoch
        walking.set_random_state(found.random)

    def _arrive(self) -> None:
        """Callbacks that begin an epoch, and Keras, have set anew what belongs to the epoch under way."""
        for variable, value in self._small:
            variable.assign(value)

    # going on ---------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        steps = self._iterator.steps_per_execution
        self._is_due |= self._turn.has_come(steps)
        self._copy_is_due |= self._turn_of_memory.has_come(steps)
        self._is_leaving = self._is_leaving or self.leaving.after_step()
        if not (self._is_due or self._copy_is_due or self._is_leaving) or self.walk.is_last:
            return
        here = self._position(self.epoch, self.walk.step)
        if not self.walk.ends_here():
            self._copy_if_due(here)
            if self._is_due or self._is_leaving:
                self._save_or_leave(here)

    def end_epoch(self, epoch: int) -> None:
        self._is_leaving = self._is_leaving or self.leaving.after_epoch()
        is_last = epoch + 1 >= self._epochs or self.model.stop_training
        saves = self._own.every == "epoch" or self._is_due or self._is_leaving or is_last
        if saves or self._copy_is_due:
            self.walk.step = 0
            here = self._position(epoch + 1, 0)
            self._copy_if_due(here)
            if saves:
                self._save_or_leave(here, is_last)

    def end(self) -> None:
        """The training has ended, and is saved."""
        if self.leaving.now():
            self.leaving.leave()
        self.leaving.end(deliver=True)

    def _copy_if_due(self, here: Position) -> None:
        if self._copy_is_due and self.copies is not None:
            self.copies.save(self.model, self._before + here.total, {"position": here.as_json()})
            self._copy_is_due = False
            self._turn_of_memory.saved()

    def _save_or_leave(self, here: Position, is_last: bool = False) -> None:
        self._save(here, wait=is_last or self._is_leaving)
        if self._is_leaving:
            self.leaving.leave()

    def _save(self, here: Position, wait: bool = False) -> None:
        checkpoints.save(
            self.model,
            self._own.directory,
            step=self._before + here.total,
            # The end of a training is on the disk when fit returns.
            asynchronous=self._own.asynchronous and not wait,
            keep=self._own.keep,
            facts={"position": here.as_json()},
        )
        self._is_due = False
        self._turn.saved()

    def _position(self, epoch: int, step: int) -> Position:
        walk = self.walk
        return Position(
            epoch=epoch,
            step=step,
            total=self.steps_before + walk.trained,
            ended=bool(self.model.stop_training),
            made=self._made,
            random=walking.random_state(),
            source=walk.source(),
            course=walk.course(),
            batches=walk.batches,
            passes=walk.passes,
            history=self._told(),
            callbacks=self._counted(),
        )

    def _told(self) -> dict[str, Any]:
        logs = {name: position.packed(values) for name, values in self._history.history.items()}
        return {"epoch": position.packed(self._history.epoch), "logs": logs}

    def _counted(self) -> Attributes:
        """Returns what callbacks have changed since training began, before it was interrupted too."""
        now = position.attributes(self._counting)
        found = position.changed(now, self._at_first)
        before = {} if self._resumed is None else self._resumed.callbacks
        return {
            name: {key: value for key, value in now[name].items() if key in own or key in before.get(name, {})}
            for name, own in found.items()
        }


def _build(model: Any, iterator: Any) -> None:
    """Makes all variables that a first step would make: those of metrics are made in it on TensorFlow."""
    dataset = getattr(iterator, "_distributed_dataset", None)
    # An engine may have put its own around Keras's.
    spec = getattr(getattr(dataset, "dataset", dataset), "element_spec", None)
    if spec is not None and all(one.shape.rank is not None for one in tree.flatten(spec)):
        model._symbolic_build(data_batch=spec)


def _of_an_epoch(model: Any) -> list[Any]:
    """Variables that the beginning of an epoch may set: those of metrics, and the learning rate."""
    optimizer = model.optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(optimizer, "_learning_rate", None)
    return [*model.metrics_variables, *([rate] if hasattr(rate, "assign") else [])]


def _counting(callbacks: CallbackList) -> list[tuple[str, Callback]]:
    """Callbacks whose attributes go along: (name, callback)."""
    found: dict[str, Callback] = {}
    for one in callbacks.callbacks:
        if isinstance(one, Follower) or one in (callbacks._history, callbacks._progbar):
            continue
        name = type(one).__name__
        found[f"{name} {sum(known.split()[0] == name for known in found)}"] = one
    return list(found.items())
