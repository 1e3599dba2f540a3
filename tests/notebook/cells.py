"""What a user would have in the cells of a notebook."""

from __future__ import annotations

import functools
import os
import time as clock
from pathlib import Path

import numpy as np

import unidist

OFFSET = {"by": 100}
TABLE = np.arange(4.0)
MESH = unidist.Mesh({"data": 2})


def plus_offset(number):
    return number + OFFSET["by"]


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def total(numbers, *, scale: float = 1.0) -> dict:
    rank = unidist.process_index()
    print(f"mine is {numbers[rank]}")
    mesh = unidist.Mesh({"data": -1})
    parts = unidist.from_local([np.full(2, float(numbers[rank]))], mesh, unidist.Layout(partial="data"))
    summed = unidist.all_reduce(parts).numpy() * scale
    return {"sum": summed, "rest": (plus_offset(rank), TABLE[1:], odd(3), None), 7: Path("a/b").name}


def fails_on_one(waits: float):
    if unidist.process_index() == 1:
        raise ValueError("no such <thing>")
    clock.sleep(waits)


def stays(folder: str):
    place = Path(folder) / f"pid-{unidist.process_index()}"
    place.with_suffix(".part").write_text(str(os.getpid()))
    place.with_suffix(".part").rename(place)
    clock.sleep(600)


def returns_a_model():
    return MESH


def decorated(function):
    return functools.wraps(function)(lambda *args: function(*args))


def around():
    outside = [1]

    def inside():
        return outside

    return inside


class Thing:
    def method(self):
        return 0


by_another_name = plus_offset


def uses_another_name():
    return by_another_name(1)


class Scaled(Thing):
    factor = len(TABLE)

    def __init__(self, by: float) -> None:
        self.by = by * self.factor + self.method()


def makes_a_thing():
    return Scaled(2).by


def shadows(MESH, TABLE=OFFSET):  # noqa: N803
    return [OFFSET + 1 for OFFSET in (MESH, TABLE)]
