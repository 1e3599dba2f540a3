"""unidist on a GPU against plain Keras on it, and against what the GPU itself can do. It has never run on a GPU.

    python benchmarks/gpu.py                             all but units, on one GPU
    unidist run -n 2 benchmarks/gpu.py --only units      on several, or by UNIDIST_TORCH_TRANSPORT=gloo on one
    python benchmarks/gpu.py --device cpu --small        that it runs at all: the figures say nothing of a GPU

    mlp, resnet, gpt2   fit's own step under DataParallel, in a world of one, over Keras's own on the same model
    units               steps of ZeRO-3 by the size of what is gathered at once, and of data parallelism by that of
                        the gradients' buckets, each over the usual size
    pack                gradients that are packed into a bucket, over a copy of as many bytes on the device
    input               fit that reads from a DataLoader, over as many steps on data that is there

Programs take turns in one process, and prints are medians of paired ratios. The device is waited for before each
reading of the clock, and not within. Each model is tried in float32, in mixed_bfloat16 and by jit_compile=True.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import unidist

WORLDS_OF_ONE = ("mlp", "resnet", "gpt2", "pack", "input")
PARTS = (*WORLDS_OF_ONE, "units")
VARIANTS = ("float32", "mixed_bfloat16", "compiled")


def given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="models and batches of a size for a CPU")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {','.join(PARTS)}")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, help="by default 15, and 3 with --small")
    parser.add_argument("--steps", type=int, help="of a round; by default 10, and 2 with --small")
    found = parser.parse_args()
    if unknown := {*(found.only or []), *found.variants} - {*PARTS, *VARIANTS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    found.rounds = found.rounds or (3 if found.small else 15)
    found.steps = found.steps or (2 if found.small else 10)
    return found


OPTIONS = given()
if OPTIONS.device == "cpu":
    os.environ["KERAS_TORCH_DEVICE"] = "cpu"
unidist.use("torch")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from mlp import crossentropy, fits_step, keras_model  # noqa: E402
from paired import Step, report, seconds  # noqa: E402

from unidist.algebra import Mesh  # noqa: E402
from unidist.backends import registry  # noqa: E402
from unidist.keras.patching.compat import get_device  # noqa: E402
from unidist.keras.torch.params import param_groups  # noqa: E402
from unidist.keras.torch.params.buckets import Watched, WholeBucket  # noqa: E402
from unidist.keras.torch.params.flat_buffer import Cut, FlatBuffer  # noqa: E402
from unidist.keras.torch.step import reducer  # noqa: E402
from unidist.keras.torch.world import RankWorld  # noqa: E402

SMALL, MIB = OPTIONS.small, 1 << 20
OURS, ALONE = "unidist", "Keras alone"
# What a model is, the rows of a batch: x and y.
Program = tuple[Callable[[], keras.Model], Callable[[], tuple[Any, Any]]]


def done() -> None:
    """The device has computed all that it was given, on every rank."""
    if get_device() != "cpu":
        torch.cuda.synchronize()
    if unidist.process_count() > 1:
        unidist.barrier()


def there(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x).to(get_device())


# a world of one over Keras alone --------------------------------------------------------------------------------------


def mlp() -> Program:
    rows, draw = 32 if SMALL else 256, np.random.default_rng(0)
    x, y = draw.normal(size=(rows, 784)).astype("float32"), draw.integers(0, 10, rows)
    return keras_model, lambda: (there(x), there(y))


def resnet() -> Program:
    rows, side = (2, 32) if SMALL else (64, 224)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(rows, side, side, 3)).astype("float32"), draw.integers(0, 10, rows)

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        return keras.applications.ResNet50(
            weights=None, input_shape=(side, side, 3), classes=10, classifier_activation=None
        )

    return model, lambda: (there(x), there(y))


def gpt2() -> Program:
    import keras_hub

    vocabulary, layers, heads, width, length, rows = (256, 2, 2, 64, 32, 2) if SMALL else (50257, 12, 12, 768, 512, 8)
    ids = np.random.default_rng(0).integers(0, vocabulary, (rows, length)).astype("int32")

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary, layers, heads, width, 4 * width, dropout=0.0, max_sequence_length=length
        )
        return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)

    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    return model, lambda: ({name: there(one) for name, one in x.items()}, there(np.roll(ids, -1, 1)))


PROGRAMS: dict[str, Callable[[], Program]] = {"mlp": mlp, "resnet": resnet, "gpt2": gpt2}


@contextlib.contextmanager
def policy(variant: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16" if variant == "mixed_bfloat16" else "float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def compiled(model: keras.Model, variant: str) -> keras.Model:
    model.compile(keras.optimizers.Adam(1e-4), crossentropy(), jit_compile=variant == "compiled")
    return model


def kerass_step(model: keras.Model, x: Any, y: Any) -> Step:
    """The step that fit runs on a model that unidist has not placed."""
    model.train_on_batch(x, y)
    function = model.train_function
    return lambda: function([(x, y)])


def overhead(name: str, variant: str) -> None:
    make, batch = PROGRAMS[name]()
    with policy(variant):
        with unidist.DataParallel().scope():
            ours = compiled(make(), variant)
        alone = compiled(make(), variant)
        candidates = {OURS: fits_step(ours, *batch()), ALONE: kerass_step(alone, *batch())}
        times = seconds(candidates, OPTIONS.rounds, steps=OPTIONS.steps, meet=done)
    report(f"{name}, {variant}, a world of one", times, OPTIONS.steps, {(OURS, ALONE): 1.05})


# sizes of what is gathered and reduced at once ------------------------------------------------------------------------


def wide(zero: int) -> Step:
    width, depth = (128, 4) if SMALL else (2048, 24)
    keras.utils.set_random_seed(0)
    with unidist.DataParallel(zero=zero).scope():
        stack = [keras.layers.Dense(width, "relu") for _ in range(depth)]
        model = keras.Sequential([keras.Input((width,)), *stack])
        model.compile(keras.optimizers.Adam(1e-4), "mse")
    x = np.random.default_rng(0).normal(size=(64 * unidist.process_count(), width)).astype("float32")
    return fits_step(model, there(x), there(x))


def by_unit(mib: float) -> Step:
    param_groups.UNIT_BYTES, before = int(mib * MIB), param_groups.UNIT_BYTES
    try:
        return wide(3)
    finally:
        param_groups.UNIT_BYTES = before


def by_bucket(mib: float) -> Step:
    os.environ["UNIDIST_BUCKET_MB"] = str(mib)
    try:
        return wide(0)
    finally:
        del os.environ["UNIDIST_BUCKET_MB"]


def sizes() -> None:
    of_units: tuple[Callable[[float], Step], float] = (by_unit, param_groups.UNIT_BYTES / MIB)
    of_buckets: tuple[Callable[[float], Step], float] = (by_bucket, reducer.BUCKET_BYTES / MIB)
    for title, (make, usual) in {"ZeRO-3, units of": of_units, "data parallel, buckets of": of_buckets}.items():
        steps = {f"{factor * usual:g} MiB": make(factor * usual) for factor in (0.01, 0.25, 1, 4, 16)}
        times = seconds(steps, OPTIONS.rounds, steps=OPTIONS.steps, meet=done)
        if unidist.process_index() == 0:
            standard = f"{usual:g} MiB"
            others = {(standard, other): 1.0 for other in steps if other != standard}
            report(f"{title}, {unidist.process_count()} ranks", times, OPTIONS.steps, others)


# packing --------------------------------------------------------------------------------------------------------------


def packing() -> None:
    """As many gradients as a bucket of the usual size holds, of kernels and biases."""
    width = 64 if SMALL else 1024
    shapes = [(width, width), (width,)] * (4 if SMALL else 6)
    grads = [torch.ones(shape, device=get_device()) for shape in shapes]
    candidates: dict[str, Step] = {
        "into a bucket": into_bucket(grads),
        "cut for 8 ranks, by rows": into_rows(grads, 0),
        "cut for 8 ranks, by columns": into_rows(grads, -1),
    }
    whole = torch.ones(sum(g.numel() for g in grads), device=get_device())
    there_too = torch.empty_like(whole)
    copied = "a copy of as many bytes"
    candidates[copied] = lambda: there_too.copy_(whole)
    count = 20 * OPTIONS.steps
    times = seconds(candidates, OPTIONS.rounds, steps=count, meet=done)
    nbytes = whole.numel() * whole.element_size()
    report(f"pack {nbytes / MIB:.1f} MiB", times, count, {(name, copied): 1.5 for name in candidates if name != copied})
    for name, values in times.items():
        print(f"  {name:32s} {nbytes * count / statistics.median(values) / 1e9:8.2f} GB/s read, and as many written")


def into_bucket(grads: list[torch.Tensor]) -> Step:
    """What a bucket does before its collective, of which a world of one has none."""
    world = RankWorld(Mesh({"data": 1}), registry.current(), ("data",))
    leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    bucket = WholeBucket(world, 0, [Watched(p, p, ("data",)) for p in leaves])

    def step() -> None:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        with torch.no_grad():
            bucket.launch()
            bucket.finish()

    return step


def into_rows(grads: list[torch.Tensor], dim: int, ranks: int = 8) -> Step:
    world = RankWorld(Mesh({"data": ranks}), registry.current(), ("data",))
    cuts = [Cut(tuple(g.shape), dim % g.ndim, (g.shape[dim] // ranks,) * ranks) for g in grads]
    flat = FlatBuffer(world, 0, ("data",), cuts, grads)
    buffer = flat._buffer()

    def step() -> None:
        for k in flat.packed:
            flat._put(buffer, k, grads[k])

    return step


# reading --------------------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    """Made on the host, each when it is read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> tuple[np.ndarray, int]:
        return np.sin(np.arange(784, dtype="float32") * (k + 1)), k % 10


def reading() -> None:
    rows, steps = (32, 4) if SMALL else (256, 100)
    with unidist.DataParallel().scope():
        model = compiled(keras_model(), "float32")
    x, y = mlp()[1]()
    step = fits_step(model, x[:rows], y[:rows])
    data = Rows(rows * steps)

    def fits(workers: int) -> Step:
        loader = torch.utils.data.DataLoader(data, rows, num_workers=workers, persistent_workers=workers > 0)
        return lambda: model.fit(loader, epochs=1, shuffle=False, verbose=0)

    def on_data_that_is_there() -> None:
        for _ in range(steps):
            step()

    names = {"DataLoader": 0, "DataLoader, 2 workers": 2, "DataLoader, 8 workers": 0 if SMALL else 8}
    candidates = {f"fit, {name}": fits(workers) for name, workers in names.items() if workers or name == "DataLoader"}
    there_already = "steps on data that is there"
    times = seconds({**candidates, there_already: on_data_that_is_there}, OPTIONS.rounds, meet=done)
    report("input pipeline, MLP", times, steps, {(name, there_already): 1.10 for name in candidates})


def main() -> None:
    count = unidist.process_count()
    parts = OPTIONS.only or (WORLDS_OF_ONE if count == 1 else ("units",))
    device = torch.device(get_device())
    if device.type == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU: these are no figures of a GPU"
    if OPTIONS.device != device.type:
        raise SystemExit("there is no CUDA here: --device cpu --small tries the program itself")
    if unidist.process_index() == 0:
        print(f"torch {torch.__version__}, processes: {count}, device: {device}, {name}", flush=True)
    if wrong := [part for part in parts if (part == "units") != (count > 1)]:
        raise SystemExit(f"{', '.join(wrong)}: run it by {'one process' if count > 1 else 'unidist run -n 2'}")
    for part in parts:
        if part in PROGRAMS:
            for variant in OPTIONS.variants:
                if SMALL and (part, variant) == ("resnet", "compiled"):
                    print("resnet, compiled: left out with --small, compiling takes minutes on a CPU")
                    continue
                overhead(part, variant)
        else:
            {"units": sizes, "pack": packing, "input": reading}[part]()


if __name__ == "__main__":
    main()
