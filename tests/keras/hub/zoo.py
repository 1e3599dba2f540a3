"""Tiny keras_hub models with random weights, layouts written by hand for them, and training for comparison."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import keras
import keras_hub
import numpy as np

import unidist
from tests.support.sampling import unless_all
from unidist.keras.records import model_record

M = keras_hub.models
ROWS, LENGTH, VOCABULARY = 4, 6, 64
# The second is from weights that the first has updated.
STEPS = unless_all(2, 3)
_SIZES = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
_PLAIN = {**_SIZES, "vocabulary_size": VOCABULARY}
_ABSOLUTE = {**_PLAIN, "num_heads": 4, "max_sequence_length": 8, "dropout": 0.0}


def _grouped(kind: Any, keys: int, heads: int = 4, **more: Any) -> Callable[..., Any]:
    return lambda **own: kind(**{**_PLAIN, "num_query_heads": heads, "num_key_value_heads": keys, **more, **own})


BACKBONES: dict[str, Callable[..., Any]] = {
    "bert": lambda **own: M.BertBackbone(**{**_ABSOLUTE, **own}),
    "roberta": lambda: M.RobertaBackbone(**_ABSOLUTE),
    "gpt2": lambda **own: M.GPT2Backbone(**{**_ABSOLUTE, **own}),
    "opt": lambda: M.OPTBackbone(**_ABSOLUTE),
    "llama gqa": _grouped(M.LlamaBackbone, 2),
    "llama mqa": _grouped(M.LlamaBackbone, 1),
    "mistral": _grouped(M.MistralBackbone, 2),
    "gemma": _grouped(M.GemmaBackbone, 2, head_dim=4),
    "gemma mqa": _grouped(M.GemmaBackbone, 1, head_dim=4, query_head_dim_normalize=False),
    "gemma3": _grouped(M.Gemma3Backbone, 2, head_dim=4, image_size=16, use_sliding_window_attention=True),
    "qwen": _grouped(M.QwenBackbone, 2),
    "qwen3": _grouped(M.Qwen3Backbone, 2, head_dim=4),
    "phi3": _grouped(M.Phi3Backbone, 2),
    "t5": lambda: M.T5Backbone(**_PLAIN, num_heads=4, dropout=0.0),
    "vit": lambda: M.ViTBackbone((8, 8, 3), 4, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=32),
    "distilbert": lambda: M.DistilBertBackbone(**_ABSOLUTE),
    "albert": lambda: M.AlbertBackbone(**_ABSOLUTE, embedding_dim=8),
    "bart": lambda: M.BartBackbone(**_ABSOLUTE),
    "bloom": lambda: M.BloomBackbone(**_PLAIN, num_heads=4),
    "gpt-neox": lambda: M.GPTNeoXBackbone(**_ABSOLUTE, rotary_percentage=0.5),
    "esm": lambda: M.ESMBackbone(**_ABSOLUTE),
    "roformer-v2": lambda: M.RoformerV2Backbone(**_PLAIN, num_heads=4, head_size=4, dropout=0.0),
    "deberta-v3": lambda: M.DebertaV3Backbone(**_ABSOLUTE, bucket_size=4),
    "mixtral": _grouped(M.MixtralBackbone, 2, num_experts=4, top_k=2),
    "qwen3-moe": _grouped(M.Qwen3MoeBackbone, 2, head_dim=4, moe_intermediate_dim=24, num_experts=4, top_k=2),
    "gpt-oss": _grouped(M.GptOssBackbone, 2, num_experts=4, sliding_window=4),
    "falcon": lambda: M.FalconBackbone(**_PLAIN, num_attention_heads=4),
}
# With fewer heads of keys than of queries.
GROUPED = ("llama gqa", "llama mqa", "mistral", "gemma", "gemma mqa", "gemma3")
# Those with layouts written by hand below.
_FOUND = ("esm", "roformer-v2", "deberta-v3", "mixtral", "qwen3-moe", "gpt-oss")
BY_HAND = [name for name in BACKBONES if name not in _FOUND]

_IN, _UP, _GATE, _DOWN = "feedforward_intermediate_dense", "ffw_gating", "ffw_gating_2", "ffw_linear"
_WIDE = rf"({_IN}|feedforward_gate_dense|{_UP}|{_GATE}|mlp_intermediate_dense|dense_h_to_4h|mlp/dense_1)"
_NARROW = rf"(feedforward_output_dense|{_DOWN}|mlp_output_dense|dense_4h_to_h|mlp/dense_2)"


def rules(name: str) -> dict[str, tuple[Any, ...]]:
    """Queries, keys, values by heads; the attention's output and the second half of the FFN by rows; embeddings by
    the vocabulary."""
    gemma = name.startswith("gemma")
    heads = r".*(query|key|value|query_dense|key_dense|value_dense|query_key_value)"
    found: dict[str, tuple[Any, ...]] = {
        rf"{heads}/kernel": ("model", None, None) if gemma else (None, "model", None),
        rf"{heads}/bias": ("model", None),
        r".*attention.*/attention_output/kernel|.*mha/attention_output/kernel": ("model",),
        r".*attention/output_dense/kernel": ("model", None),
        rf".*{_WIDE}/kernel": (None, "model"),
        rf".*{_WIDE}/bias": ("model",),
        rf".*{_NARROW}/kernel": ("model", None),
        r".*token_embedding/embeddings": ("model", None),
    }
    if name.startswith("t5"):
        found[r".*/(query_projector|key_projector|value_projector)/kernel"] = (None, "model")
        found[r".*/(input_projector|gate_projector)/kernel"] = (None, "model")
        found[r".*/output_projector/kernel"] = ("model", None)
    return found


def mesh(sizes: dict[str, int]) -> unidist.Mesh:
    """A mesh of all devices; of the simulator's there are as many as it takes."""
    count = prod(sizes.values())
    if unidist.backend().name == "sim" and len(unidist.list_devices()) != count:
        unidist.use("sim", devices=count)
    return unidist.Mesh(sizes)


def strategy(name: str, ranks: int, *, uneven: bool = True) -> unidist.ModelParallel:
    grid = mesh({"model": ranks})
    return unidist.ModelParallel(grid, unidist.LayoutMap(grid, rules(name), strict=False, uneven=uneven))


def inputs(model: Any) -> Any:
    rng = np.random.default_rng(4)
    if not isinstance(model.input, dict):
        return rng.normal(size=(ROWS, *model.input.shape[1:])).astype("float32")
    top = min(
        layer.input_dim for layer in model._flatten_layers() if hasattr(layer, "input_dim") and "token" in layer.name
    )
    mask = np.ones((ROWS, LENGTH), "int32")
    mask[1, 4:] = mask[2, 3:] = 0
    made = {}
    for key in model.input:
        if key.endswith("token_ids"):
            made[key] = rng.integers(1, top, (ROWS, LENGTH)).astype("int32")
        elif key.endswith("padding_mask"):
            made[key] = mask
        else:
            made[key] = rng.integers(0, 2, (ROWS, LENGTH)).astype("int32")
    return made


@dataclass
class Trained:
    model: Any
    losses: list[float]
    weights: list[np.ndarray]


def with_head(backbone: Any) -> Any:
    """The backbone, and a small classifier on all that comes out of it."""
    outputs = backbone.output
    flat = [outputs[key] for key in sorted(outputs)] if isinstance(outputs, dict) else [outputs]
    pooled = [x if len(x.shape) == 2 else keras.layers.GlobalAveragePooling1D()(x) for x in flat]
    x = pooled[0] if len(pooled) == 1 else keras.layers.Concatenate()(pooled)
    return keras.Model(backbone.input, keras.layers.Dense(3, name="head")(x))


class _Forgets(keras.callbacks.Callback):
    """Clears all gradients: on one device Keras 3.15 forgets a variable whose path another one has too (T5's biases),
    so that its gradients pile up from step to step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for variable in self.model.trainable_variables:
            if not hasattr(variable, "_storage"):
                variable.value.grad = None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what keras_hub's backbones are warned of."""
    with warnings.catch_warnings():
        # keras_hub's own: T5 layers drop masks that they do not use.
        warnings.filterwarnings("ignore", "Layer .* was passed an input with a mask attached")
        # And RoFormerV2 indexes by a list.
        warnings.filterwarnings("ignore", "Using a non-tuple sequence for multidimensional indexing")
        # The part of an untied table that makes logits is not used by a backbone.
        warnings.filterwarnings("ignore", "Gradients do not exist for variables .*reverse_embeddings")
        yield


def train(build: Callable[[], Any], strategy: Any = None, *, steps: int = STEPS, **compiled: Any) -> Trained:
    """A few steps of AdamW, with the same seed, under a strategy or on one device."""
    keras.utils.set_random_seed(7)
    with strategy.scope() if strategy is not None else contextlib.nullcontext(), quietly():
        model = with_head(build())
        # epsilon: a gradient that is zero in truth (a key's bias) is noise, which Adam would blow up to a step.
        optimizer = keras.optimizers.AdamW(1e-3, epsilon=1e-3)
        model.compile(optimizer, loss="mse", **compiled)
        y = np.random.default_rng(5).normal(size=(ROWS, 3)).astype("float32")
        x = inputs(model)
        history = model.fit(x, y, batch_size=ROWS, epochs=steps, shuffle=False, verbose=0, callbacks=[_Forgets()])
    return Trained(model, history.history["loss"], [np.asarray(v) for v in model.weights])


@functools.cache
def alone(name: str, steps: int = STEPS) -> Trained:
    """A backbone on one device, for all tests that compare with it."""
    return train(BACKBONES[name], steps=steps)


@functools.cache
def planned(name: str, ranks: int, steps: int) -> tuple[Trained, unidist.Ledger]:
    """A backbone under `ModelParallel(mesh)`, and what was sent: for all tests that look at it."""
    with unidist.ledger() as traffic:
        found = train(BACKBONES[name], unidist.ModelParallel(mesh({"model": ranks})), steps=steps)
    return found, traffic


def assert_equal(found: Trained, wanted: Trained, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.losses, wanted.losses, atol=tolerance, rtol=tolerance)
    for variable, a, b in zip(found.model.weights, found.weights, wanted.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0, err_msg=variable.path)
    assert wanted.losses[0] != wanted.losses[-1], "the training changed nothing"


def rows_of(model: Any) -> set[str]:
    """Names of the row layers whose inputs came cut in every call."""
    return {rule.name for rule in model_record.of(model).engine.rules if rule.comes_cut}
