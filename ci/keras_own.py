#!/usr/bin/env python3
"""Keras's own tests of its distribution API, run through unidist: `PYTHON ci/keras_own.py`.

    PYTHON ci/keras_own.py                    # on torch, one process, as the goal is written: at least 34 of 39
    PYTHON ci/keras_own.py --backend jax      # on eight devices of one process; so tensorflow, and sim on four
    PYTHON ci/keras_own.py --plain            # of Keras without unidist, to compare
    PYTHON ci/keras_own.py --keras 3.15.0     # of another version; without it, of the one that is installed

The file is `keras/src/distribution/distribution_lib_test.py` of Keras's source distribution, which pip downloads. Keras
skips most of it where the backend is not JAX; these skips are taken out, and nothing else is changed. A test that fails
must stand in EXCUSED, with its reason; a test that stands there and passes is an error as well.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTED = "keras/src/distribution/distribution_lib_test.py"
# What is written before `import keras`: nothing for --plain.
ADAPTER = {
    "torch": "unidist.use('torch')",
    "sim": "unidist.use('sim', devices=4)",
    "jax": "unidist.use('jax', devices=8)",
    "tensorflow": "unidist.use('tensorflow', devices=8)",
}
INTEGERS = "Keras on torch lets variables of integers require gradients, which torch refuses: so without unidist"
TRAINABLE_INTEGERS = dict.fromkeys(
    (
        "DataParallelDistributionTest.test_get_variable_layout",
        "DataParallelDistributionTest.test_get_variable_layout_with_explicit_layout",
        "ModelParallelDistributionTest.test_distribute_weights",
        "ModelParallelDistributionTest.test_get_variable_layout_with_explicit_layout",
    ),
    INTEGERS,
)
SHARDED_DATA = "DataShardingIntegrationTest.test_distribute_dataset_sharding_behavior"
EXCUSED: Mapping[str, Mapping[str, str]] = {
    "torch": {**TRAINABLE_INTEGERS, SHARDED_DATA: "it asks for four devices in one process"},
    "sim": TRAINABLE_INTEGERS,
    "jax": {},
    "tensorflow": {},
}
KERAS_BACKEND = {"torch": "torch", "sim": "torch", "jax": "jax", "tensorflow": "tensorflow"}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=sorted(ADAPTER), default="torch")
    parser.add_argument("--keras", default=metadata.version("keras"), help="a version on PyPI")
    parser.add_argument("--plain", action="store_true", help="without unidist, to compare")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="unidist-keras-") as folder:
        _written(_source(asked.keras, Path(folder)), Path(folder), "" if asked.plain else ADAPTER[asked.backend])
        outcomes = _outcomes(Path(folder), KERAS_BACKEND[asked.backend])
    return _judged(outcomes, {} if asked.plain else EXCUSED[asked.backend])


def _source(version: str, folder: Path) -> str:
    command = (sys.executable, "-m", "pip", "download", "--quiet", f"keras=={version}", "--no-binary", "keras")
    subprocess.run((*command, "--no-deps", "--no-build-isolation", "-d", str(folder)), check=True, timeout=300)
    (archive,) = folder.glob("keras-*.tar.gz")
    with tarfile.open(archive) as held:
        file = held.extractfile(f"keras-{version}/{TESTED}")
        assert file is not None
        return file.read().decode()


def _written(source: str, folder: Path, use: str) -> None:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.decorator_list = [d for d in node.decorator_list if "skipif" not in ast.unparse(d)]
    (folder / "distribution_lib_test.py").write_text(ast.unparse(tree))
    (folder / "conftest.py").write_text(f"import unidist\n{use}\nimport keras\n")
    (folder / "pytest.ini").write_text("[pytest]\n")


def _outcomes(folder: Path, backend: str) -> dict[str, str]:
    """Of each test its outcome: nothing where it passed, else the first line of what it raised."""
    report = folder / "report.xml"
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--tb=short")
    subprocess.run((*command, "distribution_lib_test.py"), cwd=folder, env=environment, timeout=600)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        fallen = [child.get("message") or child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        outcomes[name] = fallen[0].partition("\n")[0] if fallen else ""
    return outcomes


def _judged(outcomes: Mapping[str, str], excused: Mapping[str, str]) -> int:
    fallen = {name: why for name, why in outcomes.items() if why}
    for name, why in fallen.items():
        print(f"{'excused' if name in excused else 'FAILED'}: {name}: {excused.get(name, why)}")
    mended = [name for name in excused if name not in fallen]
    for name in mended:
        print(f"PASSES, take it out of EXCUSED: {name}")
    print(f"{len(outcomes) - len(fallen)} of {len(outcomes)} passed")
    return int(bool(mended or set(fallen) - set(excused)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
