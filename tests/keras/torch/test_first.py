"""What process 0 sends to all: a broadcast that changes it is a DesyncError in every process, not bytes to unpickle."""

from __future__ import annotations

import pickle
import random
import threading

import keras
import numpy as np
import pytest
import torch

import unidist
from unidist.keras import seeds
from unidist.keras.consistency.processes import Processes

COUNT = 3
DATA = bytes(range(200))


class Wrong:
    """A broadcast among threads.

    Args:
        change: what becomes of the arrays that all gave, (number of the call, arrays) -> what each is given.
    """

    def __init__(self, change):
        self._change = change
        self._barrier = threading.Barrier(COUNT, timeout=5)
        self._given = [None] * COUNT

    def on(self, index, call, own):
        self._given[index] = own
        self._barrier.wait()
        found = self._change(call, [np.array(x) for x in self._given])[index]
        self._barrier.wait()
        return found


def told(change, data=DATA):
    """What each process gets: the bytes, or the error."""
    broadcast = Wrong(change)
    found = [None] * COUNT

    def run(index):
        calls = iter(range(2))
        own = data if index == 0 else b"something else"
        try:
            processes = Processes(
                index,
                tuple((rank,) for rank in range(COUNT)),
                of_first=lambda x, purpose: broadcast.on(index, next(calls), x),
                of_all=lambda number, purpose: (number,) * COUNT,
            )
            found[index] = processes.bytes_of_first(own, "a test")
        except (unidist.DesyncError, threading.BrokenBarrierError) as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("data", [DATA, b""])
def test_every_process_has_the_bytes_of_the_first(data):
    assert told(lambda call, given: given[:1] * COUNT, data) == [data] * COUNT


CHANGES = {
    "another's": lambda call, given: given[-1:] * COUNT,
    "another's payload": lambda call, given: (given[:1] if call == 0 else given[-1:]) * COUNT,
    "one byte": lambda call, given: [x ^ 1 if call else x for x in given[:1] * COUNT],
    "cut": lambda call, given: [x[:-1] if call else x for x in given[:1] * COUNT],
    "sum of all": lambda call, given: [x * 2 for x in given[:1] * COUNT],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_on_its_way_is_told_to_every_process(change):
    for rank, error in enumerate(told(change)):
        assert isinstance(error, unidist.DesyncError), error
        assert (error.ranks, error.collective) == ((rank,), "broadcast")
        assert f"rank {rank}: broadcast" in str(error)
        assert "start all processes again" in str(error)


def test_a_process_that_alone_is_given_wrong_bytes_says_so():
    first, second, third = told(lambda call, given: [given[0], given[0] + 1 if call else given[0], given[0]])
    assert (first, third) == (DATA, DATA)
    assert isinstance(second, unidist.DesyncError)


class Planted:
    """Unpickling it runs code."""

    def __reduce__(self):
        return ran.append, ("code from the wire",)


ran = []


def test_random_state_is_data_and_never_code():
    keras.utils.set_random_seed(3)
    np.random.normal()  # NumPy and Python keep the second of two numbers drawn together
    random.gauss(0, 1)
    keras.random.uniform((2,))
    drawn = []
    state = seeds.state()
    for _ in range(2):
        more = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.uniform()]
        uniform = keras.ops.convert_to_numpy(keras.random.uniform((2,))).tolist()
        drawn.append([*more, *uniform, *torch.randperm(5).tolist()])
        seeds.restore(state)
    assert drawn[0] == drawn[1]
    with pytest.raises(ValueError, match="codec can't decode"):
        seeds.restore(pickle.dumps(Planted()))
    assert not ran
