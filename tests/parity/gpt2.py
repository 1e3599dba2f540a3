"""A small backbone of keras_hub, GPT-2 if no other is named, trained for twenty steps of Adam."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.parity.models import Case
from tests.parity.train import Spec, Variable, Weights, fitted, variables_of, weights_from_numpy, weights_of
from tests.support.clearing import cleared

ROWS, LENGTH, VOCABULARY = 8, 6, 64


@dataclass
class Trained:
    """What a training came to, seen by one process."""

    start: Weights
    weights: Weights
    losses: list[float]
    variables: list[Variable]
    traffic: dict[str, tuple[int, float]]


def backbone(name: str = "gpt2") -> Any:
    import keras

    from tests.keras.hub import zoo

    # A step that is compiled takes seconds for each layer.
    return zoo.with_head(zoo.BACKBONES[name](num_layers=2 if keras.config.backend() == "torch" else 1))


def sentences(name: str = "gpt2") -> dict[str, Any]:
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, LENGTH + 1, (ROWS, 1))
    x = {
        "token_ids": rng.integers(1, VOCABULARY, (ROWS, LENGTH)).astype("int32"),
        "padding_mask": (np.arange(LENGTH) < lengths).astype("int32"),
    }
    if name == "bert":
        x["segment_ids"] = rng.integers(0, 2, (ROWS, LENGTH)).astype("int32")
    return {"x": x, "y": rng.normal(size=(ROWS, 3)).astype("float32")}


# Two batches an epoch, of 5 and of 3 rows: neither divides.
CASE = Case("gpt2", backbone, sentences, "adam", {}, batch=5, epochs=10)


def train_where_it_divides(spec: Spec | None, name: str = "gpt2") -> Trained:
    """With weights that are the same on each Keras backend, and batches that four devices cut evenly: DTensor cuts no
    others."""
    return train(spec, name, numpy_weights=True, batch=4)


def train(spec: Spec | None, name: str = "gpt2", *, numpy_weights: bool = False, batch: int = CASE.batch) -> Trained:
    """As `train.train` does, with the zoo's rules where the strategy has any."""
    import keras

    import unidist
    from tests.support.runs import made_ready

    cleared()
    keras.utils.set_random_seed(7)
    with contextlib.ExitStack() as stack:
        if spec is not None:
            from tests.keras.hub import zoo

            mesh = unidist.Mesh(dict(spec.axes))
            rules: Any = "auto"
            if spec.kind != "auto":
                rules = unidist.LayoutMap(mesh, zoo.rules(name) if spec.kind == "model" else {}, strict=False)
            axis = "data" if "data" in mesh.axis_names else None
            stack.enter_context(unidist.ModelParallel(mesh, rules, data_axis=axis, zero=spec.zero).scope())
        model = backbone(name)
        # A key's bias has no gradient but rounding noise, of about 1e-9: it must stay far below epsilon, or Adam makes
        # whole steps of it, on one device too.
        model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-4), loss="mse")
        made_ready(model)
        if numpy_weights:
            model.set_weights(weights_from_numpy(model))
        first = weights_of(model, spec)
        logs, traffic = fitted(model, CASE, sentences(name), batch_size=batch)
    return Trained(first, weights_of(model, spec), [row["loss"] for row in logs], variables_of(model, spec), traffic)
