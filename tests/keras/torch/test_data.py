"""Every source of data trains as on one device, and each process reads its own rows where it can."""

from __future__ import annotations

import pytest

import unidist
from tests.keras.torch import cases
from tests.keras.torch.sources import SOURCES, check
from unidist.testing.processes import ProcessWorld


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:tensorflow")
def test_sources_in_the_simulator(name):
    check(name, unidist.DataParallel())


@pytest.fixture(scope="module")
def world():
    with ProcessWorld(2, env={"KERAS_BACKEND": "torch"}, setup=cases.start, timeout=180) as processes:
        yield processes


@pytest.mark.processes
@pytest.mark.parametrize("name", SOURCES)
def test_sources_in_two_processes(world, name):
    world.call(cases.source, name)


@pytest.mark.processes
def test_unseeded_processes_agree(world):
    first, second = world.call(cases.unseeded)
    for a, b in zip(first, second, strict=True):
        assert (a == b).all()


@pytest.mark.processes
def test_each_process_reads_its_rows(world):
    assert world.call(cases.rows_read) == [5, 5]  # of 4, 4 and 2 rows: 2, 2 and 1 each


@pytest.mark.processes
def test_own_parts_are_counted(world):
    world.call(cases.own_parts)


@pytest.mark.processes
def test_a_model_is_created_in_shards(world):
    for growth, shards, largest in world.call(cases.creation_peak):
        # Two whole variables at a time, and what the allocator rounds up.
        assert growth <= shards + 2.2 * largest, (growth, shards, largest)
        assert shards < 0.55 * 4 * largest


@pytest.mark.processes
def test_callbacks_write_once(world, tmp_path):
    assert world.call(cases.checkpoints, str(tmp_path)) == [True, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.keras", "model.h5", "w.weights.h5"]


@pytest.mark.processes
def test_a_loop_of_the_users_own(world):
    world.call(cases.own_loop)
