"""The registry: names to adapters. The one in use is in global_state.py, and can be asked for here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

from unidist import namesake
from unidist.algebra.checks import whole_number
from unidist.backends import environment, global_state, installed, on_keras
from unidist.backends.entry import Entry as Entry
from unidist.backends.global_state import current as current
from unidist.backends.global_state import has_current as has_current
from unidist.backends.global_state import has_joined as has_joined
from unidist.backends.global_state import in_use as in_use
from unidist.backends.global_state import initialize as initialize
from unidist.backends.global_state import isolated as isolated
from unidist.backends.global_state import shutdown as shutdown
from unidist.backends.installed import is_newer as is_newer
from unidist.backends.installed import version_of as version_of
from unidist.backends.protocol import Capabilities, Cluster, DistributionBackend
from unidist.errors import BackendNotAvailableError, CapabilityError, MeshError

ENTRY_POINTS = "unidist.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """Holds what `unidist.backends()` shows of one backend. `capabilities` is None if not installed."""

    name: str
    installed: bool
    version: str | None
    view: Literal["local", "global"] | None
    capabilities: Capabilities | None
    hint: str


_entries: dict[str, Entry] = {
    "sim": Entry(
        target="unidist.backends.sim.backend:SimBackend",
        keras_backends=("torch", "jax", "tensorflow"),
        virtual=True,
        one_device=False,
    ),
    "torch": Entry(
        target="unidist.backends.torch.backend:TorchBackend",
        hint=installed.install("torch"),
        requires=("torch",),
        tested=("2.13", "2.14", "2.15"),
        keras_backends=("torch",),
        job="unidist.launch.jobs:TorchProcesses",
        accelerators=True,
    ),
    "jax": Entry(
        target="unidist.backends.jax.backend:JaxBackend",
        hint=installed.install("jax"),
        requires=("jax",),
        tested=("0.10",),
        keras_backends=("jax",),
        one_device=False,
        launcher=environment.JAX,
        job="unidist.launch.jobs:JaxProcesses",
        accelerators=True,
        over_grpc=True,
    ),
    "tensorflow": Entry(
        target="unidist.backends.tensorflow.backend:TensorflowBackend",
        hint=installed.install("tensorflow"),
        requires=("tensorflow",),
        tested=("2.21",),
        keras_backends=("tensorflow",),
        one_device=False,
        job="unidist.launch.jobs:Clients",
        accelerators=True,
        over_grpc=True,
        all_take_part=True,
    ),
    "horovod": Entry(
        target="unidist.backends.horovod.backend:HorovodBackend",
        hint="Horovod is source only: ci/install_horovod.sh PYTHON builds it, beside Keras and torch or TensorFlow "
        f"({installed.install('torch')}; docs/horovod.md)",
        requires=("horovod",),
        tested=("0.28",),
        keras_backends=("torch", "tensorflow"),
        keras_option="framework",
        drivers={"tensorflow": "unidist.keras.tensorflow_horovod"},
        launcher=environment.HOROVOD,
        job="unidist.launch.jobs:HorovodProcesses",
        all_take_part=True,
    ),
}


def register(name: str, target: str, **declared: Any) -> None:
    """Adds a third party's adapter.

    Args:
        name: what `unidist.use` will call it.
        target: "package.module:Class" of a DistributionBackend, constructed as `Class(devices=..., **options)`.
        declared: further fields of its `Entry`, as hint, requires and keras_backends.

    Raises:
        BackendNotAvailableError: the target or the job is not "package.module:Class", or an Entry has no such field.

    Example:
        >>> import unidist
        >>> unidist.register("mine", "mine.backend:MineBackend", requires=("mine",), hint="pip install mine")
        >>> unidist.backends()["mine"].hint
        "backend 'mine' needs mine: pip install mine"
    """
    known = [one.name for one in fields(Entry) if one.name != "target"]
    if unknown := [one for one in declared if one not in known]:
        raise BackendNotAvailableError(
            f"register({name!r}): an Entry has no field {', '.join(unknown)}; it has {', '.join(known)}"
        )
    _entries[name] = _learnt(Entry(target=target, **declared))


def _learnt(entry: Entry) -> Entry:
    if entry.launcher is not None:
        environment.learn(entry.launcher)
    return entry


def _points() -> dict[str, importlib.metadata.EntryPoint]:
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point for point in found if point.name not in _entries}


def names() -> list[str]:
    """The built-in and registered adapters, then those of installed entry points. Imports none of them."""
    return [*_entries, *_points()]


def entry(name: str) -> Entry:
    """The entry of an adapter, without importing it.

    An entry point names the adapter's class or, in capitals as a constant is, its Entry: that is imported.

    Raises:
        BackendNotAvailableError: an unknown name, or the Entry cannot be imported.
    """
    if name in _entries:
        return _entries[name]
    point = _points().get(name)
    if point is None:
        where = " (UNIDIST_BACKEND)" if os.environ.get("UNIDIST_BACKEND") == name else ""
        raise BackendNotAvailableError(
            f"unknown backend {name!r}{where}: one of {sorted(names())}, or add yours with unidist.register(...)"
            f"{namesake.told(name)}"
        )
    home = _home(point)
    found = _imported(name, point.value, f"pip install {home}") if point.attr.isupper() else None
    if not isinstance(found, Entry):
        found = Entry(target=point.value)
    return _learnt(replace(found, hint=found.hint or f"pip install {home}", distribution=found.distribution or home))


def _home(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def distributions() -> dict[str, str]:
    """Distribution -> how to install it, of all adapters. Imports none of them."""
    own = {_distribution(one): one.hint for one in _entries.values()}
    theirs = {_home(point): "" for point in _points().values()}
    return {home: hint for home, hint in {**own, **theirs}.items() if home}


def _distribution(entry: Entry) -> str:
    return entry.distribution or next(iter(entry.requires), "")


def tested(distribution: str) -> tuple[str, ...]:
    """Returns the versions of a distribution that unidist was tested with, oldest first; () if unknown."""
    return next((one.tested for one in _entries.values() if _distribution(one) == distribution), ())


def untested(name: str) -> str:
    """Returns a sentence where an adapter's framework is newer than all that were tested; else ""."""
    found = entry(name)
    version = version_of(home := _distribution(found)) if found.tested else None
    if version is None or not is_newer(version, found.tested):
        return ""
    return f"{home} {version} is newer than the versions that unidist was tested with: {', '.join(found.tested)}"


def find(name: str) -> Entry:
    """The entry of an adapter whose requirements are installed, without importing it.

    Raises:
        BackendNotAvailableError: as `entry`, or what it requires is not installed (with the hint).
    """
    found = entry(name)
    missing = [one for one in found.requires if one not in sys.modules and importlib.util.find_spec(one) is None]
    if missing:
        raise BackendNotAvailableError(f"backend {name!r} needs {', '.join(missing)}: {found.hint}")
    return found


def load(name: str) -> type[DistributionBackend]:
    """Returns the adapter's class.

    Raises BackendNotAvailableError: unknown name, or not installed (with the hint).
    """
    found = find(name)
    return cast(type[DistributionBackend], _imported(name, found.target, found.hint))


def job(name: str) -> Any:
    """Returns what makes the job that starts an adapter's processes: its class, or a function.

    Raises:
        CapabilityError: it declares none.
        BackendNotAvailableError: an unknown name, or the job cannot be imported.
    """
    found = entry(name)
    if found.job:
        return _imported(name, found.job, found.hint)
    how = "start its processes with its own launcher"
    if found.virtual:
        how = "its ranks live in one process: start the script with python"
    raise CapabilityError(f"`unidist run` does not start {name!r}: {how}")


def _imported(name: str, path: str, hint: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        advice = untested(name) or hint
        raise BackendNotAvailableError(f"backend {name!r}: {path} cannot be imported ({error}). {advice}") from error


def backends() -> dict[str, BackendInfo]:
    """name -> what it is, for every backend known here; imports only what is installed.

    What cannot be imported raises nothing: it is shown as not installed, and its `hint` says why.

    Example:
        >>> import unidist
        >>> sim = unidist.backends()["sim"]
        >>> sim.installed, sim.view
        (True, 'local')
    """
    return {name: _info(name) for name in names()}


def _info(name: str) -> BackendInfo:
    try:
        found, adapter = entry(name), load(name)
    except BackendNotAvailableError as error:
        return BackendInfo(name=name, installed=False, version=None, view=None, capabilities=None, hint=str(error))
    can = adapter.capabilities
    version = version_of(_distribution(found))
    return BackendInfo(name=name, installed=True, version=version, view=can.view, capabilities=can, hint=found.hint)


def _declared() -> dict[str, Entry]:
    """All entries; their launchers are known then. Entry points that cannot be imported are left out."""
    found = {}
    for name in names():
        with contextlib.suppress(BackendNotAvailableError):
            found[name] = entry(name)
    return found


def default_name() -> tuple[str, str]:
    """(name, why): UNIDIST_BACKEND, then the launcher with Keras's backend, then sim."""
    if name := os.environ.get("UNIDIST_BACKEND"):
        return name, "unidist run" if environment.RESTARTS in os.environ else "UNIDIST_BACKEND"
    known = _declared()
    launch = environment.detect()
    if launch is None:
        return "sim", "no backend was named and no launcher started this process"
    why = f"the environment of {launch.launcher}"
    for name, one in known.items():
        if one.launcher is not None and one.launcher.name == launch.launcher:
            return name, why
    # The adapters of torch, JAX and TensorFlow have the names that Keras gives them.
    return on_keras.choice().name, f"{why} and Keras's backend"


def name_for_processes() -> str:
    """Returns the adapter whose processes start where none is named.

    It is that of UNIDIST_BACKEND, else that of Keras's backend.
    """
    return os.environ.get("UNIDIST_BACKEND") or on_keras.choice().name


def use(
    name: str, *, devices: int | Sequence[str] | None = None, cluster: Cluster | None = None, **options: Any
) -> DistributionBackend:
    """Makes an adapter the current one; the world it joins is that of the launcher, if there is one.

    Args:
        name, devices, options: as of `unidist.use`, which chooses Keras's backend too.
        cluster: how the launcher's world is joined; by default as the launcher says.

    Raises:
        BackendNotAvailableError: unknown or not installed.
        BackendMismatchError: a launcher started several processes, and the adapter works in one.
        CapabilityError: an option that the adapter does not have.
        MeshError: devices that are neither a number nor a list of names.
    """
    found, adapter_class = entry(name), load(name)
    known = inspect.signature(adapter_class).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    if unknown := [option for option in options if option not in known and not takes_any]:
        raise CapabilityError(f"use({name!r}) has no option {', '.join(unknown)}; it has {', '.join(known)}")
    adapter = adapter_class(devices=_checked_devices(name, devices), **options)  # type: ignore[call-arg]
    global_state.take(adapter, found, cluster)
    return adapter


def _checked_devices(name: str, devices: Any) -> int | Sequence[str] | None:
    number = whole_number(devices)
    if number is not None and number >= 0:
        return number
    if devices is None or (isinstance(devices, list | tuple) and all(isinstance(one, str) for one in devices)):
        return devices
    raise MeshError(
        f"use({name!r}, devices={devices!r}): give the number of devices, as devices=4, or a list of their names, as "
        'devices=["cpu:0", "cpu:1"]'
    )
