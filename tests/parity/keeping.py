"""What the tests of layers that keep more than variables run in processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.memory import _copies
from tests.parity.train import Spec
from tests.support.clearing import cleared

WORDS, OTHERS = ["a b", "b", "b c"], ["q b", "b", "b d"]
TEXT = np.array([["a b"], ["b"], ["c q"], ["zz"]] * 2)
ROWS = np.arange(8.0).reshape(8, 1) * 12


def _build(words: list[str], seed: int) -> Any:
    """A model whose layers have learned of these words. Names are Keras's own, which count on."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(seed)
    text, row = keras.Input((1,), dtype="string"), keras.Input((1,))
    vector, weighed, among = (
        layers.TextVectorization(),
        layers.StringLookup(output_mode="tf_idf"),
        layers.StringLookup(),
    )
    whole, bins = layers.IntegerLookup(output_mode="one_hot"), layers.Discretization(num_bins=4, output_mode="one_hot")
    scale = layers.Normalization()
    vector.adapt(words)
    weighed.adapt([[word.split()[-1], words[0]] for word in words])
    among.adapt(words)
    whole.adapt(np.arange(4) * 12 * seed)
    bins.adapt(np.arange(100.0) * seed)
    scale.adapt(ROWS + seed)
    inner = keras.Sequential([keras.Input((1,), dtype="string"), among, layers.Embedding(8, 3), layers.Flatten()])
    parts = [
        layers.GlobalAveragePooling1D()(layers.Embedding(8, 3)(vector(text))),
        *(weighed(text), inner(text), bins(row), scale(row), whole(layers.Rescaling(1, dtype="int64")(row))),
    ]
    model = keras.Model([text, row], layers.Dense(2)(layers.Concatenate()(parts)))
    model.compile("adam", "mse")
    return model


def _predicted(model: Any) -> Any:
    import tensorflow as tf

    return np.asarray(model.predict([tf.constant(TEXT), ROWS], verbose=0))


def learned(folder: str) -> dict[str, Any]:
    """Predictions of a model, of another one before and after it takes the first one's step, and of a file of it."""
    import keras

    import unidist
    from unidist import cli

    model = _build(WORDS, 1)
    found = {"saved": _predicted(model)}
    unidist.save(model, folder, step=1)
    other = _build(OTHERS, 2)
    # Its compiled step has its own words in it.
    found["before"] = _predicted(other)
    told = unidist.restore(other, folder)
    found["after"], found["told"] = _predicted(other), (told.skipped, told.converted)
    found["words"] = next(x for x in other.layers if x.name.startswith("text_vectorization")).get_vocabulary()
    found["code"] = cli.main(["checkpoint", "export", folder, f"{folder}/model.keras"])
    found["loaded"] = _predicted(keras.saving.load_model(f"{folder}/model.keras"))
    return found


def going_on(folder: str) -> tuple[Any, Any]:
    """Predictions of a model that was trained, and of one that has learned other words and goes on where it ended."""
    import tensorflow as tf

    import unidist

    found = []
    for words, seed in ((WORDS, 1), (OTHERS, 2)):
        model = _build(words, seed)
        checkpoint = unidist.Checkpoint(folder)
        x = [tf.constant(TEXT), ROWS]
        model.fit(x, np.ones((8, 2)), batch_size=8, epochs=1, callbacks=[checkpoint], verbose=0)
        found.append(_predicted(model))
    return found[0], found[1]


def _noting(place: int) -> Any:
    """A layer that keeps a text and a number of its process, and has a variable that is saved with them."""
    import keras

    class Noting(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
            self.text, self.number = f"of {place}", place + 0.5

        def call(self, x: Any) -> Any:
            return x * self.scale

        def save_assets(self, folder: str) -> None:
            (Path(folder) / "in").mkdir()
            (Path(folder) / "in" / "text").write_text(self.text)
            (Path(folder) / "empty").touch()

        def load_assets(self, folder: str) -> None:
            assert (Path(folder) / "empty").read_bytes() == b""
            self.text = (Path(folder) / "in" / "text").read_text()

        def save_own_variables(self, store: Any) -> None:
            super().save_own_variables(store)
            store["number"] = np.float64(self.number)

        def load_own_variables(self, store: Any) -> None:
            self.number = float(store["number"])
            super().load_own_variables({"0": store["0"]})

    return Noting(name="noting")


def _noted(spec: Spec, shift: int) -> Any:
    import keras

    import unidist
    from tests.parity.checkpoints import strategy_of

    cleared()
    keras.utils.set_random_seed(shift)
    with strategy_of(spec).scope():
        layers = [keras.layers.Dense(8, name="first"), _noting(unidist.process_index() + shift)]
        model = keras.Sequential([keras.Input((4,)), *layers], name="net")
        model.compile("adam", "mse")
    unidist.describe(model)  # on DTensor a model is placed when it is first used
    return model


def by_processes(folder: str, spec: Spec, *, asynchronous: bool = False) -> tuple[str, float, bool, bool]:
    """(text, number) of a layer that this process has restored, whether they were these before, and whether the values
    of variables came along."""
    import unidist

    model, other = _noted(spec, 0), _noted(spec, 10)
    model.layers[1].scale.assign(np.arange(8.0))
    unidist.save(model, folder, step=1, asynchronous=asynchronous)
    before = other.layers[1].text, other.layers[1].number
    unidist.restore(other, folder)
    own = other.layers[1]
    pairs = zip(model.weights, other.weights, strict=True)
    return own.text, own.number, before == (own.text, own.number), all(np.array_equal(a, b) for a, b in pairs)


def keep(said: list[str], folder: str, spec: Spec) -> None:
    """Keeps a step in memory."""
    _copies(said, folder).save(_noted(spec, 0), 3, {})


def take(said: list[str], folder: str, spec: Spec) -> tuple[str, float]:
    """(text, number) of a layer in a model that takes this step."""
    from unidist.keras.checkpoint.api import restore_from
    from unidist.keras.checkpoint.states import State

    model = _noted(spec, 10)
    restore_from(model, _copies(said, folder).find(State.of(model).holders, 0))
    return model.layers[1].text, model.layers[1].number


def texts(folder: str) -> dict[str, Any]:
    """On torch with TensorFlow's layers: what a model has of another one's step whose layers keep texts beside it."""
    import keras
    import keras_hub

    import unidist

    def build(words: list[str]) -> Any:
        cleared()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="net")
        # Keras does not follow what is kept so.
        object.__setattr__(model, "preprocessor", keras.layers.StringLookup(name="lookup"))
        model.preprocessor.adapt(words)
        model.tokenizer = keras_hub.tokenizers.WordPieceTokenizer(["[PAD]", "[UNK]", *words], name="pieces")
        return model

    model, other = build(["a", "b", "c"]), build(["q"])
    unidist.save(model, folder, step=1)
    unidist.restore(other, folder)
    return {
        "lookup": (model.preprocessor.get_vocabulary(), other.preprocessor.get_vocabulary()),
        "pieces": (list(model.tokenizer.get_vocabulary()), list(other.tokenizer.get_vocabulary())),
        "ids": np.asarray(other.preprocessor(np.array(["c", "a"]))).tolist(),
    }
