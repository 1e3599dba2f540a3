"""What may look at several rows of a batch: it is called with the rows of all shards in view.

Layers, operations and losses of Keras and keras_hub treat each row alone, but for those named here, and are called with
this shard's rows as they are. Anything else is called on RowParts (rowparts.py): its first call shows whether it looks
at other rows. If not, it too is called with this shard's rows from then on, until the model changes (changes.py).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import torch

from unidist.errors import CapabilityError
from unidist.keras import sessions
from unidist.keras.calls import Call, Stage, without
from unidist.keras.compat import StatelessScope, get_device, get_keras_mask, set_keras_mask, tree
from unidist.keras.explicit import changes, context
from unidist.keras.explicit.calls import around_call
from unidist.keras.explicit.context import Frame, Rows
from unidist.keras.explicit.parts import mapped, whole
from unidist.keras.explicit.rowparts import RowPart, own_rows
from unidist.keras.known import is_container, is_known, is_of_keras, operations_of, overrides

# Losses of all rows at once.
_MIXING_LOSSES = ("dice", "tversky", "circle")
# Methods of a model that are given rows, and may return numbers of several.
_OF_ROWS = ("predict_step", "compute_metrics")
# On a tensor: it has no rows, whatever its first dim.
_ROWLESS = "_unidist_rowless"
# On a layer, a loss, or a step of the user's own: its Mixer. On a layer that is known: what lets it be tried again.
_MIXER = "_unidist_mixer"


class LooksAtRowsError(CapabilityError):
    """A step of the user's own computes with rows by itself. Not seen outside, if it can begin again (own_rows.py)."""


@dataclass
class Region:
    """A call with the rows of all shards in view.

    Attributes:
        name: of the layer, operation or loss.
        mixes: whether it has looked at the rows of other shards.
        is_apart: it is given other rows than the batch's, which the step has made of this shard's.
    """

    name: str
    mixes: bool = False
    is_apart: bool = False

    @property
    def why(self) -> str:
        return f"rows of {self.name}"

    def look(self) -> None:
        """It looks at the rows of other shards.

        Raises:
            LooksAtRowsError: they are not known.
        """
        if self.is_apart:
            raise LooksAtRowsError(
                f"{self.name!r} looks at several rows of a batch that the model's own step has made of this device's "
                "rows. Compile the model with jit_compile=False, and let what it takes have the rows of the batch"
            )
        self.mixes = True


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
        is_alone = self.mixes.get(key) is False and key not in self._of_wholes
        if is_alone and self._found_in[key] != frame.number:
            return on_locals(frame, rest, args, kwargs)
        within = frame.region is not None
        if not within:
            own = self._constants()
            may_be_apart = frame.tells_losses and not frame.sees_rows
            if may_be_apart and not rows.least:
                # A rank without rows cannot tell a batch that the step has made from the step's.
                raise LooksAtRowsError(
                    f"{self.name!r} may look at several rows, and a device has none of this batch. Compile the model "
                    "with jit_compile=False"
                )
            if may_be_apart and (count := _rows_of_its_own(rows, own, args, kwargs)):
                return self._call_apart(frame, rest, count, own, args, kwargs)
            args, kwargs = (mapped(lambda x: _as_row_part(frame, rows, x, own), value) for value in (args, kwargs))
        region = Region(self.name, is_apart=frame.region is not None and frame.region.is_apart)
        with frame.looking(region):
            out = rest(*args, **kwargs)
        self.mixes[key] = self.mixes.get(key, False) or region.mixes
        self._found_in.setdefault(key, frame.number)
        if within:
            return out
        if not are_row_parts(args, kwargs):
            self._of_wholes.add(key)
        told = iter(self._have_rows())
        return mapped(lambda x: _as_local(frame, rows, x, next(told, None)), out)

    def _call_apart(self, frame: Frame, rest: Call, count: int, own: set[int], args: Any, kwargs: Any) -> Any:
        """Of `count` rows that a step of the user's own has made, as of two batches behind each other: each alone."""

        def apart(x: Any) -> Any:
            return RowPart.of(frame, x, count) if _may_have_rows(x, own) and x.shape[0] == count else x

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
        args, kwargs = (mapped(lambda x: _as_row_part(frame, rows, x, set()), value) for value in (args, kwargs))
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
        """Of each output whether it has a row for each of the batch, where a graph of Keras's says so."""
        nodes = getattr(self._subject(), "_inbound_nodes", ())
        return [x.shape[:1] == (None,) for x in nodes[0].output_tensors] if nodes else []


def can_begin(frame: Frame) -> bool:
    """Not where a few rows prove something else, or the whole batch is there already."""
    return (
        bool(frame.world.data_axes)
        and frame.trial is None
        and not frame.wide
        and not frame.gathered_loss
        and frame.inputs is None
        and str(get_device()) != "meta"
    )


def check_program(model: Any, call: Call, args: Any, kwargs: Any) -> None:
    """Calls a model once before it becomes a program, which computes with each shard's own rows alone.

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


def on_locals(frame: Frame, call: Call, args: Any, kwargs: Any) -> Any:
    """A call with this shard's rows of what has rows, outside of the region; its results have rows again."""
    if frame.region is None or frame.rows is None:
        return call(*args, **kwargs)  # there are no RowParts
    rows, parts = frame.rows, _of_kind(RowPart, args, kwargs)
    dims = {x.ndim for x in parts}
    if not parts and frame.sees_rows and _have_all_rows(rows, args, kwargs):
        dims = {x.ndim for x in _of_kind(torch.Tensor, args, kwargs)}
    if not dims:
        # The same on all ranks, and so are the random numbers.
        with frame.looking(None), frame.seeds_at(0):
            return call(*args, **kwargs)
    total = parts[0].shape[0] if parts else rows.total
    own = next((x.part.shape[0] for x in parts if x.part is not None), rows.local)
    local = functools.partial(_local, frame, total, dims)
    with frame.looking(None):
        out = call(*mapped(local, args), **mapped(local, kwargs))
    return mapped(lambda x: RowPart.of(frame, x, total) if _has_as_many(x, own) else x, out)


def with_own_rows(frame: Frame, call: Call, *args: Any) -> Any:
    """A call of arguments that all have rows with this shard's rows, in a step that sees those of all shards. Of wholes
    that have other numbers of rows, as two batches behind each other, it is called as on one device."""
    rows = frame.rows
    if rows is None or not (are_row_parts(args) or _have_all_rows(rows, args)):
        with frame.looking(None), frame.on_wholes():
            return call(*args)
    return on_locals(frame, call, mapped(lambda x: _cut_alike(frame, rows, x), args), {})


def are_row_parts(*values: Any) -> bool:
    """Whether there is a RowPart among the leaves."""
    return bool(_of_kind(RowPart, *values))


# tensors --------------------------------------------------------------------------------------------------------------


def _as_row_part(frame: Frame, rows: Rows, x: Any, constants: set[int]) -> Any:
    """Outside of a region a tensor with as many rows as this shard has is this shard's part."""
    is_own = _may_have_rows(x, constants) and x.shape[0] == rows.local
    return RowPart.of(frame, x, rows.total) if is_own else x


def _may_have_rows(x: Any, constants: set[int]) -> bool:
    is_other = id(x) in constants or isinstance(x, torch.nn.Parameter) or getattr(x, _ROWLESS, False)
    return isinstance(x, torch.Tensor) and x.ndim > 0 and not is_other


def _rows_of_its_own(rows: Rows, constants: set[int], *values: Any) -> int:
    """How many rows a batch has that is not the step's; 0: it is the step's, or there is none."""
    counts: list[int] = []
    mapped(lambda x: counts.append(x.shape[0]) if _may_have_rows(x, constants) else None, values)
    return 0 if not counts or rows.local in counts else max(counts)


def _as_local(frame: Frame, rows: Rows, x: Any, has_rows: bool | None = None) -> Any:
    """What leaves a region: this shard's rows of what has rows. None: what has as many as the batch has them."""
    if isinstance(x, RowPart) and x.part is not None:
        return _masked(frame, rows, x, x.part)
    whole = x.whole() if isinstance(x, RowPart) else x
    if not isinstance(whole, torch.Tensor) or not whole.ndim:
        return whole
    if whole.shape[0] == rows.total and has_rows is not False:
        return _masked(frame, rows, x, own_rows(frame, whole))
    setattr(whole, _ROWLESS, True)
    return whole


def _masked(frame: Frame, rows: Rows, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """This shard's rows, with those of the mask that Keras keeps on a tensor."""
    mask = get_keras_mask(x)
    if mask is not None:
        set_keras_mask(own, _as_local(frame, rows, mask))
    return own


def _local(frame: Frame, total: int, dims: set[int], x: Any) -> Any:
    """This shard's rows of what has rows: of RowParts, and of a whole tensor beside them that has as many dims."""
    if isinstance(x, RowPart):
        return x.part if x.part is not None else own_rows(frame, x.whole())
    is_whole = isinstance(x, torch.Tensor) and x.ndim in dims and x.shape[0] == total
    return own_rows(frame, x) if is_whole and not isinstance(x, torch.nn.Parameter) else x


def _cut_alike(frame: Frame, rows: Rows, x: Any) -> Any:
    is_whole = isinstance(x, torch.Tensor) and not isinstance(x, RowPart) and _has_as_many(x, rows.total)
    return RowPart.of(frame, own_rows(frame, x), rows.total) if is_whole else x


def _of_kind(kind: type[torch.Tensor], *values: Any) -> list[Any]:
    """The tensors of a kind among the leaves, but for those without dims."""
    found: list[Any] = []
    mapped(lambda x: found.append(x) if isinstance(x, kind) and x.ndim else None, values)
    return found


def _have_all_rows(rows: Rows, *values: Any) -> bool:
    """Whether all tensors that have dims have a row for each of the batch."""
    tensors = _of_kind(torch.Tensor, *values)
    return bool(tensors) and all(x.shape[0] == rows.total for x in tensors)


def _has_as_many(x: Any, rows: int) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] == rows


# losses ---------------------------------------------------------------------------------------------------------------


def is_known_loss(loss: Any) -> bool:
    """Whether a loss is one of Keras's that give a number for each row, of that row alone."""
    function = getattr(loss, "fn", None)
    if not is_of_keras(type(loss).call) or not (function is None or is_of_keras(function)):
        return False
    axis = getattr(loss, "_fn_kwargs", {}).get("axis", -1)
    return axis != 0 and getattr(function, "__name__", "") not in _MIXING_LOSSES


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
