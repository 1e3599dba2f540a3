"""Lets optimizers work on the part that each rank keeps states of; what needs wholes gets them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from keras import optimizers

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.backends.torch.sharded import ShardedTensor
from unidist.keras.needs import of_scaled_losses
from unidist.keras.patching.compat import (
    BaseOptimizer,
    Ftrl,
    LossScaleOptimizer,
    TorchParallelOptimizer,
    in_stateless_scope,
)
from unidist.keras.patching.patches import Hook, calling, no_model
from unidist.keras.torch import carrying, context, features
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params import host_memory, placing, seen, sharded_norms
from unidist.keras.torch.step import fused, matrices

# Keras updates all variables in one go, with temporary copies of all of them: as many of these bytes at once are
# enough to be fast. Nadam's update counts its own calls, so it is not among these.
UPDATE_BYTES = 32 << 20
_UPDATED_IN_TURNS = (
    optimizers.SGD,
    optimizers.Adam,
    optimizers.Adagrad,
    optimizers.Adadelta,
    optimizers.Adamax,
    optimizers.Lion,
    optimizers.RMSprop,
)
# What orthogonalizes matrices, where Keras has it.
_MUON: Any = getattr(optimizers, "Muon", ())


def hooks() -> tuple[Hook, ...]:
    """Returns the hooks by which optimizers, in a frame, see the parts that this rank updates.

    Norms are those of whole variables, and all ranks skip a step alike.
    """
    parts, averages = "a rank updates its parts", "averages that rest in host memory come in turns"
    return (
        Hook(BaseOptimizer, "apply", calling(_apply), parts),
        Hook(BaseOptimizer, "_backend_apply_gradients", calling(_backend_apply_gradients), parts),
        Hook(BaseOptimizer, "_clip_gradients", calling(_clip_gradients), "norms of whole variables"),
        Hook(BaseOptimizer, "_backend_update_step", calling(_backend_update_step), parts),
        Hook(TorchParallelOptimizer, "_backend_update_step", calling(_update_in_turns), parts),
        Hook(BaseOptimizer, "_update_model_variables_moving_average", calling(_in_turns), averages),
        Hook(BaseOptimizer, "_overwrite_model_variables_with_average_value", calling(_in_turns), averages),
        Hook(
            "keras.optimizers:Muon",
            "zeropower_via_newtonschulz5",
            calling(_orthogonalized),
            "a matrix in parts is gathered once",
            needed=no_model,
        ),
        Hook(
            LossScaleOptimizer,
            "check_finite",
            calling(_check_finite),
            "all ranks skip a step alike",
            needed=of_scaled_losses,
        ),
    )


def _apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    frame = context.frame()
    if frame is None:
        return _apply_outside(original, self, grads, trainable_variables)
    with frame.bringing_home():
        return _applied(original, self, frame, grads, trainable_variables)


def _applied(original: Any, self: Any, frame: Frame, grads: Any, trainable_variables: Any) -> Any:
    _settle(frame, trainable_variables if trainable_variables is not None else self._trainable_variables)
    # What is read behind it is a value, no longer what has a gradient.
    frame.backward_done = False
    if frame.accumulating:
        return _accumulate(original, self, frame)
    if trainable_variables is not None:
        placing.place_optimizer(self, list(trainable_variables))
    targets = _targets(self, trainable_variables)
    _check_watched(frame, targets)
    with frame.reading_shards():
        own = [_own_part(frame, g, v) for g, v in zip(grads, targets, strict=True)] if targets else grads
        result = original(self, own, trainable_variables)
    _join(frame, targets or self._trainable_variables)
    return result


def _check_watched(frame: Frame, variables: list[Any]) -> None:
    """Refuses to update what no model has that trains: its gradient is that of one rank's rows."""
    for variable in variables if frame.is_in_step else ():
        if variable.trainable and not (placing.is_placed(variable) and variable._storage.watchers):
            raise frame.world.of_no_model(variable.path)


def _settle(frame: Frame, variables: Any) -> None:
    """Waits for what the last update sends from where this one writes.

    Most of it has come, since layers have read it.
    """
    for variable in variables:
        unit = variable._storage.units.get(frame.rank) if placing.is_placed(variable) else None
        if unit is not None and unit.is_kept:
            unit.finish()


def _targets(optimizer: Any, trainable_variables: Any) -> list[Any]:
    return list(trainable_variables if trainable_variables is not None else optimizer._trainable_variables)


def _own_part(frame: Frame, grad: Any, variable: Any) -> Any:
    """Cuts a gradient of the whole variable to the part that this rank updates.

    A step of the user's own may make such a gradient.
    """
    if grad is None or not placing.is_placed(variable):
        return carrying.whole(grad)
    storage = variable._storage
    if isinstance(grad, (seen.Value, ShardedTensor)):
        return seen.part_of(grad, storage)
    state = storage.shardings.state
    if grad.shape == storage.own(frame).shape or tuple(grad.shape) != state.shape:
        return grad
    return grad[state.slices(frame.rank)]


def _join(frame: Frame, variables: Any) -> None:
    """Stores what ranks have updated in parts, where more than a part is stored.

    What was fetched before is let go: a step may read it again.
    """
    placed = [v._storage for v in variables if placing.is_placed(v)]
    for unit in {id(u): u for p in placed if not p.is_kept for u in p.gathered_by(frame.rank)}.values():
        unit.is_pinned = False
        unit.free()
    apart = [storage for storage in placed if storage.shardings.state != storage.shardings.stored]
    fetchers = {}
    for storage in apart:
        unit = storage.units.get(frame.rank)
        if unit is not None and unit.is_kept:
            fetchers[id(unit.fetcher)] = unit.fetcher
            continue
        # Stored in parts of several parts: a rule cuts by one data axis, and ZeRO by the others.
        stored = frame.world.backend.redistribute(
            storage.own(frame).detach(), storage.shardings.state, storage.shardings.stored
        )
        storage.shards[frame.rank].data.copy_(stored)
    for fetcher in fetchers.values():
        fetcher.join(apart)


def _accumulate(original: Any, optimizer: Any, frame: Frame) -> None:
    """A step of an accumulation whose gradients wait on their ranks: the accumulators take nothing."""
    variables = optimizer._trainable_variables
    is_constrained = any(v.constraint is not None for v in variables)
    if not optimizer.use_ema and not is_constrained:
        optimizer._iterations.assign_add(1)
        return
    frequency = optimizer.ema_overwrite_frequency if optimizer.use_ema else None
    writes = is_constrained or bool(frequency and (int(optimizer.iterations) + 1) % frequency == 0)
    with frame.reading_shards():
        original(optimizer, [torch.zeros_like(v.value) for v in variables], variables)
    if writes:
        _join(frame, variables)


def _apply_outside(original: Any, self: Any, grads: Any, trainable_variables: Any) -> Any:
    """Applies in a loop of the user's own: the rank at work is this process's.

    The simulator's program is one device's, and so is a step on values that are given, which are whole.
    """
    targets = trainable_variables if trainable_variables is not None else getattr(self, "_trainable_variables", [])
    world = next((v._storage.world for v in targets if placing.is_placed(v)), None)
    if world is None or world.runs_several or in_stateless_scope():
        return original(self, grads, trainable_variables)
    given = grads
    if len(targets) == len(grads):
        pairs = zip(grads, targets, strict=True)
        given = [v._storage.own(None).grad if g is None and placing.is_placed(v) else g for g, v in pairs]
    done = world.run(lambda frame: _apply(original, self, given, trainable_variables))
    for storage in [v._storage for v in targets if placing.is_placed(v)]:
        if storage.shardings.state.layout.dims:
            storage.own(None).grad = None  # a loop that forgets the gradients of parameters() knows nothing of this one
    return done


def _backend_update_step(original: Any, self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> Any:
    """Updates one variable after the other, as Keras does.

    Keras's elementwise optimizers have a faster update for torch. So those that come here, but Ftrl, may look at whole
    variables: they see carriers of the parts, and go by rules.
    """
    frame = context.frame()
    if frame is None or not frame.local:
        return original(self, grads, trainable_variables, learning_rate)
    pairs = list(zip(grads, trainable_variables, strict=True))
    for turn in host_memory.turns(frame, self, pairs):
        if type(self) is Ftrl:
            for grad, variable in turn:
                self.update_step(grad, variable, learning_rate)
            continue
        updates = [functools.partial(_update_by_rules, self, frame, *pair, learning_rate) for pair in turn]
        if isinstance(self, _MUON) and not frame.is_tracing:
            matrices.update(frame, updates, [not self._should_use_adamw(variable) for _, variable in turn])
            continue
        for update in updates:
            update()
    return None


def _update_by_rules(self: Any, frame: Frame, grad: Any, variable: Any, learning_rate: Any) -> None:
    with frame.updating_by_rules():
        whole = seen.carried(variable._storage, grad) if placing.is_placed(variable) else grad
        self.update_step(whole, variable, learning_rate)


def _orthogonalized(original: Any, self: Any, x: Any, steps: int) -> Any:
    """Makes Muon's update of a whole matrix on the rank that owns it; amid a program, on each.

    Its products of parts would send each several times.
    """
    frame = context.frame()
    if frame is not None and frame.asking is not None and matrices.is_in_parts(x):
        return frame.asking.ask(x, lambda whole: original(self, whole, steps))
    return original(self, carrying.whole(x), steps)


def _update_in_turns(original: Any, self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> Any:
    """Updates as elementwise optimizers do: Adam's by a fused kernel, others some variables at a time."""
    frame = context.frame()
    is_one = isinstance(self, _UPDATED_IN_TURNS)
    if frame is not None and (frame.is_tracing or (not is_one and host_memory.rests(self))):
        # Variable by variable, as on other frameworks: a compiler makes a loop of each variable's update.
        return super(TorchParallelOptimizer, self)._backend_update_step(grads, trainable_variables, learning_rate)
    if frame is None or not is_one:
        return original(self, grads, trainable_variables, learning_rate)
    for pairs in host_memory.turns(frame, self, list(zip(grads, trainable_variables, strict=True))):
        left = fused.update(self, frame, pairs, learning_rate) if fused.takes(self) else pairs
        for turn in host_memory.cut_by_bytes(left, UPDATE_BYTES):
            original(self, [g for g, _ in turn], [v for _, v in turn], learning_rate)
    return None


def _in_turns(original: Any, self: Any, trainable_variables: Any) -> Any:
    frame = context.frame()
    if frame is None or not frame.local or not host_memory.rests(self):
        return original(self, trainable_variables)
    return original(self, host_memory.InTurns(frame, self, trainable_variables))


def _check_finite(original: Any, self: Any, grads: Any) -> Any:
    """Returns whether all gradients are finite, on every rank. The simulator's program has whole ones."""
    finite = original(self, [g.local if features.is_cut(g) else g for g in grads])
    placed = [v for v in self._trainable_variables if placing.is_placed(v)]
    axes = tuple(dict.fromkeys(a for v in placed for a in v._storage.shardings.state.layout.sharded_axes))
    world = placed[0]._storage.world if axes else None
    if world is None or (world.is_virtual and context.frame() is None):
        return finite
    partial = Sharding(world.mesh, Layout(partial=dict.fromkeys(axes, "min")), ())
    with events.for_purpose("finite gradients"), torch.no_grad():
        everywhere = world.backend.redistribute(finite.float(), partial, partial.with_layout(Layout()))
    return everywhere > 0


def _backend_apply_gradients(original: Any, self: Any, grads: Any, trainable_variables: Any) -> Any:
    object.__setattr__(self, "_unidist_clipped", list(trainable_variables))
    frame = context.frame()
    if frame is None or frame.local:
        return original(self, grads, trainable_variables)
    # A method of the user's own was given whole gradients (own_apply.py).
    with frame.reading_shards():
        own = [_own_part(frame, g, v) for g, v in zip(grads, trainable_variables, strict=True)]
        return original(self, own, trainable_variables)


def _clip_gradients(original: Any, self: Any, grads: Any) -> Any:
    frame, variables = context.frame(), getattr(self, "_unidist_clipped", [])
    clips = self.clipnorm or self.global_clipnorm or self.clipvalue
    placed = [v._storage for v in variables if placing.is_placed(v)] if clips and frame is not None else []
    if not any(storage.shardings.state.layout.dims for storage in placed):
        return original(self, grads)
    return clipped(self, grads, variables)


def clipped(optimizer: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
    """Gradients clipped by the norms of whole variables: squares are summed over the axes that shard each."""
    if not (optimizer.clipnorm or optimizer.global_clipnorm):
        value = optimizer.clipvalue
        return [g.clamp(-value, value) for g in grads] if value else grads
    squares = sharded_norms.of_wholes([(g.detach() ** 2).sum() for g in grads], [v._storage for v in variables], "sum")
    if optimizer.clipnorm:
        limit = optimizer.clipnorm
        return [g * (limit / torch.clamp(s.sqrt(), min=limit)) for g, s in zip(grads, squares, strict=True)]
    limit = optimizer.global_clipnorm
    factor = limit / torch.clamp(sum(squares[1:], squares[0]).sqrt(), min=limit)
    return [g * factor for g in grads]
