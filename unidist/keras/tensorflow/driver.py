"""The functions of this package that unidist.keras.driver.Driver names."""

from __future__ import annotations

from unidist.keras.tensorflow.hooks import align_seeds as align_seeds
from unidist.keras.tensorflow.hooks import check as check
from unidist.keras.tensorflow.hooks import leave as leave
from unidist.keras.tensorflow.hooks import prepare as prepare
from unidist.keras.tensorflow.hooks import table as table
from unidist.keras.tensorflow.hooks import writing as writing
from unidist.keras.tensorflow.models import gather_weights as gather_weights
from unidist.keras.tensorflow.models import parallelize as parallelize
from unidist.keras.tensorflow.models import reasons as reasons
from unidist.keras.tensorflow.models import rows as rows
from unidist.keras.tensorflow.states import held as held
from unidist.keras.tensorflow.states import processes as processes
from unidist.keras.tensorflow.states import ready as ready

RUNS_PROGRAMS = True


def rehearse(*step: object) -> str:
    """Says why traffic is an estimate."""
    return "Keras on TensorFlow leaves it to DTensor what is sent"
