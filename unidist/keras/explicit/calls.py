"""What stands before a layer's own call where a rank is at work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from unidist.keras.explicit import context
from unidist.keras.explicit.context import Frame

Call = Callable[..., Any]


def around_call(layer: Any, inside: Callable[[Frame, Call, Any, Any], Any]) -> Call:
    """Lets inside(frame, original, args, kwargs) stand for the call of a layer; outside of frames it is as before.

    Returns:
        The call that the layer has now. Its `__wrapped__` is the one it had.
    """
    original = layer.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = context.frame()
        return original(*args, **kwargs) if frame is None else inside(frame, original, args, kwargs)

    object.__setattr__(layer, "call", call)
    return call
