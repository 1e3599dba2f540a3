"""Where unidist steps into Keras: one function that replaces an attribute and refuses a Keras that lacks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidist.keras.compat import missing


def around(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces `owner.name` by make(original).

    Raises:
        BackendMismatchError: this Keras has no such attribute, so it is not one that unidist was made for.
    """
    original = getattr(owner, name, None)
    if original is None:
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", repr(owner)))
        raise missing(f"{where}.{name}")
    setattr(owner, name, make(original))
