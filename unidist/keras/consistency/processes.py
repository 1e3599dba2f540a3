"""Processes that train a model together: what the first has, what each says, and who failed.

All of it is made of two collectives that a driver gives: the first process's array, and every process's number.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from unidist.backends.protocol import Array
from unidist.errors import DesyncError, UnidistError
from unidist.keras import seeds


class SavingFailedError(UnidistError, OSError):
    """Process 0, which writes for all, could not save."""


class LoadingFailedError(UnidistError, OSError):
    """Another process could not load what all of them were to load."""


@dataclass(frozen=True)
class Processes:
    """Several processes. Whatever is said here is a collective of all of them.

    Attributes:
        place: of this process among them. The first one writes files and shows progress.
        ranks: of each place's devices.
        of_first: (array, purpose) -> the first process's array, on every process. All give one of the same shape and
            dtype, int32 or uint8.
        of_all: (number, purpose) -> every process's number, a whole one of 31 bits or -1 or -2, by place.

    Example:
        >>> alone = Processes(0, ((0,),), lambda array, purpose: array, lambda number, purpose: (number,))
        >>> alone.bytes_of_first(b"seed", "an example")
        b'seed'
    """

    place: int
    ranks: tuple[tuple[int, ...], ...]
    of_first: Callable[[Array, str], Array]
    of_all: Callable[[int, str], tuple[int, ...]]

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.place == 0

    @property
    def firsts(self) -> tuple[int, ...]:
        """A rank of each process."""
        return tuple(ranks[0] for ranks in self.ranks)

    def bytes_of_first(self, data: bytes, purpose: str) -> bytes:
        """The first process's bytes. Two broadcasts: of their mark, length and checksum, then of them.

        Args:
            data: of the first process; what others give is not looked at.
            purpose: what they are for.

        Raises:
            DesyncError: what came is not what the first process sent.
        """
        own = np.frombuffer(data if self.is_first else b"", np.uint8)
        # Only the first process's has the mark, so that another's is known for what it is.
        announced = np.array([self.is_first, len(own), _checksum(data) if self.is_first else 0], np.int32)
        came = np.asarray(self.of_first(announced, purpose))
        wrong = came.shape != announced.shape or came[0] != 1 or came[1] < 0
        if wrong or (self.is_first and (came != announced).any()):
            raise self._changed(f"{came.tolist()} in place of its announcement")
        length, checksum = int(came[1]), int(came[2])
        if not length:
            return b""
        given = own if self.is_first else np.zeros(length, np.uint8)
        found = np.asarray(self.of_first(given, purpose)).tobytes()
        if len(found) != length or _checksum(found) != checksum:
            raise self._changed(f"{len(found)} bytes, other than the {length} that it announced")
        return found

    def _changed(self, found: str) -> DesyncError:
        ranks = self.ranks[self.place]
        return DesyncError(
            f"rank {', '.join(map(str, ranks))}: broadcast of the first process's bytes: {found} came. Every process "
            "must come to the same calls in the same order: look at the output of the others for one that went "
            "another way, then start all processes again",
            ranks=ranks,
            collective="broadcast",
        )

    def hold_alike(self, data: bytes, purpose: str) -> bool:
        """Returns whether all gave the same bytes, by their checksums."""
        return len(set(self.of_all(_checksum(data), purpose))) == 1

    def align_seeds(self) -> None:
        """All go on with the first process's random state, so that seeds and shuffles agree."""
        seeds.restore(self.bytes_of_first(seeds.state(), "random state"))

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Waits for the first process, which saves inside.

        Raises:
            SavingFailedError: on the others, where it could not.
        """
        failure = ""
        try:
            yield
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            told = self.bytes_of_first(failure.encode(), "process 0's report on its files").decode()
        if told:
            raise SavingFailedError(f"process 0 could not save for all: {told}")

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Waits for all; each loads inside.

        Raises:
            LoadingFailedError: on those that could, where another could not.
        """
        try:
            yield
        except BaseException:
            self.of_all(1, "agreement")
            raise
        numbers = self.of_all(0, "agreement")
        if failed := [rank for rank, number in zip(self.firsts, numbers, strict=True) if number]:
            raise LoadingFailedError(
                f"ranks {failed} could not load (their own output says why), and this one could. Every process reads "
                "the file by itself: put it where all of them can read it"
            )


def _checksum(data: bytes) -> int:
    """31 bits, which an int32 holds."""
    return zlib.crc32(data) & 0x7FFFFFFF


# One process by itself.
ALONE = Processes(0, ((0,),), lambda array, purpose: array, lambda number, purpose: (number,))
# Those of the entrance of Keras's trainer that is under way; None where one process trains alone.
taking_part: ContextVar[Processes | None] = ContextVar("unidist_taking_part", default=None)
