"""What a step keeps for its backward: counted by hand on small models, and compared with what torch's autograd keeps
in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import unidist
from unidist.planner.facts import Activation, Affine
from unidist.testing.processes import ProcessWorld

if TYPE_CHECKING:
    import keras

FLOAT = 4


def bytes_of(model: keras.Model, sizes: dict[str, int], batch: int = 16, sequence: int = 32) -> int:
    return unidist.plan(model, unidist.Mesh(sizes), batch=batch, sequence=sequence).activation_bytes_per_device


def chain(activation: str) -> keras.Model:
    import keras

    layers = [keras.layers.Dense(128, activation), keras.layers.Dense(64), keras.layers.Dense(9)]
    return keras.Sequential([keras.Input((32,)), *layers])


def chain_bytes(activation: str) -> int:
    return bytes_of(chain(activation), {"data": 1})


def transformer() -> keras.Model:
    import keras

    given = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(200, 64)(given)
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 16)(y, y)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(64)(keras.layers.Dense(256, "gelu")(y))
    return keras.Model(given, keras.layers.Dense(200)(x))


@pytest.mark.parametrize(
    ("activation", "kept"),
    # gelu's derivative needs what it takes, relu's is read off what it gives. Nothing needs the last output.
    [("relu", 32 + 128 + 64), ("gelu", 32 + 2 * 128 + 64)],
)
def test_each_tensor_counts_once(activation: str, kept: int) -> None:
    assert bytes_of(chain(activation), {"data": 1}) == 16 * kept * FLOAT
    assert bytes_of(chain(activation), {"data": 4}) == 4 * kept * FLOAT
    assert bytes_of(chain(activation), {"data": 3}) == 6 * kept * FLOAT  # of the device that has most rows


def test_each_tensor_that_layers_take_or_give_counts_once_on_jax(one: ProcessWorld) -> None:
    """Which of them backward needs is the compiler's choice: what the last layer gives counts too."""
    assert one.call(chain_bytes, "gelu") == [16 * (32 + 2 * 128 + 64 + 9) * FLOAT]


def test_what_is_between_the_layers_of_a_pair_is_cut() -> None:
    assert len(unidist.plan(chain("gelu"), unidist.Mesh({"model": 4})).pairs) == 1
    assert bytes_of(chain("gelu"), {"model": 4}) == 16 * (32 + 2 * 128 // 4 + 64) * FLOAT


def test_layers_between_those_of_a_pair_give_what_is_cut() -> None:
    import keras

    layers = [keras.layers.Dense(128), keras.layers.Activation("gelu"), keras.layers.Dense(64)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    assert bytes_of(model, {"model": 4}) == 16 * (32 + 2 * 128 // 4) * FLOAT


def test_dims_that_grow_with_the_sequence_do_so_each() -> None:
    import keras

    scores = Activation((Affine(1), Affine(0, 1), Affine(0, 1)), 2)
    assert scores.bytes_at(2048) == 2048 * 2048 * 2
    assert scores.bytes_at(2048, rows=3) == 3 * 2048 * 2048 * 2
    given = keras.Input((None, 8))
    x = keras.layers.Dense(8)(given)
    model = keras.Model(given, keras.layers.Softmax()(keras.ops.matmul(x, keras.ops.swapaxes(x, 1, 2))))
    # What the layer takes and gives, and what the softmax gives.
    assert bytes_of(model, {"data": 1}, batch=2, sequence=100) == 2 * (100 * 100 + 2 * 100 * 8) * FLOAT


def test_what_has_no_rows_counts_once() -> None:
    import keras

    class Shifted(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.shift = self.add_weight((1, 8))

        def call(self, x: Any) -> Any:
            return x * keras.ops.exp(self.shift)

    model = keras.Sequential([keras.Input((8,)), Shifted()])
    # What exp gives, and the input.
    assert bytes_of(model, {"data": 1}) == (8 + 16 * 8) * FLOAT
    assert bytes_of(model, {"data": 2}) == (8 + 8 * 8) * FLOAT


def test_a_weight_that_is_gathered_for_a_call_counts_while_it_is_kept() -> None:
    import keras

    class Own(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight((64, 64))

        def call(self, x: Any) -> Any:
            return x @ self.kernel

    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64), Own()])
    rows = 16 * (32 + 64) * FLOAT
    assert bytes_of(model, {"data": 1}) == rows
    assert bytes_of(model, {"model": 2}) == rows + 64 * 64 * FLOAT


def test_steps_that_come_with_the_sequence_are_counted_at_its_length() -> None:
    import keras

    class Steps(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.cell = keras.layers.Activation("relu")

        def compute_output_spec(self, x: Any) -> Any:
            return keras.KerasTensor(x.shape, x.dtype)

        def call(self, x: Any) -> Any:
            return keras.ops.stack([self.cell(x[:, k]) for k in range(x.shape[1])], axis=1)

    given = keras.Input((None, 8))
    model = keras.Model(given, Steps()(given))
    model = keras.Model(given, Steps()(keras.layers.Dense(8)(given)))
    # What the layer takes, and what each step gives.
    assert bytes_of(model, {"data": 1}, batch=1, sequence=100) == 2 * 100 * 8 * FLOAT


@pytest.mark.parametrize("sequence", [32, 96])
def test_torch_keeps_as_much(sequence: int) -> None:
    import keras

    from tests.support.saving import saved_bytes

    model, given = transformer(), keras.ops.zeros((16, sequence), "int32")
    kept, saved = saved_bytes(lambda: model(given, training=True), [v.value for v in model.variables])
    assert kept.shape == (16, sequence, 200)
    assert bytes_of(model, {"data": 1}, sequence=sequence) == pytest.approx(saved, rel=1e-3)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("kind", ["one", "data", "model"])
@pytest.mark.parametrize(
    "name", ["gpt2", "bert", "llama", "gemma", "gemma_mqa", "mixtral", "convolutions", "recurrent"]
)
def test_a_step_keeps_as_much(name: str, kind: str) -> None:
    from tests.planner.steps import kept_in_a_step

    planned, kept = kept_in_a_step(name, kind)
    # A query's own memory may be cut where a key's is not.
    assert planned == pytest.approx(kept, rel=0.02)


def test_a_model_that_refuses_nan_is_planned() -> None:
    import keras

    class Checks(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            if not isinstance(x, keras.KerasTensor) and bool(keras.ops.any(keras.ops.isnan(x))):
                raise ValueError("NaN")
            return keras.ops.gelu(x)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    layers = [keras.layers.Dense(128), Checks(), keras.layers.Dense(64)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    assert len(unidist.plan(model, unidist.Mesh({"model": 4})).pairs) == 1
    assert bytes_of(model, {"model": 4}) == 16 * (32 + 2 * 128) * FLOAT


def test_a_kernel_that_loses_nan_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's attention gives numbers on some processors where it gives NaN on others."""
    from unidist.keras.planning.saved_tensors import Saved

    found, own, lost = bytes_of(transformer(), {"model": 2}), Saved._behind, []

    def behind(self: Any, x: Any) -> int | None:
        is_sum = x.ndim == 3 and x.shape[1] == 4
        lost.append(is_sum)
        return None if is_sum else own(self, x)

    monkeypatch.setattr(Saved, "_behind", behind)
    # As where no kernel loses any.
    assert bytes_of(transformer(), {"model": 2}) == found == 2_912_256
    assert any(lost)
