"""Stands before JAX on the path of the tests' programs: Keras imports it for its callbacks on every backend.

Programs of Keras on torch and TensorFlow go without it. In any other this steps aside.
"""

import importlib
import os
import sys

if (backend := os.environ.get("KERAS_BACKEND")) in ("torch", "tensorflow"):
    raise ImportError(f"programs of Keras on {backend} run without JAX in these tests")
sys.path[:] = [
    entry for entry in sys.path if os.path.realpath(entry or ".") != os.path.realpath(os.path.dirname(__file__))
]
del sys.modules[__name__]
importlib.import_module("jax")
