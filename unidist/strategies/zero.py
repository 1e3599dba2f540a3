"""ZeRO as layouts: chooses the dim that the data axes cut.

States, or stored values, are then spread over the data ranks.

Source: ZeRO (Rajbhandari et al., SC 2020, arXiv:1910.02054); one layout a variable as in PyTorch FSDP2.
"""

from __future__ import annotations

from unidist.algebra import Axes, Layout, Mesh

STAGES = (0, 1, 2, 3)


def spread(
    layout: Layout, shape: tuple[int, ...], axes: Axes, mesh: Mesh, *, uneven: bool, joint: bool = True
) -> Layout:
    """Returns `layout` with the data axes that it leaves whole on one dim too, behind those that cut it.

    The first dim that divides evenly is cut, since a cut of dim 0 is one contiguous piece. Where none divides the
    largest dim is cut unevenly if the backend can (`uneven`), else the variable stays as it is; so do scalars.

    Args:
        layout: where the variable rests; S and I only.
        shape: its global shape.
        axes: the data axes.
        uneven: whether shards may differ in size (torch.chunk's rule).
        joint: whether one dim may be cut by several axes. If not, each axis cuts a dim that is whole until then.
    """
    if not joint:
        for axis in axes:
            layout = _alone(layout, shape, axis, mesh)
        return layout
    free = tuple(axis for axis in axes if layout.state(axis) == "I" and mesh.axis_size(axis) > 1)
    if not free or not shape:
        return layout
    parts = mesh.axis_size(free)
    already = [mesh.axis_size(a) if (a := layout.dim_axes(dim)) else 1 for dim in range(len(shape))]
    dim = next((d for d, size in enumerate(shape) if size and size % (parts * already[d]) == 0), None)
    if dim is None:
        if not uneven:
            return layout
        dim = max(range(len(shape)), key=lambda d: shape[d] // already[d])
    return layout.with_axis(free, "S", dim=dim)


def _alone(layout: Layout, shape: tuple[int, ...], axis: str, mesh: Mesh) -> Layout:
    """`layout` with `axis` on the first whole dim that it divides, if there is one."""
    parts = mesh.axis_size((axis,))
    if parts == 1 or layout.state(axis) != "I":
        return layout
    whole = (d for d, size in enumerate(shape) if size and size % parts == 0 and not layout.dim_axes(d))
    dim = next(whole, None)
    return layout if dim is None else layout.with_axis((axis,), "S", dim=dim)
