"""The protocol that every adapter fulfils, and the value objects it speaks in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from unidist.algebra import Axes, Mesh, Sharding
from unidist.algebra.layout import REDUCE_OPS
from unidist.backends import environment
from unidist.errors import BackendNotAvailableError, CapabilityError, LayoutError

Array: TypeAlias = npt.NDArray[Any]

ALL_DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Declares what an adapter can do. A gap is declared here and raises CapabilityError.

    It is never discovered.

    Attributes:
        view: "local": a process or virtual rank holds its shard; "global": a process holds the global array.
        uneven: "native": shards of different sizes; "padded": padded inside, the same to the caller.
        dtypes: the dtypes that its collectives take.
        reduce_ops: the ops of P that it can reduce.
        differentiable: whether the framework's autodiff goes through the collectives.
        processes: whether a world can have several processes.
    """

    view: Literal["local", "global"]
    uneven: Literal["native", "padded"] = "native"
    dtypes: frozenset[str] = ALL_DTYPES
    reduce_ops: frozenset[str] = field(default_factory=lambda: frozenset(REDUCE_OPS))
    differentiable: bool = True
    processes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The way in which the processes of a world find each other.

    None: what the launcher's environment says, else one process.

    Attributes:
        address: "host:port" of process 0.
        process_count: number of processes.
        process_index: number of this process, 0 to process_count - 1.
        timeout: seconds to wait for the others, at joining and in each collective; by default what UNIDIST_TIMEOUT
            says, else 300.

    Raises:
        BackendNotAvailableError: the timeout is no number above zero.
    """

    address: str | None = None
    process_count: int | None = None
    process_index: int | None = None
    timeout: float = field(default_factory=environment.timeout)

    def __post_init__(self) -> None:
        given: Any = self.timeout
        if isinstance(given, str) or environment.seconds_of(given) is None:
            raise BackendNotAvailableError(f"timeout={given!r}: give seconds above 0, as timeout=60")


@runtime_checkable
class DistributionBackend(Protocol):
    """One framework's way to place arrays on a mesh and to move them.

    Adapters inherit it, for what has a default.

    `X` below is the adapter's own data: for a local view this process's shard (the simulator: a mapping of all
    ranks' shards), for a global view the framework's global array. A Sharding says what it means.
    """

    name: ClassVar[str]  # as it is registered
    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def initialize(self, cluster: Cluster) -> None:
        """Joins the world.

        Raises BackendMismatchError if already joined, BackendNotAvailableError if it cannot.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Leaves the world; a later `initialize` may join another."""

    @abstractmethod
    def process_index(self) -> int: ...

    @abstractmethod
    def process_count(self) -> int: ...

    @abstractmethod
    def list_devices(self, kind: str | None = None) -> list[str]:
        """All devices of the world as "cpu:0", "gpu:3": the k-th is rank k."""

    @abstractmethod
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks whose shards this process holds, in order."""

    @abstractmethod
    def mesh(self, mesh: Mesh) -> Any:
        """The framework's own mesh object, or its nearest thing. Cached by equality of the whole mesh."""

    @abstractmethod
    def layout(self, sharding: Sharding) -> Any:
        """The framework's own sharding object, or its nearest thing."""

    @abstractmethod
    def distribute(self, value: Any, sharding: Sharding) -> Any:
        """X from the same full value on every process. P: the value at place 0, neutral elements elsewhere."""

    @abstractmethod
    def from_local(self, shards: Sequence[Any], sharding: Sharding) -> Any:
        """X from one shard for each local rank, in rank order."""

    @abstractmethod
    def to_local(self, x: Any, sharding: Sharding) -> Mapping[int, Any]:
        """rank -> its native local array, for each local rank."""

    @abstractmethod
    def gather(self, x: Any, sharding: Sharding) -> Array:
        """The full value on every process (partial axes reduced). A collective of the whole mesh."""

    @abstractmethod
    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        """X at `dst`: runs redistribution(src, dst). Differentiable by redistribution(src, dst).adjoint."""

    @abstractmethod
    def broadcast(self, x: Any, sharding: Sharding, axes: Axes, root: int) -> Any:
        """Replaces the replicas along `axes` by those of place `root` in their group.

        Adjoint: the gradient goes to root, zeros elsewhere; along axes of F, where it arrives partial, its sum does.
        """

    @abstractmethod
    def permute(self, x: Any, sharding: Sharding, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> Any:
        """Moves shards from place to place along `axes`; places that get none hold zeros.

        Adjoint: pairs reversed.
        """

    @abstractmethod
    def barrier(self, mesh: Mesh | None = None, axes: Axes | None = None) -> None:
        """Returns when every process of the group (default: the world) has come."""

    # What has a default ---------------------------------------------------------------------------------------------

    def set_timeout(self, seconds: float) -> None:
        """Changes how long the collectives of a world that was joined wait. By default a CapabilityError."""
        raise CapabilityError(
            f"{self.name} cannot change its timeout after joining: say `unidist run --timeout {seconds:g}` or "
            f"UNIDIST_TIMEOUT={seconds:g}"
        )

    def visible_devices(self) -> list[str]:
        """The devices that this process sees before it joins a world, which may give it one of them."""
        return self.list_devices()

    def torch_device(self) -> str | None:
        """Returns where Keras on torch computes under this adapter, as "cpu" or "cuda:1".

        None, the default: where Keras does by itself.
        """
        return None


def plain_array(value: Any) -> Array:
    """Returns a NumPy array of a value that is no framework's array, as every framework takes it.

    It is in the machine's byte order and has no negative strides. What is not so is copied.

    Raises:
        LayoutError: there is no array of it, as of rows of several lengths.
        CapabilityError: its values are no numbers: objects, texts, dates.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise LayoutError(f"no array can be made of a {type(value).__name__}: {error}") from error
    if array.dtype.kind in "OSUVMm" and array.dtype.name not in ALL_DTYPES:
        raise CapabilityError(f"cannot move {array.dtype.name} arrays: cast to one of {sorted(ALL_DTYPES)}")
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array.copy() if any(stride < 0 for stride in array.strides) else array


def dtype_name(x: Any) -> str:
    """The dtype of a native or NumPy array as NumPy spells it ("float32", "bfloat16")."""
    name = getattr(x.dtype, "name", None)  # torch's dtypes have none
    return str(x.dtype).rsplit(".", 1)[-1] if name is None else str(name)


def itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
