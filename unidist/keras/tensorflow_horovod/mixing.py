"""Tries what may look at several rows of a batch, with Keras on TensorFlow over Horovod.

Where it does look, it is given the rows of all ranks, and computes them on each. So is a layer as a whole whose own
layers are unknown. What treats each row alone stays with this rank's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from unidist.keras import activity
from unidist.keras.layer_facts import is_container, is_known, operations_of
from unidist.keras.patching.compat import get_keras_mask, in_symbolic_scope, set_keras_mask, tree
from unidist.keras.patching.layer_calls import Call, Stage, around
from unidist.keras.tensorflow_horovod.trying import looks_at_other_rows

if TYPE_CHECKING:
    from unidist.keras.tensorflow_horovod.engine import Engine


class Mixer:
    """A layer or an operation that may look at several rows.

    Attributes:
        mixes: the argument `training` -> whether it does; missing: not called yet.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.mixes: dict[Any, bool] = {}

    @property
    def why(self) -> str:
        if any(self.mixes.values()):
            return "given the rows of all ranks: it looks at several"
        return "called with each rank's own rows: it treats each alone" if self.mixes else "not called yet"

    def call(self, rest: Call, *args: Any, **kwargs: Any) -> Any:
        """The subject's call."""
        here = self.engine
        if not here.in_call or here.sees_all or here.is_trying or in_symbolic_scope():
            return rest(*args, **kwargs)
        key = kwargs.get("training")
        if key not in self.mixes:
            here.is_trying = True
            try:
                self.mixes[key] = looks_at_other_rows(rest, args, kwargs, here.has_rows)
            finally:
                here.is_trying = False
        if not self.mixes[key]:
            return rest(*args, **kwargs)
        args, kwargs = tree.map_structure(self._gathered, (args, kwargs))
        with here.seeing_all():
            found = rest(*args, **kwargs)
        return tree.map_structure(self._own, found)

    def _gathered(self, x: Any) -> Any:
        """The rows of all ranks of what has rows."""
        if not tf.is_tensor(x) or not self.engine.has_rows(x):
            return x
        whole = self.engine.gather(x, f"rows of {self.name}")
        if (mask := get_keras_mask(x)) is not None:
            set_keras_mask(whole, self.engine.gather(mask, f"rows of {self.name}"))
        return whole

    def _own(self, x: Any) -> Any:
        """This rank's rows of what has a row for each of the batch."""
        if not tf.is_tensor(x) or x.shape.rank in (None, 0) or x.shape[0] not in (None, self.engine.static_total()):
            return x
        own = self.engine.own_rows(self._checked(x))
        if (mask := get_keras_mask(x)) is not None:
            set_keras_mask(own, self.engine.own_rows(mask))
        return own

    def _checked(self, x: Any) -> Any:
        text = (
            f"{self.name!r} looks at several rows and gives another number of them, which cannot be cut over Horovod "
            "with Keras on TensorFlow: set KERAS_BACKEND=torch, or do it in one layer that gives a row for each"
        )
        here = self.engine
        with tf.control_dependencies([here.traced.are_equal(tf.shape(x)[0], here.total, text)]):
            return tf.identity(x)


def install(engine: Engine, current: Callable[[], Engine | None]) -> list[Mixer]:
    """Lets what may mix rows in the engine's model see those of all ranks.

    The model itself is first, if it may.

    Args:
        current: the engine at work, which a model's layers may have another one of later.
    """
    model = engine.model
    found = [] if is_container(model) else [Mixer(engine, model.name)]
    for subject in _subjects(model) if is_container(model) else ():
        mixer = Mixer(engine, getattr(subject, "path", None) or subject.name)
        around(subject, Stage.REGION, functools.partial(_link, mixer))
        found.append(mixer)
    activity.given(model, lambda layer, name: _Look(current, name))
    return found


def _link(mixer: Mixer, rest: Call) -> Call:
    return lambda *args, **kwargs: mixer.call(rest, *args, **kwargs)


def _subjects(container: Any) -> Iterator[Any]:
    """The outermost layers and the operations of a graph that may mix rows."""
    yield from operations_of(container)
    for layer in container.layers:
        if is_container(layer):
            yield from _subjects(layer)
        elif not all(is_known(inner) or is_container(inner) for inner in layer._flatten_layers()):
            yield layer


class _Look:
    """Shows one activity regularizer the rows of all ranks."""

    def __init__(self, current: Callable[[], Engine | None], name: str) -> None:
        self._current, self._name = current, name

    def __call__(self, own: Any, output: Any) -> Any:
        here = self._current()
        if here is None or not here.in_call or here.sees_all or here.is_trying or not here.has_rows(output):
            return own(output)
        loss = tf.convert_to_tensor(own(here.gather(output, f"rows of {self._name}")))
        # Keras divides by this rank's rows, and the losses of the ranks count by their rows.
        return loss * tf.cast(here.own_share(), loss.dtype)
