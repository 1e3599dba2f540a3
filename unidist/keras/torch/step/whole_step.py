"""Traces a step of Keras's trainer once, into one program of tensors (`jit_compile=True`).

The step runs once on stand-ins of all variables and of the batch. What it does to tensors is the program: forward,
losses, metrics, backward, the sums of gradients, the optimizer, the states of random numbers. Each later step runs the
program alone, and no Python of Keras's, unidist's or the model's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from unidist import events
from unidist.keras.patching.compat import get_device, torch_core, tree
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.torch import context
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params.param_groups import Fetcher
from unidist.keras.torch.params.storage import Storage
from unidist.keras.torch.step.graphs import prepared, take_unused, written_inputs
from unidist.keras.torch.structures import emptied, filled, tensors

Tensor = torch.Tensor
# The trace that is going on.
_trace: ContextVar[_Trace | None] = ContextVar("unidist_trace", default=None)
# Of torch's compiler: what is begun stays where the trace begins it, amid backward. Its order for the least memory (on
# by default in torch 2.13) puts each collective beside its wait.
IN_TRACED_ORDER: dict[str, Any] = {"reorder_for_peak_memory": False}
# How far a program's step may be from the eager one, in parts of the length of the step.
TOLERANCE = 1e-3
# Gradients below this part of the largest one are rounding.
NOISE = 1e-5


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace that is going on, with what stands for the variables."""

    held: Sequence[Tensor]
    frame: Frame
    fetcher: Fetcher

    def settle(self) -> None:
        self.frame.put_back(list(self.frame.away))
        self.fetcher.settle()


class StepProgram:
    """A step of a model as one program, for one structure and shape of its batch.

    Args:
        frame: the rank at work.
        storages: the variables that the step may read or write; each is one parameter. All are compared in proofs, and
            the program keeps those that it uses.
        trained: those whose gradients are reduced.
        owners: the objects of Keras that a step may leave tensors on.
        slots: the variables of the optimizer.

    Attributes:
        graph: takes the variables' values and the batch's tensors. It writes the values in place, and gives the
            outputs.
        sent: what each run sends.
        runs: how often it has run. proofs: how often beside the step.
    """

    def __init__(
        self,
        frame: Frame,
        storages: Sequence[Storage],
        trained: Sequence[Storage],
        slots: Sequence[Storage],
        owners: Sequence[Any],
    ) -> None:
        self._rank, self._world = frame.rank, frame.world
        self._storages = self._used = list(storages)
        self._trained = list(trained)
        self._slots = {id(one) for one in slots}
        self._owners = list(owners)
        self._losers: list[Any] = []  # the layers that added losses, once for each
        self._out: Any = None  # what it gives, and what it leaves under way
        self.sent: list[events.Event] = []
        self.graph: Any = None
        self.proofs = self.runs = 0
        self._compiled: Callable[..., list[Tensor]] | None = None

    def trace(
        self,
        frame: Frame,
        step: Callable[[Frame, Any], Any],
        batch: Any,
        carried: Any,
        moving: Callable[[Frame, Any], AbstractContextManager[Fetcher]],
    ) -> None:
        """Traces step(frame, batch). No value of a variable changes.

        Args:
            carried: what passes to the step beside variables and batch.
            moving: of a frame and of what stands for `carried`, gives in what gradients and values move.

        Raises:
            CapabilityError: the step writes to a tensor that belongs to no placed variable.
            Exception: whatever the step raises where a tensor has no value.
        """
        count = len(self._storages)
        rows = emptied((batch, carried))

        def run(*values: Tensor) -> list[Tensor]:
            given, own_carried = filled(rows, iter(values[count:]))
            with (
                _at_work(frame) as own,
                _standing_in(own, self._storages, values[:count]) as held,
                moving(own, own_carried) as fetcher,
                _tracing(_Trace(held, own, fetcher)),
            ):
                out = step(own, given), fetcher.left()
            losses = [(owner, x) for owner in self._owners for x in getattr(owner, "_losses", ()) if _is_fake(x)]
            self._losers = [owner for owner, _ in losses]
            self._out = out
            return [*tensors(out), *(loss for _, loss in losses)]

        with _put_back(self._owners), frame.world.backend.into_program() as self.sent:
            values = [*self._values(self._storages), *tensors((batch, carried))]
            self.graph = prepared(make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*values))
        self._used = [self._storages[k] for k in take_unused(self.graph, count)]
        # What the outputs stand for is not kept: they belong to the trace.
        self._out = emptied(self._out)

    def compile(self) -> None:
        """Lets runs be those of torch.compile's program."""
        self._storages = self._used
        options = IN_TRACED_ORDER if self.sent else None
        self._compiled = torch.compile(self.graph, dynamic=False, options=options)

    def leave_uncompiled(self) -> None:
        """Lets runs be those of the graph as it was traced."""
        self._compiled = self.graph

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def __call__(self, batch: Any, carried: Any) -> tuple[Any, list[list[Tensor]]]:
        """One step, which writes variables and waiting gradients.

        Returns its outputs, and the values that it leaves under way.
        """
        out = self.run(batch, carried)
        for event in self.sent if events.listening() else ():
            events.emit(event)
        return out

    def run(self, batch: Any, carried: Any) -> tuple[Any, list[list[Tensor]]]:
        """A step of which no ledger hears."""
        self.runs += 1
        run = self.graph if self._compiled is None else self._compiled
        with torch.no_grad(), self._sending():
            found = iter(run(*self._values(self._used), *tensors((batch, carried))))
        out, left = filled(self._out, found)
        for owner in dict.fromkeys(self._losers):
            owner._losses.clear()
        for owner in self._losers:
            owner._losses.append(next(found))
        return out, left

    def _sending(self) -> AbstractContextManager[object]:
        group = self._world.mesh.group(self._world.mesh.axis_names, self._rank)
        return self._world.backend.in_program(group) if self.sent else contextlib.nullcontext()

    def apart(self, before: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[str]:
        """Returns the paths of the variables that a step and the program have changed in other ways.

        Where a gradient is mere rounding, an optimizer makes of it a step in any direction: such elements are not
        compared.

        Args:
            before: all values before the step. wanted: as the step left them.
        """
        counting = self._counting()
        slots = [x for x, one in zip(wanted, self._storages, strict=True) if id(one) in self._slots]
        scale = max((float(x.norm()) for x in slots if x.is_floating_point()), default=0.0)
        apart = []
        for storage, found, *kept in zip(self._storages, self._values(self._storages), before, wanted, strict=True):
            old, new, other = of_one = [x.detach().to(found.device) for x in (*kept, found)]
            counts = counting.get(id(storage))
            if counts is not None:
                old, new, other = (x[counts] for x in of_one)
            if not is_close(old, new, other, NOISE * scale if id(storage) in self._slots else 0.0):
                apart.append(storage.path)
        return apart

    def _counting(self) -> dict[int, Tensor]:
        """Id of a trained variable -> which elements of what is stored have a gradient that is no rounding."""
        grads = {one: one.states[self._rank].grad for one in self._trained}
        largest = max((float(g.abs().max()) for g in grads.values() if g is not None and g.numel()), default=0.0)
        found = {}
        for storage, grad in grads.items():
            if grad is not None:
                found[id(storage)] = storage.as_stored(self._rank, grad.abs() > NOISE * largest)
        return found

    def values(self) -> list[Tensor]:
        """Returns copies of all values, in the host's memory."""
        return [value.detach().to("cpu", copy=True) for value in self._values(self._storages)]

    def put(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for value, new in zip(self._values(self._storages), values, strict=True):
                value.copy_(new)

    def _values(self, storages: Sequence[Storage]) -> list[Tensor]:
        return [storage.shards[self._rank] for storage in storages]


def is_close(before: Tensor, wanted: Tensor, found: Tensor, least: float = 0.0) -> bool:
    """Returns whether a value was changed alike, to rounding.

    Distances are taken beside the length of the change, and of the value; `least` is one that does not count.
    """
    if not wanted.is_floating_point() and not wanted.is_complex():
        return bool(torch.equal(wanted, found))
    rounding = 64 * torch.finfo(wanted.dtype).eps
    before, wanted, found = (_in_doubles(x) for x in (before, wanted, found))
    length, size = torch.linalg.vector_norm(wanted - before), torch.linalg.vector_norm(wanted)
    return bool(torch.linalg.vector_norm(wanted - found) <= TOLERANCE * length + rounding * size + least)


def _in_doubles(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.detach().to(torch.complex128 if x.is_complex() else torch.float64))


@contextlib.contextmanager
def _standing_in(frame: Frame, storages: Sequence[Storage], values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    with contextlib.ExitStack() as stack:
        pairs = zip(storages, values, strict=True)
        held = [stack.enter_context(one.standing_in(frame.rank, x)) for one, x in pairs]
        stack.enter_context(frame.bringing_home())
        yield [*held]


@contextlib.contextmanager
def _tracing(trace: _Trace) -> Iterator[None]:
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)


@contextlib.contextmanager
def _put_back(owners: Sequence[Any]) -> Iterator[None]:
    """Puts back what a trace leaves on layers, metrics, losses and the optimizer."""
    before = [dict(vars(owner)) for owner in owners]
    lists = [list(getattr(owner, "_losses", ())) for owner in owners]
    try:
        yield
    finally:
        for owner, held, losses in zip(owners, before, lists, strict=True):
            for name in [name for name, x in vars(owner).items() if x is not held.get(name) and _holds_fakes(x)]:
                if name in held:
                    vars(owner)[name] = held[name]
                else:
                    del vars(owner)[name]
            if losses or getattr(owner, "_losses", None):
                owner._losses.clear()
                owner._losses.extend(losses)


def _is_fake(x: Any) -> bool:
    return isinstance(getattr(x, "local", x), FakeTensor)


def _holds_fakes(x: Any) -> bool:
    return any(map(_is_fake, tree.flatten(x))) if isinstance(x, (list, tuple, dict)) else _is_fake(x)


def hooks() -> Iterator[Hook]:
    yield Hook(torch_core, "cond", calling(_cond), "a program has both branches", imported=True)
    yield Hook(torch_core, "scatter", calling(_scatter), "a program reads no index", imported=True)


def _cond(original: Any, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """Both branches in a program: of what they give and write, it takes one's."""
    trace = _trace.get()
    if trace is None or not isinstance(pred, Tensor):
        return original(pred, true_fn, false_fn)
    trace.settle()
    held = trace.held
    before = [x.detach().clone() for x in held]
    if_true, written = _branch(true_fn, trace, before)
    if_false, other = _branch(false_fn, trace, before)
    with torch.no_grad():
        for k in {**written, **other}:
            held[k].copy_(torch.where(pred.to(held[k].device), written.get(k, before[k]), other.get(k, before[k])))
    return tree.map_structure(lambda x, y: x if x is None else torch.where(pred, x, y), if_true, if_false)


def _scatter(original: Any, indices: Any, values: Any, shape: Any) -> Any:
    """Adds values at their indices by one operation, where Keras's loop reads each index."""
    if _trace.get() is None:
        return original(indices, values, shape)
    indices, values = torch_core.convert_to_tensor(indices), torch_core.convert_to_tensor(values)
    depth = indices.shape[-1]
    rows, given = indices.reshape(-1, depth).long(), values.reshape(-1, *shape[depth:])
    zeros = torch.zeros(tuple(shape), dtype=values.dtype, device=get_device())
    return zeros.index_put(tuple(rows.unbind(-1)), given, accumulate=True)


def _branch(branch: Callable[[], Any], trace: _Trace, before: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
    """Returns what a branch gives, and number -> value of the variables that it writes.

    They are put back.
    """
    graph, held = _graph(), trace.held
    since = len(graph.nodes)
    out = branch()
    trace.settle()
    changed = [k for k in written_inputs(graph, since) if k < len(held)]
    written = {k: held[k].detach().clone() for k in changed}
    with torch.no_grad():
        for k in changed:
            held[k].copy_(before[k])
    return out, written


def _graph() -> Graph:
    mode = get_proxy_mode()
    if mode is None:
        raise RuntimeError("a program is traced by make_fx")
    return mode.tracer.graph


@contextlib.contextmanager
def _at_work(frame: Frame) -> Iterator[Frame]:
    """A rank that traces, and leaves nothing on the frame of the rank at work."""
    own = frame.world.frame_for(frame.rank)
    own.rows, own.own_step, own.exact = frame.rows, frame.own_step, frame.exact
    own.is_tracing = True
    with context.entered(own):
        yield own
