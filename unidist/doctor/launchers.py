"""The variables of launchers in the environment: those that contradict each other, or are halves of a pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unidist.backends import registry
from unidist.backends.environment import detect
from unidist.doctor.check import Check
from unidist.errors import BackendNotAvailableError

# Launcher -> what it sets together: some without the others mislead.
_SETS = {
    "torchrun": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "JAX": ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    "Horovod": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "torchrun (on one host)": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Horovod (on one host)": ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
}
# What may stand alone: a job script sets these for torchrun and for Slurm.
_ALONE = ({"MASTER_ADDR", "MASTER_PORT"}, {"MASTER_ADDR"}, {"MASTER_PORT"}, {"LOCAL_RANK"}, {"HOROVOD_LOCAL_RANK"})
_PLACES = (
    ("RANK", "WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_WORLDS = (
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("Horovod", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("JAX", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
_ASKED = "the variables that launchers set do not contradict each other"


def check(environ: Mapping[str, str]) -> list[Check]:
    """One failed check for each contradiction; else one that says which launcher is seen."""
    wrong = [*_halves(environ), *_beyond(environ), *_two_worlds(environ), *_backend(environ)]
    if wrong:
        return [
            Check(name="launcher", asked=_ASKED, status="failed", found=found, advice=advice) for found, advice in wrong
        ]
    try:
        launch = detect(environ)
    except BackendNotAvailableError as error:
        return [Check(name="launcher", asked=_ASKED, status="failed", found=str(error), advice="unset it")]
    found = "no launcher" if launch is None else f"{launch.launcher}: {launch.process_index} of {launch.process_count}"
    return [Check(name="launcher", asked=_ASKED, status="ok", found=found)]


def _halves(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for launcher, names in _SETS.items():
        there = [name for name in names if environ.get(name)]
        missing = [name for name in names if not environ.get(name)]
        if there and missing and set(there) not in _ALONE:
            said = ", ".join(f"{name}={environ[name]}" for name in there)
            yield (
                f"{said} without {', '.join(missing)}: half of what {launcher} sets",
                f"unset {' '.join(there)}, or start the program with its launcher, which sets all of them",
            )


def _beyond(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for place, count in _PLACES:
        if not (environ.get(place) and environ.get(count)):
            continue
        both = f"{place}={environ[place]}, {count}={environ[count]}"
        advice = f"unset {place} and {count}, or start the program with its launcher"
        numbers = [_number(environ[name]) for name in (place, count)]
        if None in numbers:
            yield f"{both}: these should be numbers", advice
        elif not 0 <= (numbers[0] or 0) < (numbers[1] or 0):
            yield f"{both}: a process's number must be one of 0..{(numbers[1] or 0) - 1}", advice


def _two_worlds(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Worlds of several launchers (outside Slurm, which starts them) that are not the same."""
    told = [(who, environ[size], environ[rank]) for who, size, rank in _WORLDS if size in environ and rank in environ]
    if len({world[1:] for world in told}) > 1:
        said = "; ".join(f"{who} says process {rank} of {size}" for who, size, rank in told)
        yield said, "unset what an earlier job has left: only the launcher that starts the program may have set any"


def _backend(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    name, keras = environ.get("UNIDIST_BACKEND"), environ.get("KERAS_BACKEND")
    known = registry.entries()
    if name and name not in known:
        yield f"UNIDIST_BACKEND={name}", f"set it to one of {', '.join(sorted(known))}, or unset it"
    elif name and keras:
        served = {"horovod": ("torch", "tensorflow"), "sim": ("torch", "jax", "tensorflow")}.get(name, (name,))
        if name in ("torch", "jax", "tensorflow", "horovod", "sim") and keras not in served:
            yield (
                f"UNIDIST_BACKEND={name}, KERAS_BACKEND={keras}: Keras must run on {' or '.join(served)}",
                "unset KERAS_BACKEND: unidist chooses it",
            )


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
