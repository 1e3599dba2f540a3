"""The declaration of an adapter, which is there before the adapter is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unidist.backends.environment import Launcher
from unidist.errors import BackendNotAvailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Describes an adapter before it is imported: where it is, whom it serves, how its processes start.

    Attributes:
        target: "package.module:Class" of a DistributionBackend, constructed as `Class(devices=..., **options)`.
        hint: how to install what is missing.
        requires: top-level modules that must be importable.
        distribution: the distribution whose version `backends()` shows. "": that of the first module it requires.
        keras_backends: the Keras backends that it can serve, the best first; `use` chooses among them before the
            adapter is imported. (): `use` leaves Keras as it is.
        keras_option: the option of `use` by which a program names one of them.
        drivers: Keras backend -> package that trains Keras models there, where it is not unidist's own for that one.
        virtual: whether its devices are no framework's: all live in one process, in which a driver simulates them.
        one_device: whether a process has one device. Else it has several, on CPUs as many as `use(devices=)` says.
        launcher: the launcher by whose variables a program that names no backend gets this one.
        job: "package.module:Class" of the `unidist.launch.Job` by which `unidist run` starts its processes: one that is
            no more than that is `unidist.launch:LocalProcesses`. "": `unidist run` does not start them.
        accelerators: whether it computes on accelerators where there are any: `unidist doctor` misses them then.
        over_grpc: whether its processes meet over gRPC: `unidist doctor` looks for proxies between them.
        tested: the versions of the distribution that the adapter was tested with, as "2.13", the oldest first. (): any.
        all_take_part: whether a message between two ranks is a collective of the world.
    """

    target: str
    hint: str = ""
    requires: tuple[str, ...] = ()
    distribution: str = ""
    keras_backends: tuple[str, ...] = ()
    keras_option: str = ""
    drivers: Mapping[str, str] = field(default_factory=dict)
    virtual: bool = False
    one_device: bool = True
    launcher: Launcher | None = None
    job: str = ""
    accelerators: bool = False
    over_grpc: bool = False
    all_take_part: bool = False
    tested: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, path in (("target", self.target), ("job", self.job)):
            if path and ":" not in path:
                raise BackendNotAvailableError(f"an adapter's {what} {path!r} must be 'package.module:Class'")
