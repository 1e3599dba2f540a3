"""The mathematics of layouts: pure Python, no framework."""

from unidist.algebra.layout import Layout as Layout
from unidist.algebra.layout import ReduceOp as ReduceOp
from unidist.algebra.mesh import Axes as Axes
from unidist.algebra.mesh import Group as Group
from unidist.algebra.mesh import Mesh as Mesh
from unidist.algebra.redistribution import Redistribution as Redistribution
from unidist.algebra.redistribution import redistribution as redistribution
from unidist.algebra.sharding import Sharding as Sharding
from unidist.algebra.sharding import chunk as chunk
from unidist.algebra.step import Step as Step
from unidist.algebra.step import ring_bytes as ring_bytes
