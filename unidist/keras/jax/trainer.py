"""The compiled steps and the entrances of Keras's JAX trainer."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from unidist.keras import active_distribution
from unidist.keras.feed.lockstep import as_symbols, to_build
from unidist.keras.jax import data, pacing, placing, processes
from unidist.keras.jax.compiled import Program
from unidist.keras.patching.compat import jax_trainer
from unidist.keras.patching.patches import calling
from unidist.keras.records import model_record

# Keras's steps are recognised by the state they take: fit's has optimizer variables, evaluate's only metrics.
_STEPS = {4: "train step", 3: "test step", 2: "predict step"}


@contextlib.contextmanager
def entering(distribution: Any, given: inspect.BoundArguments, name: str) -> Iterator[Any]:
    """Works inside under the model's distribution, wherever it is called.

    So it does in another thread, outside of the scope and after keras.utils.clear_session() too. A model from elsewhere
    is placed first.
    """
    with processes.lost(name), pacing.kept():
        placing.place_model(given.arguments["self"], distribution)
        several = processes.processes()
        if name == "fit" and several is not None:
            several.align_seeds()
        with active_distribution.active(distribution):
            yield several, processes.peers


@calling
def compiling(original: Any, function: Any, **options: Any) -> Any:
    """The trainer's `jit`: a step cuts padded rows first, and gives its results to every process."""

    @functools.wraps(function)
    def step(*arguments: Any) -> Any:
        distribution = placing.current()
        result = function(*data.cut(arguments))
        if distribution is None or "donate_argnums" not in options:
            return result
        outputs, state = result
        state = _alike(arguments[0], state)
        if not (processes.several() or data.is_padded(arguments)):
            return outputs, state
        outputs = data.replicate(outputs, distribution)
        return (pacing.unhurried(outputs) if processes.several() else outputs), state

    return original(step, **options)


def _alike(given: Any, state: Any) -> Any:
    """A step's state in the lists that it was given: a step of the user's own may return tuples.

    Where layouts are given for what comes out, JAX takes no other containers than theirs.
    """
    leaves = jax.tree.leaves(state)
    is_whole = len(leaves) == len(jax.tree.leaves(given))
    return jax.tree.unflatten(jax.tree.structure(given), leaves) if is_whole else state


@calling
def building(original: Any, self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
    """Wraps Trainer._symbolic_build: it has the rows of all processes.

    Metrics that were made outside of the scope are the model's own from now on.
    """
    distribution = placing.current()

    def rows_of(counts: tuple[int, ...]) -> int:
        return data.row_plan(distribution).total(counts)

    if distribution is not None:
        iterator = None if iterator is None else to_build(iterator, rows_of)
        data_batch = None if data_batch is None else as_symbols(data_batch, rows_of)
    original(self, iterator, data_batch)
    _place_what_is_built(self)


@calling
def building_if_needed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer._maybe_symbolic_build, which asks the iterator's adapter for a batch."""
    original(self, *args, **kwargs)
    _place_what_is_built(self)


def _place_what_is_built(model: Any) -> None:
    distribution = placing.current()
    if distribution is not None and not placing.waits_for_plan(model, distribution):
        placing.place_model(model, distribution)


def making_function(original: Any) -> Any:
    """Wraps JAXTrainer._make_function: each step places its batch, and reports what it communicates."""
    if "out_shardings" in inspect.signature(original).parameters:
        return _making_and_compiling(original)

    @functools.wraps(original)
    def _make_function(self: Any, step_function: Any, concatenate_outputs: bool = False) -> Any:
        _check(self)
        return original(self, _placed(step_function), concatenate_outputs=concatenate_outputs)

    return _make_function


@calling
def _making_and_compiling(
    original: Any, self: Any, step_function: Any, out_shardings: Any = None, concatenate_outputs: bool = False
) -> Any:
    """Wraps JAXTrainer._make_function from Keras 3.16 on, which compiles the step itself.

    Several steps on a stack of batches are one program there. Under a distribution each step is a program, and places
    its own batch.
    """
    _check(self)
    undistributed = original(self, step_function, out_shardings, concatenate_outputs)
    compiled = step_function
    if self.jit_compile and not self.run_eagerly:
        compiled = jax_trainer.jit(step_function, donate_argnums=0, out_shardings=out_shardings)
    one = _placed(compiled)

    def steps(state: Any, iterator: Any) -> Any:
        if placing.current() is None:
            return undistributed(state, iterator)
        outputs: list[Any] = []
        for k in range(self.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if not k:
                    raise
                break
            out, state = one(state, batch)
            outputs = [*outputs, out] if concatenate_outputs else [out]
        if len(outputs) == 1:
            return outputs[0], state
        return jax.tree.map(lambda *parts: jax.numpy.concatenate(parts), *outputs), state

    return steps


def _check(model: Any) -> None:
    distribution = placing.current()
    if distribution is not None:
        model_record.adjust(model, distribution)
        if placing.waits_for_plan(model, distribution):
            placing.place_model(model, distribution)


def _placed(step_function: Callable[..., Any]) -> Callable[..., Any]:
    program = Program(step_function)

    @functools.wraps(step_function)
    def step(state: Any, batch: Any) -> Any:
        distribution = placing.current()
        if distribution is None:
            return step_function(state, batch)
        placed = data.place(batch, distribution)
        name = _STEPS[len(state)]
        pacing.before_step(name)
        with program.made(name):
            program.compare(name, distribution, state, placed)
            program.record(name, distribution, state, placed)
            return pacing.dispatched(name, lambda: run(state, placed, distribution))

    def run(state: Any, placed: Any, distribution: Any) -> Any:
        if program.is_compiled:
            return step_function(state, placed)
        outputs, state = step_function(state, data.cut(placed))
        return data.replicate(outputs, distribution), state

    return step


@calling
def distributing_data(original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The trainer's _distribute_data: leaves the batch to the step, which places it."""
    return original(batch, *args, **kwargs) if placing.current() is None else batch


@calling
def iterating(original: Any, self: Any) -> Any:
    """JAXEpochIterator._get_iterator: the batches as they are read; the step places them."""
    if placing.current() is None:
        return original(self)
    return self.data_adapter.get_jax_iterator()
