"""The registry: names to adapters, and the one that is in use."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, cast

from unidist.algebra import mesh as mesh_module
from unidist.algebra.checks import whole_number
from unidist.backends.environment import detect
from unidist.backends.protocol import Capabilities, Cluster, DistributionBackend
from unidist.errors import BackendMismatchError, BackendNotAvailableError, CapabilityError, MeshError

ENTRY_POINTS = "unidist.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where an adapter is found and what it needs.

    Attributes:
        target: "package.module:Class".
        hint: how to install what is missing.
        requires: top-level modules that must be importable.
        distribution: the distribution whose version `backends()` tells.
        keras_backends: as the adapter's own, where importing it imports Keras: that must know its backend before.
    """

    target: str
    hint: str = ""
    requires: tuple[str, ...] = ()
    distribution: str = ""
    keras_backends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """What `unidist.backends()` tells of one backend. `capabilities` is None where it is not installed."""

    name: str
    installed: bool
    version: str | None
    view: Literal["local", "global"] | None
    capabilities: Capabilities | None
    hint: str


_entries: dict[str, Entry] = {
    "sim": Entry(target="unidist.backends.sim.backend:SimBackend"),
    "torch": Entry(
        target="unidist.backends.torch.backend:TorchBackend",
        hint='pip install "keras-unidist[torch]"',
        requires=("torch",),
        distribution="torch",
    ),
    "jax": Entry(
        target="unidist.backends.jax.backend:JaxBackend",
        hint='pip install "keras-unidist[jax]"',
        requires=("jax",),
        distribution="jax",
    ),
    "tensorflow": Entry(
        target="unidist.backends.tensorflow.backend:TensorflowBackend",
        hint='pip install "keras-unidist[tensorflow]"',
        requires=("tensorflow",),
        distribution="tensorflow",
        keras_backends=("tensorflow",),
    ),
    "horovod": Entry(
        target="unidist.backends.horovod.backend:HorovodBackend",
        hint="Horovod is source only: ci/install_horovod.sh PYTHON builds it (docs/horovod.md); the rest comes by "
        'pip install "keras-unidist[horovod]"',
        requires=("horovod",),
        distribution="horovod",
    ),
}
_current: DistributionBackend | None = None
_joined: Literal["no", "by launcher", "by initialize"] = "no"


def register(name: str, target: str, *, hint: str = "", requires: tuple[str, ...] = ()) -> None:
    """Adds a third party's adapter.

    Args:
        name: what `unidist.use` will call it.
        target: "package.module:Class" of a DistributionBackend, constructed as Class(devices=..., **options).
        hint: how to install what is missing.
        requires: top-level modules that must be importable.
    """
    if ":" not in target:
        raise BackendNotAvailableError(f"backend {name!r}: target {target!r} must be 'package.module:Class'")
    _entries[name] = Entry(target=target, hint=hint, requires=requires, distribution=requires[0] if requires else "")


def entries() -> dict[str, Entry]:
    """Built-in and registered entries, then installed entry points that no name hides."""
    found = dict(_entries)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        home = point.dist.name if point.dist is not None else ""
        entry = Entry(target=f"{point.module}:{point.attr}", hint=f"pip install {home}", distribution=home)
        found.setdefault(point.name, entry)
    return found


def _missing(entry: Entry) -> list[str]:
    return [name for name in entry.requires if name not in sys.modules and importlib.util.find_spec(name) is None]


def find(name: str) -> Entry:
    """The entry of a backend, without importing it.

    Raises:
        BackendNotAvailableError: an unknown name, or what it requires is not installed (with the hint).
    """
    known = entries()
    if name not in known:
        raise BackendNotAvailableError(
            f"unknown backend {name!r}: one of {sorted(known)}, or add yours with unidist.register(...)"
        )
    entry = known[name]
    if missing := _missing(entry):
        raise BackendNotAvailableError(f"backend {name!r} needs {', '.join(missing)}: {entry.hint}")
    return entry


def load(name: str) -> type[DistributionBackend]:
    """The adapter's class. Raises BackendNotAvailableError: unknown name, or not installed (with the hint)."""
    entry = find(name)
    module, _, attribute = entry.target.partition(":")
    try:
        return cast(type[DistributionBackend], getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise BackendNotAvailableError(
            f"backend {name!r}: {entry.target} cannot be imported ({error}). {entry.hint}"
        ) from error


def backends() -> dict[str, BackendInfo]:
    """name -> what it is, for every backend known here; imports only what is installed."""
    infos = {}
    for name, entry in entries().items():
        try:
            adapter = load(name)
        except BackendNotAvailableError as error:
            infos[name] = BackendInfo(
                name=name, installed=False, version=None, view=None, capabilities=None, hint=str(error)
            )
            continue
        capabilities = adapter.capabilities
        infos[name] = BackendInfo(
            name=name,
            installed=True,
            version=version_of(entry.distribution),
            view=capabilities.view,
            capabilities=capabilities,
            hint=entry.hint,
        )
    return infos


def version_of(distribution: str) -> str | None:
    """The version of a distribution, or of the one that installs a module of that name."""
    homes = chain((distribution,), _installing(distribution))
    for home in filter(None, homes):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(home)
    return None


def _installing(module: str) -> Iterator[str]:
    # A generator: reading what every distribution installs takes long, and is seldom needed.
    yield from importlib.metadata.packages_distributions().get(module, ())


def default_name() -> tuple[str, str]:
    """(name, why): UNIDIST_BACKEND, then the launcher with the Keras backend, then sim."""
    if name := os.environ.get("UNIDIST_BACKEND"):
        return name, "UNIDIST_BACKEND"
    launch = detect()
    if launch is not None:
        if launch.launcher == "horovod":
            return "horovod", "the environment of horovodrun"
        if launch.launcher == "jax":
            return "jax", "JAX's environment"
        keras_backend = os.environ.get("KERAS_BACKEND", "torch")
        return keras_backend, f"the environment of {launch.launcher} and KERAS_BACKEND"
    return "sim", "no backend was named and no launcher started this process"


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
    adapter_class = load(name)
    known = inspect.signature(adapter_class).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    if unknown := [option for option in options if option not in known and not takes_any]:
        raise CapabilityError(f"use({name!r}) has no option {', '.join(unknown)}; it has {', '.join(known)}")
    adapter = adapter_class(devices=_checked_devices(name, devices), **options)  # type: ignore[call-arg]
    if _current is not None:
        _current.shutdown()
    _set(None, "no")
    launched = detect() is not None
    if launched:
        adapter.initialize(cluster or Cluster())
    _set(adapter, "by launcher" if launched else "no")
    return adapter


def _checked_devices(name: str, devices: Any) -> int | Sequence[str] | None:
    """Raises MeshError where it is neither a number of devices nor a list of names."""
    number = whole_number(devices)
    if number is not None and number >= 0:
        return number
    if devices is None or (isinstance(devices, list | tuple) and all(isinstance(one, str) for one in devices)):
        return devices
    raise MeshError(
        f"use({name!r}, devices={devices!r}): give the number of devices, as devices=4, or a list of their names, as "
        'devices=["cpu:0", "cpu:1"]'
    )


def current() -> DistributionBackend:
    """The backend in use. Raises BackendNotAvailableError where none was chosen."""
    if _current is None:
        raise BackendNotAvailableError('no backend is in use: call unidist.use("torch"), "jax", "sim"... first')
    return _current


def has_current() -> bool:
    return _current is not None


def has_joined() -> bool:
    """Whether the backend in use has joined a world, by the launcher's word or by `initialize`."""
    return _current is not None and _joined != "no"


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Inside, no backend is in use until one is chosen; afterwards that one is shut down and the one before is back."""
    before = _current, _joined
    _set(None, "no")
    try:
        yield
    finally:
        if _current is not None:
            _current.shutdown()
        _set(*before)


def _set(adapter: DistributionBackend | None, joined: Literal["no", "by launcher", "by initialize"]) -> None:
    global _current, _joined
    _current, _joined = adapter, joined
    mesh_module.set_world(None if adapter is None else adapter.list_devices)


def initialize(cluster: Cluster, *, retimes: bool = False) -> None:
    """Joins a world.

    Args:
        cluster: how.
        retimes: whether its timeout shall hold for a world that the launcher's word has joined already.

    Raises:
        BackendMismatchError: called a second time, or against what the launcher said.
        CapabilityError: the adapter cannot change its timeout.
    """
    global _joined
    adapter = current()
    if _joined == "by initialize":
        raise BackendMismatchError(
            "initialize was called a second time: this process has joined a world of "
            f"{adapter.process_count()} processes; call unidist.shutdown() before joining another"
        )
    if _joined == "no":
        adapter.initialize(cluster)
    elif cluster.process_count not in (None, adapter.process_count()) or cluster.process_index not in (
        None,
        adapter.process_index(),
    ):
        raise BackendMismatchError(
            f"initialize asks for process {cluster.process_index} of {cluster.process_count}, but the launcher "
            f"started this as process {adapter.process_index()} of {adapter.process_count()}"
        )
    elif retimes:
        set_timeout = getattr(adapter, "set_timeout", None)
        if set_timeout is None:
            raise CapabilityError(
                f"{adapter.name} cannot change its timeout after joining: say `unidist run --timeout "
                f"{cluster.timeout:g}` or UNIDIST_TIMEOUT={cluster.timeout:g}"
            )
        set_timeout(cluster.timeout)
    _joined = "by initialize"


def shutdown() -> None:
    """Leaves the world of the backend in use."""
    global _joined
    current().shutdown()
    _joined = "no"
