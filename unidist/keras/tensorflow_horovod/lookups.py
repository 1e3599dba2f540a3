"""Lookups by ids that are the same on all ranks, as those of positions or of learned prompts.

Keras's optimizers on TensorFlow treat the gradients of an id's occurrences one by one, so each must come once: the
square of such a gradient is the sum of their squares. Ids of a rank's own rows occur there alone, and their gradients
stand behind each other. Of ids that all ranks look up alike each rank has a part of every gradient: they are added up.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unidist.keras.patching.compat import backend, in_symbolic_scope
from unidist.keras.patching.patches import calling
from unidist.keras.tensorflow_horovod.engine import Engine, current, processes

Tensor = Any  # tf.Tensor; TensorFlow has no types


@calling
def looking_up(original: Any, x: Any, indices: Any, axis: int | None = None) -> Any:
    """keras.ops.take, and so the layer Embedding."""
    found = original(x, indices, axis)
    here = current()
    if here is None or here.is_trying or in_symbolic_scope() or not _has_gradient(found, x, axis):
        return found
    if not here.in_call:
        # Outside of the model's call all ranks compute the same. There, a gradient of something else than a weight
        # may be looked at.
        return here.traced.once(found, is_part=False) if isinstance(x, backend.Variable | tf.Variable) else found
    alike = here.sees_all or not of_own_rows(here, tf.convert_to_tensor(indices))
    return here.traced.once(found, is_part=True) if alike else found


def _has_gradient(found: Any, table: Any, axis: int | None) -> bool:
    """Returns whether the gradient has a row for each id."""
    return isinstance(found, tf.Tensor) and found.dtype.is_floating and axis in (0, -len(table.shape))


def of_own_rows(here: Engine, ids: Tensor) -> bool:
    """Returns whether ids are those of this rank's rows, or as many.

    A program has computed them of the rows, and of their number (not of their length).
    """
    if tf.executing_eagerly():
        return _are_rows(here, ids)
    if not here.has_rows(ids):
        return False
    seen: set[int] = set()
    todo = [ids]
    while todo:
        x = todo.pop()
        if not tf.is_symbolic_tensor(x) or id(x.op) in seen or _is_length(x.op):
            continue
        seen.add(id(x.op))
        if x.op.type == "PlaceholderWithDefault":
            return True  # how a call's rows are cut
        if x.op.type == "Placeholder" and x.dtype != tf.resource:
            outer = [out for out, within in x.graph.captures if within is x]
            if not outer:
                return True  # an argument of a function: whoever calls it knows
            todo += outer
        todo += x.op.inputs
    return False


def _are_rows(here: Engine, ids: Tensor) -> bool:
    """Returns whether a tensor whose origin is not known has this rank's rows.

    One of one dim may be as long by chance: it is something else where it is the same on all ranks. A collective then,
    to which all come.
    """
    lengths = {max(rows, 1) for rows in here.traced.lengths(int(here.total))}
    several = processes()
    if ids.shape.rank != 1 or several is None or ids.shape[0] not in lengths:
        return here.has_rows(ids)
    return not several.hold_alike(ids.numpy().tobytes(), "ids")


def _is_length(op: Any) -> bool:
    """Returns whether it is one entry of a shape, behind that of the rows."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(op.inputs[1])
    return begin is not None and len(begin) == 1 and begin[0] > 0 and op.outputs[0].shape.rank == 0
