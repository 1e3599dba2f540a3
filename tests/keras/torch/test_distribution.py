"""keras.distribution on torch: what scripts ask of its classes, and get, is what Keras on JAX gives."""

from __future__ import annotations

from unittest import mock

import keras
import numpy as np
import pytest
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, TensorLayout

import unidist
from unidist.keras.patching.compat import backend as keras_backend


def grid(shape=(2, 2)):
    devices = [f"cpu:{k}" for k in range(int(np.prod(shape)))]
    return DeviceMesh(shape, ["data", "model"], devices)


def rules(mesh):
    found = LayoutMap(mesh)
    found[".*kernel"] = TensorLayout([None, "model"])
    found[".*bias"] = ("model",)
    found["net/inner/output"] = ("data", None)
    return found


def variable(name, shape):
    return keras.Variable(np.zeros(shape, "float32"), name=name)


def test_data_parallel_finds_the_devices_and_cuts_batches():
    found = DataParallel()
    assert found.device_mesh.devices.tolist() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert (found.device_mesh.axis_names, found.batch_dim_name) == (["batch"], "batch")
    assert (found.num_processes, found._process_id, found._is_multi_process) == (1, 0, False)
    assert (found.num_model_replicas, found.data_shard_id) == (4, 0)
    mesh = DeviceMesh((4,), ["rows"], keras.distribution.list_devices())
    given = DataParallel(device_mesh=mesh)
    assert given.device_mesh is mesh
    assert given.get_data_layout((8, 2, 2)).axes == ("rows", None, None)
    assert given.get_tensor_layout("any/path") is None
    assert given.get_variable_layout(variable("kernel", (3,))).axes == (None,)


def test_model_parallel_gives_layouts_by_the_map():
    mesh = grid()
    found = ModelParallel(layout_map=rules(mesh), batch_dim_name="data")
    layouts = [
        found.get_variable_layout(variable(n, s)) for n, s in (("kernel", (4, 2)), ("bias", (2,)), ("seed", (2,)))
    ]
    assert [layout.axes for layout in layouts] == [(None, "model"), ("model",), (None,)]
    assert all(layout.device_mesh is mesh for layout in layouts)
    assert found.get_data_layout((8, 2)).axes == ("data", None)
    assert found.get_tensor_layout("net/inner/output").axes == ("data", None)
    assert found.get_tensor_layout("net/other/output") is None
    assert found.num_model_replicas == 2


@pytest.mark.parametrize("make", [lambda: DataParallel(), lambda: ModelParallel(layout_map=rules(grid()))])
def test_a_variables_own_layout_comes_first(make):
    other = TensorLayout(["x"], DeviceMesh((4,), ["x"], keras.distribution.list_devices()))
    kernel = variable("kernel", (4,))
    kernel._layout = other
    assert make().get_variable_layout(kernel) is other


def test_layouts_and_meshes_are_those_of_the_backend():
    layout = TensorLayout(["data", None], grid())
    assert layout.backend_layout == unidist.Layout("data", None)
    assert layout.device_mesh.backend_mesh == unidist.Mesh({"data": 2, "model": 2})


def test_processes_are_those_of_the_world():
    """As in worlds of several processes, which tests/parity has."""
    here = keras_backend.distribution_lib
    with (
        mock.patch.object(here, "num_processes", return_value=4),
        mock.patch.object(here, "process_id", return_value=3),
    ):
        found = ModelParallel(layout_map=rules(grid((2, 4))), batch_dim_name="data")
        assert (found.num_processes, found._is_multi_process) == (4, True)
        # Two processes share a replica and are given the same rows.
        assert (found.num_model_replicas, found.data_shard_id) == (2, 1)
        with pytest.raises(ValueError, match="`num_processes` must be divisible by `num_model_replicas`"):
            ModelParallel(layout_map=rules(grid((3, 2))), batch_dim_name="data")


@pytest.mark.parametrize(
    ("told", "given"),
    [
        ({}, ()),
        ({}, ("10.0.0.1:1234,10.0.0.2:2345", 2, 0)),
        ({"JOB_ADDRESSES": "10.0.0.1:1234,10.0.0.2:2345", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}, ()),
    ],
)
def test_initialize_joins_where_it_was_told(told, given, monkeypatch):
    for name, value in told.items():
        monkeypatch.setenv(f"KERAS_DISTRIBUTION_{name}", value)
    with mock.patch.object(unidist.session, "initialize") as joined:
        keras.distribution.initialize(*given)
    place = int(told.get("PROCESS_ID", 0))
    joined.assert_called_once_with(*(("10.0.0.1:1234", 2, place) if told or given else (None, None, None)))


def test_our_strategies_answer_as_kerass():
    with unidist.DataParallel().scope():
        found = keras.distribution.distribution()
    assert (found.num_processes, found._process_id, found._is_multi_process) == (1, 0, False)
    assert (found.num_model_replicas, found.data_shard_id, found.batch_dim_name) == (4, 0, "data")
    data = [1, 2, 3]
    assert found.distribute_dataset(data) is data
    assert keras.distribution.distribution() is None


def test_of_scopes_inside_one_another_the_inner_one_counts():
    layers = [keras.layers.Dense(8) for _ in range(3)]
    with unidist.DataParallel().scope():
        layers[0].build((None, 8))
        with unidist.ModelParallel(unidist.Mesh({"model": 4}), {".*kernel": (None, "model")}).scope():
            layers[1].build((None, 8))
        layers[2].build((None, 8))
    assert [layer.kernel._storage.sharding.layout for layer in layers] == [
        unidist.Layout(),
        unidist.Layout(None, "model"),
        unidist.Layout(),
    ]
