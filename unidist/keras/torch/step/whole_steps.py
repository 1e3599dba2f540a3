"""Decides which steps of a model run as whole programs, and proves each one beside its step."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import torch

import unidist
from unidist import log
from unidist.backends.checking import checks_all
from unidist.errors import CapabilityError, UnidistError
from unidist.keras.needs import parts_of
from unidist.keras.patching.compat import get_device, tree
from unidist.keras.records.layer_report import in_words, listed
from unidist.keras.torch.context import Frame
from unidist.keras.torch.cutting import of_places
from unidist.keras.torch.params import placing, sharded_norms
from unidist.keras.torch.params.param_groups import Fetcher
from unidist.keras.torch.step.attributes import as_before
from unidist.keras.torch.step.drawing import Generators
from unidist.keras.torch.step.step_comm import Carried, Traffic
from unidist.keras.torch.step.whole_step import StepProgram, is_close
from unidist.keras.torch.structures import of_batch, tensors
from unidist.keras.torch.world import RankWorld
from unidist.strategies import Strategy

_log = logging.getLogger(__name__)
# The first steps of a program are run eagerly beside the program, and compared: what a trace reads back as a number is
# right in the step that it was traced in, and wrong in the next one.
PROVEN = 2
# With UNIDIST_CHECK=all a program is compared again, once in so many runs.
AGAIN = 100
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
        traffic: gives what moves its gradients and values.

    Attributes:
        why: kind of a step ("train", "test" or "predict") -> why it runs as it is.
        traced: how many programs were traced. compiled: how many of them have run without a step beside them.

    Raises:
        CapabilityError: the backend's collectives cannot be part of a program.
    """

    def __init__(self, model: Any, world: RankWorld, strategy: Strategy, traffic: Callable[[], Traffic]) -> None:
        if not world.backend.compiles:
            raise CapabilityError(
                f"jit_compile=True: the collectives of {world.backend.name!r} cannot be part of torch.compile's "
                "programs. Compile the model with jit_compile=False, or use('torch')"
            )
        self._model = model
        self._world = world
        self._traffic = traffic
        # Batches are each process's own, so that shapes which are known to one may be new to another.
        self._is_apart = not strategy.auto_shard_dataset and world.mesh.size > 1
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
        if kind in self.why or kind not in self._had:
            # The first step builds what is missing, and sees what is called in it.
            self._had.add(kind)
            return eagerly(frame, batch)
        traffic = self._traffic()
        given = of_batch(_tensor, batch)
        waits = kind == "train" and traffic.accumulates()
        adds = waits or (kind == "train" and traffic.is_holding(frame.rank))
        passing = _Passing(traffic, frame.rank, kind == "train", adds, waits)
        key = (kind, details, frame.rows, adds, waits, self._trained(), _signature(given))
        program = self._programs.get(key)
        is_proven = program is not None and program.proofs >= PROVEN and not _is_due(program)
        if self._is_apart:
            is_proven = self._all(is_proven)
        if program is not None and is_proven:
            return self._run(program, given, passing)
        traffic.settle()
        is_new, reason = program is None, ""
        if program is None:
            program, reason = self._traced(frame, kind, step, given, passing)
        is_traced = program is not None
        if is_new or self._is_apart:
            is_traced = self._all(is_traced)
        if program is None or not is_traced:
            self._refuse(kind, reason or "another process cannot trace it")
            return eagerly(frame, batch)
        self._programs[key] = program
        with log.while_long(f"comparing a {kind} step of {self._model.name!r} with its program"):
            out, reason = self._proven(frame, program, given, batch, passing, eagerly)
        if not self._all(not reason):
            self._refuse(kind, reason or "another process finds other numbers")
        return out

    def told(self) -> Iterator[tuple[str, str]]:
        """Yields (kind of a step, what it is) of the steps that were made."""
        for kind in sorted(self._had):
            count = sum(key[0] == kind for key in self._programs)
            if kind in self.why:
                yield f"{kind} step", f"runs as it is, though jit_compile=True: {self.why[kind]}"
            elif count:
                yield f"{kind} step", f"a program for each shape of a batch: {count} by now"

    def _run(self, program: StepProgram, given: Any, passing: _Passing) -> Any:
        """Runs a program that is proven; the first time it is compiled, and else runs as it was traced."""
        if not program.is_compiled:
            program.compile()
            if not self._traffic().is_holding(passing.rank):
                self._traffic().hold(passing.rank, False)
            try:
                with log.while_long(f"compiling a step of {self._model.name!r}"):
                    out = passing.run(program, given)
                self.compiled += 1
                return out
            except torch._dynamo.exc.TorchDynamoException as error:
                # It compiles before it computes, so nothing is written yet.
                program.leave_uncompiled()
                text = "jit_compile=True: torch.compile has failed, so programs of model %r run as they were traced: %s"
                _log.warning(text, self._model.name, in_words(error))
        return passing.run(program, given)

    def _trained(self) -> tuple[bool, ...]:
        if self._trainable[0] != self._world.choices:
            self._trainable = self._world.choices, tuple(v.trainable for v in self._model.variables)
        return self._trainable[1]

    def _traced(
        self, frame: Frame, kind: str, step: Step, given: Any, passing: _Passing
    ) -> tuple[StepProgram | None, str]:
        """Returns a program, or why there is none."""
        storages = [one for one in sharded_norms.placed if one.world is self._world]
        optimizer = getattr(self._model, "optimizer", None)
        weights, slots = (
            [v._storage for v in variables if placing.is_placed(v)]
            for variables in (self._model.trainable_variables, optimizer.variables if optimizer is not None else ())
        )
        program = StepProgram(frame, storages, weights, slots, self._owners())
        generators = Generators.now()

        def moving(own: Frame, carried: Carried) -> AbstractContextManager[Fetcher]:
            return self._traffic().traced(own, kind, carried, passing.waits)

        try:
            with log.while_long(f"tracing a {kind} step of {self._model.name!r}"), as_before(parts_of(self._model)):
                program.trace(frame, step, given, passing.carried(), moving)
        # Whatever a step does where tensors have no values: it has just run where they have.
        except Exception as error:
            return None, _in_words(error)
        finally:
            generators.go_on()
        self.traced += 1
        return program, ""

    def _owners(self) -> list[Any]:
        model = self._model
        parts = [getattr(model, name, None) for name in ("optimizer", "_compile_loss", "_compile_metrics")]
        return [*model._flatten_layers(), *model.metrics, *(part for part in parts if part is not None)]

    def _proven(
        self, frame: Frame, program: StepProgram, given: Any, batch: Any, passing: _Passing, eagerly: Step
    ) -> tuple[Any, str]:
        """Runs a step eagerly, and the program beside it.

        Returns its outputs, and how the program differs: "" where it does not.
        """
        program.proofs += 1
        copied = tree.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, given)
        carried = passing.carried()
        grads = carried["gradients"] = [grad.clone() for grad in carried["gradients"]]
        generators, before = Generators.now(), program.values()
        out = eagerly(frame, batch)
        self._traffic().settle()
        later, wanted = Generators.now(), program.values()
        program.put(before)
        generators.go_on()
        try:
            again, left = program.run(copied, carried)
            passing.bring(left)
            self._traffic().settle()
            apart = program.apart(before, wanted)
        except UnidistError:
            raise
        # Whatever a graph of torch's may do that the step does not: the step has run.
        except Exception as error:
            return out, _in_words(error)
        finally:
            program.put(wanted)
            later.go_on()
        outputs = zip(tensors(out), tensors(again), strict=True)
        if not all(_is_as_long(one, other) for one, other in outputs):
            apart.append("its outputs")
        held = zip(self._traffic().gradients(frame.rank), grads, strict=True) if passing.waits else ()
        if not all(_is_as_long(torch.zeros_like(other) if one is None else one, other) for one, other in held):
            apart.append("the gradients that wait")
        return out, f"run again, it gives other numbers for {listed(apart)}" if apart else ""

    def _refuse(self, kind: str, reason: str) -> None:
        self.why[kind] = reason
        _log.info("jit_compile=True: a %s step of model %r runs as it is: %s", kind, self._model.name, reason)

    def _all(self, is_so: bool) -> bool:
        world = self._world
        return all(of_places(world, world.mesh.axis_names, int(is_so), "agreement")) if world.mesh.size > 1 else is_so


@dataclass(frozen=True, slots=True)
class _Passing:
    """Passes from step to step, on a rank, what is no value of a variable.

    These are values that are still being joined, and gradients that wait for those of later steps
    (gradient_accumulation_steps).

    Attributes:
        trains: whether the step does. Others pass nothing.
        adds: the step adds to gradients that wait. waits: what it has then goes on to wait.
    """

    traffic: Traffic
    rank: int
    trains: bool
    adds: bool
    waits: bool

    def carried(self) -> Carried:
        return self.traffic.carried(self.rank, adds=self.adds) if self.trains else {"gradients": [], "values": []}

    def bring(self, left: list[list[torch.Tensor]]) -> None:
        if self.trains:
            self.traffic.bring(self.rank, left)

    def run(self, program: StepProgram, given: Any) -> Any:
        if not self.trains:
            self.traffic.settle()
        out, left = program(given, self.carried())
        self.bring(left)
        if self.adds:
            self.traffic.hold(self.rank, self.waits)
        return out


def _is_due(program: StepProgram) -> bool:
    return program.runs % AGAIN == 0 and checks_all()


def _is_as_long(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    return is_close(torch.zeros_like(wanted), wanted, found)


def _tensor(x: Any) -> Any:
    is_array = hasattr(x, "shape") and hasattr(x, "dtype") and getattr(x.dtype, "kind", "f") not in "OUST"
    return torch.as_tensor(x, device=get_device()) if is_array else x


def _signature(batch: Any) -> tuple[Any, ...]:
    leaves = [
        (tuple(x.shape), x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), repr(x))
        for x in tree.flatten(batch)
    ]
    return repr(tree.map_structure(lambda _: 0, batch)), *leaves


def _in_words(error: Exception) -> str:
    """An error in one line, with the line of the user's in which it came; else with Keras's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(_NOT_THE_USERS) and not one.filename.startswith("<")]
    of_keras = [one for one in frames if one.filename.startswith(_NOT_THE_USERS[1])]
    found = (own or of_keras)[-1:]
    place = f" ({found[0].filename}:{found[0].lineno}: {found[0].line})" if found else ""
    if type(error).__name__ in _READS:
        return f"it reads the value of a tensor{place}"
    return f"{type(error).__name__}: {in_words(error)}{place}"
