"""A save that fails in the process that writes is an error in all of them, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.worlds import SETTINGS, Alone, Worlds
from tests.support.comparing import same

pytestmark = pytest.mark.processes


def saved_in_part(kind: str | None, zero: int, folder: str, name: str, values: int) -> dict[str, Any]:
    """Process 0 cannot write more than some values; what every process heard, and how training goes on."""
    from keras.src.saving.saving_lib import H5IOStore

    from tests.support import nets
    from tests.support.runs import is_first, told

    x, y = nets.rows()
    how = {"batch_size": nets.BATCH, "epochs": 1, "shuffle": False, "verbose": 0}
    with nets.begun(kind, zero):
        model = nets.crossed(nets.plain(), nets.adam())
    model.fit(x, y, **how)
    heard = ""
    if kind is not None:
        try:
            with pytest.MonkeyPatch.context() as patch:
                if is_first():
                    patch.setattr(H5IOStore, "__setitem__", _full_after(values, H5IOStore.__setitem__))
                model.save(Path(folder) / name)
        except OSError as error:
            heard = f"{type(error).__name__}: {error}"
    return {"history": model.fit(x, y, **how).history, "heard": heard, **told(model)}


def _full_after(values: int, original: Any) -> Any:
    left = [values]

    def set_item(self: Any, key: str, value: Any) -> None:
        if not left[0]:
            raise OSError("no space is left")
        left[0] -= 1
        original(self, key, value)

    return set_item


@pytest.mark.parametrize(
    ("setting", "kind", "zero", "name", "values"),
    [
        *(("torch-2", "dp", 3, name, values) for name, values in (("m.keras", 0), ("m.keras", 3), ("m.h5", 0))),
        ("jax-2x2", "2x2 across", 3, "m.h5", 0),
        ("tensorflow-2x2", "2x2", 0, "m.keras", 3),
    ],
)
def test_it_is_told_to_all_and_training_goes_on(
    setting: str, kind: str, zero: int, name: str, values: int, worlds: Worlds, alone: Alone, tmp_path: Path
) -> None:
    """Every process reads all values, which are collectives; the second one must neither hang nor go out of step."""
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" if name.endswith("h5") else tmp_path)
    (wanted,) = alone.world(SETTINGS[setting].keras).call(saved_in_part, None, 0, folder, name, values)
    first, second = worlds.get(setting).call(saved_in_part, kind, zero, folder, name, values)
    cause = first["heard"]
    assert cause.startswith("NotADirectoryError" if name.endswith("h5") else "OSError: no space is left")
    assert second["heard"] == f"SavingFailedError: process 0 could not save for all: {cause}"
    for found in (first, second):
        same({**found, "heard": ""}, wanted)
        assert found["sharded"]
