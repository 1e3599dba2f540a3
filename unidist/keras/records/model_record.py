"""Keeps what is known of a Keras model: one record on each, whatever the driver.

Which distribution a model has: that of the driver's own object (torch's and Horovod's engine), which it keeps; else
that on which its variables are; else that which it was made under, or given since: all that is known of a model without
variables. JAX and TensorFlow put the active one before all others, and move the model there.

The record is an attribute, outside of Keras's tracking, and not an entry of a weak map: an engine holds its model, and
such an entry would never go. Keras copies and pickles models as files, which have no word of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from keras import distribution as keras_distribution

from unidist import session
from unidist.backends import registry
from unidist.errors import LayoutError
from unidist.keras import fit_observer, recomputing
from unidist.keras.patching.compat import Trainer
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.records import variable_record
from unidist.keras.records.layer_report import warn
from unidist.keras.strategies import distribution as distributions
from unidist.keras.strategies.distribution import UnidistDistribution, adopt

# The distribution under which a model was last made in this process.
_latest: Any = None


@dataclass(slots=True)
class Known:
    """Holds what is known of one model.

    Attributes:
        told: the distribution that it was made under, or given since.
        engine: the driver's own object of it.
        checked: the distribution whose strict rules are known to match its variables.
        rows: of the batches that an entrance was last given; None: not known.
        calls: how many calls of an entrance for one batch there were.
        is_seen: it was called with gradients, and whether it is distributed was looked up.
        is_alone: it trains on one device, and the user was warned of it.
    """

    told: Any = None
    engine: Any = None
    checked: Any = None
    rows: int | None = None
    calls: int = 0
    is_seen: bool = False
    is_alone: bool = False


def of(model: Any) -> Known:
    """The record of a model."""
    found: Known | None = vars(model).get("_unidist")
    if found is None:
        found = Known()
        object.__setattr__(model, "_unidist", found)
    return found


def hooks() -> Iterator[Hook]:
    yield Hook(Trainer, "__init__", _making, "a model remembers its distribution")
    if (trainer := fit_observer.trainer()) is not None:
        yield Hook(trainer, "fit", _fitting, "a model that no strategy has is warned of")


@calling
def _making(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """A trainer's __init__: remembers Keras's distribution of this thread, under which a model is made."""
    original(self, *args, **kwargs)
    distribution = keras_distribution.distribution()
    if distribution is not None:
        global _latest
        of(self).told = _latest = distribution


def has_distributed() -> bool:
    """Returns whether a model was made under a distribution in this process."""
    return _latest is not None


def latest() -> Any:
    """The distribution under which a model was last made, or None."""
    return _latest


@calling
def _fitting(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    _warn_where_alone(self)
    return original(self, *args, **kwargs)


def _warn_where_alone(model: Any) -> None:
    """Warns, once for a model, where it trains on one device though there are several.

    Most often it was made outside of the scope.
    """
    if not registry.has_current():
        return
    made, processes = distributions.made(), session.process_count() if registry.has_joined() else 1
    if processes == 1 and (made is None or made.mesh.size == 1):
        return
    if distribution_of(model) is not None or distributions.current() is not None:
        return
    known = of(model)
    if known.engine is not None or known.is_alone:
        return
    known.is_alone = True
    where = "on one device" if processes == 1 else f"in each of {processes} processes by itself"
    there = "No strategy was made" if made is None else f"There is a {type(made).__name__} over {made.mesh}"
    warn(
        f"model {model.name!r} has no strategy: it trains {where}. {there}. Make the model inside of "
        "`with strategy.scope():`, or call unidist.parallelize(model, strategy) before fit"
    )


def distribution_of(model: Any) -> Any:
    """Returns the distribution that a model's variables are on, else that it was made under or given.

    None where there is none.
    """
    lain = (found for v in model.variables if (found := variable_record.of(v).distribution) is not None)
    return next(lain, None) or of(model).told


def adjust(model: Any, distribution: Any) -> None:
    """Adjusts a built model once to its distribution.

    Strict rules are checked, and the layers that backward recomputes are marked.

    Raises:
        LayoutError: a strict rule matches none of its variables.
        CapabilityError: there is nothing to recompute.
    """
    known, ours = of(model), adopt(distribution)
    if known.checked is not ours:
        ours.check_model([v.path for v in model.variables], [f"{x.path}/output" for x in model._flatten_layers()])
        recomputing.mark(model, ours.strategy.remat)
        known.checked = ours


def engine_of(model: Any, make: Callable[[Any, UnidistDistribution], Any]) -> Any:
    """Returns a model's engine: its own, or one by the distribution that it has or that is active."""
    known = of(model)
    if known.engine is not None:
        return known.engine
    distribution = distribution_of(model) or distributions.current()
    return None if distribution is None else engine_for(model, adopt(distribution), make)


def engine_for(model: Any, distribution: UnidistDistribution, make: Callable[[Any, UnidistDistribution], Any]) -> Any:
    """The engine of a model under a distribution.

    Raises:
        LayoutError: the model is distributed already, in another way.
    """
    known = of(model)
    if known.engine is None:
        known.engine = make(model, distribution)
    found = known.engine.distribution
    if found is not distribution and found.strategy != distribution.strategy:
        raise LayoutError(
            f"model {model.name!r} is distributed over {found.mesh} already; "
            "save it and load it under the other strategy"
        )
    return known.engine
