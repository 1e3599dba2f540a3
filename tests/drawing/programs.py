"""What a process with Keras on torch draws for the tests."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCUMENTED = Path(__file__).parents[2] / "docs" / "pictures.py"


def documented() -> dict[str, str]:
    """The documents' pictures by file name, as they are made now."""
    made: dict[str, str] = runpy.run_path(str(DOCUMENTED))["made"]()
    return made


def named() -> dict[str, str]:
    """What each of them shows."""
    return {f"{one.__name__}.svg": one.__doc__ or "" for one in runpy.run_path(str(DOCUMENTED))["PICTURES"]}


def cell(text: str, folder: str) -> None:
    """Runs a cell, as a notebook does: its source is known, and in no file."""
    import linecache
    import os

    os.chdir(folder)
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(keepends=True), "<cell>")
    exec(compile(text, "<cell>", "exec"), {"__name__": "__main__of_a_notebook"})


def of_a_model() -> dict[str, str]:
    """A model that has trained a step: drawn by itself and by its description, and the memory of a device."""
    import keras
    import numpy as np

    import unidist

    unidist.use("sim", devices=4)
    with unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2})).scope():
        up = keras.layers.Dense(64, activation="gelu", name="up")
        model = keras.Sequential([keras.Input((16,)), up, keras.layers.Dense(16, name="down<b>")], name="net")
        model.compile("adam", "mse")
    with unidist.ledger() as sent:
        model.fit(np.ones((8, 16), "float32"), np.ones((8, 16), "float32"), verbose=0)
    described = unidist.describe(model)
    return {
        "model": unidist.draw(model).svg,
        "description": unidist.draw(described).svg,
        "in a notebook": described._repr_html_() or "",
        "memory": unidist.draw({"net": described}).svg,
        "ledger": unidist.draw(sent).svg,
        "text": str(described),
        "slots": str(described.bytes_of("slots")),
    }
