"""Counts operations in a model's steps that gather, for no rule cuts them; warns of much gathering."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from unidist import events
from unidist.backends.torch.sharded.space import NO_RULE
from unidist.keras.torch.context import Frame

_log = logging.getLogger(__name__)
# A warning names an operation that gathers more than this part of a step's bytes.
MUCH = Fraction(1, 100)


def _gathered(here: Frame) -> Counter[str]:
    spaces = (space for (rank, _), space in list(here.world.spaces.items()) if rank == here.rank)
    return sum((space.gathers for space in spaces if space.gathers), Counter())


class Gathers:
    """Gathers of one model's steps.

    Attributes:
        counts: how often each operation has gathered, on the first rank of this process.
    """

    def __init__(self, model_name: str) -> None:
        self.counts: Counter[str] = Counter()
        self._model_name = model_name
        self._named: set[str] = set()
        # Bytes are counted in the first step, and in each behind one in which something gathered without a warning yet.
        self._is_due = True

    @contextlib.contextmanager
    def counted(self, here: Frame) -> Iterator[None]:
        """The gathers inside count, where the rank at work is the first."""
        before = _gathered(here)
        yield
        if here.rank == here.world.ranks[0] and (now := _gathered(here)):
            self.counts += now - before

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """A step of all ranks of this process."""
        before, sent = self.counts.copy(), list[events.Event]()
        is_heard = self._is_due and _log.isEnabledFor(logging.WARNING)
        with events.listen(sent.append) if is_heard else contextlib.nullcontext():
            yield
        self._tell(sent)
        self._is_due = any(name not in self._named for name in self.counts - before)

    def _tell(self, sent: list[events.Event]) -> None:
        total = sum(event.bytes for event in sent)
        gathered: dict[str, Fraction] = {}
        for event in sent:
            if event.purpose.startswith(NO_RULE):
                name = event.purpose.removeprefix(NO_RULE)
                gathered[name] = gathered.get(name, Fraction(0)) + event.bytes
        for name, part in gathered.items():
            if name in self._named or part <= MUCH * total:
                continue
            self._named.add(name)
            _log.warning(
                "model %r: no rule cuts the operation %r, so its operands were gathered: %.1f%% of the bytes that this "
                "device sent in a step. Give it fewer rows or numbers, write it with other operations (sums, products, "
                "comparisons), or tell the developers of unidist: describe(model).why counts such operations",
                *(self._model_name, name, 100 * part / total),
            )
