"""Slots that rest in host memory: numbers are one device's, and the device holds what an update works with alone."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import weakref

import keras
import numpy as np
import pytest
import torch

import unidist
from tests.keras.torch.models import assert_equal, features, mlp, model_parallel, train, two_by_two
from tests.support.sampling import unless_all
from unidist.errors import ArgumentError, LayoutError
from unidist.keras.torch import context
from unidist.keras.torch.params import host_memory
from unidist.keras.torch.params.host_memory import HostStorage

NARROW = 1 << 9


class Own(keras.optimizers.Optimizer):
    """A user's own, which looks at whole variables, and whose slots have names of their own."""

    def build(self, variables):
        super().build(variables)
        self.seen = self.add_optimizer_variables(variables, "seen")

    def update_step(self, gradient, variable, learning_rate):
        seen = self.seen[self._get_variable_index(variable)]
        self.assign(seen, 0.5 * seen + gradient * keras.ops.mean(keras.ops.square(gradient)))
        self.assign_sub(variable, learning_rate * seen)


def adam(**options):
    return keras.optimizers.Adam(0.01, epsilon=1e-3, **options)


# With how many of their slots are laid out as a variable, of six.
OPTIMIZERS = {
    "momentum": (lambda: keras.optimizers.SGD(0.05, momentum=0.9), 6),
    "adam": (adam, 12),
    "amsgrad": (lambda: adam(amsgrad=True), 18),
    "clipped": (lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.5), 12),
    "factored": (lambda: keras.optimizers.Adafactor(0.01), 6),
    "muon": (lambda: keras.optimizers.Muon(0.01, epsilon=1e-3), 9),
    "lion": (lambda: keras.optimizers.Lion(0.001), 6),
    "counting": (lambda: keras.optimizers.Nadam(0.01, epsilon=1e-3), 12),
    "ftrl": (lambda: keras.optimizers.Ftrl(0.01), 12),
    "averaged": (lambda: adam(use_ema=True, ema_overwrite_frequency=2), 18),
    "accumulated": (lambda: adam(gradient_accumulation_steps=2), 18),
    "scaled": (lambda: keras.optimizers.LossScaleOptimizer(adam(), initial_scale=64.0), 12),
    "own": (lambda: Own(0.05), 6),
}
STRATEGIES = {
    "zero0": lambda offload: unidist.DataParallel(offload=offload),
    "zero1": lambda offload: unidist.DataParallel(zero=1, offload=offload),
    "zero3": lambda offload: unidist.DataParallel(zero=3, offload=offload),
    "replicas": lambda offload: unidist.DataParallel(
        unidist.Mesh({"replica": 2, "shard": 2}), zero=3, shard_axis="shard", offload=offload
    ),
    "2x2": lambda offload: model_parallel(mesh=two_by_two(), offload=offload),
    "2x2-zero3": lambda offload: model_parallel(mesh=two_by_two(), zero=3, offload=offload),
}


@pytest.fixture(autouse=True)
def small_turns(monkeypatch):
    """A kernel, or a few biases."""
    monkeypatch.setattr(host_memory, "TURN_BYTES", NARROW)


def hosted(model):
    return [v for v in model.optimizer.variables if isinstance(v._storage, HostStorage)]


def assert_home(model):
    for variable in hosted(model):
        storage = variable._storage
        assert not storage.homes
        assert not storage._coming
        assert all(shard.device.type == "cpu" for shard in storage.shards.values())


def values(model):
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


@functools.cache
def alone(name):
    """A training of one device, with the values of its slots."""
    found = train(mlp, *features(), optimizer=OPTIMIZERS[name][0])
    return found, values(found.model)


# Each strategy once. Of the other optimizers the numbers are those without it, which test_zero.py compares.
PAIRS = [
    *(("momentum", "zero0"), ("adam", "zero1"), ("factored", "zero3"), ("muon", "replicas"), ("scaled", "2x2")),
    ("accumulated", "2x2-zero3"),
]


@pytest.mark.parametrize(("name", "strategy"), unless_all(PAIRS, list(itertools.product(OPTIMIZERS, STRATEGIES))))
def test_numbers_are_one_devices(name, strategy):
    make, slots = OPTIMIZERS[name]
    wanted, slots_too = alone(name)
    found = train(mlp, *features(), STRATEGIES[strategy]("states"), optimizer=make)
    assert_equal(found, wanted)
    assert len(hosted(found.model)) == slots
    assert_home(found.model)
    for one, other in zip(values(found.model), slots_too, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, "zero1") for name in OPTIMIZERS), ("adam", "replicas"), ("muon", "2x2-zero3"), ("averaged", "zero3")],
)
def test_numbers_are_those_without_it(name, strategy):
    x, y = features()
    plain, rested = (
        train(mlp, x, y, STRATEGIES[strategy](o), optimizer=OPTIMIZERS[name][0]) for o in ("none", "states")
    )
    # Nadam's variables go one by one, and Keras's update of all of them multiplies in another order.
    rounding = 1e-5 if name == "counting" else 0.0
    assert len(hosted(rested.model)) == OPTIMIZERS[name][1]
    for found, wanted in zip(values(rested.model), values(plain.model), strict=True):
        np.testing.assert_allclose(found, wanted, atol=rounding, rtol=0)


class Setting(keras.callbacks.Callback):
    """Sets what an optimizer has amid a training."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            optimizer = self.model.optimizer
            optimizer.set_weights([0.5 * np.asarray(v) for v in optimizer.variables])


@pytest.mark.parametrize("zero", [0, 3])
def test_callbacks_set_and_swap_slots(zero):
    x, y = features()
    told = []
    for offload in ("none", "states"):
        found = train(
            mlp,
            x,
            y,
            unidist.DataParallel(zero=zero, offload=offload),
            optimizer=lambda: adam(use_ema=True),
            callbacks_too=(Setting(), keras.callbacks.SwapEMAWeights(swap_on_epoch=True)),
            validation_data=(x, y),
        )
        told.append([*values(found.model), *found.history["val_loss"]])
        assert_home(found.model)
    for one, other in zip(*told, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("when", ["in the scope", "before the model is spread", "in the first step"])
def test_whenever_an_optimizer_is_built(when):
    strategy = unidist.DataParallel(zero=1, offload="states")
    optimizer, (x, y) = adam(), features(rows=8)
    keras.utils.set_random_seed(3)
    if when == "before the model is spread":
        model = mlp()
        optimizer.build(model.trainable_variables)
        unidist.parallelize(model, strategy)
    else:
        with strategy.scope():
            model = mlp()
            if when == "in the scope":
                optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    model.train_on_batch(x, y)
    assert len(hosted(model)) == 12
    wanted = built(unidist.DataParallel(zero=1))
    wanted.train_on_batch(x, y)
    for one, other in zip(values(model), values(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_two_devices(name):
    unidist.use("sim", devices=2)
    x, y = features()
    make, _ = OPTIMIZERS[name]
    found = train(mlp, x, y, unidist.DataParallel(zero=1, offload="states"), optimizer=make)
    assert_equal(found, train(mlp, x, y, optimizer=make))
    assert hosted(found.model)


def test_of_mixed_precision():
    """In float16, whose losses Keras scales: the slots are those of the weights, in float32."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = features()
        wanted = train(mlp, x, y, unidist.DataParallel(zero=1), optimizer=adam)
        found = train(mlp, x, y, unidist.DataParallel(zero=1, offload="states"), optimizer=adam)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(found.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert_equal(found, wanted)
    assert {v.dtype for v in hosted(found.model)} == {"float32"}


def built(strategy, optimizer=adam):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = mlp()
        model.compile(optimizer(), "mse")
    return model


class Watched:
    """Notes the copies on the device: how many bytes live at once, and from which memory they came."""

    def __init__(self, monkeypatch):
        self.alive = self.most = self.count = 0
        self.made, self.apart = [], []
        original = host_memory.Lanes.bring

        def bring(lanes, home):
            copy, event = original(lanes, home)
            storage = copy.untyped_storage()
            self.apart.append(storage.data_ptr() != home.untyped_storage().data_ptr())
            self.made.append(weakref.ref(copy))
            self.count += 1
            self.alive += copy.nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._gone, copy.nbytes)
            return copy, event

        monkeypatch.setattr(host_memory.Lanes, "bring", bring)

    def _gone(self, nbytes):
        self.alive -= nbytes


@pytest.mark.parametrize(
    ("name", "slots", "comes"),
    # Averages come once a step, and once more where they overwrite the weights.
    [("adam", 2, 24), ("averaged", 2, 24 + 12 + 6), ("own", 1, 12), ("muon", 2, 18), ("counting", 2, 24)],
)
def test_the_device_holds_the_slots_of_two_turns_at_most(name, slots, comes, monkeypatch):
    """Of this one and the next; nothing behind a step. Here a kernel is a turn, alone or with a bias."""
    model = built(unidist.DataParallel(zero=0, offload="states"), OPTIMIZERS[name][0])
    x, y = features(rows=8)
    model.train_on_batch(x, y)
    gc.collect()
    seen = Watched(monkeypatch)
    # One rank at a time: ranks that wait for each other in a step hold nothing.
    for _ in range(2):
        model.train_on_batch(x, y)
    assert seen.count == 4 * comes
    assert all(seen.apart)
    assert seen.alive == 0
    assert not any(ref() is not None for ref in seen.made)
    turns = [12 * 16, 16 + 16 * 8, 16 * 8 + 8, 8 + 8 * 3 + 3]
    largest = max(one + other for one, other in itertools.pairwise(turns))
    assert 0 < seen.most <= 4 * slots * largest
    everything = sum(np.prod(v.shape) for v in hosted(model)) * 4
    assert seen.most < everything
    assert_home(model)


def test_the_next_turns_slots_come_before_this_one_is_updated(monkeypatch):
    model = built(unidist.DataParallel(offload="states"), OPTIMIZERS["momentum"][0])
    x, y = features(rows=8)
    model.train_on_batch(x, y)
    told = []

    def noted(name):
        original = getattr(HostStorage, name)

        def call(slot, frame):
            if frame.rank == 0 and (name == "put_back" or 0 not in slot.homes):
                told.append((name, slot.path.split("/")[-1]))
            original(slot, frame)

        return call

    for name in ("fetch", "put_back"):
        monkeypatch.setattr(HostStorage, name, noted(name))
    model.train_on_batch(x, y)
    names = [name for name, _ in told]
    assert names.count("fetch") == names.count("put_back") == 6
    first = names.index("put_back")
    assert first >= 2
    assert names[-1] == "put_back"
    going = [slot for name, slot in told if name == "put_back"]
    coming = [slot for name, slot in told if name == "fetch"]
    assert going == coming
    # The second turn is there when the first goes.
    assert set(coming[:first]) > {going[0]}


def test_what_fails_amid_an_update_leaves_no_slot_on_the_device(monkeypatch):
    model = built(unidist.DataParallel(offload="states"), OPTIMIZERS["own"][0])
    x, y = features(rows=8)
    model.train_on_batch(x, y)
    original, calls = Own.update_step, []

    def breaks(self, gradient, variable, learning_rate):
        calls.append(variable)
        if len(calls) > 2:
            raise ValueError("stopped")
        original(self, gradient, variable, learning_rate)

    with monkeypatch.context() as patch:
        patch.setattr(Own, "update_step", breaks)
        with pytest.raises(Exception, match="stopped"):
            model.train_on_batch(x, y)
    assert_home(model)
    model.train_on_batch(x, y)


def test_what_is_computed_again_leaves_slots_where_they_are():
    """Recomputation in backward enters a copy of the step's frame, amid what holds a slot."""
    model = built(unidist.DataParallel(zero=1, offload="states"))
    model.train_on_batch(*features(rows=8))
    first, second = (variable._storage for variable in hosted(model)[:2])

    def work(frame):
        first.own(frame)
        with context.entered(copy.copy(frame)) as again:
            second.own(again)
        assert frame.rank in first.homes
        assert frame.rank not in second.homes

    first.world.run(work)
    assert_home(model)


class Reading(keras.Model):
    """Its step reads a slot, and writes another one."""

    def train_step(self, data):
        logs = super().train_step(data)
        first, second = self.optimizer._momentums[:2]
        second.assign(second * 0.5)
        logs["slot"] = keras.ops.sum(first.value)
        return logs


def test_steps_and_programs_read_and_write_slots():
    def build():
        x = keras.Input((12,))
        return Reading(x, keras.layers.Dense(3, name="b")(keras.layers.Dense(8, "tanh", name="a")(x)))

    x, y = features(rows=8)
    wanted = train(build, x, y, optimizer=adam)
    found = train(build, x, y, unidist.DataParallel(zero=1, offload="states"), optimizer=adam)
    assert_equal(found, wanted)
    assert_home(found.model)
    for model in (found.model, wanted.model):
        slot = hosted(found.model)[0] if model is found.model else model.optimizer._momentums[0]
        assert slot.path == model.optimizer._momentums[0].path
        before = np.asarray(slot)
        copy = keras.ops.convert_to_numpy(slot.value + 1.0)
        np.testing.assert_allclose(copy, before + 1.0)
        slot.assign(before * 2)
        np.testing.assert_allclose(np.asarray(slot), before * 2)
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    for one, other in zip(found.model.weights, wanted.model.weights, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-5)


def test_a_model_that_was_trained_before_takes_its_slots_along():
    x, y = features(rows=8)
    models = []
    for is_spread in (False, True):
        keras.utils.set_random_seed(5)
        model = mlp()
        model.compile(adam(), "mse")
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        if is_spread:
            unidist.parallelize(model, unidist.ModelParallel(two_by_two(), zero=1, offload="states"))
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        models.append(model)
    assert len(hosted(models[1])) == 12
    assert any(v._storage.shardings.stored.layout.dims for v in hosted(models[1]))
    for one, other in zip(*(m.variables + m.optimizer.variables for m in models), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-5)
    with pytest.raises(LayoutError):
        unidist.parallelize(models[1], unidist.ModelParallel(two_by_two(), zero=1))


# checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "read"), [("states", "none"), ("none", "states"), ("states", "states")])
@pytest.mark.parametrize("zero", [0, 3])
def test_checkpoints_know_no_place_of_rest(saved, read, zero, tmp_path):
    x, y = features(rows=8)
    first = built(unidist.DataParallel(zero=zero, offload=saved))
    first.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    unidist.save(first, tmp_path / "steps")
    first.save(tmp_path / "model.keras")
    first.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    wanted = [np.asarray(v) for v in (*first.variables, *first.optimizer.variables)]

    strategy = unidist.DataParallel(zero=zero, offload=read)
    second = built(strategy)
    second.train_on_batch(x, y)
    unidist.restore(second, tmp_path / "steps")
    with strategy.scope():
        third = keras.models.load_model(tmp_path / "model.keras")
    for model in (second, third):
        assert len(hosted(model)) == (12 if read == "states" else 0)
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        for value, variable in zip(wanted, (*model.variables, *model.optimizer.variables), strict=True):
            np.testing.assert_allclose(np.asarray(variable), value, atol=1e-6)
        assert_home(model)


def test_weights_of_an_optimizer_are_given_by_hand():
    x, y = features(rows=8)
    one, other = built(unidist.DataParallel(zero=1)), built(unidist.DataParallel(zero=1, offload="states"))
    for model in (one, other):
        model.train_on_batch(x, y)
    given = [np.full(v.shape, 0.25, v.dtype) for v in one.optimizer.variables]
    for model in (one, other):
        model.optimizer.set_weights(given)
        model.train_on_batch(x, y)
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# what is told ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1])
def test_descriptions_say_where_slots_rest(zero):
    x, y = features(rows=8)
    told = {}
    for offload in ("none", "states"):
        model = built(unidist.DataParallel(zero=zero, offload=offload))
        model.train_on_batch(x, y)
        told[offload] = unidist.describe(model)
    plain, found = told["none"], told["states"]
    scalars = sum(row.bytes_per_device for row in plain.rows if row.kind == "slots" and row.shape == ())
    assert found.bytes_of("host") == plain.bytes_of("slots") - scalars
    assert found.bytes_of("slots") == scalars
    assert found.bytes_per_device == plain.bytes_per_device - found.bytes_of("host")
    assert plain.bytes_of("host") == 0
    assert "on the host" in found.show()
    assert "host" not in plain.show()
    assert "rest in host memory" in unidist.draw(found).svg
    one = next(row for row in found.rows if row.host_bytes)
    shown = found.show(slots=True).split("\n")
    assert f"{one.host_bytes:,} on the host" in next(line for line in shown if one.path in line)


def test_plans_count_slots_on_the_host():
    model, mesh = mlp(), unidist.Mesh({"data": 4})
    plain = unidist.plan(model, mesh, zero=1)
    found = unidist.plan(model, mesh, zero=1, offload="states")
    assert plain.host_bytes_per_device == found.slot_bytes_per_device == 0
    assert found.host_bytes_per_device == plain.slot_bytes_per_device > 0
    assert found.bytes_per_device == plain.bytes_per_device

    def total(plan):
        return next(int(size.replace(",", "")) for name, size in plan.totals() if name.startswith("total"))

    assert total(plain) - total(found) == plain.slot_bytes_per_device
    assert dict(found.totals())["slots in host memory"] == f"{found.host_bytes_per_device:,}"
    assert "host" not in plain.show()


def test_no_choice():
    with pytest.raises(ArgumentError, match="offload='all': give one of 'none', 'states'"):
        unidist.DataParallel(offload="all")
    with pytest.raises(ArgumentError, match="offload='all'"):
        unidist.plan(mlp(), unidist.Mesh({"data": 4}), offload="all")


def test_strategies_without_it_keep_slots_where_they_are(monkeypatch):
    seen = Watched(monkeypatch)
    x, y = features()
    found = train(mlp, x, y, unidist.DataParallel(zero=1), optimizer=adam)
    assert not hosted(found.model)
    assert seen.count == 0
    assert context.frame() is None
    assert torch.is_tensor(found.model.optimizer._momentums[0].value)
