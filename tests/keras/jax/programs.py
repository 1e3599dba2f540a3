"""What the processes of the tests of JAX train. Each function returns plain values for the test to compare."""

from __future__ import annotations

from typing import Any

from tests.keras.jax.models import BATCH, CASES, ROWS, compile_case
from tests.support.runs import Result, fresh, scope, strategy, told


def made(name: str, optimizer: str = "momentum", **options: Any) -> Any:
    model = CASES[name].build()
    compile_case(model, CASES[name], optimizer, **options)
    return model


def train(name: str, optimizer: str, kind: str | None, **options: Any) -> Result:
    """Five batches, the last ragged, then evaluate and predict with batches of one size that does not divide."""
    fresh()
    data = CASES[name].data()
    with scope(strategy(kind, CASES[name].rules)):
        model = made(name, optimizer, **options)
        history = model.fit(**data, batch_size=BATCH, epochs=1, shuffle=True, verbose=0).history
        scored = {key: value for key, value in data.items() if key != "class_weight"}
        evaluated = model.evaluate(**scored, batch_size=ROWS // 2, verbose=0, return_dict=True)
        predicted = model.predict(data["x"], batch_size=ROWS // 2, verbose=0)
        return {"history": history, "evaluate": evaluated, "predict": predicted, **told(model)}
