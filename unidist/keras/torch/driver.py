"""The functions of this package that unidist.keras.driver.Driver names."""

from __future__ import annotations

from unidist.keras.torch.hooks import align_seeds as align_seeds
from unidist.keras.torch.hooks import check as check
from unidist.keras.torch.hooks import leave as leave
from unidist.keras.torch.hooks import prepare as prepare
from unidist.keras.torch.hooks import table as table
from unidist.keras.torch.hooks import writing as writing
from unidist.keras.torch.models import gather_weights as gather_weights
from unidist.keras.torch.models import parallelize as parallelize
from unidist.keras.torch.models import reasons as reasons
from unidist.keras.torch.models import rows as rows
from unidist.keras.torch.rehearsal import rehearse as rehearse
from unidist.keras.torch.states import held as held
from unidist.keras.torch.states import processes as processes
from unidist.keras.torch.states import ready as ready

RUNS_PROGRAMS = False
