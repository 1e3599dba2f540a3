"""Engine: a placed model's rules, reducers and steps; Keras's trainer runs inside its frames."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch

from unidist.backends import ending
from unidist.errors import CapabilityError
from unidist.keras import needs, stateful_layers
from unidist.keras.patching import patches
from unidist.keras.patching.compat import TorchModuleWrapper, tree
from unidist.keras.planning.auto_layouts import settle
from unidist.keras.records import layer_report, model_record
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.torch import borders, carrying, changes, context, cutting
from unidist.keras.torch.context import Frame
from unidist.keras.torch.gathers import Gathers
from unidist.keras.torch.layers import applying, contexts, experts, rules, sequence
from unidist.keras.torch.params import param_groups, placing
from unidist.keras.torch.step import activity, attributes, drawing, eagerly, metrics, own_apply, statistics
from unidist.keras.torch.step.rank_local import PerRankList, PerRankSet
from unidist.keras.torch.step.step_comm import Traffic
from unidist.keras.torch.step.whole_steps import WholeSteps


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
        self._exact = distribution.strategy.exact_random
        self.rules: list[rules.Rule] = []
        self._looked = changes.Looked()
        self._apart: list[Any] = []
        self.traffic: Traffic | None = None
        self._each = distribution.strategy.per_tensor_rows
        self.cutting = cutting.Cutting(self.world, self._each)
        self.borders: list[borders.Inward] = []
        self.gathers = Gathers(model.name)
        self._has_own_code = self.runs_eagerly = False
        self.whole_steps: WholeSteps | None = None
        self._attributes = attributes.PerRank(self.world)
        self._prepared: tuple[Any, ...] = ()
        self._ready = False
        self.logs_are_read = True
        self.names_of_results: tuple[str, ...] = ()

    @contextlib.contextmanager
    def session(self, logs_are_read: bool = True) -> Iterator[None]:
        """Lets Keras's trainer work on this engine's model.

        `logs_are_read`: somebody takes the logs of each step.
        """
        # Whether the model's call can be no program.
        self.runs_eagerly = self.world.is_virtual or eagerly.has_modules(self.model)
        if self.runs_eagerly:
            eagerly.tell(self.model, self.world)
        token = context.engine_at_work.set(self)
        self._ready = False
        try:
            with self.taking_logs(logs_are_read), self.distribution.scope(), ending.noting():
                yield
                self.settle()
        finally:
            context.engine_at_work.reset(token)

    @contextlib.contextmanager
    def taking_logs(self, logs_are_read: bool) -> Iterator[None]:
        """Inside, somebody takes the logs of each step, or nobody does."""
        before, self.logs_are_read = self.logs_are_read, logs_are_read
        try:
            yield
        finally:
            self.logs_are_read = before

    def settle(self) -> None:
        """Makes variables and optimizer states what one device's would be now.

        Nothing is under way then, and gradients that wait for an accumulation are in its slots. A collective where
        there are any.
        """
        traffic = self.traffic
        if traffic is not None:
            traffic.settle()
            if any(traffic.is_holding(rank) for rank in self.world.ranks):
                self.world.run(traffic.flush)

    # preparing ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Places what is not placed yet, gives rules to layers and watches gradients.

        Cheap when nothing changed.
        """
        model = self.model
        changed = self._looked.changed(model._flatten_layers())
        if not changed and not self.is_behind() and self._state() == self._prepared:
            return
        stateful_layers.refuse(model, self.distribution)
        placing.check_meshes(model)
        fresh = not self._prepared
        if fresh:
            with attributes.as_before(needs.parts_of(model)):
                is_settled = settle(model, self.distribution)
            if is_settled:
                placing.move_model(model, self.distribution)
        placing.place_model(model, self.distribution)
        if fresh:
            placing.equalize(model.variables, self.world)
            if not eagerly.is_compiled(model):
                statistics.keep_seeds_on_host(model)
        if changed:
            self._set_rules(changed)
        own_apply.install(model)
        metrics.adopt([*model.metrics, *self._loss_trackers()])
        self._watch_gradients()
        if self.world.cuts_rows:
            self.borders = borders.give(model, self._exact)
        self._has_own_code = needs.own_code(model)
        self._apart = needs.parts_of(model)
        self._looked.note(model._flatten_layers())
        self.whole_steps = None
        if eagerly.is_compiled(model):
            self.whole_steps = WholeSteps(model, self.world, self.distribution.strategy, self._traffic)
        self._prepared = self._state()

    def _build(self, batches: Any) -> None:
        parts = [getattr(self.model, name, None) for name in ("_compile_loss", "_compile_metrics")]
        if any(part is not None and not part.built for part in parts):
            self.model._symbolic_build(iterator=[(0, 1, batches)])

    def _state(self) -> tuple[Any, ...]:
        """Returns what prepare() depends on beside the layers.

        That is what the model was compiled with, new variables, another choice of trainable ones.
        """
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        slots = len(optimizer.variables) if optimizer is not None else 0
        weights = model.variables
        return (
            optimizer,
            *(getattr(model, name, None) for name in ("_compile_loss", "_compile_metrics", "_loss_tracker")),
            eagerly.is_compiled(model),
            slots,
            len(weights),
            len(model.metrics_variables),
            tuple(v.trainable for v in weights),
        )

    def _set_rules(self, changed: list[Any]) -> None:
        model, world = self.model, self.world
        for border in self.borders:
            border.looks = None
        held = {id(rule) for rule in self.rules}
        self.rules += [rule for layer in changed if (rule := self._rule_of(layer)) is not None and id(rule) not in held]
        experts.give(changed, self.distribution.strategy)
        shared = getattr(getattr(self.distribution, "found", None), "shared", {})
        for layer in changed:
            if axes := shared.get(layer.path):
                applying.share(layer, axes)
        if not self._prepared and self.distribution.strategy.context_axes:
            contexts.give(model, self.distribution.strategy)
        elif not self._prepared and world.mesh.size > world.mesh.axis_size(world.data_axes or ()):
            sequence.give_whole(model)
        if world.data_axes:
            activity.show_all_rows(model)
        if not self._prepared:
            layer_report.applied(model, self.distribution)

    def _rule_of(self, layer: Any) -> rules.Rule | None:
        if self.world.is_virtual and not isinstance(vars(layer).get("_losses"), PerRankList):
            if isinstance(layer, TorchModuleWrapper):
                raise CapabilityError(
                    f"layer {layer.name!r} wraps a torch module, and the simulator's ranks would share its "
                    "one copy: use('torch') with real processes instead"
                )
            object.__setattr__(layer, "_losses", PerRankList())
            object.__setattr__(layer, "_loss_ids", PerRankSet())
        rule = applying.given_rule(layer)
        if rule is not None:
            rule.in_parts = self.distribution.strategy.sequence_parallel
        return rule

    def _loss_trackers(self) -> list[Any]:
        model = self.model
        found = [getattr(model, "_loss_tracker", None)]
        if getattr(model, "_compile_loss", None) is not None:
            found += list(model._compile_loss.metrics)
        return [tracker for tracker in found if tracker is not None]

    def is_behind(self) -> bool:
        """Returns whether a variable trains by now whose gradient nobody reduces."""
        return self.traffic is not None and self.traffic.misses_some()

    def _watch_gradients(self) -> None:
        reads = None
        if self.traffic is not None:
            self.settle()
            self.traffic.close()
            reads = self.traffic.reads
        self.traffic = Traffic(self.model, self.world, in_parts=self.distribution.strategy.in_parts, reads=reads)

    # steps --------------------------------------------------------------------------------------------------------

    def step(self, function: Callable[[Any], Any], batches: Any, *, kind: str) -> Any:
        """Calls Keras's step function on each rank's rows.

        `kind` is "train", "test" or "predict"; the outputs of the last are joined.
        """
        if not self._ready or self.is_behind() or self._looked.call_other_functions():
            if self._prepared and kind == "train":
                self._build(batches)
            self.prepare()
            self._ready = True
            if kind == "train":
                stateful_layers.refuse_in_parts(self.model, self.distribution)
        with self._attributes.apart(self._apart):
            out = self._step(function, batches, kind)
        if kind == "train" and context.frame() is None:
            self.traffic = self._traffic().ordered()
        return out

    def _step(self, function: Callable[[Any], Any], batches: Any, kind: str) -> Any:
        auto_shard = self.distribution.strategy.auto_shard_dataset
        shards = cutting.Shards.of(self.world, batches, auto_shard=auto_shard, by=self.cutting)
        own_step = kind != "predict" and own_apply.is_own_step(self.model, f"{kind}_step")

        def stepped(frame: Frame, own: Any) -> Any:
            with self._on_carriers(frame, own) as batch:
                out = function([batch])
                out = out if isinstance(out, metrics.Unread) else param_groups.owned(frame, carrying.plain(out))
            return out if kind == "predict" else carrying.agreed(frame, out)

        def as_it_is(frame: Frame, own: Any) -> Any:
            with self._traffic().step(frame, kind):
                return stepped(frame, own)

        def on_rank(frame: Frame) -> Any:
            frame.own_step, frame.exact = own_step and kind == "train", self._exact
            frame.rows, own = shards.on(frame.rank)
            if self.whole_steps is None or not eagerly.is_compiled(self.model):
                return as_it_is(frame, own)
            return self.whole_steps(frame, kind, own, self.logs_are_read, stepped, as_it_is)

        draws = drawing.alike(self.world, self._exact or self._has_own_code)
        with draws, self.gathers.measured():
            return self.world.run(on_rank)

    @contextlib.contextmanager
    def _on_carriers(self, frame: Frame, own: Any) -> Iterator[Any]:
        """Gives a batch as the whole; what operations gather is counted."""
        if not self.world.cuts_rows:
            begun = carrying.step(frame, own) if frame.rows is None else contextlib.nullcontext()
            with self.gathers.counted(frame), begun:
                yield own
            return
        with self.gathers.counted(frame), carrying.step(frame, own, self._each) as batch:
            yield batch
            carrying.settle_losses(self.model)

    def _traffic(self) -> Traffic:
        if self.traffic is None:
            raise RuntimeError("a step before the model was prepared")
        return self.traffic


class StepFunction:
    """Keras's step function on each rank's rows, for the batches of one execution."""

    def __init__(self, engine: Engine, function: Callable[[Any], Any], kind: str) -> None:
        self.engine = engine
        self.function = function
        self.kind = kind
        # The model may be another by now, as one that a callback has compiled again.
        engine._ready = False

    def __call__(self, batches: Any) -> Any:
        """Returns the outputs of all batches of a prediction, in one; else the logs of the last one."""
        steps = cutting.one_by_one(batches)
        if self.kind == "predict":
            outputs = [self.engine.step(self.function, step, kind=self.kind) for step in steps]
            return outputs[0] if len(outputs) == 1 else tree.map_structure(lambda *parts: torch.cat(parts), *outputs)
        *others, last = steps
        # A program gives logs anyway, and without them it would be another one.
        with self.engine.taking_logs(self.engine.logs_are_read and eagerly.is_compiled(self.engine.model)):
            for step in others:
                self.engine.step(self.function, step, kind=self.kind)
        return self.engine.step(self.function, last, kind=self.kind)


def world_of_model(model: Any) -> Any:
    found = model_record.of(model).engine
    return found.world if found is not None else _world_of_variables(model)


def _world_of_variables(model: Any) -> Any:
    return next((v._storage.world for v in model.variables if placing.is_placed(v)), None)


def engine_of(model: Any) -> Engine | None:
    """The engine of a model: the one it has, or one by the distribution that it has or that is active."""
    return model_record.engine_of(model, Engine)  # type: ignore[no-any-return]


def engine_for(model: Any, distribution: UnidistDistribution) -> Engine:
    """Returns the engine of a model under a distribution.

    Raises LayoutError: it is distributed already, in another way.
    """
    return model_record.engine_for(model, distribution, Engine)  # type: ignore[no-any-return]


def prepare_for_loop(model: Any, given: Any) -> None:
    """Watches gradients of a placed model that nobody has trained yet, or of variables that train since.

    In real processes, and not in a graph.
    """
    known = model_record.of(model)
    found: Engine | None = known.engine
    is_known = known.is_seen if found is None else not found.is_behind()
    if is_known or context.engine_at_work.get() is not None or not model.built:
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
        patches.check(model, in_own_loop=True)
        with found.session():
            found.prepare()
