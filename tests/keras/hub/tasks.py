"""Whole tasks of keras_hub, trained and asked to generate; one device against many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import unidist
from tests.keras.hub import zoo

M = zoo.M


def causal(kind: str) -> Any:
    backbone = zoo.BACKBONES[kind]()
    task = {"gpt2": M.GPT2CausalLM, "llama gqa": M.LlamaCausalLM, "llama mqa": M.LlamaCausalLM,
            "gemma mqa": M.GemmaCausalLM}[kind]  # fmt: skip
    return task(backbone=backbone, preprocessor=None)


def classifier() -> Any:
    return M.BertTextClassifier(zoo.BACKBONES["bert"](), num_classes=3, preprocessor=None)


def fit(build: Callable[[], Any], strategy: Any, *, per_token: bool) -> zoo.Trained:
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-3, epsilon=1e-3), loss=loss, weighted_metrics=["accuracy"])
        x = zoo.inputs(model)
        rng = np.random.default_rng(1)
        y = rng.integers(0, zoo.VOCABULARY, (zoo.ROWS, zoo.LENGTH)) if per_token else rng.integers(0, 3, zoo.ROWS)
        weight = x["padding_mask"].astype("float32") if per_token else None
        history = model.fit(x, y, sample_weight=weight, batch_size=zoo.ROWS, epochs=3, shuffle=False, verbose=0)
    return zoo.Trained(model, history.history["loss"], [np.asarray(v) for v in model.weights])


def prompt() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    mask = np.zeros((3, 8), "int32")
    mask[:, :3] = 1
    mask[1, :5] = 1
    return {"token_ids": rng.integers(1, zoo.VOCABULARY, (3, 8)).astype("int32") * mask, "padding_mask": mask}


def generate(kind: str, strategy: Any = None, sampler: Any = "greedy", *, fitted: bool = False) -> Any:
    """(tokens, model): of larger random weights, so that tokens differ; `fitted`: after a step of training."""
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = causal(kind)
        draw = np.random.default_rng(6)
        for variable in model.weights:
            variable.assign(draw.normal(scale=0.4, size=variable.shape).astype("float32"))
        model.compile(optimizer=keras.optimizers.SGD(0.1), sampler=sampler)
        if fitted:
            x = zoo.inputs(model)
            model.fit(x, x["token_ids"], batch_size=zoo.ROWS, verbose=0)
    # Outside of the scope, as users call it.
    return np.asarray(model.generate(prompt(), stop_token_ids=None)["token_ids"]), model


def in_a_process() -> None:
    """Run by each of two processes: everything equal to one device, computed in the same process."""
    for name in ("bert", "llama gqa", "gemma mqa", "t5", "bloom"):
        found = zoo.train(zoo.BACKBONES[name], zoo.strategy(name, 2))
        zoo.assert_equal(found, zoo.train(zoo.BACKBONES[name]))
        assert zoo.pairs_of(found.model), name
        assert unidist.describe(found.model).sharded, name
    for kind in ("gpt2", "llama gqa"):
        with unidist.ledger() as traffic:
            tokens, _ = generate(kind, zoo.strategy(kind, 2), fitted=True)
        np.testing.assert_array_equal(tokens, generate(kind, fitted=True)[0])
        assert any(e.purpose == "generate" for e in traffic.events)


def start() -> None:
    unidist.use("torch")
