"""What may look at several rows of a batch: it is called with the rows of all shards in view.

Layers, operations and losses of Keras and keras_hub treat each row alone, but for those named here, and are called with
this shard's rows as they are. Anything else is called on RowParts (rowparts.py): its first call shows whether it looks
at other rows. If not, it too is called with this shard's rows from then on, until the model changes (changes.py).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import torch

from unidist.errors import CapabilityError
from unidist.keras import sessions
from unidist.keras.calls import Call, Stage, without
from unidist.keras.compat import StatelessScope, tree
from unidist.keras.known import is_container, is_known, is_of_keras, operations_of, overrides
from unidist.keras.torch import changes, context
from unidist.keras.torch.calls import around_call
from unidist.keras.torch.context import Frame, Rows
from unidist.keras.torch.rows.counts import Counting
from unidist.keras.torch.rows.parts import mapped, whole
from unidist.keras.torch.rows.regions import (
    LooksAtRowsError,
    Region,
    are_row_parts,
    as_local,
    as_row_part,
    can_begin,
    may_have_rows,
    on_locals,
    rows_of_its_own,
)
from unidist.keras.torch.rows.rowparts import RowPart

# Losses of all rows at once.
_MIXING_LOSSES = ("dice", "tversky", "circle")
# Methods of a model that are given rows, and may return numbers of several.
_OF_ROWS = ("predict_step", "compute_metrics")
# On a layer, a loss, or a step of the user's own: its Mixer. On a layer that is known: what lets it be tried again.
_MIXER = "_unidist_mixer"


# layers and operations ------------------------------------------------------------------------------------------------


def install_regions(model: Any, *, sees_rows: bool = False) -> list[Mixer]:
    """Lets a model's own layers, and the operations of its graphs, see the rows of all shards; `sees_rows`: so does a
    step of its own."""
    layers = list(model._flatten_layers())
    inner = [layer for layer in layers if not is_container(layer)]
    unknown = [layer for layer in inner if not is_known(layer)]
    unknown += [op for layer in layers if is_container(layer) for op in operations_of(layer)]
    found = [_give_region(layer, getattr(layer, "path", None) or layer.name) for layer in unknown]
    found += [_give_region_to_method(model, name) for name in _OF_ROWS if overrides(model, name)]
    if found or sees_rows:
        leave_regions(model)
    return found


def leave_regions(model: Any) -> None:
    """Lets the layers of a model that are known compute with this shard's rows, wherever they are called."""
    for layer in model._flatten_layers():
        if not is_container(layer) and is_known(layer):
            _leave_regions(layer)


class Mixer:
    """A layer, operation or loss that may mix rows, and what its calls have shown.

    Attributes:
        mixes: (rank, whether gradients are made, training) -> whether it looked at other rows; missing: not called yet.
    """

    def __init__(self, subject: Any, name: str) -> None:
        self.name = name
        self.mixes: dict[Any, bool] = {}
        self._found_in: dict[Any, int] = {}
        self._of_wholes: set[Any] = set()
        self._subject = weakref.ref(subject)

    @property
    def why(self) -> str:
        if any(self.mixes.values()):
            return "given the rows of all shards: it looks at several"
        return "called with each shard's own rows: it treats each alone" if self.mixes else "not called yet"

    def call(self, frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        """The subject's call."""
        rows = frame.rows
        if rows is None or not can_begin(frame):
            return rest(*args, **kwargs)
        key = frame.rank, torch.is_grad_enabled(), kwargs.get("training"), changes.key(self._subject())
        # What backward computes again is computed as it was: the step that has found it out goes on in the old way.
        # What is made of wholes alone may have rows to cut, or none, and is noted as such each time.
        # In a step that sees all rows it may be given several batches behind each other.
        is_alone = self.mixes.get(key) is False and key not in self._of_wholes and not frame.sees_rows
        if is_alone and self._found_in[key] != frame.number:
            return on_locals(frame, rest, args, kwargs)
        within = frame.region is not None
        if not within:
            own = self._constants()
            if frame.tells_losses and not frame.sees_rows and not rows.least:
                # A rank without rows cannot tell a batch that the step has made from the step's.
                raise LooksAtRowsError(
                    f"{self.name!r} may look at several rows, and a device has none of this batch. Compile the model "
                    "with jit_compile=False"
                )
            if frame.tells_losses and (count := rows_of_its_own(rows, own, args, kwargs)):
                return self._call_apart(frame, rest, count, own, args, kwargs)
            args, kwargs = (mapped(lambda x: as_row_part(frame, rows, x, own), value) for value in (args, kwargs))
        region = Region(self.name, is_apart=frame.region is not None and frame.region.is_apart)
        with frame.looking(region), contextlib.nullcontext() if self.mixes.get(key) else Counting():
            out = rest(*args, **kwargs)
        self.mixes[key] = self.mixes.get(key, False) or region.mixes
        self._found_in.setdefault(key, frame.number)
        if within:
            return out
        if not are_row_parts(args, kwargs):
            self._of_wholes.add(key)
        told = iter(self._have_rows())
        return mapped(lambda x: as_local(frame, rows, x, next(told, None)), out)

    def _call_apart(self, frame: Frame, rest: Call, count: int, own: set[int], args: Any, kwargs: Any) -> Any:
        """Of `count` rows that a step of the user's own has made, as of two batches behind each other: each alone."""

        def apart(x: Any) -> Any:
            return RowPart.of(frame, x, count) if may_have_rows(x, own) and x.shape[0] == count else x

        with frame.looking(Region(self.name, is_apart=True)):
            out = rest(*mapped(apart, args), **mapped(apart, kwargs))
        return mapped(lambda x: x.part if isinstance(x, RowPart) and x.part is not None else whole(x), out)

    def forget(self) -> None:
        """What it has shown no longer holds: the model has changed."""
        self.mixes.clear()
        self._found_in.clear()
        self._of_wholes.clear()

    def look(self, frame: Frame, rows: Rows, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What a function gives that is shown the rows of all shards: the same on each."""
        key = frame.rank, torch.is_grad_enabled()
        region = Region(self.name)
        args, kwargs = (mapped(lambda x: as_row_part(frame, rows, x, set()), value) for value in (args, kwargs))
        with frame.looking(region):
            out = mapped(whole, function(*args, **kwargs))
        self.mixes[key] = self.mixes.get(key, False) or region.mixes
        return out

    def _constants(self) -> set[int]:
        """ids of the tensors that a graph of Keras's gives to each call."""
        nodes = getattr(self._subject(), "_inbound_nodes", ())
        found: list[Any] = []
        mapped(found.append, [(node.arguments.args, node.arguments.kwargs) for node in nodes])
        return {id(x) for x in found if isinstance(x, torch.Tensor)}

    def _have_rows(self) -> list[bool]:
        """Of each output whether it has a row for each of the batch, where a graph of Keras's says so: not one that was
        built for a number of rows, as a Sequential model is by its first batch."""
        nodes = getattr(self._subject(), "_inbound_nodes", ())[:1]
        of_any_batch = any(x.shape[:1] == (None,) for node in nodes for x in node.input_tensors)
        return [x.shape[:1] == (None,) for node in nodes for x in node.output_tensors] if of_any_batch else []


def check_program(model: Any, call: Call, args: Any, kwargs: Any) -> None:
    """Calls a model, or a layer of it, once before it becomes a program, which computes with each shard's own rows
    alone. All ranks come to it together: the call may send.

    Raises:
        CapabilityError: a layer or an operation looks at several rows.
    """
    mixers = sessions.of(model).engine.mixers
    if not mixers:
        return
    with torch.no_grad(), StatelessScope(collect_losses=True):
        call(*args, **kwargs)
    found = [mixer.name for mixer in mixers if any(mixer.mixes.values())]
    if found:
        raise CapabilityError(
            f"jit_compile=True: {', '.join(map(repr, found))} of model {model.name!r} looks at several rows of a "
            "batch, which a program of each shard's rows cannot. Compile the model with jit_compile=False"
        )


def _give_region(layer: Any, name: str) -> Mixer:
    known: Mixer | Callable[[], None] | None = vars(layer).get(_MIXER)
    if isinstance(known, Mixer):
        return known
    if known is not None:
        known()
    mixer = Mixer(layer, name)
    around_call(layer, Stage.REGION, mixer.call)
    object.__setattr__(layer, _MIXER, mixer)
    return mixer


def _give_region_to_method(model: Any, name: str) -> Mixer:
    """Lets a method of the user's own see the rows of all shards."""
    original = getattr(model, name)
    known: Mixer | None = getattr(original, _MIXER, None)
    if known is not None:
        return known
    mixer = Mixer(model, f"{name} of {model.name}")

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        frame = context.frame()
        if frame is None or frame.rows is None or not can_begin(frame) or frame.region is not None:
            return original(*args, **kwargs)
        if name == "predict_step":
            return mixer.call(frame, original, args, kwargs)
        return mixer.look(frame, frame.rows, original, *args, **kwargs)  # what it gives has no rows

    setattr(method, _MIXER, mixer)
    object.__setattr__(model, name, method)
    return mixer


def _leave_regions(layer: Any) -> None:
    """Lets a known layer compute with this shard's rows, wherever it is called."""
    if vars(layer).get(_MIXER) is not None:
        return
    object.__setattr__(layer, _MIXER, around_call(layer, Stage.ROWS, on_locals))


def without_region(call: Any) -> Call | None:
    """A known layer's call as it is outside of regions; None for any other."""
    return without(call, Stage.ROWS)


# losses ---------------------------------------------------------------------------------------------------------------


def is_known_loss(loss: Any) -> bool:
    """Whether a loss is one of Keras's that give a number for each row, of that row alone."""
    return is_of_keras(type(loss).call) and is_of_each_row(getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {}))


def is_of_each_row(function: Any, options: Mapping[str, Any]) -> bool:
    """Whether a function that a loss or a metric wraps is none, or one of Keras's that looks at each row alone."""
    if function is None:
        return True
    is_alone = options.get("axis", -1) != 0 and getattr(function, "__name__", "") not in _MIXING_LOSSES
    return is_alone and is_of_keras(function)


def check_losses(model: Any) -> None:
    """Raises CapabilityError: a loss that a model was compiled with reduces and weighs rows by itself."""
    for loss in tree.flatten(getattr(model, "loss", None)):
        if isinstance(loss, keras.losses.Loss) and overrides(loss, "__call__"):
            raise CapabilityError(
                f"loss {loss.name!r} overrides __call__, which is given the rows of one device alone: override "
                "call, which is given those of all, and let Keras reduce and weigh what it gives"
            )


def give_region_to_loss(loss: Any) -> None:
    """Lets a loss see the rows of all shards, once."""
    if "call" in vars(loss) or is_known_loss(loss):
        return
    _give_region(loss, f"loss {loss.name}")


def of_losses(model: Any) -> list[Mixer]:
    """Those of the losses that a model was compiled with, once they were called."""
    compiled = getattr(model, "_compile_loss", None)
    losses = [entry[1] for entry in getattr(compiled, "_flat_losses", None) or ()]
    return [mixer for loss in losses if isinstance(mixer := getattr(loss, _MIXER, None), Mixer)]
