"""The options of a strategy, as Keras's backend can have them."""

from __future__ import annotations

from typing import Any, Literal, get_args

import keras

from unidist.algebra import Axes
from unidist.errors import ArgumentError, CapabilityError
from unidist.keras import recomputing
from unidist.keras.recomputing import Remat

Attention = Literal["auto", "ulysses", "gather", "ring"]
Experts = Literal["all", "dispatch"]
Offload = Literal["none", "states"]
# What an option does not go with in parts of sequences.
_NOT_IN_PARTS = {
    "exact_random": "layers draw for parts of sequences",
    "per_tensor_rows": "the model's call takes rows of one number",
}


def options(
    *,
    auto_shard_dataset: bool,
    zero: int,
    shard_axis: str | Axes | None,
    exact_random: bool,
    per_tensor_rows: bool,
    remat: Remat,
    experts: str,
    offload: str,
    sequence_parallel: bool = False,
) -> dict[str, Any]:
    """The rest of a Strategy, as Keras's backend can have it."""
    if sequence_parallel:
        check_sequence_parallel()
    recomputing.check(remat)
    by_carriers = {"exact_random": exact_random, "per_tensor_rows": per_tensor_rows}
    for name in filter(by_carriers.get, by_carriers):
        _check(name, sequence_parallel)
    return {
        "auto_shard_dataset": auto_shard_dataset,
        **shards(zero, shard_axis),
        "uneven": takes_uneven(),
        "joint": is_joint(),
        "sequence_parallel": sequence_parallel,
        "remat": remat,
        **dispatches(experts),
        **offloads(offload),
        **by_carriers,
    }


def shards(zero: int, shard_axis: str | Axes | None) -> dict[str, Any]:
    """Returns what a Strategy holds of ZeRO.

    Raises:
        ArgumentError: axes without a stage that cuts over them.
    """
    if shard_axis is not None and not zero:
        raise ArgumentError(
            f"shard_axis={shard_axis!r} with zero=0, which cuts nothing: give zero=1 or 3, or no shard_axis"
        )
    return {"zero": zero, "shard_axes": shard_axis}


def _check_choice(name: str, given: str, choices: Any) -> None:
    if given not in get_args(choices):
        raise ArgumentError(f"{name}={given!r}: give one of {', '.join(map(repr, get_args(choices)))}")


def dispatches(experts: str) -> dict[str, Any]:
    """Returns what a Strategy holds of the rows that stacked kernels compute.

    Raises:
        ArgumentError: `experts` is no choice.
        CapabilityError: Keras's backend cannot dispatch.
    """
    _check_choice("experts", experts, Experts)
    if experts == "dispatch" and keras.config.backend() == "tensorflow":
        raise CapabilityError(
            "experts='dispatch': with Keras on 'tensorflow' DTensor lays out whole operations, and how many rows an "
            "expert has is known in a step alone. Leave it out, or set KERAS_BACKEND=torch or jax before Keras is "
            "imported"
        )
    return {"experts": experts}


def offloads(offload: str) -> dict[str, Any]:
    """Returns what a Strategy holds of host memory.

    Raises:
        ArgumentError: `offload` is no choice.
        CapabilityError: Keras's backend has none.
    """
    _check_choice("offload", offload, Offload)
    if offload != "none" and keras.config.backend() != "torch":
        raise CapabilityError(
            f"offload={offload!r}: with Keras on {keras.config.backend()!r} a step is one compiled program, and its "
            "slots stay on the device. Use zero=1 to cut them, or set KERAS_BACKEND=torch before Keras is imported"
        )
    return {"offload": offload}


def for_experts(axes: Axes) -> dict[str, Any]:
    """Returns what a Strategy holds of axes of experts.

    Raises:
        CapabilityError: Keras's backend has none.
    """
    if axes and keras.config.backend() == "tensorflow":
        raise CapabilityError(
            f"an axis of experts {axes}: with Keras on 'tensorflow' kernels of a stack are cut over model axes alone. "
            "Name the axis otherwise, or set KERAS_BACKEND=torch or jax before Keras is imported"
        )
    return {"expert_axes": axes}


def contexts(axes: Axes, attention: str, sequence_parallel: bool) -> dict[str, Any]:
    """Returns what a Strategy holds of contexts.

    Raises:
        ArgumentError: `attention` is no choice.
        CapabilityError: Keras's backend has no contexts or no such choice, or
            parts of sequences are asked for twice.
    """
    name = keras.config.backend()
    _check_choice("attention", attention, Attention)
    if axes and name == "tensorflow":
        raise CapabilityError(
            f"an axis of contexts {axes}: with Keras on {name!r} this version cuts no sequences. Name the axis "
            "otherwise, or set KERAS_BACKEND=torch or jax before Keras is imported"
        )
    if attention != "auto" and name != "torch":
        raise CapabilityError(
            f"attention={attention!r}: with Keras on {name!r} the compiler chooses how places of other devices are "
            "read. Leave it out, or set KERAS_BACKEND=torch before Keras is imported"
        )
    if axes and sequence_parallel:
        raise CapabilityError(
            f"sequence_parallel=True with an axis of contexts {axes}: both cut sequences. Leave one out"
        )
    return {"context_axes": axes, "attention": attention}


def takes_uneven() -> bool:
    """Returns whether variables may be in uneven shards: arrays on JAX and DTensors must divide."""
    return bool(keras.config.backend() == "torch")


def fetches_neighbours() -> bool:
    """Returns whether neighbouring layers are fetched together where variables are in parts; else singly."""
    return bool(keras.config.backend() == "torch")


def is_joint() -> bool:
    """Returns whether one dim may be cut by several axes: DTensor cuts it by one."""
    return bool(keras.config.backend() != "tensorflow")


def check_sequence_parallel() -> None:
    """Raises CapabilityError where Keras's backend has no sequence parallelism."""
    name = keras.config.backend()
    if name != "torch":
        raise CapabilityError(
            f"sequence_parallel=True: with Keras on {name!r} the compiler lays out activations; this version "
            "cuts them by sequence on torch alone. Leave it out, or set KERAS_BACKEND=torch before Keras is imported"
        )


def _check(name: str, sequence_parallel: bool) -> None:
    """Raises CapabilityError where an option of tensors that carry their layout does not go."""
    if name == "per_tensor_rows" and keras.config.backend() == "tensorflow":
        raise CapabilityError(
            f"{name}=True: with Keras on 'tensorflow' all tensors of a batch are cut alike. Leave it out, or set "
            "KERAS_BACKEND=torch or jax before Keras is imported"
        )
    if sequence_parallel:
        raise CapabilityError(f"{name}=True with sequence_parallel=True: {_NOT_IN_PARTS[name]} there. Leave one out")
