"""Steps of a user's own: Keras's documented patterns on torch train as on one device."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist
from tests.keras.torch.models import OwnOfPairs, assert_equal, features, model_parallel, train, two_by_two
from tests.support.sampling import unless_all
from unidist.errors import CapabilityError, LayoutError, MeshError
from unidist.keras.torch.params import param_groups

STRATEGIES = {
    "dp": lambda: unidist.DataParallel(),
    "mp": lambda: model_parallel(),
    "2x2": lambda: model_parallel(mesh=two_by_two()),
    "zero 1": lambda: unidist.DataParallel(zero=1),
    "zero 3": lambda: unidist.DataParallel(zero=3),
}


# The others are parts of these: a mesh of one axis of one with two, stages 0 and 1 of stage 3.
@pytest.fixture(params=unless_all(("2x2", "zero 3"), STRATEGIES))
def strategy(request):
    return STRATEGIES[request.param]()


def as_alone(build, strategy, rows=10, **options):
    """A training by the strategy, with one device's numbers, and one device's."""
    x, y = features(rows=rows)
    found, wanted = (train(build, x, y, given, **{k: v() for k, v in options.items()}) for given in (strategy, None))
    assert_equal(found, wanted)
    return found, wanted


def own(kind):
    return lambda: kind([layers.Input((12,)), layers.Dense(16, name="a"), layers.Dense(3, name="b")])


class OwnStep(keras.Sequential):
    """The documented custom train_step of the torch backend."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        loss.backward()
        trainable = list(self.trainable_weights)
        gradients = [v.value.grad for v in trainable]
        with torch.no_grad():
            self.optimizer.apply(gradients, trainable)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class OwnLoss(OwnStep):
    def compute_step_loss(self, y, y_pred):
        return ((y - y_pred) ** 2).mean()

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_step_loss(y, self(x, training=True))
        loss.backward()
        return {"loss": loss}


class OwnTrackers(keras.Sequential):
    """The documented custom train_step with a loss and metrics of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")
        self.twice = keras.metrics.Mean(name="twice")
        self.level = keras.metrics.Mean(name="level")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")
        self.criterion = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.criterion(y, y_pred)
        loss.backward()
        trainable = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trainable], trainable)
        return self._told(y, y_pred, loss)

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        return self._told(y, y_pred, self.criterion(y, y_pred))

    def _told(self, y, y_pred, loss):
        self.tracker.update_state(loss)
        self.twice.update_state(2 * loss if loss.requires_grad else 0.0)
        self.level.update_state(ops.mean(y_pred))
        self.error.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self):
        return [self.tracker, self.twice, self.level, self.error]


class Beginning(OwnTrackers):
    """Has the largest prediction in its logs, from the second step on. An epoch's are those of its third."""

    def _told(self, y, y_pred, loss):
        is_late = int(self.optimizer.iterations.value) > 1
        return {"loss": loss.detach(), "largest": ops.max(y_pred).detach() if is_late else ops.zeros(())}


def test_a_number_that_a_step_begins_to_compute_later_is_of_all_rows_from_the_next_step_on():
    found, wanted = as_alone(own(Beginning), unidist.DataParallel(), 12, compiled=dict)
    assert found.history["largest"][-1] == pytest.approx(wanted.history["largest"][-1], abs=1e-5)


class Judged(OwnTrackers):
    """Two batches behind each other, as of a generative adversarial network."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        p = self(ops.concatenate([x, 0.5 * x], axis=0), training=True)
        wanted = ops.concatenate([y, ops.ones((ops.shape(y)[0], 3))], axis=0)
        loss = self.criterion(wanted, p)
        loss.backward()
        trainable = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trainable], trainable)
        self.tracker.update_state(loss)
        self.error.update_state(wanted, p)
        return {"loss": self.tracker.result(), "mae": self.error.result()}


def test_batches_behind_each_other_stay_in_parts(strategy):
    """No rows are sent for them, also not in the first step."""
    with unidist.ledger() as sent:
        as_alone(own(Judged), strategy, 14, compiled=dict)
    assert not any(event.purpose.startswith("rows of") for event in sent.events)


class Following(OwnTrackers):
    """Its third metric follows a number that all devices have."""

    def _told(self, y, y_pred, loss):
        self.tracker.update_state(loss)
        self.level.update_state(ops.norm(self.layers[0].kernel.value))
        return {m.name: m.result() for m in self.metrics}


class OwnNumbers(OwnTrackers):
    """Gives numbers of its own making as logs, looks at its loss, and counts it in a Sum."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.total, self.rows = keras.metrics.Sum(name="total"), keras.metrics.Sum(name="rows")

    def _told(self, y, y_pred, loss):
        number = loss.item()
        self.total.update_state(loss)
        self.rows.update_state(ops.ones((ops.shape(y)[0],)))
        return {
            "loss": loss,
            "detached": loss.detach(),
            "halved": loss.detach() / 2,
            "number": number,
            "square": number**2,
            "level": ops.mean(y_pred),
            "rate": ops.convert_to_tensor(self.optimizer.learning_rate),
            "total": self.total.result(),
            "rows": self.rows.result(),
        }

    @property
    def metrics(self):
        return [self.total, self.rows]


@pytest.mark.parametrize("kind", [OwnTrackers, OwnNumbers, Following])
def test_numbers_and_metrics_of_a_step_are_of_all_rows(kind, strategy):
    """In batches that do not divide: the loss as the step sees it, what is computed from it, means over the rows; and a
    metric that follows a number of all rows or of none."""
    found, wanted = as_alone(own(kind), strategy, compiled=dict)
    if kind is OwnTrackers:
        assert wanted.history["twice"] == pytest.approx([2 * v for v in wanted.history["loss"]])
    x, y = features()
    told = [one.model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True) for one in (found, wanted)]
    assert told[0] == pytest.approx(told[1], abs=1e-5)


class Training(OwnStep):
    """Trains a model beside itself, which a Sequential that is built does not take for a part."""

    def train_step(self, data):
        return {**super().train_step(data), "other": self.other.train_step(data)["loss"]}


def beside(strategy, is_known):
    x, y = features()
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model, other = (kind([layers.Input((12,)), layers.Dense(3)]) for kind in (Training, OwnStep))
        for one in (model, other):
            one.compile(keras.optimizers.SGD(0.05), "mse")
        if is_known:
            other.fit(x, y, batch_size=4, verbose=0)
        model.other = other
        return model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["other"] + other.get_weights()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_step_trains_models_that_are_known_and_no_others(zero):
    strategy = unidist.DataParallel(zero=zero)
    for a, b in zip(beside(strategy, True), beside(None, True), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    with pytest.raises(CapabilityError, match=r"/kernel', which no model has that trains or has trained"):
        beside(strategy, False)


class Adversaries(keras.Model):
    """Two models, two optimizers, two backward passes in a step."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([layers.Input((12,)), layers.Dense(8, name="maker")])
        self.judge = keras.Sequential(
            [layers.Input((8,)), layers.Dense(16, "relu", name="a"), layers.Dense(1, name="b")]
        )
        self.criterion = keras.losses.BinaryCrossentropy(from_logits=True)
        self.tracker = keras.metrics.Mean(name="loss")
        self.built = True

    def compile(self, rates):
        super().compile()
        self.optimizers = [keras.optimizers.Adam(rate, epsilon=1e-3) for rate in rates]

    def call(self, x):
        return self.judge(self.maker(x))

    def train_step(self, data):
        x, real = data
        for model, optimizer, wanted in ((self.judge, self.optimizers[0], 0.0), (self.maker, self.optimizers[1], 1.0)):
            self.zero_grad()
            made = self(x, training=True)
            loss = self.criterion(ops.full_like(made, wanted), made)
            if model is self.judge:
                logits = self.judge(real, training=True)
                loss = loss + self.criterion(ops.ones_like(logits), logits)
            loss.backward()
            weights = model.trainable_weights
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in weights], weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


def test_two_models_with_two_optimizers_in_one_step(strategy):
    x, _ = features()
    real = features(out=8)[1]
    found, wanted = (adversaries(x, real, given) for given in (strategy, None))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def adversaries(x, real, strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = Adversaries()
        model.compile([0.01, 0.02])
        history = model.fit(x, real, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [*history.history["loss"], *(np.asarray(v) for v in model.weights)]


class ByHand(OwnStep):
    """Gradients that no backward pass has made are of whole variables."""

    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        trainable = list(self.trainable_weights)
        with torch.no_grad():
            given = [torch.linspace(-1, 1, v.value.numel()).view(v.value.shape) for v in trainable]
            self.optimizer.apply(given, trainable)
        return {"loss": loss}


BY_HAND = {**STRATEGIES, "2x2, zero 1": lambda: model_parallel(mesh=two_by_two(), zero=1)}


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_made_by_hand_are_cut_as_their_variables(name):
    x, y = features()
    found, wanted = (train(own(ByHand), x, y, given) for given in (BY_HAND[name](), None))
    for a, b in zip(found.weights, wanted.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


class TwiceBackward(OwnStep):
    """Gradients of two backward passes add up before the optimizer takes them."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        for scale in (1.0, 0.5):
            loss = scale * self.compute_loss(y=y, y_pred=self(x, training=True))
            loss.backward()
        trainable = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trainable], trainable)
        return {"loss": loss}


def test_gradients_of_two_backward_passes_add_up(strategy):
    x, y = features()
    found, wanted = (train(own(TwiceBackward), x, y, given) for given in (strategy, None))
    for a, b in zip(found.weights, wanted.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


class TwoLosses(OwnStep):
    """The second one by hand, where the first has moved the weights; at once, or from the third step on."""

    at_once = True

    def train_step(self, data):
        x, y = data
        of_keras, by_hand = keras.losses.MeanSquaredError(), lambda y, p: ((y - p) ** 2).mean()
        is_by_hand = self.at_once or int(self.optimizer.iterations.value) > 3
        for make in (of_keras, by_hand if is_by_hand else of_keras):
            self.zero_grad()
            loss = make(y, self(x, training=True))
            loss.backward()
            weights = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss.detach()}


class LaterTwoLosses(TwoLosses):
    at_once = False


class Losing(OwnStep):
    """A step down a loss of its own."""

    def train_step(self, data):
        self.zero_grad()
        weights = list(self.trainable_weights)
        loss = self._lost(*data, weights)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss.detach()}


class OfWeights(Losing):
    """Its loss has no row in it, but for every other step."""

    def _lost(self, x, y, weights):
        loss = sum(ops.sum(ops.square(v)) for v in weights)
        if int(self.optimizer.iterations.value) % 2:
            loss = loss + ((y - self(x, training=True)) ** 2).mean()
        return loss


class Once(keras.metrics.Metric):
    """Its state is a number that all devices know, and the largest that one has seen."""

    def __init__(self, **options):
        super().__init__(**options)
        self.known = self.add_weight(initializer="zeros", name="known")
        self.largest = self.add_weight(initializer="zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.known.assign(3.0)
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_pred - y_true))))

    def result(self):
        return self.known + 10 * self.largest


class Median(keras.metrics.Metric):
    """Keeps all that it was given, as numbers of NumPy's."""

    def __init__(self, **options):
        super().__init__(**options)
        self.pairs = []
        self.fn = self.add_weight(initializer="zeros", name="false_negatives")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.pairs.append((ops.convert_to_numpy(y_true), ops.convert_to_numpy(y_pred)))

    def result(self):
        if not self.pairs:
            return 0.0
        given, made = (np.concatenate(rows).ravel() for rows in zip(*self.pairs, strict=True))
        return float(np.median(np.abs(given - made)))

    def reset_state(self):
        self.pairs = []


class Ramped(keras.losses.Loss):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, y_true, y_pred):
        self.calls += 1
        return self.calls * ops.square(y_true - y_pred)


class Rising(keras.optimizers.SGD):
    """Counts its steps, and goes further with each."""

    steps = 0

    def apply(self, grads, trainable_variables=None):
        self.steps += 1
        return super().apply([self.steps * g for g in grads], trainable_variables)


class Thawing(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].trainable = epoch > 0


PARTS = {
    "a metric without a sum": {"compiled": lambda: {"loss": "mse", "metrics": [Once(name="once")]}},
    "what is no variable": {"compiled": lambda: {"loss": Ramped(), "metrics": [Median(name="median")]}},
    "a count of steps": {"optimizer": lambda: lambda: Rising(0.01), "compiled": lambda: {"loss": "mse"}},
    "a layer that is thawed": {"epochs": lambda: 3, "callbacks_too": lambda: [Thawing()]},
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_ones_own_train_as_on_one_device(name, strategy):
    """Metrics, losses and optimizers that keep something, and a callback that thaws a layer amid a training."""
    as_alone(own(OwnStep if "without" in name else keras.Sequential), strategy, **PARTS[name])


class ThawedInStep(OwnStep):
    def train_step(self, data):
        self.layers[0].trainable = True
        return super().train_step(data)


def test_a_layer_that_becomes_trainable_amid_a_step_is_refused(strategy):
    x, y = features()

    def build():
        model = own(ThawedInStep)()
        model.layers[0].trainable = False
        return model

    with pytest.raises(CapabilityError, match=r"/a/kernel' was not trainable when this training began"):
        train(build, x, y, strategy)


class Penalized(Losing):
    """A penalty on the gradients of its weights."""

    def _lost(self, x, y, weights):
        loss = ((y - self(x, training=True)) ** 2).mean()
        slopes = torch.autograd.grad(loss, [v.value for v in weights], create_graph=True)
        return loss + 0.1 * sum((slope**2).sum() for slope in slopes)


class Mixed(OwnStep):
    """Gives the loss's tracker one number without a weight and another with that of the batch."""

    def train_step(self, data):
        logs = super().train_step(data)
        tracker = self.metrics[0]
        tracker.reset_state()
        tracker.update_state(3.0 * logs["loss"])
        tracker.update_state(logs["loss"], sample_weight=2.5)
        return {"loss": logs["loss"], "mixed": tracker.result()}


# The last one's number without a weight counts once.
KINDS = [OwnStep, OwnLoss, TwoLosses, LaterTwoLosses, OfWeights, Penalized, Mixed]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_and_its_losses_are_one_devices(kind, strategy):
    as_alone(own(kind), strategy, 8 if kind is Mixed else 10)


class Changed(OwnStep):
    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.change(self.criterion(y, self(x, training=True)), self)
        loss.backward()
        trainable = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trainable], trainable)
        return {"loss": loss}


def changed(change):
    class Kind(Changed):
        criterion = staticmethod(keras.losses.MeanSquaredError())

    Kind.change = staticmethod(change)
    return own(Kind)


CHANGES = {
    "scaled": lambda loss, model: 0.5 * loss - loss / 4,
    "stacked": lambda loss, model: ops.mean(ops.stack([2 * loss, -loss, loss])[:2]),
    "with what is added": lambda loss, model: loss + sum(model.losses),
    "a penalty": lambda loss, model: loss + 0.01 * ops.sum(ops.square(model.layers[0].kernel.value)),
    "a square": lambda loss, model: 0.01 * loss * loss,
    "a root": lambda loss, model: ops.sqrt(loss),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_computed_from_a_loss_is_exact(name, strategy):
    as_alone(changed(CHANGES[name]), strategy)


def test_a_barrier_finds_the_mesh_of_the_strategy_in_use():
    with model_parallel(mesh=two_by_two()).scope():
        unidist.barrier("data")
        with pytest.raises(MeshError, match="unknown axis 'pipe'"):
            unidist.barrier("pipe")
    with pytest.raises(LayoutError, match="call it in the scope of a strategy"):
        unidist.barrier("data")


class TorchStep(keras.Sequential):
    """A step whose gradients go where a case says."""

    finish: Any = None

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.finish(loss)
        return {"loss": loss.detach()}


def finishing(finish):
    return type("Finishing", (TorchStep,), {"finish": finish})


def by_torch(make):
    def finish(self, loss):
        loss.backward()
        if not hasattr(self, "_made"):
            self._made = make(self)
        self._made.step()

    return finish


REFUSED = {
    "a hook": (
        lambda self, loss: self.trainable_weights[0].value.register_hook(print),
        r"register_hook was called on Value\('.*/kernel', shape=\(12, 16\)\), which is cut among the ranks",
    ),
    "another shape": (
        lambda self, loss: setattr(self.trainable_weights[0].value, "grad", loss.detach()),
        r"has shape \(12, 16\); found a value or a gradient for it of shape \(\)",
    ),
    "torch's optimizer": (
        by_torch(lambda model: torch.optim.SGD(list(model.parameters()), 0.1)),
        r"torch.optim.SGD was given Value\(.*its states would be whole. Use an optimizer of keras.optimizers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_on_a_part_is_refused(name):
    finish, text = REFUSED[name]
    x, y = features()
    with pytest.raises((unidist.CapabilityError, ValueError), match=text):
        train(own(finishing(finish)), x, y, unidist.DataParallel(zero=2))


def test_torchs_optimizers_of_parameters_from_before_are_refused():
    x, y = features()
    model = own(keras.Sequential)()
    optimizer = torch.optim.SGD(list(model.parameters()), 0.1)
    unidist.parallelize(model, STRATEGIES["zero 1"]())
    model.compile("sgd", loss="mse")
    model.fit(x, y, verbose=0)
    with pytest.raises(unidist.CapabilityError, match=r"before the model was distributed"):
        optimizer.step()


def test_torchs_optimizers_of_the_programs_parameters_are_refused_on_ranks():
    x, y = features()
    with unidist.DataParallel().scope():
        model = own(finishing(lambda self, loss: self.by_torch.step()))()
        model.compile("sgd", loss="mse")
        model.by_torch = torch.optim.SGD(list(model.parameters()), 0.1)
        with pytest.raises(unidist.CapabilityError, match=r"the simulator, where it would do so once for each rank"):
            model.fit(x, y, verbose=0)


class Counted(keras.layers.Layer):
    """Keeps what it has counted in attributes, in one that is private and in one that is written in place too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._calls, self.kept, self.mean = 0, {"calls": []}, torch.zeros(())

    def call(self, x):
        self._calls += 1
        self.kept["calls"].append(self._calls)
        self.mean.mul_(0.5).add_(1.0)
        return x * (1.0 + (self._calls + len(self.kept["calls"])) % 3 + self.mean)


class Counting(OwnStep):
    def train_step(self, data):
        self.steps = getattr(self, "steps", 0) + 1
        return super().train_step(data)


class Restarting(keras.callbacks.Callback):
    """The program's writes are all ranks'."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.steps = 10 * epoch
        self.model.layers[0].kept["calls"].clear()


@pytest.mark.parametrize("kind", ["dp", "zero 1", "zero 3"])
def test_each_rank_has_the_attributes_that_it_assigns(kind):
    """As each process has, so that what a model and a layer count by themselves is one device's."""

    def build():
        return Counting([keras.Input((12,)), Counted(), keras.layers.Dense(3)])

    x, y = features()
    given = {"callbacks_too": [Restarting()], "optimizer": lambda: keras.optimizers.SGD(1e-4)}
    found, wanted = (train(build, x, y, strategy, **given) for strategy in (STRATEGIES[kind](), None))
    assert_equal(found, wanted)
    for one, other in zip(found.model.layers, wanted.model.layers, strict=True):
        assert getattr(one, "kept", None) == getattr(other, "kept", None)
    assert found.model.steps == wanted.model.steps == 13


@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM])
def test_each_rank_has_the_masks_that_a_cell_keeps(kind, monkeypatch):
    """A cell keeps the masks of its call's rows, of which ranks have other numbers. These drop nothing."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)  # ranks wait for each other between one layer's weights

    def build():
        cell = kind(6, dropout=1e-9, recurrent_dropout=1e-9, name="r")
        return keras.Sequential([layers.Input((5, 4)), layers.Dense(6, name="a"), cell, layers.Dense(3, name="c")])

    x, y = features(rows=13, width=20)
    x = x.reshape(13, 5, 4)
    found, wanted = (train(build, x, y, given, batch_size=9, shuffle=False) for given in (STRATEGIES["zero 3"](), None))
    assert_equal(found, wanted)


class Adding(keras.layers.Layer):
    def call(self, x):
        self.add_loss(1e-3 * ops.mean(x**2))
        self.add_loss(1e-3 * ops.max(x))
        return x


@pytest.mark.parametrize("kind", ["dp", "zero 3"])
def test_losses_behind_a_step_are_one_devices(kind):
    """One of the four devices has one row, the others two."""

    def build():
        dense = keras.layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l2")
        return keras.Sequential([keras.Input((12,)), Adding(), dense])

    x, y = features(rows=14)
    found, wanted = (train(build, x, y, strategy, batch_size=7).model for strategy in (STRATEGIES[kind](), None))
    for _ in range(2):
        losses = [[float(loss.detach()) for loss in model.losses] for model in (found, wanted)]
        assert len(losses[0]) == 4
        np.testing.assert_allclose(*losses, atol=1e-5)
        for model in (found, wanted):
            model(x[:3])


class Centred(keras.Sequential):
    """Predicts what is left of each row without the mean of all."""

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        p = self(x, training=False)
        return {"left": p - ops.mean(p, axis=0, keepdims=True), "right": p}


class Doubled(keras.Sequential):
    def predict_step(self, data):
        return 2 * super().predict_step(data)


@pytest.mark.parametrize("kind", [Centred, Doubled])
def test_a_predict_step_of_ones_own_sees_all_rows(kind, strategy):
    x, y = features()
    wanted, found = (train(own(kind), x, y, given).model for given in (None, strategy))
    for _ in range(2):
        a, b = (keras.tree.flatten(model.predict(x, batch_size=7, verbose=0)) for model in (found, wanted))
        for one, other in zip(a, b, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("rows", [10, 8])
def test_a_loss_of_pairs_of_rows_is_told_whole_in_every_step(strategy, rows):
    def made():
        return OwnOfPairs([layers.Input((12,)), layers.Dense(16, "tanh", name="a"), layers.Dense(3, name="b")])

    x, y = features(rows=rows)
    assert_equal(train(made, x, y, strategy, epochs=3), train(made, x, y, epochs=3))


def test_a_hook_inside_of_a_model_sees_all_rows():
    """A model of known layers alone is native at its own call, as long as nobody looks inside."""
    seen = []

    def spread(layer, args, out):
        seen.append(float(ops.convert_to_numpy(ops.max(out) - ops.min(out))))

    def trained(strategy):
        seen.clear()
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(5, name="a"), layers.Dense(2)])
        model.set_weights([np.sin(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.cos(np.arange(72.0)).reshape(12, 6)
        model.fit(x, x[:, :2], batch_size=6, shuffle=False, verbose=0)
        hook = model.get_layer("a").register_forward_hook(spread)
        model.fit(x, x[:, :2], batch_size=6, shuffle=False, verbose=0)
        hook.remove()
        return list(seen)

    wanted = trained(None)
    found = trained(unidist.DataParallel())
    assert len(wanted) == 2
    np.testing.assert_allclose(found, np.repeat(wanted, len(found) // 2), rtol=1e-5)
