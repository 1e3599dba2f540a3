"""What the processes of the tests run: places, rules, data sources, saving, the ledger."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import keras
import numpy as np

import unidist
from tests.keras.jax.models import BATCH, CASES, ROWS, compile_case
from tests.keras.jax.programs import made
from tests.support.runs import PAIR, Result, fresh, is_first, scope, strategy, told
from unidist.keras.patching.compat import BaseOptimizer


def entrance(kind: str | None, how: str) -> Result:
    """A model made in the scope and used outside of it: in this thread, another, or after clear_session."""
    fresh()
    data = CASES["mlp"].data()
    with scope(strategy(kind)):
        model = CASES["mlp"].build()
        if how != "compiled outside":
            compile_case(model, CASES["mlp"], "adam")
    if how == "compiled outside":
        compile_case(model, CASES["mlp"], "adam")
    if how == "after clear_session":
        keras.utils.clear_session()
        keras.utils.set_random_seed(7)
    found: Result = {}

    def use() -> None:
        with unidist.ledger() as book:
            found["history"] = model.fit(**data, batch_size=BATCH, epochs=1, verbose=0).history
        found["sent"] = float(book.bytes())
        found["predict"] = model.predict(data["x"], batch_size=9, verbose=0)

    if how == "in another thread":
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    else:
        use()
    assert keras.distribution.distribution() is None
    return {**found, **told(model)}


def built_before(kind: str | None, trained_before: bool) -> Result:
    """A model built, and perhaps trained, before the scope in which it is trained."""
    fresh()
    data = CASES["mlp"].data()
    model = made("mlp", "adam")
    if trained_before:
        model.fit(**data, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    with scope(strategy(kind)), unidist.ledger() as book:
        history = model.fit(**data, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    return {"history": history, "sent": float(book.bytes()), **told(model)}


def parallelized(kinds: tuple[str | None, ...]) -> Result:
    """A trained model placed on one strategy after another and trained on each. Its optimizer is built before the hooks
    are on."""
    fresh()
    data = CASES["mlp"].data()
    model = made("mlp", "adam")
    hook: Any = BaseOptimizer.add_variable_from_reference
    with mock.patch.object(BaseOptimizer, "add_variable_from_reference", getattr(hook, "__wrapped__", hook)):
        model.optimizer.build(model.trainable_variables)
    losses = []
    for kind in kinds:
        if kind is not None:
            assert unidist.parallelize(model, strategy(kind)) is model
        with unidist.ledger() as book:
            losses += model.fit(**data, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history["loss"]
    return {"history": losses, "gathers": book.count("all_gather"), **told(model)}


class CustomStep(keras.Model):
    """A train_step written by hand, which sees the true rows of every batch."""

    rows_seen: list[int]

    def train_step(self, state: Any, data: Any) -> Any:
        self.rows_seen.append(data[0].shape[0])
        return super().train_step(state, data)


def stepped(kind: str | None, how: str) -> Result:
    """Other ways to run the steps: eagerly, by hand, one batch at a time."""
    fresh()
    case = CASES["conv"]
    # Eagerly each op is a program of its own for each size of batches.
    rows, tested = (BATCH, BATCH) if how == "eagerly" else (None, ROWS // 2)
    data = {key: case.data()[key][:rows] for key in ("x", "y")}
    with scope(strategy(kind, case.rules)):
        model = case.build()
        if how == "custom step":
            model = CustomStep(model.inputs, model.outputs, name="conv")
            model.rows_seen = []
        options = {"run_eagerly": True} if how == "eagerly" else {}
        compile_case(model, case, "momentum", **options)
    if how == "by batch":
        outputs = []
        for start in range(0, ROWS, BATCH):
            batch = {key: value[start : start + BATCH] for key, value in data.items()}
            outputs.append(model.train_on_batch(**batch))
            outputs.append(model.test_on_batch(**batch))
            outputs.append(model.predict_on_batch(batch["x"]))
        return {"outputs": outputs, **told(model)}
    history = model.fit(**data, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    outputs = [history, model.evaluate(**data, batch_size=tested, verbose=0)]
    outputs.append(model.predict(data["x"], tested, verbose=0))
    seen = sorted(set(getattr(model, "rows_seen", ())))
    return {"outputs": outputs, "rows": seen, **told(model)}


# data sources ---------------------------------------------------------------------------------------------------------


class Rows(keras.utils.PyDataset):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, k: int) -> Any:
        return self.x[k * BATCH : (k + 1) * BATCH], self.y[k * BATCH : (k + 1) * BATCH]


def _generator(x: Any, y: Any) -> Iterator[Any]:
    dataset = Rows(x, y)
    yield from (dataset[k] for k in range(len(dataset)))


def _torch_loader(x: Any, y: Any) -> Any:
    import torch

    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)


class Noted:
    """A map-style dataset that notes, in memory that workers share, which rows were read."""

    def __init__(self, x: Any, y: Any) -> None:
        import torch

        self.x, self.y = x, y
        self.read = torch.zeros(len(x), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> Any:
        self.read[k] += 1
        return self.x[k], self.y[k]


def rows_read(kind: str | None, workers: int) -> Result:
    """(what a fit came to, the rows that this process read)."""
    import torch

    fresh()
    data = CASES["mlp"].data()
    rows = Noted(data["x"], data["y"])
    with scope(strategy(kind)):
        model = made("mlp")
        loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, num_workers=workers)  # type: ignore[arg-type]
        history = model.fit(loader, shuffle=False, verbose=0).history
    return {"history": history, "read": rows.read.nonzero().flatten().tolist(), **told(model)}


def _centered(rows: Any) -> Any:
    """A collate function that looks at all rows of a batch."""
    import torch

    x, y = torch.utils.data.default_collate(rows)
    return x - x.mean(0), y


def _collating_loader(x: Any, y: Any) -> Any:
    import torch

    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, collate_fn=_centered)


def _tf_dataset(x: Any, y: Any) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


SOURCES: dict[str, Callable[[Any, Any], Any]] = {
    "PyDataset": Rows,
    "generator": _generator,
    "DataLoader": _torch_loader,
    "DataLoader that collates": _collating_loader,
    "tf.data": _tf_dataset,
}


def fed(kind: str | None, source: str) -> Result:
    fresh()
    data = CASES["mlp"].data()
    x, y = data["x"], data["y"]
    with scope(strategy(kind)):
        model = made("mlp")
        if "arrays" in source:
            shuffle = {"shuffled arrays": True, "arrays by batches": "batch"}.get(source, False)
            history = model.fit(x, y, batch_size=BATCH, shuffle=shuffle, verbose=0).history
        else:
            steps = -(-ROWS // BATCH) if source == "generator" else None
            history = model.fit(SOURCES[source](x, y), steps_per_epoch=steps, shuffle=False, verbose=0).history
    return {"history": history, **told(model)}


def own_parts(parts: list[tuple[int, int]] | None) -> Result:
    """Each process is given its own rows of every batch: auto_shard_dataset=False.

    parts: for each process, how many rows it has of all; None: one device is given all of them, batch by batch
    in the order in which the processes hold them.
    """
    fresh()
    x, y = (CASES["conv"].data()[key] for key in ("x", "y"))
    if parts is None:
        raise ValueError("give the parts")
    mine = [parts[jax.process_index()]] if jax.process_count() > 1 else parts
    distribution = strategy("dp", auto_shard_dataset=False) if jax.process_count() > 1 else None
    with scope(distribution):
        model = made("conv")
        if distribution is not None:
            ((start, stop),) = mine
            history = model.fit(x[start:stop], y[start:stop], batch_size=3, shuffle=False, verbose=0).history
        else:
            batches = list(_interleaved(x, y, mine, 3))
            history = model.fit(
                (batch for batch in batches), steps_per_epoch=len(batches), shuffle=False, verbose=0
            ).history
    return {"history": history, **told(model)}


def _interleaved(x: Any, y: Any, parts: list[tuple[int, int]], size: int) -> Iterator[Any]:
    for k in range(max(-(-(stop - start) // size) for start, stop in parts)):
        rows = np.concatenate([np.arange(start + k * size, min(start + (k + 1) * size, stop)) for start, stop in parts])
        yield x[rows], y[rows]


def own_parts_apart(kind: str) -> tuple[str, str]:
    """The second process's own data raises, or holds nothing; the type and the text of what a process raises."""
    fresh()
    x, y = (CASES["conv"].data()[key] for key in ("x", "y"))

    def stream() -> Iterator[Any]:
        for k in range(4):
            if not is_first():
                if kind == "raises" and k == 2:
                    raise OSError("the disk of process 1 is gone")
                if kind == "nothing":
                    return
            yield x[k : k + 2], y[k : k + 2]

    with scope(strategy("dp", auto_shard_dataset=False)):
        model = made("conv")
        # So that Keras does not ask the data for a batch ahead of training.
        model(x[:2])
        try:
            model.fit(stream(), shuffle=False, verbose=0)
        except Exception as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def parted(how: str) -> tuple[str, str, list[float]]:
    """The processes come to different steps: the type and the text of what each raises, and a step together."""
    fresh()
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    activation = "tanh" if how == "program" and not is_first() else "relu"
    with scope(strategy("dp")):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, activation), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = 8 if is_first() or how == "program" else 6
    if how == "all":
        for known in (8, 6):
            model.train_on_batch(x[:known], y[:known])
        os.environ["UNIDIST_CHECK"] = "all"
    try:
        model.train_on_batch(x[:rows], y[:rows])
    except Exception as error:
        return type(error).__name__, str(error), model.test_on_batch(x, y) if how == "all" else []
    finally:
        os.environ.pop("UNIDIST_CHECK", None)
    return "nothing", "", []


# saving ---------------------------------------------------------------------------------------------------------------


def saved(kind: str | None, folder: str) -> Result:
    """A trained model, saved whole and by weights; every process finds the file when save returns."""
    fresh()
    data = CASES["mlp"].data()
    path = Path(folder)
    with scope(strategy(kind)):
        model = made("mlp", "adam")
        model.fit(**data, batch_size=BATCH, verbose=0)
        model.save(path / "model.keras")
        assert (path / "model.keras").stat().st_size > 1000
        keras.saving.save_weights(model, path / "model.weights.h5")
        assert (path / "model.weights.h5").stat().st_size > 1000
    return {"get_weights": model.get_weights(), **told(model)}


def loaded(kind: str | None, folder: str) -> Result:
    """The saved model and weights on another mesh, trained on."""
    fresh()
    data = CASES["mlp"].data()
    path = Path(folder)
    with scope(strategy(kind)):
        model = keras.saving.load_model(path / "model.keras")
        before = told(model)
        other = CASES["mlp"].build()
        other.load_weights(path / "model.weights.h5")
        by_weights = other.get_weights()
        history = model.fit(**data, batch_size=BATCH, shuffle=False, verbose=0).history
    return {"before": before, "by_weights": by_weights, "history": history, **told(model)}


def saved_by_one(folder: str) -> tuple[str, str, float]:
    """Process 0 saves while the other evaluates: the type and the text of what each raises, and a loss of both."""
    fresh()
    data = CASES["mlp"].data()
    with scope(strategy("2x2 across")):
        model = made("mlp")
    try:
        if is_first():
            model.save(Path(folder) / "model.keras")
        else:
            model.evaluate(**data, batch_size=BATCH, verbose=0)
    except Exception as error:
        return type(error).__name__, str(error), model.evaluate(**data, batch_size=BATCH, verbose=0)[0]
    return "nothing", "", 0.0


# rules and reports ----------------------------------------------------------------------------------------------------


def refused(how: str) -> str:
    """The error of a layout map that does not fit, ours or Keras's own."""
    fresh()
    owner, fault = how.split(": ")
    rules = {
        "idle": {**PAIR, "nothing.*": ("model",)} if owner == "unidist" else {"nothing.*": ("model",)},
        "double": {".*column/kernel": (None, "model"), ".*/kernel": (None, "model")},
        "indivisible": {".*head/bias": ("model",)},
    }[fault]
    if owner == "unidist":
        mesh = unidist.Mesh({"data": 1, "model": 4} if fault == "indivisible" else {"model": 4}, None)
        distribution = unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules))
    else:
        devices = keras.distribution.list_devices()
        mesh = keras.distribution.DeviceMesh((1, 4), ["data", "model"], devices)
        layout_map = keras.distribution.LayoutMap(mesh)
        for pattern, axes in rules.items():
            layout_map[pattern] = axes
        distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    data = CASES["mlp"].data()
    try:
        with distribution.scope():
            six = [keras.Input((16,)), keras.layers.Dense(6, name="head")]
            model = keras.Sequential(six) if fault == "indivisible" else made("mlp")
        if fault == "idle":
            model.predict(data["x"], verbose=0)
    except unidist.LayoutError as error:
        return str(error)
    return "accepted"


def described(kind: str, zero: int) -> tuple[list[tuple[Any, ...]], dict[str, str]]:
    """For every variable: what describe shows, and what the devices hold; and what it says of layers."""
    fresh()
    with scope(strategy(kind, zero=zero)):
        model = made("mlp", "adam")
        model.optimizer.build(model.trainable_variables)
    found = []
    for row, variable in zip(unidist.describe(model).rows, [*model.variables, *model.optimizer.variables], strict=True):
        held = [shard.data for shard in variable.value.addressable_shards]
        told_ = (row.path, row.shape, row.dtype, row.local_shape, row.bytes_per_device)
        true = (variable.path, tuple(variable.shape), str(variable.value.dtype), held[0].shape, held[0].nbytes)
        found.append((told_, true, str(row.layout)))
    return found, {name.rsplit("/", 1)[-1]: why for name, why in unidist.describe(model).why.items()}


def keras_strategies(kind: str | None) -> Result:
    """A script written for keras.distribution, with batches that Keras itself would refuse."""
    fresh()
    data = CASES["mlp"].data()
    distribution = None
    if kind == "DataParallel":
        distribution = keras.distribution.DataParallel()
    elif kind == "ModelParallel":
        mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"])
        layout_map = keras.distribution.LayoutMap(mesh)
        for pattern, axes in PAIR.items():
            layout_map[pattern] = axes
        layout_map[".*column/output"] = ("batch", "model")
        distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(distribution)
    try:
        model = made("mlp", "adam")
        with unidist.ledger() as book:
            history = model.fit(**data, batch_size=BATCH, verbose=0).history
        sent = float(book.bytes())
        return {"history": history, "sent": sent, "predict": model.predict(data["x"], 9, verbose=0), **told(model)}
    finally:
        keras.distribution.set_distribution(None)


def traffic(kind: str | None, rows: int, batch: int) -> Result:
    """What the ledger shows of a fit, an evaluate and a predict without regularizers or metrics."""
    fresh()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 12)).astype("float32"), rng.integers(0, 4, rows).astype("int32")
    with scope(strategy(kind, {".*column/kernel": (None, "model"), ".*row/kernel": ("model", None)})):
        layers = [
            keras.Input((12,)),
            keras.layers.Dense(32, "relu", name="column", use_bias=False),
            keras.layers.Dense(4, name="row"),
        ]
        model = keras.Sequential(layers, name="plain")
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    runs = {}
    for name, run in {
        "fit": lambda: model.fit(x, y, batch_size=batch, verbose=0),
        "again": lambda: model.fit(x, y, batch_size=batch, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, batch_size=batch, verbose=0),
        "predict": lambda: model.predict(x, batch_size=batch, verbose=0),
    }.items():
        with unidist.ledger() as book:
            run()
        runs[name] = {
            "count": book.count(),
            "bytes": book.bytes(),
            "all_reduce": book.bytes("all_reduce"),
            "purposes": sorted({event.purpose for event in book.events}),
            "axes": sorted({event.axes for event in book.events}),
        }
    return {**runs, "gradients": sum(v.value.nbytes for v in model.trainable_variables)}


def low_rank_saved(folder: str) -> None:
    """A model with low-rank kernels, saved: what one device computes with the file."""
    fresh()
    data = CASES["mlp"].data()
    with scope(strategy("mp")):
        model = CASES["mlp"].build()
        for layer in [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]:
            layer.enable_lora(2)
        compile_case(model, CASES["mlp"], "adam")
        model.fit(**data, batch_size=BATCH, epochs=1, verbose=0)
    model.save(f"{folder}/low.keras")
    wanted = model.predict(data["x"], verbose=0)
    if is_first():
        with scope(None):
            found = keras.saving.load_model(f"{folder}/low.keras")
            np.testing.assert_allclose(found(data["x"]), wanted, atol=1e-5)
    model.fit(**data, batch_size=BATCH, epochs=1, verbose=0)


class Cell(keras.layers.Layer):
    """A recurrent layer's cell of two products, which a plan does not see at work."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.state_size = units
        self.wide, self.narrow = keras.layers.Dense(16, "relu"), keras.layers.Dense(units)

    def build(self, shape: Any) -> None:
        self.wide.build((None, shape[-1] + self.state_size))
        self.narrow.build((None, 16))

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        h = self.narrow(self.wide(keras.ops.concatenate([x, states[0]], -1)))
        return h, [h]


def recurrent_found() -> None:
    """Layouts are found for models with recurrent layers, whose steps are one program."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5, 12)).astype("float32"), rng.normal(size=(8, 3)).astype("float32")
    for make in (lambda: keras.layers.LSTM(8), lambda: keras.layers.RNN(Cell(8))):
        trained = []
        for distribution in (None, unidist.ModelParallel(unidist.Mesh({"model": 4}))):
            fresh()
            with scope(distribution):
                hidden = [make(), keras.layers.Dense(16, "relu", name="up"), keras.layers.Dense(3, name="down")]
                model = keras.Sequential([keras.Input((5, 12)), *hidden])
                model.compile("sgd", "mse")
                model.fit(x, y, batch_size=4, verbose=0)
            trained.append([np.asarray(v) for v in model.weights])
        for a, b in zip(*trained, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        assert {row.path.split("/", 1)[1] for row in unidist.describe(model).sharded} >= {"up/kernel", "down/kernel"}
