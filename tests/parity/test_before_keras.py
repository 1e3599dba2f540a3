"""Names of unidist asked for before `import keras`, in fresh processes: what Keras brings then imports the same.

And Keras brings it whoever looked for Keras before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.visible import QUICK_JAX, WITH_TENSORFLOW

ROOT = Path(__file__).resolve().parents[2]


# Of each Keras backend a name whose module is begun and not done when Keras's hooks ask for it.
@pytest.mark.parametrize(
    ("keras_backend", "used", "asked"),
    [
        ("torch", "'sim', devices=2", "unidist.plan"),
        ("jax", "'jax', devices=2", "unidist.ModelParallel"),
        ("tensorflow", "'sim', devices=2", "unidist.DataParallel"),
    ],
)
def test_a_name_that_needs_keras_is_asked_for_before_it_is_imported(keras_backend: str, used: str, asked: str) -> None:
    program = (
        f"import importlib.util, sys, unidist; unidist.use({used})\n"
        # TensorFlow asks so where it is imported before Keras, as for tf.data.
        "assert importlib.util.find_spec('keras')\n"
        f"assert 'keras' not in sys.modules; {asked}\n"
        "import keras\n"
        "assert len(keras.distribution.list_devices()) == 2\n"
        "mesh = unidist.Mesh({'model': 2})\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])\n"
        "rules = unidist.LayoutMap(mesh, {'.*kernel': (None, 'model')})\n"
        "unidist.parallelize(model, unidist.ModelParallel(mesh, rules))\n"
        "print([row.local_shape for row in unidist.describe(model).sharded])"
    )
    env = {**os.environ, **QUICK_JAX, "KERAS_BACKEND": keras_backend}
    env |= WITH_TENSORFLOW if keras_backend == "tensorflow" else {}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), env["PYTHONPATH"]))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[(4, 2)]"
