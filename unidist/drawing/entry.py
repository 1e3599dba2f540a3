"""draw: which picture is made of what."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unidist.algebra import Layout, Mesh, Sharding
from unidist.array import DistributedArray, as_layout, as_mesh
from unidist.backends.protocol import itemsize
from unidist.drawing.arrays import picture_of_array, picture_of_mesh, picture_of_moves, picture_of_several
from unidist.drawing.bars import Memory, label_of, memory_of, picture_of_ledger, picture_of_memory
from unidist.drawing.canvas import Picture
from unidist.drawing.graph import picture_of_layers
from unidist.drawing.layers import of_plan
from unidist.drawing.shards import View
from unidist.drawing.timeline import picture_of_telemetry, read_telemetry
from unidist.errors import DrawingError
from unidist.ledger import Ledger
from unidist.planner.choosing import size_text
from unidist.planner.plan import Plan
from unidist.strategies import VariableLayouts

_WHAT = (
    "an array, a Layout with mesh= and shape=, a Mesh, a Plan or a model, several of them in a list or by their names, "
    "a Ledger, or the directory of a Telemetry"
)


def draw(
    what: Any,
    *,
    to: Any = None,
    mesh: Any = None,
    shape: Sequence[int] | None = None,
    dtype: str | None = None,
    device_memory: float | None = None,
    title: str | None = None,
) -> Picture:
    """A picture, as SVG. Nothing is computed, sent or fetched for it.

    | what is given | what is shown |
    |---|---|
    | a DistributedArray; a Layout with `mesh` and `shape` | its shards, and the ranks that hold them |
    | the same with `to` | before and after, and between them each collective with its bytes |
    | names and arrays, or layouts | the arrays beside each other |
    | a Mesh | ranks at their places |
    | a Plan, or a model | layers: what is cut how, pairs, bytes of a device; of a plan what a step sends too |
    | a list of plans or descriptions, or names and these | the memory of a device, as bars |
    | a Ledger | bytes by collective and axis, and by purpose |
    | the directory of a Telemetry | seconds of the steps, and the part of them spent waiting in collectives |

    Args:
        what: one of these.
        to: the layout that an array is brought to.
        mesh, shape, dtype: of layouts that are no arrays yet. `dtype` is float32 by default.
        device_memory: bytes that a device has, for a line among bars of memory.
        title: the heading. None: it is made of what is drawn.

    Raises:
        DrawingError: it cannot be drawn; the text says what can.
        LayoutError: a layout does not fit its mesh or shape.

    Example:
        >>> import unidist
        >>> mesh = unidist.Mesh({"data": 2, "model": 2})
        >>> picture = unidist.draw(unidist.Layout("data"), to=unidist.Layout(None, "data"), mesh=mesh, shape=(8, 8))
        >>> "all_to_all" in picture.svg
        True
    """
    views = _View(mesh, shape, dtype)
    if views.given and not views.can_be_of(what):
        raise DrawingError(f"mesh=, shape= and dtype= are for layouts, and {_kind(what)} has its own")
    if to is not None and not (views.can_be_of(what) or isinstance(what, DistributedArray | Sharding)):
        raise DrawingError(f"to={to!r} is for arrays and layouts, and {_kind(what)} is none")
    if device_memory is not None and not isinstance(what, list | tuple | Mapping):
        raise DrawingError(
            f"device_memory= is for bars of memory: write draw([...], device_memory=...), not {_kind(what)}"
        )
    found = _of_layouts(what, to, views, title) or _of_others(what, device_memory, title)
    if found is None:
        raise DrawingError(f"draw of {_kind(what)}: give {_WHAT}")
    return found


class _View:
    def __init__(self, mesh: Any, shape: Sequence[int] | None, dtype: str | None) -> None:
        self.given = any(x is not None for x in (mesh, shape, dtype))
        self._mesh = None if mesh is None else as_mesh(mesh)
        self._shape, self._dtype = shape, "float32" if dtype is None else dtype
        try:
            itemsize(self._dtype)
        except TypeError:
            raise DrawingError(f"dtype={dtype!r}: give the name of a dtype, as 'float32'") from None

    def can_be_of(self, what: Any) -> bool:
        members = what.values() if isinstance(what, Mapping) else [what]
        return any(isinstance(one, Layout | VariableLayouts | Sharding) for one in members)

    def of(self, what: Any) -> View | None:
        if isinstance(what, DistributedArray):
            return View(what.sharding, what.dtype)
        if isinstance(what, Sharding):
            return View(what, self._dtype)
        if isinstance(what, Layout):
            if self._mesh is None or self._shape is None:
                raise DrawingError(f"a layout alone is no array: write draw({what}, mesh=..., shape=...)")
            return View(Sharding(self._mesh, what, tuple(self._shape)), self._dtype)
        return None


def _of_layouts(what: Any, to: Any, views: _View, title: str | None) -> Picture | None:
    if isinstance(what, VariableLayouts):
        names = {"storage: where it rests": what.storage, "compute: where a layer needs it": what.compute}
        names["state: where its gradient is reduced to"] = what.state
        return _of_layouts(names, to, views, title)
    if (view := views.of(what)) is not None:
        if to is None:
            return picture_of_array(view, title)
        return picture_of_moves(view, View(view.sharding.with_layout(as_layout(to)), view.dtype), title)
    if isinstance(what, Mapping) and what:
        found = {str(name): views.of(one) for name, one in what.items()}
        if all(found.values()):
            if to is not None:
                raise DrawingError(f"to={to!r}: one array at a time is brought to another layout, found {len(found)}")
            return picture_of_several({name: view for name, view in found.items() if view is not None}, title)
    return None


def _of_others(what: Any, device_memory: float | None, title: str | None) -> Picture | None:
    if isinstance(what, Mesh):
        return picture_of_mesh(what, title)
    if isinstance(what, Plan):
        return picture_of_plan(what, title)
    if isinstance(what, Ledger):
        return picture_of_ledger(what, title)
    if isinstance(what, str | os.PathLike):
        return picture_of_telemetry(read_telemetry(what), title)
    if isinstance(what, Mapping | list | tuple) and what:
        bars = _memories(what)
        if bars is not None:
            return picture_of_memory(bars, _bytes(device_memory), title)
    if hasattr(type(what), "_picture_"):
        return what._picture_(title)  # type: ignore[no-any-return]
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(what, keras.Model):
        described = importlib.import_module("unidist.keras.api.models").describe(what)
        return described._picture_(title or f"{what.name} as it is laid out on the devices")  # type: ignore[no-any-return]
    return None


def picture_of_plan(plan: Plan, title: str | None = None) -> Picture:
    """The graph of a plan."""
    layers, rest = of_plan(plan)
    sizes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.axes)
    zero = f", zero {plan.zero}" if plan.zero else ""
    lines = [
        f"{plan.sharded_fraction:.1%} of its bytes are cut. A step of {plan.batch_in_words}: "
        f"{plan.predicted.count():,} collectives, {size_text(plan.predicted.bytes())} sent by a rank."
    ]
    return picture_of_layers(title or f"{plan.name} on {sizes}{zero}", layers, rest, lines=lines)


def _memories(what: Any) -> list[tuple[str, Memory]] | None:
    named = what.items() if isinstance(what, Mapping) else [(None, one) for one in what]
    out = []
    for k, (name, one) in enumerate(named):
        if isinstance(one, Plan):
            out.append((label_of(one) if name is None else str(name), memory_of(one)))
        elif hasattr(type(one), "bytes_of"):
            parts = (("weights", "weights"), ("gradients", "gradients"), ("optimizer slots", "slots"))
            memory = Memory(tuple((words, int(one.bytes_of(kind))) for words, kind in parts))
            out.append((f"model {k + 1}" if name is None else str(name), memory))
        else:
            return None
    return out


def _bytes(device_memory: Any) -> int | None:
    if device_memory is None:
        return None
    is_number = isinstance(device_memory, int | float | np.integer) and not isinstance(device_memory, bool)
    if not is_number or not 0 < device_memory < float("inf"):
        raise DrawingError(f"device_memory={device_memory!r}: give the bytes that a device has, as 80e9")
    return int(device_memory)


def _kind(what: Any) -> str:
    if isinstance(what, list | tuple | Mapping):
        members = what.values() if isinstance(what, Mapping) else what
        names = list(dict.fromkeys(type(one).__name__ for one in members))
        return f"a {type(what).__name__} of {', '.join(names) or 'nothing'}"
    return type(what).__name__
