"""Decides which steps of a model run as whole programs, and proves each one beside its step."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import torch

import unidist
from unidist.keras.needs import parts_of
from unidist.keras.patching.compat import get_device, tree
from unidist.keras.records.layer_report import in_words, listed
from unidist.keras.torch.context import Frame
from unidist.keras.torch.cutting import of_places
from unidist.keras.torch.params import placing, sharded_norms
from unidist.keras.torch.params.storage import Storage
from unidist.keras.torch.step.attributes import as_before
from unidist.keras.torch.step.drawing import Generators
from unidist.keras.torch.step.whole_step import StepProgram, is_close
from unidist.keras.torch.structures import tensors
from unidist.keras.torch.world import RankWorld
from unidist.strategies import Strategy

_log = logging.getLogger(__name__)
# The first steps of a program are run eagerly beside the program, and compared: what a trace reads back as a number is
# right in the step that it was traced in, and wrong in the next one.
PROVEN = 2
_NOT_THE_USERS = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (torch, keras, unidist))

# What torch raises where a tensor without a value is asked for it. By name: some of the classes take long to import.
_READS = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")

Step = Callable[[Frame, Any], Any]


class WholeSteps:
    """The programs of one model's steps on this process's rank.

    Args:
        model: the model, as it is prepared now.
        world: its ranks, one of them in this process.
        strategy: how it is distributed.

    Attributes:
        unfit: why no step is one program, and only calls of the model or of its layers are some; "" where steps are.
        why: kind of a step ("train", "test" or "predict") -> why it runs as it is.
        traced: how many programs were traced. compiled: how many of them have run without a step beside them.
    """

    def __init__(self, model: Any, world: RankWorld, strategy: Strategy) -> None:
        self.unfit = _unfit(model, world, strategy)
        self._model = model
        self._world = world
        self._programs: dict[Any, StepProgram] = {}
        self._trainable: tuple[int, tuple[bool, ...]] = -1, ()
        self._had: set[str] = set()
        self.why: dict[str, str] = {}
        self.traced = self.compiled = 0

    def __call__(self, frame: Frame, kind: str, batch: Any, details: Any, step: Step, eagerly: Step) -> Any:
        """A step on the rank at work.

        Args:
            kind: "train", "test" or "predict".
            batch: this rank's rows.
            details: what else a program depends on.
            step: the step on carriers, to be traced. eagerly: the step with all that is around it.
        """
        frame.is_whole = not self.unfit
        if self.unfit or kind in self.why or kind not in self._had:
            # The first step builds what is missing, and sees what is called in it.
            self._had.add(kind)
            return eagerly(frame, batch)
        given = tree.map_structure(_tensor, batch)
        key = (kind, details, frame.rows, self._trained(), _signature(given))
        program = self._programs.get(key)
        if program is None:
            program, reason = self._traced(frame, step, given)
            if not self._all(program is not None) or program is None:
                self._refuse(kind, reason or "another process cannot trace it")
                return eagerly(frame, batch)
            self._programs[key] = program
        if program.proofs < PROVEN:
            out, reason = self._proven(frame, program, given, batch, eagerly)
            if not self._all(not reason):
                self._refuse(kind, reason or "another process finds other numbers")
            return out
        if program.proofs == PROVEN:
            program.proofs += 1
            return self._compiled(program, given)
        return program(given)

    def _compiled(self, program: StepProgram, given: Any) -> Any:
        """Compiles a program and runs it: as it was traced where torch.compile fails."""
        program.compile()
        try:
            out = program(given)
        except torch._dynamo.exc.TorchDynamoException as error:
            # It compiles before it computes, so nothing is written yet.
            program.leave_uncompiled()
            text = "jit_compile=True: torch.compile has failed, so programs of model %r run as they were traced: %s"
            _log.warning(text, self._model.name, in_words(error))
            return program(given)
        self.compiled += 1
        return out

    def _trained(self) -> tuple[bool, ...]:
        """Returns whether each variable trains, in their order."""
        if self._trainable[0] != self._world.choices:
            self._trainable = self._world.choices, tuple(v.trainable for v in self._model.variables)
        return self._trainable[1]

    def _traced(self, frame: Frame, step: Step, given: Any) -> tuple[StepProgram | None, str]:
        """Returns a program, or why there is none."""
        storages = [one for one in sharded_norms.placed if one.world is self._world and _is_plain(one, frame.rank)]
        optimizer = getattr(self._model, "optimizer", None)
        weights, slots = (
            [v._storage for v in variables if placing.is_placed(v)]
            for variables in (self._model.trainable_variables, optimizer.variables if optimizer is not None else ())
        )
        program = StepProgram(frame, storages, weights, slots, self._owners())
        generators = Generators.now()
        try:
            with as_before(parts_of(self._model)):
                program.trace(frame, step, given)
        # Whatever a step does where tensors have no values: it has just run where they have.
        except Exception as error:
            return None, _in_words(error)
        finally:
            generators.go_on()
        self.traced += 1
        return program, ""

    def _owners(self) -> list[Any]:
        """The objects of Keras that a step may leave tensors on."""
        model = self._model
        parts = [getattr(model, name, None) for name in ("optimizer", "_compile_loss", "_compile_metrics")]
        return [*model._flatten_layers(), *model.metrics, *(part for part in parts if part is not None)]

    def _proven(self, frame: Frame, program: StepProgram, given: Any, batch: Any, eagerly: Step) -> tuple[Any, str]:
        """Runs a step eagerly, and the program beside it.

        Returns its outputs, and how the program differs: "" where it does not.
        """
        program.proofs += 1
        copied = tree.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, given)
        generators, before = Generators.now(), program.values()
        out = eagerly(frame, batch)
        later, wanted = Generators.now(), program.values()
        program.put(before)
        generators.go_on()
        again = program.run(copied)
        apart = program.apart(before, wanted)
        program.put(wanted)
        later.go_on()
        outputs = zip(tensors(out), tensors(again), strict=True)
        if not all(is_close(torch.zeros_like(one), one, other) for one, other in outputs):
            apart.append("its outputs")
        return out, f"run again, it gives other numbers for {listed(apart)}" if apart else ""

    def _refuse(self, kind: str, reason: str) -> None:
        self.why[kind] = reason
        _log.info("jit_compile=True: a %s step of model %r runs as it is: %s", kind, self._model.name, reason)

    def _all(self, is_so: bool) -> bool:
        """Returns whether something is so in all processes."""
        world = self._world
        return all(of_places(world, world.mesh.axis_names, int(is_so), "agreement")) if world.mesh.size > 1 else is_so


def _unfit(model: Any, world: RankWorld, strategy: Strategy) -> str:
    if strategy.sequence_parallel:
        return "activations are parts of sequences"
    if not strategy.auto_shard_dataset and world.mesh.size > 1:
        return "each process has batches of its own, whose shapes the others do not know"
    optimizer = getattr(model, "optimizer", None)
    if getattr(optimizer, "gradient_accumulation_steps", None):
        return "gradients are accumulated"
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    placed = [v._storage for v in variables if placing.is_placed(v)]
    if any(not _is_plain(storage, rank) for storage in placed for rank in world.ranks):
        return "values or gradients are cut over the data axis"
    return ""


def _is_plain(storage: Storage, rank: int) -> bool:
    """Returns whether a rank has one tensor of a variable, where it is, in steps and between them."""
    shard = storage.shards[rank]
    is_one = storage.leaves[rank] is shard and storage.states[rank] is shard
    return is_one and not storage.gathered_by(rank)


def _tensor(x: Any) -> Any:
    is_array = hasattr(x, "shape") and hasattr(x, "dtype") and getattr(x.dtype, "kind", "f") not in "OUST"
    return torch.as_tensor(x, device=get_device()) if is_array else x


def _signature(batch: Any) -> tuple[Any, ...]:
    """The structure, shapes and dtypes of a batch, and what in it is no tensor."""
    leaves = [
        (tuple(x.shape), x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), repr(x))
        for x in tree.flatten(batch)
    ]
    return repr(tree.map_structure(lambda _: 0, batch)), *leaves


def _in_words(error: Exception) -> str:
    """An error in one line, with the user's line in which it came."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(_NOT_THE_USERS) and not one.filename.startswith("<")]
    place = f" ({own[-1].filename}:{own[-1].lineno}: {own[-1].line})" if own else ""
    if type(error).__name__ in _READS:
        return f"it reads the value of a tensor{place}"
    return f"{type(error).__name__}: {in_words(error)}{place}"
