"""Tensor parallelism of a small BERT, two gloo processes with one thread each: unidist against PyTorch by hand.

    unidist run -n 2 benchmarks/keras_tp_bert.py [--rounds 12] [--steps 2] [--layouts auto|hand] [--compiled]

Both run in one process group, in turns: keras_hub's BertTextClassifier under ModelParallel, by fit's own step (loss,
metrics and AdamW included), and the same network of nn.Modules under torch's parallelize_module with AdamW: queries,
keys, values and the first half of the feed-forward by columns, the rest by rows, the table of tokens by its vocabulary.
Prints medians of paired ratios; absolute times depend on the machine. --layouts hand: those of the map below and not
those that unidist finds; --compiled: both as programs of torch.compile as well (jit_compile=True in ours).
"""

from __future__ import annotations

import argparse
from typing import Any

import unidist

unidist.use("torch")

import keras  # noqa: E402
import keras_hub  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from mlp import crossentropy, fits_step, step_by_hand  # noqa: E402
from paired import Step, report, seconds  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

LAYERS, HEADS, WIDTH, INNER, VOCABULARY, LENGTH, ROWS, CLASSES = 4, 4, 256, 1024, 8192, 128, 8, 3
RULES = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*feedforward_intermediate_dense/kernel": (None, "model"),
    ".*feedforward_intermediate_dense/bias": ("model",),
    ".*feedforward_output_dense/kernel": ("model", None),
    ".*token_embedding/embeddings": ("model", None),
}


def batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rng = np.random.default_rng(0)
    mask = np.ones((ROWS, LENGTH), "int32")
    mask[: ROWS // 2, LENGTH // 2 :] = 0
    x = {
        "token_ids": torch.tensor(rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype("int32")),
        "segment_ids": torch.zeros((ROWS, LENGTH), dtype=torch.int32),
        "padding_mask": torch.tensor(mask),
    }
    return x, torch.tensor(rng.integers(0, CLASSES, ROWS))


# Keras ----------------------------------------------------------------------------------------------------------------


def ours(layouts: str, compiled: bool = False) -> Step:
    keras.utils.set_random_seed(0)
    mesh = unidist.Mesh({"model": unidist.process_count()})
    strategy = unidist.ModelParallel(mesh, "auto" if layouts == "auto" else unidist.LayoutMap(mesh, RULES))
    with strategy.scope():
        backbone = keras_hub.models.BertBackbone(
            VOCABULARY, LAYERS, HEADS, WIDTH, INNER, dropout=0.0, max_sequence_length=LENGTH
        )
        model = keras_hub.models.BertTextClassifier(backbone, num_classes=CLASSES, dropout=0.0, preprocessor=None)
        model.compile(keras.optimizers.AdamW(1e-4), loss=crossentropy(), jit_compile=compiled)
    return fits_step(model, *batch())


# PyTorch by hand ------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(*t.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

        found = nn.functional.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), attn_mask=mask
        )
        x = self.first(x + self.output(found.transpose(1, 2).flatten(2)))
        return self.second(x + self.down(nn.functional.gelu(self.up(x), approximate="tanh")))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.segments = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.pooled, self.logits = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        h = self.tokens(x["token_ids"]) + self.segments(x["segment_ids"]) + self.positions.weight
        h = self.norm(h)
        mask = x["padding_mask"].bool()[:, None, None, :]
        for layer in self.layers:
            h = layer(h, mask)
        return self.logits(torch.tanh(self.pooled(h[:, 0])))


def by_hand(compiled: bool = False) -> Step:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (unidist.process_count(),))
    plan: dict[str, Any] = {"tokens": RowwiseParallel(input_layouts=Replicate())}
    for k in range(LAYERS):
        columns = {f"layers.{k}.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
        rows = {f"layers.{k}.{name}": RowwiseParallel() for name in ("output", "down")}
        plan |= columns | rows
    model = parallelize_module(Bert(), mesh, plan)
    # Fused updates refuse a model where some parameters are DTensors and some are not.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.004, foreach=False)
    called: Any = torch.compile(model) if compiled else model
    return step_by_hand(called, optimizer, *batch())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layouts", choices=["auto", "hand"], default="auto")
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    candidates = {"unidist": ours(arguments.layouts), "by hand": by_hand()}
    if arguments.compiled:
        candidates["unidist, compiled"] = ours(arguments.layouts, compiled=True)
        candidates["by hand, compiled"] = by_hand(compiled=True)
    times = seconds(candidates, arguments.rounds, steps=arguments.steps, meet=unidist.barrier)
    if unidist.process_index() == 0:
        aims = {("unidist", "by hand"): 0.85}
        if arguments.compiled:
            aims |= {("unidist, compiled", "by hand"): 0.85, ("unidist, compiled", "by hand, compiled"): 0.95}
        report("a small BERT, tensor parallel", times, arguments.steps, aims)


if __name__ == "__main__":
    main()
