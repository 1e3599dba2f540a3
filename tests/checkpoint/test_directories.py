"""Folders and object stores refuse the same: what no process may write, and what no process has written."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import pytest

from unidist.checkpoint.directory import Directory
from unidist.checkpoint.remote import directory_of
from unidist.checkpoint.tensors import Tensor, files_of
from unidist.checkpoint.writing import part_of
from unidist.errors import CheckpointError

OF = [Tensor("a", "float32", (50, 70)), Tensor("b", "int8", (9000,), "optimizer")]
FILES = files_of(OF)
ZEROS = {"a": np.zeros(14000, np.uint8), "b": np.zeros(9000, np.uint8)}


@pytest.fixture(params=["folder", "store"])
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path_factory.mktemp("run"))
        return
    found = f"memory://{uuid.uuid4().hex}/run"
    yield found
    system, root = fsspec.core.url_to_fs(found)
    if system.exists(root):
        system.rm(root, recursive=True)


@pytest.fixture
def directory(where: str) -> Directory:
    return directory_of(where)


def begun(directory: Directory, *ranges: tuple[int, str, int, int]) -> str:
    """A step whose two processes have written (place, tensor, begin, end)."""
    name = directory.prepare(1, FILES)
    for place in range(2):
        with directory.writer(name, FILES, place) as part:
            for of, tensor, begin, end in ranges:
                if of == place:
                    part.write(tensor, begin, ZEROS[tensor][begin:end])
            part.finish()
    return name


WHOLE_A, WHOLE_B = (1, "a", 0, 14000), (0, "b", 0, 9000)


@pytest.mark.parametrize(
    ("name", "begin", "nbytes"),
    [("none", 0, 1), ("none", 0, 0), ("a", 13999, 2), ("a", 14001, 0), ("a", -1, 1), ("a", 2**63, 1), ("b", 0, 9001)],
)
def test_what_is_no_part_of_a_tensor_is_not_written(directory: Directory, name: str, begin: int, nbytes: int) -> None:
    step = directory.prepare(1, FILES)
    with directory.writer(step, FILES, 0) as part:
        with pytest.raises(CheckpointError, match=f"tensor '{name}'") as found:
            part.write(name, begin, bytes(nbytes))
        assert found.value.tensor == name
        # It has taken nothing of it.
        for tensor, data in ZEROS.items():
            part.write(tensor, 0, data)
        part.finish()
    directory.commit(step, FILES, {}, 1)
    assert directory.latest() == 1


def test_an_array_with_gaps_is_not_written(directory: Directory) -> None:
    part = directory.writer(directory.prepare(1, FILES), FILES, 0)
    with part, pytest.raises(CheckpointError, match="is no run of bytes"):
        part.write("a", 0, np.zeros((50, 70), np.float32)[:, ::2])


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
    directory: Directory, ranges: list[tuple[int, str, int, int]], tensor: str, text: str
) -> None:
    name = begun(directory, *ranges)
    with pytest.raises(CheckpointError, match=text) as found:
        directory.commit(name, FILES, {}, 2)
    assert found.value.tensor == tensor
    assert directory.steps() == []


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": {1, 2}}, {"x": "y" * (9 << 20)}])
def test_facts_that_are_no_json_are_refused(directory: Directory, facts: dict[str, Any]) -> None:
    name = begun(directory, WHOLE_A, WHOLE_B)
    with pytest.raises(CheckpointError, match=r"manifest\.json: "):
        directory.commit(name, FILES, facts, 2)
    assert directory.steps() == []


def description(where: str, name: str, place: int) -> tuple[Any, str]:
    """The file in which a process describes its part: (its file system, its path)."""
    system, root = fsspec.core.url_to_fs(where)
    return system, f"{root}/{name}/{part_of(place)}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"{}\n",
        b"[]\n",
        b"null",
        b'{"writing": "0", "place": 1}\n',
        b'{"tensors": []}\n',
        b"[" * (1 << 20),
        b"\xff\xfe",
    ],
    ids=["nothing", "an object", "a line", "a list", "null", "another", "tensors", "deep", "no text"],
)
def test_a_part_that_is_not_described_is_told(where: str, directory: Directory, content: bytes) -> None:
    name = begun(directory, WHOLE_A, WHOLE_B)
    system, path = description(where, name, 1)
    system.pipe_file(path, content)
    with pytest.raises(CheckpointError, match=r"part-\d+\.") as found:
        directory.commit(name, FILES, {}, 2)
    assert found.value.file == path.rpartition("/")[2]
    assert directory.latest() is None


def test_a_part_that_is_missing_damaged_or_of_another_try_is_told(where: str, directory: Directory) -> None:
    name = begun(directory, WHOLE_A, WHOLE_B)
    system, path = description(where, name, 1)
    content = system.cat_file(path)
    told, _, numbers = content.partition(b"\n")
    other, _, _ = system.cat_file(description(where, name, 0)[1]).partition(b"\n")
    for changed, text in (
        (content[:-1] + bytes([content[-1] ^ 1]), "is damaged"),
        (content[:-4], "is damaged"),
        (other + b"\n" + numbers, "is of another try"),
        (told.replace(b'"writing": "', b'"writing": "0') + b"\n" + numbers, "is of another try"),
    ):
        system.pipe_file(path, changed)
        with pytest.raises(CheckpointError, match=rf"part-00001\.ranges: .*({text})"):
            directory.commit(name, FILES, {}, 2)
    system.pipe_file(path, content)
    with pytest.raises(CheckpointError, match=r"part-00002\.ranges: is missing"):
        directory.commit(name, FILES, {}, 3)
    assert directory.latest() is None
    assert directory.commit(name, FILES, {}, 2) == str(directory.find(1))


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": [["a", 2]]},
        {"tensors": [["a", 0]]},
        {"tensors": [["a", -1], ["a", 2]]},
        {"tensors": [["a", True]]},
        {"tensors": [["none", 1]]},
        {"tensors": [["a"]]},
        {"tensors": [7]},
        {"tensors": {"a": 1}},
        {"file": 7},
        {"file": {"name": "a", "size": -1, "length": 0, "crc32c": 0}},
        {"crc32c": None},
        {"place": None},
    ],
    ids=str,
)
def test_a_part_of_other_numbers_than_it_has_is_told(where: str, directory: Directory, change: dict[str, Any]) -> None:
    name = begun(directory, WHOLE_A, WHOLE_B)
    system, path = description(where, name, 1)
    told, _, numbers = system.cat_file(path).partition(b"\n")
    system.pipe_file(path, json.dumps({**json.loads(told), **change}).encode() + b"\n" + numbers)
    with pytest.raises(CheckpointError, match=r"part-00001\.ranges: ") as found:
        directory.commit(name, FILES, {}, 2)
    assert found.value.file == part_of(1)
    assert directory.latest() is None


def test_an_object_of_which_nobody_says_its_name_is_told() -> None:
    where = f"memory://{uuid.uuid4().hex}/run"
    directory = directory_of(where)
    name = begun(directory, WHOLE_A, WHOLE_B)
    system, path = description(where, name, 1)
    told, _, numbers = system.cat_file(path).partition(b"\n")
    system.pipe_file(path, json.dumps({**json.loads(told), "file": None}).encode() + b"\n" + numbers)
    with pytest.raises(CheckpointError, match="a process does not say which file it wrote"):
        directory.commit(name, FILES, {}, 2)
