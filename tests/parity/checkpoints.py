"""What the processes of the parity suite write to checkpoints and read from them: values known beforehand."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any
from unittest import mock

import numpy as np

from tests.parity.train import Spec
from tests.support.clearing import cleared

SHAPES = {"first": (6, 16), "odd": (16, 7), "last": (7, 4)}
# Beside kernels and biases: (shape, dtype, trainable) of a layer's own.
OTHERS = {
    "brain": ((5, 4), "bfloat16", False),
    "half": ((), "float16", False),
    "bytes": ((3, 3), "int8", False),
    "count": ((2,), "int32", False),
}
RULES = {".*first/kernel": (None, "model"), ".*first/bias": ("model",), ".*odd/kernel": ("model", None)}


def value_of(path: str, shape: tuple[int, ...], dtype: str) -> Any:
    """The value of a variable of the written checkpoints, with what arithmetic would lose."""
    import ml_dtypes  # noqa: F401 (NumPy's bfloat16)

    draw = np.random.default_rng(zlib.crc32(path.encode()))
    if np.dtype(dtype).kind in "iu":
        return draw.integers(0, 100, shape).astype(dtype)
    found = draw.normal(size=shape).astype(dtype)
    # Frameworks turn a NaN of 16 bits into another one when it is assigned.
    if found.size > 4 and dtype == "float32":
        found.reshape(-1)[:3] = np.array([-0.0, np.nan, np.inf], found.dtype)
    return found


def strategy_of(spec: Spec) -> Any:
    import unidist

    mesh = unidist.Mesh(dict(spec.axes), spec.devices)
    if spec.kind == "data":
        return unidist.DataParallel(mesh, zero=spec.zero)
    return unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, RULES), zero=spec.zero)


def build(spec: Spec | None, *, sizes: dict[str, tuple[int, int]] | None = None) -> Any:
    import keras

    class Others(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            for name, (own, dtype, trainable) in OTHERS.items():
                self.add_weight(shape=own, dtype=dtype, trainable=trainable, name=name, initializer="zeros")

        def call(self, x: Any) -> Any:
            return x

    cleared()
    keras.utils.set_random_seed(7)
    with contextlib.nullcontext() if spec is None else strategy_of(spec).scope():
        layers: list[Any] = [keras.Input((6,)), keras.layers.Dropout(0.1, seed=3, name="drop")]
        layers += [keras.layers.Dense(n, name=name) for name, (_, n) in (sizes or SHAPES).items()]
        model = keras.Sequential([*layers, Others(name="others")], name="net")
        model.compile(keras.optimizers.Adam(0.125), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def variables(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def fill(model: Any) -> None:
    for variable in variables(model):
        variable.assign(value_of(variable.path, tuple(variable.shape), str(variable.dtype)))


def assert_known(values: dict[str, Any], reader: str) -> None:
    """The bits of all variables are those of `fill`, as a setting has read them."""
    assert len(values) == 1 + 6 + len(OTHERS) + 2 + 2 * 6
    for path, bits in values.items():
        if path.endswith(("seed_generator_state", "iteration", "learning_rate")):
            continue
        dtype = OTHERS.get(path.rsplit("/", 1)[-1], ((), "float32", True))[1]
        wanted = value_of(path, bits.shape, dtype)
        if reader.startswith("tensorflow-"):
            # The values are asked for as users do: DTensor gathers them by a sum, which has no -0.0.
            bits, wanted = bits.view(np.dtype(dtype)).astype(float), wanted.astype(float)
        np.testing.assert_array_equal(bits, wanted.view(bits.dtype), err_msg=path)


def write(folder: str, spec: Spec | None, step: int = 5) -> tuple[int, dict[str, float]]:
    """(variables that are cut, op -> bytes that were sent) of a checkpoint that all processes write."""
    import unidist

    model = build(spec)
    if spec is not None:
        unidist.describe(model)  # on DTensor a model is placed when it is first used
    fill(model)
    with unidist.ledger() as sent:
        unidist.save(model, folder, step=step, facts={"note": 1.5})
    ops = {event.op for event in sent.events if event.purpose.startswith("saving ")}
    told = {op: float(sum(e.bytes for e in sent.events if e.op == op)) for op in ops}
    return len(unidist.describe(model).sharded) if spec is not None else 0, told


def read(folder: str, spec: Spec | None) -> tuple[dict[str, Any], tuple[Any, ...], float]:
    """(path -> bits of the value, (step, facts, what was skipped), bytes read / bytes of this process's shards)."""
    import unidist
    from unidist.checkpoint.reading import Reader
    from unidist.keras.checkpoint.states import State

    read: list[int] = []

    class Counting(Reader):
        def close(self) -> None:
            read.append(self.bytes_read)
            super().close()

    model = build(spec)
    with mock.patch("unidist.keras.checkpoint.api.Reader", Counting):
        found = unidist.restore(model, folder)
    own = sum(_bytes(held, model) for _, held in State.of(model).variables)
    values = {v.path: _bits(np.asarray(v)) for v in variables(model)}
    return values, (found.step, dict(found.facts), found.skipped), sum(read) / own


def _bits(value: Any) -> Any:
    return np.ascontiguousarray(value).view(np.dtype(f"u{value.itemsize}"))


def _bytes(held: Any, model: Any) -> int:
    """What this process stores of a variable, replicas once."""
    from unidist.backends.protocol import itemsize

    if held.sharding is None:
        return int(np.prod(held.shape)) * itemsize(held.dtype)
    from unidist import session

    ranks = [rank for rank in session.backend().local_ranks() if rank in held.sharding.mesh.devices]
    regions = {held.sharding.region(rank) for rank in ranks}
    return sum(int(np.prod([n for _, n in region])) for region in regions) * itemsize(held.dtype)


def amid_a_fit(folder: str, spec: Spec) -> tuple[list[Any], Any]:
    """(a kernel as it was saved after each of three steps, the kernel at the end)."""
    import keras

    import unidist
    from unidist.checkpoint.reading import Reader

    cleared()
    with strategy_of(spec).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="layer")], name="net")
        model.compile("sgd", "mse")
    seen: list[Any] = []

    def save(batch: int, logs: Any) -> None:
        with Reader(unidist.save(model, folder, step=batch)) as reader:
            seen.append(reader.read("net/layer/kernel").view("float32").reshape(4, 8))

    saving = keras.callbacks.LambdaCallback(on_train_batch_end=save)
    model.fit(np.ones((24, 4)), np.ones((24, 8)), batch_size=8, verbose=0, callbacks=[saving])
    return seen, np.asarray(model.layers[0].kernel)
