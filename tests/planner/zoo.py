"""Small models of many kinds, with random weights: what is planned and trained in these tests."""

from __future__ import annotations

from typing import Any

_TEXT = {"vocabulary_size": 64, "num_layers": 2}
_HEADS = {**_TEXT, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 64}
_LENGTH = {**_HEADS, "max_sequence_length": 32}
_GROUPS = {**_TEXT, "num_query_heads": 8, "hidden_dim": 32, "intermediate_dim": 64}
_GEMMA = {**_TEXT, "num_query_heads": 4, "hidden_dim": 32, "intermediate_dim": 128, "head_dim": 8}

# name -> (class in keras_hub.models, its configuration)
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertBackbone", _LENGTH),
    "roberta": ("RobertaBackbone", _LENGTH),
    "gpt2": ("GPT2Backbone", _LENGTH),
    "opt": ("OPTBackbone", _LENGTH),
    "llama": ("LlamaBackbone", {**_GROUPS, "num_key_value_heads": 4}),
    "llama_mqa": ("LlamaBackbone", {**_GROUPS, "num_key_value_heads": 1}),
    "mistral": ("MistralBackbone", {**_GROUPS, "num_key_value_heads": 4, "sliding_window": 16}),
    "gemma": ("GemmaBackbone", {**_GEMMA, "num_key_value_heads": 4}),
    "gemma_mqa": ("GemmaBackbone", {**_GEMMA, "num_key_value_heads": 1}),
    "t5": ("T5Backbone", _HEADS),
    "vit": (
        "ViTBackbone",
        {"image_shape": (32, 32, 3), "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64},
    ),
    "distilbert": ("DistilBertBackbone", _LENGTH),
    "albert": ("AlbertBackbone", {**_LENGTH, "embedding_dim": 16}),
    "bart": ("BartBackbone", _LENGTH),
    "bloom": ("BloomBackbone", _HEADS),
    "gpt_neox": ("GPTNeoXBackbone", _HEADS),
    "falcon": ("FalconBackbone", {**_TEXT, "num_attention_heads": 4, "hidden_dim": 32, "intermediate_dim": 64}),
}
# At least 95 % of it must be in sharded variables.
MOSTLY_SHARDED = ("bert", "roberta", "gpt2", "opt", "llama", "llama_mqa", "mistral", "gemma", "gemma_mqa", "t5")


def backbone(name: str, **changes: Any) -> Any:
    """A backbone of BACKBONES, with changes to its configuration."""
    import keras_hub

    kind, config = BACKBONES[name]
    return getattr(keras_hub.models, kind)(**{**config, **changes})


def batch(model: Any, rows: int = 8, length: int = 8, seed: int = 0) -> dict[str, Any]:
    """Random inputs of a backbone; each row's mask hides another number of places at the end."""
    import numpy as np

    rng = np.random.default_rng(seed)
    out = {}
    for tensor in model.inputs:
        shape = tuple(length if n is None else n for n in tensor.shape[1:])
        if "mask" in tensor.name:
            hidden = np.arange(rows)[:, None] % (length // 2)
            out[tensor.name] = (np.arange(length)[None] < length - hidden).astype("int32")
        elif "float" in tensor.dtype:
            out[tensor.name] = rng.normal(size=(rows, *shape)).astype("float32")
        else:
            out[tensor.name] = rng.integers(0, 2 if "segment" in tensor.name else 64, (rows, *shape)).astype("int32")
    return out
