"""Plans of made-up models, from facts alone: no framework and no Keras."""

from __future__ import annotations

from unidist import Mesh, Plan
from unidist.planner.facts import Affine, Amount, Calls, Facts, LayerFact, Reach, VariableFact
from unidist.planner.plan import make_plan
from unidist.strategies import Strategy
from unidist.strategies.strategy import choose_axes

WIDTH = 64


def chain(blocks: int, names: tuple[str, str, str] = ("up_{}", "down_{}", "head")) -> Facts:
    """So many pairs of Dense layers, and a small layer behind them."""
    layers, variables, reaches = [], [], []

    def dense(path: str, taken: int, given: int) -> None:
        kernel = len(variables)
        for name, shape in (("kernel", (taken, given)), ("bias", (given,))):
            variables.append(VariableFact(f"{path}/{name}", shape, "float32", 4, layer=path))
        calls = Calls((Amount(Affine(taken)),), (Amount(Affine(given)),), (len(layers),))
        layers.append(LayerFact(path, "product", kernel, kernel + 1, outputs={1: 0}, inputs=(0,), calls=calls))

    for k in range(blocks):
        reaches.append(Reach(len(layers), 1, arrivals=((len(layers) + 1, 0),)))
        dense(names[0].format(k), WIDTH, 4 * WIDTH)
        dense(names[1].format(k), 4 * WIDTH, WIDTH)
    dense(names[2], WIDTH, 3)
    slots = tuple(2 * variable.bytes for variable in variables)
    return Facts("chain", tuple(variables), tuple(layers), tuple(reaches), 2, slots, "Adam")


def plan_of(facts: Facts, sizes: dict[str, int], zero: int = 0, batch: int = 8) -> Plan:
    mesh = Mesh(sizes)
    data, model = choose_axes(mesh, None, None)
    axes = tuple(axis for axis in model if mesh.axis_size(axis) > 1)
    return make_plan(
        facts,
        Strategy(mesh, data, zero=zero),
        axes,
        None,
        batch=batch,
        sequence=1,
        rehearse=lambda *_: "there is no model",
    )
