"""Finds variables of launchers in the environment that contradict each other or are half a pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unidist.backends import registry
from unidist.backends.environment import detect, launchers
from unidist.doctor.check import Check, Question
from unidist.errors import BackendNotAvailableError

_QUESTION = Question("launcher", "the variables that launchers set do not contradict each other")


def check(environ: Mapping[str, str]) -> list[Check]:
    """One failed check for each contradiction; else one that says which launcher is seen."""
    wrong = [*_halves(environ), *_beyond(environ), *_two_worlds(environ), *_backend(environ)]
    if wrong:
        return [_QUESTION.failed(found, advice) for found, advice in wrong]
    try:
        launch = detect(environ)
    except BackendNotAvailableError as error:
        return [_QUESTION.failed(str(error), "unset it")]
    found = "no launcher" if launch is None else f"{launch.launcher}: {launch.process_index} of {launch.process_count}"
    return [_QUESTION.ok(found)]


def _halves(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for launcher in launchers().values():
        on_one_host = tuple(filter(None, (launcher.local_index, launcher.local_count)))
        # A job script sets an address of two variables for torchrun and for Slurm.
        address = launcher.address if len(launcher.address) > 1 else ()
        for names, alone, where in (
            ((*launcher.always, *address), address, ""),
            (on_one_host, on_one_host[:1], " on one host"),
        ):
            there = [name for name in names if environ.get(name)]
            missing = [name for name in names if not environ.get(name)]
            if not missing or set(there) <= set(alone):
                continue
            said = ", ".join(f"{name}={environ[name]}" for name in there)
            yield (
                f"{said} without {', '.join(missing)}: half of what {launcher.name} sets{where}",
                f"unset {' '.join(there)}, or start the program with its launcher, which sets all of them",
            )


def _beyond(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    places = [(one.index, one.count) for one in launchers().values()]
    places += [(one.local_index, one.local_count) for one in launchers().values()]
    for place, count in (*places, ("SLURM_PROCID", "SLURM_NTASKS")):
        if not (environ.get(place) and environ.get(count)):
            continue
        both = f"{place}={environ[place]}, {count}={environ[count]}"
        advice = f"unset {place} and {count}, or start the program with its launcher"
        try:
            index, size = int(environ[place]), int(environ[count])
        except ValueError:
            yield f"{both}: these should be numbers", advice
            continue
        if not 0 <= index < size:
            yield f"{both}: a process's number must be one of 0..{size - 1}", advice


def _two_worlds(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Worlds of several launchers (outside Slurm, which starts them) that are not the same."""
    told = [
        (one.name, environ[one.count], environ[one.index])
        for one in launchers().values()
        if one.count in environ and one.index in environ
    ]
    if len({world[1:] for world in told}) > 1:
        said = "; ".join(f"{who} says process {rank} of {size}" for who, size, rank in told)
        yield said, "unset what an earlier job has left: only the launcher that starts the program may have set any"


def _backend(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    name, keras = environ.get("UNIDIST_BACKEND"), environ.get("KERAS_BACKEND")
    if not name:
        return
    try:
        served = registry.entry(name).keras_backends
    except BackendNotAvailableError as error:
        yield f"UNIDIST_BACKEND={name}: {error}", f"set it to one of {', '.join(sorted(registry.names()))}, or unset it"
        return
    if keras and served and keras not in served:
        yield (
            f"UNIDIST_BACKEND={name}, KERAS_BACKEND={keras}: Keras must run on {' or '.join(served)}",
            "unset KERAS_BACKEND: unidist chooses it",
        )
