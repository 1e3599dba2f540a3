"""Begins, notes and watches every collective of a process, and reports where it breaks."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

from unidist import events
from unidist.algebra import Group
from unidist.backends import noting
from unidist.backends.torch.calls import Key, described
from unidist.backends.torch.lost import is_loss, reraise
from unidist.backends.torch.transports import Transport, Transports
from unidist.backends.torch.watch import Waiting, Watch
from unidist.errors import ProcessLostError, UnidistError
from unidist.flight.recorder import recorder


class Under(Waiting):
    """A call of this process: entered, it is begun, noted and watched, and gives its transport.

    What is raised inside because a peer is gone, or came to something else, is a ProcessLostError or a DesyncError. It
    may be entered again, to wait for the end.

    This process's record (unidist.flight) has an entry of it, until it is left; of one that goes on, until that is
    waited for. Over NCCL a call is left once it is queued. In a compiled program there are none.

    Without a watch it is not noted, and its key says nothing.

    Attributes:
        goes_on: whether it is under way when it is left, without an error.
    """

    __slots__ = ("_entry", "_transports", "_watch", "goes_on")

    def __init__(
        self, transports: Transports, watch: Watch | None, group: Group, key: Key, goes_on: bool = False
    ) -> None:
        self._transports, self._watch, self.group, self.key, self.goes_on = transports, watch, group, key, goes_on
        self.transport = None
        self._entry = 0

    def __enter__(self) -> Transport:
        watch, transport = self._watch, self.transport
        if transport is None:
            transport = self._transports.made.get(self.group.ranks)
            if transport is None:
                transport = self._transports(self.group, self._meet)
            self.transport = transport
            if watch is not None:
                self._begin(transport)
        elif self._entry:
            recorder.wait(self._entry)
        if watch is not None:
            watch.waiting[get_ident()] = self
        return transport

    def _begin(self, transport: Transport) -> None:
        calls = transport.calls
        self.number, kinds = calls.begin(self.key)
        self.purpose = purpose = events.purpose()
        kind = kinds.get(purpose)
        if kind is None:
            kind = kinds[purpose] = recorder.kind(_told(self.key, transport.ranks, purpose))
        self._entry = recorder.begin(kind)

    def _meet(self) -> None:
        if self._watch is not None:
            self._watch.meet(self.group, self.key)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._watch is not None:
            self._watch.waiting.pop(get_ident(), None)
        if self._entry and self.goes_on and error is None:
            self.goes_on = False
            recorder.go_on(self._entry)
        elif self._entry:
            recorder.end(self._entry, error is not None)
        if isinstance(error, RuntimeError):
            self._tell(error)

    def forget(self) -> None:
        """Nobody will wait for it: what started it has failed."""
        recorder.end(self._entry, failed=True)

    def _tell(self, error: RuntimeError) -> None:
        ranks, op, watch = self.group.ranks, str(self.key[0]), self._watch
        if watch is None or self.transport is None or isinstance(error, UnidistError) or not is_loss(error):
            reraise(error, op, ranks)
        found = watch.explained(ranks)
        if found is not None:
            watch.failed(found, self)
            raise found from error
        try:
            reraise(error, op, ranks)
        except ProcessLostError as lost:
            watch.failed(lost, self)
            raise


class InFlight:
    """A collective under way; `wait` may be called more than once."""

    def __init__(self, finish: Callable[[], object], call: Under) -> None:
        self._finish: Callable[[], object] | None = finish
        self._call = call

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            with self._call:
                finish()

    def __del__(self) -> None:
        if self._finish is not None:
            self._call.forget()


def _told(key: Key, ranks: tuple[int, ...], purpose: str) -> str:
    call = described(key)
    return noting.told(call.op, ranks, dtype=call.dtype, shape=call.shape, purpose=purpose)
