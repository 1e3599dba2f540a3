"""Runs a test of Keras's operations on virtual ranks in lock step, with its inputs on carriers: see ci/keras_own.py.

Each rank runs the whole test. What the test gives to Keras's operations is cut or is a sum of parts, in a layout drawn
by the test's name; what comes out is whole where the test looks at it.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from keras.src.backend import config
from keras.src.backend.torch import core

from tests.torch.sharded.lockstep import World, part, states, uneven
from unidist.backends.torch.sharded import Space, wrap
from unidist.propagation.layouts import PARTIAL, State, States, chunked

# By rows; by another dim where there is one; sums of parts; on three ranks each input in a layout of its own.
TURNS = {"rows": 2, "dims": 2, "parts": 2, "mixed": 3}
_SETTINGS = ("_FLOATX", "_EPSILON", "_IMAGE_DATA_FORMAT")
_worlds: dict[str, World] = {}


class _Here(threading.local):
    """What a rank is at: None outside of a turn."""

    space: Space | None = None
    turn = ""
    draw = random.Random(0)
    carriers = 0


_here = _Here()


def runs(method: Callable[[Any], Any], instance: Any, name: str) -> int:
    """Runs a test in each turn, and gives how many carriers a rank had. A test without one runs once."""
    carriers, before = 0, _state()
    for turn in TURNS:
        world = _worlds.setdefault(turn, World(data=TURNS[turn]))
        with world.backend.calling_at_turns(_own_state([before] * world.mesh.size)):
            try:
                carriers += sum(world.run(lambda space, turn=turn: _runs(method, instance, name, space, turn)))
            except Exception as error:
                error.args = (f"[{turn}] {error}",)
                raise
        if not carriers:
            break
    return carriers


def _runs(method: Callable[[Any], Any], instance: Any, name: str, space: Space, turn: str) -> int:
    _here.space, _here.turn, _here.carriers = space, turn, 0
    _here.draw = random.Random(zlib.crc32(f"{turn}/{name}".encode()))
    try:
        method(copy.copy(instance))
    finally:
        _here.space = None
    return _here.carriers


def _own_state(kept: list[Any]) -> Callable[[int], None]:
    """Called when a rank goes on: it finds the random numbers and settings that a process of its own would have."""
    at: list[int] = []

    def on_turn(rank: int) -> None:
        if at:
            kept[at.pop()] = _state()
        at.append(rank)
        numpy, python, torchs, settings = kept[rank]
        np.random.set_state(numpy)
        random.setstate(python)
        torch.set_rng_state(torchs)
        for setting, value in zip(_SETTINGS, settings, strict=True):
            setattr(config, setting, value)

    return on_turn


def _state() -> tuple[Any, ...]:
    settings = [getattr(config, setting) for setting in _SETTINGS]
    return np.random.get_state(), random.getstate(), torch.get_rng_state(), settings


def _carried(x: Any) -> Any:
    """A tensor as a carrier, where it has something to cut."""
    space = _here.space
    is_plain = type(x) is torch.Tensor and x.ndim and not x.is_meta and x.layout == torch.strided
    # The gradient of a plain leaf is the rank's own part of it.
    if space is None or not is_plain or x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x
    _here.carriers += 1
    layout: States = (_state_for(x, space.mesh.size),)
    return wrap(part(x, layout, space, 99), space.spec(layout, tuple(x.shape)))


def _state_for(x: torch.Tensor, places: int) -> State:
    if _here.turn == "rows" or (_here.turn == "parts" and x.dtype == torch.bool):
        return chunked(0, x.shape[0], places)
    if _here.turn == "dims":
        dim = _here.draw.randrange(1, x.ndim) if x.ndim > 1 else 0
        return chunked(dim, x.shape[dim], places)
    if _here.turn == "parts":
        return PARTIAL
    return _here.draw.choice(states(x, places, uneven))


def _on_plain_tensors(method: Callable[..., Any]) -> Callable[..., Any]:
    """A variable keeps a tensor of its own."""

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        space, _here.space = _here.space, None
        try:
            return method(*args, **kwargs)
        finally:
            _here.space = space

    return called


def put_on() -> None:
    """From here on Keras's torch backend makes carriers of all tensors that it is given, inside of a turn."""
    convert = core.convert_to_tensor

    @functools.wraps(convert)
    def convert_to_tensor(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = convert(x, *args, **kwargs)
        return found if torch.compiler.is_compiling() else _carried(found)

    for name in ("_initialize", "_initialize_with_initializer", "_convert_to_tensor"):
        setattr(core.Variable, name, _on_plain_tensors(getattr(core.Variable, name)))

    for module in [one for name, one in sys.modules.items() if name.startswith("keras.src.backend")]:
        if getattr(module, "convert_to_tensor", None) is convert:
            module.convert_to_tensor = convert_to_tensor
