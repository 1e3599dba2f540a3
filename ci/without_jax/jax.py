"""Stands before JAX on the path of the tests' programs: Keras imports it for its callbacks on every backend.

Keras on torch and TensorFlow goes without it. For anybody else this steps aside.
"""

import importlib
import os
import sys


def _is_for_keras() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("keras."):
            return True
        frame = frame.f_back
    return False


if (backend := os.environ.get("KERAS_BACKEND")) in ("torch", "tensorflow") and _is_for_keras():
    raise ImportError(f"programs of Keras on {backend} run without JAX in these tests")
here = os.path.realpath(os.path.dirname(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
del sys.modules[__name__]
importlib.import_module("jax")
