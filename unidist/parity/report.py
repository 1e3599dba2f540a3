"""Reports a comparison: the losses side by side, and for each run the first variable that parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unidist.backends.protocol import Array
from unidist.parity.spec import Spec
from unidist.parity.worker import RESULT
from unidist.tables import table

LOG_LINES = 25


@dataclass(frozen=True)
class Outcome:
    """Holds what one run left: losses, and the weights after each step by `paths`; or why it failed."""

    spec: Spec
    losses: tuple[float, ...] = ()
    paths: tuple[str, ...] = ()
    weights: tuple[tuple[Array, ...], ...] = field(default=(), repr=False)
    failure: str = ""


@dataclass(frozen=True)
class Difference:
    """How far a run is from its reference.

    Attributes:
        loss, weight: the largest differences of any step.
        where: "" where all is within the tolerance, else the first variable that is not, with its step.
    """

    loss: float
    weight: float
    where: str


def read(spec: Spec) -> Outcome:
    with np.load(Path(spec.folder) / RESULT) as held:
        losses = tuple(float(x) for x in held["losses"])
        paths = tuple(str(p) for p in held["paths"])
        weights = tuple(tuple(held[f"w{step}_{k}"] for k in range(len(paths))) for step in range(len(losses)))
    return Outcome(spec, losses, paths, weights)


def failed(spec: Spec, why: str, log: Path) -> Outcome:
    said = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return Outcome(spec, failure="\n".join([why, *said]))


def compare(found: Outcome, wanted: Outcome, tolerance: float) -> Difference:
    """Compares a run with another by the order of their weights: names differ between processes."""
    shapes = [[w.shape for w in o.weights[0]] for o in (found, wanted)]
    if shapes[0] != shapes[1] or len(found.losses) != len(wanted.losses):
        return Difference(
            math.inf,
            math.inf,
            f"other weights or steps: {len(found.losses)} steps of {len(shapes[0])} weights, "
            f"the reference {len(wanted.losses)} of {len(shapes[1])}",
        )
    where, worst = "", 0.0
    for step, (mine, theirs) in enumerate(zip(found.weights, wanted.weights, strict=True), start=1):
        for path, a, b in zip(found.paths, mine, theirs, strict=True):
            gap = _gap(a, b)
            worst = max(worst, gap)
            if gap > tolerance and not where:
                where = f"{path} at step {step}: {gap:.1e}"
    loss = max(_gap(np.asarray(a), np.asarray(b)) for a, b in zip(found.losses, wanted.losses, strict=True))
    if loss > tolerance and not where:
        where = f"the loss: {loss:.1e}, with equal weights"
    return Difference(loss, worst, where)


def _gap(a: Array, b: Array) -> float:
    """The largest difference; what is not finite on one side alone is infinitely far."""
    left, right = np.asarray(a, "float64"), np.asarray(b, "float64")
    if not left.size:
        return 0.0
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(left - right))
    worst = float(gap.max())
    return worst if math.isfinite(worst) else math.inf


def report(outcomes: list[Outcome], tolerance: float) -> tuple[str, bool]:
    """(text for a terminal, whether all runs agree with one device)."""
    done = [o for o in outcomes if not o.failure]
    parts: list[str] = []
    good = len(done) == len(outcomes)
    if done:
        parts.append(_losses(done))
        first = done[0]
        rows: list[tuple[str, ...]] = [
            ("run", "devices", "largest difference of a loss", "of a weight", f"first beyond {tolerance:g}")
        ]
        for outcome in done:
            size = str(outcome.spec.size) if outcome.spec.backend else "1"
            if outcome is first:
                rows.append((outcome.spec.name, size, "-", "-", "the reference"))
                continue
            # Each is compared with one device on its own Keras backend; those with the first of them.
            own = next((o for o in done if o.spec.backend is None and o.spec.keras == outcome.spec.keras), first)
            found = compare(outcome, first if outcome.spec.backend is None else own, tolerance)
            good = good and not found.where
            rows.append((outcome.spec.name, size, f"{found.loss:.1e}", f"{found.weight:.1e}", found.where or "none"))
        parts.append(table(rows))
    parts += [f"{o.spec.name} failed: {o.failure}" for o in outcomes if o.failure]
    parts.append("all agree with one device" if good else "NOT the numbers of one device")
    return "\n\n".join(parts), good


def _losses(done: list[Outcome]) -> str:
    steps = max(len(o.losses) for o in done)
    rows: list[tuple[str, ...]] = [("loss after step", *(str(k + 1) for k in range(steps)))]
    rows += [(o.spec.name, *(f"{loss:.6f}" for loss in o.losses)) for o in done]
    return table([row + ("",) * (steps + 1 - len(row)) for row in rows])
