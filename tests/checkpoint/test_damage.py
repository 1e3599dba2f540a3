"""What is not as it was written is found, and what somebody else wrote does no harm."""

from __future__ import annotations

import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.samples import contents, tensors, write
from tests.support.sampling import SEED, unless_all
from unidist.checkpoint import manifest
from unidist.checkpoint.checksums import crc
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.tensors import LARGEST_TEXT, Tensor, parsed
from unidist.errors import CheckpointError

OF = tensors()
BYTES_OF = contents(OF)
CUTS = {"dense/kernel": [5, 3000, 9000], "adam/dense_kernel_momentum": [2048, 4096]}
MODEL, OPTIMIZER, STATE = (f"{kind}-00001-of-00001.safetensors" for kind in ("model", "optimizer", "state"))
FILES = (MODEL, OPTIMIZER, STATE, manifest.CHECKSUMS, manifest.INDEX, manifest.MANIFEST)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one step. Who changes it puts it back."""
    directory = tmp_path_factory.mktemp("checkpoints")
    write(directory, 5, BYTES_OF, OF, places=2, cuts=CUTS)
    return directory


@pytest.fixture
def directory(written: Path) -> Iterator[Path]:
    """The step, which the test may change."""
    folder = written / "step-00000005"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    yield written
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in before.items():
        (folder / name).write_bytes(content)


def read_all(directory: Path, verify: str) -> None:
    """Reads every tensor; raises where one is not what was written, also silently."""
    with Reader(directory, 5, verify) as reader:
        for name in BYTES_OF:
            if reader.read(name).tobytes() != BYTES_OF[name].tobytes():
                raise AssertionError(f"{name} is wrong and nobody said so")


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_found(directory: Path, file: str) -> None:
    path = directory / "step-00000005" / file
    content = path.read_bytes()
    draw = random.Random(SEED)
    bits = 8 * len(content)
    chosen = {
        *range(0, 8 * 24, 5),
        *range(bits - 64, bits, 5),
        *draw.sample(range(bits), unless_all(25, min(bits, 999))),
    }
    for bit in sorted(chosen):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(CheckpointError) as found:
            read_all(directory, "all")
        assert found.value.file == file or file == manifest.CHECKSUMS, bit
        if file != manifest.INDEX and file != manifest.CHECKSUMS:
            with pytest.raises(CheckpointError):
                read_all(directory, "read")
        elif file == manifest.CHECKSUMS:
            # Who wrote a range is not needed to read it.
            with suppress(CheckpointError):
                read_all(directory, "read")
    path.write_bytes(content)
    read_all(directory, "all")


def test_damage_names_file_tensor_and_bytes_and_what_is_elsewhere_is_still_read(directory: Path) -> None:
    path = directory / "step-00000005" / MODEL
    with Reader(directory) as reader:
        ((_, _, _, begin),) = reader._pieces.of("dense/kernel", 0, 1)
    content = bytearray(path.read_bytes())
    content[begin + 5 + 2048 + 100] ^= 64
    path.write_bytes(content)
    for verify in ("read", "all"):
        with pytest.raises(CheckpointError, match=r"'dense/kernel' is damaged: its bytes 2053\.\.3000 do not") as found:
            read_all(directory, verify)
        assert (found.value.file, found.value.tensor) == (MODEL, "dense/kernel")
    with Reader(directory) as reader:
        assert reader.read("dense/kernel", ((0, 5), (0, 96))).tobytes() == BYTES_OF["dense/kernel"][: 5 * 384].tobytes()
        with pytest.raises(CheckpointError):
            reader.read("dense/kernel", ((0, 6), (0, 96)))
    with Reader(directory, verify="off") as reader:
        assert reader.read("dense/kernel").tobytes() != BYTES_OF["dense/kernel"].tobytes()
        with pytest.raises(CheckpointError):
            reader.verify()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "short", "long", "link", "pipe", "folder"])
def test_a_file_that_is_not_there_or_has_another_length_is_found(directory: Path, file: str, how: str) -> None:
    path = directory / "step-00000005" / file
    content = path.read_bytes()
    path.unlink()
    if how == "link":
        (directory / "elsewhere").write_bytes(content)
        path.symlink_to(directory / "elsewhere")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes({"empty": b"", "short": content[:-1], "long": content + b"\0"}[how])
    with pytest.raises(CheckpointError) as found:
        read_all(directory, "all")
    no_manifest = file == manifest.MANIFEST and how in ("missing", "link", "pipe", "folder")
    assert found.value.file == (str(directory) if no_manifest else file)


def test_a_file_that_is_cut_while_it_is_read_is_told(directory: Path) -> None:
    with Reader(directory) as reader:
        path = directory / "step-00000005" / STATE
        size = path.stat().st_size - 4
        os.truncate(path, size)
        with pytest.raises(CheckpointError, match=f"is cut short: it ends at byte {size}, in tensor") as found:
            reader.read('odd "name" \\ é\n')
        assert (found.value.file, found.value.tensor) == (STATE, 'odd "name" \\ é\n')


@pytest.mark.parametrize(
    ("step", "text"), [(6, "is a file of step 6, not of 5"), (5, "is of another writing of step 5")]
)
def test_a_file_of_another_step_is_told(directory: Path, tmp_path: Path, step: int, text: str) -> None:
    other = write(tmp_path, step, BYTES_OF, OF, places=2, cuts=CUTS)
    shutil.copy(other / OPTIMIZER, directory / "step-00000005" / OPTIMIZER)
    with pytest.raises(CheckpointError, match=text) as found:
        Reader(directory)
    assert found.value.file == OPTIMIZER


def test_a_folder_of_another_step_is_told(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory / "step-00000005", tmp_path / "step-00000008")
    with pytest.raises(CheckpointError, match="is that of step 5, not of 8"):
        Reader(tmp_path)


def test_a_folder_that_is_a_link_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000005").symlink_to(directory / "step-00000005")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        Reader(tmp_path)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda reader: reader.read("none"), "has no tensor 'none'"),
        (lambda reader: reader.read("dense/bias", ((0, 97),)), r"is not inside of the shape \(96,\)"),
        (lambda reader: reader.read("dense/bias", ()), r"is not inside of the shape \(96,\)"),
        (lambda reader: reader.read("dense/bias", ((0, 2**62),)), r"is not inside of the shape \(96,\)"),
        (lambda reader: reader.read_into("dense/bias", None, np.zeros(5, np.uint8)), "the region has 384 bytes"),
        (lambda reader: reader.read_into("dense/bias", None, np.zeros(384, np.int8)), "the array is of int8"),
        (lambda reader: reader.read_bytes("dense/bias", 380, 5), r"has 384 bytes, and 380\.\.385 were asked for"),
        (lambda reader: Reader(reader.folder, verify="yes"), 'verify is "read", "all" or "off", got \'yes\''),
    ],
)
def test_what_cannot_be_read_is_told(written: Path, call: Callable[[Reader], Any], text: str) -> None:
    with Reader(written) as reader, pytest.raises(CheckpointError, match=text):
        call(reader)


def signed(content: dict[str, Any]) -> bytes:
    """A manifest with the right checksum, whatever it says."""
    text = json.dumps({**content, "crc32c": "0" * 8}, indent=1).encode()
    return manifest._with(text, crc(text))


# What somebody may write into a manifest: each is refused, in bounded memory.
EVIL: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path upwards": lambda told: told["files"][0].update(name="../../etc/passwd"),
    "an absolute path": lambda told: told["files"][0].update(name="/etc/passwd"),
    "a name of no file": lambda told: told["files"][0].update(name="model\0-00001-of-00001.safetensors"),
    "a file twice": lambda told: told["files"].append(told["files"][0]),
    "checksums elsewhere": lambda told: told["checksums"].update(name="../checksums.safetensors"),
    "an index elsewhere": lambda told: told["index"].update(name="/etc/passwd"),
    "checksums that are data": lambda told: told["checksums"].update(told["files"][0], name=manifest.CHECKSUMS),
    "a huge header": lambda told: told["files"][0].update(length=2**62, size=2**63 - 1),
    "a header of the whole file": lambda told: told["files"][0].update(length=told["files"][0]["size"]),
    "a negative size": lambda told: told["files"][0].update(size=-1),
    "a number of letters": lambda told: told["files"][0].update(size="9"),
    "no files": lambda told: told.update(files=None),
    "fewer files": lambda told: told["files"].pop(),
    "files in another order": lambda told: told["files"].reverse(),
    "another format": lambda told: told.update(format="other"),
    "a later version": lambda told: told.update(version=2),
    "another step": lambda told: told.update(step=6),
    "facts of a list": lambda told: told.update(facts=[]),
}


@pytest.mark.parametrize("how", EVIL)
def test_a_manifest_of_somebody_else_is_refused(directory: Path, how: str) -> None:
    path = directory / "step-00000005" / manifest.MANIFEST
    told = json.loads(path.read_bytes())
    told.pop("crc32c")
    EVIL[how](told)
    # The checksum is the first key.
    path.write_bytes(signed({"crc32c": "", **told}))
    with pytest.raises(CheckpointError) as found:
        Reader(directory)
    assert found.value.file


@pytest.mark.parametrize(
    "text",
    [
        b"[" * (1 << 20),
        b'{"a":' * (1 << 18),
        b'{"crc32c": "00000000", "x": NaN}',
        b'{\n "crc32c": "00000000",\n "x": ' + b"9" * 5000 + b"}",
        b"",
        b"\xff\xfe",
        b"null",
        b"[" + b"[]," * (LARGEST_TEXT // 30) + b"0]",
        b" " * (LARGEST_TEXT + 1),
    ],
    ids=["deep lists", "deep objects", "NaN", "digits", "nothing", "no text", "null", "many lists", "too long"],
)
def test_a_manifest_that_does_not_parse_is_refused_in_bounded_memory(directory: Path, text: bytes) -> None:
    (directory / "step-00000005" / manifest.MANIFEST).write_bytes(text)
    assert refused_within(lambda: Reader(directory)) < 40 << 20


def refused_within(call: Callable[[], object]) -> int:
    """The most bytes that were held until a call was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, dict[str, Any]] = {
    "overlapping": {"a": entry(), "b": entry(offsets=(4, 12))},
    "the same bytes": {"a": entry(), "b": entry()},
    "a hole": {"a": entry(), "b": entry(offsets=(12, 20))},
    "not from the beginning": {"a": entry(offsets=(8, 16))},
    "backwards": {"a": entry(offsets=(8, 0))},
    "negative": {"a": entry(offsets=(-8, 0))},
    "more than the file": {"a": entry(shape=[1 << 40], offsets=(0, 1 << 42))},
    "less than the file": {"a": entry(shape=[1], offsets=(0, 4))},
    "another size": {"a": entry(shape=[3])},
    "a negative shape": {"a": entry(shape=[-2])},
    "two negative dims": {"a": entry(shape=[-2, -1])},
    "an overflowing shape": {"a": entry(shape=[1 << 33, 1 << 31])},
    "an overflow hidden by nothing": {"a": entry(shape=[0, 1 << 62, 1 << 62], offsets=(0, 0))},
    "many dims": {"a": entry(shape=[1] * 100)},
    "a shape of floats": {"a": entry(shape=[2.0])},
    "a shape of booleans": {"a": entry(shape=[True, 2])},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
    "an unknown dtype": {"a": entry(dtype="F31")},
    "NumPy's dtype": {"a": entry(dtype="float128")},
    "a dtype of no text": {"a": entry(dtype=7)},
    "offsets of text": {"a": entry(offsets=("0", "8"))},
    "three offsets": {"a": entry(offsets=(0, 4, 8))},
    "no name": {"": entry()},
    "no object": {"a": 3},
}


@pytest.mark.parametrize("how", HEADERS)
def test_a_header_of_somebody_else_is_refused(how: str) -> None:
    text = header(HEADERS[how])
    ends = [one["data_offsets"][1] for one in HEADERS[how].values() if isinstance(one, dict)]
    # All is right but what is wrong: the file has the bytes that the last tensor ends with.
    size = 8 if "than the file" in how or not isinstance(max(ends, default=""), int) else max(ends)
    with pytest.raises(CheckpointError) as found:
        parsed("model-00001-of-00001.safetensors", text, len(text) + size)
    assert found.value.file == "model-00001-of-00001.safetensors"


def test_such_a_header_is_read_where_it_is_right() -> None:
    text = header({"b": entry(offsets=[8, 16]), "a": entry(), "none": entry(shape=[0], offsets=[16, 16])})
    found = parsed("model-00001-of-00001.safetensors", text, len(text) + 16)
    assert list(found.tensors) == ["a", "b", "none"]
    assert found.tensors["a"] == Tensor("a", "float32", (2,), "model")


@pytest.mark.parametrize("text", [b"[" * (1 << 20), b'{"a":1,"a":2}', b'{"a": NaN}', b"[1]", b"\0" * 8], ids=str)
def test_a_header_that_does_not_parse_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        parsed("model-00001-of-00001.safetensors", bytes(8) + text, 8 + len(text))


def sign_header(directory: Path, content: bytes) -> None:
    """Another file of tensors, which the manifest describes as its own."""
    folder = directory / "step-00000005"
    (folder / MODEL).write_bytes(content)
    told = json.loads((folder / manifest.MANIFEST).read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    row = next(row for row in told["files"] if row["name"] == MODEL)
    row.update(size=len(content), length=length, crc32c=crc(content[:length]))
    (folder / manifest.MANIFEST).write_bytes(signed(told))


def test_a_file_with_other_tensors_than_the_checksums_is_refused(directory: Path) -> None:
    text = header({"dense/kernel": entry(shape=[2])})
    sign_header(directory, text + bytes(8))
    with pytest.raises(CheckpointError, match="is damaged: it is not of these tensors") as found:
        Reader(directory)
    assert found.value.file == manifest.CHECKSUMS


def test_a_tensor_in_two_files_is_refused(directory: Path) -> None:
    text = header({"adam/iteration": entry(shape=[2])})
    sign_header(directory, text + bytes(8))
    with pytest.raises(CheckpointError, match="has 'adam/iteration' a second time"):
        Reader(directory)


def changed_checksums(directory: Path, tensor: str, change: Callable[[np.ndarray], None]) -> None:
    """Other numbers in the checksums' file, which the manifest describes as its own."""
    folder = directory / "step-00000005"
    content = bytearray((folder / manifest.CHECKSUMS).read_bytes())
    spec = parsed(manifest.CHECKSUMS, bytes(content[: 8 + int.from_bytes(content[:8], "little")]), len(content))
    begin, of = spec.begins[tensor], spec.tensors[tensor]
    change(np.frombuffer(memoryview(content)[begin : begin + of.nbytes], of.dtype).reshape(of.shape))
    (folder / manifest.CHECKSUMS).write_bytes(content)
    told = json.loads((folder / manifest.MANIFEST).read_bytes())
    told["checksums"]["crc32c"] = crc(bytes(content))
    (folder / manifest.MANIFEST).write_bytes(signed(told))


def put(at: Any, value: int) -> Callable[[np.ndarray], None]:
    return lambda numbers: numbers.__setitem__(at, value)


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        (manifest.FIRSTS, put((0, 0), 1)),
        (manifest.FIRSTS, put((0, 0), -1)),
        (manifest.FIRSTS, put((3, 0), 2**62)),
        (manifest.FIRSTS, put((3, 1), -(2**62))),
        (manifest.FIRSTS, put((-1, 1), 2**40)),
        (manifest.FIRSTS, put((slice(1, 3), 0), 0)),
        (manifest.FIRSTS, put((slice(1, 5), 1), 3)),
        (manifest.BEGINS, put(0, 1)),
        (manifest.BEGINS, put(slice(None), 0)),
        (manifest.BEGINS, put(slice(None), -(2**63))),
        (manifest.BEGINS, put(slice(1, None), 2**63 - 1)),
        (manifest.SUMS, put(7, 0)),
    ],
)
def test_checksums_of_somebody_else_are_refused(
    directory: Path, tensor: str, change: Callable[[np.ndarray], None]
) -> None:
    changed_checksums(directory, tensor, change)
    for verify in ("read", "all"):
        assert refused_within(lambda verify=verify: read_all(directory, verify)) < 64 << 20


def test_a_region_is_read_within_its_own_memory(tmp_path: Path) -> None:
    of = [Tensor("long", "float32", (1 << 18, 4))]
    write(tmp_path, 1, contents(of), of, places=2, cuts={"long": [1 << 19]})
    with Reader(tmp_path) as reader:
        for region, size in ((None, 4 << 20), (((0, 1 << 18), (1, 1)), 1 << 20), (((0, 1 << 17), (0, 3)), 3 << 19)):
            out = np.empty(size, np.uint8)
            tracemalloc.start()
            reader.read_into("long", region, out)
            held = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert held < 12 << 20
