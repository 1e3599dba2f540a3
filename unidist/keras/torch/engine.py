"""Engine: a placed model's rules, reducers and steps; Keras's trainer runs inside its frames."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch

from unidist.backends import ending
from unidist.errors import CapabilityError
from unidist.keras import sessions, stateful, telling
from unidist.keras.compat import (
    TorchModuleWrapper,
    TorchTrainer,
    tree,
    unpack_x_y_sample_weight,
)
from unidist.keras.known import is_of_keras
from unidist.keras.planning.settling import settle
from unidist.keras.strategy import UnidistDistribution
from unidist.keras.torch import changes, context, data
from unidist.keras.torch.context import Frame
from unidist.keras.torch.rows import mixing, own_rows
from unidist.keras.torch.steps import activity, attributes, metrics, overridden, own_losses, programs, statistics
from unidist.keras.torch.steps.perrank import PerRankList, PerRankSet
from unidist.keras.torch.steps.traffic import Traffic
from unidist.keras.torch.tensor_parallel import heads, pairs, rules, sequence
from unidist.keras.torch.tensor_parallel.applying import given_rule
from unidist.keras.torch.tensor_parallel.pairing import Pairing
from unidist.keras.torch.tensor_parallel.verdicts import Verdict
from unidist.keras.torch.values import placing, seen


class Engine:
    """One model under one distribution.

    Raises:
        CapabilityError: the model computes in a way that the strategy does not go with.
    """

    def __init__(self, model: Any, distribution: UnidistDistribution) -> None:
        if distribution.strategy.sequence_parallel:
            sequence.check(model)
        self.model = model
        self.distribution = distribution
        self.world = placing.world_of(distribution)
        self.pairing = Pairing(model)
        self._looked = changes.Looked()
        self._own_layers: list[Any] = []
        self.traffic: Traffic | None = None
        self.mixers: list[mixing.Mixer] = []
        self.own_steps = own_rows.OwnSteps(model, self.world)
        self._prepared: tuple[Any, ...] = ()
        self._ready = False
        self.logs_are_read = True

    @contextlib.contextmanager
    def session(self, logs_are_read: bool = True) -> Iterator[None]:
        """Keras's trainer is at work on this engine's model; `logs_are_read`: somebody takes the logs of each step."""
        token = context.engine_at_work.set(self)
        self._ready = False
        before, self.logs_are_read = self.logs_are_read, logs_are_read
        try:
            with self.distribution.scope(), ending.noting():
                yield
                self.settle()
        finally:
            self.logs_are_read = before
            context.engine_at_work.reset(token)

    def settle(self) -> None:
        """Variables and optimizer states become what one device's would be now: nothing is under way, and gradients
        that wait for an accumulation are in its slots. A collective where there are any."""
        traffic = self.traffic
        if traffic is not None:
            traffic.settle()
            if any(traffic.reducer(rank).is_holding for rank in self.world.ranks):
                self.world.run(traffic.flush)

    # preparing ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Places what is not placed yet, gives rules to layers and watches gradients. Cheap when nothing changed."""
        model = self.model
        changed = self._looked.changed(model._flatten_layers())
        if not changed and self._state() == self._prepared:
            return
        stateful.refuse(model, self.distribution)
        placing.check_meshes(model)
        fresh = not self._prepared
        if fresh and settle(model, self.distribution):
            placing.move_model(model, self.distribution)
        placing.place_model(model, self.distribution)
        if fresh:
            placing.equalize(model.variables, self.world)
            if not programs.is_compiled(model):
                statistics.keep_seeds_on_host(model)
        if changed:
            self._set_rules(changed)
        self._follow_what_was_compiled()
        self.pairing.part_changed()
        metrics.adopt(model.metrics, self._loss_trackers())
        own_losses.adopt(model, self.world)
        self._watch_gradients()
        if programs.is_compiled(model):
            programs.install_programs(model, self.world.backend, by_layer=self._traffic().fetches)
        self._looked.note(model._flatten_layers())
        self._prepared = self._state()

    def _state(self) -> tuple[Any, ...]:
        """What prepare() depends on beside the layers: what the model was compiled with, new variables, another choice
        of trainable ones."""
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        slots = len(optimizer.variables) if optimizer is not None else 0
        weights = model.variables
        compiled = bool(getattr(model, "jit_compile", False))
        return (
            optimizer,
            *(getattr(model, name, None) for name in ("_compile_loss", "_compile_metrics", "_loss_tracker")),
            compiled,
            slots,
            len(weights),
            len(model.metrics_variables),
            tuple(v.trainable for v in weights),
        )

    def _set_rules(self, changed: list[Any]) -> None:
        """Gives rules and regions to layers that are new, or are others by now. What was proven is proven again."""
        model, world = self.model, self.world
        if self._prepared:
            self.pairing.follow_change()
        programs.forget(model)
        for mixer in self.mixers:
            mixer.forget()
        held = {id(rule) for rule in self.rules}
        found = [rule for layer in changed if (rule := self._rule_of(layer)) is not None and id(rule) not in held]
        self.rules.extend(found)
        for layer in changed:
            heads.install_heads(layer, self.rules)
        if self.distribution.strategy.sequence_parallel and not self._prepared:
            sequence.give_whole(model)
        if world.data_axes:
            sees_rows = bool(self.own_steps.seeing)
            self.mixers = [*mixing.install_regions(model, sees_rows=sees_rows), *activity.install_regions(model)]
        self._own_layers = [layer for layer in model._flatten_layers() if not is_of_keras(type(layer))]
        if not self._prepared:
            telling.applied(model, self.distribution)

    def _rule_of(self, layer: Any) -> rules.Rule | None:
        if self.world.is_virtual and not isinstance(vars(layer).get("_losses"), PerRankList):
            if isinstance(layer, TorchModuleWrapper):
                raise CapabilityError(
                    f"layer {layer.name!r} wraps a torch module, and the simulator's ranks would share its "
                    "one copy: use('torch') with real processes instead"
                )
            object.__setattr__(layer, "_losses", PerRankList())
            object.__setattr__(layer, "_loss_ids", PerRankSet())
        rule = given_rule(layer)
        if rule is not None:
            rule.in_parts = self.distribution.strategy.sequence_parallel
        return rule

    def _follow_what_was_compiled(self) -> None:
        overridden.install(self.model)
        if self.world.data_axes:
            mixing.check_losses(self.model)

    def _loss_trackers(self) -> list[Any]:
        model = self.model
        found = [getattr(model, "_loss_tracker", None)]
        if getattr(model, "_compile_loss", None) is not None:
            found += list(model._compile_loss.metrics)
        return [tracker for tracker in found if tracker is not None]

    def _watch_gradients(self) -> None:
        if self.traffic is not None:
            self.settle()
            self.traffic.close()
        in_parts = self.distribution.strategy.sequence_parallel
        self.traffic = Traffic(self.model, self.world, in_parts=in_parts)

    # steps --------------------------------------------------------------------------------------------------------

    def step(self, function: Callable[[Any], Any], batches: Any, *, kind: str) -> Any:
        """Keras's step function on each rank's rows; of kind "train", "test" or "predict" (outputs are joined)."""
        if not self._ready or self._looked.call_other_functions():
            self.prepare()
            self._ready = True
        elif self._looked.have_changed(self._own_layers) and not programs.is_compiled(self.model):
            self.pairing.follow_change()
        shards = data.Shards.of(self.world, batches, auto_shard=self.distribution.strategy.auto_shard_dataset)
        own_step = kind != "predict" and _is_own_step(self.model, kind)
        if own_step and self.pairing.is_due(self.world.ranks):
            # Before all else: such a step may begin again.
            self.world.run(lambda frame: self._prove(frame, shards))

        def on_rank(frame: Frame) -> Any:
            frame.tells_losses = own_step and bool(self.world.data_axes)
            frame.own_step = own_step and kind == "train"
            with self._at_work(frame, shards, kind) as own:
                self.prove_pairs(frame, unpack_x_y_sample_weight(own)[0])
                with frame.looking(own_rows.region_of(frame, self.model, kind)):
                    out = function([own_rows.shown(frame, own)])
                seen.settle()
                return self._joined(frame, out) if kind == "predict" else metrics.logs_of_all(frame, out)

        several = self.world.is_virtual and self.world.mesh.size > 1
        with self._watched.step() if several and own_step else contextlib.nullcontext():
            if own_step and self.world.data_axes:
                return self.own_steps.run(kind, on_rank)
            return self.world.run(on_rank)

    @contextlib.contextmanager
    def _at_work(self, frame: Frame, shards: data.Shards, kind: str) -> Iterator[Any]:
        """A rank in a step; gives its rows of the batch."""
        frame.rows, own = shards.on(frame.rank)
        traffic = self._traffic()
        frame.shared = traffic.shared(frame)
        try:
            with traffic.step(frame, kind):
                yield own
        finally:
            # What it holds leads back to the frame, and would live until Python looks for cycles.
            frame.shared = None

    def _prove(self, frame: Frame, shards: data.Shards) -> None:
        with self._at_work(frame, shards, "test") as own:
            self.prove_pairs(frame, unpack_x_y_sample_weight(own)[0])

    @functools.cached_property
    def _watched(self) -> attributes.Watch:
        return attributes.Watch(self.model, self.world.mesh.size)

    def _traffic(self) -> Traffic:
        if self.traffic is None:
            raise RuntimeError("a step before the model was prepared")
        return self.traffic

    def prove_pairs(self, frame: Frame, x: Any) -> None:
        """Proves the pairs on a few rows of inputs, once for each rank. A collective."""
        if self.pairing.prove(frame, x):
            self._traffic().release(frame)

    @property
    def rules(self) -> list[rules.Rule]:
        return self.pairing.rules

    @property
    def pairs(self) -> list[pairs.Pair] | None:
        return self.pairing.pairs

    @property
    def verdicts(self) -> dict[int, Verdict]:
        return self.pairing.verdicts

    def _joined(self, frame: Frame, outputs: Any) -> Any:
        rows = frame.rows
        if not self.world.data_axes or rows is None:
            return outputs

        def join(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.ndim == 0 or x.shape[0] != rows.local:
                raise ValueError(
                    f"predict cuts the batch over devices and needs outputs with one row for each input row; found "
                    f"shape {tuple(getattr(x, 'shape', ()))} for {rows.local} rows"
                )
            return self.world.gather_rows(x, rows.total)

        return tree.map_structure(join, outputs)


class StepFunction:
    """Keras's step function on each rank's rows."""

    def __init__(self, engine: Engine, function: Callable[[Any], Any], kind: str) -> None:
        self.engine = engine
        self.function = function
        self.kind = kind

    def __call__(self, batches: Any) -> Any:
        return self.engine.step(self.function, batches, kind=self.kind)


def world_of_model(model: Any) -> Any:
    found = sessions.of(model).engine
    return found.world if found is not None else _world_of_variables(model)


def _world_of_variables(model: Any) -> Any:
    return next((v._storage.world for v in model.variables if placing.is_placed(v)), None)


def engine_of(model: Any) -> Engine | None:
    """The engine of a model: the one it has, or one by the distribution that it has or that is active."""
    found: Engine | None = sessions.engine_of(model, Engine)
    return found


def engine_for(model: Any, distribution: UnidistDistribution) -> Engine:
    """The engine of a model under a distribution. Raises LayoutError: it is distributed already, in another way."""
    found: Engine = sessions.engine_for(model, distribution, Engine)
    return found


def prepare_for_loop(model: Any, given: Any) -> None:
    """Watches the gradients of a placed model that nobody has trained or parallelized yet, in real processes; not where
    it becomes a part of a graph."""
    known = sessions.of(model)
    if known.engine is not None or known.is_seen or context.engine_at_work.get() is not None or not model.built:
        return
    if any(isinstance(x, keras.KerasTensor) for x in tree.flatten(given)):
        return
    # Looked through once: a built model's variables stay where they are, or it gets an engine.
    known.is_seen = True
    world = _world_of_variables(model)
    if world is None or world.is_virtual or world.mesh.size == 1:
        return
    found = engine_of(model)
    if found is not None:
        with found.session():
            found.prepare()


def _is_own_step(model: Any, kind: str) -> bool:
    name = f"{kind}_step"
    return name in vars(model) or getattr(type(model), name) is not getattr(TorchTrainer, name)
