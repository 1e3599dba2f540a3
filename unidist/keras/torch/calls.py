"""Places what stands before a layer's own call where a rank is at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidist.keras.patching.layer_calls import Call, Stage, around
from unidist.keras.torch import context
from unidist.keras.torch.context import Frame


def around_call(layer: Any, stage: Stage, inside: Callable[[Frame, Call, Any, Any], Any]) -> Callable[[], None]:
    """Lets inside(frame, rest, args, kwargs) stand at a stage of the layer's call, in frames alone.

    Returns:
        What takes it off again.
    """

    def link(rest: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Looked up at each call: a program runs what stands inside of it in the frames of later steps.
            frame = context.frame()
            return rest(*args, **kwargs) if frame is None else inside(frame, rest, args, kwargs)

        return call

    return around(layer, stage, link)
