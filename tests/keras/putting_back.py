"""What the processes of test_putting_back run: Keras's attributes before unidist is used, and after it is left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import keras
import numpy as np

import unidist

# What unidist replaces outside of Keras.
BELOW = ("safetensors", "torch.autograd", "tensorflow.python.ops.array_ops", "tensorflow.python.ops.gen_array_ops")


def attributes() -> dict[tuple[str, str], Any]:
    """Functions, classes, properties and modules, by where they are."""
    found = {}
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "keras" or name in BELOW]:
        for owner in (module, *(c for c in vars(module).values() if isinstance(c, type))):
            where = getattr(owner, "__qualname__", "")
            found |= {(f"{module.__name__}:{where}", name): value for name, value in _replaceable(owner)}
    return found


def _replaceable(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(owner).items()):
        is_module_or_none = isinstance(value, ModuleType | None)
        if callable(value) or isinstance(value, property | staticmethod | classmethod) or is_module_or_none:
            yield name, value


def changed(before: dict[tuple[str, str], Any]) -> list[str]:
    """What is not as it was; modules and what Keras imports late do not count."""
    now = attributes()
    of_classes = [key for key in now if key not in before and not key[0].endswith(":")]
    known = {where for where, _ in before}
    added = [f"{where}.{name} is new" for where, name in of_classes if where in known]
    other = [f"{where}.{name}" for (where, name), value in before.items() if now.get((where, name), value) is not value]
    return added + other


def used(backends: Sequence[tuple[str, int | None]]) -> dict[str, Any]:
    """Trains with each of the backends, one after the other, leaves, and trains without unidist."""
    before = attributes()
    found: list[dict[str, Any]] = []
    for name, devices in backends:
        unidist.use(name, devices=devices)
        from unidist.keras import hooks

        with unidist.DataParallel(unidist.Mesh({"data": devices or 1})).scope():
            losses = trained()
            drawn()
        found.append({"name": name, "losses": losses, "on": [hook.where for hook in hooks.replaced()]})
    replaced = changed(before)
    unidist.shutdown()
    drawn()
    return {
        "used": found,
        "replaced": replaced,
        "left": changed(before),
        "on": [hook.where for hook in hooks.replaced()],
        "after": trained(),
        "waits": [type(finder).__module__ for finder in sys.meta_path if "unidist" in type(finder).__module__],
    }


def trained() -> list[float]:
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 6)).astype("float32"), rng.normal(size=(16, 1)).astype("float32")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
    return [float(value) for values in history.values() for value in values]


class Noise(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        # Keras on JAX draws without a seed outside of programs alone.
        return x if keras.config.backend() == "jax" else x + keras.random.normal((1, 6))


def drawn() -> None:
    """Draws from Keras's own generator in steps and outside of them."""
    model = keras.Sequential([keras.Input((6,)), Noise(), keras.layers.Dense(8)])
    model.compile("sgd", "mse")
    x = np.ones((8, 6), "float32")
    model.fit(x, x[:, :1], verbose=0)
    assert np.isfinite(keras.ops.convert_to_numpy(keras.random.normal((3,)))).all()


def left(backend: str, devices: int | None, folder: str) -> dict[str, str]:
    """What each way to use a distributed model raises after `shutdown`, and in a scope of another world."""
    unidist.use(backend, devices=devices)
    if devices is None:
        unidist.initialize()
    x, y = np.ones((4, 6), "float32"), np.ones((4, 1), "float32")
    with unidist.ModelParallel(unidist.Mesh({"model": len(unidist.list_devices())})).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    weights = unidist.gather_weights(model)
    unidist.shutdown()
    ways = {
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "call": lambda: model(x),
        "get_weights": model.get_weights,
        "set_weights": lambda: model.set_weights(list(weights.values())),
        "save": lambda: model.save(f"{folder}/model.keras"),
    }
    found = {name: _raised(way) for name, way in ways.items()}
    unidist.use(backend, devices=devices)
    return found | {"in another world": _raised(ways["fit"])}


def _raised(way: Callable[[], object]) -> str:
    try:
        way()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
