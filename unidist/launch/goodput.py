"""Goodput: the share of a run's time since its first step in which it made steps that count.

What the rest was is counted too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unidist.flight.reading import Flight


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a run, or of an attempt.

    Attributes:
        all: from its beginning to its end.
        starting: until its first step began, where it is no restart. The goodput is that of the time after it.
        steps: in steps that count.
        lost: in steps that were made again, or were the last and in vain.
        data: waiting for data between steps.
        saving: writing checkpoints.
        restarting: from a failure to the next first step.
        count: steps that count.
        stood: steps that the training had made when this began; None where it made none.
    """

    all: float = 0.0
    starting: float = 0.0
    steps: float = 0.0
    lost: float = 0.0
    data: float = 0.0
    saving: float = 0.0
    restarting: float = 0.0
    count: int = 0
    stood: int | None = None

    def __add__(self, other: Spent) -> Spent:
        """Adds what followed to this.

        Where the training went on is what counted before. A process that is killed may not have noted its last
        checkpoint. One that was written in the background, or was taken away, may not either.
        """
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__ if name != "stood"}
        if self.stood is not None and other.stood is not None:
            sums["count"] += other.stood - (self.stood + self.count)
        return Spent(**sums, stood=other.stood if self.stood is None else self.stood)

    def __str__(self) -> str:
        trained = self.all - self.starting
        share = self.steps / trained if trained else 0.0
        parts = {
            "saving": self.saving,
            "restarting": self.restarting,
            "waiting for data": self.data,
            "in steps that were lost": self.lost,
        }
        rest = ", ".join(f"{seconds:.1f} s {what}" for what, seconds in parts.items())
        steps = f"{self.steps:.1f} s of {trained:.1f} s in {self.count} steps that count"
        return f"started in {self.starting:.1f} s, then goodput {share:.0%}: {steps}; {rest}"


def spent(flights: Mapping[int, Flight], begun: float, ended: float, *, is_restart: bool, has_failed: bool) -> Spent:
    """Returns what an attempt's time was spent on, by its first process.

    Its steps since the last checkpoint are lost where it has failed.
    """
    if not flights:
        return Spent(all=ended - begun, restarting=ended - begun if is_restart else 0.0)
    flight = flights[min(flights)]
    seconds = dict(flight.seconds)
    seconds[flight.phase] += max(0.0, min(ended, flight.beat) - flight.phase_began)
    kept = flight.kept if has_failed else flight.steps
    counted = kept / flight.steps if flight.steps else 0.0
    first = ended if flight.first_step_ended is None else flight.first_step_ended
    starting = 0.0 if is_restart or flight.first_step_began is None else flight.first_step_began - begun
    return Spent(
        all=ended - begun,
        starting=starting,
        steps=seconds["step"] * counted,
        lost=seconds["step"] * (1.0 - counted),
        data=seconds["data"],
        saving=seconds["saving"],
        restarting=first - begun if is_restart else 0.0,
        count=kept,
        stood=flight.resumed if flight.steps else None,
    )
