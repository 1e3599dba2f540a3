"""Picture: what `draw` gives."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from unidist.errors import DrawingError


@dataclass(frozen=True)
class Picture:
    """A drawing. Notebooks show it by themselves.

    Attributes:
        title: what it shows, in a line.
        svg: the drawing: SVG that needs nothing from elsewhere. The same for the same input, byte for byte.

    Example:
        >>> import unidist
        >>> mesh = unidist.Mesh({"data": 4})
        >>> picture = unidist.draw(unidist.Layout("data"), mesh=mesh, shape=(10, 3))
        >>> picture.title
        "(10, 3) float32 as Layout('data') on data=4"
        >>> picture.svg.startswith("<svg")
        True
    """

    title: str
    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the drawing to a file, and gives its path.

        Raises:
            DrawingError: the file's name does not end in .svg.
        """
        file = Path(path)
        if file.suffix.lower() != ".svg":
            raise DrawingError(f"save({os.fspath(path)!r}): pictures are SVG, name a file that ends in .svg")
        file.write_text(self.svg, encoding="utf-8")
        return file
