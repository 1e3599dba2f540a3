"""What stands before a layer's call: its order, and that it can be taken off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from unidist.keras.patching.layer_calls import Call, Stage, around, without


class Layer:
    def call(self, x: str) -> str:
        return x


def saying(word: str) -> Callable[[Call], Call]:
    def link(rest: Call) -> Call:
        return lambda x: f"{word}({rest(x)})"

    return link


def test_stages_stand_in_their_order_whichever_comes_first() -> None:
    layer = Layer()
    for stage, word in ((Stage.FETCHED, "b"), (Stage.RULE, "c"), (Stage.BORDER, "a")):
        around(layer, stage, saying(word))
    assert layer.call("x") == "a(b(c(x)))"


class Quantized(Layer):
    """Keras calls it by the other method."""

    def quantized_call(self, x: str) -> str:
        return f"few bits of {x}"


def test_the_same_stands_before_the_call_of_a_quantized_layer() -> None:
    layer = Quantized()
    undo = around(layer, Stage.RULE, saying("a"))
    assert (layer.call("x"), layer.quantized_call("x")) == ("a(x)", "a(few bits of x)")
    undo()
    assert not vars(layer)


def test_of_two_at_one_stage_the_later_stands_outside() -> None:
    layer = Layer()
    around(layer, Stage.SHARED, saying("first"))
    around(layer, Stage.SHARED, saying("second"))
    assert layer.call("x") == "second(first(x))"


def test_what_is_taken_off_leaves_the_others_and_at_last_the_layers_own_call() -> None:
    layer = Layer()
    undo_inner = around(layer, Stage.RULE, saying("inner"))
    undo_outer = around(layer, Stage.FETCHED, saying("outer"))
    undo_inner()
    assert layer.call("x") == "outer(x)"
    undo_outer()
    assert layer.call("x") == "x"
    assert "call" not in vars(layer)


def test_a_call_that_somebody_set_on_the_object_comes_back() -> None:
    layer: Any = Layer()
    layer.call = own = lambda x: f"own({x})"
    undo = around(layer, Stage.RULE, saying("rule"))
    assert layer.call("x") == "rule(own(x))"
    undo()
    assert layer.call is own


@pytest.mark.parametrize("wrapper", [functools.wraps, lambda inner: lambda outer: outer], ids=["wraps", "plain"])
def test_a_strangers_wrapper_on_top_stays_and_what_is_below_it_can_be_taken_off(wrapper: Any) -> None:
    layer: Any = Layer()
    undo = around(layer, Stage.RULE, saying("rule"))
    below = layer.call

    @wrapper(below)
    def stranger(x: str) -> str:
        return f"stranger({below(x)})"

    layer.call = stranger
    assert layer.call("x") == "stranger(rule(x))"
    undo()
    assert layer.call("x") == "stranger(x)"


def test_a_call_without_one_stage_has_all_others() -> None:
    layer = Layer()
    around(layer, Stage.ROWS, saying("rows"))
    around(layer, Stage.RULE, saying("rule"))
    without_rows = without(layer.call, Stage.ROWS)
    assert without_rows is not None
    assert without_rows("x") == "rule(x)"
    assert without(layer.call, Stage.FETCHED) is None
    assert without(Layer().call, Stage.ROWS) is None
