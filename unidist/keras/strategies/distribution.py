"""UnidistDistribution: a strategy as a Distribution of Keras's, and the one that is in use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from unidist import session
from unidist.algebra import Axes, Layout, Mesh
from unidist.array import as_layout, as_mesh, set_mesh_in_use
from unidist.backends import registry
from unidist.errors import MeshError
from unidist.keras import driver
from unidist.keras.feed.row_plan import own_part
from unidist.keras.patching import patches
from unidist.keras.patching.compat import Distribution
from unidist.keras.strategies.layout_maps import KerasRules, as_layout_map, keras_layout, keras_mesh
from unidist.planner.found import FoundLayouts
from unidist.planner.layout_map import LayoutMap, check_variable
from unidist.strategies import Strategy

# The strategy that was made last, and the adapter that was in use then.
_made: list[tuple[Any, UnidistDistribution]] = []


class UnidistDistribution(Distribution):  # type: ignore[misc]
    """A Keras Distribution made from a Strategy; the base of DataParallel and ModelParallel.

    Attributes:
        found: the layouts found so far, of a strategy that finds them by itself; else None.
        model_axes: the axes that may cut variables then.
    """

    found: FoundLayouts | None = None
    model_axes: Axes = ()

    def __init__(self, strategy: Strategy, layout_map: LayoutMap | None = None) -> None:
        adapter = session.backend()
        if type(self) is not UnidistDistribution or adapter.capabilities.view == "local":
            _check_fills(strategy.mesh)  # Keras's own strategies leave devices out where its backend serves that
        adapter.mesh(strategy.mesh)
        patches.check()
        driver.check(strategy, layout_map)
        self.strategy = strategy
        self.layout_map = layout_map
        batch = strategy.data_axes[0] if strategy.data_axes else None
        super().__init__(keras_mesh(strategy.mesh), batch, strategy.auto_shard_dataset)
        # Keras asks its own backend, which over Horovod on TensorFlow knows of no processes.
        self._num_processes, self._process_id = session.process_count(), session.process_index()
        self._is_multi_process = self._num_processes > 1
        if type(self) is not UnidistDistribution:
            _made[:] = [(adapter, self)]

    @property
    def mesh(self) -> Mesh:
        return self.strategy.mesh

    @property
    def num_model_replicas(self) -> int:
        return self.strategy.data_shards

    def distribute_dataset(self, dataset: Any) -> Any:
        """Returns the process's rows of a batched tf.data.Dataset by Keras's rule: part k of the k-th process.

        In one process, and with `auto_shard_dataset=False`, the dataset itself.

        Raises:
            ArgumentError: no batched tf.data.Dataset, or its batches do not divide.
            LayoutError: the devices of a process hold other rows than its part.
        """
        if not self._is_multi_process or not self.auto_shard_dataset:
            return dataset
        return own_part(dataset, self.strategy, self._process_id, self._num_processes)

    def get_data_layout(self, data_shape: Any) -> Any:
        layout = self.strategy.batch() if len(data_shape) else Layout()
        return keras_layout(layout, tuple(data_shape), self.mesh, self.device_mesh)

    def get_variable_layout(self, variable: Any) -> Any:
        given = getattr(variable, "_layout", None)
        if given is not None:
            return given
        shape = tuple(variable.shape)
        storage = self.strategy.variable(variable.path, shape).storage
        return keras_layout(storage, shape, self.mesh, self.device_mesh)

    def get_tensor_layout(self, path: str) -> Any:
        return None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Makes this Keras's distribution: variables built inside are created in their layouts."""
        driver.align_seeds()
        with super().scope():
            yield

    def check_model(self, paths: list[str], outputs: list[str]) -> None:
        """Raises LayoutError where a strict rule matches none of the model's variables.

        Keras's maps also hold the layouts of the outputs of layers.
        """
        if self.layout_map is not None:
            self.layout_map.check_used([*paths, *outputs] if isinstance(self.layout_map, KerasRules) else paths)


def adopt(distribution: Any) -> UnidistDistribution:
    """Ours as it is; a keras.distribution strategy as one of ours, with the same mesh and layouts."""
    if isinstance(distribution, UnidistDistribution):
        return distribution
    cached = getattr(distribution, "_unidist", None)
    if cached is None:
        mesh = as_mesh(distribution.device_mesh)
        batch = distribution.batch_dim_name
        layout_map = getattr(distribution, "_layout_map", None)
        if isinstance(layout_map, keras.distribution.LayoutMap):
            rules: LayoutMap | None = as_layout_map(layout_map, mesh)
        else:
            rules = None

        def rule(path: str, shape: tuple[int, ...]) -> Layout:
            found = distribution.get_variable_layout(_PathAndShape(path, shape))
            return check_variable(path, shape, as_layout(found), mesh)

        axes = (batch,) if batch is not None else ()
        cached = UnidistDistribution(Strategy(mesh, axes, rule, distribution.auto_shard_dataset), rules)
        distribution._unidist = cached
    return cached


def current() -> UnidistDistribution | None:
    """Keras's distribution of this thread as one of ours, or None."""
    found = keras.distribution.distribution()
    return None if found is None else adopt(found)


def made() -> UnidistDistribution | None:
    """Returns the last DataParallel or ModelParallel made for the devices in use; None: there is none."""
    return next((one for adapter, one in _made if registry.has_current() and adapter is registry.current()), None)


def _mesh_in_use() -> Mesh | None:
    strategy = current()
    return None if strategy is None else strategy.mesh


set_mesh_in_use(_mesh_in_use)


class _PathAndShape:
    _layout = None

    def __init__(self, path: str, shape: tuple[int, ...]) -> None:
        self.path = path
        self.shape = shape


def _check_fills(mesh: Mesh) -> None:
    """Raises MeshError where a mesh leaves devices out: they would idle, or fail alone."""
    count, size = len(session.list_devices()), mesh.size
    if size >= count:
        return
    entry, name = registry.in_use(), session.backend().name
    start = f"`unidist run -n {size} script.py`" if entry.one_device else f"unidist.use({name!r}, devices={size})"
    raise MeshError(
        f"{mesh} has {size} of the {count} devices, and a model trains on all of them: make a mesh of {count} (a size "
        f"of -1 takes what is left), or start {size}: {start}"
    )
