"""What a process holds at most while a model of any size is loaded inside a scope, over its shards.

    python benchmarks/loading.py --backend torch --processes 4 --strategy model --folder /tmp/big [--megabytes 1024]
    python benchmarks/loading.py --backend jax --processes 2 --devices 2 ...

Starts itself under `unidist run`. The files are written once: kernels of an eighth of the size, random values. Ways
of loading: from Keras's .weights.h5, sharded .weights.json, .keras and a folder of keras_hub's, and from
a folder of Hugging Face's. Prints for each process the bytes of its shards, its peak over what it held before, the
largest variable, and the ratio (peak - shards) / largest: 2 is the aim, and a constant.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MB = 1 << 20
WAYS = ("built", "weights", "sharded", "keras", "preset", "huggingface")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch", choices=("torch", "jax", "tensorflow"))
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1, help="of each process, on JAX and TensorFlow")
    parser.add_argument("--strategy", default="model", choices=("model", "zero3"))
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--write", action="store_true", help="writes the files and ends")
    return parser.parse_args()


def width(megabytes: int) -> int:
    """Of square float32 kernels; eight have this size."""
    return round((megabytes * MB / 8 / 4) ** 0.5) // 16 * 16


# the models -----------------------------------------------------------------------------------------------------------


def stack(megabytes: int) -> Any:
    import keras

    size = width(megabytes)
    return keras.Sequential([keras.Input((size,)), *[keras.layers.Dense(size) for _ in range(8)]])


def llama(megabytes: int) -> dict[str, int]:
    """Two layers: of a quarter of the size each, and an embedding of a half."""
    size = width(megabytes) // 2 // 8 * 8
    return {
        "vocabulary_size": size * 8,
        "num_layers": 2,
        "num_query_heads": 8,
        "num_key_value_heads": 8,
        "hidden_dim": size,
        "intermediate_dim": size * 2,
    }


def write(folder: Path, megabytes: int) -> None:
    """The files of all ways, by one process without a strategy."""
    import keras
    import keras_hub
    import numpy as np
    from keras_hub.src.utils.transformers.export.hf_exporter import export_backbone

    rng = np.random.default_rng(0)

    def filled(model: Any) -> Any:
        for variable in model.weights:
            variable.assign(rng.random(variable.shape, np.float32))
        return model

    model = filled(stack(megabytes))
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    (folder / "sharded").mkdir(parents=True)
    model.save_weights(folder / "sharded" / "model.weights.json", max_shard_size=megabytes / 1024 / 3)
    del model
    backbone = filled(keras_hub.models.Llama3Backbone(**llama(megabytes)))
    backbone.save_to_preset(folder / "preset")
    export_backbone(backbone, str(folder / "huggingface"), include_lm_head=True)
    keras.utils.clear_session()


# measuring ------------------------------------------------------------------------------------------------------------


def status(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def peak_of(work: Callable[[], Any]) -> tuple[Any, int, float]:
    """What some work gives, its peak over what is held before, and its seconds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status("VmRSS"), time.perf_counter()
    result = work()
    return result, status("VmHWM") - before, time.perf_counter() - start


def way(name: str, folder: Path, megabytes: int) -> Any:
    """Loads by one way, or builds."""
    import keras
    import keras_hub

    if name in ("preset", "huggingface"):
        return keras_hub.models.Llama3Backbone.from_preset(str(folder / name), dtype="float32")
    if name == "keras":
        return keras.models.load_model(folder / "model.keras")
    model = stack(megabytes)
    if name != "built":
        path = Path("sharded/model.weights.json") if name == "sharded" else Path("model.weights.h5")
        model.load_weights(folder / path)
    return model


def measure(arguments: argparse.Namespace) -> None:
    import unidist

    unidist.use(arguments.backend)
    import keras
    import keras_hub  # before anything is measured
    import numpy as np

    if arguments.backend == "torch":
        import torch

        torch.set_num_threads(1)
    strategy = unidist.DataParallel(zero=3) if arguments.strategy == "zero3" else unidist.ModelParallel()
    assert keras_hub.models
    for name in arguments.ways:
        keras.utils.clear_session()
        unidist.barrier()
        with strategy.scope():
            model, peak, seconds = peak_of(lambda name=name: way(name, arguments.folder, arguments.megabytes))
        local = arguments.devices
        shards = local * unidist.describe(model).bytes_of("weights")
        largest = max(int(np.prod(v.shape)) * 4 for v in model.weights)
        print(
            f"{arguments.backend} {arguments.strategy} {name:12s} process {unidist.process_index()}: "
            f"shards {shards / MB:7.0f} MB, peak {peak / MB:7.0f} MB, largest {largest / MB:5.0f} MB, "
            f"(peak - shards) / largest {(peak - shards) / largest:5.2f}, {seconds:.1f} s",
            flush=True,
        )
        del model


def main() -> None:
    arguments = options()
    if arguments.write:
        write(arguments.folder, arguments.megabytes)
    elif "UNIDIST_LOADING" in os.environ:
        measure(arguments)
    else:
        if not arguments.folder.exists():
            arguments.folder.mkdir(parents=True)
            environment = {**os.environ, "KERAS_BACKEND": "torch"}
            subprocess.run([sys.executable, *sys.argv, "--write"], env=environment, check=True)
        run = ["run", "--backend", arguments.backend, "-n", str(arguments.processes)]
        if arguments.devices > 1:
            run += ["--devices-per-process", str(arguments.devices)]
        command = [sys.executable, "-m", "unidist", *run, *sys.argv]
        subprocess.run(command, env={**os.environ, "UNIDIST_LOADING": "1"}, check=True)


if __name__ == "__main__":
    main()
