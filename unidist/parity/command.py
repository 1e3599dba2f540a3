"""The command: runs one function on one device and on each backend, and says where the numbers part."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from unidist.algebra.mesh import parse_mesh
from unidist.backends import registry
from unidist.backends.environment import without_launcher
from unidist.parity.report import Outcome, failed, read, report
from unidist.parity.spec import ParityError, Spec, check_target, parse_backends
from unidist.parity.worker import INITIAL, RESULT

TOLERANCE = 1e-5
STEPS = 5


def main(arguments: Sequence[str] = ()) -> int:
    """Compares.

    Returns:
        0; 1 where a run failed or its numbers differ.

    Raises:
        ParityError, MeshError: arguments that do not fit. BackendNotAvailableError: a backend is not installed.
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
    """The references, one for each Keras backend, then the backends."""
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
