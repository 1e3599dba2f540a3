"""Programs: makes a model's call torch.compile's program, a graph each way (`jit_compile=True`).

torch.compile would look into Keras's and unidist's Python, which holds much that it cannot take, and break the step
into many programs. Here the whole call is entered into its graph as one function of the batch and the variables that
the rank holds; the call then runs once on stand-ins of them, and what it does to tensors is the program: collectives
included. Losses, metrics and the optimizer stay outside.

Where values are stored as shards over the data axes (ZeRO-3), each layer that has some is a program of its own, as one
compiles a model that FSDP wraps block by block: a program has all of its variables at once. They are fetched for it,
and let go behind it.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch
from torch._subclasses import fake_tensor

from unidist import events
from unidist.errors import CapabilityError
from unidist.keras.patching.compat import StatelessScope, get_keras_mask, set_keras_mask, tree
from unidist.keras.patching.layer_calls import Call, Stage
from unidist.keras.records import model_record
from unidist.keras.torch import context, structures
from unidist.keras.torch.calls import around_call
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params import output_ownership
from unidist.keras.torch.params.storage import Storage
from unidist.keras.torch.params.variables import DistributedVariable

_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
_ATTRIBUTE = "_unidist_programs"
# What cannot be computed without values.
_NOT_OF_STAND_INS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


def is_compiled(model: Any) -> bool:
    """Returns whether the model's call runs as a program, in a trainer's session."""
    return bool(getattr(model, "jit_compile", False))


def is_owner(layer: Any) -> bool:
    """Returns whether a program is the call of a layer."""
    return _ATTRIBUTE in vars(layer)


def install_programs(model: Any, backend: Any, *, by_layer: bool = False) -> None:
    """Lets the model be called by programs in a trainer's steps, while compiled with jit_compile=True.

    Args:
        model: the model.
        backend: whose collectives are in the programs.
        by_layer: each layer that has stored shards is a program, and not the model.

    Raises:
        CapabilityError: the backend's collectives cannot be part of a program.
    """
    if not backend.compiles:
        raise CapabilityError(
            f"jit_compile=True: the collectives of {backend.name!r} cannot be part of torch.compile's programs. "
            "Compile the model with jit_compile=False, or use('torch')"
        )
    for owner in _with_shards(model) if by_layer else (model,):
        if not is_owner(owner):
            _install(model, owner)


def _with_shards(model: Any) -> Iterator[Any]:
    """The layers of a model, and of the models in it, that have stored shards."""
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if isinstance(layer, keras.Model):
            yield from _with_shards(layer)
        elif any(not storage.is_kept for storage in _storages(layer)):
            yield layer


def _storages(layer: Any) -> list[Storage]:
    return [v._storage for v in layer.variables if isinstance(v, DistributedVariable)]


def _install(model: Any, owner: Any) -> None:
    """Lets the owner, the model or a layer of it, be called by programs."""
    programs: dict[Any, Program] = {}
    looked: dict[Any, list[torch.dtype | None]] = {}

    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        if not _is_in_a_step(frame) or context.infers_shapes() or not model.jit_compile:
            return rest(*args, **kwargs)
        shape, tensors = Shape((args, kwargs)), _with_masks((args, kwargs))
        seen = tuple((t.shape, t.dtype, t.requires_grad) for t in tensors)
        trained = tuple(v.trainable for v in owner.variables)
        kind = (frame.rank, torch.is_grad_enabled(), shape.key, trained)
        if (kind, seen) not in programs:
            programs[kind, seen] = Program(model, owner, rest, shape)
        program = programs[kind, seen]
        with program.variables(frame, looked.get(kind)) as held:
            # Once for all shapes: others may be new to some ranks alone, and the call may send.
            if kind not in looked:
                looked[kind] = program.look(frame, held, tensors)
            return output_ownership.owned(frame, program(frame, held, looked[kind], tensors))

    object.__setattr__(owner, _ATTRIBUTE, (programs, looked))
    around_call(owner, Stage.PROGRAM, inside)


def forget(model: Any) -> None:
    """The model has changed: its programs are made anew."""
    for owner in (model, *model._flatten_layers()):
        for known in vars(owner).get(_ATTRIBUTE, ()):
            known.clear()


def _is_in_a_step(frame: Frame) -> bool:
    """In a trainer's step, and not in a program already."""
    return frame.is_in_step and frame.inputs is None and not frame.is_whole


class Shape:
    """A structure of tensors and constants without the tensors: what they are put back into."""

    def __init__(self, structure: Any) -> None:
        self.structure = structures.emptied(structure)
        own = structures.tensors(structure)
        self.count = len(own)
        self.masked = tuple(k for k, t in enumerate(own) if get_keras_mask(t) is not None)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of a program: another one needs another program.

        Keys of dicts and classes of containers are in the text alone.
        """
        return (repr(self.structure), *((type(leaf), leaf) for leaf in tree.flatten(self.structure)), self.masked)

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The structure with tensors, and behind them the masks of some."""
        others = list(tensors[: self.count])
        for k, mask in zip(self.masked, tensors[self.count :], strict=True):
            set_keras_mask(others[k], mask)
        return structures.filled(self.structure, iter(others))


def _with_masks(structure: Any) -> list[torch.Tensor]:
    """The tensors of a structure, and behind them the masks of some."""
    tensors = structures.tensors(structure)
    masks = [get_keras_mask(t) for t in tensors]
    return [*tensors, *(mask for mask in masks if mask is not None)]


class Program:
    """The call of a model, or of a layer of it, for one structure and shape of its arguments. One a rank."""

    def __init__(self, model: Any, owner: Any, function: Callable[..., Any], given: Shape) -> None:
        self.function = function
        self.model, self.owner = model, owner
        self.layers = owner._flatten_layers()
        self.given = given
        self.storages = _storages(owner)
        self.out: Shape | None = None
        self.losers: list[Any] = []  # the layers that added losses, once for each
        self.sent: list[events.Event] = []
        _programs[id(self)] = self
        self.compiled = torch.compile(_entry(id(self)), fullgraph=True, dynamic=False)

    @contextlib.contextmanager
    def variables(self, frame: Frame, dtypes: Sequence[torch.dtype | None] | None) -> Iterator[list[torch.Tensor]]:
        """Gives what the call reads of the variables. Inside, what is fetched of them stays.

        Args:
            dtypes: what `look` gave; None before that.
        """
        with contextlib.ExitStack() as stack:
            for storage in self.storages:
                stack.enter_context(storage.in_use(frame))
            wanted = dtypes or [None] * len(self.storages)
            yield [storage.local(frame, dtype) for storage, dtype in zip(self.storages, wanted, strict=True)]

    def __call__(
        self,
        frame: Frame,
        held: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype | None],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Args: what `variables` and `look` gave, and the tensors of the arguments with their masks."""
        given = zip(self.storages, held, dtypes, strict=True)
        found = self._run([*(_cast(frame, *one) for one in given), *tensors])
        if self.out is None:
            raise RuntimeError("a compiled program that was never traced")
        for event in self.sent if events.listening() else ():
            events.emit(event)
        count = len(found) - len(self.losers)
        for layer, loss in zip(self.losers, found[count:], strict=True):
            layer._losses.append(loss)
        return self.out.filled(found[:count])

    def _run(self, tensors: Sequence[torch.Tensor]) -> Any:
        try:
            return self.compiled(*tensors)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> CapabilityError:
        kind = "model" if self.owner is self.model else "layer"
        return CapabilityError(
            f"jit_compile=True: torch.compile cannot make one program of the call of {kind} {self.owner.name!r}. "
            f"Compile the model with jit_compile=False. It said: {error}"
        )

    def look(
        self, frame: Frame, held: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[torch.dtype | None]:
        """Returns the dtype in which the call reads each fetched variable, where it always is another.

        None where it is the variable's own. Nothing is fetched for it.

        Raises:
            CapabilityError: it looks at several rows.
        """
        args, kwargs = self.given.filled(tensors)
        with self._given(frame, held):
            _check(self.model, self.function, args, kwargs)
        of_one_dtype = all(layer.compute_dtype == layer.variable_dtype for layer in self.layers)
        if of_one_dtype or all(storage.is_kept for storage in self.storages):
            return [None] * len(held)
        frame.reads = reads = dict[int, list[torch.dtype]]()
        with fake_tensor.FakeTensorMode() as fakes, torch.no_grad():
            stand_ins = tuple(fakes.from_tensor(tensor) for tensor in (*held, *tensors))
            try:
                self.trace(stand_ins)
            except _NOT_OF_STAND_INS as error:
                raise self._refused(error) from error
            finally:
                frame.reads = None
        return [_dtype_of(storage, reads.get(id(storage), ())) for storage in self.storages]

    @contextlib.contextmanager
    def _given(self, frame: Frame, held: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, the variables read as these."""
        frame.inputs = {id(storage): t for storage, t in zip(self.storages, held, strict=True)}
        try:
            yield
        finally:
            frame.inputs = None

    def trace(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The call on stand-ins of the variables and the arguments; its outputs, their masks and added losses."""
        frame = context.frame()
        if frame is None:
            raise RuntimeError("a program is traced outside of a step")
        count = len(self.storages)
        added = [len(layer._losses) for layer in self.layers]
        args, kwargs = self.given.filled(tensors[count:])
        try:
            frame.is_tracing = True
            with self._given(frame, tensors[:count]), frame.world.backend.into_program() as sent:
                out = self.function(*args, **kwargs)
            losses = [(layer, loss) for layer, n in zip(self.layers, added, strict=True) for loss in layer._losses[n:]]
        finally:
            frame.is_tracing = False
            for layer, n in zip(self.layers, added, strict=True):
                del layer._losses[n:]
        self.out, self.sent = Shape(out), sent
        self.losers = [layer for layer, _ in losses]
        return (*_with_masks(out), *(loss for _, loss in losses))


def _check(model: Any, call: Call, args: Any, kwargs: Any) -> None:
    """Calls a model, or a layer, once before it becomes a program, which computes with own rows alone.

    All ranks come to it together: the call may send.

    Raises:
        CapabilityError: a layer or an operation looks at several rows.
    """
    borders = model_record.of(model).engine.borders
    if not borders:
        return
    with torch.no_grad(), StatelessScope(collect_losses=True):
        call(*args, **kwargs)
    found = [border.name for border in borders if border.looks]
    if found:
        raise CapabilityError(
            f"jit_compile=True: {', '.join(map(repr, found))} of model {model.name!r} looks at several rows of a "
            "batch, which a program of each shard's rows cannot. Compile the model with jit_compile=False"
        )


def _dtype_of(storage: Storage, reads: Sequence[torch.dtype]) -> torch.dtype | None:
    own = next(iter(storage.leaves.values())).dtype
    return reads[0] if not storage.is_kept and len(set(reads)) == 1 and reads[0] != own else None


def _cast(frame: Frame, storage: Storage, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns what a program is given of a value: a fetched one in the dtype that it reads.

    A cast of its own it would keep for backward, whole.
    """
    if dtype is None or value.dtype == dtype:
        return value
    cast = value.to(dtype)
    storage.note_cast(frame, value, cast)
    return cast


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _run(number: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _programs[number].trace(tensors)


def _entry(number: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    def entry(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _run(number, *tensors)  # type: ignore[no-any-return]

    # torch.compile keeps its programs by the code object, a few for each: every one here has its own.
    return types.FunctionType(entry.__code__.replace(), entry.__globals__, closure=entry.__closure__)
