"""Values in files, read in parts: to everybody but placed variables they are arrays."""

from __future__ import annotations

import zipfile

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.saving import saving_lib

import unidist
from unidist.keras.lazy_values import Stored

KERNEL = (128, 256)


def net(units=KERNEL[1]):
    return keras.Sequential([layers.Input((KERNEL[0],)), layers.Dense(units, name="a"), layers.Dense(4, name="b")])


def scope():
    rules = unidist.LayoutMap(unidist.Mesh({"model": 4}), {".*a/kernel": (None, "model")})
    return unidist.ModelParallel(None, rules).scope()


@pytest.fixture
def reads(monkeypatch):
    """The shapes of what is read of large values."""
    found = []
    original = Stored.part

    def part(self, index):
        value = original(self, index)
        found.append(value.shape)
        return value

    monkeypatch.setattr(Stored, "part", part)
    return found


@pytest.mark.parametrize("order", [None, (0, 1, 2), (2, 0, 1), (1, 2, 0), (-1, 0, 1)])
def test_a_part_of_a_transposed_value_is_that_of_the_array(order):
    there = np.arange(24.0).reshape(2, 3, 4)
    stored = Stored(there.shape, there.dtype, lambda index: there[index])
    wanted = np.transpose(there, order)
    moved = np.transpose(stored, order)
    assert isinstance(moved, Stored)
    assert moved.shape == wanted.shape
    index = (slice(1, 2), slice(None), slice(0, 2))
    np.testing.assert_array_equal(moved.part(index), wanted[index])
    np.testing.assert_array_equal(np.reshape(moved, (4, 6)), wanted.reshape(4, 6))
    np.testing.assert_array_equal(2 - moved, 2 - wanted)
    assert len(moved) == len(wanted)


def test_each_rank_reads_its_shard_and_no_other(reads, tmp_path):
    wanted = net()
    wanted.save_weights(tmp_path / "w.weights.h5")
    with scope():
        model = net()
        model.load_weights(tmp_path / "w.weights.h5")
    assert reads == [(128, 64)] * 4
    for one, other in zip(model.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_shape_is_refused_or_left_out_as_on_one_device(tmp_path):
    net().save_weights(tmp_path / "w.weights.h5")
    with scope():
        model = net(512)
        before = model.get_weights()
        with pytest.raises(ValueError, match="could not be loaded"):
            model.load_weights(tmp_path / "w.weights.h5")
        with pytest.warns(UserWarning, match="could not be loaded"):
            model.load_weights(tmp_path / "w.weights.h5", skip_mismatch=True)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_an_archive_is_read_where_it_lies(reads, tmp_path, monkeypatch):
    wanted = net()
    wanted.save(tmp_path / "m.keras")
    opened = []
    with scope(), monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "open", noting(zipfile.ZipFile.open, opened))
        model = keras.models.load_model(tmp_path / "m.keras")
    assert opened == ["config.json"]
    assert (128, 64) in reads
    np.testing.assert_array_equal(model.get_weights()[0], wanted.get_weights()[0])


def noting(original, names):
    def method(self, name, *args):
        names.append(name)
        return original(self, name, *args)

    return method


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_was_packed_again_is_read_too(method, reads, tmp_path):
    """With longer headers, as those of members over 4 GB."""
    wanted = net()
    wanted.save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as old, zipfile.ZipFile(tmp_path / "n.keras", "w", method) as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as file:
                file.write(old.read(name))
    with scope():
        model = keras.models.load_model(tmp_path / "n.keras")
    assert (128, 64) in reads
    np.testing.assert_array_equal(model.get_weights()[0], wanted.get_weights()[0])


def test_values_of_two_bytes_and_chunks_are_read_in_parts(tmp_path):
    """A dataset says which dtype its bytes are; one in chunks has no place of its own."""
    value = np.random.default_rng(0).normal(size=KERNEL)
    with saving_lib.h5py.File(tmp_path / "x.h5", "w") as file:
        group = file.create_group("vars")
        store = saving_lib.H5IOStore.__new__(saving_lib.H5IOStore)
        store._h5_entry_group, store.mode, store._h5_entry_initialized = group, "w", True
        store["0"] = keras.ops.cast(value, "bfloat16")
        group.create_dataset("1", data=value, chunks=(16, 16), compression="gzip")
        store.mode = "r"
        wanted = [store["0"], store["1"]]
        with scope():
            found = [store["0"], store["1"]]
        assert [type(one) for one in found] == [Stored, Stored]
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one.part((slice(3, 5), slice(None))), other[3:5])


def test_outside_of_a_scope_loaders_are_given_arrays(reads, tmp_path):
    model = net()
    model.save(tmp_path / "m.keras")
    keras.models.load_model(tmp_path / "m.keras")
    assert reads == []
