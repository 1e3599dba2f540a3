"""Writing in a process of its own: what is written, what is reported, and that it ends with its parent."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.samples import contents, prepare, tensors, writer
from tests.launch.runs import alive
from unidist.checkpoint import writing
from unidist.checkpoint.background import Background
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.remote import directory_of
from unidist.checkpoint.tensors import Tensor, files_of
from unidist.errors import CheckpointError

OF = tensors()
FILES = files_of(OF)


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[Background]]:
    """Two processes' writers, used one test after the other."""
    with Background(0) as first, Background(1) as second:
        yield [first, second]


def fill(background: Background, bytes_of: dict, names: list[str]) -> None:
    """Copies tensors into the memory."""
    background.begin()
    for name in names:
        background.write(name, 0, bytes_of[name])


def test_two_processes_write_steps_and_the_first_commits(tmp_path: Path, worlds: list[Background]) -> None:
    for step in (1, 2, 3):
        bytes_of = contents(OF, step)
        folder = prepare(tmp_path, step, FILES)
        names = list(bytes_of)
        fill(worlds[0], bytes_of, names[::2])
        worlds[0].start(folder, FILES, {"facts": {"step": step}, "places": 2})
        assert worlds[0].is_busy
        with pytest.raises(CheckpointError, match="still being written"):
            worlds[0].begin()
        with pytest.raises(CheckpointError, match=r"still being written after 0\.05 s"):
            worlds[0].wait(0.05)
        fill(worlds[1], bytes_of, names[1::2])
        worlds[1].start(folder, FILES)
        assert worlds[1].wait(60) is None
        assert worlds[0].wait(60) == tmp_path / f"step-{step:08d}"
        assert not worlds[0].is_busy
        with Reader(tmp_path, step, "all") as reader:
            assert reader.facts == {"step": step}
            assert all(reader.read(name).tobytes() == bytes_of[name].tobytes() for name in bytes_of)


def test_memory_is_kept_and_grows(tmp_path: Path, worlds: list[Background]) -> None:
    found = []
    for step, nbytes in ((1, 10), (2, 1 << 20), (3, 10)):
        files = files_of([Tensor("a", "uint8", (nbytes,))])
        worlds[0].begin()
        worlds[0].write("a", 0, np.full(nbytes, step, np.uint8))
        worlds[0].start(prepare(tmp_path, step, files), files, {"facts": {}, "places": 1})
        worlds[0].wait(60)
        with Reader(tmp_path, step, "all") as reader:
            assert reader.read("a").tolist() == [step] * nbytes
        found.append((worlds[0]._shared(), os.fstat(worlds[0]._shared()).st_size >= nbytes))
    assert found == [(worlds[0]._shared(), True)] * 3


def test_a_part_that_failed_is_told_by_its_process_and_by_the_first(tmp_path: Path, worlds: list[Background]) -> None:
    folder = prepare(tmp_path, 1, FILES)
    worlds[0].start(folder, FILES, {"facts": {}, "places": 2})
    worlds[1].begin()
    worlds[1].write("dense/bias", 380, bytes(10))
    worlds[1].start(folder, FILES)
    with pytest.raises(CheckpointError, match=r"'dense/bias' has 384 bytes, and 380\.\.390 were to") as found:
        worlds[1].wait(60)
    assert (found.value.tensor, found.value.file) == ("dense/bias", "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"process 1 could not write its part: .*380\.\.390"):
        worlds[0].wait(60)
    assert directory_of(tmp_path).latest() is None
    assert worlds[0].wait() is None


def test_a_part_that_does_not_come_is_told(tmp_path: Path, worlds: list[Background]) -> None:
    folder = prepare(tmp_path, 1, FILES)
    worlds[0].start(folder, FILES, {"facts": {}, "places": 3, "timeout": 0.1})
    with pytest.raises(CheckpointError, match=r"did not write their parts within 0.1 s: 1, 2$"):
        worlds[0].wait(60)


def test_a_full_disk_is_told_in_words(tmp_path: Path) -> None:
    of = [Tensor("big", "uint8", (1 << 20,))]
    files = files_of(of)
    folder = prepare(tmp_path, 1, files)
    with Background(0) as background:
        background.begin()
        background.write("big", 0, bytes(10))
        background.start(folder, files, {"facts": {}, "places": 9, "timeout": 0})
        with pytest.raises(CheckpointError, match="within 0 s"):
            background.wait(60)
        assert background._child is not None
        # Its files may not grow beyond this, as on a full disk.
        resource.prlimit(background._child[0].pid, resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))
        background.begin()
        background.write("big", 0, bytes(1 << 20))
        background.start(folder, files, {"facts": {}, "places": 1})
        with pytest.raises(CheckpointError, match=r"model-00001.*: File too large \(tensor 'big'\)") as found:
            background.wait(60)
        assert found.value.tensor == "big"
    assert directory_of(tmp_path).steps() == []


def test_a_writer_that_was_killed_is_told_and_another_one_takes_its_place(tmp_path: Path) -> None:
    bytes_of = contents(OF)
    folder = prepare(tmp_path, 1, FILES)
    with Background(0) as background:
        background.start(folder, FILES, {"facts": {}, "places": 2})
        assert background._child is not None
        background._child[0].kill()
        with pytest.raises(CheckpointError, match="the process that writes checkpoints ended by signal 9"):
            background.wait(60)
        assert not background.is_busy
        fill(background, bytes_of, list(bytes_of))
        background.start(prepare(tmp_path, 1, FILES), FILES, {"facts": {}, "places": 1})
        assert background.wait(60) == tmp_path / "step-00000001"


def test_a_writer_that_was_killed_is_told_to_the_first_which_waits_for_its_part(tmp_path: Path) -> None:
    folder = prepare(tmp_path, 1, FILES)
    with Background(0) as first, Background(1) as second:
        second.start(prepare(tmp_path, 2, FILES), FILES)
        second.wait(60)
        first.start(folder, FILES, {"facts": {}, "places": 2})
        assert second._child is not None
        second._child[0].kill()
        second._child[0].wait()
        with pytest.raises(CheckpointError, match="ended by signal 9"):
            second.start(folder, FILES)
        with pytest.raises(CheckpointError, match=r"process 1 could not .*ended by signal 9"):
            first.wait(20)
    assert directory_of(tmp_path).latest() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_of_a_group_do_not_end_the_writer(tmp_path: Path, worlds: list[Background], number: int) -> None:
    """Whoever is asked to end may write a last checkpoint first."""
    bytes_of = contents(OF)
    folder = prepare(tmp_path, 1, FILES)
    fill(worlds[0], bytes_of, list(bytes_of))
    worlds[0].start(folder, FILES, {"facts": {}, "places": 2})
    wait_for((folder / "part-00000.ranges").exists)
    os.kill(worlds[0]._child[0].pid, number)
    with writer(folder, FILES, 1) as part:
        part.finish()
    assert worlds[0].wait(60) == tmp_path / "step-00000001"


def test_nor_while_it_starts(tmp_path: Path) -> None:
    with Background(0) as background:
        background.start(prepare(tmp_path, 1, ()), (), {"facts": {}, "places": 1})
        assert background._child is not None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            background._child[0].send_signal(number)
        assert background.wait(60) == tmp_path / "step-00000001"


def test_memory_that_is_not_there_is_refused(tmp_path: Path, worlds: list[Background]) -> None:
    worlds[0].begin()
    worlds[0].write("dense/bias", 0, bytes(8))
    os.ftruncate(worlds[0]._shared(), 4)
    worlds[0].start(prepare(tmp_path, 1, FILES), FILES, {"facts": {}, "places": 1})
    with pytest.raises(CheckpointError, match="memory for a checkpoint: is cut short") as found:
        worlds[0].wait(60)
    assert found.value.tensor == "dense/bias"
    with pytest.raises(CheckpointError, match="is no JSON"):
        worlds[0].start(tmp_path, FILES, {"facts": {"x": float("nan")}, "places": 1})


def test_memory_that_is_full_is_told(tmp_path: Path, worlds: list[Background]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    worlds[0].begin()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        with pytest.raises(CheckpointError, match="memory for a checkpoint: File too large") as found:
            worlds[0].write("dense/bias", 0, bytes(8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found.value.tensor == "dense/bias"


PARENT = """
import sys, time
from pathlib import Path
from tests.checkpoint.samples import prepare
from unidist.checkpoint.background import Background
from unidist.checkpoint.tensors import Tensor, files_of

files = files_of([Tensor("a", "uint8", (1 << 20,))])
folder = prepare(Path(sys.argv[1]), 1, files)
background = Background(0)
background.begin()
background.write("a", 0, b"1" * (1 << 20))
background.start(folder, files, {"facts": {}, "places": 2})
print(background._child[0].pid, flush=True)
time.sleep(600)
"""


def test_the_writer_ends_with_its_parent_and_nothing_counts(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    part = tmp_path / "step-00000001.tmp" / "part-00000.ranges"
    wait_for(part.exists)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    # It waits for the second part, which comes too late.
    with writer(part.parent, files_of([Tensor("a", "uint8", (1 << 20,))]), 1) as second:
        second.finish()
    wait_for(lambda: not alive(child))
    assert directory_of(tmp_path).steps() == []


ENDING = """
import atexit, sys
from pathlib import Path
from tests.checkpoint.samples import prepare
from unidist.checkpoint.background import Background
from unidist.checkpoint.tensors import Tensor, files_of

# As what writes checkpoints does, before anything else that runs when a program ends.
begun = []
atexit.register(lambda: [one.wait() for one in begun])
files = files_of([Tensor("a", "uint8", (1 << 20,))])
folder = prepare(Path(sys.argv[1]), 1, files)
begun.append(Background(0))
begun[0].begin()
begun[0].write("a", 0, b"1" * (1 << 20))
begun[0].start(folder, files, {"facts": {}, "places": 1})
print(begun[0]._child[0].pid, flush=True)
"""


def test_a_program_that_ends_can_wait_for_the_writer(tmp_path: Path) -> None:
    """Nothing else ends it first."""
    done = subprocess.run([sys.executable, "-c", ENDING, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert directory_of(tmp_path).steps() == [1]
    wait_for(lambda: not alive(int(done.stdout)))


def wait_for(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_writer_imports_no_framework() -> None:
    program = (
        "import sys, unidist.checkpoint.background\n"
        "print([name for name in ('keras', 'torch', 'jax', 'tensorflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_arrays_of_every_layout_are_bytes_or_are_refused() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert writing.as_bytes(array).tobytes() == array.tobytes()
    assert writing.as_bytes(np.array(3.0)).tobytes() == np.array(3.0).tobytes()
    assert writing.as_bytes(b"abc").tolist() == [97, 98, 99]
    assert len(writing.as_bytes(b"")) == 0
    with pytest.raises(CheckpointError, match="is no run of bytes"):
        writing.as_bytes(array.T)
