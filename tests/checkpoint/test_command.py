"""`unidist checkpoint`: what it says, its exit codes, and what it exports."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.checkpoint.samples import contents, tensors, write
from unidist import cli
from unidist.checkpoint import command
from unidist.checkpoint.command import difference, numbers
from unidist.checkpoint.tensors import DTYPES, Tensor

OF = tensors()


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["checkpoint", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_list_tells_of_each_step_also_of_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "list", tmp_path) == (0, f"no checkpoint in {tmp_path}\n", "")
    for step in (3, 20):
        write(tmp_path, step, contents(OF), OF)
    (tmp_path / "step-00000003" / "model-00001-of-00001.safetensors").unlink()
    code, out, _ = told(capsys, "list", tmp_path)
    head, first, second = out.splitlines()
    assert code == 0
    assert head.split() == ["step", "written", "size", "tensors"]
    assert first.endswith("model-00001-of-00001.safetensors: is missing")
    nbytes = sum(tensor.nbytes for tensor in OF)
    assert second.split()[0] == "20"
    assert second.split()[3:] == [f"{nbytes / 1000:.1f}", "kB", str(len(OF))]
    code, _, err = told(capsys, "list", tmp_path / "none")
    assert (code, err) == (2, f"unidist: CheckpointError: {tmp_path / 'none'}: there is no such directory\n")


def test_show_tells_of_each_tensor_who_wrote_it_and_what_was_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 3, contents(OF), OF, places=3, cuts={"dense/kernel": [7, 100]}, facts={"epoch": 2})
    code, out, _ = told(capsys, "show", tmp_path, "--step", 3)
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert code == 0
    assert rows["dense/kernel"][1:] == ["model", "float32", "64x96", "24.6", "kB", "0,", "1,", "2"]
    assert rows["adam/iteration"][1:] == ["optimizer", "int64", "scalar", "8", "B", "1"]
    assert rows["empty"][1:] == ["state", "float32", "0x4", "0", "B", "-"]
    assert rows["epoch"] == ["epoch", "2"]


def test_verify_finds_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, 3, contents(OF), OF)
    code, out, _ = told(capsys, "verify", tmp_path)
    assert (code, out.splitlines()[0][-22:]) == (0, ": all as it was written"[-22:])
    damage(folder / "model-00001-of-00001.safetensors", -1)
    code, out, _ = told(capsys, "verify", tmp_path)
    assert code == 1
    assert "do not have their checksum" in out
    assert told(capsys, "verify", tmp_path, "--step", 4)[0] == 2


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_diff_tells_what_differs_and_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidist.checkpoint.command._PIECE", 64)
    bytes_of = contents(OF)
    write(tmp_path / "a", 1, bytes_of, OF)
    other = {name: data.copy() for name, data in bytes_of.items()}
    for name, change in (("dense/kernel", 0.5), ("dense/bias", 2.0)):
        values = np.arange(len(bytes_of[name]) // 4, dtype=np.float32)
        bytes_of[name] = values.view(np.uint8).copy()
        values[-1] += change
        values[1] += change / 4
        other[name] = values.view(np.uint8)
    write(tmp_path / "a", 2, bytes_of, OF, places=2)
    changed = [Tensor("empty", "float32", (4, 0), "state") if t.name == "empty" else t for t in OF[:-1]]
    write(tmp_path / "b", 7, {t.name: other[t.name] for t in changed}, [*changed, Tensor("new", "int8", (0,))])
    code, out, _ = told(capsys, "diff", tmp_path / "a", tmp_path / "a" / "step-00000002")
    assert (code, out) == (0, f"{len(OF)} tensors, the same in both\n")
    code, out, _ = told(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert out.splitlines() == [
        "dense/bias: values differ by up to 2",
        "dense/kernel: values differ by up to 0.5",
        "empty: float32 0x4 and float32 4x0",
        f"new: only in {tmp_path / 'b' / 'step-00000007'}",
        f"{OF[-1].name}: only in {tmp_path / 'a' / 'step-00000002'}".splitlines()[0],
        f"{OF[-1].name}: only in {tmp_path / 'a' / 'step-00000002'}".splitlines()[1],
        f"5 of {len(OF) + 1} tensors differ",
    ]
    assert told(capsys, "diff", tmp_path / "a", tmp_path / "a", "--left-step", 1, "--right-step", 2)[0] == 1


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_numbers_are_those_of_their_dtype(dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    data = every % 2 if dtype == "bool" else every
    theirs = data.view(getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) and dtype not in np.sctypeDict else dtype)
    wide = np.complex128 if dtype == "complex64" else np.float64
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(numbers(data, dtype).astype(wide), theirs.astype(wide))


@pytest.mark.parametrize(
    ("dtype", "a", "b", "apart"),
    [
        ("float32", [1.0, np.nan, np.inf], [1.5, np.nan, np.inf], 0.5),
        ("float32", [1.0, np.nan], [1.5, 0.0], np.nan),
        ("float32", [np.inf], [-np.inf], np.inf),
        ("int64", [2**60, -(2**63)], [2**60 + 1, 2**63 - 1], 2.0**64),
        ("int64", [2**60], [2**60 + 1], 1.0),
        ("uint64", [0], [2**64 - 1], 2.0**64),
        ("uint8", [3, 250], [250, 3], 247.0),
        ("bool", [True, False], [True, True], 1.0),
        ("complex64", [3 + 4j], [0], 5.0),
        ("float16", [60000.0], [-60000.0], 120000.0),
        ("float32", [0.0], [-0.0], 0.0),
    ],
)
def test_differences_are_exact(dtype: str, a: list, b: list, apart: float) -> None:
    left, right = (np.array(one, dtype).view(np.uint8) for one in (a, b))
    np.testing.assert_equal(difference(left, right, dtype), apart)


def test_export_writes_plain_files_that_others_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bytes_of = contents(OF)
    folder = write(tmp_path / "in", 3, bytes_of, OF, places=2, cuts={"dense/kernel": [1000]})
    code, out, _ = told(capsys, "export", tmp_path / "in", tmp_path / "out", "--all", "--largest", 5000)
    assert code == 0
    paths = [Path(line) for line in out.splitlines()]
    assert sorted((tmp_path / "out").iterdir()) == sorted(paths)
    assert len(paths) > 4
    found = {}
    for path in paths[:-1]:
        assert b"__metadata__" not in path.read_bytes()
        found |= safetensors.deserialize(path.read_bytes())
    assert {name: bytes(one["data"]) for name, one in found.items()} == {
        name: data.tobytes() for name, data in bytes_of.items()
    }
    code, out, _ = told(capsys, "export", folder, tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    code, _, err = told(capsys, "export", folder, tmp_path / "model")
    assert (code, err.endswith("is not empty\n")) == (2, True)
    damage(folder / "model-00001-of-00001.safetensors", -1)
    code, _, err = told(capsys, "export", folder, tmp_path / "damaged")
    assert (code, "do not have their checksum" in err) == (2, True)
    assert not [path for path in (tmp_path / "damaged").iterdir() if path.suffix == ".safetensors"]


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_files_of_keras_are_left_to_it(tmp_path: Path, name: str) -> None:
    given: list[object] = []
    arguments = ["export", "in", str(tmp_path / name), "--step", "3"]
    assert command.main(arguments, lambda *found: given.extend(found)) == 0
    assert given == ["in", 3, tmp_path / name]


def test_long_facts_are_shown_by_their_length_and_empty_ones_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {
        "config": {"model": "x" * 5000, "names": ["y" * 9] * 1200},
        "losses": [0.5, 0.25],
        "course": None,
        "made": {},
    }
    write(tmp_path, 3, contents(OF), OF, facts=facts)
    code, out, _ = told(capsys, "show", tmp_path)
    noted = [line.split(maxsplit=1) for line in out.partition("noted")[2].splitlines()[1:]]
    assert (code, noted) == (
        0,
        [
            ["config.model", "5,000 letters"],
            ["config.names", "1,200 values"],
            ["losses", "[0.5, 0.25]"],
        ],
    )
