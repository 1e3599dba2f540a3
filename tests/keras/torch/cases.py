"""What runs in each of two real processes; every function raises where a check fails."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
import warnings

import numpy as np
import torch


def start(backend="torch"):
    import unidist

    unidist.use(backend)


def source(name):
    import unidist
    from tests.keras.torch.sources import check

    check(name, unidist.DataParallel())


def graphs():
    from tests.keras.torch.sources import check_graphs_in_a_process

    check_graphs_in_a_process()


def unseeded():
    """Weights of models whose initial values nobody seeded, after a fit that shuffles, and what Keras draws then.

    Processes draw apart before it, and between its epochs.
    """
    import keras
    from keras import layers

    import unidist
    from tests.keras.torch.sources import X, Y

    def draw():
        for _ in range(unidist.process_index() + 1):
            keras.random.uniform(())
            torch.rand(())

    between = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: draw() if not epoch else None)
    draw()
    with unidist.DataParallel().scope():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(5), layers.Dropout(0.5), layers.Dense(2)])
        model.compile("adam", loss="mse")
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[between])
    return [*(np.asarray(v) for v in model.weights), np.asarray(keras.random.uniform((3,)))]


def broadcast_from(place):
    """What a process raises in the next fit, where the broadcast takes another's bytes; None: each keeps its own."""
    from unittest import mock

    import keras

    import unidist
    from tests.keras.torch.sources import X, Y
    from unidist.backends.torch.backend import TorchBackend

    original = TorchBackend.broadcast

    def planted(self, x, sharding, axes, root):
        return x if place is None else original(self, x, sharding, axes, place)

    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", loss="mse")
        try:
            with mock.patch.object(TorchBackend, "broadcast", planted):
                model.fit(X, Y, batch_size=4, verbose=0)
        except unidist.DesyncError as error:
            return error.ranks, error.collective, str(error)
    return (), None, ""


def rows_read():
    import keras
    import torch

    import unidist
    from tests.keras.torch.sources import BATCH, Rows

    rows = Rows()
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", loss="mse")
        model.evaluate(torch.utils.data.DataLoader(rows, batch_size=BATCH), verbose=0)
        rows.asked = 0
        model.evaluate(torch.utils.data.DataLoader(rows, batch_size=BATCH), verbose=0)
    # Keras looks at the first batch twice: to build and to compute.
    return rows.asked


class Noted(torch.utils.data.Dataset):
    """Notes, in memory that workers share, who read each row, and a number of each generator that was drawn with it."""

    def __init__(self):
        self.pids = torch.zeros(10, dtype=torch.int64).share_memory_()
        self.drawn = torch.zeros(10, 3).share_memory_()

    def __len__(self):
        return 10

    def __getitem__(self, k):
        self.pids[k] = os.getpid()
        self.drawn[k] = torch.tensor([float(torch.rand(())), random.random(), np.random.uniform()])
        return np.full(6, k, "float32"), np.zeros(2, "float32")


def rows_of_workers():
    """(the rows that this process's workers read, what they drew from each generator, how many workers they were in
    three epochs)."""
    import keras

    import unidist

    rows, pids = Noted(), set()
    loader = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=2, persistent_workers=True)
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", loss="mse")
    seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: pids.update(rows.pids.tolist()))
    model.fit(loader, epochs=3, verbose=0, callbacks=[seen])
    return rows.pids.nonzero().flatten().tolist(), rows.drawn.T.tolist(), len(pids - {0})


def own_parts():
    """auto_shard_dataset=False: every process brings its rows; together they are the batch."""
    import contextlib

    import keras

    import unidist
    from tests.keras.torch.sources import X, Y

    def run(strategy, x, y, batch):
        keras.utils.set_random_seed(2)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
            model.compile("sgd", loss="mse")
            model.fit(x, y, batch_size=batch, verbose=0, shuffle=False)
        return [np.asarray(v) for v in model.weights]

    rank = unidist.process_index()
    mine = slice(0, 6) if rank == 0 else slice(6, 10)
    found = run(unidist.DataParallel(auto_shard_dataset=False), X[mine], Y[mine], 6)
    for a, b in zip(found, run(None, X, Y, 10), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def dataset_parts():
    """What distribute_dataset leaves to this process, and what a model learns from it."""
    import keras
    import tensorflow as tf
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    import unidist
    from tests.keras.torch.sources import X, Y

    def fitted(data, **options):
        keras.utils.clear_session()
        keras.utils.set_random_seed(2)
        with unidist.DataParallel(**options).scope():
            model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
            model.compile("sgd", loss="mse")
            model.fit(data, verbose=0)
        return unidist.gather_weights(model)

    data = tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(4)
    own = unidist.DataParallel().distribute_dataset(data)
    wanted = fitted(data)
    for path, value in fitted(own, auto_shard_dataset=False).items():
        np.testing.assert_allclose(value, wanted[path], atol=1e-5)
    numbers = tf.data.Dataset.range(8).batch(4)
    given = {
        "ours": unidist.DataParallel().distribute_dataset(numbers),
        # Where Keras has it depends on its version.
        "Keras's": TFDatasetAdapter(numbers, distribution=keras.distribution.DataParallel()).get_tf_dataset(),
        "all model": unidist.ModelParallel().distribute_dataset(numbers),
        "each its own": unidist.DataParallel(auto_shard_dataset=False).distribute_dataset(numbers),
    }
    return {kind: [batch.numpy().tolist() for batch in data] for kind, data in given.items()}


def dataset_refused():
    """What is said of data that cannot be parted, and of a mesh in another order."""
    import tensorflow as tf

    import unidist

    def told(distribution, data):
        try:
            distribution.distribute_dataset(data)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    rows = tf.data.Dataset.range(8)
    mesh = unidist.Mesh({"data": 2}, devices=[1, 0])
    return [
        *(told(unidist.DataParallel(), data) for data in (rows.batch(3), rows, [1, 2])),
        told(unidist.DataParallel(mesh), rows.batch(4)),
    ]


def apart(kind):
    """auto_shard_dataset=False, and process 1's data is shorter or raises: (type, text) of what a process raises."""
    import keras

    import unidist
    from tests.keras.torch.sources import X, Y

    second = unidist.process_index() == 1

    def stream():
        for k in range(4):
            if second and k == 2:
                if kind == "raises":
                    raise OSError("the disk of process 1 is gone")
                return
            yield X[k : k + 2], Y[k : k + 2]

    with unidist.DataParallel(auto_shard_dataset=False).scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", loss="mse")
    rows = 4 if second else 8
    data = {"x": X[:rows], "y": Y[:rows], "batch_size": 2} if kind == "shorter arrays" else {"x": stream()}
    told = ("nothing", "")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your input ran out of data")
            model.fit(**data, verbose=0, shuffle=False)
    except (unidist.DesyncError, OSError) as error:
        told = type(error).__name__, str(error)
    return told


def own_steps(zero):
    """A train_step that updates its own metrics, and one with two optimizers."""
    import unidist
    from tests.keras.torch.models import assert_equal, features, train
    from tests.keras.torch.test_steps import OwnTrackers, adversaries, own

    x, y = features()
    both = (unidist.DataParallel(zero=zero), None)
    assert_equal(*(train(own(OwnTrackers), x, y, given, compiled={}) for given in both))
    real = features(out=8)[1]
    for found, wanted in zip(*(adversaries(x, real, given) for given in both), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def creation_peak():
    """(growth of this process's memory while a model is made, bytes of its shards, bytes of the largest variable)."""
    import keras
    from keras import layers

    import unidist

    mesh = unidist.Mesh({"model": 2})
    width, depth = 3072, 4
    rules = unidist.LayoutMap(mesh, {".*/d./kernel": (None, "model"), ".*/d./bias": ("model",)})

    def build():
        return keras.Sequential([layers.Input((width,)), *[layers.Dense(width, name=f"d{k}") for k in range(depth)]])

    with unidist.ModelParallel(mesh, rules).scope():
        keras.Sequential([layers.Input((8,)), layers.Dense(8)])
        before, peak, done = _resident(), [0], threading.Event()

        def watch():
            while not done.is_set():
                peak[0] = max(peak[0], _resident())
                time.sleep(0.0005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        model = build()
        done.set()
        watcher.join()
    rows = unidist.describe(model).rows
    return peak[0] - before, sum(r.bytes_per_device for r in rows), width * width * 4


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def checkpoints(folder):
    import keras

    import unidist
    from tests.keras.torch.models import features, mlp, model_parallel

    mesh = unidist.Mesh({"model": 2})
    x, y = features()
    with model_parallel(mesh=mesh).scope():
        model = mlp()
        model.compile("adam", loss="mse")
        best = keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", monitor="loss", save_best_only=True)
        log = keras.callbacks.CSVLogger(f"{folder}/log.csv")
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[best, log])
        model.save_weights(f"{folder}/w.weights.h5")
        model.save(f"{folder}/model.h5")
    whole = unidist.gather_weights(model)
    # Read back on one device, then into shards of the other axis.
    plain = keras.saving.load_model(f"{folder}/best.keras")
    plain.load_weights(f"{folder}/w.weights.h5")
    same = all(np.array_equal(np.asarray(a), b) for a, b in zip(plain.weights, whole.values(), strict=True))
    rules = {".*a/kernel": ("model", None), ".*b/kernel": (None, "model")}
    with model_parallel(rules, mesh).scope():
        other = mlp()
        other.load_weights(f"{folder}/w.weights.h5")
    again = unidist.gather_weights(other)
    return same and all(np.array_equal(a, b) for a, b in zip(again.values(), whole.values(), strict=True))


def own_loop():
    """A loop without fit: gradients are exact where every rank computes the whole batch on its shards."""
    import keras
    import torch

    import unidist
    from tests.keras.torch.models import features, held, mlp, model_parallel

    x, y = features()

    def run(strategy):
        keras.utils.set_random_seed(3)
        model = mlp()
        if strategy is not None:
            unidist.parallelize(model, strategy)
        optimizer = keras.optimizers.SGD(0.1)
        for _ in range(3):
            model.zero_grad()
            loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
            loss.backward()
            trainable = list(model.trainable_weights)
            with torch.no_grad():
                optimizer.apply([held(v).grad for v in trainable], trainable)
        return [np.asarray(v) for v in model.weights]

    wanted = run(None)
    for a, b in zip(run(model_parallel(mesh=unidist.Mesh({"model": 2}))), wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def rematerialized():
    """Rematerialized in a backward of another thread, against without."""
    import unidist
    from tests.keras.torch.models import model_parallel
    from tests.keras.torch.test_remat import Threaded, trained

    for strategy in (unidist.DataParallel, lambda: model_parallel(mesh=unidist.Mesh({"model": 2}))):
        found, wanted = trained(strategy(), "full", Threaded), trained(strategy(), None)
        for a, b in zip(found.weights, wanted.weights, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def low_rank(folder, ranks=2):
    """A model with low-rank kernels is saved whole: loaded on one device it computes the same."""
    import keras

    import unidist
    from tests.keras.torch.models import features, mlp, model_parallel

    x, y = features()
    with model_parallel(mesh=unidist.Mesh({"model": ranks})).scope():
        model = mlp()
        model.get_layer("a").enable_lora(2)
        model.compile("sgd", loss="mse")
        model.fit(x, y, batch_size=4, verbose=0)
    model.save(f"{folder}/low.keras")
    model.save_weights(f"{folder}/low.weights.h5")
    wanted = model.predict(x, verbose=0)
    np.testing.assert_allclose(keras.saving.load_model(f"{folder}/low.keras").predict(x, verbose=0), wanted, atol=1e-5)
    plain = mlp()
    plain.load_weights(f"{folder}/low.weights.h5")
    np.testing.assert_allclose(plain.predict(x, verbose=0), wanted, atol=1e-5)
