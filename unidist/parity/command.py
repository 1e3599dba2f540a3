"""Runs one function on one device and on each backend, and says where the numbers part."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unidist.algebra.mesh import parse_mesh
from unidist.backends import registry
from unidist.backends.environment import without_launcher
from unidist.backends.protocol import Array
from unidist.parity.spec import ParityError, Spec, check_target, parse_backends
from unidist.parity.worker import INITIAL, RESULT
from unidist.tables import table

TOLERANCE = 1e-5
STEPS = 5
LOG_LINES = 25


def main(arguments: Sequence[str] = ()) -> int:
    """Compares.

    Returns:
        0; 1 where a run failed or its numbers differ.

    Raises:
        ParityError, MeshError: arguments that do not fit.
        BackendNotAvailableError: a backend is not installed.
    """
    options = _options(arguments)
    check_target(options.target)
    backends, mesh = parse_backends(options.backends), parse_mesh(options.mesh)
    if options.steps < 1:
        raise ParityError(f"--steps must be at least 1, found {options.steps}")
    for name, _ in backends:
        registry.find(name)
    with tempfile.TemporaryDirectory(prefix="unidist-parity-") as folder:
        outcomes = _compare(options, backends, mesh, Path(folder))
    text, good = report(outcomes, options.tolerance)
    print(text)
    return 0 if good else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="unidist parity",
        description="Trains by one function on one device and on each backend, and compares losses and weights after "
        "every step. The function calls fit of a keras.Model. One that takes no argument runs in the scope of a "
        "strategy for the mesh; one with a parameter gets the mesh (None on one device) and makes its own. All runs "
        "begin with the same weights and read their data in order.",
    )
    parser.add_argument("target", metavar="FILE.py:FUNCTION", help="the function that builds, compiles and fits")
    parser.add_argument(
        "--backends", default="sim,torch,jax", help="as sim,torch,jax or sim:jax (default: sim,torch,jax)"
    )
    parser.add_argument("--mesh", default="data=2", help="axes and sizes, as data=2,model=2 (default: data=2)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps to compare (default: {STEPS})")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"largest difference allowed (default: {TOLERANCE})"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one run may take (default: 600)")
    return parser.parse_args(list(arguments))


def _compare(
    options: argparse.Namespace, backends: list[tuple[str, str]], mesh: dict[str, int], folder: Path
) -> list[Outcome]:
    wanted: list[tuple[str | None, str]] = [(None, keras) for keras in dict.fromkeys(k for _, k in backends)]
    outcomes: list[Outcome] = []
    initial: str | None = None
    for number, (backend, keras) in enumerate([*wanted, *backends]):
        place = folder / str(number)
        place.mkdir()
        spec = Spec(
            target=options.target,
            backend=backend,
            keras=keras,
            mesh=mesh if backend is not None else {},
            steps=options.steps,
            initial=initial,
            folder=str(place),
        )
        outcome = _run(spec, options.timeout)
        outcomes.append(outcome)
        if initial is None:
            if outcome.failure:
                break
            initial = str(place / INITIAL)
    return outcomes


def _run(spec: Spec, timeout: float) -> Outcome:
    print(f"unidist parity: {spec.name}...", file=sys.stderr, flush=True)
    path = spec.write()
    work = ("-m", "unidist.parity.worker", str(path))
    command = [sys.executable, *work]
    if spec.backend is not None and spec.by_processes:
        launcher = ("-m", "unidist", "run", "--backend", spec.backend, "-n", str(spec.size))
        command = [sys.executable, *launcher, *work]
    environ = {**without_launcher(os.environ), "KERAS_BACKEND": spec.keras}
    environ.pop("UNIDIST_BACKEND", None)
    if spec.backend is not None:
        environ["UNIDIST_BACKEND"] = spec.backend
    log = Path(spec.folder) / "log"
    with log.open("wb") as out:
        try:
            done = subprocess.run(command, env=environ, stdout=out, stderr=subprocess.STDOUT, timeout=timeout)
        except subprocess.TimeoutExpired:
            return failed(spec, f"took longer than {timeout:g} s (--timeout)", log)
    if done.returncode or not (Path(spec.folder) / RESULT).exists():
        return failed(spec, f"exit code {done.returncode}", log)
    return read(spec)


# what came of it -----------------------------------------------------------------------------------------------------


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
    """Says how far a run is from its reference.

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
