"""The ledger: what was communicated, observed in a run or predicted by a plan."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from types import ModuleType

from unidist import events, names
from unidist.events import Event
from unidist.tables import table


@dataclass
class Ledger:
    """The collectives of one rank of this process (virtual ranks: of rank 0), in order.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=4)
        >>> x = unidist.distribute(np.zeros(8, "float32"), unidist.Mesh({"data": 4}), ("data",))
        >>> with unidist.ledger() as traffic:
        ...     _ = unidist.all_gather(x, "data")
        >>> traffic.count("all_gather"), traffic.bytes()
        (1, 24)
    """

    events: list[Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def add(self, event: Event) -> None:
        """One more collective; any thread may call it."""
        with self._lock:
            self.events.append(event)

    def count(self, op: str | None = None, *, purpose: str | None = None) -> int:
        """Number of collectives, of one op or of all."""
        return sum(1 for _ in self._select(op, purpose))

    def bytes(self, op: str | None = None, *, purpose: str | None = None) -> int | float:
        """Bytes sent by the rank, by the ring bounds; exact, an int where it is whole."""
        total = sum((event.bytes for event in self._select(op, purpose)), Fraction(0))
        return total.numerator if total.denominator == 1 else float(total)

    def _select(self, op: str | None, purpose: str | None) -> Iterator[Event]:
        for event in self.events:
            if op in (None, event.op) and purpose in (None, event.purpose):
                yield event

    def rows(self) -> list[tuple[str, str, str, int, int | float]]:
        """(op, axes, purpose, count, bytes) for each kind of collective, in order of first appearance."""
        counts: Counter[tuple[str, str, str]] = Counter()
        sums: dict[tuple[str, str, str], Fraction] = {}
        for event in self.events:
            key = (event.op, ",".join(event.axes), event.purpose)
            counts[key] += 1
            sums[key] = sums.get(key, Fraction(0)) + event.bytes
        return [(*key, counts[key], s.numerator if s.denominator == 1 else float(s)) for key, s in sums.items()]

    def show(self) -> str:
        """A table of text: op, axes, purpose, count, bytes per rank.

        A purpose is a layer, a variable, an operation without a rule, or a part of the training: "first weights",
        "gradient", "metrics", "logs", or "agreement", where processes compare what they are about to do.
        """
        head = ("collective", "axes", "for", "count", "bytes per rank")
        body = [(op, axes, why, f"{n:,}", f"{b:,}") for op, axes, why, n, b in self.rows()]
        body.append(("total", "", "", f"{self.count():,}", f"{self.bytes():,}"))
        return table((head, *body), numbers=(3, 4))

    def _repr_svg_(self) -> str | None:
        return names.shown(self, "svg")

    def _repr_html_(self) -> str | None:
        return names.shown(self, "html")


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    """Records the collectives of this process while the context is open: gives a Ledger, which counts.

    Bytes are those that the rank sends, by the ring bounds; what was measured on a wire is in no ledger.

    Example:
        >>> import numpy as np, unidist
        >>> _ = unidist.use("sim", devices=4)
        >>> x = unidist.distribute(np.zeros(8, "float32"), unidist.Mesh({"data": 4}), ("data",))
        >>> with unidist.ledger() as traffic:
        ...     _ = unidist.all_gather(x, "data")
        >>> print(traffic.show())
        collective  axes  for  count  bytes per rank
        all_gather  data           1              24
        total                      1              24
    """
    book = Ledger()
    with events.listen(book.add):
        yield book


class _CallableModule(ModuleType):
    """Once this module is imported, `unidist.ledger` names it, and must still be the function."""

    def __call__(self) -> contextlib.AbstractContextManager[Ledger]:
        return ledger()


sys.modules[__name__].__class__ = _CallableModule
