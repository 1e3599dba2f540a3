"""Worlds of real processes with JAX: joining, what each holds, and what happens when one is lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import unidist
from tests import preloaded
from tests.support import flights
from tests.visible import QUICK_JAX
from unidist import Layout, Mesh, events
from unidist.backends.environment import Launch
from unidist.backends.jax import joining, relay, waiting
from unidist.errors import BackendMismatchError, BackendNotAvailableError, DesyncError, ProcessLostError
from unidist.testing.processes import ProcessFailedError, ProcessWorld, free_port

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessWorld]:
    with ProcessWorld(2, launcher="torchrun", env=QUICK_JAX, setup=start, timeout=200, preload=preloaded.JAX) as world:
        yield world


def start() -> None:
    unidist.use("jax", devices=2)


@pytest.mark.parametrize(("host", "where"), [("127.0.0.1", "127.0.0.1"), ("node0", "10.1.2.3")])
def test_gloo_is_told_where_to_listen(host: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it listens where the hostname leads; on a cluster that may be the loopback."""
    monkeypatch.setattr(joining, "own_address", lambda towards: "10.1.2.3" if towards == "node0" else "")
    library: Any = vars(joining.xla_bridge)["_jax"]  # type: ignore[attr-defined]
    before = library.make_gloo_tcp_collectives
    with joining._listening_at(host):
        assert getattr(library.make_gloo_tcp_collectives, "keywords", {}) == {"hostname": where}
    assert library.make_gloo_tcp_collectives is before


def late_for(seconds: float) -> str:
    """Process 1 comes to the barrier too late for process 0; what that one raises."""
    # One that is new would be compared first, and waited for there.
    unidist.backend().barrier()
    unidist.initialize(timeout=seconds)
    if unidist.process_index() == 1:
        time.sleep(3 * seconds)
        return ""
    begun = time.monotonic()
    with pytest.raises(ProcessLostError) as caught:
        unidist.backend().barrier()
    assert time.monotonic() - begun < 2.5 * seconds
    return str(caught.value)


def start_with_one() -> None:
    unidist.use("jax", devices=1)


def test_initialize_changes_the_timeout_of_a_launchers_world() -> None:
    """With one device a process XLA runs a small program where it is dispatched, which then waits in C++."""
    with ProcessWorld(
        2, launcher="torchrun", env=QUICK_JAX, setup=start_with_one, timeout=40, preload=preloaded.JAX
    ) as world:
        assert "nothing came for 1 s" in world.outcomes(late_for, 1.0)[0].value


# A world that works


def facts() -> tuple[Any, ...]:
    backend: Any = unidist.backend()
    return unidist.process_index(), unidist.process_count(), unidist.list_devices(), backend.local_ranks()


def test_ranks_follow_jaxs_device_list(two: ProcessWorld) -> None:
    names = ["cpu:0", "cpu:1", "cpu:2048", "cpu:2049"]
    assert two.call(facts) == [(0, 2, names, (0, 1)), (1, 2, names, (2, 3))]


def shards_of_a_mesh_across() -> tuple[dict[int, Any], Any, Any]:
    """Neighbours on the minor axis are in different processes."""
    mesh = Mesh({"data": 2, "model": 2}, ["cpu:0", "cpu:2048", "cpu:1", "cpu:2049"])
    value = np.arange(35, dtype="float32").reshape(7, 5)
    x = unidist.distribute(value, mesh, Layout("model", "data"))
    with unidist.ledger() as book:
        y = x.redistribute(Layout(None, ("data", "model")))
    shards = {rank: np.asarray(shard) for rank, shard in y.shards().items()}
    return shards, y.numpy(), (x.shards()[unidist.backend().local_ranks()[1]].shape, book.rows())


def test_arrays_span_processes(two: ProcessWorld) -> None:
    value = np.arange(35, dtype="float32").reshape(7, 5)
    found = two.call(shards_of_a_mesh_across)
    columns = {0: slice(0, 2), 2: slice(2, 3), 1: slice(3, 4), 3: slice(4, 5)}
    shards = found[0][0] | found[1][0]
    assert sorted(shards) == [0, 1, 2, 3]
    for rank, cut in columns.items():
        np.testing.assert_array_equal(shards[rank], value[:, cut])
    for _, whole, _ in found:
        np.testing.assert_array_equal(whole, value)
    assert [more[0] for _, _, more in found] == [(4, 2), (3, 2)]
    assert all(sum(row[4] for row in more[1]) > 0 for _, _, more in found)


def train(steps: int) -> tuple[Any, int]:
    """Data parallel steps of a linear model whose batch is spread over both processes."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(8, 3)).astype("float32"), rng.normal(size=(8, 2)).astype("float32")
    mesh = Mesh({"data": -1})
    x, y = (unidist.distribute(v, mesh, Layout("data")) for v in (inputs, targets))
    w = unidist.distribute(np.zeros((3, 2), "float32"), mesh, Layout())

    @jax.jit
    def step(w: Any, x: Any, y: Any) -> Any:
        gradient = jax.grad(lambda w: ((x.data @ w.data - y.data) ** 2).mean())(w)
        return jax.tree.map(lambda value, slope: value - 0.1 * slope, w, gradient)

    for _ in range(steps):
        w = step(w, x, y)
    return w.numpy(), len(x.data.addressable_shards)


def test_training_over_processes_is_that_of_one(two: ProcessWorld) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(8, 3)).astype("float32"), rng.normal(size=(8, 2)).astype("float32")
    wanted = np.zeros((3, 2), "float32")
    for _ in range(5):
        wanted -= 0.1 * 2 * inputs.T @ (inputs @ wanted - targets) / targets.size
    for found, held in two.call(train, 5):
        assert held == 2
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def wait_for_the_late() -> float:
    unidist.barrier()
    begin = time.monotonic()
    if unidist.process_index() == 1:
        time.sleep(1.0)
    unidist.barrier()
    unidist.barrier("data", Mesh({"data": 2, "model": 2}))
    unidist.barrier("data", Mesh({"data": 2}, [0, 2]))
    return time.monotonic() - begin


def test_a_barrier_waits_for_all(two: ProcessWorld) -> None:
    assert min(two.call(wait_for_the_late)) >= 1.0


def entries() -> list[str]:
    """What this process waits in on the way from dispatch to value, and what it agrees on before."""
    mesh = Mesh({"x": -1})
    added = unidist.distribute(np.ones((3, 2), "float32"), mesh, Layout(partial="x"))

    def call() -> None:
        with events.for_purpose("entries"):
            for _ in range(2):
                unidist.all_reduce(added)
            added.numpy()
            unidist.barrier()

    found = flights.since(call)
    kept = [entry for entry in found if not entry.what.startswith(("agreeing on ", "reading "))]
    assert flights.said(kept) == [
        *(("all_reduce of float32 (3, 2) over ('x',) of processes 0, 1 for 'entries'", k, "ended") for k in (1, 2)),
        ("gather of float32 (3, 2) of processes 0, 1 for 'entries'", 1, "ended"),
        ("barrier of int32 () over ('rank',) of processes 0, 1 for 'entries'", 1, "ended"),
    ]
    return [entry.what for entry in found if entry.what.startswith("agreeing on ")]


def test_what_is_waited_for_is_in_the_record(two: ProcessWorld) -> None:
    wanted = [f"agreeing on {name} of processes 0, 1" for name in ("all_reduce", "gather")]
    assert all(agreed[:2] == wanted for agreed in two.call(entries))


def part_ways(how: str, rows: int) -> tuple[str, tuple[int, ...], float]:
    """The processes come to different collectives; what each raises, and a collective of both afterwards."""
    backend: Any = unidist.backend()
    backend.set_timeout(20.0)
    mesh, first = Mesh({"x": -1}), unidist.process_index() == 0
    x = unidist.distribute(np.ones(rows, "int32" if how == "dtype" and not first else "float32"), mesh, Layout("x"))
    whole = unidist.distribute(np.ones(rows, "float32"), mesh, Layout())
    added = unidist.distribute(np.ones(rows, "float32"), mesh, Layout(partial="x"))
    runs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "dtype": (x.numpy, x.numpy),
        "collective": (x.numpy, lambda: added.redistribute(Layout())),
        "root": (lambda: unidist.broadcast(whole, "x", root=0), lambda: unidist.broadcast(whole, "x", root=2)),
    }
    runs["again"] = runs["collective"]
    if how == "again":
        for known in runs[how]:
            known()
        os.environ["UNIDIST_CHECK"] = "all"
    try:
        runs[how][0 if first else 1]()
    except DesyncError as error:
        assert [flights.how(entry) for entry in flights.here().entries[-2:]] == ["failed", "failed"]
        return str(error), error.ranks, float(unidist.all_reduce(added).numpy().sum())
    finally:
        os.environ.pop("UNIDIST_CHECK", None)
        backend.set_timeout(300.0)
    return "nothing was noticed", (), 0.0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dtype", ("process 0 to gather with array float32 (12,)", "process 1 to gather with array int32 (12,)")),
        ("root", ("process 0 to broadcast with root 0", "process 1 to broadcast with root 2")),
        ("collective", ("process 0 to gather", "process 1 to all_reduce")),
        ("again", ("process 0 to gather", "process 1 to all_reduce")),
    ],
)
def test_what_processes_run_is_compared(two: ProcessWorld, how: str, words: tuple[str, ...]) -> None:
    """When it is new, or, where they are asked to, each time."""
    rows = {"dtype": 12, "root": 13, "collective": 14, "again": 15}[how]
    for text, ranks, total in two.call(part_ways, how, rows):
        assert all(word in text for word in words), text
        assert ranks == (2, 3)
        assert total == rows


def join_again() -> list[str]:
    found = []
    for arguments in ((), ("127.0.0.1:1", 3, 0)):
        try:
            unidist.initialize(*arguments)
            unidist.initialize(*arguments)
        except BackendMismatchError as error:
            found.append(str(error))
    return found


def test_a_second_initialize_is_refused(two: ProcessWorld) -> None:
    for texts in two.call(join_again):
        assert len(texts) == 2
        assert "second time" in texts[0]


# Joining by hand


def join_by_hand(port: int, counts: tuple[int, int], timeout: float) -> Any:
    """Both processes have no launcher; the index comes from their own variable."""
    unidist.use("jax", devices=1)
    index = int(os.environ["UNIDIST_TEST_INDEX"])
    unidist.initialize(f"127.0.0.1:{port}", counts[index], index, timeout=timeout)
    mesh = Mesh({"x": 2})
    x = unidist.from_local([np.full(1, index + 1.0, "float32")], mesh, Layout(partial="x"))
    return float(unidist.all_reduce(x).numpy()[0]), unidist.process_count(), unidist.list_devices()


def leave_and_join_again(port: int, timeout: float) -> Any:
    read = vars(waiting.ArrayImpl)["_value"]  # type: ignore[attr-defined]
    first = join_by_hand(port, (2, 2), timeout)
    assert vars(waiting.ArrayImpl)["_value"] is not read  # type: ignore[attr-defined]
    unidist.shutdown()
    assert vars(waiting.ArrayImpl)["_value"] is read  # type: ignore[attr-defined]
    alone = unidist.process_count()
    unidist.initialize(f"127.0.0.1:{port}", 2, int(os.environ["UNIDIST_TEST_INDEX"]), timeout=timeout)
    return first, alone, (unidist.process_count(), unidist.list_devices())


def of_index(k: int) -> dict[str, str]:
    return {**QUICK_JAX, "UNIDIST_TEST_INDEX": str(k)}


class TwoByHand:
    """Two processes without a launcher, which are given their index."""

    def __init__(self) -> None:
        self.worlds = [
            ProcessWorld(1, launcher=None, env=of_index(k), timeout=120, preload=preloaded.JAX) for k in (0, 1)
        ]

    def call(self, function: Any, *arguments: Any) -> list[Any]:
        """Results or failures, by process."""

        def one(world: ProcessWorld) -> Any:
            outcome = world.outcomes(function, *arguments)[0]
            return outcome.value if outcome.failure is None else outcome.failure

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, self.worlds))

    def close(self) -> None:
        """At once: the first keeps JAX's service, and does not end before the other has left."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ProcessWorld.close, self.worlds))


@pytest.fixture
def by_hand() -> Iterator[TwoByHand]:
    worlds = TwoByHand()
    yield worlds
    worlds.close()


def test_processes_join_by_address_leave_and_join_again(by_hand: TwoByHand) -> None:
    found = by_hand.call(leave_and_join_again, free_port(), 60.0)
    for index, (first, alone, again) in enumerate(found):
        assert first[:2] == (3.0, 2), index
        assert len(first[2]) == 2
        assert alone == 1
        assert again == (2, first[2])


def test_processes_that_disagree_are_told(by_hand: TwoByHand) -> None:
    failures = by_hand.call(join_by_hand, free_port(), (2, 3), 30.0)
    assert [failure.kind for failure in failures] == [BackendMismatchError.__name__] * 2
    assert all("process 1 of 3" in failure.message for failure in failures)


def test_a_process_that_does_not_come_is_named() -> None:
    port = free_port()
    for index, words in ((0, "processes [1] of 2 did not come"), (1, f"could not reach process 0 at 127.0.0.1:{port}")):
        with ProcessWorld(1, launcher=None, env=of_index(index), preload=preloaded.JAX) as world:
            with pytest.raises(ProcessFailedError) as caught:
                world.call(join_by_hand, port, (2, 2), 1.0)
            assert caught.value.kind == BackendNotAvailableError.__name__
            assert words in caught.value.message


def join_too_late(port: int) -> None:
    unidist.use("jax", devices=1)
    unidist.list_devices()
    unidist.initialize(f"127.0.0.1:{port}", 2, 0, timeout=2.0)


def test_jax_that_has_started_cannot_join() -> None:
    with ProcessWorld(1, launcher=None, env=QUICK_JAX, preload=preloaded.JAX) as world:
        with pytest.raises(ProcessFailedError) as caught:
            world.call(join_too_late, free_port())
        assert caught.value.kind == BackendMismatchError.__name__
        assert "before any JAX operation" in caught.value.message


def test_torchruns_own_store_keeps_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent listens on MASTER_PORT itself, so process 0 takes the next one."""
    address, count = "10.0.0.1:29500", 4
    launch = Launch(launcher="torchrun", address=address, process_count=count, process_index=0, local_index=0)
    assert joining.address_of(launch) == address
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert joining.address_of(launch) == "10.0.0.1:29501"


# Reading and the relay


def test_reads_are_polled_for_and_are_jaxs_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    polled: list[Any] = []
    monkeypatch.setattr(waiting, "poll", lambda x, world, what: polled.append(x))
    x, places = jax.numpy.ones(()), ("_value", "block_until_ready")
    before = [vars(waiting.ArrayImpl)[place] for place in places]  # type: ignore[attr-defined]
    waiting.watch(joining.Membership(2, 0, 1.0))
    try:
        reads = [float, bool, str, jax.device_get, jax.block_until_ready, lambda x: x.block_until_ready()]
        for count, read in enumerate(reads, 1):
            assert read(x) is not None
            assert polled == [x] * count
        gone = jax.numpy.ones(())
        gone.delete()
        with pytest.raises(RuntimeError, match="deleted"):
            float(gone)
    finally:
        waiting.unwatch()
    assert [vars(waiting.ArrayImpl)[place] for place in places] == before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), True),
        (JaxRuntimeError("INTERNAL: Socket closed"), True),
        (RuntimeError("the database said: connection reset by peer"), False),
        (JaxRuntimeError("INTERNAL: no such function"), False),
    ],
)
def test_only_xlas_errors_are_read_as_a_loss(error: Exception, is_loss: bool) -> None:
    found = waiting.loss(error, joining.Membership(2, 0, 1.0), "fit")
    assert isinstance(found, ProcessLostError) == is_loss


def test_the_relay_is_silent_where_the_service_has_gone() -> None:
    """JAX aborts the process when its connection closes; what is let go is closed as without a relay."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        way = relay.Relay(*service.getsockname())
        with socket.create_connection(("127.0.0.1", way.port), timeout=10) as near:
            far, _ = service.accept()
            with far:
                near.sendall(b"asked")
                assert far.recv(100) == b"asked"
                far.sendall(b"answered")
                assert near.recv(100) == b"answered"
            near.settimeout(0.2)
            with pytest.raises(TimeoutError):
                near.recv(100)
            way.let_go()
            near.settimeout(10)
            assert near.recv(100) == b""
        way.close()


# A lost process


def lose_one(how: str) -> str:
    """Process 1 ends amid the world; process 0 meets that in a collective."""
    mesh = Mesh({"x": -1})
    x = unidist.distribute(np.ones(4, "float32"), mesh, Layout("x"))
    x.numpy()
    if unidist.process_index() == 1:
        time.sleep(0.5)
        os._exit(3)
    try:
        for _ in range(1000):
            if how == "gather":
                x.numpy()
            else:
                unidist.barrier()
            time.sleep(0.01)
    except ProcessLostError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("how", ["gather", "barrier"])
def test_a_lost_process_is_an_error_and_soon(how: str) -> None:
    with ProcessWorld(2, launcher="jax", env=QUICK_JAX, setup=start, preload=preloaded.JAX) as world:
        begin = time.monotonic()
        outcomes = world.outcomes(lose_one, how)
        assert outcomes[1].failure is not None
        assert outcomes[1].failure.kind == "ended"
        assert outcomes[0].failure is None, outcomes[0].failure
        assert f"{how} on process 0 of 2" in outcomes[0].value
        assert "process 1 has ended" in outcomes[0].value or "onnect" in outcomes[0].value
        assert time.monotonic() - begin < 30


SCRIPT = """
import os, sys
import numpy as np
import unidist
from unidist import Layout, Mesh

index, port, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
unidist.use("jax", devices=1)
unidist.initialize(f"127.0.0.1:{port}", 2, index, timeout=60)
x = unidist.distribute(np.ones(4, "float32"), Mesh({"x": -1}), Layout("x"))
x.numpy()
if index == 1 and ending == "raises":
    raise ValueError("a mistake")
if index == 1 and ending == "dies":
    os._exit(3)
for _ in range(20 if ending == "well" else 1000):
    x.numpy()
print("done")
"""


@pytest.mark.parametrize(("ending", "codes"), [("raises", [1, 1]), ("dies", [1, 3]), ("well", [0, 0])])
def test_no_process_outlives_a_broken_world(ending: str, codes: list[int], tmp_path: Path) -> None:
    """JAX by itself would wait at the exit of either for the other, for minutes, and then abort."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(SCRIPT)
    begin = time.monotonic()
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(index), str(port), ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in (0, 1)
    ]
    try:
        printed = [process.communicate(timeout=100)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [process.returncode for process in running] == codes, printed
    assert ("ProcessLostError" in printed[0]) == (ending != "well")
    assert ("done" in printed[0]) == (ending == "well")
    assert time.monotonic() - begin < 50
