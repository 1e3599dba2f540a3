"""Ring attention: keys and values go round the ranks, and each attends to those that it holds.

A rank never has more keys than its own and those that pass. What it finds of each part is merged by the highest score
and the sum of weights so far. Backward sends keys and values round once more, and their gradients behind them. So a
rank sends as many bytes as K and V have there 3 (n - 1) times.

Each part is computed by torch's products and exponentials: of its fused kernels, private functions alone give the sums.

Under a causal mask the last rank would attend to all keys and the first to its own. So there each rank is dealt two
chunks of the 2 n of a sequence, r and 2 n - 1 - r, and gives them back: all ranks compute alike at each step.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889; Brandon et al. 2023, "Striped
Attention", arXiv:2311.09431, for the balance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensor

from unidist import events
from unidist.backends.torch.sharded.space import Space
from unidist.backends.torch.sharded.tensor import ShardedTensor

Tensor = torch.Tensor
Pairs = tuple[tuple[int, int], ...]
# Scores that are there at once: queries are taken some at a time.
SCORES = 1 << 24
# A mask that takes this off a score hides the key from whoever sees another one.
HIDDEN = -1e30
# The dim of places.
PLACES = -2


class Block(NamedTuple):
    """Some queries, and some of the keys that a rank holds.

    Attributes:
        rows: the queries, among those of the rank.
        columns: the keys, among those that are here.
        first_row: where the queries begin among all places.
        first_column: where the keys do.
        is_causal: whether some of the keys come after some of the queries, and are hidden from them.
    """

    rows: slice
    columns: slice
    first_row: int
    first_column: int
    is_causal: bool


@dataclass(frozen=True, slots=True)
class Ring:
    """Says how places are cut over the one axis of a space, as its rank sees it.

    Attributes:
        queries: the places of queries that each rank has.
        keys: those of keys and values.
        causal: whether a query sees the keys up to its own place alone.
        scale: of products of queries and keys.
        why: the purpose of what is sent, backward too.
    """

    space: Space
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    scale: float
    why: str = ""

    @property
    def place(self) -> int:
        return self.space.places[0]

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def is_dealt(self) -> bool:
        """Is true where ranks are dealt the first and the last chunks together."""
        even = len(set(self.queries)) == 1 and not self.queries[0] % 2
        return self.causal and even and self.queries == self.keys

    def source(self, step: int) -> int:
        """The place whose keys are here at a step."""
        return (self.place - step) % self.count

    def spans(self, sizes: tuple[int, ...], place: int) -> list[range]:
        """The places of the sequence that a rank has, in its order."""
        if not self.is_dealt:
            start = sum(sizes[:place])
            return [range(start, start + sizes[place])]
        half, last = sizes[place] // 2, 2 * self.count - 1 - place
        return [range(k * half, (k + 1) * half) for k in (place, last)]

    def blocks(self, step: int, queries: Tensor) -> Iterator[Block]:
        """Gives what is to be computed with the keys that are here, without what a causal mask hides."""
        heads, column = max(1, queries.shape[:PLACES].numel()), 0
        for keys in self.spans(self.keys, self.source(step)):
            columns, row = slice(column, column + len(keys)), 0
            column += len(keys)
            most = max(1, SCORES // (heads * max(1, len(keys))))
            for own in self.spans(self.queries, self.place):
                for start in range(0, len(own), most):
                    some = own[start : start + most]
                    if keys and not (self.causal and keys.start > some[-1]):
                        rows = slice(row + start, row + start + len(some))
                        is_causal = self.causal and keys[-1] > some.start
                        yield Block(rows, columns, some.start, keys.start, is_causal)
                row += len(own)

    def passed(self, x: Tensor) -> Tensor:
        """Sends a part to the next place, and returns what the one before had."""
        return self._sent(x, tuple((k, (k + 1) % self.count) for k in range(self.count)))

    def dealt(self, x: Tensor) -> Tensor:
        """This rank's first and last chunk, of what it has in the sequence's order."""
        if not self.is_dealt:
            return x
        even, odd = (self._sent(part, self._owners(k)) for k, part in enumerate(x.chunk(2, PLACES)))
        return torch.cat((odd, even) if self.place % 2 else (even, odd), PLACES)

    def given_back(self, x: Tensor) -> Tensor:
        """The inverse of `dealt`."""
        if not self.is_dealt:
            return x
        parts = x.chunk(2, PLACES)
        back = (tuple((to, of) for of, to in self._owners(k)) for k in (0, 1))
        order = parts[:: -1 if self.place % 2 else 1]
        return torch.cat([self._sent(part, pairs) for part, pairs in zip(order, back, strict=True)], PLACES)

    def _owners(self, which: int) -> Pairs:
        """Pairs each rank with who gets its first, or second, chunk. Each gets one of all."""
        chunks = ((place, 2 * place + which) for place in range(self.count))
        return tuple((place, min(chunk, 2 * self.count - 1 - chunk)) for place, chunk in chunks)

    def _sent(self, x: Tensor, pairs: Pairs) -> Tensor:
        names, group = self.space.group((0,))
        if group.size == 1:
            return x
        with events.for_purpose(self.why):
            self.space.note("permute", names, group, x.shape, x)
            return self.space.comm.permute(x.contiguous(), group, pairs)

    def padded(self, x: Tensor) -> Tensor:
        """A part as long as the longest: what goes round has one shape."""
        missing = max(self.keys) - x.shape[PLACES]
        return F.pad(x, (0, 0, 0, missing)) if missing else x


class _Mask(NamedTuple):
    """A mask of this rank's queries and all keys, and which places' keys it hides from all of them."""

    values: Tensor | None
    hidden: frozenset[int]

    @classmethod
    def of(cls, ring: Ring, mask: Tensor | None) -> _Mask:
        """Looks for places without a key that a query of this rank sees, where there are values to look at."""
        if mask is None or mask.is_meta or isinstance(mask, FakeTensor) or not mask.numel() or mask.shape[-1] == 1:
            return cls(mask, frozenset())
        given = mask.detach()
        parts = [part for part in given.split(ring.keys, -1) if part.numel()]
        places = [place for place, size in enumerate(ring.keys) if size]
        if given.dtype == torch.bool:
            seen = torch.stack([part.any() for part in parts]).tolist()
            return cls(mask, frozenset(place for place, sees in zip(places, seen, strict=True) if not sees))
        # Of keys that are all hidden each counts as much: so every query must see one somewhere.
        found: list[float] = torch.stack([given.amax(-1).amin(), *(part.amax() for part in parts)]).tolist()
        below = HIDDEN if found[0] > HIDDEN / 1e10 else -torch.inf
        return cls(mask, frozenset(place for place, top in zip(places, found[1:], strict=True) if top <= below))

    def at(self, block: Block) -> Tensor | None:
        """Returns its part for a block's queries and keys."""
        return None if self.values is None else _at(self.values, block)


def _at(mask: Tensor, block: Block) -> Tensor:
    """A block of a mask, or of its gradient; dims of 1 are of all places."""
    if mask.ndim > 1 and mask.shape[PLACES] > 1:
        mask = mask[..., block.rows, :]
    width = block.columns.stop - block.columns.start
    return mask[..., block.first_column : block.first_column + width] if mask.shape[-1] > 1 else mask


def _scores(ring: Ring, block: Block, q: Tensor, k: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Products of queries and keys, with -inf where a key is hidden."""
    scores = (q[..., block.rows, :] * ring.scale @ k.mT).to(dtype)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if block.is_causal:
        rows, columns = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        is_later = columns + block.first_column > (rows + block.first_row)[:, None]
        scores = scores.masked_fill(is_later, -torch.inf)
    return scores


def _halves(pair: Tensor, block: Block, width: int, times: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a block, each as often as there are queries' heads."""
    both = pair[..., block.columns, :]
    if times > 1:
        both = both.repeat_interleave(times, -3)
    return both[..., :width], both[..., width:]


class _Attention(torch.autograd.Function):
    """The attention of this rank's queries to all keys."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        seen = _Mask.of(ring, mask)
        queries, pair = ring.dealt(q), ring.dealt(torch.cat((k, v), -1))
        wide = torch.promote_types(q.dtype, torch.float32)
        times = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
        out = queries.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        top = queries.new_full((*q.shape[:-1], 1), -torch.inf, dtype=wide)
        total, held = torch.zeros_like(top), ring.padded(pair)
        for step in range(ring.count):
            if step:
                held = ring.passed(held)
            if ring.source(step) in seen.hidden:
                continue
            for block in ring.blocks(step, queries):
                keys, values = _halves(held, block, k.shape[-1], times)
                scores = _scores(ring, block, queries, keys, seen.at(block), wide)
                before = top[..., block.rows, :]
                now = torch.maximum(before, scores.amax(-1, keepdim=True))
                base = now.masked_fill(now == -torch.inf, 0.0)  # of queries that have seen no key yet
                weights, kept = torch.exp(scores - base), torch.exp(before - base)
                total[..., block.rows, :] = total[..., block.rows, :] * kept + weights.sum(-1, keepdim=True)
                new = (weights.to(q.dtype) @ values).to(wide)
                out[..., block.rows, :] = out[..., block.rows, :] * kept + new
                top[..., block.rows, :] = now
        # Who sees no key has no weights: 0 / 1 forward, and 0 / inf backward.
        given = ring.given_back((out / total.masked_fill(total == 0, 1.0)).to(q.dtype))
        # Not the logarithm of the sum: beside the score of a mask that hides all keys it would be rounded away.
        sums = torch.cat((top.masked_fill(top == -torch.inf, 0.0), total.masked_fill(total == 0, torch.inf)), -1)
        ctx.ring, ctx.hidden, ctx.width, ctx.times = ring, seen.hidden, k.shape[-1], times
        ctx.save_for_backward(queries, pair, given, sums, mask)
        return given

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        queries, pair, given, sums, mask = ctx.saved_tensors
        wide = sums.dtype
        own = (grad.to(wide) * given).sum(-1, keepdim=True)
        at_queries = _Gradient(ring, queries, ring.dealt(grad), sums, ring.dealt(own), ctx.width, ctx.times)
        of_mask = torch.zeros_like(mask, dtype=wide) if mask is not None and ctx.needs_input_grad[4] else None
        seen = _Mask(mask, ctx.hidden)
        held = ring.padded(pair)
        of_own = torch.zeros_like(held, dtype=wide)
        of_held = torch.zeros_like(of_own)
        for step in range(ring.count):
            if step:
                held = ring.passed(held)
            if step > 1:
                of_held = ring.passed(of_held)
            if ring.source(step) not in seen.hidden:
                at_queries.add(step, held, of_held if step else of_own, seen, of_mask)
        if ring.count > 1:
            of_own = of_own + ring.passed(of_held)
        of_pair = ring.given_back(of_own[..., : pair.shape[PLACES], :].to(pair.dtype))
        of_queries = ring.given_back(at_queries.found.to(queries.dtype))
        return (
            None,
            of_queries,
            of_pair[..., : ctx.width],
            of_pair[..., ctx.width :],
            of_mask if of_mask is None else of_mask.to(mask.dtype),
        )


class _Gradient:
    """The gradient of a rank's queries, and what they add to those of keys and values that pass."""

    def __init__(
        self, ring: Ring, queries: Tensor, grad: Tensor, sums: Tensor, own: Tensor, width: int, times: int
    ) -> None:
        self._ring, self._queries, self._grad, self._sums, self._own = ring, queries, grad, sums, own
        self._width, self._times = width, times
        self.found = torch.zeros_like(queries, dtype=sums.dtype)

    def add(self, step: int, pair: Tensor, of_pair: Tensor, seen: _Mask, of_mask: Tensor | None) -> None:
        ring, dtype, times = self._ring, self._sums.dtype, self._times
        for block in ring.blocks(step, self._queries):
            keys, values = _halves(pair, block, self._width, times)
            scores = _scores(ring, block, self._queries, keys, seen.at(block), dtype)
            grad = self._grad[..., block.rows, :]
            top, total = self._sums[..., block.rows, :].split(1, -1)
            weights = torch.exp(scores - top) / total
            of_values = weights.to(grad.dtype).mT @ grad
            of_scores = weights * ((grad @ values.mT).to(dtype) - self._own[..., block.rows, :])
            if of_mask is not None:
                part = _at(of_mask, block)
                part += of_scores.sum_to_size(part.shape)
            of_scores = (of_scores * ring.scale).to(keys.dtype)
            self.found[..., block.rows, :] += of_scores @ keys
            both = torch.cat((of_scores.mT @ self._queries[..., block.rows, :], of_values), -1).to(dtype)
            if times > 1:
                both = both.unflatten(-3, (-1, times)).sum(-3)
            of_pair[..., block.columns, :] += both


def attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Gives softmax(q k^T + mask) v of this rank's queries. All ranks of the ring come with their parts.

    Parts whose heads another axis cuts go by the rule of attention there.
    """
    if any(type(x) is ShardedTensor for x in (q, k, v, mask)):
        return ShardedTensor.dispatch(attention, (ring, q, k, v, *(() if mask is None else (mask,))), {})  # type: ignore[no-any-return]
    out: Tensor = _Attention.apply(ring, q, k, v, mask)  # type: ignore[no-untyped-call]
    return out
