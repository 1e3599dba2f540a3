"""Paired timing: candidates take turns in every repetition, so that what else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Step = Callable[[], object]


def seconds(
    candidates: Mapping[str, Step], repetitions: int, *, steps: int = 1, meet: Step = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each candidate in each repetition, after one unmeasured turn. The order turns by one each time.

    Args:
        steps: calls of a candidate in a repetition.
        meet: called before and after them; where processes work together, a barrier.
    """
    names = list(candidates)
    found: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(-1, repetitions):
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            meet()
            began = time.perf_counter()
            for _ in range(steps):
                candidates[name]()
            meet()
            if repetition >= 0:
                found[name].append(time.perf_counter() - began)
    return found


def report(title: str, times: Mapping[str, list[float]], steps: int, bounds: Mapping[tuple[str, str], float]) -> None:
    """Prints each candidate's median time of a step, and the median of the paired ratios with its quartiles."""
    print(title)
    for name, values in times.items():
        print(f"  {name:32s} {statistics.median(values) / steps * 1000:8.2f} ms a step")
    for (left, right), bound in bounds.items():
        ratios = sorted(a / b for a, b in zip(times[left], times[right], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  {left} / {right}: {middle:.3f}  (quartiles {low:.3f} to {high:.3f}; wanted at most {bound:.2f})")
