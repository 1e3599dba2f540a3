"""Callbacks that write do so once, and those that decide do so alike on all processes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.parity.worlds import SETTINGS, Alone, Worlds
from tests.support.comparing import same

pytestmark = pytest.mark.processes
# Callbacks are wrapped above the engines: in two processes of each.
PLACES = [
    ("torch-2", "dp", 3),
    ("horovod-2", "dp", 3),
    ("jax-2x2", "2x2 across", 3),
    ("tensorflow-2x2", "2x2", 0),
]


def called_back(kind: str | None, zero: int, folder: str) -> dict[str, Any]:
    """Twice: the second training starts where a backup of the first is."""
    import keras

    from tests.support import nets
    from tests.support.runs import told

    x, y = nets.rows()
    place, how = Path(folder), {"batch_size": nets.BATCH, "shuffle": False}
    with nets.begun(kind, zero):
        model = nets.crossed(nets.plain(), nets.adam())
    backup = keras.callbacks.BackupAndRestore(str(place / "backup"), delete_checkpoint=False)
    model.fit(x, y, epochs=1, verbose=0, callbacks=[backup], **how)
    stopper = keras.callbacks.EarlyStopping(monitor="loss", min_delta=10.0, patience=1, restore_best_weights=True)
    logger = keras.callbacks.CSVLogger(str(place / "log.csv"))
    callbacks = [
        keras.callbacks.BackupAndRestore(str(place / "backup")),
        logger,
        keras.callbacks.ModelCheckpoint(str(place / "last.weights.h5"), save_weights_only=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=10.0, patience=1),
        stopper,
    ]
    if keras.config.backend() == "tensorflow":
        callbacks.append(keras.callbacks.TensorBoard(str(place / "board")))
    again = model.fit(x, y, epochs=5, verbose=2, callbacks=callbacks, **how)
    return {
        "history": again.history,
        "epochs": again.epoch,
        "stopped": stopper.stopped_epoch,
        "log": logger.filename,
        "shown": stopper.params["verbose"],
        **told(model),
    }


@pytest.mark.parametrize(("setting", "kind", "zero"), PLACES)
def test_they_write_once_and_decide_alike(
    setting: str, kind: str, zero: int, worlds: Worlds, alone: Alone, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (wanted,) = alone.world(SETTINGS[setting].keras).call(called_back, None, 0, str(tmp_path / "one"))
    for process, found in enumerate(worlds.get(setting).call(called_back, kind, zero, str(tmp_path / "two"))):
        assert found["shown"] == (0 if process else 2)
        same({**found, "log": "", "shown": 2}, {**wanted, "log": ""})
        assert found["epochs"] == wanted["epochs"] == [1, 2]
        assert found["stopped"] == wanted["stopped"] > 0
        assert found["log"] == str(tmp_path / "two" / "log.csv")
    board = [p.name for p in (tmp_path / "two").glob("board/train/*") if "tfevents" in p.name]
    assert len(board) == (setting == "tensorflow-2x2")
    files = {p.name for p in (tmp_path / "two").iterdir()}
    assert files - {"board"} == {"last.weights.h5", "log.csv"}
    logs = [list(csv.DictReader((tmp_path / n / "log.csv").read_text().splitlines())) for n in ("one", "two")]
    assert [row["epoch"] for row in logs[0]] == [row["epoch"] for row in logs[1]] == ["1", "2"]
