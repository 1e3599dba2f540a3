"""Makes docs/models.md: `python -m tests.keras.hub.table` in a checkout, in some minutes."""

# Paragraphs of the page stay lines.
# ruff: noqa: E501

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
STEPS = 5
HEAD = (
    "| model | sharded | pairs | collectives of a step, 2 devices |",
    "|---|---|---|---|",
)
TEXT = """# Models

What does `ModelParallel(mesh)` make of keras_hub's backbones, with no rule given? `python -m tests.keras.hub.table` measures each row and writes this page, on the simulator with Keras on torch. A model of two small blocks and a head is trained for 5 steps of AdamW, on one device and on 2 and 4. No weight and no loss may differ by more than 0.00001.

- **Sharded**: the part of the model's bytes in sharded variables, on 2 and on 4 devices. In models so small norms, biases and position tables weigh more than in large ones.
- **Pairs**: sets of layers between which activations stay cut, of those that the plan found.
- **Collectives**: of one forward and backward pass of the layers, on the model axis.

{head}
{rows}

Other backbones work as well: no class is named anywhere. Of experts (Mixtral, Qwen3-MoE, GPT-OSS) each device computes its own.

`generate` of a causal language model works on shards of the heads and of the cache. `Gemma3CausalLM.generate` with `preprocessor=None` needs `images` of shape (rows, 0, height, width, 3) in keras_hub 0.32, on plain Keras too.

A model of yours: `unidist plan FILE.py:function --mesh model=4` ([planning](planning.md)).
"""


def row(name: str) -> str:
    """The line of a backbone of the zoo."""
    import unidist
    from tests.keras.hub import zoo

    alone = zoo.alone(name, STEPS)
    fractions, pairs, sent = [], "", ""
    for ranks in (2, 4):
        mesh = zoo.mesh({"model": ranks})
        found, traffic = zoo.planned(name, ranks, STEPS)
        zoo.assert_equal(found, alone)
        plan = unidist.plan(found.model, mesh)
        fractions.append(f"{plan.sharded_fraction:.1%}")
        if ranks == 2:
            pairs = f"{len(zoo.rows_of(found.model))} of {len(plan.pairs)}"
            sent = _sent(traffic)
    return f"| {name} | {', '.join(dict.fromkeys(fractions))} | {pairs} | {sent} |"


def _sent(traffic: object) -> str:
    """What each step sends: what was sent as often as there were steps, or a multiple of it."""
    calls = Counter((e.op, e.purpose) for e in traffic.events)  # type: ignore[attr-defined]
    each = Counter[str]()
    for (op, _), count in calls.items():
        each[op] += count // STEPS
    return ", ".join(f"{count} {op}" for op, count in sorted(each.items()) if count)


def rows_of_page() -> list[str]:
    lines = PAGE.read_text().splitlines()
    start = lines.index(HEAD[1]) + 1
    return [line for line in lines[start:] if line.startswith("|")]


def page() -> str:
    from tests.keras.hub import zoo

    rows = "\n".join(row(name) for name in zoo.BACKBONES)
    return TEXT.format(head="\n".join(HEAD), rows=rows)


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "torch"
    import unidist

    unidist.use("sim", devices=4)
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
