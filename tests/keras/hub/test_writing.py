"""One of several processes writes, whatever writes, and all go on when the file is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import keras
import keras_hub
import pytest

from tests import preloaded
from tests.keras.hub import tasks, writing
from tests.visible import QUICK_JAX, WITH_TENSORFLOW
from unidist.keras.writers import OF_HUB, OF_KERAS
from unidist.testing.processes import ProcessWorld


# On torch: test_tasks.py.
@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    env, preload = {"KERAS_BACKEND": "jax", **QUICK_JAX, **WITH_TENSORFLOW}, preloaded.KERAS["jax"]
    start = {"setup": tasks.start, "setup_args": ("jax", 1)}
    with ProcessWorld(2, launcher="jax", env=env, timeout=200, preload=preload, **start) as found:
        yield found


@pytest.mark.processes
def test_the_first_process_writes_and_all_wait(world: ProcessWorld, tmp_path: Path) -> None:
    writing.check_writing(world, tmp_path)


@pytest.mark.processes
def test_a_writer_that_fails_tells_the_others(world: ProcessWorld, tmp_path: Path) -> None:
    writing.check_failing(world, tmp_path)


# What opens files to write, and by which entrance of a table or hook of unidist it is reached. What writes no file of
# the user's, and what the user gives a path of each process's own, is named too.
_SAVERS = "the savers of models"
_WRITES = {
    "keras/src/saving/saving_lib.py": _SAVERS,
    "keras/src/legacy/saving/legacy_h5_format.py": _SAVERS,
    "keras/src/layers/preprocessing/index_lookup.py": _SAVERS,
    "keras/src/saving/file_editor.py": "KerasFileEditor.save",
    "keras/src/export/torch.py": "Model.export",
    "keras/src/export/onnx.py": "Model.export",
    "keras/src/export/litert.py": "Model.export",
    "keras/src/export/saved_model_export_archive.py": "ExportArchive.write_out",
    "keras/src/utils/model_visualization.py": "plot_model",
    "keras/src/callbacks/backup_and_restore.py": "unidist.keras.writers",
    "keras/src/callbacks/csv_logger.py": "unidist.keras.writers",
    "keras/src/callbacks/tensorboard.py": "unidist.keras.writers",
    "keras/src/backend/config.py": "keras.json, at Keras's import",
    "keras/src/utils/image_utils.py": "save_img: a picture of the user's",
    "keras/src/legacy/preprocessing/image.py": "pictures under random names",
    "keras/src/utils/torch_utils.py": "into memory",
    "keras_hub/src/models/backbone.py": "save_lora_weights",
    "keras_hub/src/tokenizers/sentence_piece_tokenizer.py": "save_to_preset",
    "keras_hub/src/tokenizers/byte_pair_tokenizer.py": "save_to_preset",
    "keras_hub/src/tokenizers/word_piece_tokenizer.py": "save_to_preset",
    "keras_hub/src/models/rwkv7/rwkv7_tokenizer.py": "save_to_preset",
    "keras_hub/src/models/parseq/parseq_tokenizer.py": "save_to_preset",
    "keras_hub/src/tokenizers/sentence_piece_tokenizer_trainer.py": "compute_sentence_piece_proto",
    "keras_hub/src/tokenizers/word_piece_tokenizer_trainer.py": "compute_word_piece_vocabulary",
    "keras_hub/src/utils/preset_utils.py": "save_to_preset, upload_preset",
    "keras_hub/src/utils/transformers/export/hf_exporter.py": "export_to_transformers",
}
_OPENS = re.compile(
    r"""open\([^)]*["'][wax][bt+]*["']|File\([^)]*["']wb?["']|mode=["']w["']|File\([^)]*, mode\)"""
    r"""|saved_model\.save\(|(?:torch|export|img|program)\.save\(|dot\.write\(|savez\(|create_file_writer\(|save_file\("""
)


def test_every_file_that_opens_to_write_is_known() -> None:
    """A writer that is new in Keras or keras_hub needs a row of `writers`."""
    found = set()
    for package in ("keras", "keras_hub"):
        (folder,) = find_spec(package).submodule_search_locations
        for path in (Path(folder) / "src").rglob("*.py"):
            if not path.stem.endswith("_test") and path.parent.name not in ("testing", "tests"):
                code = re.sub(r'"""[\s\S]*?"""', "", path.read_text())
                if _OPENS.search(code):
                    found.add(str(path.relative_to(Path(folder).parent)))
    assert found == set(_WRITES)


def test_every_row_is_a_writer_of_the_versions_in_use() -> None:
    for package, rows in ((keras, OF_KERAS), (keras_hub, OF_HUB)):
        for row in rows:
            found = package
            for name in row.place.split("."):
                found = getattr(found, name)
            assert found.__wrapped__ is not None


def test_keras_hub_may_arrive_last() -> None:
    code = (
        "import unidist; unidist.use('sim', devices=2); import keras, sys; assert 'keras_hub' not in sys.modules;"
        "import keras_hub; assert keras_hub.models.Backbone.save_lora_weights.__wrapped__; unidist.shutdown();"
        "assert not hasattr(keras_hub.models.Backbone.save_lora_weights, '__wrapped__')"
    )
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=environment)
