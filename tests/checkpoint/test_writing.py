"""A step counts when all of it is on the disk: what may go wrong before, and which steps count after a crash."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.checkpoint.samples import IN_MEMORY, commit, contents, known, prepare, tensors, write, writer
from tests.support.sampling import SEED, unless_all
from unidist.checkpoint import manifest
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.remote import directory_of
from unidist.checkpoint.tensors import Tensor, files_of
from unidist.checkpoint.writing import part_of
from unidist.errors import CheckpointError

OF = [Tensor("a", "float32", (50, 70)), Tensor("b", "int8", (9000,), "optimizer")]
FILES = files_of(OF)
BYTES_OF = contents(OF)


def begun(directory: Path, *ranges: tuple[int, str, int, int], places: int = 2) -> Path:
    """A step whose places have written (place, tensor, begin, end)."""
    folder = prepare(directory, 1, FILES)
    for place in range(places):
        with writer(folder, FILES, place) as part:
            for of, name, begin, end in ranges:
                if of == place:
                    part.write(name, begin, BYTES_OF[name][begin:end])
            part.finish()
    return folder


WHOLE_B = (0, "b", 0, 9000)


def test_a_file_that_was_changed_meanwhile_is_told(tmp_path: Path) -> None:
    folder = begun(tmp_path, WHOLE_B, (1, "a", 0, 14000))
    os.truncate(folder / FILES[0].name, FILES[0].size - 1)
    with pytest.raises(CheckpointError, match="is not the file that was prepared"):
        commit(folder, FILES, {}, 2)


def test_processes_that_know_other_tensors_are_told(tmp_path: Path) -> None:
    folder = prepare(tmp_path, 1, FILES)
    others = files_of([OF[0], Tensor("b", "uint8", (9000,), "optimizer")])
    with pytest.raises(CheckpointError, match="was prepared for other tensors than this process has"):
        writer(folder, others, 1)
    with pytest.raises(CheckpointError, match=r"prepared\.json: is missing"):
        writer(write(tmp_path, 2, BYTES_OF, OF), FILES, 0)
    with pytest.raises(CheckpointError, match="No such file"):
        writer(tmp_path / "none", FILES, 0)


def test_pieces_that_follow_each_other_are_one_range(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    cuts = sorted(draw.sample(range(1, 14000), 30))
    folder = prepare(tmp_path, 1, FILES)
    with writer(folder, FILES, 0) as part:
        for begin, end in pairwise([0, *cuts, 14000]):
            part.write("a", begin, BYTES_OF["a"][begin:end])
        part.write("b", 0, BYTES_OF["b"])
        part.finish()
    assert json.loads((folder / part_of(0)).read_bytes().partition(b"\n")[0])["tensors"] == [["a", 1], ["b", 1]]
    commit(folder, FILES, {}, 1)
    with Reader(tmp_path, verify="all") as reader:
        assert reader.read("a").tobytes() == BYTES_OF["a"].tobytes()


def test_all_of_a_step_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    really_sync, really_write, really_rename = os.fsync, os.pwrite, Path.rename

    def note(what: str, opened: int) -> None:
        done.append((what, os.readlink(f"/proc/self/fd/{opened}").replace(".half", "")))

    monkeypatch.setattr(os, "fsync", lambda fd: (really_sync(fd), note("on the disk", fd))[0])
    monkeypatch.setattr(os, "pwrite", lambda fd, *given: (note("written", fd), really_write(fd, *given))[1])
    monkeypatch.setattr(Path, "rename", lambda at, to: (done.append(("renamed", str(at))), really_rename(at, to))[1])
    of = [*OF, Tensor("empty", "int8", (0,), "state")]
    folder = write(tmp_path, 1, contents(of), of, places=2)
    tmp = f"{folder}.tmp"
    last = {event: number for number, event in enumerate(done)}
    stands = last["renamed", tmp]
    files = [f"{tmp}/{path.name}" for path in folder.iterdir()]
    assert len(files) == 6
    for file in files:
        assert last.get(("written", file), 0) < last["on the disk", file] < stands
        assert last["on the disk", file] <= last["on the disk", f"{tmp}/manifest.json"]
    assert last["renamed", f"{tmp}/manifest.json.half"] < last["on the disk", tmp] < stands
    assert stands < last["on the disk", str(tmp_path)]


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: really(fd, data[:1000], offset))
    write(tmp_path, 1, BYTES_OF, OF)
    with Reader(tmp_path, verify="all") as reader:
        assert reader.read("a").tobytes() == BYTES_OF["a"].tobytes()


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """As on a full disk: a file of this process may not grow beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_and_leaves_nothing_that_counts(tmp_path: Path) -> None:
    write(tmp_path, 1, BYTES_OF, OF)
    with files_of_at_most(5000), pytest.raises(CheckpointError, match=r"step-00000002.*: File too large") as found:
        prepare(tmp_path, 2, FILES)
    assert found.value.file.endswith(FILES[0].name)
    folder = prepare(tmp_path, 2, FILES)
    with writer(folder, FILES, 0) as part:
        with files_of_at_most(5000), pytest.raises(CheckpointError, match=r"File too large \(tensor 'a'\)") as found:
            part.write("a", 0, BYTES_OF["a"])
        assert found.value.tensor == "a"
    with files_of_at_most(10), writer(folder, FILES, 0) as part:
        text = r"part-00000\.ranges: File too large"
        with pytest.raises(CheckpointError, match=text):
            part.finish()
    assert directory_of(tmp_path).steps() == [1]
    write(tmp_path, 2, BYTES_OF, OF)
    assert directory_of(tmp_path).steps() == [1, 2]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: File exists"):
        prepare(tmp_path / "file", 1, FILES)
    with pytest.raises(CheckpointError, match="sub: Not a directory"):
        prepare(tmp_path / "file" / "sub", 1, FILES)
    for step in (-1, 10**12, True, 1.5):
        with pytest.raises(CheckpointError, match="a step is a number from 0 to"):
            prepare(tmp_path, step, FILES)


@pytest.mark.parametrize("left", ["folder", "file", "link"])
def test_what_an_earlier_try_left_is_removed(tmp_path: Path, left: str) -> None:
    path = tmp_path / "step-00000001.tmp"
    if left == "folder":
        begun(tmp_path)
        (path / "failed-0").write_text("")
    elif left == "file":
        path.write_text("")
    else:
        (tmp_path / "mine").mkdir()
        path.symlink_to(tmp_path / "mine")
    folder = prepare(tmp_path, 1, FILES)
    assert sorted(one.name for one in folder.iterdir()) == sorted([*(file.name for file in FILES), "prepared.json"])
    assert left != "link" or not list((tmp_path / "mine").iterdir())


def test_steps_are_those_with_a_manifest(tmp_path: Path) -> None:
    assert (directory_of(tmp_path / "none").steps(), directory_of(tmp_path).latest()) == ([], None)
    for step in (100, 3, 123_456_789):
        write(tmp_path, step, BYTES_OF, OF)
    for name in ("step-00000007", "step-00000008.tmp", "step-9", "step-000000009", "best", "step-00000010.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00001.safetensors").write_text("")
    for name in ("step-00000008.tmp", "step-9", "step-000000009", "best", "step-00000010.removed"):
        (tmp_path / name / manifest.MANIFEST).write_text("{}")
    (tmp_path / "step-00000011").write_text("")
    assert directory_of(tmp_path).steps() == [3, 100, 123_456_789]
    assert directory_of(tmp_path).latest() == 123_456_789
    assert directory_of(tmp_path).find(3) == tmp_path / "step-00000003"
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 7; the last ones: 3, 100, 123456789"):
        directory_of(tmp_path).find(7)


def test_old_steps_are_removed_and_later_ones_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 9):
        write(tmp_path, step, BYTES_OF, OF)
    for name in ("step-00000002.tmp", "step-00000001.removed", "step-00000007.tmp", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000003.replaced")
    assert directory_of(tmp_path).prune(keep=2, newest=4) == [1, 2]
    left = ["other", "step-00000003", "step-00000004", "step-00000007.tmp", "step-00000009"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert directory_of(tmp_path).prune(keep=2, newest=4) == []
    assert directory_of(tmp_path).prune(keep=1, newest=4) == [3]
    with pytest.raises(CheckpointError, match="keep must be 1 or more, got 0"):
        directory_of(tmp_path).prune(keep=0, newest=4)


def test_a_step_is_written_anew_and_the_old_one_counts_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between any two changes of names leaves one of the two."""
    other = contents(OF, seed=1)
    write(tmp_path, 1, BYTES_OF, OF)
    seen: list[bytes] = []
    really_rename, really_remove = Path.rename, shutil.rmtree

    def look() -> None:
        assert directory_of(tmp_path).latest() == 1
        with Reader(tmp_path, verify="all") as reader:
            seen.append(reader.read("a").tobytes())

    def rename(path: Path, target: Path) -> Path:
        look()
        found = really_rename(path, target)
        look()
        return found

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (look(), really_remove(path), look()))
    write(tmp_path, 1, other, OF)
    old, new = BYTES_OF["a"].tobytes(), other["a"].tobytes()
    assert set(seen) == {old, new}
    assert seen == sorted(seen, key=[old, new].index)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("stands", [True, False])
def test_what_a_crash_left_while_a_step_was_replaced_is_cleared_up(tmp_path: Path, stands: bool) -> None:
    folder = write(tmp_path, 1, BYTES_OF, OF)
    shutil.copytree(folder, tmp_path / "step-00000001.replaced")
    if not stands:
        shutil.rmtree(folder)
    assert directory_of(tmp_path).steps() == [1]
    other = contents(OF, seed=1)
    write(tmp_path, 1, other, OF)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    with Reader(tmp_path) as reader:
        assert reader.read("a").tobytes() == other["a"].tobytes()


def test_a_folder_without_a_manifest_gives_way(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "notes").write_text("")
    write(tmp_path, 1, BYTES_OF, OF)
    assert directory_of(tmp_path).steps() == [1]


# For each line that it reads: a process that writes steps of known contents, every third one twice, until it is killed.
ENDLESS = """
import os
import sys
from pathlib import Path
from tests.checkpoint.samples import known, tensors, write
from unidist.checkpoint.remote import directory_of

def work(first):
    of = tensors()
    for step in range(first, 10**6):
        for again in range(2 if step % 3 == 0 else 1):
            write(Path(sys.argv[1]), step, known(step), of, places=2, largest=20_000)
        directory_of(sys.argv[1]).prune(2, step)

for line in sys.stdin:
    process = os.fork()
    if not process:
        work(int(line))
    print(process, flush=True)
    os.waitpid(process, 0)
    print("ended", flush=True)
"""


def test_whenever_a_writer_is_killed_the_latest_step_is_whole(tmp_path: Path) -> None:
    directory = Path(IN_MEMORY or tmp_path) / f"unidist-killed-{os.getpid()}"
    draw = random.Random(SEED)
    command = [sys.executable, "-c", ENDLESS, str(directory)]
    last, pipe, longest = 0, subprocess.PIPE, 0.1
    try:
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as writers:
            for kills in itertools.count():
                if kills >= unless_all(30, 200) and last > 10:
                    break
                print(last + 1, file=writers.stdin)
                process = int(writers.stdout.readline())
                time.sleep(draw.uniform(0, longest))
                os.kill(process, signal.SIGKILL)
                assert writers.stdout.readline() == "ended\n"
                before, last = last, look_at_the_latest(directory, last)
                # On a busy machine a step takes longer.
                longest = longest * 1.2 if last == before else max(0.1, longest / 1.2)
            writers.stdin.close()
        write(directory, last + 1, known(last + 1), tensors())
        directory_of(directory).prune(1, last + 1)
        assert [path.name for path in directory.iterdir()] == [f"step-{last + 1:08d}"]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def look_at_the_latest(directory: Path, before: int) -> int:
    """The latest step, which is whole, and no older than that of before."""
    step = directory_of(directory).latest()
    if step is None:
        assert before == 0
        return 0
    assert step >= before
    of = known(step)
    with Reader(directory, verify="all") as reader:
        assert (reader.step, reader.facts) == (step, {"step": step})
        assert set(reader.tensors) == set(of)
        assert all(reader.read(name).tobytes() == of[name].tobytes() for name in of)
    return step
