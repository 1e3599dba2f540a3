"""Every source of data trains as on one device, and each process reads its own rows where it can."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import unidist
from tests import preloaded
from tests.keras.torch import cases
from tests.keras.torch.sources import SOURCES, check, check_graphs, check_graphs_that_are_cut
from tests.visible import WITH_TENSORFLOW
from unidist.keras.torch import saving
from unidist.keras.torch.cutting import cut
from unidist.testing.processes import ProcessWorld

OF_TENSORFLOW = [name for name in SOURCES if "tf.data" in name]
WITHOUT_TENSORFLOW = [name for name in SOURCES if name not in OF_TENSORFLOW]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", WITHOUT_TENSORFLOW)
def test_sources_in_the_simulator(name):
    check(name, unidist.DataParallel())


@pytest.mark.parametrize("zero", [0, 3])
def test_tensors_with_other_numbers_of_rows(zero):
    check_graphs(zero)


@pytest.mark.parametrize("zero", [0, 3])
def test_tensors_that_are_cut_each_by_its_own_rows(zero):
    check_graphs_that_are_cut(zero)


@pytest.mark.processes
def test_tensors_with_other_numbers_of_rows_in_two_processes(with_tensorflow):
    with_tensorflow.call(cases.graphs)


@pytest.mark.processes
def test_strings_of_a_task_in_two_processes(with_tensorflow):
    """They go through tf.data."""
    with_tensorflow.call("tests.keras.hub.tasks:check_text", ("bert",), 2)


@pytest.fixture(scope="module")
def with_tensorflow():
    with ProcessWorld(
        2,
        env={"KERAS_BACKEND": "torch", **WITH_TENSORFLOW},
        setup=cases.start,
        timeout=240,
        preload=preloaded.TORCH_AND_TENSORFLOW,
    ) as processes:
        yield processes


@pytest.mark.processes
@pytest.mark.parametrize("name", OF_TENSORFLOW)
def test_tf_data_in_two_processes(name, with_tensorflow):
    with_tensorflow.call(cases.source, name)


@pytest.mark.processes
def test_distribute_dataset_leaves_to_each_process_its_part(with_tensorflow):
    whole = [[0, 1, 2, 3], [4, 5, 6, 7]]
    for process, told in enumerate(with_tensorflow.call(cases.dataset_parts)):
        part = [batch[2 * process : 2 * process + 2] for batch in whole]
        assert told == {"ours": part, "Keras's": part, "all model": whole, "each its own": whole}


@pytest.mark.processes
def test_distribute_dataset_refuses_what_has_no_parts(with_tensorflow):
    wanted = [
        "ArgumentError: distribute_dataset gives each of 2 parts .* as many rows of a batch, and 3 rows do not divide",
        "ArgumentError: distribute_dataset takes batches of a known size, found elements of TensorSpec",
        "ArgumentError: distribute_dataset takes a tf.data.Dataset, found <class 'list'>",
        r"LayoutError: distribute_dataset gives process 0 part 0 of 2 .* hold places \[1\] of 2 .*give fit the whole",
    ]
    for told in with_tensorflow.call(cases.dataset_refused):
        for text, start in zip(told, wanted, strict=True):
            assert re.match(start, text)


def test_rows_that_the_simulators_ranks_share_are_copied_where_they_can_be_written_to():
    class Foreign:
        """As TensorFlow's tensors: nobody writes to them, and they have no copy."""

        shape = (4,)

        def __getitem__(self, rows):
            return f"rows {rows.start} to {rows.stop}"

    array = np.arange(4)
    own, foreign = cut([array, Foreign()], 1, 2, copy=True)
    own += 1
    assert (array == np.arange(4)).all()
    assert foreign == "rows 1 to 3"


@pytest.fixture(scope="module")
def world():
    with ProcessWorld(
        2, env={"KERAS_BACKEND": "torch"}, setup=cases.start, timeout=180, preload=preloaded.KERAS["torch"]
    ) as processes:
        yield processes


@pytest.mark.processes
@pytest.mark.parametrize("name", WITHOUT_TENSORFLOW)
def test_sources_in_two_processes(world, name):
    world.call(cases.source, name)


@pytest.mark.processes
def test_unseeded_processes_agree(world):
    first, second = world.call(cases.unseeded)
    for a, b in zip(first, second, strict=True):
        assert (a == b).all()


@pytest.mark.processes
def test_a_broadcast_from_another_process_is_told_to_all(world):
    for rank, (ranks, collective, text) in enumerate(world.call(cases.broadcast_from, 1)):
        assert (ranks, collective) == ((rank,), "broadcast")
        assert re.search(rf"rank {rank}: broadcast .* start all processes again", text)


@pytest.mark.processes
def test_each_process_reads_its_rows(world):
    assert world.call(cases.rows_read) == [5, 5]  # of 4, 4 and 2 rows: 2, 2 and 1 each


@pytest.mark.processes
def test_workers_read_the_rows_of_their_process_and_draw_apart(world):
    """They stay from epoch to epoch, as the loader says."""
    (first, ours, workers), (second, theirs, others_workers) = world.call(cases.rows_of_workers)
    assert (first, second) == ([0, 1, 4, 5, 8], [2, 3, 6, 7, 9])
    assert (workers, others_workers) == (2, 2)
    for drawn, others in zip(ours, theirs, strict=True):
        assert not set(drawn) & set(others) - {0.0}


@pytest.mark.processes
def test_own_parts_are_counted(world):
    world.call(cases.own_parts)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shorter", r"data of data shards \[1\] of 2 ended, while others have more.*steps_per_epoch"),
        ("shorter arrays", r"an epoch has 4, 2 batches .*steps_per_epoch"),
        ("raises", r"data of data shards \[1\] of 2 raised an error"),
    ],
)
def test_own_parts_that_end_apart_are_told_to_all(world, kind, text):
    first, second = world.call(cases.apart, kind)
    assert first[0] == "DesyncError"
    assert re.search(text, first[1])
    assert second == (("OSError", "the disk of process 1 is gone") if kind == "raises" else first)


@pytest.mark.processes
def test_a_model_is_created_in_shards():
    # Freed blocks go back to the system at once, so that resident memory is what is held.
    env = {"KERAS_BACKEND": "torch", "MALLOC_MMAP_THRESHOLD_": "65536"}
    with ProcessWorld(2, env=env, setup=cases.start, timeout=180) as processes:
        for growth, shards, largest in processes.call(cases.creation_peak):
            assert shards < 0.55 * 4 * largest
            # Two whole variables at a time; 8 MB for what torch loads meanwhile.
            assert growth <= shards + 2 * largest + 8e6, (growth, shards, largest)


@pytest.mark.processes
def test_callbacks_write_once(world, tmp_path):
    assert world.call(cases.checkpoints, str(tmp_path)) == [True, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.keras", "log.csv", "model.h5", "w.weights.h5"]
    assert [line.split(",")[0] for line in (tmp_path / "log.csv").read_text().splitlines()] == ["epoch", "0", "1"]


@pytest.mark.processes
def test_low_rank_kernels_are_saved_in_two_processes(world, tmp_path):
    world.call(cases.low_rank, str(tmp_path))


def test_low_rank_kernels_are_saved_in_the_simulator(tmp_path):
    cases.low_rank(str(tmp_path), ranks=4)


def test_what_processes_that_do_not_write_fail_at_fails_in_the_simulator(tmp_path, monkeypatch):
    monkeypatch.setattr(saving._Discard, "__setitem__", lambda self, key, value: np.asarray(value))
    with pytest.raises(RuntimeError, match="requires grad"):
        cases.low_rank(str(tmp_path), ranks=4)


@pytest.mark.processes
def test_a_loop_of_the_users_own(world):
    world.call(cases.own_loop)


@pytest.mark.processes
def test_rematerialization_in_a_backward_of_another_thread(world):
    world.call(cases.rematerialized)


@pytest.mark.processes
@pytest.mark.parametrize("zero", [0, 3])
def test_steps_of_the_users_own(world, zero):
    world.call(cases.own_steps, zero)
