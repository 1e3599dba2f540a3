"""Layout maps that a strategy is given, of unidist, of Keras or plain; and Keras's own objects."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras.distribution import DeviceMesh, TensorLayout

from unidist import session
from unidist.algebra import Layout, Mesh, Sharding
from unidist.array import as_layout, as_mesh
from unidist.errors import CapabilityError, LayoutError
from unidist.keras.strategies.options import takes_uneven
from unidist.planner.layout_map import LayoutMap


def mesh_of_map(layout_map: Any) -> Mesh:
    """The mesh of a LayoutMap of unidist or of Keras."""
    mesh = layout_map.mesh if isinstance(layout_map, LayoutMap) else layout_map.device_mesh
    if mesh is None:
        raise LayoutError("the layout map has no mesh: give ModelParallel a mesh, or LayoutMap(device_mesh)")
    return as_mesh(mesh)


def as_layout_map(layout_map: Any, mesh: Mesh) -> LayoutMap:
    """A LayoutMap from one of unidist, of Keras, or a plain mapping of rules."""
    if isinstance(layout_map, LayoutMap):
        return layout_map
    if isinstance(layout_map, keras.distribution.LayoutMap):
        return KerasRules(mesh, {key: as_layout(layout_map[key]) for key in layout_map})
    return LayoutMap(mesh, layout_map)


def layouts_of(rules: LayoutMap) -> Callable[[str, tuple[int, ...]], Layout]:
    """Returns a map's layouts; what only an uneven map allows is refused where Keras's arrays must divide."""
    if takes_uneven() or not rules.uneven:
        return rules.layout_for

    def even(path: str, shape: tuple[int, ...]) -> Layout:
        layout = rules.layout_for(path, shape)
        for dim, axes in enumerate(layout.dims):
            if axes and shape[dim] % rules.mesh.axis_size(axes):
                raise CapabilityError(
                    f"variable {path!r} of shape {shape}: dim {dim} does not divide over {axes}, and Keras on "
                    f"{keras.config.backend()} has no shards of different sizes: uneven=True is for torch. Leave the "
                    "variable out of the layout map, or use a mesh that divides it"
                )
        return layout

    return even


class KerasRules(LayoutMap):
    """A Keras LayoutMap's rules.

    Keras lets rules match nothing: here all of them idle is an error, some a warning. So a script that runs on Keras
    runs unchanged and yet nothing is silently replicated.
    """

    def __init__(self, mesh: Mesh, rules: dict[str, Layout]) -> None:
        super().__init__(mesh, rules, strict=False)

    def check_used(self, paths: Any) -> None:
        # Keras keeps the layouts of layers' outputs in the same map.
        idle = [pattern for pattern in self.unmatched(paths) if not pattern.endswith("output")]
        self.strict = bool(idle) and len(idle) == len(self)
        super().check_used(paths)
        if idle:
            warnings.warn(f"layout rules that match no variable of the model: {idle}", UserWarning, stacklevel=4)


def keras_mesh(mesh: Mesh) -> Any:
    """Keras's DeviceMesh of a Mesh."""
    names = session.backend().list_devices()
    return DeviceMesh(mesh.shape, list(mesh.axis_names), [names[rank] for rank in mesh.devices])


def keras_layout(layout: Layout, shape: tuple[int, ...], mesh: Mesh, device_mesh: Any) -> Any:
    """Returns Keras's TensorLayout of a Layout, or the backend's native layout.

    The latter where a dim has several axes, which TensorLayout cannot say. Keras takes it as well.
    """
    if any(len(axes) > 1 for axes in layout.dims):
        return session.backend().layout(Sharding(mesh, layout, shape))
    dims = [layout.dim_axes(dim) for dim in range(len(shape))]
    return TensorLayout([axes[0] if axes else None for axes in dims], device_mesh)
