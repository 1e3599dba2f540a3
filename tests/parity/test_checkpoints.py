"""What any backend, mesh and stage of ZeRO writes, any other reads, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity import checkpoints
from tests.parity.train import Spec
from tests.parity.worlds import ALONE, DATA_2, DATA_4, GRID, MODEL_2, MODEL_4, SETTINGS, Alone, Worlds
from tests.support.sampling import each_value

pytestmark = pytest.mark.processes

_GRID_3 = replace(GRID, zero=3)
_ALONE = [f"{keras}-alone" for keras in ALONE]
_ON_FOUR = [DATA_4, replace(DATA_4, zero=3), MODEL_4, GRID, _GRID_3]
# Of each setting the strategies that it serves; None is one device.
PLACES: dict[str, list[Spec | None]] = {
    **{name: [None] for name in _ALONE},
    "sim-torch": [*_ON_FOUR, replace(DATA_4, zero=1)],
    "torch-4": [*_ON_FOUR],
    "horovod-2": [DATA_2, replace(DATA_2, zero=3), MODEL_2],
    "horovod-2-tensorflow": [DATA_2],
    "tensorflow-2x2": [DATA_4, MODEL_4, GRID],
    "jax-2x2": [*_ON_FOUR],
}


def _text(spec: Spec | None) -> str:
    return "one device" if spec is None else spec.name


_ALL = {(name, _text(spec)): spec for name, found in PLACES.items() for spec in found}


def _kind(name: str) -> str:
    """One device is one kind, whatever the Keras backend."""
    return "alone" if name in _ALONE else name


def _framework(name: str) -> str:
    return SETTINGS[name].keras if name in SETTINGS else name.removesuffix("-alone")


def _shape(name: str, mesh: str) -> str:
    """A mesh, however many devices are on its axes."""
    spec = _ALL[name, mesh]
    return mesh if spec is None else f"{spec.shape}-{spec.zero}"


# (writer, reader, its mesh): all write one kind of file. Each writes and reads on each of its meshes, and each backend
# reads what each framework wrote.
_CASES = [
    (writer, *reader)
    for writer, reader in each_value(
        [(writer, reader) for writer in sorted(_ALL) for reader in sorted(_ALL)],
        lambda row: (
            *((_kind(name), _shape(name, mesh)) for name, mesh in row),
            (_framework(row[0][0]), _kind(row[1][0])),
        ),
    )
]


def _call(name: str, worlds: Worlds, alone: Alone, function: str, *args: Any) -> list[Any]:
    world = worlds.get(name) if name in SETTINGS else alone.world(name.removesuffix("-alone"))
    return world.call(f"tests.parity.checkpoints:{function}", *args)


@pytest.fixture(scope="module")
def written(
    worlds: Worlds, alone: Alone, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, list[tuple[int, dict[str, float]]]]]:
    """The folder of a checkpoint, by setting and strategy, and what its processes tell of it. All are written first,
    setting by setting: each world starts once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found: dict[tuple[str, str], tuple[Path, list[tuple[int, dict[str, float]]]]] = {}
    for k, (name, mesh) in enumerate(sorted({writer for writer, _, _ in _CASES})):
        place = folder / str(k)
        found[name, mesh] = place, _call(name, worlds, alone, "write", str(place), _ALL[name, mesh])
    return lambda name, mesh: found[name, mesh]


@pytest.mark.parametrize(("writer", "reader", "mesh"), _CASES, ids=[f"{a} {b} to {c} {d}" for (a, b), c, d in _CASES])
def test_what_one_writes_another_reads(
    writer: tuple[str, str],
    reader: str,
    mesh: str,
    written: Callable[[str, str], tuple[Path, list[tuple[int, dict[str, float]]]]],
    worlds: Worlds,
    alone: Alone,
) -> None:
    folder, _ = written(*writer)
    for values, found, share in _call(reader, worlds, alone, "read", str(folder), _ALL[reader, mesh]):
        assert found == (5, {"note": 1.5}, ())
        checkpoints.assert_known(values, reader)
        # Runs of a few bytes each: what their checksums need beside them is most here.
        # (TensorFlow's counts of steps have twice the bytes of the others'.)
        assert 0.99 <= share < 40.0


@pytest.mark.parametrize(
    ("writer", "reader"), [(("torch-4", _GRID_3), ("jax-2x2", MODEL_4)), (("jax-2x2", GRID), ("torch-4", DATA_4))]
)
def test_what_one_writes_to_a_store_another_reads(
    writer: tuple[str, Spec], reader: tuple[str, Spec], worlds: Worlds, alone: Alone, tmp_path: Path
) -> None:
    """Each process writes one object."""
    address = f"file://{tmp_path}/run"
    _call(writer[0], worlds, alone, "write", address, writer[1])
    (folder,) = (tmp_path / "run").glob("step-00000005-*")
    assert len([*folder.glob("part-*.safetensors")]) == SETTINGS[writer[0]].processes
    for values, found, _ in _call(reader[0], worlds, alone, "read", address, reader[1]):
        assert found == (5, {"note": 1.5}, ())
        checkpoints.assert_known(values, reader[0])


@pytest.mark.parametrize(("setting", "spec"), [("torch-4", MODEL_4), ("jax-2x2", MODEL_4), ("tensorflow-2x2", MODEL_4)])
def test_columns_are_exchanged_between_processes(setting: str, spec: Spec, worlds: Worlds, tmp_path: Path) -> None:
    """No process holds rows of what is cut by columns over all: they move, and nobody gathers the whole."""
    cut = 4 * (6 * 16) * 3  # the kernel and its two slots
    for sharded, sent in worlds.get(setting).call("tests.parity.checkpoints:write", str(tmp_path), spec):
        assert sharded == 9
        assert sent["all_to_all"] == pytest.approx(cut / 4 * 3 / 4)
        assert "all_gather" not in sent


def test_what_is_saved_amid_a_fit_is_of_the_last_step(worlds: Worlds, tmp_path: Path) -> None:
    """On JAX fit keeps the values of variables to itself until it is asked."""
    spec = replace(DATA_4, zero=3)
    for seen, last in worlds.get("jax-2x2").call("tests.parity.checkpoints:amid_a_fit", str(tmp_path), spec):
        np.testing.assert_array_equal(seen[2], last)
        for before, after in itertools.pairwise(seen):
            assert np.abs(before - after).max() > 1e-4
