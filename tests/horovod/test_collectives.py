"""The horovod backend in real processes: dtypes, handles, worlds, ranks that disagree, die or do not come."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unidist
from tests import preloaded
from tests.launch.runs import wait_until
from tests.support import flights
from tests.support.policies import threads
from tests.visible import OF_KERAS
from unidist import events
from unidist.algebra import Group, Layout, Mesh, Sharding
from unidist.backends.protocol import ALL_DTYPES
from unidist.errors import (
    BackendMismatchError,
    BackendNotAvailableError,
    CapabilityError,
    DesyncError,
    MeshError,
    ProcessLostError,
)
from unidist.testing.processes import ProcessWorld

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes


def join(timeout: float | None = None) -> None:
    unidist.use("horovod", timeout=timeout)
    assert flights.here().timeout == (timeout or 300.0)


# For processes that wait for seconds: how often Horovod's agree that there is nothing to do, in milliseconds.
RARELY = {"HOROVOD_CYCLE_TIME": "20"}
# How long processes that have lost one may take to end: Horovod waits for it until they are killed.
SPENT = 1.0


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[str, ProcessWorld]]:
    worlds: dict[str, ProcessWorld] = {}
    yield worlds
    _end(worlds)


@pytest.fixture(autouse=True)
def no_world_idles(kept: dict[str, ProcessWorld], request: pytest.FixtureRequest) -> None:
    """Idle processes of Horovod take half of two cores: a world lasts until a test does without it."""
    _end(kept, but=request.fixturenames)


def _end(worlds: dict[str, ProcessWorld], but: Sequence[str] = ()) -> None:
    for name in [name for name in worlds if name not in but]:
        worlds.pop(name).close()


@pytest.fixture
def two(kept: dict[str, ProcessWorld]) -> ProcessWorld:
    if "two" not in kept:
        kept["two"] = ProcessWorld(2, setup=join, preload=preloaded.TORCH)
    return kept["two"]


@pytest.fixture
def four(kept: dict[str, ProcessWorld]) -> ProcessWorld:
    if "four" not in kept:
        kept["four"] = ProcessWorld(4, setup=join, preload=preloaded.TORCH)
    return kept["four"]


def test_threads_that_carry_messages_interrupt_no_other(two: ProcessWorld) -> None:
    for (_, own), *others in two.call(threads):
        assert not own
        # Horovod's own and gloo's, which have no names.
        assert sum(late for _, late in others) >= 2


def backend() -> Any:
    return unidist.backend()


def everyone(reverse: bool = False) -> Group:
    ranks = list(range(backend().process_count()))
    return Mesh({"x": -1}, ranks[::-1] if reverse else ranks).group("x", backend().rank)


# Handles --------------------------------------------------------------------------------------------------------------


def handles_in_every_dtype() -> int:
    """What is started and waited for later is what NumPy gives, in both orders of the group."""
    import torch

    checked = 0
    for name in sorted(ALL_DTYPES - {"bool"}):
        dtype = getattr(torch, name)
        for group in (everyone(), everyone(reverse=True)):
            n, me, comm = group.size, group.index, backend().comm
            whole = torch.arange(n * n * 3).reshape(n, n, 3)  # whole[k]: what place k gives
            x = whole[me].to(dtype)
            summed = x.clone()
            part, joined = torch.empty(1, 3, dtype=dtype), torch.empty(n, 3, dtype=dtype)
            started = [
                comm.all_reduce_inplace(summed, group, "sum"),
                comm.reduce_scatter_into(part, x, group, "sum"),
                comm.all_gather_into(joined, x[:1].clone(), group),
            ]
            for handle in started:
                handle.wait()
                handle.wait()
            wanted = whole.sum(0).to(dtype)
            assert torch.equal(summed, wanted), (name, summed, wanted)
            assert torch.equal(part, wanted[me : me + 1]), (name, part, wanted)
            assert torch.equal(joined, whole[:, 0].to(dtype)), (name, joined)
            checked += 3
    return checked


def entries() -> None:
    import torch

    group, comm = everyone(), backend().comm

    def call() -> None:
        with events.for_purpose("entries"):
            for _ in range(2):
                comm.all_reduce(torch.ones(2, 3), group, "max")
            handles = [comm.all_reduce_inplace(torch.ones(2), group, "sum")]
            handles.append(comm.reduce_scatter_into(torch.ones(1), torch.ones(2), group, "sum"))
            handles.append(comm.all_gather_into(torch.ones(2), torch.ones(1), group))
            assert [flights.how(entry) for entry in flights.here().entries[-3:]] == ["under way"] * 3
            for handle in handles:
                handle.wait()
            comm.barrier(group)

    name = " of ranks 0, 1 for 'entries'"
    assert flights.said(flights.since(call)) == [
        *((f"all_reduce of float32 (2, 3){name}", k, "ended") for k in (1, 2)),
        (f"all_reduce of float32 (2,){name}", 1, "ended"),
        (f"reduce_scatter of float32 (2,){name}", 1, "ended"),
        (f"all_gather of float32 (1,){name}", 1, "ended"),
        (f"barrier{name}", 1, "ended"),
    ]


def test_what_is_waited_for_is_in_the_record(two: ProcessWorld) -> None:
    two.call(entries)


def gathered_in_every_dtype() -> int:
    """A few rows, as numbers that ranks agree on are; whole numbers are gathered by a sum."""
    import torch

    for name in sorted(ALL_DTYPES):
        for group in (everyone(), everyone(reverse=True)):
            whole = torch.arange(2 * group.size).reshape(group.size, 2).to(getattr(torch, name))
            found = backend().comm.all_gather(whole[group.index], group, 0, [2] * group.size)
            assert torch.equal(found, whole.reshape(-1)), (name, found)
    return len(ALL_DTYPES)


def complex_numbers() -> int:
    """Of torch's spectra of what rows are. Horovod has none of their own."""
    import torch

    group, comm = everyone(), backend().comm
    whole = torch.fft.fft(torch.arange(2.0 * group.size * 3).reshape(group.size, 2, 3))
    x = whole[group.index]
    assert torch.equal(comm.all_gather(x, group, 0, [2] * group.size), whole.reshape(-1, 3))
    assert torch.equal(comm.all_reduce(x, group, "sum"), whole.sum(0))
    assert torch.equal(comm.reduce_scatter(x, group, 0, [1] * group.size, "sum"), whole.sum(0)[group.index, None])
    return group.size


def test_complex_numbers(two: ProcessWorld) -> None:
    assert two.call(complex_numbers) == [2] * 2


def test_handles(two: ProcessWorld) -> None:
    assert two.call(handles_in_every_dtype) == [2 * 3 * 9] * 2


def test_a_few_rows_are_gathered(two: ProcessWorld) -> None:
    assert two.call(gathered_in_every_dtype) == [len(ALL_DTYPES)] * 2


def means_and_maxima() -> None:
    import torch

    group, comm = everyone(), backend().comm
    x = torch.tensor([backend().rank + 1.0, -1.0])
    comm.all_reduce_inplace(x, group, "mean").wait()
    assert x.tolist() == [1.5, -1.0]
    part = torch.empty(1)
    comm.reduce_scatter_into(part, torch.tensor([2.0, 4.0]) * (backend().rank + 1), group, "mean").wait()
    assert part.tolist() == [[3.0], [6.0]][backend().rank]
    with pytest.raises(CapabilityError, match="reduce_scatter by max"):
        comm.reduce_scatter_into(part, torch.ones(2), group, "max")
    x = torch.tensor([backend().rank + 1.0, torch.nan]).roll(backend().rank)
    comm.all_reduce_inplace(x, group, "max").wait()
    assert x.isnan().tolist() == [True, True]
    bits = torch.tensor([backend().rank == 0, False])
    comm.all_reduce_inplace(bits, group, "sum").wait()
    assert bits.tolist() == [True, False]


def test_means_and_bits(two: ProcessWorld) -> None:
    two.call(means_and_maxima)


# Meshes and process sets ----------------------------------------------------------------------------------------------


def part_of_the_world() -> list[int]:
    """A mesh of ranks 1 and 3: refused until every process has made its process sets."""
    import torch

    mesh = Mesh({"x": 2}, [3, 1])
    partial = Sharding(mesh, Layout(partial="x"), (2,))
    value, inside = torch.ones(2) * backend().rank, backend().rank in mesh.devices
    if inside:
        with pytest.raises(CapabilityError, match=r"\[1, 3\].*on every process"):
            backend().redistribute(value, partial, partial.with_layout(Layout()))
    native = backend().mesh(mesh)
    assert bool(native.process_sets) == inside
    if not inside:
        return []
    assert native.process_sets["x",].ranks == [1, 3]
    return [int(v) for v in backend().redistribute(value, partial, partial.with_layout(Layout()))]


def test_a_mesh_of_some_of_the_ranks(four: ProcessWorld) -> None:
    assert four.call(part_of_the_world) == [[], [4, 4], [], [4, 4]]


def sets_of_a_grid() -> list[list[int]]:
    grid = backend().mesh(Mesh({"data": 2, "model": 2}))
    return [grid.process_sets[axes].ranks for axes in (("data",), ("model",), ("data", "model"))]


def test_process_sets_are_the_groups_of_axes(four: ProcessWorld) -> None:
    everybody = [0, 1, 2, 3]
    assert four.call(sets_of_a_grid) == [
        [[0, 2], [0, 1], everybody],
        [[1, 3], [0, 1], everybody],
        [[0, 2], [2, 3], everybody],
        [[1, 3], [2, 3], everybody],
    ]


# Worlds ---------------------------------------------------------------------------------------------------------------


def left_and_joined_again() -> tuple[int, int, list[str]]:
    sets_of_a_grid_of_two = [backend().mesh(Mesh({"x": 2, "y": 1})) for _ in range(2)]
    assert sets_of_a_grid_of_two[0] is sets_of_a_grid_of_two[1]
    backend().barrier()
    unidist.shutdown()
    assert not any(name.startswith("HOROVOD_") for name in os.environ)
    unidist.initialize()
    backend().barrier()
    with pytest.raises(BackendMismatchError, match="second time"):
        unidist.initialize()
    with pytest.raises(MeshError, match=r"3 devices, and horovod has 2.*unidist run --backend horovod -n 3"):
        backend().mesh(Mesh({"x": 3}))
    return unidist.process_index(), unidist.process_count(), unidist.list_devices()


def test_a_world_is_left_and_joined_again() -> None:
    with ProcessWorld(2, setup=join, preload=preloaded.TORCH) as world:
        assert world.call(left_and_joined_again) == [(rank, 2, ["cpu:0", "cpu:1"]) for rank in (0, 1)]


PROGRAM = """
import sys
import numpy as np
import unidist
adapter = unidist.use()  # by the environment of horovodrun
mesh = unidist.Mesh({"x": -1})
x = unidist.distribute(np.arange(4.0), mesh, unidist.Layout("x"))
total = unidist.from_local([x.shards()[adapter.rank].sum().reshape(1)], mesh, unidist.Layout(partial="x"))
sys.stdout.write(f"rank {adapter.rank} {unidist.process_count()} {adapter.name} {float(total.numpy()[0])} end\\n")
"""


def test_under_horovodrun_itself(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2", sys.executable, "program.py"]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    # With what hides frameworks: horovodrun would import TensorFlow too.
    modules = os.pathsep.join((os.environ["PYTHONPATH"], str(ROOT)))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": modules, "PATH": path, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank (\d) 2 horovod 6.0 end", done.stdout)) == ["0", "1"], done.stdout


def alone() -> tuple[int, list[str], float]:
    unidist.use("horovod")
    x = unidist.distribute(np.arange(3.0), Mesh({"x": 1}), Layout("x"))
    return unidist.process_count(), unidist.list_devices(), float(x.numpy().sum())


def test_a_world_of_one_needs_no_launcher() -> None:
    with ProcessWorld(1, launcher=None, preload=preloaded.TORCH) as world:
        assert world.call(alone) == [(1, ["cpu:0"], 3.0)]


def its_own_horovod() -> None:
    """The world of a program that has initialised Horovod is used, and left alive."""
    import horovod.torch as hvd

    assert hvd.is_initialized()
    other = type(backend())()
    assert (other.rank, other.process_count()) == (hvd.rank(), 2)
    other.barrier()
    other.shutdown()
    assert hvd.is_initialized()
    backend().barrier()


def test_a_world_of_the_programs_own(two: ProcessWorld) -> None:
    two.call(its_own_horovod)


def not_the_devices_of_this_world() -> None:
    for devices, kind, text in (
        (["gpu:0", "gpu:1"], CapabilityError, "CPUs"),
        (5, MeshError, "5 devices, and horovod has 1.*unidist run --backend horovod -n 5"),
    ):
        with pytest.raises(kind, match=text):
            unidist.use("horovod", devices=devices).list_devices()  # type: ignore[arg-type]


def test_devices_that_are_not_there() -> None:
    with ProcessWorld(1, launcher=None, preload=preloaded.TORCH) as world:
        world.call(not_the_devices_of_this_world)


def nobody_comes() -> str:
    unidist.use("horovod", timeout=2.0)
    with pytest.raises(BackendNotAvailableError) as caught:
        unidist.initialize("127.0.0.1:1", 2, 1)
    return str(caught.value)


def test_a_world_that_does_not_come_together() -> None:
    with ProcessWorld(1, launcher=None, preload=preloaded.TORCH) as world:
        (text,) = world.call(nobody_comes)
        assert "process 1 of 2 could not reach the others at 127.0.0.1:1 within 2 s" in text


# Ranks that disagree, or are lost -------------------------------------------------------------------------------------


def disagree() -> str:
    """Rank 1 comes with another shape: both get the error, and the world goes on."""
    import torch

    group = everyone()
    with pytest.raises(DesyncError) as caught, events.for_purpose("net/kernel"):
        backend().comm.all_reduce(torch.ones(2 + backend().rank), group, "sum")
    assert (caught.value.ranks, caught.value.collective, caught.value.variable) == ((0, 1), "all_reduce", "net/kernel")
    assert flights.how(flights.here().entries[-1]) == "failed"
    assert backend().comm.all_reduce(torch.ones(2), group, "sum").tolist() == [2.0, 2.0]
    return str(caught.value)


def test_ranks_that_disagree_are_told_and_go_on(two: ProcessWorld) -> None:
    for text in two.call(disagree):
        assert text.startswith("all_reduce for 'net/kernel' over ranks [0, 1]: the ranks disagree: Mismatched")


def lose(how: str, noticed: str) -> dict[str, tuple[float, str]]:
    """Process 1 goes away; process 0 notices in each call: the seconds and the text.

    Args:
        noticed: the file that process 0 makes then, which a process that stalls goes on for.
    """
    import torch

    from unidist.backends.horovod import lost

    group, x = everyone(), torch.ones(2, 2)
    backend().barrier()
    if how == "stalls":
        unidist.initialize(timeout=1.0)
    if backend().rank == 1:
        if how == "dies":
            os._exit(9)
        wait_until(Path(noticed).exists, "process 0 to notice")
        return {}
    calls = {
        "all_gather": lambda: backend().comm.all_gather(x[:1], group, 0, (1, 1)),
        "reduce_scatter": lambda: backend().comm.reduce_scatter(x, group, 0, (1, 1), "sum"),
        "all_reduce": lambda: backend().comm.all_reduce_inplace(x, group, "sum").wait(),
        "barrier": lambda: backend().barrier(),
    }
    if how == "dies":
        missed = "what Horovod has missed"
        at = lost.Call(missed, (0, 1), "a test")
        calls[missed] = lambda: lost.wait(lost.polled(lambda: False), at, 60.0, backend()._hvd)
    if how == "stalls":
        calls["making the process set"] = lambda: (
            backend().mesh(Mesh({"x": 1, "y": 2}, [1, 0])) and backend()._sets._add((0,))
        )
    found = {}
    for name, call in calls.items():
        start = time.monotonic()
        with pytest.raises(ProcessLostError) as caught, events.for_purpose("a test"):
            call()
        assert flights.how(flights.here().entries[-1]) == "failed"
        found[name] = time.monotonic() - start, str(caught.value)
    Path(noticed).touch()
    return found


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_lost_peer_is_told(how: str, tmp_path: Path) -> None:
    """Horovod reports a process that ended. Of one that lives and does not come it says nothing: we do."""
    with ProcessWorld(2, setup=join, setup_args=(60.0,), env=RARELY, preload=preloaded.TORCH) as processes:
        outcomes = processes.outcomes(lose, how, str(tmp_path / "noticed"))
        processes.close(patience=SPENT)
    assert outcomes[0].failure is None, outcomes[0].failure
    assert len(outcomes[0].value) >= 4
    for name, (seconds, text) in outcomes[0].value.items():
        assert seconds < 10
        assert text.startswith(name)
        assert "over ranks [0, 1]: another process of the group ended or did not come in time" in text
        assert "start all processes again" in text
        assert ("waited 1 s" in text) == (how == "stalls")
        if "process set" not in name:
            assert "for 'a test'" in text
    if how == "dies":
        assert outcomes[1].failure is not None
        assert outcomes[1].failure.kind == "ended"


def stall_in_fit(noticed: str) -> str:
    """Rank 1 stops in the middle of fit, alive, until rank 0 has got the error within the timeout."""
    import keras

    class Stall(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and unidist.process_index() == 1:
                wait_until(Path(noticed).exists, "process 0 to notice")

    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    if unidist.process_index() == 1:
        with pytest.raises(Exception, match=r"shut down|another process"):
            model.fit(np.ones((32, 4)), np.ones((32, 3)), batch_size=4, verbose=0, callbacks=[Stall()])
        return ""
    with pytest.raises(ProcessLostError) as caught:
        model.fit(np.ones((32, 4)), np.ones((32, 3)), batch_size=4, verbose=0, callbacks=[Stall()])
    Path(noticed).touch()
    unidist.shutdown()
    return str(caught.value)


def test_a_rank_that_stalls_in_the_middle_of_fit_is_told(tmp_path: Path) -> None:
    with ProcessWorld(
        2, setup=join, setup_args=(3.0,), env={"KERAS_BACKEND": "torch"}, preload=preloaded.KERAS["torch"]
    ) as processes:
        text = processes.call(stall_in_fit, str(tmp_path / "noticed"))[0]
        processes.close(patience=SPENT)
    # Of gradients, or of whether somebody wishes to stop.
    assert re.match(r"all_\w+ for '.+' over ranks \[0, 1\]: another process .*waited 3 s", text), text


# TensorFlow -----------------------------------------------------------------------------------------------------------


def join_tensorflow() -> None:
    unidist.use("horovod", framework="tensorflow")


def eager_tensors_agree_or_are_told() -> str:
    import tensorflow as tf

    group = everyone()
    with pytest.raises(DesyncError, match="all_reduce for 'a test' over ranks") as caught, events.for_purpose("a test"):
        backend().comm.all_reduce(tf.ones(2 + backend().rank), group, "sum")
    assert flights.how(flights.here().entries[-1]) == "failed"
    assert backend().comm.all_reduce(tf.ones(2), group, "sum").numpy().tolist() == [2.0, 2.0]
    assert flights.said(list(flights.here().entries[-1:])) == [("all_reduce of float32 (2,) of ranks 0, 1", 1, "ended")]
    own = tf.constant([2.0, 4.0]) * (backend().rank + 1)
    assert backend().comm.all_reduce(own, group, "mean").numpy().tolist() == [3.0, 6.0]
    part = backend().comm.reduce_scatter(own, group, 0, (1, 1), "mean")
    assert part.numpy().tolist() == [[3.0], [6.0]][backend().rank]
    with pytest.raises(CapabilityError, match="in place"):
        backend().comm.all_reduce_inplace(tf.ones(2), group, "sum")
    partial = Sharding(Mesh({"x": 2}), Layout(partial="x"), (2,))
    whole = partial.with_layout(Layout())
    traced = tf.function(lambda x: backend().redistribute(x, partial, whole), autograph=False)
    with pytest.raises(CapabilityError, match=r"tf\.py_function"):
        traced(tf.ones(2))
    return str(caught.value)


def lose_over_tensorflow(how: str, limit: float, noticed: str) -> list[tuple[float, str]]:
    """As `lose`; where process 1 dies, also in what Horovod was given as it ended, and will not answer."""
    import tensorflow as tf

    unidist.initialize(timeout=limit)  # of the world that the launcher's word has joined
    group = everyone()
    backend().barrier()
    if backend().rank == 1:
        if how == "dies":
            os._exit(9)
        wait_until(Path(noticed).exists, "process 0 to notice")
        return []
    calls = [lambda: backend().comm.all_gather(tf.ones(2), group, 0, (2, 2))]
    if how == "dies":
        transport, do = backend()._transport(group), backend().comm._ways._do
        calls.append(lambda: do("all_gather", transport, lambda **_: threading.Event().wait()))
    found = []
    for call in calls:
        start = time.monotonic()
        with pytest.raises(ProcessLostError) as caught, events.for_purpose("a test"):
            call()
        found.append((time.monotonic() - start, str(caught.value)))
    Path(noticed).touch()
    return found


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_lost_peers_and_disagreement_over_tensorflow(how: str, tmp_path: Path) -> None:
    limit = 1.0 if how == "stalls" else 60.0
    with ProcessWorld(
        2, setup=join_tensorflow, env=OF_KERAS["tensorflow"], preload=preloaded.KERAS["tensorflow"]
    ) as processes:
        for text in processes.call(eager_tensors_agree_or_are_told):
            assert "the ranks disagree: Mismatched" in text, text
        outcomes = processes.outcomes(lose_over_tensorflow, how, limit, str(tmp_path / "noticed"))
        processes.close(patience=SPENT)
    assert outcomes[0].failure is None, outcomes[0].failure
    assert len(outcomes[0].value) == (2 if how == "dies" else 1)
    for seconds, text in outcomes[0].value:
        assert seconds < 10
        assert text.startswith("all_gather for 'a test' over ranks [0, 1]: another process of the group ended"), text
        assert ("waited 1 s" in text) == (how == "stalls"), text


def keras_on_tensorflow() -> str:
    unidist.use("horovod")
    import keras

    assert (keras.config.backend(), backend().framework) == ("tensorflow", "tensorflow")
    mesh = Mesh({"x": 1})
    with pytest.raises(CapabilityError, match="data parallel only"):
        unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, {".*kernel": (None, "x")}))
    with (
        pytest.raises(CapabilityError, match="auto_shard_dataset"),
        unidist.DataParallel(auto_shard_dataset=False).scope(),
    ):
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).predict(np.ones((2, 2)), verbose=0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(CapabilityError) as caught:
        unidist.parallelize(model, unidist.DataParallel())
    return str(caught.value)


def test_what_keras_on_tensorflow_cannot_is_refused_with_the_remedy() -> None:
    with ProcessWorld(1, launcher=None, env=OF_KERAS["tensorflow"], preload=preloaded.KERAS["tensorflow"]) as world:
        assert "jit_compile=False" in world.call(keras_on_tensorflow)[0]


def keras_on_torch_where_nobody_says() -> tuple[str, str]:
    unidist.use("horovod")
    return os.environ["KERAS_BACKEND"], backend().framework


def test_keras_runs_on_torch_where_nobody_says() -> None:
    with ProcessWorld(1, launcher=None, env={"KERAS_BACKEND": None, "KERAS_HOME": "/nowhere"}) as world:
        assert world.call(keras_on_torch_where_nobody_says) == [("torch", "torch")]
