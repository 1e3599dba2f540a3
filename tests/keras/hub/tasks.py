"""Whole tasks of keras_hub, trained and asked to generate; one device against many."""

from __future__ import annotations

import contextlib
import json
import string
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

import unidist
from tests.keras.hub import zoo

M = zoo.M


def causal(kind: str) -> Any:
    backbone = zoo.BACKBONES[kind]()
    task = {"gpt2": M.GPT2CausalLM, "llama gqa": M.LlamaCausalLM, "llama mqa": M.LlamaCausalLM,
            "gemma mqa": M.GemmaCausalLM, "gemma3": M.Gemma3CausalLM}[kind]  # fmt: skip
    return task(backbone=backbone, preprocessor=None)


def classifier() -> Any:
    return M.BertTextClassifier(zoo.BACKBONES["bert"](), num_classes=3, dropout=0.0, preprocessor=None)


def train(build: Callable[[], Any], strategy: Any, *, per_token: bool) -> zoo.Trained:
    """Steps on random tokens, padding weighted away. (`fit` of a task needs tf.data or grain: see `fit_on_text`.)"""
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-3, epsilon=1e-3), loss=loss, weighted_metrics=["accuracy"])
        x = zoo.inputs(model)
        rng = np.random.default_rng(1)
        y = rng.integers(0, zoo.VOCABULARY, (zoo.ROWS, zoo.LENGTH)) if per_token else rng.integers(0, 3, zoo.ROWS)
        weight = x["padding_mask"].astype("float32") if per_token else None
        losses = [float(model.train_on_batch(x, y, sample_weight=weight)[0]) for _ in range(3)]
    return zoo.Trained(model, losses, [np.asarray(v) for v in model.weights])


# Real text ------------------------------------------------------------------------------------------------------------

SOURCES = (json, textwrap, string)


def lines() -> tuple[list[str], np.ndarray]:
    """Lines of the standard library's sources, and from which module each is."""
    found = [(line.strip(), k) for k, module in enumerate(SOURCES) for line in _source(module) if len(line) > 30]
    chosen = found[:: len(found) // 8][:8]  # a last batch that is not full
    return [line for line, _ in chosen], np.array([k for _, k in chosen])


def _source(module: Any) -> list[str]:
    return Path(module.__file__).read_bytes().decode("ascii", "ignore").splitlines()


def bert_on_text() -> Any:
    """A classifier of lines by their characters."""
    signs = [c for c in string.printable if not c.isspace() and c not in string.ascii_uppercase]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs, *(f"##{c}" for c in signs)]
    tokenizer = keras_hub.tokenizers.BertTokenizer(vocabulary=words, lowercase=True)
    preprocessor = M.BertTextClassifierPreprocessor(tokenizer, sequence_length=12)
    backbone = M.BertBackbone(len(words), 2, 4, 16, 32, dropout=0.0, max_sequence_length=12)
    return M.BertTextClassifier(backbone, num_classes=len(SOURCES), dropout=0.0, preprocessor=preprocessor)


def gpt2_on_text() -> Any:
    """A language model of bytes: GPT-2's own byte tokens and one merge."""
    signs = [*sorted(ByteLevel.alphabet()), "th", "<|endoftext|>"]
    tokenizer = keras_hub.tokenizers.GPT2Tokenizer({sign: k for k, sign in enumerate(signs)}, merges=["t h"])
    preprocessor = M.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12)
    backbone = M.GPT2Backbone(len(signs), 2, 4, 16, 32, dropout=0.0, max_sequence_length=16)
    return M.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)


def fit_on_text(build: Callable[[], Any], strategy: Any = None) -> zoo.Trained:
    """Keras's whole path: strings, the task's preprocessor in a tf.data pipeline, fit, evaluate."""
    keras.utils.set_random_seed(3)
    x, y = lines()
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = build()
        options = {"sampler": "greedy"} if hasattr(model, "generate") else {}
        model.compile(keras.optimizers.AdamW(3e-3, epsilon=1e-3), **options)
        given = (x,) if options else (x, y)
        history = model.fit(*given, batch_size=5, epochs=2, verbose=0).history
        losses = history["loss"]
        if not options:
            losses += model.evaluate(*given, batch_size=5, verbose=0)
    return zoo.Trained(model, losses, [np.asarray(v) for v in model.weights])


TEXT = {"bert": bert_on_text, "gpt2": gpt2_on_text}


def check_text(names: tuple[str, ...], ranks: int) -> None:
    """Tasks on text equal one device, and so does what the language model writes then."""
    for name in names:
        build = TEXT[name]
        wanted = fit_on_text(build)
        with unidist.ledger() as traffic:
            found = fit_on_text(build, zoo.strategy(name, ranks))
            written = found.model.generate(["import ", "def f(x"], max_length=14) if name == "gpt2" else None
        zoo.assert_equal(found, wanted)
        assert len(zoo.rows_of(found.model)) == 4, name
        assert unidist.describe(found.model).sharded, name
        assert any("attention_output" in e.purpose for e in traffic.events), name
        if written is not None:
            assert written == wanted.model.generate(["import ", "def f(x"], max_length=14)
            assert all(text.startswith(prompt) for text, prompt in zip(written, ["import ", "def f(x"], strict=True))
            assert any("attention" in e.purpose for e in traffic.events)


# Generating -----------------------------------------------------------------------------------------------------------


def prompt(kind: str = "gpt2") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    mask = np.zeros((3, 8), "int32")
    mask[:, :3] = 1
    mask[1, :5] = 1
    found = {"token_ids": rng.integers(1, zoo.VOCABULARY, (3, 8)).astype("int32") * mask, "padding_mask": mask}
    if kind == "gemma3":
        # Its mask is of truth values, and without images it fails at its end, on one device too (keras_hub 0.32).
        found |= {"padding_mask": mask.astype(bool), "images": np.zeros((3, 0, 16, 16, 3), "float32")}
    return found


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
            model.train_on_batch(x, x["token_ids"])
    # Outside of the scope, as users call it.
    return np.asarray(model.generate(prompt(kind), stop_token_ids=None)["token_ids"]), model


def check_prompts_of_a_scope(sampler: str) -> None:
    """Inside of the scope keras_hub lays out what it is given over the data axes."""
    written = []
    for strategy in (None, unidist.DataParallel(zero=3)):
        keras.utils.set_random_seed(5)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            tokens, model = generate("gpt2", strategy, sampler, fitted=True)
            found = [model.generate(prompt(), stop_token_ids=stop) for stop in (None, tuple(tokens[:, -3].tolist()))]
        written.append([np.asarray(one[key]) for one in found for key in ("token_ids", "padding_mask")])
    for a, b in zip(*written, strict=True):
        np.testing.assert_array_equal(a, b)
    assert written[0][3].sum() < written[0][1].sum(), "nothing has stopped"


def translate(strategy: Any = None) -> np.ndarray:
    """Tokens of an encoder and a decoder."""
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = M.BartSeq2SeqLM(backbone=zoo.BACKBONES["bart"](), preprocessor=None)
        draw = np.random.default_rng(6)
        for variable in model.weights:
            variable.assign(draw.normal(scale=0.4, size=variable.shape).astype("float32"))
        model.compile(sampler="greedy")
    given = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in prompt().items()}
    return np.asarray(model.generate(given, stop_token_ids=None)["decoder_token_ids"])


def check_backbones() -> None:
    """Equal to one device, computed in the same process; one key for all heads is the most that is sent."""
    found = zoo.train(zoo.BACKBONES["gemma mqa"], zoo.strategy("gemma mqa", 2))
    zoo.assert_equal(found, zoo.train(zoo.BACKBONES["gemma mqa"]))
    assert zoo.rows_of(found.model)
    assert unidist.describe(found.model).sharded


def check_found_layouts() -> None:
    """Layouts found by themselves in real processes: equal to one device, proven, sharded, and sent."""
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES["llama mqa"], unidist.ModelParallel(unidist.Mesh({"model": 2})))
    zoo.assert_equal(found, zoo.train(zoo.BACKBONES["llama mqa"]))
    proven = zoo.rows_of(found.model)
    assert len(proven) == 4, proven
    assert unidist.describe(found.model).sharded
    assert any(e.op == "all_reduce" and e.purpose in proven for e in traffic.events)


def check_sequence_parallel() -> None:
    """Parts of sequences in real processes: equal to one device, halves of all_reduces."""
    strategy = unidist.ModelParallel(unidist.Mesh({"model": 2}), sequence_parallel=True)
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES["llama gqa"], strategy)
    zoo.assert_equal(found, zoo.train(zoo.BACKBONES["llama gqa"]))
    rows = zoo.rows_of(found.model)
    assert len(rows) == 4, rows
    sums = [(e.op, e.purpose) for e in traffic.events if e.purpose in rows]
    assert {op for op, _ in sums} == {"reduce_scatter", "all_gather"}
    assert {row for op, row in sums if op == "reduce_scatter"} == set(rows)


def check_one_line(backend: str) -> None:
    """TensorParallelKeras on a model that exists already, named backend and all."""

    def train(strategy: Callable[[Any], Any]) -> tuple[list[float], list[np.ndarray], Any]:
        keras.utils.set_random_seed(7)
        model = zoo.with_head(zoo.BACKBONES["bert"]())
        trained = strategy(model)
        trained.compile(keras.optimizers.AdamW(1e-3, epsilon=1e-3), "mse")
        y = np.random.default_rng(5).normal(size=(zoo.ROWS, 3)).astype("float32")
        losses = trained.fit(zoo.inputs(model), y, epochs=3, verbose=0, shuffle=False).history["loss"]
        return losses, [np.asarray(v) for v in model.weights], trained

    losses, weights, _ = train(lambda model: model)
    found, held, parallel = train(lambda model: unidist.TensorParallelKeras(model, distributed_backend=backend))
    np.testing.assert_allclose(found, losses, atol=1e-5, rtol=1e-5)
    for a, b in zip(held, weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert losses[0] != losses[-1]
    info, slots = parallel.get_parallelism_info(), parallel.get_gradient_sharding_info()
    assert (info["backend"], info["world_size"]) == (backend, 2)
    assert info["sharded_fraction"] > 0.9
    assert info["bytes_per_device"] < 0.6 * info["bytes_on_one_device"]
    assert slots["optimizer_bytes_per_device"] < 0.6 * slots["optimizer_bytes_on_one_device"]
    assert len(zoo.rows_of(parallel.model)) == 4


def check_generating(ranks: int, fitted: bool) -> None:
    for kind in ("gpt2", "llama gqa"):
        tokens, model = generate(kind, zoo.strategy(kind, ranks), fitted=fitted)
        np.testing.assert_array_equal(tokens, generate(kind, fitted=fitted)[0])
        assert unidist.describe(model).sharded, kind


def uneven_is_refused() -> str:
    """Three heads on two devices, where Keras's arrays must divide."""
    try:
        with zoo.strategy("bert", 2, uneven=True).scope():
            M.BertBackbone(64, 1, 3, 12, 32, max_sequence_length=8)
    except unidist.CapabilityError as error:
        return str(error)
    return ""


def start(backend: str, devices: int | None) -> None:
    unidist.use(backend, devices=devices)
