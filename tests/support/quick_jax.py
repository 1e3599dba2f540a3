"""JAX lowers more quickly: tests compile thousands of small programs, each for one run.

JAX makes an MLIR context for each program and loads all dialects into it, which takes a third of the time of lowering a
small one. One context serves all programs of a process as well. Locations of Python in a program are for people.

Imported by what tests preload. (`jax._src.interpreters.mlir.make_ir_context`, read in JAX 0.10.2.)
"""

from __future__ import annotations

from functools import cache

import jax
from jax._src.interpreters import mlir

jax.config.update("jax_traceback_in_locations_limit", 0)
mlir.make_ir_context = cache(mlir.make_ir_context)
