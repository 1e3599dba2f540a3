"""Trainings of which one backward raises, as for want of memory or by Ctrl-C, and that go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import torch

import unidist
from unidist.keras.records import model_record
from unidist.keras.torch.params.buckets import CutBucket, WholeBucket
from unidist.keras.torch.step import reducer

# As a notebook does, with all frames that the exception went through.
_kept: BaseException | None = None
# Some buckets are on their way when the backward breaks off.
_SMALL = 1 << 8


class WantOfMemoryError(Exception):
    """What backward raises."""


class _Raises(torch.autograd.Function):
    is_due = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if _Raises.is_due:
            raise WantOfMemoryError
        return grad


class Raising(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return _Raises.apply(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def _model(zero: int) -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(4)
    with unidist.DataParallel(zero=zero).scope():
        below, above = [[keras.layers.Dense(16, "tanh") for _ in range(3)] for _ in range(2)]
        model = keras.Sequential([keras.Input((8,)), *below, Raising(), *above, keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def train(zero: int, breaks: str | None, by_hand: bool = False) -> tuple[dict[str, Any], int]:
    """(what this process stores of each variable at the end, buckets that were on their way when a backward broke off).

    Four steps, and between the second and the third the one that raises, in "backward" or while "waiting" for its sums;
    by_hand: in a loop of one's own.
    """
    draw = np.random.default_rng(1)
    x, y = (draw.normal(size=(8, n)).astype("float32") for n in (8, 2))
    launched = 0
    with mock.patch.object(reducer, "FIRST_BUCKET_BYTES", _SMALL), mock.patch.object(reducer, "BUCKET_BYTES", _SMALL):
        model = _model(zero)
        step = _by_hand(model, x, y) if by_hand else lambda: model.train_on_batch(x, y)
        for number in range(4):
            if breaks and number == 2:
                launched = _break_off(model, step, breaks)
            step()
    with unidist.DataParallel(zero=zero).scope():
        unidist.gather_weights(model)  # nothing is under way
    stored = {
        v.path: [np.asarray(shard.detach()) for shard in v._storage.shards.values()] for v in model.trainable_weights
    }
    return stored, launched


def _by_hand(model: keras.Model, x: Any, y: Any) -> Callable[[], object]:
    rank, count = unidist.process_index(), unidist.process_count()
    own = [torch.tensor(array[rank::count]) for array in (x, y)]

    def step() -> None:
        model.zero_grad()
        ((model(own[0]) - own[1]) ** 2).mean().backward()
        with torch.no_grad():
            model.optimizer.apply([v.value.grad for v in model.trainable_weights], model.trainable_weights)

    return step


def _break_off(model: keras.Model, step: Callable[[], object], where: str) -> int:
    global _kept
    with _raising_in_backward() if where == "backward" else _raising_while_waiting():
        try:
            step()
        except WantOfMemoryError as error:
            _kept = error
    reducers = [model_record.of(model).engine.traffic.reducer(rank) for rank in model.weights[0]._storage.shards]
    return min(one._next for one in reducers)


@contextlib.contextmanager
def _raising_in_backward() -> Iterator[None]:
    _Raises.is_due = True
    try:
        yield
    finally:
        _Raises.is_due = False


@contextlib.contextmanager
def _raising_while_waiting() -> Iterator[None]:
    """The third wait of each rank raises when it is over."""
    counts: dict[int, int] = {}

    def raising(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def finish(self: Any) -> Any:
            original(self)
            rank = self.group.ranks[self.group.index]
            counts[rank] = counts.get(rank, 0) + 1
            if counts[rank] >= 3:
                raise WantOfMemoryError
            return original(self)

        return finish

    with contextlib.ExitStack() as stack:
        for kind in (WholeBucket, CutBucket):
            stack.enter_context(mock.patch.object(kind, "finish", raising(kind.finish)))
        yield
