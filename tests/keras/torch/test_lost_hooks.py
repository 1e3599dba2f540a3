"""Attributes that a newer framework lacks, or has in another shape: a model that needs them is refused by name, any
other trains as before, and nothing else fails. JAX and TensorFlow: tests/keras/test_lost_hooks.py."""

from __future__ import annotations

import random
from typing import Any

import keras
import pytest
import torch

import unidist
from tests.keras import lost
from tests.support.sampling import SEED, unless_all
from unidist.errors import BackendMismatchError, CapabilityError
from unidist.keras.patching import compat, patches

EVERY = lost.every()
CASES = [(EVERY[k], kind) for k, kind in lost.cases()]
SAMPLE = random.Random(SEED).sample(CASES, 24)
# A Dense model under DataParallel needs none of these.
NOT_NEEDED = ("vmap", "hessian", "clip_grad_norm_", "checkpoint", "dropout", "ctc_loss")


def ids(value: Any) -> str:
    return value if isinstance(value, str) else value.where


@pytest.mark.parametrize(("hook", "kind"), unless_all(SAMPLE, CASES), ids=ids)
def test_a_model_trains_or_is_refused_by_name(hook, kind):
    lost.check(hook, kind)


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_a_model_that_does_not_need_it_trains(name):
    (hook,) = (hook for hook in EVERY if hook.where.endswith(f".{name}"))
    with lost.without(hook, "a number"):
        assert [one.where for one in patches.lost()] == [hook.where]
        found = lost.trained(unidist.DataParallel())
    lost.same(found, lost.trained())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Own(keras.layers.Layer):
    def call(self, x):
        return Doubled.apply(x)


def test_a_layer_of_the_users_own_is_refused_without_what_it_may_call():
    (hook,) = (hook for hook in EVERY if hook.where == "torch.func.hessian")
    with lost.without(hook, "gone"):
        with unidist.DataParallel().scope():
            model = keras.Sequential([keras.Input((6,)), Own(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        with pytest.raises(CapabilityError, match=r"torch\.func\.hessian") as raised:
            model.fit(lost.X, lost.Y, verbose=0)
    assert "unidist was tested with torch 2.13, 2.14, 2.15" in str(raised.value)
    assert torch.__version__ in str(raised.value)


def test_a_place_inside_keras_that_is_gone_fails_where_it_is_used(monkeypatch):
    monkeypatch.setitem(compat._PLACES, "gone", "keras.nowhere:Thing")
    gone = compat.gone
    assert not isinstance(3, gone)

    class Derived(gone):  # type: ignore[valid-type]
        pass

    for use in (lambda: gone.attribute, lambda: gone(1), lambda: Derived()):
        with pytest.raises(BackendMismatchError, match=r"keras\.nowhere\.Thing"):
            use()
