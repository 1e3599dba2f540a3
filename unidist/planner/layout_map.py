"""LayoutMap: rules from variable paths to layouts, strict by default."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from unidist.algebra import Axes, Layout, Mesh
from unidist.array import as_layout, as_mesh
from unidist.errors import LayoutError


class LayoutMap(MutableMapping[str, Layout]):
    """Rules from variable paths to layouts on one mesh.

    A path is looked up as an exact key first, then by `re.fullmatch` (as in keras.distribution). What no rule
    matches is replicated.

    Args:
        mesh: a Mesh or a Keras DeviceMesh.
        rules: pattern -> Layout, tuple of axes or TensorLayout.
        strict: a rule that matches no variable is an error when the model is planned.
        uneven: a dim that does not divide is cut all the same, into shards of different sizes (as torch.chunk does).

    Raises:
        LayoutError: a rule names an unknown axis or is no regular expression; a path matches two rules.
        MeshError: the mesh is neither.

    Example:
        >>> import unidist
        >>> rules = unidist.LayoutMap(unidist.Mesh({"model": 2}), {r".*dense/kernel": (None, "model")})
        >>> rules.layout_for("encoder/dense/kernel", (8, 4))
        Layout(None, 'model')
        >>> rules.layout_for("encoder/dense/bias", (4,))
        Layout()
    """

    def __init__(
        self, mesh: Any, rules: Mapping[str, Any] | None = None, strict: bool = True, uneven: bool = False
    ) -> None:
        self.mesh: Mesh = as_mesh(mesh)
        self.strict = strict
        self.uneven = uneven
        self._rules: dict[str, Layout] = {}
        for pattern, layout in dict(rules or {}).items():
            self[pattern] = layout

    def __setitem__(self, pattern: str, layout: Any) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise LayoutError(f"rule {pattern!r} is no regular expression: {error}") from error
        if pattern in self._rules:
            raise LayoutError(f"rule {pattern!r} is given twice: it is {self._rules[pattern]} already")
        parsed = as_layout(layout)
        if parsed.partial or parsed.fanout:
            raise LayoutError(f"rule {pattern!r}: a variable is sharded or replicated, found {parsed}")
        self._rules[pattern] = parsed.check(self.mesh)

    def __getitem__(self, path: str) -> Layout:
        found = self.match(path)
        if found is None:
            raise KeyError(path)
        return self._rules[found]

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self.match(path) is not None

    def __delitem__(self, pattern: str) -> None:
        del self._rules[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def items(self) -> Any:
        """(pattern, layout) of each rule, in their order."""
        return self._rules.items()

    def values(self) -> Any:
        """The rules' layouts, in their order."""
        return self._rules.values()

    def __repr__(self) -> str:
        return f"LayoutMap({self.mesh}, {self._rules})"

    def to_json(self) -> str:
        """Returns the rules as text, a rule a line: kept beside a model, read and changed by people.

        `from_json` reads it.
        """
        rules = ",\n".join(
            f"    {json.dumps(pattern)}: {json.dumps([_named(axes) for axes in layout.dims])}"
            for pattern, layout in self._rules.items()
        )
        return f'{{\n  "mesh": {json.dumps(dict(self.mesh.axes))},\n  "rules": {{\n{rules}\n  }}\n}}\n'

    @classmethod
    def from_json(cls, text: str, mesh: Any = None, strict: bool = True) -> LayoutMap:
        """The LayoutMap that `to_json` wrote, on its own mesh or on another with the same axes.

        Raises:
            LayoutError: the text is none, or a rule does not fit the mesh.
        """
        try:
            found = json.loads(text)
            rules = {pattern: Layout(*map(_axes, dims)) for pattern, dims in found["rules"].items()}
            sizes = dict(found["mesh"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LayoutError(f"this is no LayoutMap that to_json wrote: {error!r}") from error
        return cls(Mesh(sizes) if mesh is None else mesh, rules, strict)

    def match(self, path: str) -> str | None:
        """The rule for a path, or None. Raises LayoutError where two rules match."""
        if path in self._rules:
            return path
        found = [pattern for pattern in self._rules if re.fullmatch(pattern, path)]
        if len(found) > 1:
            raise LayoutError(f"variable {path!r} matches several rules: {found}; make each path match one")
        return found[0] if found else None

    def layout_for(self, path: str, shape: tuple[int, ...]) -> Layout:
        """The layout of a variable; replicated where no rule matches.

        Raises:
            LayoutError: two rules match, the layout has more dims than the variable, or a dim does not divide and the
                map is not uneven.
        """
        rule = self.match(path)
        found = self._rules[rule] if rule is not None else Layout()
        return check_variable(path, shape, found, self.mesh, uneven=self.uneven)

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """The rules that match none of the paths."""
        known = list(paths)
        return [
            pattern
            for pattern in self._rules
            if not any(pattern == path or re.fullmatch(pattern, path) for path in known)
        ]

    def check_used(self, paths: Iterable[str]) -> None:
        """Raises LayoutError, where strict, if a rule matches none of the paths."""
        known = list(paths)
        idle = self.unmatched(known)
        if idle and self.strict:
            near = ", ".join(repr(p) for p in known[:8])
            raise LayoutError(
                f"rules that match no variable: {idle}. A rule must match the whole path (re.fullmatch): "
                f"begin it with '.*' to match how paths end. The model has {len(known)} variables: {near}"
                + (", ..." if len(known) > 8 else "")
            )


def _named(axes: Axes) -> Any:
    return axes[0] if len(axes) == 1 else list(axes) or None


def _axes(named: Any) -> Any:
    return tuple(named) if isinstance(named, list) else named


def check_variable(path: str, shape: tuple[int, ...], layout: Layout, mesh: Mesh, *, uneven: bool = False) -> Layout:
    """The layout. Raises LayoutError where it does not fit a variable's shape, evenly unless `uneven`."""
    try:
        layout.check(mesh, len(shape))
    except LayoutError as error:
        raise LayoutError(f"variable {path!r} of shape {shape}: {error}") from error
    for dim, axes in enumerate(layout.dims):
        if axes and not uneven and shape[dim] % mesh.axis_size(axes):
            raise LayoutError(
                f"variable {path!r} of shape {shape}: dim {dim} ({shape[dim]}) does not divide over "
                f"{'x'.join(axes)} ({mesh.axis_size(axes)}): choose another dim or axis, or pad the layer's size"
            )
    return layout
