"""Tries what may look at several rows of a batch, with Keras on TensorFlow over Horovod.

Where it does look, it is given the rows of all ranks, and computes them on each. So is a layer as a whole whose own
layers are unknown. What treats each row alone stays with this rank's rows.

A call is tried on a few rows. A row is changed, to other numbers and to NaN, which whatever is computed from it becomes
too. Where the results for the other rows stay what they were to the last bit, each row is treated alone. Then rows are
added: what computes with their number gives others for those that were there, by more than rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from unidist.keras import activity, joined_rows
from unidist.keras.layer_facts import is_container, is_known, operations_of
from unidist.keras.patching.compat import StatelessScope, in_symbolic_scope, tree
from unidist.keras.patching.layer_calls import Call, Stage, around

if TYPE_CHECKING:
    from unidist.keras.tensorflow_horovod.engine import Engine


class WrittenError(Exception):
    """A call that is tried would write a variable of TensorFlow's, which no scope keeps from it."""


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
        return joined_rows.moved(x, lambda own: self.engine.gather(own, f"rows of {self.name}"))

    def _own(self, x: Any) -> Any:
        if not tf.is_tensor(x) or x.shape.rank in (None, 0) or x.shape[0] not in (None, self.engine.static_total()):
            return x
        here, total = self.engine, self.engine.total
        text = (
            f"{self.name!r} looks at several rows and gives another number of them, which cannot be cut over Horovod "
            "with Keras on TensorFlow: set KERAS_BACKEND=torch, or do it in one layer that gives a row for each"
        )
        with tf.control_dependencies([here.traced.are_equal(tf.shape(x)[0], total, text)]):
            return joined_rows.moved(x, lambda whole: here.own_rows(whole, total))


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
    yield from operations_of(container)
    for layer in container.layers:
        if is_container(layer):
            yield from _subjects(layer)
        elif not all(is_known(inner) or is_container(inner) for inner in layer._flatten_layers()):
            yield layer


class _Look:
    def __init__(self, current: Callable[[], Engine | None], name: str) -> None:
        self._current, self._name = current, name

    def __call__(self, own: Any, output: Any) -> Any:
        here = self._current()
        if here is None or not here.in_call or here.sees_all or here.is_trying or not here.has_rows(output):
            return own(output)
        loss = tf.convert_to_tensor(own(here.gather(output, f"rows of {self._name}")))
        # Keras divides by this rank's rows, and the losses of the ranks count by their rows.
        return loss * tf.cast(here.own_share(), loss.dtype)


# Rows that are tried, and those of them that are changed.
ROWS = 5
_CHANGED = (0, 2, ROWS - 1)
_MORE = 2
_ROUNDING = 1e-3  # half precision's too: a number of rows that counts changes results by ROWS to ROWS + _MORE
# Of dims that a traced program does not know.
_UNKNOWN = 3

Tensor = Any  # tf.Tensor; TensorFlow has no types


def looks_at_other_rows(call: Callable[..., Any], args: Any, kwargs: Any, has_rows: Callable[[Tensor], bool]) -> bool:
    """Returns whether a result's row depends on another row or on their number, or the call adds a loss.

    A loss may be of any row. What the call writes into variables, as of metrics, is a result of all rows.

    It runs outside of the program that is traced, and changes no variable. A call that fails on made-up rows counts as
    one that looks.

    Args:
        args, kwargs: as the call is given them; tensors stand for their shapes and dtypes.
        has_rows: whether a tensor has a row for each of the batch.
    """
    flat = tree.flatten((args, kwargs))
    rowed = [tf.is_tensor(x) and has_rows(x) for x in flat]
    draw = np.random.default_rng(0)
    with tf.init_scope():
        made = [_made_up(x, draw, has) if tf.is_tensor(x) else x for x, has in zip(flat, rowed, strict=True)]
        given = tree.pack_sequence_as((args, kwargs), made)
        try:
            wanted = _called(call, given)
            changed = ((row, other) for row in _CHANGED for other in _changes(given, rowed, row))
            if wanted is None or any(_differ(wanted, _called(call, other), row) for row, other in changed):
                return True
            return _depend_on_count(wanted, _called(call, _grown(given, rowed)))
        except Exception:  # whatever a user's code raises where rows are none of its own
            return True


def _called(call: Callable[..., Any], given: tuple[Any, Any]) -> list[Any] | None:
    with StatelessScope(collect_losses=True) as scope:
        found = call(*given[0], **given[1])
    # What it writes into variables has no rows, as long as it may be.
    written = [np.asarray(value)[np.newaxis] for value in scope.state_mapping.values()]
    return None if scope.losses else [*(np.asarray(x) for x in tree.flatten(found) if tf.is_tensor(x)), *written]


def _made_up(x: Tensor, draw: np.random.Generator, has_rows: bool) -> Tensor:
    if isinstance(x, tf.__internal__.EagerTensor) and not has_rows:
        return x
    shape = [_UNKNOWN if n is None else n for n in x.shape]
    if has_rows:
        shape[0] = ROWS
    if x.dtype.is_floating:
        return tf.cast(draw.normal(size=shape), x.dtype)
    return tf.cast(draw.integers(0, 2, shape), x.dtype)  # whatever they count or name, there are two of it


def _changes(given: Any, rowed: list[bool], row: int) -> Iterator[Any]:
    """The arguments with another row: numbers far off to both sides, and NaN where there is NaN."""
    for value in (1e3, -1e3, float("nan")):
        flat = [_with(x, row, value) if has else x for x, has in zip(tree.flatten(given), rowed, strict=True)]
        yield tree.pack_sequence_as(given, flat)


def _with(x: Tensor, row: int, value: float) -> Tensor:
    array = np.array(x)
    if x.dtype.is_floating:
        array[row] = array[row] * value - value
    elif x.dtype == tf.bool:
        array[row] = ~array[row]
    else:
        array[row] = 1 - array[row]
    return tf.constant(array, x.dtype)


def _differ(wanted: list[Any], found: list[Any] | None, row: int) -> bool:
    """Returns whether results differ elsewhere than in this row; those without rows, anywhere."""
    if found is None:
        return True
    for one, other in zip(wanted, found, strict=True):
        if one.shape[:1] == other.shape[:1] == (ROWS,):
            one, other = np.delete(one, row, 0), np.delete(other, row, 0)
        if one.tobytes() != other.tobytes():
            return True
    return False


def _grown(given: Any, rowed: list[bool]) -> Any:
    """The arguments with more rows, as those that there are."""
    flat = zip(tree.flatten(given), rowed, strict=True)
    return tree.pack_sequence_as(given, [tf.concat([x, x[:_MORE]], 0) if has else x for x, has in flat])


def _depend_on_count(wanted: list[Any], found: list[Any] | None) -> bool:
    """Returns whether results with more rows are others for the first ones; those without rows, anywhere."""
    if found is None:
        return True
    for one, other in zip(wanted, found, strict=True):
        if one.shape[:1] == (ROWS,) and other.shape[:1] == (ROWS + _MORE,):
            other = other[:ROWS]
        if one.shape != other.shape or not _is_close(one, other):
            return True
    return False


def _is_close(one: Any, other: Any) -> bool:
    if one.dtype.kind not in "fV":  # V: NumPy's kind of bfloat16
        return bool(one.tobytes() == other.tobytes())
    a, b = (x.astype("float64") for x in (one, other))
    return bool(np.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True))
