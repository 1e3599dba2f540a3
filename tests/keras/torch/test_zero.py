"""ZeRO in the simulator: what is held, what is sent, and optimizers that look at more than their part."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
from fractions import Fraction

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist
from tests.keras.torch.models import PAIR, assert_equal, features, mlp, train, two_by_two
from tests.promises.test_loops import few
from tests.support.comparing import same
from tests.support.sampling import unless_all
from unidist.backends.torch.sharded import owners
from unidist.keras.records import model_record
from unidist.keras.torch import context
from unidist.keras.torch.params import flat_buffer, param_groups, saved
from unidist.keras.torch.step import fused, optimizers, reducer

STAGES = (1, 2, 3)


def grid(zero):
    mesh = two_by_two()
    return unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, PAIR), zero=zero)


STRATEGIES = {
    **{f"dp-{zero}": lambda zero=zero: unidist.DataParallel(zero=zero) for zero in (1, 3)},
    **{f"2x2-{zero}": lambda zero=zero: grid(zero) for zero in (1, 3)},
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def even(depth=6, width=16):
    """All of its variables divide by four."""
    inner = [layers.Dense(width, activation="tanh", name=f"d{k}") for k in range(depth)]
    return keras.Sequential([layers.Input((12,)), *inner, layers.Dense(4, name="out")])


def trainable_bytes(model):
    return sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)


def sent(book, op):
    return Fraction(book.bytes(op, purpose="gradient" if op == "reduce_scatter" else "parameters"))


# what is sent ---------------------------------------------------------------------------------------------------------


class Block(layers.Layer):
    """Made from its last layer to its first, and called from the first on."""

    def __init__(self):
        super().__init__()
        self.made = [layers.Dense(16, activation="tanh", name=f"d{k}") for k in reversed(range(5))]
        self.called = self.made[::-1]

    def build(self, shape):
        for layer in self.called:
            layer.build(shape)

    def call(self, x):
        for layer in self.called:
            x = layer(x)
        return x


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("made_backwards", [True, False])
def test_units_are_in_the_order_in_which_a_step_reads(made_backwards, policy, monkeypatch):
    """Behind the first step. Keras goes through the layers inside of one from the last to the first."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 2 * 4 * (16 * 16 + 16))
    keras.config.set_dtype_policy(policy)

    def build():
        block = Block()
        if not made_backwards:
            block._layers.reverse()
        return keras.Sequential([layers.Input((16,)), block, layers.Dense(4, name="out")])

    def names():
        traffic = model_record.of(model).engine.traffic
        unit = traffic._fetchers[0].fetched
        return [[storage.path.split("/")[-2] for storage in one.storages[::2]] for one in unit]

    try:
        strategy = unidist.DataParallel(zero=3)
        x, y = features(rows=8, width=16, out=4)
        with strategy.scope():
            model = build()
            model.compile(adam(), "mse")
            model.train_on_batch(x, y)
            wanted = [["d0", "d1"], ["d2", "d3"], ["d4", "out"]]
            if policy != "float32":
                # Half as many bytes; one for the values in each dtype.
                wanted = [one for one in (["d0", "d1", "d2", "d3"], ["d4", "out"]) for _ in range(2)]
            assert names() == wanted
            sends = []
            for _ in range(2):
                with unidist.ledger() as book:
                    model.train_on_batch(x, y)
                sends.append((book.count("all_gather", purpose="parameters"), sent(book, "all_gather")))
        assert sends[0] == sends[1]
        model.compile(adam(), "mse")
        with strategy.scope():
            model.train_on_batch(x, y)
        assert names()[0][:2] == ["d0", "d1"]
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("bucket_mb", [None, "0.001"])
def test_states_in_parts_send_what_an_all_reduce_would(zero, bucket_mb, monkeypatch):
    if bucket_mb is not None:
        monkeypatch.setenv("UNIDIST_BUCKET_MB", bucket_mb)
    x, y = features(rows=8, out=4)
    with unidist.ledger() as book:
        model = train(even, x, y, unidist.DataParallel(zero=zero), optimizer=adam, batch_size=8, epochs=3).model
    once = Fraction(3, 4) * trainable_bytes(model)
    assert sent(book, "reduce_scatter") == 3 * once
    assert sent(book, "all_gather") == 3 * once
    assert book.count("all_gather", purpose="parameters") == 3
    assert book.count("reduce_scatter", purpose="gradient") == 3 * (1 if bucket_mb is None else 6)
    assert book.count("all_reduce", purpose="gradient") == 0


def test_values_in_parts_are_fetched_for_forward_and_again_for_backward(monkeypatch):
    """Three times (n-1)/n of the bytes, but for what is still there when backward wants it (the last two layers) and
    what backward never reads (the first layer's, whose input needs no gradient)."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)
    x, y = features(rows=8, out=4)
    with unidist.ledger() as book:
        model = train(even, x, y, unidist.DataParallel(zero=3), optimizer=adam, batch_size=8, epochs=1).model
    keras.utils.set_random_seed(0)
    with unidist.ledger() as book:
        model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    sizes = [sum(4 * int(np.prod(v.shape)) for v in layer.trainable_variables) for layer in model.layers]
    assert sum(sizes) == trainable_bytes(model)
    again = sum(sizes[1:-2])
    assert sent(book, "all_gather") == Fraction(3, 4) * (sum(sizes) + again)
    assert book.count("all_gather", purpose="parameters") == len(sizes) + len(sizes) - 3
    assert sent(book, "reduce_scatter") == Fraction(3, 4) * sum(sizes)


def test_values_in_parts_of_one_unit_are_fetched_once():
    """Twice (n-1)/n of the bytes where what was fetched for forward is still there in backward."""
    x, y = features(rows=8, out=4)
    with unidist.ledger() as book:
        model = train(even, x, y, unidist.DataParallel(zero=3), optimizer=adam, batch_size=8, epochs=3).model
    assert sent(book, "all_gather") == sent(book, "reduce_scatter") == 3 * Fraction(3, 4) * trainable_bytes(model)


class Around(layers.Layer):
    """Reads its own weight, or another layer's, before the layers that it calls, and uses it behind them."""

    def __init__(self, reads_another=False, **options):
        super().__init__(**options)
        inner = (layers.Dense(16, "tanh", name=name) for name in ("first", "second", "third"))
        self.first, self.second, self.third = inner
        self.reads_another = reads_another

    def build(self, shape):
        self.own = self.add_weight((16, 16), name="own")
        for layer in (self.first, self.second, self.third):
            layer.build(shape)

    def call(self, x):
        read = [keras.ops.convert_to_tensor(self.own)]
        if self.reads_another:
            read.append(keras.ops.convert_to_tensor(self.first.kernel))
        hidden = self.second(self.third(self.first(x)))
        return sum(keras.ops.matmul(hidden, kernel) for kernel in read)


@pytest.mark.parametrize("reads_another", [False, True])
def test_values_that_are_in_use_stay(reads_another, monkeypatch):
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)

    def build():
        around = Around(reads_another, name="around")
        return keras.Sequential([layers.Input((12,)), layers.Dense(16), around, layers.Dense(4), layers.Dense(3)])

    x, y = features()
    assert_equal(train(build, x, y, unidist.DataParallel(zero=3)), train(build, x, y))


class Given(layers.Layer):
    """Gives views of its weights, and one as it is."""

    def build(self, shape):
        self.table = self.add_weight((shape[-1],), name="table")
        self.masked = self.add_weight((1, shape[-1]), name="masked")

    def call(self, x):
        table = ops.broadcast_to(self.table, ops.shape(x))
        return {"table": table, "row": ops.reshape(self.masked, (-1,)), "whole": ops.convert_to_tensor(self.masked)}


class There(layers.Layer):
    """What it takes has its memory: to read it would end the process, if not."""

    def call(self, x):
        plain = [t for t in x.values() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta]
        assert all(t.untyped_storage().size() for t in plain)
        return x


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_what_a_layer_gives_of_its_weights_stays(policy, monkeypatch):
    """As positions of KerasHub's models, which are a view of their table."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)

    def build():
        keras.config.set_dtype_policy(policy)
        inputs = keras.Input((12,))
        x = layers.Dense(16, "tanh")(inputs)
        given = Given()(x)
        x = layers.Dense(16, "tanh")(layers.Dense(16, "tanh")(x))
        given = There()(given)
        x = (x + given["table"]) * given["row"] + given["whole"]
        return keras.Model(inputs, layers.Dense(3, dtype="float32")(x))

    x, y = features()
    try:
        found, wanted = (train(build, x, y, unidist.DataParallel(zero=zero)) for zero in (3, 0))
    finally:
        keras.config.set_dtype_policy("float32")
    assert_equal(found, wanted)


def test_values_in_low_precision_are_made_anew_for_backward(monkeypatch):
    """Backward opens what forward saved of a kernel that was cast, and its memory is free by then. A regularizer wants
    it as it is stored, so that it is gathered so, and cast."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)

    def build():
        options = {"dtype": "mixed_bfloat16", "kernel_regularizer": "l2"}
        stack = [layers.Dense(16, "tanh", **options) for _ in range(5)]
        return keras.Sequential([layers.Input((12,)), *stack, layers.Dense(3)])

    x, y = features()
    found, wanted = (train(build, x, y, unidist.DataParallel(zero=zero)) for zero in (3, 0))
    assert_equal(found, wanted)


def test_casts_of_layers_with_a_rule_are_let_go_too(monkeypatch):
    """Backward keeps nothing of a kernel's size that has its memory."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)
    alias, sizes = saved.alias, []

    def noting(tensor):
        sizes.append((tuple(tensor.shape), tensor.dtype, tensor))
        return alias(tensor)

    monkeypatch.setattr(saved, "alias", noting)

    def build():
        rest = [layers.Dense(n, name=name, dtype="mixed_bfloat16") for name, n in (("a", 64), ("b", 24))]
        return keras.Sequential([layers.Input((12,)), layers.Dense(24), *rest, layers.Dense(3)])

    x, y = features()
    found, wanted = (train(build, x, y, strategy) for strategy in (grid(3), grid(0)))
    assert_equal(found, wanted)
    # Of 24 x 64 and 64 x 24 a rank of the model axis has half.
    kept = [tensor for shape, dtype, tensor in sizes if shape in ((24, 32), (32, 24)) and dtype == torch.bfloat16]
    assert kept
    assert all(tensor.untyped_storage().size() == 0 for tensor in kept)


def loosely(strategy, **options):
    """A training in which every tensor that can moves by itself, and what it sent."""
    x, y = features()
    with unidist.ledger() as book:
        return train(uneven, x, y, strategy, optimizer=adam, **options), book


def uneven():
    """Kernels cut along dim 0, along dim 1 and unevenly; biases that divide and that do not."""
    inner = [layers.Dense(n, activation="tanh", name=name) for name, n in (("a", 16), ("b", 6), ("c", 12), ("d", 5))]
    return keras.Sequential([layers.Input((12,)), *inner, layers.Dense(3, name="out")])


def test_large_tensors_move_by_themselves(strategy, monkeypatch):
    """The same bytes, but for padding, in more collectives, and the same numbers bit by bit."""
    packed, before = loosely(strategy)
    monkeypatch.setattr(flat_buffer, "LOOSE_BYTES", 1)
    found, book = loosely(strategy)
    x, y = features()
    assert_equal(found, train(uneven, x, y, optimizer=adam))
    for a, b in zip(found.weights, packed.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    for op in ("reduce_scatter", "all_gather"):
        assert book.count(op) > before.count(op)
        assert book.bytes(op) == before.bytes(op)


def test_values_updated_in_parts_come_by_units_of_their_own_size(monkeypatch):
    monkeypatch.setattr(param_groups, "KEPT_UNIT_BYTES", 1)
    x, y = features(rows=8, out=4)
    with unidist.ledger() as book:
        model = train(even, x, y, unidist.DataParallel(zero=1), optimizer=adam, batch_size=8, epochs=3).model
    assert book.count("all_gather", purpose="parameters") == 3 * len(model.layers)
    assert sent(book, "all_gather") == 3 * Fraction(3, 4) * trainable_bytes(model)


def test_what_is_under_way_is_not_written_to(monkeypatch):
    """Values are sent from where the optimizer writes: it waits for those that no layer has read since."""
    monkeypatch.setattr(flat_buffer, "LOOSE_BYTES", 1)
    x, y = features(rows=8, out=4)
    model = train(even, x, y, unidist.DataParallel(zero=1), optimizer=adam, batch_size=8, epochs=1).model
    first = model.trainable_variables[0]
    storage = first._storage
    sent = {}

    class Slow:
        buffer = None

        def __init__(self, rank):
            self.rank = rank

        def wait(self):
            sent[self.rank] = storage.states[self.rank].detach().clone()

    def on_rank(frame):
        storage.units[frame.rank]._coming = Slow(frame.rank)
        with torch.no_grad():
            model.optimizer.apply([torch.ones_like(storage.own(frame))], [first])

    before = {rank: part.detach().clone() for rank, part in storage.states.items()}
    storage.world.run(on_rank)
    for rank, part in storage.states.items():
        assert torch.equal(sent[rank], before[rank])
        assert not torch.equal(part, before[rank])


# what is held ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("zero", STAGES)
def test_bytes_held_are_the_ideal(zero, devices):
    unidist.use("sim", devices=devices)
    x, y = features(rows=8, out=4)
    model = train(
        lambda: even(width=64), x, y, unidist.DataParallel(zero=zero), optimizer=adam, batch_size=8, epochs=1
    ).model
    whole = trainable_bytes(model)
    values = whole if zero < 3 else whole / devices
    gradients = whole if zero < 2 else whole / devices
    for rank in range(devices):
        held = {}
        for variable in model.trainable_variables:
            place = variable._storage
            for name in ("shards", "leaves", "states"):
                parameter = getattr(place, name)[rank]
                for tensor in (parameter, parameter.grad):
                    if tensor is not None:
                        storage = tensor.untyped_storage()
                        held[storage._cdata] = storage.size()
        for slot in model.optimizer.variables:
            storage = slot._storage.shards[rank].untyped_storage()
            held[storage._cdata] = storage.size()
        assert sum(held.values()) <= 1.05 * (values + gradients + 2 * whole / devices)
    told = unidist.describe(model)
    assert told.bytes_of("weights") == values
    assert told.bytes_of("gradients") <= gradients
    assert told.bytes_of("slots") <= 2 * whole / devices + 16
    assert f"{int(values):,}" in told.show()


def test_fetched_values_are_let_go(monkeypatch):
    """While a layer computes, at most it, the one before and the next are there; after the step none is."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)
    x, y = features(rows=8, out=4)
    seen = []
    original = layers.Dense.call

    def watched(self, *args, **kwargs):
        from unidist.keras.torch.context import frame

        if frame() is not None:
            fetcher = next(iter(self.kernel._storage.units.values())).fetcher
            seen.append(sum(unit.is_here or unit.is_coming for unit in fetcher.fetched))
        return original(self, *args, **kwargs)

    with unidist.DataParallel(zero=3).scope():
        model = even(depth=8)
        model.compile("sgd", loss="mse")
    monkeypatch.setattr(layers.Dense, "call", watched)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert 0 < max(seen) <= 3
    for variable in model.trainable_variables:
        assert all(leaf.untyped_storage().size() == 0 for leaf in variable._storage.leaves.values())


# optimizers -----------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "global clipnorm, ema": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3, global_clipnorm=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-3),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0, epsilon=1e-3),
    "adamax": lambda: keras.optimizers.Adamax(0.01, epsilon=1e-3),
    "nadam": lambda: keras.optimizers.Nadam(0.01, epsilon=1e-3),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01, epsilon=1e-3),
    "muon": lambda: keras.optimizers.Muon(0.01, epsilon=1e-3),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
}


@functools.cache
def alone(name):
    """An optimizer on one device, for all tests that compare with it."""
    return train(mlp, *features(), optimizer=OPTIMIZERS[name])


# Each at both stages, on one mesh each.
OPTIMIZED = unless_all(
    [(kind, name) for k, name in enumerate(OPTIMIZERS) for kind in (("dp-3", "2x2-1"), ("dp-1", "2x2-3"))[k % 2]],
    list(itertools.product(STRATEGIES, OPTIMIZERS)),
)


@pytest.mark.parametrize(("strategy", "name"), OPTIMIZED, indirect=["strategy"])
def test_optimizers(name, strategy):
    x, y = features()
    found = train(mlp, x, y, strategy, optimizer=OPTIMIZERS[name])
    assert_equal(found, alone(name))
    assert all(row.is_sharded for row in unidist.describe(found.model).rows if "a_kernel" in row.path)


@pytest.fixture
def owned(monkeypatch):
    """Rank -> the shapes of the matrices that it orthogonalizes."""
    found = collections.defaultdict(list)
    computed = owners.computed

    def noting(function, whole):
        found[context.frame().rank].append(tuple(whole.shape))
        return function(whole)

    def noted(given, functions, costs, loads):
        return computed(given, [functools.partial(noting, one) for one in functions], costs, loads)

    monkeypatch.setattr(owners, "computed", noted)
    return found


def matrices_of(model):
    return [tuple(v.shape) for v in model.trainable_variables if v.ndim == 2]


@pytest.mark.parametrize("zero", [1, 3])
def test_muon_orthogonalizes_each_matrix_on_one_rank(zero, owned):
    """Parts go there and back: 2 (n - 1) / n of a rank's part; to gather each matrix is n / 2 times that."""
    ranks, (x, y) = 4, features(8, out=4)
    with unidist.ledger() as book:
        found = train(even, x, y, unidist.DataParallel(zero=zero), optimizer=OPTIMIZERS["muon"])
    assert_equal(found, train(even, x, y, optimizer=OPTIMIZERS["muon"]))
    steps, matrices = len(found.losses), matrices_of(found.model)
    assert sorted(itertools.chain(*owned.values())) == sorted(steps * matrices)
    assert sorted(map(len, owned.values())) == [steps, 2 * steps, 2 * steps, 2 * steps]  # seven on four
    part = Fraction(4 * sum(map(math.prod, matrices)), ranks)
    own = 4 * sum(map(math.prod, owned[0])) // steps
    there_and_back = [event for event in book.events if event.purpose == "matrices"]
    assert [event.op for event in there_and_back] == ["all_to_all"] * 2 * steps
    assert [event.bytes for event in there_and_back] == [Fraction(3, 4) * x for x in (part, own)] * steps
    assert {event.purpose for event in book.events} <= {"gradient", "parameters", "metrics", "logs", "matrices"}


@pytest.mark.parametrize(
    "made",
    [
        lambda: grid(1),
        lambda: grid(3),
        lambda: unidist.ModelParallel(unidist.Mesh({"model": 4})),
        lambda: unidist.DataParallel(unidist.Mesh({"replica": 2, "shard": 2}), zero=3, shard_axis="shard"),
    ],
)
def test_muon_orthogonalizes_what_several_axes_cut(made, owned):
    """In parts of other sizes too. Replicas of shards each have owners; who has a whole orthogonalizes it."""
    x, y = features()
    found = train(mlp, x, y, made(), optimizer=OPTIMIZERS["muon"])
    assert_equal(found, train(mlp, x, y, optimizer=OPTIMIZERS["muon"]))
    axes = [v._storage.shardings.state.layout.sharded_axes for v in found.model.trainable_variables if v.ndim == 2]
    wanted = sum(4 // found.model.trainable_variables[0]._storage.world.mesh.axis_size(one) for one in axes if one)
    assert sum(map(len, owned.values())) == len(found.losses) * wanted
    assert max(map(len, owned.values())) < len(found.losses) * len(axes), "a rank owns all"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_update_a_few_variables_at_a_time(name, monkeypatch):
    monkeypatch.setattr(optimizers, "UPDATE_BYTES", 64)
    assert_equal(train(mlp, *features(), unidist.DataParallel(zero=1), optimizer=OPTIMIZERS[name]), alone(name))


ADAMS = {
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3),
    "scheduled": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5), epsilon=1e-3),
    "accumulated": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, gradient_accumulation_steps=2),
}


def taken_by(kernel, monkeypatch):
    """What a kernel of torch's updates: grows."""
    original, taken = getattr(torch, kernel), []

    def counted(values, *args, **options):
        taken.extend(values)
        original(values, *args, **options)

    monkeypatch.setattr(torch, kernel, counted)
    return taken


@pytest.mark.parametrize("name", ADAMS)
def test_adams_fused_update_is_kerass(name, monkeypatch):
    """To rounding; parts that are no one piece of memory are left to Keras."""
    x, y = features()
    taken = taken_by("_fused_adam_", monkeypatch)
    found = train(uneven, x, y, unidist.DataParallel(zero=1), optimizer=ADAMS[name])
    parts = [p for v in found.model.trainable_variables for p in v._storage.states.values() if p.numel()]
    updates = 6 // (found.model.optimizer.gradient_accumulation_steps or 1)
    assert 0 < len(taken) == updates * sum(part.is_contiguous() for part in parts) < updates * len(parts)
    monkeypatch.setattr(fused, "takes", lambda optimizer: False)
    wanted = train(uneven, x, y, unidist.DataParallel(zero=1), optimizer=ADAMS[name])
    assert_equal(found, wanted, 1e-6)


MOMENTUMS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "decayed": lambda: keras.optimizers.SGD(0.05, momentum=0.5, weight_decay=0.1),
    "scheduled": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), momentum=0.9),
}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", MOMENTUMS)
def test_momentums_fused_update_is_kerass(name, zero, monkeypatch):
    """To rounding, slots included: Keras's momentum holds steps, of whatever rate they were."""
    x, y = features()
    taken = taken_by("_fused_sgd_", monkeypatch)
    found = train(mlp, x, y, unidist.DataParallel(zero=zero), optimizer=MOMENTUMS[name])
    assert taken
    monkeypatch.setattr(fused, "takes", lambda optimizer: False)
    wanted = train(mlp, x, y, unidist.DataParallel(zero=zero), optimizer=MOMENTUMS[name])
    assert_equal(found, wanted, 1e-6)
    for a, b in zip(found.model.optimizer.variables, wanted.model.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}], ids=["plain", "nesterov"])
def test_other_steps_down_a_gradient_are_left_to_keras(options, monkeypatch):
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **options: pytest.fail("fused"))
    x, y = features()
    train(mlp, x, y, unidist.DataParallel(), optimizer=lambda: keras.optimizers.SGD(0.05, **options))


def test_adam_in_low_precision_is_left_to_keras(monkeypatch):
    monkeypatch.setattr(torch, "_fused_adam_", lambda *args, **options: pytest.fail("fused"))
    x, y = features()
    usual = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        train(mlp, x, y, unidist.DataParallel(zero=1), optimizer=adam)
    finally:
        keras.config.set_dtype_policy(usual)


class Normed(keras.optimizers.Optimizer):
    """A user's optimizer that looks at the whole gradient."""

    def build(self, variables):
        super().build(variables)
        self.steps = self.add_optimizer_variables(variables, "steps")

    def update_step(self, gradient, variable, learning_rate):
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.square(gradient)))
        steps = self.steps[self._get_variable_index(variable)]
        self.assign_add(steps, gradient / (norm + 1e-3))
        self.assign_sub(variable, learning_rate * steps)


def test_an_optimizer_of_the_users_own_gets_whole_variables(strategy):
    x, y = features()
    assert_equal(
        train(mlp, x, y, strategy, optimizer=lambda: Normed(0.01)), train(mlp, x, y, optimizer=lambda: Normed(0.01))
    )


CONSTRAINTS = {
    "max": lambda: keras.constraints.MaxNorm(0.5),
    "unit": lambda: keras.constraints.UnitNorm(axis=1),
    "non-negative": lambda: keras.constraints.NonNeg(),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_get_whole_values(name, strategy):
    def build():
        return keras.Sequential(
            [
                layers.Input((12,)),
                layers.Dense(16, name="a", activation="relu", kernel_constraint=CONSTRAINTS[name]()),
                layers.Dense(8, name="b", kernel_constraint=CONSTRAINTS[name]()),
                layers.Dense(3, name="c"),
            ]
        )

    x, y = features()
    assert_equal(train(build, x, y, strategy), train(build, x, y))


def test_regularizers_tied_and_frozen_weights(strategy):
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = layers.Dense(16, name="a", kernel_regularizer="l2")
            self.frozen = layers.Dense(16, name="frozen", trainable=False)
            self.b = layers.Dense(12, name="b", kernel_regularizer="l1")
            self.c = layers.Dense(3, name="c")

        def build(self, shape):
            self.a.build(shape)
            self.frozen.build((None, 16))
            self.b.build((None, 16))
            self.c.build((None, 12))
            self.built = True

        def call(self, x):
            up = keras.ops.tanh(self.frozen(self.a(x)))
            # The first kernel once more, outside of its layer's call.
            return self.c(self.b(up) + keras.ops.matmul(up, keras.ops.transpose(self.a.kernel)))

    def build():
        model = Tied()
        model.build((None, 12))
        return model

    x, y = features()
    found, wanted = train(build, x, y, strategy), train(build, x, y)
    assert_equal(found, wanted)


def test_a_step_that_overflows_on_one_rank_is_skipped_by_all():
    """The gradient of one row of one kernel is not finite: of the parts that ranks look at, one."""
    x, y = features(rows=8)
    x[5, 0] = 1e30

    def build():
        model = mlp()
        kernel = model.get_layer("a").kernel
        kernel.assign(np.asarray(kernel) * (np.arange(12) > 0)[:, None])
        return model

    def run(strategy, scale):
        return train(
            build,
            x,
            y,
            strategy,
            batch_size=8,
            epochs=3,
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=scale),
        )

    first = run(None, 2.0**100).weights
    x[5, 0] = 1.0
    moving = run(None, 2.0**10)
    for zero in (0, 1, 3):
        found = run(unidist.DataParallel(zero=zero), 2.0**10)
        for a, b in zip(found.weights, moving.weights, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    x[5, 0] = 1e30
    for zero in (0, 1, 3):
        found = run(unidist.DataParallel(zero=zero), 2.0**100)
        assert float(np.asarray(found.model.optimizer.dynamic_scale)) == 2.0**97
        for a, b in zip(found.weights, first, strict=True):
            np.testing.assert_array_equal(a, b)


def test_toggling_and_recompiling_between_fits(strategy):
    x, y = features()

    def run(given):
        keras.utils.set_random_seed(1)
        model = mlp()
        if given is not None:
            unidist.parallelize(model, given)
        for trainable in (True, False, True):
            model.get_layer("b").trainable = trainable
            model.compile(adam(), loss="mse")
            model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        return [np.asarray(v) for v in model.weights]

    for a, b in zip(run(strategy), run(None), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_rule_that_uses_the_data_axis_is_stored_in_parts():
    mesh = two_by_two()
    rules = unidist.LayoutMap(mesh, {".*a/kernel": ("data", "model"), ".*b/kernel": ("model", "data")})
    x, y = features()
    with unidist.ledger() as book:
        found = train(mlp, x, y, unidist.ModelParallel(mesh, rules), optimizer=adam)
    assert_equal(found, train(mlp, x, y, optimizer=adam))
    assert book.count("reduce_scatter", purpose="gradient") == 6
    assert {r.local_shape for r in unidist.describe(found.model).rows if r.path.endswith("a/kernel")} == {(6, 8)}


def test_a_rule_that_uses_one_of_two_data_axes_is_summed_over_the_other():
    mesh = unidist.Mesh({"rows": 2, "more": 2})
    rules = unidist.LayoutMap(mesh, {".*a/kernel": (None, "rows")})
    x, y = features()
    with unidist.ledger() as book:
        found = train(mlp, x, y, unidist.ModelParallel(mesh, rules, data_axis=("rows", "more")))
    assert_equal(found, train(mlp, x, y))
    gradients = {e.op: e.axes for e in book.events if e.purpose == "gradient" and e.axes != ("rows", "more")}
    assert gradients == {"reduce_scatter": ("rows",), "all_reduce": ("more",)}


@pytest.mark.parametrize("given", ["0", "-1", "many"])
def test_a_bucket_size_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv("UNIDIST_BUCKET_MB", given)
    with pytest.raises(ValueError, match=r"UNIDIST_BUCKET_MB=.*above 0"):
        reducer.bucket_bytes()


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class Showing(keras.Sequential):
    def train_step(self, data):
        return {**super().train_step(data), "shown": self.layers[0].kernel[0, 0], "bias": self.layers[1].bias[:1]}


def test_a_log_may_be_a_view_of_a_weight(strategy):
    def build():
        return Showing([layers.Input((12,)), layers.Dense(8, name="a"), layers.Dense(3, name="b"), layers.Dense(3)])

    x, y = features()
    found, wanted = (train(build, x, y, one, epochs=3) for one in (strategy, None))
    assert_equal(found, wanted)


class Scaled(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    def call(self, x):
        return ops.matmul(x, self.kernel) / float(np.abs(ops.convert_to_numpy(self.kernel)).max())


def test_numpy_may_read_a_weight_in_a_layer(strategy):
    def build():
        return keras.Sequential([layers.Input((12,)), layers.Dense(8, name="a"), Scaled(), layers.Dense(3, name="b")])

    x, y = features()
    compiled = {"loss": "mse", "run_eagerly": True}
    found, wanted = (train(build, x, y, one, compiled=compiled) for one in (strategy, None))
    assert_equal(found, wanted)


def test_models_that_share_layers_take_turns(strategy):
    """Two models gather the same variables, each in units of its own."""
    x, y = features()

    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            parts = [mlp() for _ in range(2)]
            given = layers.Input((12,))
            both = keras.Model(given, layers.Average()([part(given) for part in parts]))
            for model in (both, *parts):
                model.compile(keras.optimizers.SGD(0.05), "mse")
        seen = []
        for model in (both, parts[0], both, parts[1], both):
            seen += [model.fit(x, y, batch_size=4, verbose=0).history["loss"], model.predict(x, verbose=0)]
        return seen

    for a, b in zip(trained(strategy), trained(None), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_steps_that_torch_would_compile_run_eagerly_in_the_simulator():
    x, y = features()

    def build():
        return OwnStep(inputs := layers.Input((12,)), layers.Dense(3)(inputs))

    with pytest.warns(UserWarning, match=r"runs model 'own_step\w*' eagerly") as said:
        found = train(build, x, y, unidist.DataParallel(zero=3), compiled={"loss": "mse", "jit_compile": True})
    assert "/tests/" in said[0].filename, "a warning names the line of the program, not one of unidist's"
    assert_equal(found, train(build, x, y, compiled={"loss": "mse"}))


@pytest.mark.parametrize("kind", ["dp", "2x2"])
def test_a_rank_without_rows_fetches_what_the_others_do(kind, monkeypatch):
    """Backward of a regularizer reads a kernel again, which is a collective where it is stored in parts."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)
    found = few(kind, 3)
    same(found, few(None, 0))
    assert found["sharded"]


@pytest.mark.parametrize("asked", [unidist.DataParallel, unidist.ModelParallel])
def test_axes_without_a_stage_that_cuts_over_them_are_refused(asked):
    with pytest.raises(unidist.ArgumentError, match="shard_axis='data' with zero=0, which cuts nothing"):
        asked(unidist.Mesh({"data": 4}), shard_axis="data")
