"""The attributes of Keras on torch, and of torch, that unidist replaces. Made for Keras 3.15 and 3.16."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import torch

from unidist.keras import trainer_entry
from unidist.keras.layer_facts import overrides
from unidist.keras.patching.compat import Callback, CallbackList, TorchLayer, TorchTrainer, tree
from unidist.keras.patching.compat import backend as keras_backend
from unidist.keras.patching.compat import distribution_lib as keras_distribution_lib
from unidist.keras.patching.patches import Hook, Table, by, calling
from unidist.keras.torch import context, data, disable_keras_ddp, distribution_lib, engine, generation, saving
from unidist.keras.torch.params import initializing, placing, state_dicts
from unidist.keras.torch.saving import writing as writing
from unidist.keras.torch.step import (
    clipping,
    derivatives,
    eagerly,
    functions,
    metrics,
    optimizers,
    remat,
    rowless,
    statistics,
    whole_step,
)
from unidist.keras.writers import silence

_MAKERS = (
    ("make_train_function", "train_function", "train"),
    ("make_test_function", "test_function", "test"),
    ("make_predict_function", "predict_function", "predict"),
)


def table() -> Table:
    """Returns the table of hooks.

    Outside of a frame and of a session of a distributed model all is as before; tests/keras checks every place.
    """
    return Table(
        (
            *_of_distribution(),
            # First: others build on what it leaves.
            *disable_keras_ddp.hooks(),
            *placing.hooks(),
            *initializing.hooks(),
            *metrics.hooks(),
            *statistics.hooks(),
            *remat.hooks(),
            *data.hooks(),
            *saving.hooks(),
            *optimizers.hooks(),
            *functions.hooks(),
            *rowless.hooks(),
            *clipping.hooks(),
            *derivatives.hooks(),
            *generation.hooks(),
            *eagerly.hooks(),
            *whole_step.hooks(),
            *_of_trainers(),
            *_of_layers(),
            Hook(keras.Model, "__call__", _watching, "gradients of loops of one's own are averaged"),
        )
    )


def _of_distribution() -> Iterator[Hook]:
    why = "keras.distribution has no torch part: this is it"
    yield Hook(keras_distribution_lib, "distribution_lib", by(distribution_lib), why)
    yield Hook(keras_backend, "distribution_lib", by(distribution_lib), why)


def _of_trainers() -> Iterator[Hook]:
    yield from trainer_entry.hooks(TorchTrainer, _engine_outside_of_frames, _entering)
    for maker, attribute, kind in _MAKERS:
        making = functools.partial(_making_steps, attribute=attribute, kind=kind)
        yield Hook(TorchTrainer, maker, making, "steps run on every rank")


def _engine_outside_of_frames(model: Any) -> engine.Engine | None:
    return None if context.frame() is not None else engine.engine_of(model)


@contextlib.contextmanager
def _entering(found: engine.Engine, given: inspect.BoundArguments, name: str) -> Iterator[Any]:
    model, world = found.model, found.world
    with found.session(_logs_are_read(model, name, given.arguments, found)):
        # Keras builds what is missing from the first batch: until then the optimizer would know some variables only.
        if placing.is_built(model):
            found.prepare()
        if not world.writes:
            # Also where a mesh of one rank makes it its own writer (data.processes): there is one terminal.
            silence(given)
        yield data.processes(world), functools.partial(data.peers, world)


def _logs_are_read(model: Any, entrance: str, given: dict[str, Any], found: engine.Engine) -> bool:
    """Returns whether somebody takes the logs of each step.

    It may be a progress bar, a callback, or a method of the model's own, whose numbers may be no metrics. Every process
    decides alike: by what all were given.
    """
    if entrance not in ("fit", "evaluate"):
        return True
    callbacks = given.get("callbacks")
    if isinstance(callbacks, CallbackList):
        return found.logs_are_read
    hooks = ("on_train_batch_end", "on_test_batch_end", "on_batch_end")
    own = [c for c in tree.flatten(callbacks) if c is not None]
    # Some callbacks are given their hooks as attributes.
    heard = any(h in vars(c) or getattr(type(c), h) is not getattr(Callback, h) for c in own for h in hooks)
    methods = ("train_step", "test_step", "compute_metrics", "get_metrics_result", *(maker for maker, _, _ in _MAKERS))
    custom = any(overrides(model, name) for name in methods)
    return given.get("verbose", "auto") in ("auto", 1, True) or heard or custom


def _making_steps(original: Any, attribute: str, kind: str) -> Any:
    @functools.wraps(original)
    def make(self: Any, force: bool = False) -> Any:
        found = context.engine_at_work.get()
        with contextlib.nullcontext() if found is None else _of_one_step(self):
            original(self, force=force)
        function = getattr(self, attribute)
        if found is not None and not isinstance(function, engine.StepFunction):
            setattr(self, attribute, engine.StepFunction(found, function, kind))

    return make


@contextlib.contextmanager
def _of_one_step(model: Any) -> Iterator[None]:
    """Lets Keras make a function of one step as it is.

    Steps become programs as they go on all ranks (whole_steps.py), and an execution calls the function for each of its
    steps (engine.StepFunction).
    """
    compiled, count = eagerly.is_compiled(model), model.steps_per_execution
    if compiled:
        model.jit_compile = False
    model.steps_per_execution = 1
    try:
        yield
    finally:
        if compiled:
            model.jit_compile = True
        model.steps_per_execution = count


@calling
def _watching(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares a placed model that is called with gradients, outside of Keras's trainer.

    So its gradients are averaged from the first backward on.
    """
    if context.frame() is None and torch.is_grad_enabled():
        engine.prepare_for_loop(self, (args, kwargs))
    return original(self, *args, **kwargs)


def _of_layers() -> Iterator[Hook]:
    why = "torch's parameters are a rank's own"
    yield Hook(TorchLayer, "_track_variables", by(_track_variables), why)
    yield Hook(TorchLayer, "_post_track_variable", by(_post_track_variable), why)
    yield Hook(TorchLayer, "zero_grad", _zeroing, why)
    yield Hook(TorchLayer, "named_parameters", _naming, why)


def _track_variables(self: Any) -> None:
    self._torch_params = state_dicts.PlacedParameters(self.variables)


def _post_track_variable(self: Any, variable: Any) -> None:
    if hasattr(self, "_torch_params") and variable.path not in self.torch_params:
        self.torch_params.add(variable)


@calling
def _naming(original: Any, self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Gives parameters, in a step of the user's own, the values and gradients of the rank at work.

    They are whole where these are cut. In the simulator parameters are its program's, so ranks have values everywhere.
    """
    found, frame = original(self, *args, **kwargs), context.frame()
    variables = [v for v in self.variables if placing.is_placed(v)]
    if not (frame is not None and frame.own_step) and not _are_of_a_program(variables):
        return found  # type: ignore[no-any-return]
    placed = {id(v._storage.parameter()): v for v in variables}
    return ((name, placed[id(one)].value if id(one) in placed else one) for name, one in found)


def _are_of_a_program(variables: list[Any]) -> bool:
    return any(v._storage.world.runs_several for v in variables)


@calling
def _zeroing(original: Any, self: Any, set_to_none: bool = True) -> None:
    frame = context.frame()
    if frame is None:
        original(self, set_to_none)
        # In a loop of the user's own reduced gradients may be elsewhere than where backward has put them.
        for storage in [v._storage for v in self.trainable_variables if placing.is_placed(v)]:
            for rank in storage.states:
                storage.forget_gradients(rank)
        return
    for variable in self.trainable_variables:
        if placing.is_placed(variable):
            if not frame.keeps_gradients:
                variable._storage.forget_gradients(frame.rank)
        elif variable.value.grad is not None:
            variable.value.grad = None
