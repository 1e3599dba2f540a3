"""The functions of this package that unidist.keras.driver.Driver names."""

from __future__ import annotations

from unidist.keras.tensorflow_horovod.hooks import align_seeds as align_seeds
from unidist.keras.tensorflow_horovod.hooks import check as check
from unidist.keras.tensorflow_horovod.hooks import leave as leave
from unidist.keras.tensorflow_horovod.hooks import prepare as prepare
from unidist.keras.tensorflow_horovod.hooks import table as table
from unidist.keras.tensorflow_horovod.hooks import writing as writing
from unidist.keras.tensorflow_horovod.models import gather_weights as gather_weights
from unidist.keras.tensorflow_horovod.models import parallelize as parallelize
from unidist.keras.tensorflow_horovod.models import reasons as reasons
from unidist.keras.tensorflow_horovod.models import rows as rows
from unidist.keras.tensorflow_horovod.states import held as held
from unidist.keras.tensorflow_horovod.states import processes as processes
from unidist.keras.tensorflow_horovod.states import ready as ready

RUNS_PROGRAMS = False


def rehearse(*step: object) -> str:
    """Says why traffic is an estimate."""
    return "with Keras on TensorFlow no step is rehearsed"
