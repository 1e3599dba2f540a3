"""What a step of the user's own keeps on its model, in the simulator: all ranks have the one model object."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

# Steps of a training that are looked at.
STEPS = 3


class Watch:
    """Warns once of each attribute of a model that its own step assigns."""

    def __init__(self, model: Any, ranks: int) -> None:
        self._model = model
        self._ranks = ranks
        self._left = STEPS
        self._known: set[str] = set()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step is inside, on all ranks."""
        if not self._left:
            yield
            return
        self._left -= 1
        before = self._held()
        yield
        found = self._held()
        changed = [name for name in found if before.get(name) != found[name] and name not in self._known]
        self._known.update(changed)
        if changed:
            names = ", ".join(f"self.{name}" for name in changed)
            warnings.warn(
                f"train_step of {type(self._model).__name__} assigns {names}. In the simulator {self._ranks} ranks run "
                "it on one model object, so a rank reads what others have assigned. In real processes each has its "
                "own: use unidist run with torch, or keep such numbers in weights (add_weight, trainable=False)",
                UserWarning,
                stacklevel=2,
            )

    def _held(self) -> dict[str, Any]:
        # Methods are put there by unidist.
        held = {name: value for name, value in vars(self._model).items() if not callable(value)}
        return {name: _content(value) for name, value in held.items() if not name.startswith("_")}


def _content(value: Any) -> tuple[int, ...]:
    """Another one when the attribute is assigned, or an entry of the list or dict in it is."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (id(value), *map(id, entries))
