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

from tests.checkpoint.samples import IN_MEMORY, contents, known, tensors, write
from tests.support.sampling import SEED, unless_all
from unidist.checkpoint import folders, manifest, writing
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.tensors import Tensor, files_of
from unidist.errors import CheckpointError

OF = [Tensor("a", "float32", (50, 70)), Tensor("b", "int8", (9000,), "optimizer")]
FILES = files_of(OF)
BYTES_OF = contents(OF)


def begun(directory: Path, *ranges: tuple[int, str, int, int], places: int = 2) -> Path:
    """A step whose places have written (place, tensor, begin, end)."""
    folder = writing.prepare(directory, 1, FILES)
    for place in range(places):
        with writing.PartWriter(folder, FILES, place) as part:
            for of, name, begin, end in ranges:
                if of == place:
                    part.write(name, begin, BYTES_OF[name][begin:end])
            part.finish()
    return folder


WHOLE_B = (0, "b", 0, 9000)


@pytest.mark.parametrize(
    ("ranges", "tensor", "text"),
    [
        ([WHOLE_B], "a", r"bytes 0\.\.14000 were not written"),
        ([WHOLE_B, (0, "a", 0, 5000), (1, "a", 5001, 14000)], "a", r"bytes 5000\.\.5001 were not written"),
        ([WHOLE_B, (0, "a", 0, 5001), (1, "a", 5000, 14000)], "a", r"bytes 5000\.\.5001 were written twice"),
        ([WHOLE_B, (0, "a", 0, 14000), (1, "a", 0, 14000)], "a", "were written twice"),
        ([WHOLE_B, (0, "a", 0, 14000), (1, "b", 8999, 9000)], "b", "were written twice"),
        ([WHOLE_B, (0, "a", 0, 13999)], "a", r"bytes 13999\.\.14000 were not written"),
        ([WHOLE_B, (1, "a", 1, 14000)], "a", r"bytes 0\.\.1 were not written"),
    ],
)
def test_bytes_that_nobody_wrote_or_two_did_are_told(
    tmp_path: Path, ranges: list[tuple[int, str, int, int]], tensor: str, text: str
) -> None:
    folder = begun(tmp_path, *ranges)
    with pytest.raises(CheckpointError, match=text) as found:
        writing.commit(folder, FILES, {}, 2)
    assert found.value.tensor == tensor
    assert folders.steps(tmp_path) == []


def test_a_part_that_is_missing_damaged_or_of_another_try_is_told(tmp_path: Path) -> None:
    folder = begun(tmp_path, WHOLE_B, (1, "a", 0, 14000))
    with pytest.raises(CheckpointError, match=r"part-2\.json: is missing"):
        writing.commit(folder, FILES, {}, 3)
    binary = folder / writing.binary_of(1)
    content = binary.read_bytes()
    binary.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"part-1\.bin: is damaged"):
        writing.commit(folder, FILES, {}, 2)
    binary.write_bytes(content)
    told = json.loads((folder / writing.part_of(0)).read_text())
    (folder / writing.part_of(0)).write_text(json.dumps({**told, "writing": "0" * 32}))
    with pytest.raises(CheckpointError, match=r"part-0\.json: is of another try"):
        writing.commit(folder, FILES, {}, 2)
    (folder / writing.part_of(0)).write_text(json.dumps(told))
    os.truncate(folder / FILES[0].name, FILES[0].size - 1)
    with pytest.raises(CheckpointError, match="is not the file that was prepared"):
        writing.commit(folder, FILES, {}, 2)


def test_processes_that_know_other_tensors_are_told(tmp_path: Path) -> None:
    folder = writing.prepare(tmp_path, 1, FILES)
    others = files_of([OF[0], Tensor("b", "uint8", (9000,), "optimizer")])
    with pytest.raises(CheckpointError, match="was prepared for other tensors than this process has"):
        writing.PartWriter(folder, others, 1)
    with pytest.raises(CheckpointError, match=r"prepared\.json: is missing"):
        writing.PartWriter(write(tmp_path, 2, BYTES_OF, OF), FILES, 0)
    with pytest.raises(CheckpointError, match="No such file"):
        writing.PartWriter(tmp_path / "none", FILES, 0)


def test_what_is_no_part_of_a_tensor_is_not_written(tmp_path: Path) -> None:
    folder = writing.prepare(tmp_path, 1, FILES)
    with writing.PartWriter(folder, FILES, 0) as part:
        for name, begin, nbytes in (("a", 13999, 2), ("a", -1, 1), ("none", 0, 1), ("a", 2**63, 1)):
            with pytest.raises(CheckpointError) as found:
                part.write(name, begin, bytes(nbytes))
            assert found.value.tensor == name


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": {1, 2}}, {"x": "y" * (9 << 20)}])
def test_facts_that_are_no_json_are_refused(tmp_path: Path, facts: dict) -> None:
    folder = begun(tmp_path, WHOLE_B, (1, "a", 0, 14000))
    with pytest.raises(CheckpointError, match=r"manifest\.json: "):
        writing.commit(folder, FILES, facts, 2)
    assert folders.steps(tmp_path) == []


def test_pieces_that_follow_each_other_are_one_range(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    cuts = sorted(draw.sample(range(1, 14000), 30))
    folder = writing.prepare(tmp_path, 1, FILES)
    with writing.PartWriter(folder, FILES, 0) as part:
        for begin, end in pairwise([0, *cuts, 14000]):
            part.write("a", begin, BYTES_OF["a"][begin:end])
        part.write("b", 0, BYTES_OF["b"])
        part.finish()
    assert json.loads((folder / writing.part_of(0)).read_text())["tensors"] == [["a", 1], ["b", 1]]
    writing.commit(folder, FILES, {}, 1)
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
        writing.prepare(tmp_path, 2, FILES)
    assert found.value.file.endswith(FILES[0].name)
    folder = writing.prepare(tmp_path, 2, FILES)
    with writing.PartWriter(folder, FILES, 0) as part:
        with files_of_at_most(5000), pytest.raises(CheckpointError, match=r"File too large \(tensor 'a'\)") as found:
            part.write("a", 0, BYTES_OF["a"])
        assert found.value.tensor == "a"
    with files_of_at_most(10), writing.PartWriter(folder, FILES, 0) as part:
        text = r"part-0\.json: File too large"
        with pytest.raises(CheckpointError, match=text):
            part.finish()
    assert folders.steps(tmp_path) == [1]
    write(tmp_path, 2, BYTES_OF, OF)
    assert folders.steps(tmp_path) == [1, 2]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: File exists"):
        writing.prepare(tmp_path / "file", 1, FILES)
    with pytest.raises(CheckpointError, match="sub: Not a directory"):
        writing.prepare(tmp_path / "file" / "sub", 1, FILES)
    for step in (-1, 10**12, True, 1.5):
        with pytest.raises(CheckpointError, match="a step is a number from 0 to"):
            writing.prepare(tmp_path, step, FILES)


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
    folder = writing.prepare(tmp_path, 1, FILES)
    assert sorted(one.name for one in folder.iterdir()) == sorted([*(file.name for file in FILES), "prepared.json"])
    assert left != "link" or not list((tmp_path / "mine").iterdir())


def test_steps_are_those_with_a_manifest(tmp_path: Path) -> None:
    assert (folders.steps(tmp_path / "none"), folders.latest(tmp_path)) == ([], None)
    for step in (100, 3, 123_456_789):
        write(tmp_path, step, BYTES_OF, OF)
    for name in ("step-00000007", "step-00000008.tmp", "step-9", "step-000000009", "best", "step-00000010.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00001.safetensors").write_text("")
    for name in ("step-00000008.tmp", "step-9", "step-000000009", "best", "step-00000010.removed"):
        (tmp_path / name / manifest.MANIFEST).write_text("{}")
    (tmp_path / "step-00000011").write_text("")
    assert folders.steps(tmp_path) == [3, 100, 123_456_789]
    assert folders.latest(tmp_path) == 123_456_789
    assert folders.step_folder(tmp_path, 3) == tmp_path / "step-00000003"
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 7; the last ones: 3, 100, 123456789"):
        folders.step_folder(tmp_path, 7)


def test_old_steps_are_removed_and_later_ones_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 9):
        write(tmp_path, step, BYTES_OF, OF)
    for name in ("step-00000002.tmp", "step-00000001.removed", "step-00000007.tmp", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000003.replaced")
    assert folders.prune(tmp_path, keep=2, newest=4) == [1, 2]
    left = ["other", "step-00000003", "step-00000004", "step-00000007.tmp", "step-00000009"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert folders.prune(tmp_path, keep=2, newest=4) == []
    assert folders.prune(tmp_path, keep=1, newest=4) == [3]
    with pytest.raises(CheckpointError, match="keep must be 1 or more, got 0"):
        folders.prune(tmp_path, keep=0, newest=4)


def test_a_step_is_written_anew_and_the_old_one_counts_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between any two changes of names leaves one of the two."""
    other = contents(OF, seed=1)
    write(tmp_path, 1, BYTES_OF, OF)
    seen: list[bytes] = []
    really_rename, really_remove = Path.rename, shutil.rmtree

    def look() -> None:
        assert folders.latest(tmp_path) == 1
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
    assert folders.steps(tmp_path) == [1]
    other = contents(OF, seed=1)
    write(tmp_path, 1, other, OF)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    with Reader(tmp_path) as reader:
        assert reader.read("a").tobytes() == other["a"].tobytes()


def test_a_folder_without_a_manifest_gives_way(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "notes").write_text("")
    write(tmp_path, 1, BYTES_OF, OF)
    assert folders.steps(tmp_path) == [1]


# For each line that it reads: a process that writes steps of known contents, every third one twice, until it is killed.
ENDLESS = """
import os
import sys
from pathlib import Path
from tests.checkpoint.samples import known, tensors, write
from unidist.checkpoint import folders

def work(first):
    of = tensors()
    for step in range(first, 10**6):
        for again in range(2 if step % 3 == 0 else 1):
            write(Path(sys.argv[1]), step, known(step), of, places=2, largest=20_000)
        folders.prune(sys.argv[1], 2, step)

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
        folders.prune(directory, 1, last + 1)
        assert [path.name for path in directory.iterdir()] == [f"step-{last + 1:08d}"]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def look_at_the_latest(directory: Path, before: int) -> int:
    """The latest step, which is whole, and no older than that of before."""
    step = folders.latest(directory)
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
