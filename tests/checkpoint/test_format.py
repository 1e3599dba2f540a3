"""The format: what anybody writes is what anybody reads, and others read the files too."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.samples import IN_MEMORY, contents, region_of, tensors, write
from unidist.checkpoint import disk
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.regions import BATCH, Region, batches, whole
from unidist.checkpoint.remote import directory_of
from unidist.checkpoint.tensors import DTYPES, Tensor, file_of, files_of, stamp_of
from unidist.errors import CheckpointError


def runs(shape: tuple[int, ...], itemsize: int, region: Region) -> list[tuple[int, int]]:
    """(offset, length) of each run, in order."""
    return [(at, length) for offsets, length in batches(shape, itemsize, region) for at in offsets.tolist()]


def shapes(most: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, most), max_size=4).map(tuple)


def regions(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    def within(size: int) -> st.SearchStrategy[tuple[int, int]]:
        first = st.integers(0, size)
        return first.flatmap(lambda first: st.tuples(st.just(first), st.integers(0, size - first)))

    return st.tuples(*(within(size) for size in shape))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_runs_are_the_bytes_that_numpy_takes_and_none_touch(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    region, itemsize = data.draw(regions(shape)), data.draw(st.sampled_from([1, 2, 8]))
    numbers = np.arange(math.prod(shape) * itemsize).reshape(*shape, itemsize)
    taken = numbers[tuple(slice(first, first + n) for first, n in region)].reshape(-1)
    found = runs(shape, itemsize, region)
    assert [at for offset, length in found for at in range(offset, offset + length)] == taken.tolist()
    assert all(a + n < b for (a, n), (b, _) in pairwise(found))


def test_runs_of_a_long_column_come_in_batches() -> None:
    found = list(batches((BATCH + 5, 3), 4, ((0, BATCH + 5), (1, 1))))
    assert [len(offsets) for offsets, _ in found] == [BATCH, 5]
    assert np.concatenate([offsets for offsets, _ in found]).tolist() == list(range(4, 12 * (BATCH + 5), 12))


@pytest.mark.parametrize("region", [((0, 3),), ((0, 3), (2, 3)), ((-1, 2), (0, 1)), ((0, -1), (0, 1))])
def test_a_region_outside_of_its_tensor_is_refused(region: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(CheckpointError, match=r"is not inside of the shape \(3, 4\)"):
        runs((3, 4), 1, region)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_what_processes_write_is_what_others_read(data: st.DataObject) -> None:
    of = [
        Tensor("a", "float32", data.draw(shapes(40)), "model"),
        Tensor("b", "bfloat16", data.draw(shapes(40)), "optimizer"),
        Tensor("c", "bool", data.draw(shapes(300).map(lambda shape: shape[:2])), "state"),
    ]
    bytes_of = contents(of)
    cuts = {
        t.name: sorted(data.draw(st.sets(st.integers(1, t.nbytes - 1), max_size=8))) if t.nbytes > 1 else [] for t in of
    }
    largest = data.draw(st.sampled_from([1, 5000, 5 * 10**9]))
    with TemporaryDirectory(dir=IN_MEMORY) as folder:
        write(Path(folder), 3, bytes_of, of, places=data.draw(st.integers(1, 3)), cuts=cuts, largest=largest)
        with Reader(folder, verify=data.draw(st.sampled_from(["read", "all", "off"]))) as reader:
            assert dict(reader.tensors) == {t.name: t for t in of}
            for tensor in of:
                region = data.draw(regions(tensor.shape))
                before = reader.bytes_read
                found = reader.read(tensor.name, region)
                assert found.tobytes() == region_of(bytes_of[tensor.name], tensor, region).tobytes()
                count = len(runs(tensor.shape, tensor.itemsize, region))
                assert reader.bytes_read - before <= 1.01 * len(found) + 4096 * count
                assert reader.read(tensor.name).tobytes() == bytes_of[tensor.name].tobytes()


def test_every_kind_of_tensor_goes_there_and_back(tmp_path: Path) -> None:
    of = tensors()
    bytes_of = contents(of)
    facts = {"epoch": 3, "seeds": [1, 2], "data": {"position": 2**60}, "loss": 0.1, "nothing": None}
    folder = write(tmp_path, 12, bytes_of, of, places=3, facts=facts)
    assert folder == tmp_path / "step-00000012"
    with Reader(tmp_path, 12, "all") as reader:
        assert (reader.step, reader.facts, reader.folder) == (12, facts, folder)
        assert dict(reader.tensors) == {t.name: t for t in of}
        for tensor in of:
            out = np.full(tensor.nbytes, 7, np.uint8)
            reader.read_into(tensor.name, None, out)
            assert out.tobytes() == bytes_of[tensor.name].tobytes()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".half", ".bin") or "part" in path.name]


def test_large_tensors_are_read_in_pieces_whatever_their_ranges(tmp_path: Path) -> None:
    of = [Tensor("wide", "uint8", (1500, 2053)), Tensor("long", "float32", (200_000, 2))]
    bytes_of = contents(of)
    cuts = {"wide": [1, 2048, 2049, 1_000_003, 1_000_004, 2_999_999], "long": list(range(1000, 1_600_000, 3001))}
    write(tmp_path, 1, bytes_of, of, places=2, cuts=cuts)
    for verify in ("read", "off"):
        with Reader(tmp_path, verify=verify) as reader:
            for tensor, region in (
                (of[0], whole(of[0].shape)),
                (of[0], ((3, 1400), (5, 2000))),
                (of[0], ((0, 1500), (2000, 40))),
                (of[0], ((1, 1499), (7, 1))),
                (of[1], ((1, 199_999), (1, 1))),
                (of[1], ((10_001, 180_000), (0, 2))),
            ):
                before = reader.bytes_read
                found = reader.read(tensor.name, region)
                assert found.tobytes() == region_of(bytes_of[tensor.name], tensor, region).tobytes()
                offsets = sum(len(one) for one, _ in batches(tensor.shape, tensor.itemsize, region))
                assert reader.bytes_read - before <= 1.01 * len(found) + 4096 * offsets


@pytest.mark.parametrize("verify", ["read", "off"])
def test_a_column_is_read_without_what_lies_between(tmp_path: Path, verify: str) -> None:
    of = Tensor("wide", "float32", (50, 5000))
    bytes_of = contents([of])
    write(tmp_path, 1, bytes_of, [of], cuts={"wide": [100_003]})
    with Reader(tmp_path, verify=verify) as reader:
        region = ((0, 50), (1000, 10))
        assert reader.read("wide", region).tobytes() == region_of(bytes_of["wide"], of, region).tobytes()
        assert 50 * 40 <= reader.bytes_read <= 50 * (1.01 * 40 + 4096)


def test_every_process_finds_the_same_files_and_none_is_too_large() -> None:
    of = tensors()
    files = files_of(of, 3000)
    assert files == files_of(iter(of), 3000)
    assert [name for file in files for name in file.tensors if file.kind == "model"]
    assert {t.name for t in of} == {name for file in files for name in file.tensors}
    assert all(file.size <= 3000 or len(file.tensors) == 1 for file in files)
    counts = {kind: sum(file.kind == kind for file in files) for kind in ("model", "optimizer", "state")}
    assert counts["model"] > 5
    assert files[0].name == f"model-00001-of-{counts['model']:05d}.safetensors"
    for file in files:
        begins = [file.begins[name] for name in file.tensors]
        assert begins == sorted(begins)
        assert all(file.begins[name] % tensor.itemsize == 0 for name, tensor in file.tensors.items())
        assert stamp_of(file.header) == (0, "0" * 32)
    with pytest.raises(CheckpointError, match="two tensors are called 'a'"):
        files_of([Tensor("a", "int8", (1,)), Tensor("a", "int8", (1,), "state")])


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "kind", "text"),
    [
        ("", "float32", (1,), "model", "a name that no file can hold"),
        ("__metadata__", "float32", (1,), "model", "a name that no file can hold"),
        ("\ud800", "float32", (1,), "model", "a name that no file can hold"),
        ("a", "float128", (1,), "model", "the dtype 'float128'"),
        ("a", "float32", (-1,), "model", "the shape"),
        ("a", "float32", (True,), "model", "the shape"),
        ("a", "float32", (1.0,), "model", "the shape"),
        ("a", "float32", (1,) * 65, "model", "the shape"),
        ("a", "float32", (2**40, 2**40), "model", "more bytes than a file can have"),
        ("a", "float32", (0, 2**40, 2**40), "model", "more bytes than a file can have"),
        ("a", "float32", (1,), "weights", "the kind 'weights'"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(name: str, dtype: str, shape: tuple, kind: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Tensor(name, dtype, shape, kind)


def test_safetensors_reads_the_files_and_writes_the_same_order(tmp_path: Path) -> None:
    plain = {
        "bool",
        "complex64",
        *(name for name in DTYPES if "int" in name or name in ("float16", "float32", "float64")),
    }
    of = [tensor for tensor in tensors() if tensor.dtype in plain and tensor.kind == "model"]
    bytes_of = contents(of)
    folder = write(tmp_path, 1, bytes_of, of)
    (file,) = files_of(of)
    arrays = {t.name: bytes_of[t.name].view(t.dtype).reshape(t.shape) for t in of}
    loaded = safetensors.numpy.load_file(folder / file.name)
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name].view(np.uint8), array.view(np.uint8))
    theirs = safetensors.numpy.save(arrays)
    length = int.from_bytes(theirs[:8], "little")
    assert json.loads(theirs[8 : 8 + length]).keys() == file.tensors.keys()
    with safetensors.safe_open(folder / "checksums.safetensors", "np") as opened:
        assert len(opened.keys()) == 4


def test_every_dtype_has_the_code_that_safetensors_knows(tmp_path: Path) -> None:
    file = file_of("model-1.safetensors", [t for t in tensors() if t.name.startswith("layer/")])
    path = tmp_path / file.name
    path.write_bytes(file.header + bytes(file.size - len(file.header)))
    with safetensors.safe_open(path, "np") as opened:
        assert len(opened.keys()) == len(DTYPES)
        for name, tensor in file.tensors.items():
            assert opened.get_slice(name).get_dtype() == DTYPES[tensor.dtype][0]
            assert opened.get_slice(name).get_shape() == list(tensor.shape)


def test_the_index_is_that_of_hugging_face(tmp_path: Path) -> None:
    of = tensors()
    folder = write(tmp_path, 1, contents(of), of, largest=3000)
    found = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {name: file for file in files_of(of, 3000) if file.kind == "model" for name in file.tensors}
    assert found["weight_map"] == {name: file.name for name, file in held.items()}
    assert found["metadata"]["total_size"] == sum(t.nbytes for t in of if t.kind == "model")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_reads_the_model_as_hugging_faces(tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    of = [tensor for tensor in tensors() if tensor.name.startswith("dense/")]
    bytes_of = contents(of)
    folder = write(tmp_path, 1, bytes_of, of, largest=5000)
    state = {tensor.name: torch.zeros(tensor.shape) for tensor in of}
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for tensor in of:
        assert state[tensor.name].numpy().tobytes() == bytes_of[tensor.name].tobytes()


def test_a_folder_of_another_name_is_read_by_its_path(tmp_path: Path) -> None:
    of = [Tensor("a", "uint8", (5,))]
    write(tmp_path, 4, contents(of), of).rename(tmp_path / "best")
    assert directory_of(tmp_path).steps() == []
    with Reader(tmp_path / "best") as reader:
        assert reader.step == 4


def test_files_are_closed_when_many_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidist.checkpoint.opened._MOST_OPEN", 2)
    of = [Tensor(f"t{k}", "uint8", (50,)) for k in range(5)]
    bytes_of = contents(of)
    write(tmp_path, 0, bytes_of, of, largest=1)
    opened: set[int] = set()
    really = disk.open_regular
    monkeypatch.setattr(disk, "open_regular", lambda *given: opened.add(fd := really(*given)) or fd)
    with Reader(tmp_path) as reader:
        for name in [*bytes_of, *bytes_of]:
            assert reader.read(name).tobytes() == bytes_of[name].tobytes()
    assert opened
    assert len(opened) <= 4
