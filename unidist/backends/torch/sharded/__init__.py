"""Tensors that carry their layout (`ShardedTensor`), on any adapter whose ranks hold torch tensors."""

from unidist.backends.torch.sharded import bindings as bindings
from unidist.backends.torch.sharded import methods as methods
from unidist.backends.torch.sharded.entrances import put_on as put_on
from unidist.backends.torch.sharded.entrances import space as space
from unidist.backends.torch.sharded.entrances import take_off as take_off
from unidist.backends.torch.sharded.space import Space as Space
from unidist.backends.torch.sharded.space import Spec as Spec
from unidist.backends.torch.sharded.tensor import ShardedTensor as ShardedTensor
from unidist.backends.torch.sharded.tensor import distribute as distribute
from unidist.backends.torch.sharded.tensor import from_local as from_local
from unidist.backends.torch.sharded.tensor import wrap as wrap
