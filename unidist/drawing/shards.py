"""Shards: which ranks hold which block of an array, and a rectangle that is cut as the array is."""

from __future__ import annotations

from dataclasses import dataclass

from unidist.algebra import Mesh, Sharding
from unidist.backends.protocol import itemsize
from unidist.drawing.canvas import Canvas, width_of
from unidist.drawing.style import COLOURS, colour
from unidist.errors import DrawingError
from unidist.planner.choosing import size_text

MOST_DEVICES = 4096
_SIGNS = {"sum": " + ", "mean": " + ", "prod": " x "}


@dataclass(frozen=True, slots=True)
class Block:
    """A part of an array, of the two dims that are drawn.

    Attributes:
        across, down: (start, length) along the dim that is drawn from left to right, and from the top down.
        holders: the ranks. Those of one tuple hold the same; several tuples are the summands of a partial array, or
            parts along a dim that is not drawn.
    """

    across: tuple[int, int]
    down: tuple[int, int]
    holders: tuple[tuple[int, ...], ...]

    @property
    def is_empty(self) -> bool:
        return not (self.across[1] and self.down[1])


@dataclass(frozen=True, slots=True)
class View:
    """An array to be drawn: how it is laid out, and its dtype."""

    sharding: Sharding
    dtype: str = "float32"

    @property
    def mesh(self) -> Mesh:
        return self.sharding.mesh

    @property
    def shown(self) -> tuple[int | None, int | None]:
        """The dims that are drawn from the top down and from left to right.

        They are those that are cut, else the first and the last.
        """
        ndim = len(self.sharding.shape)
        cut = [dim for dim in range(ndim) if self.sharding.layout.dim_axes(dim)][:2]
        for dim in (0, ndim - 1, *range(ndim)):
            if len(cut) < min(2, ndim) and 0 <= dim < ndim and dim not in cut:
                cut.append(dim)
        if len(cut) < 2:
            return None, cut[0] if cut else None
        return min(cut), max(cut)

    @property
    def hidden_cuts(self) -> list[int]:
        """Dims that are cut and not drawn."""
        dims = range(len(self.sharding.shape))
        return [dim for dim in dims if self.sharding.layout.dim_axes(dim) and dim not in self.shown]

    @property
    def is_partial(self) -> bool:
        return any(self.mesh.axis_size(axis) > 1 for axis in self.sharding.layout.partial_axes)

    @property
    def sign(self) -> str:
        """The sign between the ranks of a partial array's parts."""
        if not self.is_partial:
            return " | "
        op = self.sharding.layout.partial[0][1]
        return _SIGNS.get(op, f" {op} ")

    @property
    def name(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.axes)
        return f"{self.sharding.shape} {self.dtype} as {self.sharding.layout} on {sizes}"

    @property
    def most_bytes(self) -> int:
        """Bytes of the device that holds most."""
        return max(self.sharding.elements(rank) for rank in self.mesh.devices) * itemsize(self.dtype)


def blocks(view: View) -> list[Block]:
    """The blocks, by their places; those that hold nothing last.

    Raises:
        DrawingError: the mesh has more devices than a picture can name.
    """
    mesh, layout = view.mesh, view.sharding.layout
    if mesh.size > MOST_DEVICES:
        raise DrawingError(
            f"a mesh of {mesh.size} devices: a picture shows {MOST_DEVICES} at most. Draw the same layout on a smaller "
            "mesh"
        )
    parted = set(layout.partial_axes) | {axis for dim in view.hidden_cuts for axis in layout.dim_axes(dim)}
    found: dict[tuple[tuple[int, int], tuple[int, int]], dict[tuple[int, ...], list[int]]] = {}
    for rank in mesh.devices:
        region, place = view.sharding.region(rank), mesh.coordinate(rank)
        down, across = (region[dim] if dim is not None else (0, 1) for dim in view.shown)
        part = tuple(place[axis] for axis in mesh.axis_names if axis in parted)
        found.setdefault((down, across), {}).setdefault(part, []).append(rank)
    made = [
        Block(across, down, tuple(tuple(ranks) for ranks in parts.values())) for (down, across), parts in found.items()
    ]
    return sorted(made, key=lambda block: (block.is_empty, block.down, block.across))


def listed(ranks: tuple[int, ...]) -> str:
    """Ranks as they are written: "0, 2", and of more than three in equal steps the first and the last.

    Example:
        >>> listed((0, 2)), listed((0, 1, 2, 3, 8)), listed((0, 8, 16, 24))
        ('0, 2', '0-3, 8', '0-24 by 8')
    """
    left, out = sorted(ranks), []
    while left:
        step, length = (left[1] - left[0] if len(left) > 1 else 1), 1
        while length < len(left) and left[length] - left[length - 1] == step:
            length += 1
        if length > 3:
            out.append(f"{left[0]}-{left[length - 1]}" + (f" by {step}" if step > 1 else ""))
        else:
            # What breaks a run of three may begin a longer one.
            length = 1
            out.append(str(left[0]))
        left = left[length:]
    return ", ".join(out)


def ranks_text(block: Block, sign: str) -> str:
    """ "rank 0", "ranks 0, 2", "ranks (0, 2) + (1, 3)"."""
    if len(block.holders) == 1:
        ranks = block.holders[0]
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
    parts = [listed(ranks) if len(ranks) == 1 else f"({listed(ranks)})" for ranks in block.holders]
    return f"ranks {sign.join(parts)}"


def told(view: View, block: Block) -> str:
    """Describes a block in words."""
    if block.is_empty:
        return f"{ranks_text(block, view.sign)}: an empty shard"
    parts = [
        f"dim {dim} [{start}:{start + length}]"
        for dim, (start, length) in zip(view.shown, (block.down, block.across), strict=True)
        if dim is not None
    ]
    held = max(view.sharding.elements(ranks[0]) for ranks in block.holders)
    return f"{ranks_text(block, view.sign)}: {', '.join(parts) or 'the one value'}, {held:,} elements"


def size_of(view: View, most: float, tallest: float) -> tuple[float, float]:
    """Width and height of the rectangle, in the array's own proportions as far as they can be read."""
    down, across = (1 if dim is None else max(1, view.sharding.shape[dim]) for dim in view.shown)
    if view.shown[0] is None:
        return most, min(70.0, tallest)
    ratio = min(4.0, max(0.7, across / down))
    return (tallest * ratio, tallest) if tallest * ratio <= most else (most, most / ratio)


def rectangle(canvas: Canvas, view: View, x: float, y: float, w: float, h: float) -> list[Block]:
    """Draws an array into a rectangle: blocks in true proportions, each kind in its colour.

    Gives the blocks.
    """
    made = blocks(view)
    down_dim, across_dim = view.shown
    shape = view.sharding.shape
    rows = 1 if down_dim is None else shape[down_dim]
    columns = 1 if across_dim is None else shape[across_dim]
    for k, block in enumerate(made):
        if block.is_empty:
            continue
        left, wide = x + w * block.across[0] / columns, w * block.across[1] / columns
        top, tall = y + h * block.down[0] / rows, h * block.down[1] / rows
        fill, words = tint(view, k, block), told(view, block)
        canvas.rect(left, top, wide, tall, fill, title=words, hatched=view.is_partial)
        _label(canvas, block, view.sign, (left, top, wide, tall), striped=view.is_partial)
    if all(block.is_empty for block in made):
        canvas.rect(x, y, w, h, "pn")
        canvas.text(x + w / 2, y + h / 2 + 4, "no elements", kind="m", anchor="middle", room=w - 8)
    return made


def _label(canvas: Canvas, block: Block, sign: str, place: tuple[float, float, float, float], *, striped: bool) -> None:
    """Names the ranks inside a block, where that has room for them.

    Tooltip and list name them in any case.
    """
    x, y, w, h = place
    text = ranks_text(block, sign)
    short = text.removeprefix("ranks ").removeprefix("rank ")
    number = f"{sum(map(len, block.holders))} ranks" if text.startswith("ranks") else short
    for found, size in ((text, 13.0), (short, 13.0), (text, 10.0), (short, 10.0), (number, 10.0)):
        wide, upright = width_of(found, size), False
        if not (wide <= w - 8 and size + 5 <= h):
            upright = wide <= h - 8 and size + 5 <= w and h > 2 * w
            if not upright:
                continue
        along, across = (size * 1.6, wide + 8) if upright else (wide + 8, size * 1.6)
        if striped:
            canvas.rect(x + (w - along) / 2, y + (h - across) / 2, along, across, "pn", edge=False)
        shift = size * 0.36
        at = (x + w / 2 + shift, y + h / 2) if upright else (x + w / 2, y + h / 2 + shift)
        canvas.text(*at, found, size=size, anchor="middle", upright=upright, room=h if upright else w)
        return


def facts(view: View) -> list[str]:
    """Returns what a picture of an array says in words below it."""
    layout, mesh = view.sharding.layout, view.mesh
    made = [f"{size_text(view.most_bytes)} on the device that holds most."]
    for axis, op in layout.partial:
        what = {"sum": "the sum", "mean": "the mean", "prod": "the product"}.get(op, f"the {op}")
        made.append(f"Partial over {axis!r}: the value is {what} of what the {mesh.axis_size(axis)} ranks hold.")
    for axis in layout.fanout:
        made.append(f"Fan-out over {axis!r}: the same value on each rank, and its gradient arrives partial.")
    for dim in view.hidden_cuts:
        names = " and ".join(map(repr, layout.dim_axes(dim)))
        made.append(f"Dim {dim} is cut too, by {names}: the ranks beside | hold a part each.")
    rest = [dim for dim in range(len(view.sharding.shape)) if dim not in view.shown and dim not in view.hidden_cuts]
    for dim in rest:
        made.append(f"Dim {dim}, of {view.sharding.shape[dim]}, is whole and not drawn.")
    return made


def dim_text(view: View, dim: int | None, room: float, size: float) -> str:
    """Returns an edge's text: the dim, its size, the axes that cut it, in as many words as have room."""
    if dim is None:
        return ""
    axes, short = view.sharding.layout.dim_axes(dim), f"dim {dim} of {view.sharding.shape[dim]}"
    if not axes:
        return short
    names = " then ".join(map(repr, axes))
    texts = (f"{short}, cut by {names}", f"{short} by {names}", f"{view.sharding.shape[dim]} by {names}")
    return next((text for text in texts if width_of(text, size) <= room), texts[-1])


def tint(view: View, k: int, block: Block) -> str:
    """Returns the class of a block's colour.

    On few devices it is that of its first rank, which it keeps from layout to layout.
    """
    return colour(block.holders[0][0] if view.mesh.size <= len(COLOURS) else k)
