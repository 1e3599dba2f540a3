"""use(), initialize() and the rest: what a program calls first. Imports no framework by itself.

It imports no Keras either.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from unidist import keras_import_hook, log
from unidist.backends import environment, on_keras, registry
from unidist.backends.jax.virtual import prepare_devices
from unidist.backends.protocol import Cluster, DistributionBackend
from unidist.errors import BackendMismatchError

_log = logging.getLogger(__name__)
# What was said once.
_said: set[str] = set()


def use(name: str | None = None, *, devices: int | Sequence[str] | None = None, **options: Any) -> DistributionBackend:
    """Chooses the backend, and the Keras backend that it needs.

    Args:
        name: "torch", "jax", "tensorflow", "horovod", "sim" or a registered name. None: UNIDIST_BACKEND, else what
            the launcher's environment and Keras's backend say, else "sim". A line on standard error says which.
            Keras's backend is that of KERAS_BACKEND, else of keras.json, else the first that is installed of torch,
            jax and tensorflow. (A keras.json as Keras writes it by itself says nothing.)
        devices: how many devices, or a list of their names. They are virtual on sim, and with jax and tensorflow on
            CPU; elsewhere `unidist run` must have started as many.
        options: further arguments of the adapter.

    Returns:
        The adapter, now the current one. May be called again to switch.

    Raises:
        BackendNotAvailableError: unknown or not installed; the text says how to install it.
        BackendMismatchError: Keras already runs on a backend that this one cannot serve, a framework has started with
            other devices, or a launcher started several processes and the adapter works in one.
        CapabilityError: an option that the adapter does not have.
        MeshError: `devices` is neither a number nor a list of names.

    Example:
        >>> import unidist
        >>> unidist.use("sim", devices=4).name
        'sim'
        >>> unidist.list_devices()
        ['cpu:0', 'cpu:1', 'cpu:2', 'cpu:3']
    """
    return _use(name, devices, None, options)


def _use(
    name: str | None, devices: int | Sequence[str] | None, cluster: Cluster | None, options: dict[str, Any]
) -> DistributionBackend:
    log.start(lambda: registry.current().process_index() if registry.has_joined() else None)
    is_asked, why = name is not None, "as asked"
    if name is None:
        name, why = registry.default_name()
    # Before the adapter is imported: TensorFlow imports Keras, on whatever the environment or keras.json names.
    entry = registry.find(name)
    served, chosen = entry.keras_backends, options.get(entry.keras_option)
    keras = _choose_keras(name, (chosen,) if chosen in served else served)
    if not is_asked or (keras is not None and keras.is_ours):
        _say(name, why, keras)
    # What is written belongs to the processes of the world that is left.
    keras_import_hook.finish()
    adapter = registry.use(name, devices=devices, cluster=cluster, **options)
    _log.debug("using %r (%s), KERAS_BACKEND=%s", name, why, os.environ.get("KERAS_BACKEND", "unset"))
    if entry.virtual and os.environ.get("KERAS_BACKEND") == "jax":
        # Keras on JAX simulates with JAX's own virtual devices, which must be counted before XLA starts.
        prepare_devices(len(adapter.list_devices()))
    if (newer := registry.untested(name)) and newer not in _said:
        _said.add(newer)
        print(f"unidist: {newer}", file=sys.stderr)
    keras_import_hook.when_keras_arrives()
    return adapter


def backend() -> DistributionBackend:
    """The backend in use; if none was chosen yet, `use()` chooses it, and raises what that does.

    Example:
        >>> import unidist
        >>> adapter = unidist.use("sim", devices=2)
        >>> unidist.backend() is adapter
        True
    """
    return registry.current() if registry.has_current() else use()


def initialize(
    address: str | None = None,
    process_count: int | None = None,
    process_index: int | None = None,
    *,
    timeout: float | None = None,
) -> None:
    """Joins the world of processes.

    Under torchrun, srun, horovodrun or `unidist run` no argument is needed.

    Args:
        address: "host:port" of process 0.
        process_count: number of processes.
        process_index: this process's number.
        timeout: seconds to wait for the others, here and from now on in each collective. None: what `use` was given,
            else UNIDIST_TIMEOUT (`unidist run --timeout`), else 300. Under a launcher `use` joins the world: there
            it holds for the joining too only if `initialize` is what comes first.

    Raises:
        BackendMismatchError: called a second time, or against what the launcher said.
        BackendNotAvailableError: the world could not be joined; the text says what was tried. Or the timeout is no
            number above zero.
        CapabilityError: the adapter cannot change the timeout of a world that `use` has joined.

    Example:
        Under `unidist run -n 2 train.py` or torchrun; without a launcher this is a world of one process:

        >>> import unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> unidist.initialize(timeout=60)
        >>> unidist.process_index(), unidist.process_count()
        (0, 1)
        >>> unidist.shutdown()
    """
    how: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    comes_first = not registry.has_current()
    if comes_first:
        _use(None, None, Cluster(**how), {})
    cluster = Cluster(address=address, process_count=process_count, process_index=process_index, **how)
    registry.initialize(cluster, retimes=timeout is not None and not comes_first)
    # A process's device is known now.
    keras_import_hook.when_keras_arrives()


def shutdown() -> None:
    """Leaves the world, and puts back what was replaced in Keras. `use` or `initialize` may join another.

    Models that are distributed cannot be trained, read or saved after it: call `unidist.gather_weights(model)` or
    `model.save` before. A checkpoint that is still written in the background is waited for.

    Raises:
        CheckpointError: that checkpoint could not be written. The world is left all the same.

    Example:
        >>> import unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> unidist.initialize()
        >>> unidist.shutdown()
    """
    try:
        keras_import_hook.finish()
    finally:
        if registry.has_current():
            registry.shutdown()
        keras_import_hook.leave()


def process_index() -> int:
    """This process's number in the world, from 0; 0 where there is one.

    Example:
        >>> import unidist
        >>> _ = unidist.use("sim", devices=4)
        >>> unidist.process_index()
        0
    """
    return backend().process_index()


def process_count() -> int:
    """The number of processes of the world. With virtual devices it is 1, however many devices there are.

    Example:
        >>> import unidist
        >>> _ = unidist.use("sim", devices=4)
        >>> unidist.process_count()
        1
    """
    return backend().process_count()


def list_devices(kind: str | None = None) -> list[str]:
    """All devices of the world, as "cpu:0"; the k-th is rank k.

    Args:
        kind: "cpu" or "gpu" (JAX: its platform's name): those of a kind alone, with the numbers of their ranks.

    Raises:
        MeshError: `use` was given another number of devices, or other names, than there are.

    Example:
        >>> import unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> unidist.list_devices()
        ['cpu:0', 'cpu:1']
    """
    return backend().list_devices(kind)


def _choose_keras(name: str, served: tuple[str, ...]) -> on_keras.Choice | None:
    """Sets KERAS_BACKEND where Keras has not been imported; None where the adapter leaves Keras as it is.

    Raises:
        BackendMismatchError: Keras runs on, or KERAS_BACKEND names, a backend that none of several served is.
    """
    if not served:
        return None
    choices = " or ".join(filter(None, (", ".join(served[:-1]), served[-1])))
    said, runs = on_keras.said(), on_keras.runs()
    if said is not None and said.name in served:
        return said
    if runs:
        raise BackendMismatchError(
            f"use({name!r}) needs Keras on {choices}, but Keras is already imported on {runs!r}: "
            f"call unidist.use({name!r}) before importing keras, or set KERAS_BACKEND={served[0]}"
        )
    if said is not None and len(served) > 1:
        raise BackendMismatchError(f"use({name!r}) needs Keras on {choices}, but KERAS_BACKEND is {said.name!r}")
    chosen = on_keras.among(served)
    os.environ["KERAS_BACKEND"] = chosen.name
    return chosen


def _say(name: str, why: str, keras: on_keras.Choice | None) -> None:
    launch = environment.detect()
    if launch is None or launch.process_index == 0:
        on = "" if keras is None or keras.name == name else f", Keras on {keras.name!r} ({keras.why})"
        print(f"unidist: using {name!r} ({why}){on}", file=sys.stderr)
