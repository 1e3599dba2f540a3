"""DistributedVariable: a Keras variable. Each rank holds a shard, a replica or a partial sum of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from keras.distribution import TensorLayout

from unidist.algebra import Sharding
from unidist.keras import allocator
from unidist.keras.lazy_values import Stored
from unidist.keras.patching.compat import (
    AutocastScope,
    StatelessScope,
    backend,
    get_device,
    get_stateless_scope,
    global_state,
    in_stateless_scope,
    to_torch_dtype,
    torch_core,
)
from unidist.keras.patching.compat import torch_convert_to_numpy as convert_to_numpy
from unidist.keras.records import variable_record
from unidist.keras.strategies.layout_maps import keras_mesh
from unidist.keras.torch import carrying, context, outside
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params import compute_dtype, seen, torch_optimizers
from unidist.keras.torch.params.storage import Shardings, Storage
from unidist.keras.torch.world import RankWorld


class PlacedLayout(TensorLayout):  # type: ignore[misc]
    """A placed variable's layout as Keras writes it."""

    def __init__(self, sharding: Sharding) -> None:
        axes = [sharding.layout.dim_axes(dim) for dim in range(len(sharding.shape))]
        super().__init__([(a[0] if len(a) == 1 else a) or None for a in axes])
        self.sharding = sharding

    @property
    def device_mesh(self) -> Any:
        return keras_mesh(self.sharding.mesh)


class DistributedVariable(backend.Variable):  # type: ignore[misc]
    """A placed Keras variable, which looks whole to everybody outside of a rank's frame.

    `shape`, `value`, `numpy()` and `assign` are those of the full value.

    Inside a rank's frame, layers that have a rule and the optimizer see the rank's shard; everybody else sees the
    gathered value, through which gradients flow back to the shards. Variables become this class in place: layers,
    optimizers and users keep their references.
    """

    _storage: Storage

    @property
    def _value(self) -> torch.Tensor:
        frame = context.frame()
        return self._storage.local(frame) if frame is not None else self._outside()

    @_value.setter
    def _value(self, value: torch.Tensor) -> None:
        self._storage.assign(value)

    @property
    def shape(self) -> tuple[int, ...]:
        frame = context.frame()
        if frame is not None and frame.local:
            return tuple(self._storage.own(frame).shape)
        return self._shape  # type: ignore[no-any-return]

    @property
    def value(self) -> torch.Tensor:
        if reads_plainly():
            return self._read(context.frame())
        if in_stateless_scope():
            scoped = get_stateless_scope().get_current_value(self)
            if scoped is not None:
                return self._symbolic(self._maybe_autocast(scoped))
        if context.infers_shapes():
            return self._symbolic(None)
        frame = context.frame()
        return self.computed(frame, self._read(frame))

    def computed(self, frame: Frame | None, value: torch.Tensor) -> torch.Tensor:
        """A value of this variable in the dtype of computation."""
        cast: torch.Tensor = self._maybe_autocast(value)
        if cast is not value and frame is not None:
            self._storage.note_cast(frame, value, cast)
        return cast

    def _read(self, frame: Frame | None) -> torch.Tensor:
        storage = self._storage
        if frame is None:
            storage.world.check()
            if storage.is_seen_by_loops and not _in_layer():
                return seen.Value.of(storage)
            return self._outside()
        override = frame.overrides.get(id(self))
        if override is not None:
            return override
        if frame.by_rules:
            return seen.carried(storage, storage.own(frame).detach())
        if frame.local:
            return storage.own(frame)
        if frame.carried is not None and storage.shardings.stored.layout.partial:
            return carrying.summand(frame, self._local(frame))
        if (frame.own_step or frame.backward_done) and not _in_layer():
            if frame.own_step and storage.shardings.state.layout.dims:
                return seen.Value.of(storage)
            if frame.backward_done:
                return storage.own(frame)
        return self._whole(frame) if storage.is_sharded else self._local(frame)

    def _outside(self) -> torch.Tensor:
        storage = self._storage
        if not storage.world.runs_several:
            return storage.whole(None, differentiable=torch.is_grad_enabled())
        return outside.look(storage) if outside.can_look(storage) else storage.whole(None)

    def local(self, frame: Frame) -> torch.Tensor:
        """Returns what a rank holds of it while it computes, in the dtype of computation."""
        return self.computed(frame, self._local(frame))

    def whole(self, frame: Frame) -> torch.Tensor:
        """All of it, for layers of a rank, in the dtype of computation: a collective where it is cut."""
        return self.computed(frame, self._whole(frame))

    def _local(self, frame: Frame) -> torch.Tensor:
        return self._storage.local(frame, self._read_dtype())

    def _whole(self, frame: Frame) -> torch.Tensor:
        return self._storage.whole(frame, differentiable=True, dtype=self._read_dtype())

    def _read_dtype(self) -> torch.dtype | None:
        """Asked for only where it makes a difference to what is fetched."""
        return compute_dtype.read_now(self) if self._storage.lows else None

    def _symbolic(self, value: torch.Tensor | None) -> torch.Tensor:
        """A stand-in of the whole shape for shape inference, which knows nothing of distribution."""
        if value is not None and (str(get_device()) != "meta" or value.is_meta):
            return value
        empty = torch.empty(self._shape, dtype=to_torch_dtype(self._dtype), device="meta")
        return torch.nn.Parameter(empty, requires_grad=self._trainable and empty.is_floating_point())

    def assign(self, value: Any) -> Any:
        if isinstance(value, Stored) and self._storage.is_cut and context.frame() is None and not in_stateless_scope():
            self._storage.world.check()
            self._check_shape(value.shape, self._shape)
            self._storage.assign_parts(lambda index: self._convert_to_tensor(value.part(index), dtype=self._dtype))
            return value
        frame = context.frame()
        if frame is not None and frame.by_rules and (frame.asking is not None or not in_stateless_scope()):
            value = self._convert_to_tensor(value, dtype=self._dtype)
            if in_stateless_scope():  # of an update that is made once more (matrices.py)
                get_stateless_scope().add_update((self, value))
                return value
            with torch.no_grad():
                self._storage.own(frame).copy_(seen.part_of(value, self._storage))
            return value
        if frame is not None and frame.carried is not None:
            value = carrying.part_of(self, frame, value)
        value = carrying.whole(seen.whole(self._convert_to_tensor(value, dtype=self._dtype)))
        if frame is not None and frame.written:
            frame.note_write(self)
        if in_stateless_scope():
            get_stateless_scope().add_update((self, value))
            return value
        shape = tuple(value.shape)
        if frame is not None and (frame.local or self._storage.is_replica):
            shard = self._storage.own(frame) if frame.local else self._storage.local(frame)
            self._check_shape(shape, tuple(shard.shape))
            with torch.no_grad():
                shard.copy_(value)
        else:
            self._storage.world.check()
            self._check_shape(shape, self._shape)
            self._storage.assign(value)
        if frame is not None and not self._storage.shardings.stored.layout.partial:
            frame.overrides.pop(id(self), None)  # what was gathered for a call is of before
        return value

    def _check_shape(self, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != tuple(wanted):
            raise ValueError(
                "The shape of the target variable and the shape of the target value in `variable.assign(value)` "
                f"must match. variable.shape={wanted}, Received: value.shape={found}. Target variable: {self}"
            )

    @property
    def trainable(self) -> bool:
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        if value and not self.trainable and not self._storage.watchers:
            self._storage.world.check_trainable(self.path)
        self._trainable = bool(value)
        self._storage.world.choices += 1
        self._storage.set_trainable(self._trainable)

    @property
    def constraint(self) -> Any:
        """In an optimizer a constraint sees the whole value and gives this rank's part back."""
        frame, found = context.frame(), self._constraint
        if frame is None or not frame.local or found is None or not self._storage.shardings.state.layout.dims:
            return found
        return lambda variable: self._constrained(frame, found)

    @constraint.setter
    def constraint(self, value: Any) -> None:
        backend.Variable.constraint.fset(self, value)

    def _constrained(self, frame: Frame, constraint: Any) -> torch.Tensor:
        with frame.updating_by_rules():
            return seen.part_of(constraint(self.value), self._storage)

    @property
    def regularizer(self) -> Any:
        """Behind the layers a regularizer fetches what it reads and lets it go again."""
        frame, found = context.frame(), self._regularizer
        if frame is None or found is None or not self._storage.gathered_by(frame.rank):
            return found

        def regularized(value: Any) -> Any:
            with self._storage.in_use(frame):
                return found(value)

        return regularized

    @regularizer.setter
    def regularizer(self, value: Any) -> None:
        backend.Variable.regularizer.fset(self, value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = convert_to_numpy(self.value)
        return value.astype(dtype) if dtype else value

    def __repr__(self) -> str:
        return (
            f"<DistributedVariable path={self.path}, shape={self._shape}, dtype={self._dtype}, "
            f"layout={self._storage.shardings.stored.layout}>"
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
    shardings: Shardings,
    *,
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
    kind: type[Storage] = Storage,
) -> None:
    """Turns a Keras variable into a DistributedVariable, in place. Its whole value is let go.

    Args:
        variable: a torch-backend Keras variable that has its value.
        world: the ranks.
        shardings: how it is laid out; of the variable's shape.
        prepare: makes the value equal on all processes before it is cut.
        kind: where it rests.
    """
    parameter = variable._value
    value = parameter.detach()
    if prepare is not None:
        value = prepare(value)
    held = kind(world, shardings, variable.path)
    if not held.is_kept and value.device.type == "cpu":
        allocator.give_back_large_blocks()
    stored = shardings.stored.layout
    if not stored.dims and not stored.partial and not world.is_virtual:
        with torch.no_grad():
            parameter.copy_(value)
        held.keep(parameter)
    else:
        held.fill(value, trainable=variable._trainable)
        torch_optimizers.note_replaced(parameter, variable.path)
    del variable.__dict__["_value"]
    variable.__class__ = DistributedVariable
    lay(variable, held)


def lay(variable: Any, held: Storage) -> None:
    """Gives a variable its place."""
    variable._storage = held
    variable._layout = PlacedLayout(held.shardings.stored)
    variable_record.of(variable).layouts = held.shardings.layouts


# Keras's scopes of a thread, asked at once: each read of a variable would call three functions. Read in Keras 3.15 and
# 3.16. Where one has another name, callers go the long way.
_NAMES = ("stateless_scope", "torch_device", "autocast_scope")


def reads_plainly() -> bool:
    """Returns whether no scope of values, device or dtype changes what a variable reads as."""
    return _are_known() and _is_bare()


def _is_bare() -> bool:
    state = global_state.GLOBAL_STATE_TRACKER  # another object behind each clear_session
    return all(getattr(state, name, None) is None for name in _NAMES)


@functools.cache
def _are_known() -> bool:
    """Returns whether each scope, entered, is seen."""
    found = []
    for scope in (StatelessScope(), torch_core.device_scope("cpu"), AutocastScope("float16")):
        with scope:
            found.append(_is_bare())
    return not any(found)
