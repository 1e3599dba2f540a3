"""Layers' files as tensors: names that lead nowhere else, bounds, and what a layer may not write."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoint.samples import contents, write
from unidist.checkpoint import assets
from unidist.checkpoint.command import export, main
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CheckpointError

OF = [
    Tensor("dense/kernel", "float32", (4, 3)),
    Tensor("text//assets/vocabulary.txt", "uint8", (40,), "asset"),
    Tensor("text//assets/in/empty", "uint8", (0,), "asset"),
    Tensor("text//own/weights", "float64", (5,), "asset"),
]


@pytest.mark.parametrize(
    "path",
    [
        *("", "/etc/passwd", "..", "../up", "in/../../up", "in/./x", "in//x", "in/", "..\\up", "a\0b", "x" * 201),
        "/".join("abcdefghijklmnopq"),
    ],
)
def test_a_path_that_leads_out_of_the_folder_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match="names no file within a layer's folder") as raised:
        assets.split(f"text//assets/{path}")
    assert raised.value.tensor == f"text//assets/{path}"


@pytest.mark.parametrize("name", ["text", "text/assets/x", "//assets/x", "text//other/x", ""])
def test_a_name_of_no_layer_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="belongs to no layer"):
        assets.split(name)


def test_names_are_taken_apart_as_they_were_put_together() -> None:
    assert assets.split(assets.file_name("a/assets", "in/x.txt")) == ("a/assets", True, "in/x.txt")
    # Keys are no paths.
    assert assets.split(assets.array_name("a", "../k//assets/")) == ("a", False, "../k//assets/")


def test_files_are_read_and_laid_out_again(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"\x00\xff\n")
    (tmp_path / "b").touch()
    found = assets.files_in(tmp_path)
    assert {path: content.tobytes() for path, content in found.items()} == {"b": b"", "in/a": b"\x00\xff\n"}
    with assets.temporary() as folder:
        assets.lay_out(Path(folder), found)
        assert (Path(folder) / "in" / "a").read_bytes() == b"\x00\xff\n"
        assert (os.stat(folder).st_mode & 0o777) == 0o700
        with pytest.raises(CheckpointError, match="File exists"):
            assets.lay_out(Path(folder), found)
        with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
            assets.lay_out(Path(folder), {"b/c": found["b"]})
    assert not os.path.exists(folder)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    """Of a link neither what it leads to is read, nor the folder."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("secret")
    (tmp_path / "in").mkdir()
    {
        "link": lambda: (tmp_path / "in" / "x").symlink_to(tmp_path / "out" / "secret"),
        "folder": lambda: (tmp_path / "in" / "x").symlink_to(tmp_path / "out"),
        "pipe": lambda: os.mkfifo(tmp_path / "in" / "x"),
    }[kind]()
    with pytest.raises(CheckpointError, match="wrote a link or the like"):
        assets.files_in(tmp_path / "in")


def test_bytes_are_bounded_before_they_are_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(assets.LARGEST + 1)
    with pytest.raises(CheckpointError, match=f"more than {assets.LARGEST} bytes"):
        assets.files_in(tmp_path)
    half = [Tensor(f"a//own/{k}", "uint8", (assets.LARGEST // 2 + 1,), "asset") for k in range(2)]
    assets.check_sizes(half[:1])
    with pytest.raises(CheckpointError, match="is the most: keep large arrays as variables"):
        assets.check_sizes(half)


def test_others_read_them_and_commands_show_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bytes_of = contents(OF)
    folder = write(tmp_path / "run", 3, bytes_of, OF, places=2)
    found = load_file(folder / "asset-00001-of-00001.safetensors")
    assert {name: value.tobytes() for name, value in found.items()} == {
        tensor.name: bytes_of[tensor.name].tobytes() for tensor in OF[1:]
    }
    with Reader(folder, verify="all") as reader:
        assert [tensor.kind for tensor in reader.tensors.values()].count("asset") == 3
    for command in (["list"], ["show"], ["verify"]):
        assert main([*command, str(tmp_path / "run")], lambda *args: None) == 0
    shown = capsys.readouterr().out
    assert "text//assets/vocabulary.txt" in shown
    assert "4 tensors" in shown
    other = contents(OF)
    other[OF[1].name] = other[OF[1].name][::-1].copy()
    write(tmp_path / "other", 3, other, OF)
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "other")], lambda *args: None) == 1
    assert "text//assets/vocabulary.txt: values differ" in capsys.readouterr().out
    assert export(folder, tmp_path / "plain") == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    main(["export", str(folder), str(tmp_path / "all"), "--all"], lambda *args: None)
    assert "asset-00001-of-00001.safetensors" in os.listdir(tmp_path / "all")


def test_a_bit_that_flips_in_a_vocabulary_is_found(tmp_path: Path) -> None:
    folder = write(tmp_path, 3, contents(OF), OF)
    path = folder / "asset-00001-of-00001.safetensors"
    content = np.fromfile(path, np.uint8)
    content[-1] ^= 1
    content.tofile(path)
    with Reader(folder) as reader, pytest.raises(CheckpointError, match=r"asset-00001.*vocabulary\.txt"):
        reader.read("text//assets/vocabulary.txt")
