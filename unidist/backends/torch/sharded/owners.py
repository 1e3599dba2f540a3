"""Functions of whole tensors that one rank each computes: parts go to the owner, and come back.

Two all_to_alls carry them all. Of P bytes in n parts a rank sends 2 (n - 1) / n of its part, P / n, where to gather
them takes (n - 1) P / n; and it computes 1 / n of the functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from unidist.backends.torch.sharded.space import Spec
from unidist.backends.torch.sharded.tensor import ShardedTensor, plain, wrap
from unidist.propagation.layouts import cuts, local_shape, offset

Tensor = torch.Tensor
Places = tuple[int, ...]
# Which part of a tensor a rank has.
Where = tuple[slice, ...]


def computed(
    given: Sequence[ShardedTensor],
    functions: Sequence[Callable[[Tensor], Tensor]],
    costs: Sequence[float],
    loads: dict[int, float],
) -> list[ShardedTensor]:
    """Returns what each function makes of the whole of its tensor, of the same shape, in its layout.

    Args:
        given: carriers of one space, all cut along each of its lines, of one dtype.
        functions: one for each.
        costs: of each function, which are spread evenly.
        loads: rank of the mesh -> what it has to compute already; the costs are added.
    """
    space = given[0].spec.space
    names, group = space.group(tuple(range(len(space.sizes))))
    owned: list[list[int]] = []
    for ranks in space.mesh.groups(names):
        spread_here = spread(costs, [loads.get(rank, 0.0) for rank in ranks])
        for rank, theirs in zip(ranks, spread_here, strict=True):
            loads[rank] = loads.get(rank, 0.0) + sum(costs[k] for k in theirs)
        if space.rank in ranks:
            owned = spread_here
    order, mine = list(itertools.chain(*owned)), owned[group.index]
    parts = [plain(x.local).detach() for x in given]
    places = list(itertools.product(*map(range, space.sizes)))
    pieces = [[(k, *_at(given[k].spec, place)) for k in mine] for place in places]
    to_owners = [sum(parts[k].numel() for k in theirs) for theirs in owned]
    from_ranks = [sum(size for *_, size in of_one) for of_one in pieces]

    def exchanged(x: Tensor, to: list[int], of: list[int]) -> Tensor:
        space.note("all_to_all", names, group, x.shape, x)
        return space.comm.all_to_all(x, group, 0, to, 0, of)

    came = exchanged(torch.cat([parts[k].reshape(-1) for k in order]), to_owners, from_ranks)
    wholes = {k: came.new_empty(given[k].shape) for k in mine}
    flat = list(itertools.chain(*pieces))
    for (k, where, _), piece in zip(flat, came.split([size for *_, size in flat]), strict=True):
        wholes[k][where] = piece.view(wholes[k][where].shape)
    made = {k: functions[k](x) for k, x in wholes.items()}
    sent = torch.cat([came.new_empty(0), *(made[k][where].reshape(-1) for k, where, _ in flat)])
    back = exchanged(sent, from_ranks, to_owners).split([parts[k].numel() for k in order])
    found = dict(zip(order, back, strict=True))
    return [wrap(found[k].view(part.shape), given[k].spec) for k, part in enumerate(parts)]


def spread(costs: Sequence[float], loads: list[float]) -> list[list[int]]:
    """Returns the numbers of what each owner gets: the dearest first, each to who has least to do so far.

    Example:
        >>> spread([1.0, 4.0, 2.0, 2.0], [0.0, 0.0])
        [[1, 0], [2, 3]]
    """
    owned: list[list[int]] = [[] for _ in loads]
    loads = list(loads)
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owner = loads.index(min(loads))
        owned[owner].append(k)
        loads[owner] += costs[k]
    return owned


def _at(spec: Spec, places: Places) -> tuple[Where, int]:
    """Returns which part of a whole the rank at places of each line has, and how many elements."""
    where = [slice(None)] * len(spec.shape)
    for line, cut in cuts(spec.states):
        start = offset(cut, places[line])
        where[cut.dim] = slice(start, start + cut.sizes[places[line]])
    return tuple(where), torch.Size(local_shape(spec.shape, spec.states, places)).numel()
