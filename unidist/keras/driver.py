"""Driver: trains Keras models on one framework under one adapter. And the choice of the driver in use.

A driver is a package with a module `driver`, which has the functions of `Driver`. Whatever else the package holds is
its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import keras

from unidist.algebra import Layout
from unidist.backends import registry
from unidist.backends.protocol import Array
from unidist.planner.layout_map import LayoutMap
from unidist.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Row:
    """One variable of a model or its optimizer.

    Attributes:
        shape: the global shape.
        layout: None where the variable is not distributed.
        local_shape: what the first device of this process holds.
        bytes_per_device: bytes held by the device that holds most; 0 of what rests in host memory.
        kind: "weights" for a variable of the model, "slots" for one of its optimizer.
        gradient_bytes: bytes of its gradient that the device holding most holds now; 0 where the engine keeps none
            between steps.
        host_bytes: bytes that rest in host memory for the device that holds most.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    local_shape: tuple[int, ...]
    bytes_per_device: int
    kind: str = "weights"
    gradient_bytes: int = 0
    host_bytes: int = 0

    @property
    def in_words(self) -> str:
        """Says how it is laid out."""
        return "not distributed" if self.layout is None else self.layout.in_words

    @property
    def is_sharded(self) -> bool:
        return self.layout is not None and bool(self.layout.dims)


def rows_of(model: Any, row: Callable[[Any, str], Row]) -> Iterator[Row]:
    """row(variable, kind) of each variable of the model, then of its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    slots = optimizer.variables if optimizer is not None else []
    for variable in model.variables:
        yield row(variable, "weights")
    for variable in slots:
        yield row(variable, "slots")


if TYPE_CHECKING:
    from unidist.algebra import Axes, Layout
    from unidist.keras.checkpoint.held import Held
    from unidist.keras.consistency.processes import Processes
    from unidist.keras.patching.patches import Table
    from unidist.keras.strategies.distribution import UnidistDistribution
    from unidist.planner.holding import Rehearsed


class Driver(Protocol):
    """A module `driver`: `prepare` comes first; all others are called while the table is on.

    Attributes:
        RUNS_PROGRAMS: whether a step is one compiled program, with its collectives inside.
    """

    RUNS_PROGRAMS: bool

    # on and off

    def prepare(self) -> None:
        """Readies the framework: `unidist.use` calls it before the table is on, each time.

        Raises:
            BackendMismatchError: the framework runs already, with other devices.
        """

    def table(self) -> Table:
        """Gives the attributes of the framework that the driver replaces.

        Asked once; the caller turns them on and off.
        """

    def leave(self) -> None:
        """Lets go of the world: `unidist.shutdown` calls it, behind the table."""

    def check(self, strategy: Strategy, layout_map: LayoutMap | None) -> None:
        """Checks a strategy as it is made.

        Raises:
            MeshError, CapabilityError: the driver cannot train by the strategy.
        """

    def world(self) -> Processes | None:
        """Gives the processes of the world, where there are several."""

    # models

    def parallelize(self, model: Any, distribution: UnidistDistribution) -> None:
        """Places a built model, its optimizer and its metrics, in place: `unidist.parallelize`."""

    def rows(self, model: Any) -> Iterable[Row]:
        """Gives a row for each variable of a model, then of its optimizer: `unidist.describe`."""

    def reasons(self, model: Any) -> Iterable[tuple[str, str]]:
        """Gives (path or name, what it does and why) of layers with cut weights.

        What sees several rows is named too.
        """

    def gather_weights(self, model: Any) -> Iterable[tuple[str, Array]]:
        """Gives (path, full value) of every weight, on every process. A collective."""

    def rehearse(
        self,
        model: Any,
        layouts: Sequence[Layout],
        strategy: Strategy,
        sample: Any,
        batch: int,
        shared: dict[str, Axes],
        chosen: dict[str, float],
    ) -> Rehearsed | str:
        """Gives what layers send and keep in a step, for `unidist.plan`; or why it can only be estimated.

        Nothing is sent.
        """

    # files

    def ready(self, model: Any) -> None:
        """Places a built model that is distributed, and ends what is under way: for a checkpoint."""

    def processes(self, model: Any) -> Processes | None:
        """Gives the processes that hold a model together, where there are several."""

    def held(self, variable: Any) -> Held:
        """Gives a variable as this process holds it."""

    def writing(self, model: Any, write: Callable[[], Any], read_along: Callable[[], Any]) -> Any:
        """Lets one process write for all, with Keras's own writers.

        Args:
            model: what is written; None where the writer reads none.
            write: writes, on the process that does.
            read_along: reads as the writer does, on the others, where reading is a collective.
        """


# Keras backend -> the package of what trains there, unless the adapter in use has declared another.
_PACKAGES = {
    "torch": "unidist.keras.torch",
    "jax": "unidist.keras.jax",
    "tensorflow": "unidist.keras.tensorflow",
}

if TYPE_CHECKING:
    from unidist.keras.jax import driver as _jax
    from unidist.keras.tensorflow import driver as _tensorflow
    from unidist.keras.tensorflow_horovod import driver as _tensorflow_horovod
    from unidist.keras.torch import driver as _torch

    _ALL: tuple[Driver, ...] = (_torch, _jax, _tensorflow, _tensorflow_horovod)


def package() -> str | None:
    """The package of the driver in use; None where there is none."""
    name = keras.config.backend()
    return registry.in_use().drivers.get(name) or _PACKAGES.get(name)


def of(name: str) -> Driver:
    """The driver of a package."""
    return cast(Driver, importlib.import_module(f"{name}.driver"))


def current() -> Driver | None:
    """The driver in use: by the Keras backend that runs, and by the adapter; None where there is none."""
    found = package()
    return None if found is None else of(found)


def check(strategy: Strategy, layout_map: LayoutMap | None) -> None:
    """Raises MeshError or CapabilityError where the driver cannot train by a strategy."""
    if (found := current()) is not None:
        found.check(strategy, layout_map)


def align_seeds() -> None:
    """Lets all processes draw the same implicit seeds from here on: rank 0's."""
    if (found := current()) is not None and (several := found.world()) is not None:
        several.align_seeds()
