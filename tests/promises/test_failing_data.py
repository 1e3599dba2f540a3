"""Each process is given its own rows: where those of one raise an error, end before the others' or do not fit, all
hear of it. (On torch: tests/keras/torch/test_data.py.)"""

from __future__ import annotations

import re

import pytest

from tests.parity.worlds import Worlds

pytestmark = pytest.mark.processes
OWN = "the disk of process 1 is gone"
PROGRAMS = {
    "horovod-2": "tests.keras.torch.cases:apart",
    "jax-2x2": "tests.keras.jax.behaviours:own_parts_apart",
    "tensorflow-2x2": "tests.parity.interplay:own_data_apart",
}
# (setting, what the second's do, what the first hears, and the second where that is something else)
CASES = [
    ("horovod-2", "shorter", r"data of data shards \[1\] of 2 ended, while others have more", None),
    ("horovod-2", "shorter arrays", r"an epoch has 4, 2 batches .*steps_per_epoch", None),
    ("horovod-2", "raises", r"data of data shards \[1\] of 2 raised an error", OWN),
    ("jax-2x2", "raises", r"data of processes \[1\] of 2 raised an error", OWN),
    # Keras itself refuses a generator that yields nothing.
    ("jax-2x2", "nothing", r"data of processes \[1\] of 2 raised an error", "ValueError"),
    ("tensorflow-2x2", "raises", r"data of processes \[1\] of 2 raised an error", OWN),
    ("tensorflow-2x2", "nothing", r"data of processes \[1\] of 2 holds no batch", None),
    (
        *("tensorflow-2x2", "differs"),
        *(r"processes \[0, 1\] hold the same part .* \[4, 3\] rows: give them the same data", None),
    ),
]


@pytest.mark.parametrize(("setting", "how", "text", "own"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_all_hear_of_it(setting: str, how: str, text: str, own: str | None, worlds: Worlds) -> None:
    first, second = worlds.get(setting).call(PROGRAMS[setting], how)
    assert first[0] == "DesyncError"
    assert re.search(text, first[1])
    assert second == first if own is None else own in ": ".join(second)


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end"])
def test_what_one_process_raised_over_horovod_is_said_by_the_others(hook: str, worlds: Worlds) -> None:
    """Before a step, or where they agree behind one: it catches the error and goes on to something else, while process
    0 trains on. (With Keras on TensorFlow Horovod finds no names of collectives: there the one that waits gets a
    ProcessLostError.)"""
    first, second = worlds.get("horovod-2").call("tests.parity.mistakes:raises_in_a_callback", hook)
    for kind, message in (first, second):
        assert kind == "DesyncError"
        assert "rank 1 came to barrier after 'OSError: no space left for this callback' was raised" in message
    assert first[1].startswith("all_")
    assert second[1].startswith("barrier")
