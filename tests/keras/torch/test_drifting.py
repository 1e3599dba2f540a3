"""Ranks that compute the same may get other last bits, as on GPUs. Replicas stay the same bits all the same, and so do
the logs that each rank decides by."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import keras
import numpy as np
import pytest
import torch

import unidist
from tests import preloaded
from tests.keras.torch import drifting
from tests.keras.torch.drifting import CUT, adam, built, other_bits, strategy
from tests.keras.torch.models import TOLERANCE, assert_equal, features, train
from unidist.backends.sim.ranks import VirtualRanks
from unidist.keras.records import model_record
from unidist.keras.torch import carrying
from unidist.keras.torch.world import leave_worlds
from unidist.testing.processes import ProcessWorld


@pytest.fixture
def on_gpus(monkeypatch):
    """The ranks are on GPUs, by what they say."""
    monkeypatch.setattr(VirtualRanks, "torch_device", lambda self: "cuda:0")
    leave_worlds()
    yield
    leave_worlds()


class OwnStep(keras.Model):
    """Gives logs that are no metric's."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.loss_of(x, y, self(x, training=True))
        grads = self.gradients(loss)
        with torch.no_grad():
            self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss, "one": other_bits(torch.ones(()))}

    def loss_of(self, x, y, y_pred):
        return self.compute_loss(x=x, y=y, y_pred=y_pred)

    def gradients(self, loss):
        loss.backward()
        return [v.value.grad for v in self.trainable_variables]


class OwnLoss(OwnStep):
    def loss_of(self, x, y, y_pred):
        return torch.mean((torch.as_tensor(y) - y_pred) ** 2)


class Derived(OwnStep):
    def gradients(self, loss):
        return list(torch.autograd.grad(loss, [v.value for v in self.trainable_variables]))


def parted(model):
    """Paths of variables of which two ranks have the same part in other bits: of weights and of what an optimizer keeps
    of them."""
    found = set()
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        storage, regions = variable._storage, {}
        for rank, part in storage.states.items():
            regions.setdefault(storage.shardings.state.region(rank), []).append(part.detach())
        if any(not torch.equal(parts[0], part) for parts in regions.values() for part in parts):
            found.add(variable.path)
    return found


MESHES = {"model": {"model": 4}, "both": {"data": 2, "model": 2}, "several": {"model": 2, "other": 2}}


def test_replicas_part_where_nothing_is_done():
    assert "first/kernel" in parted(train(built, *features(), strategy(MESHES["both"]), optimizer=adam).model)


@pytest.mark.parametrize(
    ("axes", "zero", "steps"),
    [
        *((axes, 0, None) for axes in MESHES.values()),
        *((MESHES["both"], zero, 2 if zero == 3 else None) for zero in (1, 2, 3)),
    ],
    ids=str,
)
def test_replicas_stay_the_same_bits(on_gpus, axes, zero, steps):
    def optimizer():
        return adam(gradient_accumulation_steps=steps)

    wanted = train(built, *features(), optimizer=optimizer)
    found = train(built, *features(), strategy(axes, zero=zero), optimizer=optimizer)
    assert_equal(found, wanted)
    assert not parted(found.model)


def test_replicas_on_parts_of_sequences_do(on_gpus):
    axes = MESHES["both"]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 6, 12)).astype("float32"), rng.normal(size=(10, 6, 3)).astype("float32")
    wanted = train(lambda: built(6, 12), x, y, optimizer=adam)
    found = train(lambda: built(6, 12), x, y, strategy(axes, sequence_parallel=True), optimizer=adam)
    assert_equal(found, wanted)
    assert not parted(found.model)


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        *((keras.Model, axes) for axes in MESHES.values()),
        *((kind, MESHES["both"]) for kind in (OwnStep, OwnLoss, Derived)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.__name__,
)
def test_ranks_have_the_same_logs_and_replicas(on_gpus, axes, kind, monkeypatch):
    seen = {}
    original = carrying.agreed

    def noting(here, logs):
        out = original(here, logs)
        seen.setdefault(here.rank, []).append(
            {name: float(torch.as_tensor(value).detach()) for name, value in out.items()}
        )
        return out

    monkeypatch.setattr(carrying, "agreed", noting)
    compiled = {"loss": "mse", "metrics": ["mae"]}
    found = train(lambda: built(kind=kind), *features(), strategy(axes), optimizer=adam, compiled=compiled)
    first, *others = (seen[rank] for rank in range(4))
    assert [logs["loss"] for logs in first] == found.losses
    assert all(logs == first for logs in others)
    assert not parted(found.model)


def bytes_of(variables):
    return sum(Fraction(4 * v._storage.states[0].numel()) for v in variables)


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_what_it_sends(on_gpus, axes):
    with unidist.ledger() as book:
        model = train(built, *features(), strategy(axes), optimizer=adam, batch_size=10, epochs=3).model
    cut = [v for v in model.trainable_variables if v.path in CUT]
    whole = [v for v in model.trainable_variables if v.path not in CUT]
    assert len(cut) == 3
    beside = 4 // axes["model"]
    once = Fraction(2 * 3, 4) * bytes_of(whole) + Fraction(2 * (beside - 1), beside) * bytes_of(cut)
    assert book.bytes("all_reduce", purpose="gradient") == 3 * once


def test_buckets_of_two_kinds_are_launched_as_they_are_filled(on_gpus, monkeypatch):
    """A weight in two is cut, and bucket by bucket each is full when backward has come so far."""
    monkeypatch.setenv("UNIDIST_BUCKET_MB", "0.0001")
    found = train(built, *features(), strategy(MESHES["both"]), optimizer=adam).model
    reducer = model_record.of(found).engine.traffic.reducer(0)
    places = {id(member.leaf): k for k, member in enumerate(reversed(reducer.watched))}
    last = [max(places[id(member.leaf)] for member in bucket.members) for bucket in reducer.buckets]
    kinds = [bucket.axes for bucket in reducer.buckets]
    assert last == sorted(last)
    assert sum(a != b for a, b in pairwise(kinds)) >= 2
    assert reducer.launched_early == sum(bucket.nbytes for bucket in reducer.buckets)


# in processes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world():
    with ProcessWorld(
        2, env={"KERAS_BACKEND": "torch"}, setup=drifting.start, timeout=180, preload=preloaded.KERAS["torch"]
    ) as found:
        yield found


@pytest.mark.processes
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_processes_decide_alike(world, compiled):
    first, second = world.call(drifting.fitted, compiled)
    assert first == second
    _, _, rate, epochs = first
    assert rate < 1e-2 * 0.6
    assert epochs < 12


@pytest.mark.processes
@pytest.mark.parametrize("derived", [False, True], ids=["backward", "autograd.grad"])
def test_a_loop_of_the_programs_own(world, derived):
    (first, apart), (second, _) = world.call(drifting.looped, derived)
    assert first == second
    assert apart < TOLERANCE
