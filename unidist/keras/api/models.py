"""parallelize, describe and gather_weights: for whichever Keras backend runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import keras

from unidist import names
from unidist.backends.protocol import Array
from unidist.drawing import Picture
from unidist.drawing.graph import picture_of_layers
from unidist.drawing.layers import of_description
from unidist.errors import CapabilityError, LayoutError
from unidist.keras import driver, recomputing
from unidist.keras.driver import Row
from unidist.keras.records.layer_report import joined, numbered
from unidist.keras.strategies.distribution import adopt
from unidist.planner.choosing import size_text
from unidist.tables import table


def _driver() -> driver.Driver:
    found = driver.current()
    if found is None:
        name = keras.config.backend()
        raise CapabilityError(f"Keras on {name!r} is not supported in this version: use torch, jax or tensorflow")
    return found


def parallelize(model: Any, strategy: Any) -> Any:
    """Distributes a built model in place.

    Args:
        model: a built Keras model; its optimizer and metrics come along.
        strategy: DataParallel, ModelParallel or one of keras.distribution.

    Returns:
        The model.

    Raises:
        LayoutError: the model is not built, or a rule of the strategy does not fit it; or it is distributed already, in
            another way.
        CapabilityError: the backend in use cannot do it.

    Example:
        >>> import keras, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
        >>> unidist.parallelize(model, unidist.ModelParallel()) is model
        True
    """
    if not model.built:
        raise LayoutError(f"model {model.name!r} is not built: call it or model.build(input_shape) first")
    _driver().parallelize(model, adopt(strategy))
    return model


def gather_weights(model: Any) -> dict[str, Array]:
    """The full value of every weight as NumPy, by path, on every process. A collective.

    Weights whose paths repeat get "#2", "#3"... behind theirs.

    Args:
        model: a Keras model, distributed or not.

    Returns:
        Path -> an array of the weight's global shape.

    Raises:
        ProcessLostError: a process that holds a part of it has ended.

    Example:
        >>> import keras, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")], name="net")
        >>> _ = unidist.parallelize(model, unidist.ModelParallel())
        >>> {path: value.shape for path, value in unidist.gather_weights(model).items()}
        {'net/head/kernel': (8, 4), 'net/head/bias': (4,)}
    """
    out: dict[str, Array] = {}
    for path, value in _driver().gather_weights(model):
        out[numbered(path, out)] = value
    return out


@dataclass(frozen=True)
class Description:
    """Holds what `describe` gives.

    Attributes:
        rows: one for each variable, the model's first, then the optimizer's.
        why: path -> what a layer with cut weights does, and why. On torch, Horovod with Keras on torch, and the
            simulator with Keras on torch:

            - "column: ...": its outputs stay cut, until an operation needs all of them
            - "row: ...": whether its inputs came cut in the steps so far, or whole
            - "vocabulary: ...": a table that each device looks up its part of
            - "gathered for each call: reason": its weights are gathered, and why no rule computes with their shards

            On JAX and TensorFlow who chooses how it computes with its shards (XLA's partitioner, DTensor), and which
            weights are gathered. And on torch, of each layer, operation or loss that may look at several rows of a
            batch (those that are not Keras's own): whether it is given the rows of all data shards, and why.
    """

    rows: tuple[Row, ...]
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes_per_device(self) -> int:
        return sum(row.bytes_per_device for row in self.rows)

    def bytes_of(self, kind: str) -> int:
        """Bytes per device of "weights", "slots" (the optimizer's variables) or "gradients".

        "host": bytes in host memory for each device, of slots that rest there (`offload="states"`).
        """
        if kind == "host":
            return sum(row.host_bytes for row in self.rows)
        if kind == "gradients":
            return sum(row.gradient_bytes for row in self.rows)
        return sum(row.bytes_per_device for row in self.rows if row.kind == kind)

    @property
    def sharded(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.is_sharded)

    def __str__(self) -> str:
        return self.show()

    def show(self, *, slots: bool = False) -> str:
        """A table of text: each weight's path, shape, layout in words, shape and bytes on a device; then sums.

        Args:
            slots: a row for each of the optimizer's variables too, not only their sum.
        """
        head, body, numbers = self.table(slots=slots)
        return table((head, *body), numbers=numbers)

    def table(self, *, slots: bool = False) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[int, ...]]:
        """Head and rows of that table, and which of its columns are numbers."""
        head = ("variable", "shape", "layout", "shape on a device", "bytes per device")
        body: list[tuple[str, ...]] = [
            (
                r.path,
                str(r.shape),
                r.in_words,
                str(r.local_shape),
                f"{r.bytes_per_device:,}" if not r.host_bytes else f"{r.host_bytes:,} on the host",
            )
            for r in self.rows
            if slots or r.kind != "slots"
        ]
        count = sum(r.kind == "slots" for r in self.rows)
        sums = (
            ("weights", self.bytes_of("weights")),
            (f"slots ({count} variables of the optimizer)", self.bytes_of("slots")),
            ("weights and slots", self.bytes_per_device),
            ("gradients, during a step", self.bytes_of("gradients")),
        )
        body += [(what, "", "", "", f"{size:,}") for what, size in sums]
        if host := self.bytes_of("host"):
            body.append(("slots in host memory", "", "", "", f"{host:,} on the host"))
        return head, body, (4,)

    def _picture_(self, title: str | None) -> Picture:
        weights = [row for row in self.rows if row.kind == "weights"]
        whole = [prod(row.shape) * row.bytes_per_device // (prod(row.local_shape) or 1) for row in weights]
        layers = of_description(weights, [row.layout for row in weights], whole, self.why)
        slots, gradients = (size_text(self.bytes_of(kind)) for kind in ("slots", "gradients"))
        host = self.bytes_of("host")
        lines = [f"Beside the weights a device holds {slots} of the optimizer's slots and {gradients} of gradients."]
        lines += [f"{size_text(host)} of its slots rest in host memory."] if host else []
        return picture_of_layers(title or "A model as it is laid out on the devices", layers, lines=lines, sends=False)

    def _repr_svg_(self) -> str | None:
        return names.shown(self, "svg")

    def _repr_html_(self) -> str | None:
        return names.shown(self, "html")


def describe(model: Any) -> Description:
    """Describes a model's layout on the devices, measured from its arrays, and what layers do with shards.

    Args:
        model: a built model. Its optimizer's slots are listed once they exist.

    Returns:
        A Description: a row for each variable, and a reason for each layer with cut weights.

    Raises:
        CapabilityError: Keras runs on a backend that unidist does not train on.

    Example:
        With Keras on torch:

        >>> import numpy as np
        >>> import unidist
        >>> _ = unidist.use("sim", devices=4)
        >>> import keras
        >>> x = keras.Input((16,))
        >>> up = keras.layers.Dense(64, activation="gelu", name="up")
        >>> model = keras.Model(x, keras.layers.Dense(16, name="down")(up(x)))
        >>> _ = unidist.parallelize(model, unidist.ModelParallel(unidist.Mesh({"model": 4})))
        >>> for path, why in unidist.describe(model).why.items():
        ...     print(path, "-", why)
        up - column: its outputs stay cut, until an operation needs all of them
        down - row: takes its part of its inputs, which the first step shows to come cut or whole
        >>> model.compile("sgd", "mse")
        >>> _ = model.train_on_batch(np.ones((8, 16)), np.ones((8, 16)))
        >>> for path, why in unidist.describe(model).why.items():
        ...     print(path, "-", why)
        up - column: its outputs stay cut, until an operation needs all of them
        down - row: its inputs come cut
    """
    engine = _driver()
    return Description(tuple(engine.rows(model)), joined([*engine.reasons(model), *recomputing.marked(model)]))
