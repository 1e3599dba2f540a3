"""Reading: the facts of a Keras model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import keras
import numpy as np

from unidist.errors import LayoutError, UnidistError
from unidist.keras.layer_facts import stack_of
from unidist.keras.patching.compat import TorchModuleWrapper
from unidist.keras.planning import samples
from unidist.keras.planning.activations import Seens, activations
from unidist.keras.planning.candidates import RECURRENT_CELLS, Candidate, candidate, inside
from unidist.keras.planning.kept_tensors import Runs, rows_of, seen_in_runs
from unidist.keras.planning.reach import Reacher
from unidist.keras.planning.trial_runs import Runner, Trace
from unidist.keras.planning.weighed import chosen
from unidist.keras.recomputing import computes_all_again
from unidist.keras.records.layer_report import in_words, listed
from unidist.keras.strategies.options import fetches_neighbours
from unidist.planner.facts import Activation, Amount, Calls, Facts, LayerFact, Reach, StackFact, VariableFact
from unidist.planner.fetching import by_reads

# Lengths of sequences to run a model on: the first two that it takes.
LENGTHS = ((8, 16), (4, 8), (2, 4))
# Where it takes none of these: windows of sound are longer.
LONG = (1024, 1040)
# What NumPy alone does not know.
_SMALL = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int4": 1, "uint4": 1}


def ended(facts: Facts) -> list[Reach]:
    """The reaches that were not followed to their end."""
    return [reach for reach in facts.reaches if not reach.is_whole]


def read(
    model: Any,
    parts: int,
    inputs: Any = None,
    follow: Callable[[Facts], list[Reach]] = ended,
    *,
    keeps: bool = True,
    weighs: bool = False,
    again: Sequence[Any] = (),
) -> Facts:
    """Reads what the planner must know of a model, by running it on a few rows without its kernels.

    Args:
        model: a built model; its variables need no values.
        parts: into how many slices outputs are to be cut.
        inputs: as the model is called, where it does not say itself.
        follow: which reaches are to be followed to their end, of those that were not.
        keeps: also what a step keeps for its backward, and the order in which it reads variables.
        again: layers that backward computes again, beside those that Keras knows of.
        weighs: also for how many kernels of a stack a row has a weight, on torch.

    Raises:
        LayoutError: the model is not built, or cannot be run.
    """
    if not model.built:
        raise LayoutError(f"model {model.name!r} is not built: call it or model.build(input_shape) first")
    variables = list({id(v): v for v in model.variables}.values())
    layers = list(inside(model))
    candidates = [found for layer in layers if (found := candidate(layer)) is not None]
    held = {id(v) for v in variables}
    candidates = [c for c in candidates if id(c.kernel) in held]
    known = {id(c.layer) for c in candidates}
    others = [x for x in layers if id(x) not in known]
    both = (*filter(computes_all_again, layers), *again)
    runner = Runner(candidates, others, list({id(one): one for one in both}.values()))
    with runner.installed():
        runs = _run(runner, model, inputs)
        reacher = Reacher(runner, model, parts, runs.near)
        reaches = reacher.all() if parts > 1 else []
        slots, optimizer = _slots(model, variables)
        place = {id(v): k for k, v in enumerate(variables)}
        first = {k: n for n, k in enumerate(runs.near.taken)}
        order = sorted(range(len(candidates)), key=lambda k: (first.get(k, len(first)), k))
        facts = Facts(
            name=model.name,
            variables=tuple(_variables(model, variables, layers)),
            layers=tuple(_layer(candidates[k], k, place, runner, runs) for k in order),
            reaches=_renumbered(reaches, order),
            parts=parts,
            slots=slots,
            optimizer=optimizer,
            neighbours=_neighbours(model, place) if fetches_neighbours() else (),
            stacks=tuple(_stacks(layers, place, runs, chosen(runner, model, inputs, runs) if weighs else {})),
            is_open=samples.is_open(model, inputs),
        )
        while wanted := {(order[reach.source], reach.dim) for reach in follow(facts)}:
            reaches = [reacher.to_the_end(r) if (r.source, r.dim) in wanted else r for r in reaches]
            facts = replace(facts, reaches=_renumbered(reaches, order))
        if not keeps:
            return facts
        seens = seen_in_runs(runner, model, inputs, runs, reaches)
        number = {k: n for n, k in enumerate(order)}
    used, kept = (tuple(place[k] for k in found if k in place) for found in (seens.read, seens.weights))
    # As an engine does behind its first step.
    neighbours = tuple(facts.neighbours[n] for n in by_reads(facts.neighbours, used))
    return replace(facts, activations=_activations(runs, seens, number), read=used, kept=kept, neighbours=neighbours)


def _run(runner: Runner, model: Any, inputs: Any) -> Runs:
    kwargs = {"training": False} if model._call_has_training_arg else {}
    is_open = samples.is_open(model, inputs)
    counts = samples.counts(model, inputs)
    problems: dict[int, Exception] = {}
    tries = [*itertools.product(counts, LENGTHS), (counts[0], LONG)] if is_open else [(n, LENGTHS[0]) for n in counts]
    for rows, (near, far) in tries:
        try:
            given = samples.sample(model, inputs, rows, far) if is_open else None
            longer = runner.run(model, (given,), kwargs, measure=True) if is_open else None
            trace = runner.run_kept(model, (samples.sample(model, inputs, rows, near),), kwargs, capture=True)
            return Runs(trace, longer or trace, _wide(runner, model, inputs, rows, near), rows, (near, far))
        except UnidistError:
            raise
        except Exception as error:
            # Whatever a model may raise: it may be the rows or the length, and if not, the user must learn of it.
            problems.setdefault(rows, error)
    problem = problems[counts[-1]]
    raise LayoutError(
        f"model {model.name!r} could not be run on random batches of {listed(map(str, counts))} rows to find its "
        f"layouts: {type(problem).__name__}: {in_words(problem)}. Give plan(model, mesh, inputs=...) a batch that it "
        "takes, or ModelParallel a LayoutMap"
    ) from problem


def _wide(runner: Runner, model: Any, inputs: Any, rows: int, length: int) -> Trace | None:
    """The shapes of a run of twice the rows."""
    kwargs = {"training": False} if model._call_has_training_arg else {}
    given = samples.sample(model, inputs, 2 * rows, length)
    if rows_of(given) != {2 * rows}:
        return None
    with contextlib.suppress(Exception):  # a model may take so many rows alone
        return runner.run(model, (given,), kwargs, measure=True)
    return None


def _activations(runs: Runs, seens: Seens, number: dict[int, int]) -> tuple[Activation, ...]:
    found = activations(seens, runs.line, runs.rows, itemsize)
    return tuple(replace(one, behind=tuple(number[k] for k in one.behind)) for one in found)


def _renumbered(reaches: list[Reach], order: list[int]) -> tuple[Reach, ...]:
    """Reaches between the layers in their order, from those between candidates."""
    number = {k: n for n, k in enumerate(order)}
    found = [
        replace(
            reach,
            source=number[reach.source],
            arrivals=tuple((number[k], d) for k, d in reach.arrivals),
            spread=tuple(number[k] for k in reach.spread),
        )
        for reach in reaches
    ]
    return tuple(sorted(found, key=lambda r: (r.source, r.dim)))


def _neighbours(model: Any, place: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    """Each layer's own variables, as its engine goes through them; a shared one counts once."""
    seen: set[int] = set()
    found = []
    for layer in model._flatten_layers():
        own = [place[id(v)] for v in (*layer._trainable_variables, *layer._non_trainable_variables) if id(v) in place]
        found.append(tuple(k for k in dict.fromkeys(own) if k not in seen))
        seen.update(own)
    return tuple(found)


def _variables(model: Any, variables: list[Any], layers: list[Any]) -> list[VariableFact]:
    owner: dict[int, Any] = {}
    for layer in layers:
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            owner.setdefault(id(variable), layer)
    weights = {id(variable) for layer in layers for variable in layer._trainable_variables}
    out = []
    for variable in variables:
        layer = owner.get(id(variable))
        shape = tuple(variable.shape)
        packed = range(len(shape))[-1:] if isinstance(layer, RECURRENT_CELLS) else ()
        out.append(
            VariableFact(
                path=variable.path,
                shape=shape,
                dtype=variable.dtype,
                itemsize=itemsize(variable.dtype),
                trainable=bool(variable.trainable),
                is_weight=id(variable) in weights,
                layer="" if layer is None else layer.path or layer.name,
                whole_dims=frozenset(packed),
                is_of_module=isinstance(layer, TorchModuleWrapper),
            )
        )
    return out


def _layer(found: Candidate, index: int, place: dict[int, int], runner: Runner, runs: Runs) -> LayerFact:
    def of(variable: Any) -> int | None:
        return None if variable is None else place[id(variable)]

    return LayerFact(
        path=found.layer.path or found.layer.name,
        kind=found.kind,
        kernel=place[id(found.kernel)],
        bias=of(found.bias),
        reverse=of(found.reverse),
        outputs={dim: found.biases.get(dim) for dim in found.outputs},
        inputs=tuple(found.inputs),
        beside=tuple((place[id(variable)], dims) for variable, dims in found.beside),
        calls=_calls(found, index, runs, reverse=False),
        scores=_calls(found, index, runs, reverse=True),
        read_elsewhere=index in runner.read_elsewhere,
    )


def _stacks(layers: list[Any], place: dict[int, int], runs: Runs, few: dict[int, float]) -> Iterator[StackFact]:
    for layer in layers:
        stack = [v for v in stack_of(layer) if v.trainable and id(v) in place]
        if stack:
            members = tuple(place[id(v)] for v in stack)
            size, calls, rows = stack[0].shape[0], *_calls_of_stack(layer, runs)
            yield StackFact(layer.path or layer.name, members, size, calls, rows, few.get(id(layer)))


def _calls_of_stack(layer: Any, runs: Runs) -> tuple[Calls, tuple[Amount, ...]]:
    """Returns a stack's calls, and their rows.

    None on torch: layers are rehearsed there, and of blocks that are alike one is called.
    """
    if keras.config.backend() == "torch":
        return Calls(), ()
    taken = runs.amounts(lambda trace: [prod(shape) for shape in trace.stacked.get(id(layer), [])])
    rows = runs.amounts(lambda trace: [prod(shape[:1]) for shape in trace.stacked.get(id(layer), [])])
    return Calls(taken, taken, (), itemsize(layer.compute_dtype)), rows


def _calls(found: Candidate, index: int, runs: Runs, *, reverse: bool) -> Calls:
    def taken_by(of: Trace) -> list[int]:
        calls = zip(of.taken.get(index, []), of.given.get(index, []), strict=True)
        return [prod(x.shape) for x, (_, scores) in calls if scores is reverse]

    def given_by(of: Trace) -> list[int]:
        return [prod(shape) for shape, scores in of.given.get(index, []) if scores is reverse]

    trace = runs.near
    inputs = tuple(
        id(x)
        for x, (_, scores) in zip(trace.taken.get(index, []), trace.given.get(index, []), strict=True)
        if scores is reverse
    )
    return Calls(runs.amounts(taken_by), runs.amounts(given_by), inputs, itemsize(found.layer.compute_dtype))


def itemsize(dtype: str) -> int:
    """Bytes of an element of a Keras dtype."""
    return _SMALL.get(dtype) or np.dtype(dtype).itemsize


class _NoSlot:
    """In place of a slot, to which an optimizer of the user's own may give a first value."""

    def assign(self, value: Any) -> None:
        pass


def _unbuilt(optimizer: Any) -> Any:
    """Returns another optimizer with the same attributes.

    Its configuration would not do: a schedule may have none.
    """
    twin: Any = object.__new__(type(optimizer))
    fresh = {"built": False, "_variables": [], "_trainable_variables": [], "_trainable_variables_indices": {}}
    vars(twin).update(vars(optimizer) | fresh | {"_track_variable": lambda variable: None})
    # Which knows the first one's variables.
    del vars(twin)["_tracker"]
    return twin


def _slots(model: Any, variables: list[Any]) -> tuple[tuple[int, ...], str]:
    """Bytes of the optimizer's slots of each variable: the compiled optimizer's, else Adam's."""
    optimizer = getattr(model, "optimizer", None)
    trainable = list(model.trainable_variables)
    made: dict[int, int] = {}
    found = optimizer if optimizer is not None else keras.optimizers.Adam()
    twin = _unbuilt(getattr(found, "inner_optimizer", found))

    def add(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        size = prod(reference_variable.shape) * itemsize(reference_variable.dtype)
        made[id(reference_variable)] = made.get(id(reference_variable), 0) + size
        return _NoSlot()

    # A twin of the optimizer whose slots hold nothing: only their sizes are wanted.
    object.__setattr__(twin, "add_variable_from_reference", add)
    object.__setattr__(twin, "add_variable", lambda *args, **kwargs: _NoSlot())
    twin.build(trainable)
    name = type(twin).__name__ if optimizer is not None else "Adam (no optimizer is compiled)"
    return tuple(made.get(id(v), 0) for v in variables), name
