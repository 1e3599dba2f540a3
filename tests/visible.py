"""Environments of the processes that tests start: which may import TensorFlow, and how XLA compiles.

tests/conftest.py hides it from all others.

"""

from __future__ import annotations

from tests.support.hiding import path_with

# TensorFlow's log on standard error is silent below errors; no accelerator is looked for.
WITH_TENSORFLOW = {
    "PYTHONPATH": path_with("tensorflow"),
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}

# XLA partitions programs as ever, and then spends less time on making each faster: they run for a few steps only. Its
# emitters of fused kernels take longer than all the rest.
QUICK_XLA = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)
QUICK_JAX = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA}

# By Keras backend. Worlds with the same variables and the same `preload` are forked from one server.
OF_KERAS = {
    "torch": {"KERAS_BACKEND": "torch"},
    "jax": {"KERAS_BACKEND": "jax", **QUICK_JAX},
    "tensorflow": {"KERAS_BACKEND": "tensorflow", **WITH_TENSORFLOW},
}
