"""Checkpoints in object stores, which fsspec's own in memory stands for: what is written is read, or nothing counts."""

from __future__ import annotations

import builtins
import re
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors import safe_open

from tests.checkpoint.samples import contents, region_of, tensors
from unidist.backends import installed
from unidist.checkpoint import command, stores
from unidist.checkpoint.manifest import Manifest, Told
from unidist.checkpoint.opened import Pieces
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.remote import RemoteDirectory
from unidist.checkpoint.stores import Store
from unidist.checkpoint.tensors import FileSpec, Tensor, file_of, files_of
from unidist.errors import CheckpointError


@pytest.fixture
def address() -> Iterator[str]:
    found = f"memory://{uuid.uuid4().hex}/run"
    yield found
    Store(found).remove("")


def write(address: str, step: int, seed: int, places: int = 3, keep: int | None = None) -> str:
    of = tensors()
    files, bytes_of = files_of(of), contents(of, seed)
    directory = RemoteDirectory(address)
    name = directory.prepare(step, files)
    for place in range(places):
        with directory.writer(name, files, place) as part:
            for number, (tensor, data) in enumerate(bytes_of.items()):
                bounds = [0, len(data) // 3, len(data) // 2, len(data)]
                for k, (begin, end) in enumerate(pairwise(bounds)):
                    if (number + k) % places == place:
                        part.write(tensor, begin, data[begin:end])
            part.finish()
    stands = directory.commit(name, files, {"note": step}, places)
    if keep is not None:
        directory.prune(keep, step)
    return stands


def objects(address: str) -> dict[str, bytes]:
    """All that is there."""
    system, root = fsspec.core.url_to_fs(address)
    return {path.removeprefix(f"{root}/"): system.cat_file(path) for path in system.find(root)}


def read_all(address: str, seed: int, verify: Any = "read", step: Any = "latest") -> None:
    of = tensors()
    bytes_of = contents(of, seed)
    with Reader(address, step, verify) as reader:
        assert list(reader.tensors.values()) == sorted(of, key=lambda t: list(reader.tensors).index(t.name))
        for tensor in of:
            np.testing.assert_array_equal(reader.read(tensor.name), bytes_of[tensor.name], err_msg=tensor.name)


@pytest.mark.parametrize("verify", ["read", "all", "off"])
def test_what_processes_write_is_read(verify: Any, address: str) -> None:
    assert write(address, 12, seed=1) == f"{address}/step-00000012.json"
    read_all(address, 1, verify)
    with Reader(address) as reader:
        assert (reader.step, reader.facts, reader.where) == (12, {"note": 12}, address)
        assert sum(reader.written_by("dense/kernel").values()) == 64 * 96 * 4
        assert set(reader.written_by("dense/kernel")) == {0, 1, 2}
    assert not [name for name in objects(address) if name.endswith(("part-00000.ranges", ".half"))]


@pytest.mark.parametrize("window", [64, 1000, stores._WINDOW])
def test_regions(window: int, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_WINDOW", window)
    write(address, 1, seed=2)
    tensor = next(tensor for tensor in tensors() if tensor.name == "dense/kernel")
    data = contents(tensors(), 2)["dense/kernel"]
    with Reader(address) as reader:
        for region in (((3, 50), (7, 60)), ((0, 64), (95, 1)), ((63, 1), (0, 96)), ((5, 0), (0, 96))):
            np.testing.assert_array_equal(reader.read(tensor.name, region), region_of(data, tensor, region).reshape(-1))


def test_steps_are_replaced_and_pruned(address: str) -> None:
    assert RemoteDirectory(address).steps() == []
    for step in (1, 2, 3):
        write(address, step, seed=step)
    write(address, 2, seed=20)
    read_all(address, 20, step=2)
    assert sum("step-00000002-" in name and "manifest" not in name for name in objects(address)) == 5
    write(address, 4, seed=4, keep=2)
    assert RemoteDirectory(address).steps() == [3, 4]
    assert {name[:13] for name in objects(address)} == {"step-00000003", "step-00000004"}
    read_all(address, 3, "all", step=3)


def test_what_is_half_written_does_not_count(address: str) -> None:
    """Whatever object a writing ends before, and the step of before stands."""
    write(address, 1, seed=1)
    before = objects(address)
    write(address, 1, seed=2)
    after = objects(address)
    new = [name for name in after if name not in before]
    store = Store(address)
    for last in range(len(new) + 1):
        store.remove("")
        for name in [*before, *new[:last]]:
            store.write(name, [before.get(name) or after[name]])
        read_all(address, 1, "all")
    directory = RemoteDirectory(address)
    files = files_of(tensors())
    with pytest.raises(CheckpointError, match=r"part-00000\.ranges: is missing in memory://"):
        directory.commit(directory.prepare(3, files), files, {}, 2)
    assert RemoteDirectory(address).steps() == [1]


def test_bytes_that_nobody_wrote(address: str) -> None:
    directory, files = RemoteDirectory(address), files_of(tensors())
    name = directory.prepare(3, files)
    with directory.writer(name, files, 0) as part:
        part.write("dense/bias", 0, np.zeros(96, np.float32))
        part.finish()
    with pytest.raises(CheckpointError, match="were not written"):
        directory.commit(name, files, {}, 1)
    assert RemoteDirectory(address).steps() == []


def test_what_parts_do_not_hold_is_an_error() -> None:
    tensor = Tensor("a", "float32", (4,))

    def part(*pieces: tuple[int, int]) -> FileSpec:
        return file_of("part-00000.safetensors", [Tensor(f"a@{at}", "uint8", (count,)) for at, count in pieces])

    told = Manifest(1, "", (), Told("", 0, 0, 0), Told("", 0, 0, 0), {}, (tensor,), "step")
    found = Pieces(told, [part((0, 5), (5, 11))]).of("a", 3, 7)
    assert [piece[:2] for piece in found] == [(3, 5), (5, 7)]
    for pieces, at in (((0, 5), (6, 10)), 5), (((0, 5), (4, 12)), 4), (((0, 5), (5, 10)), 15), (((1, 15),), 0), ((), 0):
        with pytest.raises(CheckpointError, match=f"its bytes from {at} on are in no part, or in two"):
            Pieces(told, [part(*pieces)])
    for name in ("b@0", "a", "a@x"):
        with pytest.raises(CheckpointError, match="no part of a tensor"):
            Pieces(told, [file_of("part-00000.safetensors", [Tensor(name, "uint8", (16,))])])


def test_windows_are_asked_for_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a tensor are many runs."""
    write(address, 1, seed=2)
    asked: list[tuple[str, int, int]] = []
    read = Store.read

    def counted(self: Store, name: str, begin: int = 0, end: int | None = None) -> bytes:
        asked.append((name, begin, end or 0))
        return read(self, name, begin, end)

    monkeypatch.setattr(Store, "read", counted)
    with Reader(address) as reader:
        reader.read("dense/kernel", ((0, 64), (7, 3)))
    assert len(asked) == len(set(asked)) == 1 + 3 + 1


def test_damage_is_found_and_named(address: str) -> None:
    write(address, 5, seed=1)
    store = Store(address)
    for name, content in objects(address).items():
        for at in (0, len(content) // 2, len(content) - 1):
            store.write(name, [content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]])
            with pytest.raises(CheckpointError):
                read_all(address, 1, "all")
        store.write(name, [content[:-1]])
        with pytest.raises(CheckpointError):
            read_all(address, 1, "all")
        store.remove(name)
        with pytest.raises(CheckpointError, match=r"missing|no checkpoint"):
            read_all(address, 1, "all")
        store.write(name, [content])
    read_all(address, 1, "all")


def test_a_part_of_another_writing_is_an_error(address: str) -> None:
    write(address, 5, seed=1)
    first = objects(address)
    write(address, 5, seed=1)
    store = Store(address)
    old = next(name for name in first if name.endswith("part-00001.safetensors"))
    new = next(name for name in objects(address) if name.endswith("part-00001.safetensors"))
    store.write(new, [first[old]])
    with pytest.raises(CheckpointError, match="of another writing of step 5"):
        read_all(address, 1, "off")


def test_what_cannot_be_asked_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        Reader(address)
    write(address, 5, seed=1)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 6; the last ones: 5"):
        Reader(address, 6)
    with pytest.raises(CheckpointError, match=r"nosuch://a: ValueError: Protocol not known"):
        Reader("nosuch://a")
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "fsspec":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=re.escape(installed.install("remote"))):
        Reader(address)


def test_the_command(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(address, 5, seed=1)
    write(address, 6, seed=2)

    def run(*arguments: str) -> int:
        return command.main(arguments, lambda *_: pytest.fail("not by Keras"))

    assert run("list", address) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:] if line.split()] == ["5", "6"]
    assert run("verify", address) == 0
    assert run("show", address, "--step", "5") == 0
    assert f"step 5 in {address}/step-00000005-" in capsys.readouterr().out
    assert run("diff", address, address) == 0
    assert run("diff", address, address, "--left-step", "5") == 1
    assert run("export", address, str(tmp_path / "out"), "--all") == 0
    with safe_open(tmp_path / "out" / "model-00001-of-00001.safetensors", "np") as file:
        kernel = file.get_tensor("dense/kernel")
    np.testing.assert_array_equal(kernel.reshape(-1).view(np.uint8), contents(tensors(), 2)["dense/kernel"])
    store, name = Store(address), next(name for name in objects(address) if "part-00001" in name and "006-" in name)
    store.write(name, [store.read(name)[:-4] + b"none"])
    assert run("verify", address) == 1
    assert "is damaged" in capsys.readouterr().out
