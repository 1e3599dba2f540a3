"""Meshes and layouts of what a program gives for them: Keras's objects, tuples, None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from unidist.algebra import Layout, Mesh
from unidist.errors import LayoutError, MeshError


def as_mesh(mesh: Any) -> Mesh:
    """A Mesh from a Mesh or Keras's DeviceMesh (any object with shape, axis_names and devices)."""
    if isinstance(mesh, Mesh):
        return mesh
    if all(hasattr(mesh, name) for name in ("shape", "axis_names", "devices")):
        devices = np.asarray(mesh.devices).reshape(-1).tolist()
        return Mesh(dict(zip(mesh.axis_names, mesh.shape, strict=True)), devices)
    found = f"{mesh!r}: write unidist.Mesh({mesh!r})" if isinstance(mesh, Mapping) else type(mesh).__name__
    raise MeshError(f"expected a Mesh or a keras.distribution.DeviceMesh, found {found}")


def as_layout(layout: Any) -> Layout:
    """A Layout from a Layout, a tuple of axes, None (replicated) or Keras's TensorLayout."""
    if isinstance(layout, Layout):
        return layout
    if layout is None:
        return Layout()
    axes = getattr(layout, "axes", layout)
    if isinstance(axes, tuple | list):
        return Layout(*axes)
    raise LayoutError(f"expected a Layout, a tuple of axes or a keras.distribution.TensorLayout, found {layout!r}")
