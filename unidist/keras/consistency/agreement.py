"""Agreement: checks that processes were given the same model, optimizer, losses, arguments, weights.

Each runs its own program. Where one of them has another learning rate, or weights of its own, every step would go
through and give numbers of no model at all. A digest of all that must be alike is compared when fit, evaluate or
predict begins, when an epoch begins, and when fit ends: one number each time. Weights may differ in their last bits.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras.callbacks import Callback, CallbackList

from unidist.backends.protocol import Array
from unidist.errors import DesyncError
from unidist.keras.consistency.processes import Processes
from unidist.keras.patching.compat import tree

# Values of a variable that are compared, at most: so many, evenly spread.
SAMPLE = 4096
# Of a variable's mean magnitude: what rounding may make of replicas, not what other weights are.
TOLERANCE = 1e-3
# Of many calls of train_on_batch and its like, the first two are compared and one of so many.
FIRST, EVERY = 2, 256
_PLAIN = (bool, int, float, str, type(None))
_BITS = 0x7FFFFFFF


@dataclass(frozen=True)
class Peers:
    """The processes that train a model together, and what they hold alike of it.

    Attributes:
        processes: those.
        replica: the values of a variable that all hold alike, or SAMPLE of them; None where it is cut.
    """

    processes: Processes
    replica: Callable[[Any], Array | None]

    def of_all(self, number: int) -> tuple[int, ...]:
        """Every process's number, by place. A collective."""
        return self.processes.of_all(number, "agreement")

    @property
    def ranks(self) -> tuple[int, ...]:
        """A rank of each process, by place."""
        return self.processes.firsts


def begin(given: inspect.BoundArguments, name: str, find_peers: Callable[[], Peers | None]) -> None:
    """Compares what the processes were given to an entrance of Keras's trainer; in fit at each epoch too.

    Args:
        given: the entrance's arguments; changed here. name: the entrance's.
        find_peers: gives the processes, or None where there are no others.

    Raises:
        DesyncError: they differ.
    """
    peers = find_peers()
    if peers is not None:
        model, is_batch = given.arguments["self"], name.endswith("_on_batch")
        check(model, name, peers, () if is_batch else [*arguments_of(given), *learned_by(model)])
        if name == "fit":
            _listen(given, _Epochs(peers))


def is_turn(calls: int) -> bool:
    """Returns whether processes compare at a model's call on one batch, by the number of calls until now."""
    return calls <= FIRST or (calls - 1) % EVERY == 0


def _listen(given: inspect.BoundArguments, callback: Callback) -> None:
    callbacks = given.arguments.get("callbacks")
    if isinstance(callbacks, CallbackList):
        callback.set_model(given.arguments["self"])
        # The user's own list may serve another fit.
        if not any(isinstance(one, _Epochs) for one in callbacks.callbacks):
            callbacks.append(callback)
    else:
        given.arguments["callbacks"] = [*(one for one in tree.flatten(callbacks) if one is not None), callback]


class _Epochs(Callback):  # type: ignore[misc]
    """Compares when an epoch begins, after the user's own callbacks, and at the end."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        check(self.model, f"epoch {epoch}", self._peers)

    def on_train_end(self, logs: Any = None) -> None:
        check(self.model, "the end of fit", self._peers)


def check(model: Any, when: str, peers: Peers, arguments: Iterable[tuple[str, str]] = ()) -> None:
    """Raises DesyncError where processes differ in what must be alike.

    A collective; one number if they agree.

    Args:
        model: a Keras model, compiled or not, built or not.
        when: the moment, for the error.
        peers: the processes.
        arguments: further (name, text) that must be alike.
    """
    settings = [*settings_of(model), *arguments]
    values = {v.path: _sample(peers.replica(v)) for v in model.weights}
    held = {path: sample for path, sample in values.items() if sample is not None}
    whole = _digest(repr(settings).encode(), *(sample.tobytes() for sample in held.values()))
    if _agree(peers.of_all(whole)):
        return
    if not _agree(peers.of_all(_digest(repr(settings).encode()))):
        _tell_settings(settings, when, peers)
    if _agree(peers.of_all(_digest(*(path.encode() for path in held)))):
        for path, sample in held.items():
            _tell_values(path, sample, when, peers)


def settings_of(model: Any) -> list[tuple[str, str]]:
    """Returns (name, text) of a model's variables and of what it was compiled with.

    A text is the same in every process.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")])
        >>> model.compile(keras.optimizers.SGD(0.5), "mse")
        >>> dict(settings_of(model))["optimizer.learning_rate"]
        '0.5'
    """
    found = [("the class of the model", type(model).__name__)]
    found += [(f"variable {v.path!r}", f"{tuple(v.shape)} {v.dtype} {v.trainable}") for v in model.weights]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        found.append(("the optimizer", type(optimizer).__name__))
        found += [(f"optimizer.{name}", text) for name, text in _hyperparameters(optimizer)]
    compiled = getattr(model, "_compile_loss", None)
    for name in ("_user_loss", "_user_loss_weights"):
        found.append((f"the {name.removeprefix('_user_').replace('_', ' ')}", _text(getattr(compiled, name, None))))
    metrics = getattr(model, "_compile_metrics", None)
    for name in ("_user_metrics", "_user_weighted_metrics"):
        found.append((f"the {name.removeprefix('_user_').replace('_', ' ')}", _text(getattr(metrics, name, None))))
    for name in ("jit_compile", "run_eagerly", "steps_per_execution"):
        found.append((name, str(getattr(model, name, None))))
    return found


def arguments_of(given: inspect.BoundArguments) -> list[tuple[str, str]]:
    """Returns (name, text) of an entrance's arguments that must be alike.

    Not the data, nor what only shows or writes.
    """
    return [
        (f"the argument {name}", str(value))
        for name, value in given.arguments.items()
        if name != "verbose" and isinstance(value, int | float | None)
    ]


def learned_by(model: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of what layers learned by `adapt`, or were given, and no variable holds.

    That is vocabularies and bins.
    """
    for layer in model._flatten_layers():
        words = getattr(layer, "get_vocabulary", None)
        if words is not None:
            yield f"the vocabulary of layer {layer.name!r}", _listed(words())
        bins = getattr(layer, "bin_boundaries", None)
        if bins is not None:
            yield f"the bins of layer {layer.name!r}", _listed(np.asarray(bins).tolist())


def _listed(values: Iterable[Any]) -> str:
    texts = [str(value) for value in values]
    return f"of {len(texts)} ({_digest(*(text.encode() + bytes(1) for text in texts))})"


def _hyperparameters(optimizer: Any) -> Iterator[tuple[str, str]]:
    yield "learning_rate", _learning_rate(optimizer)
    for name, value in sorted(vars(optimizer).items()):
        if not name.startswith("_") and isinstance(value, _PLAIN) and name not in ("name", "built"):
            yield name, str(value)
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        yield "inner_optimizer", type(inner).__name__
        yield from ((f"inner_optimizer.{name}", text) for name, text in _hyperparameters(inner))


def _learning_rate(optimizer: Any) -> str:
    rate = getattr(optimizer, "_learning_rate", None)
    if rate is None or callable(rate) or hasattr(rate, "get_config"):
        return _text(rate)
    return f"{float(np.asarray(rate.numpy() if hasattr(rate, 'numpy') else rate)):.7g}"


def _text(value: Any) -> str:
    """Describes a loss, a metric or a schedule, without what marks this process's objects."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, dict):
        return str({str(name): _text(one) for name, one in value.items()})
    if isinstance(value, list | tuple):
        return str([_text(one) for one in value])
    code = getattr(value, "__code__", None)
    if code is not None:
        plain = [one for one in code.co_consts if isinstance(one, _PLAIN)]
        return f"{value.__qualname__} {_digest(code.co_code, repr((code.co_names, plain)).encode())}"
    config = getattr(value, "get_config", None)
    if config is None:
        return type(value).__name__
    try:
        settings = config()
    except NotImplementedError:  # Keras's answer where a class of one's own has none
        return type(value).__name__
    return f"{type(value).__name__}{_text({k: v for k, v in settings.items() if k != 'name'})}"


def _sample(values: Array | None) -> Array | None:
    return None if values is None else np.ascontiguousarray(np.ravel(values)[:: stride(values.size)])


def stride(size: int) -> int:
    """Returns the stride at which values are compared: one of so many."""
    return max(1, -(-size // SAMPLE))


def _digest(*parts: bytes) -> int:
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found & _BITS


def _agree(numbers: tuple[int, ...]) -> bool:
    return len(set(numbers)) == 1


def _apart(numbers: tuple[int, ...], peers: Peers) -> tuple[int, ...]:
    return tuple(peers.ranks[place] for place, number in enumerate(numbers) if number != numbers[0])


def _tell_settings(settings: list[tuple[str, str]], when: str, peers: Peers) -> None:
    """Raises for the first setting that differs.

    All processes go through as many as the first of them has.
    """
    counts = peers.of_all(len(settings))
    for place in range(max(counts)):
        name, text = settings[place] if place < len(settings) else ("", "")
        numbers = peers.of_all(_digest(name.encode(), text.encode()))
        if not _agree(numbers):
            raise DesyncError(
                f"{when}: {name or 'one more setting'} is {text[:200] or 'missing'} on rank "
                f"{peers.ranks[peers.processes.place]}, and ranks {list(_apart(numbers, peers))} differ from rank "
                f"{peers.ranks[0]} in it. Every process must build and compile the same model and be given the same "
                "arguments",
                ranks=_apart(numbers, peers),
                collective="agreement",
                variable=name,
            )


def _tell_values(path: str, sample: Array, when: str, peers: Peers) -> None:
    """Raises where a variable's values differ by more than rounding."""
    if _agree(peers.of_all(_digest(sample.tobytes()))):
        return
    waves = np.cos(np.arange(1, sample.size + 1))
    values = np.asarray(sample, np.float64)
    total, size = (float(np.sum(x)) for x in (waves * values, np.abs(values)))
    found = [np.array(peers.of_all(_bits(x)), np.int32).view(np.float32) for x in (max(total, 0), max(-total, 0), size)]
    sums, sizes = found[0] - found[1], found[2]
    near = (np.abs(sums - sums[0]) <= TOLERANCE * np.max(sizes)) | ~(np.isfinite(sums) | np.isfinite(sums[0]))
    if not near.all():
        ranks = tuple(rank for rank, same in zip(peers.ranks, near, strict=True) if not same)
        raise DesyncError(
            f"{when}: variable {path!r} has other values on ranks {list(ranks)} than on rank {peers.ranks[0]}. Set, "
            "load and assign weights on every process alike",
            ranks=ranks,
            collective="agreement",
            variable=path,
        )


def _bits(number: float) -> int:
    """A number from 0 on as 31 bits: those of its float32."""
    return int(np.float32(number).view(np.int32)) & _BITS
