"""DistributedVariable: a Keras variable of which each rank holds a shard (or a replica, or a partial sum)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from keras.distribution import TensorLayout
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.torch.core import convert_to_numpy, get_device, to_torch_dtype

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.keras.explicit import context
from unidist.keras.explicit.context import Frame
from unidist.keras.explicit.world import RankWorld
from unidist.keras.strategy import keras_mesh


class PlacedLayout(TensorLayout):  # type: ignore[misc]
    """A placed variable's layout as Keras tells it. A slot that is made with it finds its sharding there."""

    def __init__(self, sharding: Sharding) -> None:
        axes = [sharding.layout.dim_axes(dim) for dim in range(len(sharding.shape))]
        super().__init__([(a[0] if len(a) == 1 else a) or None for a in axes])
        self.sharding = sharding

    @property
    def device_mesh(self) -> Any:
        return keras_mesh(self.sharding.mesh)


class Place:
    """Where a variable's value is: its sharding, and the shard of each rank of this process."""

    def __init__(self, world: RankWorld, sharding: Sharding, path: str) -> None:
        self.world = world
        self.sharding = sharding
        self.path = path
        self.shards: dict[int, torch.nn.Parameter] = {}

    @property
    def layout(self) -> Layout:
        return self.sharding.layout

    @property
    def is_sharded(self) -> bool:
        return bool(self.layout.dims)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole value."""
        return not self.layout.dims and not self.layout.partial

    def fill(self, value: torch.Tensor, *, trainable: bool) -> None:
        """Makes each rank's shard of a whole value; no shard shares memory with it."""
        for rank in self.world.ranks:
            shard = self._shard_of(value, rank).clone(memory_format=torch.contiguous_format)
            self.shards[rank] = torch.nn.Parameter(shard, requires_grad=trainable and shard.is_floating_point())

    def keep(self, parameter: torch.nn.Parameter) -> None:
        """Takes a parameter as it is: torch modules that share it keep it."""
        self.shards[self.world.ranks[0]] = parameter

    def assign(self, value: torch.Tensor) -> None:
        """Writes a whole value into each rank's shard (of the rank at work alone, in a frame)."""
        frame = context.frame()
        with torch.no_grad():
            for rank in self.world.ranks if frame is None else (frame.rank,):
                self.shards[rank].copy_(self._shard_of(value, rank))

    def _shard_of(self, value: torch.Tensor, rank: int) -> torch.Tensor:
        if self.layout.partial:
            here = self.world.mesh.coordinate(rank)
            if any(here[axis] for axis, op in self.layout.partial if op == "sum"):
                return torch.zeros_like(value)
            return value
        return value[self.sharding.slices(rank)] if self.layout.dims else value

    def local(self, frame: Frame | None) -> torch.nn.Parameter:
        return self.shards[frame.rank if frame is not None else self.world.ranks[0]]

    def whole(self, frame: Frame | None, *, differentiable: bool = False) -> torch.Tensor:
        """The whole value: a collective of the mesh, except where it lies whole on every rank.

        In a frame it is differentiable on demand: model axes give each rank the same gradient (I), data axes
        gradients of their own rows (F).
        """
        if self.is_whole:
            return self.local(frame)
        if frame is None and self.world.is_virtual:
            return torch.as_tensor(self._assembled())
        return self._redistributed(self.local(frame), differentiable)

    def _redistributed(self, shard: torch.Tensor, differentiable: bool) -> torch.Tensor:
        fanned = tuple(a for a in self.layout.sharded_axes if a in self.world.data_axes)
        target = self.sharding.with_layout(Layout(fanout=fanned) if differentiable else Layout())
        frame = context.frame()
        proving = frame is not None and frame.trial is not None
        with events.for_purpose(events.purpose() if proving else self.path):
            if differentiable:
                return self.world.backend.redistribute(shard, self.sharding, target)
            with torch.no_grad():
                return self.world.backend.redistribute(shard.detach(), self.sharding, target)

    def _assembled(self) -> torch.Tensor:
        """The whole value from all virtual ranks' shards, without a step of theirs."""
        first = next(iter(self.shards.values())).detach()
        out = torch.zeros(self.sharding.shape, dtype=first.dtype, device=first.device)
        for rank, shard in self.shards.items():
            here = self.world.mesh.coordinate(rank)
            counted = [axis for axis, op in self.layout.partial if op == "sum"]
            if any(here[a] for a in self.world.mesh.axis_names if self.layout.state(a) != "S" and a not in counted):
                continue
            part = out[self.sharding.slices(rank)]
            part.copy_(part + shard.detach() if counted else shard.detach())
        return out


class DistributedVariable(backend.Variable):  # type: ignore[misc]
    """A placed Keras variable. It looks whole: `shape`, `value`, `numpy()` and `assign` are those of the full value.

    Inside a rank's frame, layers that have a rule and the optimizer see the rank's shard; everybody else sees the
    gathered value, through which gradients flow back to the shards. Variables become this class in place: layers,
    optimizers and users keep their references.
    """

    _place: Place

    @property
    def _value(self) -> torch.nn.Parameter:
        return self._place.local(context.frame())

    @_value.setter
    def _value(self, value: torch.Tensor) -> None:
        self._place.assign(value)

    @property
    def shape(self) -> tuple[int, ...]:
        frame = context.frame()
        if frame is not None and frame.local:
            return tuple(self._place.local(frame).shape)
        return self._shape  # type: ignore[no-any-return]

    @property
    def value(self) -> torch.Tensor:
        if in_stateless_scope():
            scoped = get_stateless_scope().get_current_value(self)
            if scoped is not None:
                return self._symbolic(self._maybe_autocast(scoped))
        if str(get_device()) == "meta":
            return self._symbolic(None)
        return self._maybe_autocast(self._read(context.frame()))  # type: ignore[no-any-return]

    def _read(self, frame: Frame | None) -> torch.Tensor:
        place = self._place
        if frame is None:
            return place.whole(None, differentiable=torch.is_grad_enabled() and not place.world.is_virtual)
        override = frame.overrides.get(id(self))
        if override is not None:
            return override
        if frame.local or not place.is_sharded or (frame.backward_done and not _in_layer()):
            return place.local(frame)
        return place.whole(frame, differentiable=True)

    def _symbolic(self, value: torch.Tensor | None) -> torch.Tensor:
        """A stand-in of the whole shape for shape inference, which knows nothing of distribution."""
        if value is not None and (str(get_device()) != "meta" or value.is_meta):
            return value
        empty = torch.empty(self._shape, dtype=to_torch_dtype(self._dtype), device="meta")
        return torch.nn.Parameter(empty, requires_grad=self._trainable and empty.is_floating_point())

    def assign(self, value: Any) -> torch.Tensor:
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if in_stateless_scope():
            get_stateless_scope().add_update((self, value))
            return value  # type: ignore[no-any-return]
        frame, shape = context.frame(), tuple(value.shape)
        if frame is not None and (frame.local or not self._place.is_sharded):
            shard = self._place.local(frame)
            self._check_shape(shape, tuple(shard.shape))
            with torch.no_grad():
                shard.copy_(value)
        else:
            self._check_shape(shape, self._shape)
            self._place.assign(value)
        return value  # type: ignore[no-any-return]

    def _check_shape(self, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != tuple(wanted):
            raise ValueError(
                "The shape of the target variable and the shape of the target value in `variable.assign(value)` "
                f"must match. variable.shape={wanted}, Received: value.shape={found}. Target variable: {self}"
            )

    def _direct_assign(self, value: torch.Tensor) -> None:
        self._place.assign(value)

    @property
    def trainable(self) -> bool:
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)
        for shard in self._place.shards.values():
            shard.requires_grad = bool(value) and shard.is_floating_point()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = convert_to_numpy(self.value)
        return value.astype(dtype) if dtype else value

    def __repr__(self) -> str:
        return (
            f"<DistributedVariable path={self.path}, shape={self._shape}, dtype={self._dtype}, "
            f"layout={self._place.layout}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = backend.Variable(
            convert_to_numpy(self.value), dtype=self._dtype, trainable=self._trainable, name=self.name
        )
        memo[id(self)] = copied
        return copied


def _in_layer() -> bool:
    return global_state.get_global_attribute("current_call_ctx") is not None


def place(
    variable: Any,
    world: RankWorld,
    sharding: Sharding,
    *,
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Turns a Keras variable into a DistributedVariable, in place. Its whole value is let go.

    Args:
        variable: a torch-backend Keras variable that has its value.
        world: the ranks.
        sharding: how it lies; its shape is the variable's.
        prepare: makes the value equal on all processes before it is cut.
    """
    parameter = variable._value
    value = parameter.detach()
    if prepare is not None:
        value = prepare(value)
    held = Place(world, sharding, variable.path)
    if held.is_whole and not world.is_virtual:
        with torch.no_grad():
            parameter.copy_(value)
        held.keep(parameter)
    else:
        held.fill(value, trainable=variable._trainable)
    variable._layout = PlacedLayout(sharding)
    del variable.__dict__["_value"]
    variable.__class__ = DistributedVariable
    variable._place = held
