"""The laws that every adapter obeys: functions of a World, run in this process or in each of a world.

Each compares with NumPy (the simulator's reference): exactly where the adapter holds shards, through the gathered
value where a partial array's contributions are the framework's own business. All ranks' data are drawn from one seed,
so the processes of a world agree on every call without speaking (no check may iterate over a set of names, whose order
differs between processes).
"""

from unidist.testing.laws import placing as placing  # isort: skip
from unidist.testing.laws import moving as moving  # isort: skip
from unidist.testing.laws import bounds as bounds  # isort: skip
from unidist.testing.laws.world import CHECKS as CHECKS
from unidist.testing.laws.world import NEED_GRADIENTS as NEED_GRADIENTS
from unidist.testing.laws.world import World as World
from unidist.testing.laws.world import leave_here as leave_here
from unidist.testing.laws.world import make_world as make_world
from unidist.testing.laws.world import run_check as run_check
from unidist.testing.laws.world import run_check_here as run_check_here
