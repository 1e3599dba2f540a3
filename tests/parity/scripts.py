"""Scripts written for keras.distribution alone. They know nothing of unidist and run as they are on Keras on JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

Told = dict[str, Any]


def _images() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(16, 8)).astype("float32"), rng.integers(0, 4, size=16).astype("int32")


def _network() -> Any:
    import keras

    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", name="up"),
            keras.layers.Dense(8, name="down"),
            keras.layers.Dense(4, name="head"),
        ],
        name="net",
    )
    # The same first weights on every Keras backend.
    rng = np.random.default_rng(5)
    model.set_weights([rng.normal(scale=0.3, size=tuple(v.shape)).astype("float32") for v in model.weights])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


def _trained(model: Any) -> Told:
    x, y = _images()
    history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history
    predicted = model.predict(x, batch_size=8, verbose=0)
    scores = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    weights = {v.path: np.asarray(v.numpy()) for v in model.weights}
    return {"history": history, "predict": predicted, "evaluate": scores, "weights": weights}


def data_parallel() -> Told:
    """The guide's first example: all devices, set globally."""
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    try:
        return _trained(_network())
    finally:
        keras.distribution.set_distribution(None)


def data_parallel_by_default() -> Told:
    """DataParallel() finds the devices by itself; used as a scope."""
    import keras

    with keras.distribution.DataParallel().scope():
        return _trained(_network())


def _mesh(order: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    import keras

    devices = keras.distribution.list_devices()
    return keras.distribution.DeviceMesh((2, 2), ["batch", "model"], [devices[k] for k in order])


def _layout_map(mesh: Any) -> Any:
    import keras

    rules = keras.distribution.LayoutMap(mesh)
    rules[".*up/kernel"] = (None, "model")
    rules[".*up/bias"] = keras.distribution.TensorLayout(["model"])
    rules[".*down/kernel"] = keras.distribution.TensorLayout(["model", None], mesh)
    return rules


def model_parallel() -> Told:
    """The guide's second example: a 2-D mesh and a LayoutMap."""
    import keras

    rules = _layout_map(_mesh())
    strategy = keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="batch")
    keras.distribution.set_distribution(strategy)
    try:
        return _trained(_network())
    finally:
        keras.distribution.set_distribution(None)


def two_meshes() -> list[Told]:
    """Two meshes of one shape with their devices in other orders, one after the other."""
    import keras

    found = []
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3)):
        strategy = keras.distribution.ModelParallel(layout_map=_layout_map(_mesh(order)), batch_dim_name="batch")
        with strategy.scope():
            found.append(_trained(_network()))
    return found


def what_keras_tells() -> Told:
    """The questions that scripts ask: devices, processes, the active distribution, a variable's layout."""
    import keras

    told: Told = {
        "devices": keras.distribution.list_devices(),
        "cpus": keras.distribution.list_devices("cpu"),
        "count": keras.distribution.get_device_count(),
        "active": keras.distribution.distribution() is None,
    }
    mesh = _mesh()
    told["mesh"] = (mesh.shape, list(mesh.axis_names), mesh.devices.tolist())
    rules = _layout_map(mesh)
    told["rules"] = {key: rules[key].axes for key in (".*up/kernel", ".*up/bias", ".*down/kernel")}
    strategy = keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="batch")
    with strategy.scope():
        told["set"] = keras.distribution.distribution() is strategy
        model = _network()
        told["layouts"] = {v.path: tuple(strategy.get_variable_layout(v).axes) for v in model.weights}
        told["data"] = tuple(strategy.get_data_layout((8, 8)).axes)
    return told


def initialize_first() -> int:
    """What a script of several processes calls first; the launcher has set the rest."""
    import keras

    keras.distribution.initialize()
    return len(keras.distribution.list_devices())


def distributed_tensor() -> Told:
    """distribute_tensor: the value stays; each device holds its part."""
    import keras

    mesh = _mesh((1, 0, 3, 2))
    value = np.arange(32, dtype="float32").reshape(4, 8)
    layout = keras.distribution.TensorLayout(["batch", "model"], mesh)
    x = keras.distribution.distribute_tensor(keras.ops.convert_to_tensor(value), layout)
    return {"shape": tuple(x.shape), "shards": _shards(x)}


def _shards(x: Any) -> dict[int, Any]:
    """rank -> what it holds: of a DistributedArray, or of a JAX array."""
    if hasattr(x, "addressable_shards"):
        return {shard.device.id: np.asarray(shard.data) for shard in x.addressable_shards}
    return {rank: np.asarray(shard) for rank, shard in x.shards().items()}


def traffic_of(script: str) -> tuple[Told, int, float]:
    """A script's result, and how many collectives and bytes unidist saw."""
    import unidist

    with unidist.ledger() as book:
        told = globals()[script]()
    return told, book.count(), float(book.bytes())
