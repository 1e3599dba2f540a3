"""`unidist demo`: trains on virtual devices, shows what is where and moves, compares with one device."""

from __future__ import annotations

import argparse
import importlib
import math
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unidist import session
from unidist.algebra import Mesh
from unidist.algebra.mesh import parse_mesh
from unidist.backends import installed, registry
from unidist.backends.protocol import Array, DistributionBackend, itemsize
from unidist.errors import BackendNotAvailableError, MeshError
from unidist.ledger import Ledger, ledger
from unidist.planner.layout_map import LayoutMap
from unidist.tables import titled

if TYPE_CHECKING:
    from unidist.keras.driver import Row

SEED = 1
BATCH = 64
FIRST_STEPS = 5
BOUND_AFTER_FIRST_STEPS = 1e-5
BOUND_AFTER_ALL = 1e-4
BOUND_ACCURACY = 0.95
Cells = tuple[str, ...]

# A Megatron pair over the model axis: the first layer is cut by its outputs, the second by its inputs. The first
# convolution is cut by its output channels. What no rule names is replicated.
RULES = {
    ".*stem/kernel": (None, None, None, "model"),
    ".*wide/kernel": (None, "model"),
    ".*wide/bias": ("model",),
    ".*narrow/kernel": ("model", None),
}


@dataclass(frozen=True)
class Digits:
    """scikit-learn's handwritten digits: images of 8x8, a fifth of them held back for the test."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


@dataclass
class Run:
    """A training and what came of it; weights by path."""

    losses: list[float]
    first: dict[str, Array]
    last: dict[str, Array]
    accuracy: float
    seconds: float


def main(arguments: Sequence[str] = ()) -> int:
    """Runs the demo.

    Returns:
        0, or 1 where a bound on the difference from one device, or on the accuracy, is missed.

    Raises:
        BackendNotAvailableError: scikit-learn, which has the data, or the backend is not installed.
        MeshError: the mesh does not fit the devices.
    """
    options = _options(arguments)
    digits = _digits()
    sizes = _mesh_sizes(options.mesh, options.devices)
    adapter = session.use(
        options.backend, devices=math.prod(sizes.values()) if not registry.entry(options.backend).one_device else None
    )

    _check_started(adapter, math.prod(sizes.values()))

    def say(text: str) -> None:
        if adapter.process_index() == 0:
            print(text, flush=True)

    mesh = Mesh(sizes)
    import keras

    from unidist.keras.strategies.strategy import ModelParallel

    places = "in one process" if adapter.process_count() == 1 else f"in {adapter.process_count()} processes"
    version = f"Keras {keras.__version__} on {keras.config.backend()}"
    say(f"{mesh.size} devices ({places}) as {mesh}, backend {adapter.name!r}, {version}")

    say(f"\nOn the mesh, {options.epochs} epochs of {len(digits.x)} images:")
    with ModelParallel(mesh, LayoutMap(mesh, RULES)).scope():
        model = _model()
        many, traffic = _train(model, digits, options.epochs, verbose=2 if options.quiet else 1)
        say("\n" + _layouts(model))
    say("\n" + _traffic(traffic, len(many.losses)))

    say("\nThe same on one device:")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "model 'digits' has no strategy")
        alone, _ = _train(_model(), digits, options.epochs, verbose=2 if options.quiet else 1)
    say("\n" + _epochs(many, alone))
    if adapter.process_count() == 1:
        say("Virtual devices share this machine's cores: they show the numbers, and not the speed.")
    verdicts = _verdicts(many, alone)
    say("\n" + "\n".join(f"{'ok  ' if good else 'MISS'}  {text}" for good, text in verdicts))
    return 0 if all(good for good, _ in verdicts) else 1


def _check_started(adapter: DistributionBackend, wanted: int) -> None:
    if (found := len(adapter.list_devices())) < wanted:
        raise MeshError(
            f"{wanted} devices are wanted, and {adapter.name!r} has {found}, a process each: "
            f"`unidist run -n {wanted} --backend {adapter.name} -m unidist demo --backend {adapter.name}`"
        )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="unidist demo", description=__doc__)
    parser.add_argument("--backend", default="sim", help="sim (default), jax, tensorflow; others under `unidist run`")
    parser.add_argument("--devices", type=int, help="how many devices (default: as many as the mesh has, or 4)")
    parser.add_argument("--mesh", help="axes and sizes, as data=2,model=2 (the default for 4 devices)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data (default: 6)")
    parser.add_argument("--quiet", action="store_true", help="a line for each epoch instead of a progress bar")
    found = parser.parse_args(list(arguments))
    if found.epochs < 1:
        parser.error(f"--epochs must be at least 1, found {found.epochs}")
    if found.devices is not None and found.devices < 1:
        parser.error(f"--devices must be at least 1, found {found.devices}")
    return found


def _mesh_sizes(text: str | None, devices: int | None) -> dict[str, int]:
    if text is None:
        count = devices or 4
        model = 2 if count % 2 == 0 else 1
        return {"data": count // model, "model": model}
    sizes = parse_mesh(text)
    if not sizes.keys() <= {"data", "model"}:
        raise MeshError(f"--mesh {text!r}: write the sizes of the axes data and model, as data=2,model=2")
    sizes = {axis: sizes.get(axis, 1) for axis in ("data", "model")}
    if devices is not None and math.prod(sizes.values()) != devices:
        raise MeshError(f"--mesh {text} has {math.prod(sizes.values())} places, but --devices is {devices}")
    return sizes


def _digits() -> Digits:
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise BackendNotAvailableError(
            f"the demo trains on scikit-learn's handwritten digits, and scikit-learn is not installed ({error}): "
            f"{installed.install('demo')}"
        ) from error
    images, classes = datasets.load_digits(return_X_y=True)
    x = (images.reshape(-1, 8, 8, 1) / 16.0).astype("float32")
    y = classes.astype("int32")
    order = np.random.default_rng(SEED).permutation(len(x))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    return Digits(x[train], y[train], x[test], y[test])


# the model and its training -------------------------------------------------------------------------------------------


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False, name="stem"),
            layers.BatchNormalization(momentum=0.9, name="norm"),
            layers.Activation("gelu", name="gelu"),
            layers.AveragePooling2D(2, name="pool"),
            layers.Flatten(name="flat"),
            layers.Dense(256, activation="gelu", name="wide"),
            layers.Dense(64, name="narrow"),
            layers.Dense(10, name="digit"),
        ],
        name="digits",
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _train(model: Any, digits: Digits, epochs: int, *, verbose: int) -> tuple[Run, Ledger]:
    from unidist.keras.api.models import gather_weights

    rows = FIRST_STEPS * BATCH
    began = time.perf_counter()
    model.fit(digits.x[:rows], digits.y[:rows], batch_size=BATCH, shuffle=False, verbose=0)
    first = gather_weights(model)
    with ledger() as traffic:
        history = model.fit(digits.x, digits.y, batch_size=BATCH, epochs=epochs, verbose=verbose).history
    last = gather_weights(model)
    scores = model.evaluate(digits.x_test, digits.y_test, batch_size=BATCH, verbose=0, return_dict=True)
    seconds = time.perf_counter() - began
    return Run([float(v) for v in history["loss"]], first, last, float(scores["accuracy"]), seconds), traffic


# what is shown --------------------------------------------------------------------------------------------------------


def _layouts(model: Any) -> str:
    from unidist.keras.api.models import describe

    found = describe(model).rows
    weights = {v.path for v in model.variables}
    body: list[Cells] = [
        (
            row.path.removeprefix(f"{model.name}/"),
            row.in_words,
            _shape(row.shape),
            _shape(row.local_shape),
            *_share([row]),
        )
        for row in found
        if row.path in weights
    ]
    slots = [row for row in found if row.path not in weights]
    body.append((f"optimizer: {len(slots)} variables", "", "", "", *_share(slots)))
    body.append((f"all {len(found)} variables", "", "", "", *_share(found)))
    head = ("variable", "layout", "shape", "on a device", "bytes", "share")
    return _table("What each device holds, and what share that is of the whole", [head, *body], (4, 5))


def _share(rows: Sequence[Row]) -> tuple[str, str]:
    """(bytes on a device, what part that is of one device that has all)."""
    held = sum(row.bytes_per_device for row in rows)
    return f"{held:,}", f"{held / sum(_whole_bytes(row) for row in rows):.0%}"


def _whole_bytes(row: Row) -> int:
    return math.prod(row.shape) * itemsize(row.dtype)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _traffic(book: Ledger, epochs: int) -> str:
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[str, str], list[str]] = {}
    for op, axes, purpose, count, size in book.rows():
        counts[op, axes] += count
        sent[op, axes] += round(size)
        if purpose and purpose not in reasons.setdefault((op, axes), []):
            reasons[op, axes].append(purpose)
    body: list[Cells] = [
        (op, axes or "-", _some(reasons.get((op, axes), [])), f"{n:,}", f"{sent[op, axes]:,}")
        for (op, axes), n in counts.items()
    ]
    body.append(("all", "", "", f"{book.count():,}", f"{round(book.bytes()):,}"))
    head = ("collective", "axes", "for", "count", "bytes sent by a device")
    return _table(f"Traffic of {epochs} epochs", [head, *body], (3, 4))


def _some(words: list[str]) -> str:
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")


def _epochs(many: Run, alone: Run) -> str:
    body: list[Cells] = [
        (str(k + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
        for k, (a, b) in enumerate(zip(many.losses, alone.losses, strict=True))
    ]
    body.append(("seconds", f"{many.seconds:.1f}", f"{alone.seconds:.1f}", ""))
    head = ("epoch", "on the mesh", "one device", "difference")
    return _table("Loss of each epoch", [head, *body], (1, 2, 3))


def _verdicts(many: Run, alone: Run) -> list[tuple[bool, str]]:
    first, last = _difference(many.first, alone.first), _difference(many.last, alone.last)
    weights, bounds = "largest difference of a weight after", (BOUND_AFTER_FIRST_STEPS, BOUND_AFTER_ALL)
    accuracies = f"{many.accuracy:.4f}, one device {alone.accuracy:.4f}"
    return [
        (first <= bounds[0], f"{weights} {FIRST_STEPS} steps: {first:.1e} (bound {bounds[0]:.0e})"),
        (last <= bounds[1], f"{weights} all epochs: {last:.1e} (bound {bounds[1]:.0e})"),
        (many.accuracy > BOUND_ACCURACY, f"accuracy on held-back digits: {accuracies} (above {BOUND_ACCURACY})"),
    ]


def _difference(left: dict[str, Array], right: dict[str, Array]) -> float:
    if left.keys() != right.keys():
        return math.inf
    worst = max(float(np.abs(np.asarray(left[path], "float64") - right[path]).max()) for path in left)
    return worst if math.isfinite(worst) else math.inf


def _table(title: str, rows: list[Cells], numbers: tuple[int, ...]) -> str:
    return titled(title, rows, numbers, shutil.get_terminal_size().columns).rstrip()
