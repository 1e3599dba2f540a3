"""Programs of users on TensorFlow that the parity suite runs in worlds of four devices."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from tests.support.clearing import cleared

BEHAVIOURS = (
    "numpy_in_and_out",
    "parallelized_when_trained",
    "keras_distribution",
    "joined_before_a_row_layer",
    "sliced_behind_a_column_layer",
    "cut_along_another_dim",
    "slices_of_rows",
    "weights_that_are_gathered",
    "layers_that_slice",
    "layers_that_sort",
    "layers_that_mix_rows",
    "layers_of_matrices",
    "convolutions_before_pools",
    "a_loss_of_all_pairs",
    "steps_of_a_sequence_that_are_cut",
    "states_between_batches",
    "rows_that_are_counted_eagerly",
    "laid_by_hand",
)
# Those in which processes could part.
IN_PROCESSES = ("numpy_in_and_out", "keras_distribution")


def _data(rows: int = 32) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 16)).astype("float32"), rng.integers(0, 10, rows).astype("int32")


def _model(optimizer: Any = "adam", cls: Any = None, **options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(8, activation="relu", name="up")(inputs)
    model = (cls or keras.Model)(inputs, keras.layers.Dense(10, name="head")(hidden))
    loss = options.pop("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


def _grid() -> Any:
    import unidist

    mesh = unidist.Mesh({"data": 2, "model": 2})
    return unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, {"up/kernel": (None, "model")}))


def _same(found: Any, wanted: Any) -> None:
    for path, value in wanted.items():
        np.testing.assert_allclose(found[path], value, atol=1e-5, rtol=1e-5, err_msg=path)


def _weights(model: Any) -> dict[str, Any]:
    import unidist

    return unidist.gather_weights(model)


def _compare(run: Any, cls: Any = None, **options: Any) -> None:
    """The same program on one device and on the grid."""
    alone = _model(cls=cls, **options)
    wanted = run(alone)
    with _grid().scope():
        spread = _model(cls=cls, **options)
    found = run(spread)
    _same({"result": found}, {"result": wanted})
    _same(_weights(spread), _weights(alone))
    import unidist

    described = unidist.describe(spread)
    assert described.sharded
    assert described.why == {"up": "DTensor chooses how it computes with the shards of 'kernel'"}


def numpy_in_and_out() -> None:
    """Between a training and single batches too."""
    x, y = _data()

    def run(model: Any) -> Any:
        model.fit(x, y, batch_size=8, verbose=0)
        made = np.asarray(model(x)).ravel()
        return [*made, *model.train_on_batch(x, y), *model.test_on_batch(x, y), *model.predict_on_batch(x).ravel()]

    _compare(run)


def convolutions_before_pools() -> None:
    """The gradient of an average of pools comes whole to the convolution before it; the last batch has one row."""
    import keras

    import unidist

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 8, 8, 3)).astype("float32"), rng.normal(size=(9, 2)).astype("float32")

    def trained(strategy: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(3)
        layers = [
            keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="first"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same", name="second"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(2, name="third"),
        ]
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((8, 8, 3)), *layers], name="convolutions")
            model.compile("sgd", "mse")
        return model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"], _weights(model)

    wanted, weights = trained(None)
    with unidist.ledger() as traffic:
        found, others = trained(unidist.DataParallel(unidist.Mesh({"data": 2, "other": 2}), data_axis="data"))
    _same({"result": found, **others}, {"result": wanted, **weights})
    assert traffic.events


def parallelized_when_trained() -> None:
    import unidist

    x, y = _data()
    alone, later = _model(), _model()
    for model in (alone, later):
        model.fit(x, y, batch_size=8, verbose=0)
    unidist.parallelize(later, _grid())
    for model in (alone, later):
        model.fit(x, y, batch_size=8, verbose=0)
    _same(_weights(later), _weights(alone))


def slices_of_rows() -> None:
    """A loss that indexes rows and labels in ways at which DTensor by itself crashes, fails or is wrong."""
    import tensorflow as tf

    x, y = _data()

    def loss(y_true: Any, y_pred: Any) -> Any:
        late = tf.shape(y_pred)[0] - 3
        weights = tf.cast(y_true[::-1] + y_true[0] + y_true[late], "float32")
        rows = tf.linalg.band_part(y_pred, 2, 3) * tf.roll(y_pred, 1, 0)
        rows += y_pred[::-1] * y_pred[-1] + y_pred[late] + y_pred[3:, None][:-2, 0, :][0]
        apart = tf.reduce_sum(tf.square(y_pred[:, tf.newaxis, 1:] - y_pred[None, ..., ::3][..., :1, None][..., 0]), -1)
        steps = tf.reduce_sum(tf.square(y_pred[::5, None, 2:-1, None]))
        return tf.reduce_mean(tf.square(rows), -1) * tf.reshape(weights, (-1,)) + tf.reduce_mean(apart, -1) + steps

    def run(model: Any) -> Any:
        model.compile("sgd", loss)
        return model.fit(x, y / 100, batch_size=8, verbose=0).history["loss"]

    _compare(run)


def weights_that_are_gathered() -> None:
    """Weights of no product and no look-up are gathered when they are read, and describe says so."""
    import keras

    import unidist

    x = keras.Input((16,))
    model = keras.Model(x, keras.layers.Dense(8, name="up")(keras.layers.LayerNormalization(name="norm")(x)))
    mesh = unidist.Mesh({"data": 2, "model": 2})
    rules = unidist.LayoutMap(mesh, {"norm/gamma": ("model",)})
    unidist.parallelize(model, unidist.ModelParallel(mesh, rules, zero=3))
    assert unidist.describe(model).why == {
        "norm": "gathered for each call: data axes cut 'beta'; gathered for each call: DTensor is given shards of the "
        "weights of products and look-ups alone, as of 'gamma'",
        "up": "gathered for each call: data axes cut 'kernel' and 'bias'",
    }


def layers_that_slice() -> None:
    """In training, and where the model is called as a function."""
    import keras

    class Sliced(keras.Model):
        def call(self, x: Any) -> Any:
            found = super().call(x)
            return found[:, None, ::-1][:, 0] + 0.1 * found[0] + found[None, 1:2][0]

    x, y = _data()

    def run(model: Any) -> Any:
        before = np.asarray(model(x))
        model.fit(x, y, batch_size=8, verbose=0)
        return np.concatenate([before, model.predict(x, batch_size=8, verbose=0), np.asarray(model(x))])

    _compare(run, cls=Sliced)


def layers_that_sort() -> None:
    """Gradients of what is sorted are scattered over the rows of all devices."""
    import keras
    from keras import ops

    class Sorted(keras.Model):
        def call(self, x: Any) -> Any:
            found = super().call(x)
            largest, _ = ops.top_k(ops.mean(found, axis=-1), 3)
            return ops.sort(found, axis=-1) + ops.mean(largest)

    x, y = _data()
    _compare(lambda model: model.fit(x, y, batch_size=8, verbose=0).history["loss"], cls=Sorted)


def layers_that_mix_rows() -> None:
    """Of rows and features that are cut: what DTensor refuses, or gets wrong, of shards."""
    import keras
    from keras import ops

    class Mixed(keras.Model):
        def call(self, x: Any) -> Any:
            found = super().call(x)
            wide = self.layers[1](x)
            half = wide - ops.median(wide, axis=0) + ops.quantile(wide, 0.3) * ops.sort(wide, axis=0)
            half += ops.take_along_axis(wide, ops.argsort(wide, axis=0), axis=0) * ops.take_along_axis(
                wide, ops.argmin(wide, axis=-1)[:, None] - 8, axis=-1
            )
            groups = ops.convert_to_tensor(np.arange(8, dtype="int32") % 3)
            half += ops.take(ops.segment_max(wide, groups, num_segments=3), groups, axis=0)
            half += ops.take(ops.segment_sum(wide, groups, num_segments=3), groups, axis=0)
            half += ops.cumprod(1 + 0.1 * wide, axis=0) + ops.tile(wide, (2, 1))[4:12] + ops.tile(wide, (1, 3))[:, 3:11]
            half += ops.pad(wide, ((0, 0), (1, 1)), mode="reflect")[:, 2:]
            half += ops.scatter(np.array([[1], [6]], "int32"), wide[:2], (8, 8))
            return found + ops.sum(half, axis=-1, keepdims=True)

    x, y = _data()
    _compare(lambda model: model.fit(x, y, batch_size=8, verbose=0).history["loss"], cls=Mixed)


def layers_of_matrices() -> None:
    import keras
    from keras import ops

    class Matrices(keras.Model):
        def call(self, x: Any) -> Any:
            found = super().call(x)
            wide = self.layers[1](x)
            pairs = ops.reshape(wide, (-1, 2, 4))
            small = 0.1 * ops.matmul(pairs, ops.transpose(pairs, (0, 2, 1))) + 3 * ops.eye(2)
            of_rows = 0.1 * ops.matmul(wide, ops.transpose(wide)) + 3 * ops.eye(8)
            own = ops.inv(small) + ops.cholesky(small) + ops.solve(small, small * small)
            spread = ops.det(small) + ops.svd(small, compute_uv=False)[:, 0] + ops.eigh(small)[0][:, 1]
            mixed = ops.mean(ops.matmul(ops.inv(of_rows), wide), axis=-1, keepdims=True)
            return found + ops.sum(own, axis=(1, 2))[:, None] + 0.1 * spread[:, None] + mixed

    x, y = _data()
    _compare(lambda model: model.fit(x, y, batch_size=8, verbose=0).history["loss"], cls=Matrices)


def a_loss_of_all_pairs() -> None:
    """A model's own loss is given whole batches: products of rows with rows are beyond DTensor's shards."""
    import keras
    import tensorflow as tf

    class Pairs(keras.Model):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            own = super().compute_loss(x, y, y_pred, sample_weight)
            same = tf.cast(y[:, None] == y[None], "float32")
            return own + tf.reduce_mean(tf.square(tf.matmul(y_pred, y_pred, transpose_b=True) - same))

    def of_pairs(y_true: Any, y_pred: Any) -> Any:
        alike = tf.matmul(y_pred, y_pred, transpose_b=True)
        alike -= tf.reduce_max(alike, axis=1, keepdims=True)
        kinds = tf.reshape(y_true, [-1, 1])
        near = tf.cast(tf.equal(kinds, tf.transpose(kinds)), "float32")
        shares = alike - tf.math.log(tf.reduce_sum(tf.exp(alike), axis=1, keepdims=True))
        return -tf.reduce_mean(tf.reduce_sum(near * shares, axis=1))

    x, y = _data()
    _compare(lambda model: model.fit(x, y, batch_size=10, verbose=0).history["loss"], cls=Pairs)
    _compare(lambda model: model.fit(x, y, batch_size=8, verbose=0).history["loss"], loss=of_pairs)


def keras_distribution() -> None:
    import keras

    x, y = _data()
    alone = _model()
    wanted = alone.fit(x, y, batch_size=8, verbose=0).history["loss"]
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        spread = _model()
        found = spread.fit(x, y, batch_size=8, verbose=0).history["loss"]
        _same({"loss": found, **_weights(spread)}, {"loss": wanted, **_weights(alone)})
    finally:
        keras.distribution.set_distribution(None)


def without_a_rule() -> tuple[str, str]:
    import keras

    import unidist

    mesh = unidist.Mesh({"model": 4})
    with unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, {"up/kernel": (None, "model")})).scope():
        inputs = keras.Input((16,))
        halves = keras.ops.split(keras.layers.Dense(8, use_bias=False, name="up")(inputs), 2, axis=-1)
        model = keras.Model(inputs, halves[0] + halves[1])
    try:
        model.predict(_data()[0], verbose=0)
    except unidist.UnidistError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def joined_before_a_row_layer() -> None:
    """A concatenation before a kernel that is cut along its dim: DTensor would let each device join its own pieces."""
    import keras

    def net(x: Any) -> Any:
        both = [keras.layers.Dense(16, "tanh")(x[:, 0]), keras.layers.GlobalAveragePooling1D()(x)]
        return keras.layers.Dense(3, name="head")(keras.layers.Concatenate()(both))

    _compare_net(net, {"head/kernel": ("model",)})


def sliced_behind_a_column_layer() -> None:
    """The gradient of a slice of what is cut along its dim is padded with zeros."""
    import keras
    import tensorflow as tf

    def net(x: Any) -> Any:
        wide = keras.layers.Dense(16, "tanh", name="wide")(x)
        part = keras.layers.Lambda(lambda t: tf.slice(t, [0, 1, 4], [-1, 4, 8]))(wide)
        return keras.layers.Dense(3, name="head")(keras.layers.GlobalAveragePooling1D()(part))

    _compare_net(net, {"wide/kernel": (None, "model")})


def _compare_net(net: Any, rules: Any) -> None:
    """Trained on one device and by rules on the grid."""
    import keras

    import unidist

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 6, 16)).astype("float32"), rng.normal(size=(10, 3)).astype("float32")

    def trained(strategy: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6, 16))
        model = keras.Model(inputs, net(inputs))
        model.compile("sgd", "mse")
        if strategy is not None:
            unidist.parallelize(model, strategy)
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        return history, model

    mesh = unidist.Mesh({"data": 2, "model": 2})
    wanted, alone = trained(None)
    found, spread = trained(unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules)))
    assert unidist.describe(spread).sharded
    _same({"loss": found}, {"loss": wanted})
    for a, b in zip(_weights(spread).values(), alone.weights, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), atol=1e-5)


def cut_along_another_dim() -> None:
    """Tensors of up to five dims that DTensor moves from a cut of one dim to one of another."""
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    import unidist
    from unidist.algebra import Layout
    from unidist.keras.tensorflow import slicing, values, worlds

    mesh = unidist.Mesh({"data": 2, "model": 2})
    native = worlds.native_mesh(mesh)
    whole = np.arange(4 * 6 * 2 * 8 * 4, dtype="float32").reshape(4, 6, 2, 8, 4)
    for ndim in (3, 4, 5):
        value = whole.reshape(*whole.shape[: ndim - 1], -1)
        layouts = [worlds.native_layout(Layout(*[None] * dim, "model"), value.shape, mesh) for dim in range(value.ndim)]
        for before in layouts:
            for after in layouts:
                with slicing.on(native):
                    move = tf.function(lambda x, to=after: dtensor.relayout(x, to), autograph=False)
                    moved = move(values.put(value, before))
                np.testing.assert_array_equal(values.whole(moved), value)


def steps_of_a_sequence_that_are_cut() -> None:
    """Recurrent layers and TimeDistributed take and stack steps, around layers whose kernels are found to be cut. What
    is masked is so in both directions."""
    import keras

    import unidist

    rng = np.random.default_rng(0)
    x, y = rng.integers(1, 20, (8, 3)) * (np.arange(3) <= np.arange(8)[:, None] % 3), rng.normal(size=(8, 3, 20))
    trained = []
    for mesh in (None, unidist.Mesh({"data": 2, "model": 2})):
        keras.utils.set_random_seed(1)
        both = keras.layers.Bidirectional(keras.layers.GRU(4, return_sequences=True))
        steps = [both, keras.layers.TimeDistributed(keras.layers.Dense(20))]
        words = keras.layers.Embedding(20, 12, mask_zero=True)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), words, *steps])
        model.compile("sgd", "mse")
        if mesh is not None:
            unidist.parallelize(model, unidist.ModelParallel(mesh))
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        trained.append([np.asarray(v) for v in model.weights])
    for found, wanted in zip(*trained, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def states_between_batches() -> None:
    """Of a stateful layer, where every device has all rows: one must not write a state that another is to read."""
    import keras

    import unidist

    x = np.random.default_rng(0).normal(size=(32, 2, 4)).astype("float32")
    found = []
    for mesh in (None, unidist.Mesh({"model": 4})):
        keras.utils.set_random_seed(1)
        layers = [keras.Input(batch_shape=(8, 2, 4)), keras.layers.SimpleRNN(3, stateful=True)]
        model = keras.Sequential(layers)
        if mesh is not None:
            unidist.parallelize(model, unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, strict=False)))
        found.append(model.predict(x, batch_size=8, verbose=0))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


def rows_that_are_counted_eagerly() -> None:
    """Of a dataset that does not say how many rows a batch has: a model is built before there is one."""
    import keras
    import tensorflow as tf

    import unidist

    class Counting(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = keras.layers.Dense(8, name="up"), keras.layers.Dense(10, name="head")

        def call(self, x: Any) -> Any:
            return self.head(tf.reshape(self.up(x), (x.shape[0], 8)))

    x, y = _data()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def trained(scope: Any) -> Any:
        keras.utils.set_random_seed(0)
        with scope:
            model = Counting()
            model.compile("sgd", loss, run_eagerly=True)
        return model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), verbose=0).history["loss"]

    spread = unidist.DataParallel().scope()
    np.testing.assert_allclose(trained(spread), trained(contextlib.nullcontext()), atol=1e-5)


def laid_by_hand() -> None:
    """A variable with a layout of its own, and its slots, of an optimizer that was built before the hooks were on."""
    from unittest import mock

    import keras

    import unidist
    from unidist.keras.patching.compat import BaseOptimizer

    class Squaring(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            lies = keras.distribution.TensorLayout((None, "model"))
            self.kernel = keras.Variable("glorot_uniform", (shape[-1],) * 2, layout=lies, name="kernel")

        def call(self, x: Any) -> Any:
            return x @ self.kernel

    x, found = np.ones((8, 4), "float32"), []
    hook: Any = BaseOptimizer.add_variable_from_reference
    for mesh in (None, unidist.Mesh({"model": 4})):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), Squaring(), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        with mock.patch.object(BaseOptimizer, "add_variable_from_reference", getattr(hook, "__wrapped__", hook)):
            model.optimizer.build(model.trainable_variables)
        if mesh is not None:
            unidist.parallelize(model, unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, strict=False)))
        found.append(model.fit(x, x, batch_size=4, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    cut = [row for row in unidist.describe(model).rows if row.layout == unidist.Layout(None, "model")]
    assert [row.kind for row in cut] == ["weights", "slots"], cut


def in_one_line() -> dict[str, Any]:
    """TensorParallelKeras without a rule, against one device."""
    import unidist

    x, y = _data()
    alone, one = _model(), _model()
    parallel = unidist.TensorParallelKeras(one, world_size=4, distributed_backend="tensorflow")
    wanted = alone.fit(x, y, batch_size=8, verbose=0).history["loss"]
    found = parallel.fit(x, y, batch_size=8, verbose=0).history["loss"]
    _same({"loss": found}, {"loss": wanted})
    for a, b in zip(_weights(one).values(), alone.weights, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), atol=1e-5)
    return dict(parallel.get_parallelism_info())


def own_data(kind: str, parts: list[tuple[int, int]]) -> dict[str, Any]:
    """auto_shard_dataset=False: each process is given its rows (start, stop) of the data; against one device with what
    they make together, batch by batch. What the ledger says of the joint training: purpose -> number of collectives."""
    import unidist

    x, y = _data(40)
    alone, model = _model("sgd"), _model("sgd")
    unidist.parallelize(model, _own(kind))
    together = parts if kind != "model" else parts[:1]
    batches = [np.concatenate(rows) for rows in _interleaved(together, 4)]
    start, stop = parts[unidist.process_index()]
    own = {"batch_size": 4, "shuffle": False, "verbose": 0}
    with unidist.ledger() as book:
        history = model.fit(
            x[start:stop], y[start:stop], epochs=2, validation_data=(x[start:stop], y[start:stop]), **own
        )
    wanted: dict[str, list[float]] = {}
    for _ in range(2):
        joined = ((x[rows], y[rows]) for rows in batches)
        held = ((x[rows], y[rows]) for rows in batches)
        steps = {"steps_per_epoch": len(batches), "validation_steps": len(batches)}
        for key, found in alone.fit(joined, validation_data=held, shuffle=False, verbose=0, **steps).history.items():
            wanted.setdefault(key, []).extend(found)
    _same(history.history, wanted)
    predicted = model.predict(x[start:stop], batch_size=4, verbose=0)
    _same({"predict": predicted}, {"predict": np.concatenate([alone(x[rows]) for rows in batches])})
    single = batches[0]
    first = slice(start, min(start + 4, stop))
    _same(
        {"on batch": model.train_on_batch(x[first], y[first])}, {"on batch": alone.train_on_batch(x[single], y[single])}
    )
    _same(_weights(model), _weights(alone))
    told: dict[str, int] = {}
    for event in book.events:
        told[event.purpose] = told.get(event.purpose, 0) + 1
    return told


def _own(kind: str) -> Any:
    import unidist

    if kind == "data":
        return unidist.DataParallel(auto_shard_dataset=False)
    axes = {"data": 2, "model": 2} if kind == "grid" else {"model": 4}
    mesh = unidist.Mesh(axes)
    rules = unidist.LayoutMap(mesh, {"up/kernel": (None, "model")})
    return unidist.ModelParallel(mesh, rules, auto_shard_dataset=False)


def _interleaved(parts: list[tuple[int, int]], size: int) -> Any:
    """The rows that all parts together have in each batch."""
    for k in range(max(-(-(stop - start) // size) for start, stop in parts)):
        yield [
            np.arange(start + k * size, max(start + k * size, min(start + (k + 1) * size, stop)))
            for start, stop in parts
        ]


def own_data_apart(kind: str) -> tuple[str, str]:
    """The second process's own data raises, holds nothing, or differs from that of the first, which it must not: what
    a process raises."""
    import unidist

    x, y = _data()
    second = unidist.process_index() == 1

    class Source(keras_dataset()):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, k: int) -> Any:
            if second and kind == "raises" and k == 2:
                raise OSError("the disk of process 1 is gone")
            rows = slice(4 * k, 4 * k + (3 if second and kind == "differs" else 4))
            return x[rows], y[rows]

    given = (x[:0], y[:0]) if second and kind == "nothing" else (Source(),)
    try:
        with _own("model" if kind == "differs" else "data").scope():
            _model("sgd").fit(*given, verbose=0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def keras_dataset() -> Any:
    import keras

    return keras.utils.PyDataset


def seeded_apart() -> dict[str, Any]:
    """The weights after a shuffled training with dropout, which every process starts with another seed."""
    import keras

    import unidist

    x, y = _data()
    cleared()
    keras.utils.set_random_seed(5 + unidist.process_index())
    mesh = unidist.Mesh({"model": 4})
    with unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, {"net/up/kernel": (None, "model")})).scope():
        layers = [keras.Input((16,)), keras.layers.Dense(8, "relu", name="up"), keras.layers.Dropout(0.5)]
        model = keras.Sequential([*layers, keras.layers.Dense(10, name="head")], name="net")
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(x, y, batch_size=8, verbose=0)
    return _weights(model)


def made_apart(place: int | None) -> dict[str, Any]:
    """The weights after a training of a model that each process made by itself, with a seed of its own. With a
    place: what the process there would have trained alone."""
    import keras

    import unidist

    x, y = _data()
    cleared()
    keras.utils.set_random_seed(5 + (unidist.process_index() if place is None else place))
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(10)], name="net")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with unidist.DataParallel().scope() if place is None else contextlib.nullcontext():
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    return {variable.path: np.array(variable) for variable in model.variables}


def sum_of_saved(path: str) -> float:
    """The sum of what a saved model predicts for the rows of the script in test_tensorflow.py."""
    import keras

    x = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
    return float(keras.models.load_model(path).predict(x, verbose=0).sum())


def traffic(
    eager: bool = False, traced: bool = False
) -> dict[str, list[tuple[str, tuple[str, ...], tuple[int, ...], float]]]:
    """Purpose -> what the ledger says of one run of a step: op, axes, ranks and bytes."""
    import tensorflow as tf

    import unidist

    x, y = _data(8)
    with _grid().scope():
        model = _model("sgd", run_eagerly=eager)
    if traced:
        tf.summary.trace_on(graph=True)
    model.fit(x, y, batch_size=8, verbose=0)
    with unidist.ledger() as book:
        model.fit(x, y, batch_size=8, verbose=0)
        model.predict(x[:6], batch_size=4, verbose=0)
    tf.summary.trace_off()
    told: dict[str, list[Any]] = {}
    for event in book.events:
        told.setdefault(event.purpose, []).append((event.op, event.axes, event.ranks, float(event.bytes)))
    return told


def averages() -> list[float]:
    """Bytes of a step at stage 3, without averages of the weights and with."""
    import keras

    import unidist

    x, y = _data(8)
    sent = []
    for use_ema in (False, True):
        with unidist.DataParallel(zero=3).scope():
            model = _model(keras.optimizers.SGD(0.1, use_ema=use_ema, ema_momentum=0.5))
        with unidist.ledger() as book:
            model.fit(x, y, batch_size=8, verbose=0)
        sent.append(float(book.bytes(purpose="train step (compiled)")))
    return sent


def combined(combiner: str, relay: bool) -> float:
    """The largest error of the weights after steps with momentum. Traced arguments x and y order the graph."""
    import unidist

    unidist.use("tensorflow", devices=4)
    import os

    import keras
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    from unidist.keras.tensorflow import placing, trainer, values, worlds

    os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] = combiner
    trainer.RELAY = relay
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 32, 16)).astype("float32")
    classes = rng.integers(0, 10, (3, 32)).astype("int32")

    def made() -> Any:
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(8, activation="relu", name="d1")]
        model = keras.Sequential([*layers, keras.layers.Dense(10, name="d3")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=loss)
        model.optimizer.build(model.trainable_variables)
        return model

    def step_of(model: Any) -> Any:
        def f(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            own = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, [v.value for v in own]), own)
            return (loss,)

        return tf.function(f)

    alone, spread = made(), made()
    distribution = unidist.DataParallel(unidist.Mesh({"batch": 4}))
    placing.place_model(spread, distribution)
    mesh = worlds.native_mesh(distribution.mesh)
    on_one, on_four = step_of(alone), step_of(spread)
    for x, y in zip(rows, classes, strict=True):
        on_one(tf.constant(x), tf.constant(y))
        with dtensor.default_mesh(mesh):
            on_four(trainer.pack(x, distribution), trainer.pack(y, distribution))
    pairs = zip(alone.trainable_variables, spread.trainable_variables, strict=True)
    return max(float(np.abs(a.numpy() - values.whole(b._value)).max()) for a, b in pairs)


def cut_over_horovod(axes: dict[str, int]) -> list[Any]:
    """(rank, total, what a step cuts, what a Sharding holds) where these two differ, on a mesh of the axes."""
    from types import SimpleNamespace

    import tensorflow as tf

    from unidist.algebra import Layout, Mesh, Sharding
    from unidist.keras.tensorflow_horovod.traced import Traced

    mesh = Mesh(axes)
    given: Any = SimpleNamespace(mesh=mesh, strategy=SimpleNamespace(data_axes=mesh.axis_names))
    apart = []
    for rank, total in ((rank, total) for rank in mesh.devices for total in range(14)):
        traced = Traced(given, SimpleNamespace(rank=rank))
        start, length = (int(number) for number in traced.rows(tf.constant(total)))
        held = Sharding(mesh, Layout(mesh.axis_names), (total,)).region(rank)[0]
        if (start, length) != held or length not in traced.lengths(total):
            apart.append((rank, total, (start, length), held))
    return apart
