"""What the processes of tests run to tell what they hold, send and draw."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import unidist
from tests.support import nets
from tests.support.nets import BATCH, rows
from tests.support.optimizers import OPTIMIZERS
from tests.support.runs import Result, fresh, strategy, told

Sent = dict[tuple[str, str], tuple[int, float]]


def _sent(book: Any) -> Sent:
    """(op, purpose) -> (count, bytes)."""
    kinds = dict.fromkeys((event.op, event.purpose) for event in book.events)
    return {(op, why): (book.count(op, purpose=why), float(book.bytes(op, purpose=why))) for op, why in kinds}


def even(depth: int = 6, width: int = 16) -> Any:
    """All of its variables divide by four."""
    inner = [layers.Dense(width, activation="tanh", name=f"d{k}") for k in range(depth)]
    return keras.Sequential([layers.Input((12,)), *inner, layers.Dense(4, name="out")], name="even")


def _sizes(model: Any) -> list[int]:
    """Bytes of each layer's trainable variables, whole."""
    return [sum(4 * int(np.prod(v.shape)) for v in layer.trainable_variables) for layer in model.layers]


# what is sent ---------------------------------------------------------------------------------------------------------


def sent(zero: int, *, merged: bool = True, bucket_mb: str | None = None, steps: int = 3) -> tuple[list[int], Sent]:
    """(bytes of the layers, what some steps send) with every layer a unit of its own unless they are merged."""
    from unidist.keras.torch.params import param_groups

    fresh()
    rng = np.random.default_rng(1)
    x = rng.normal(size=(8 * steps, 12)).astype("float32")
    y = rng.normal(size=(8 * steps, 4)).astype("float32")
    with pytest.MonkeyPatch.context() as patch:
        if not merged:
            patch.setattr(param_groups, "UNIT_BYTES", 1)
        if bucket_mb is not None:
            patch.setenv("UNIDIST_BUCKET_MB", bucket_mb)
        with strategy("dp", zero=zero).scope():
            model = even()
            model.compile(nets.adam(), "mse")
        # The first step learns which layer comes after which.
        model.fit(x[:8], y[:8], batch_size=8, shuffle=False, verbose=0)
        with unidist.ledger() as book:
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return _sizes(model), _sent(book)


def accumulated(kind: str | None, zero: int) -> Result:
    """Six steps, two of them an accumulation, and what each step sends: purpose -> bytes."""
    x, y = rows(24)
    with nets.begun(kind, zero):
        model = nets.crossed(nets.plain(), OPTIMIZERS["accumulation"]())
    steps: list[dict[str, float]] = []
    with unidist.ledger() as book:
        seen = [0]

        class Watch(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                new = book.events[seen[0] :]
                seen[0] += len(new)
                steps.append({why: float(sum(e.bytes for e in new if e.purpose == why)) for why in _purposes(new)})

        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Watch()]).history
    return {"history": history, "steps": steps, **told(model)}


def _purposes(events: Any) -> list[str]:
    return list(dict.fromkeys(event.purpose for event in events))


def metrics_sent(zero: int, verbose: int) -> int:
    """Collectives for eight variables of metrics in two epochs of four steps."""
    fresh()
    x, y = rows()
    with strategy("dp", zero=zero).scope():
        model = nets.crossed(
            nets.plain(), nets.adam(), metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy()]
        )
    with unidist.ledger() as book:
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=verbose)
    return book.count(purpose="metrics")


def counts_with_metrics() -> tuple[list[int], list[float]]:
    """Collectives of three steps without metrics and with four variables of them, and their bytes. The metrics are made
    before there is a strategy."""
    counts, sizes = [], []
    x, y = rows(12)
    for metrics in ([], ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]):
        fresh()
        with strategy("dp").scope():
            model = nets.crossed(nets.plain(), nets.sgd(), metrics=metrics)
        with unidist.ledger() as book:
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        counts.append(book.count())
        sizes.append(float(book.bytes()))
    return counts, sizes


# what is held ---------------------------------------------------------------------------------------------------------


def held(zero: int) -> list[dict[str, float]]:
    """For each rank of this process: bytes of whole values, and of the memory that values, gradients and slots take,
    from the tensors themselves. Memory that two of them share counts for the first."""
    fresh()
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 12)).astype("float32"), rng.normal(size=(8, 4)).astype("float32")
    with strategy("dp", zero=zero).scope():
        model = even(width=64)
        model.compile(nets.adam(), "mse")
        model.fit(x, y, batch_size=8, verbose=0)
    storages = [v._storage for v in model.trainable_variables]
    told_ = []
    for rank in storages[0].world.ranks:
        kept = [getattr(p, name)[rank] for p in storages for name in ("shards", "leaves", "states")]
        kinds = {
            "values": kept,
            "gradients": [tensor.grad for tensor in kept if tensor.grad is not None],
            "slots": [slot._storage.shards[rank] for slot in model.optimizer.variables if slot.shape],
        }
        seen: set[int] = set()
        told_.append({"whole": sum(_sizes(model)), **{kind: _memory(found, seen) for kind, found in kinds.items()}})
    return told_


def _memory(tensors: list[Any], seen: set[int]) -> int:
    size = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            size += storage.size()
    return size


# what is drawn --------------------------------------------------------------------------------------------------------


def masks() -> dict[int, list[Any]]:
    """Rank -> the units kept by a dropout of inputs, which model shards have alike, and by one between two layers whose
    kernels are cut, on a 2 x 2 mesh."""
    from unidist.keras.torch.context import frame

    with nets.begun("2x2", 0):
        before, *rest = nets.plain().layers
        drops = [layers.Dropout(0.5, name=name) for name in ("early", "between")]
        model = keras.Sequential([drops[0], before, drops[1], *rest], name="plain")
        model.build((None, 12))
        before.activation = keras.activations.get("sigmoid")
        nets.crossed(model, nets.sgd())
    seen: dict[int, dict[str, Any]] = {}
    original = layers.Dropout.call

    def watched(self: Any, inputs: Any, training: bool = False) -> Any:
        out, here = original(self, inputs, training=training), frame()
        if here is not None and here.rows is not None and training:
            part = getattr(out, "local", out)  # of cut features, this rank's
            seen.setdefault(here.rank, {})[self.name] = part.detach().numpy() != 0
        return out

    watched.__module__ = original.__module__  # known to treat each row alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.Dropout, "call", watched)
        model.fit(np.ones((8, 12), "float32"), np.zeros(8, "int32"), batch_size=8, verbose=0)
    return {rank: [found["early"], found["between"]] for rank, found in seen.items()}
