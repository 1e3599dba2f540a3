"""The environment of processes that may import TensorFlow, which tests/conftest.py hides from all others."""

from __future__ import annotations

import os

HIDING = "without_tensorflow"

# TensorFlow's log on standard error is silent below errors; no accelerator is looked for.
WITH_TENSORFLOW = {
    "PYTHONPATH": os.pathsep.join(
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and not path.endswith(HIDING)
    ),
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
