"""unidist: any Keras 3 model on many devices, with the numbers of one device.

Importing it imports no framework and no Keras; each name below is loaded when it is first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidist import namesake
from unidist.names import WHERE as _WHERE
from unidist.names import load as _load

__version__ = "0.1.0"
__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    value = globals()[name] = _load(name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


namesake.warn(Path(__file__).parents[1])

if TYPE_CHECKING:
    from unidist.algebra import Layout as Layout
    from unidist.algebra import Mesh as Mesh
    from unidist.array import DistributedArray as DistributedArray
    from unidist.array import all_gather as all_gather
    from unidist.array import all_reduce as all_reduce
    from unidist.array import all_to_all as all_to_all
    from unidist.array import barrier as barrier
    from unidist.array import broadcast as broadcast
    from unidist.array import distribute as distribute
    from unidist.array import from_local as from_local
    from unidist.array import permute as permute
    from unidist.array import reduce_scatter as reduce_scatter
    from unidist.backends.registry import backends as backends
    from unidist.backends.registry import register as register
    from unidist.drawing import Picture as Picture
    from unidist.drawing import draw as draw
    from unidist.errors import ArgumentError as ArgumentError
    from unidist.errors import BackendMismatchError as BackendMismatchError
    from unidist.errors import BackendNotAvailableError as BackendNotAvailableError
    from unidist.errors import CapabilityError as CapabilityError
    from unidist.errors import CheckpointError as CheckpointError
    from unidist.errors import DesyncError as DesyncError
    from unidist.errors import DrawingError as DrawingError
    from unidist.errors import LayoutError as LayoutError
    from unidist.errors import MeshError as MeshError
    from unidist.errors import ProcessLostError as ProcessLostError
    from unidist.errors import RankFailedError as RankFailedError
    from unidist.errors import UnidistError as UnidistError
    from unidist.keras.api.models import describe as describe
    from unidist.keras.api.models import gather_weights as gather_weights
    from unidist.keras.api.models import parallelize as parallelize
    from unidist.keras.api.telemetry import Telemetry as Telemetry
    from unidist.keras.api.tensor_parallel import TensorParallelKeras as TensorParallelKeras
    from unidist.keras.checkpoint.api import restore as restore
    from unidist.keras.checkpoint.api import save as save
    from unidist.keras.checkpoint.resuming import Checkpoint as Checkpoint
    from unidist.keras.planning.plan import plan as plan
    from unidist.keras.strategies.strategy import DataParallel as DataParallel
    from unidist.keras.strategies.strategy import ModelParallel as ModelParallel
    from unidist.ledger import Ledger as Ledger
    from unidist.ledger import ledger as ledger
    from unidist.notebook import notebook_run as notebook_run
    from unidist.planner.layout_map import LayoutMap as LayoutMap
    from unidist.planner.plan import Plan as Plan
    from unidist.session import backend as backend
    from unidist.session import initialize as initialize
    from unidist.session import list_devices as list_devices
    from unidist.session import process_count as process_count
    from unidist.session import process_index as process_index
    from unidist.session import shutdown as shutdown
    from unidist.session import use as use
