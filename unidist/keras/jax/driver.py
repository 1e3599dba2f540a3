"""The functions of this package that unidist.keras.driver.Driver names."""

from __future__ import annotations

from unidist.keras.jax import saving
from unidist.keras.jax.hooks import align_seeds as align_seeds
from unidist.keras.jax.hooks import check as check
from unidist.keras.jax.hooks import leave as leave
from unidist.keras.jax.hooks import prepare as prepare
from unidist.keras.jax.hooks import table as table
from unidist.keras.jax.hooks import writing as writing
from unidist.keras.jax.models import gather_weights as gather_weights
from unidist.keras.jax.models import parallelize as parallelize
from unidist.keras.jax.models import reasons as reasons
from unidist.keras.jax.models import rows as rows
from unidist.keras.jax.saving import held as held
from unidist.keras.jax.saving import ready as ready
from unidist.strategies import Strategy

RUNS_PROGRAMS = True
processes = saving.processes_of


def rehearse(*step: object) -> str:
    """Says why traffic is an estimate."""
    contexts = any(isinstance(one, Strategy) and one.context_axes for one in step)
    besides = ", and what attention reads of other devices' places is not in it" if contexts else ""
    return f"Keras on JAX leaves it to a compiler what is sent{besides}"
