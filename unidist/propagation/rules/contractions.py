"""Products that sum over shared dims: matmul, einsum, linear, convolutions' channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from unidist.propagation.choosing import Option
from unidist.propagation.layouts import PARTIAL, WHOLE, Cut, Shape, State, chunked
from unidist.propagation.rules.elementwise import broadcast

Letters = tuple[str, ...]


def contraction(
    states: Sequence[State],
    shapes: Sequence[Shape],
    terms: tuple[Letters, ...],
    out: Letters,
    bias: int | None = None,
    turns: int = 0,
    fixed: frozenset[str] = frozenset(),
    always: bool = False,
) -> Iterator[Option]:
    """A product of operands with a letter for each dim, as an einsum's.

    Args:
        terms: the letters of each operand.
        out: those of the result.
        bias: the operand that is added to the product along its last letters, if there is one.
        turns: places over which a cut operand may be turned to another of its dims; 0: it is not.
        fixed: letters that it is not turned to.
        always: operands that are cut along several letters are turned, whatever it sends.
    """
    factors = [k for k in range(len(states)) if k != bias]
    cut = {(terms[k][s.dim], s.sizes) for k, s in enumerate(states) if isinstance(s, Cut) and k != bias}
    if bias is not None and isinstance(states[bias], Cut):
        cut.add((terms[bias][states[bias].dim], states[bias].sizes))  # type: ignore[union-attr]
    turned = list(_turned(states, shapes, terms, out, turns, fixed)) if turns and cut else []
    if always and turned and len({letter for letter, _ in cut}) > 1:
        yield from turned
        return
    # Letters of the result come first: what they leave is cut and no sum.
    for letter, sizes in sorted(cut, key=lambda one: (one[0] not in out, one)):
        lengths = [shapes[k][term.index(letter)] for k, term in enumerate(terms) if letter in term]
        if any(term.count(letter) > 1 for term in terms) or max(lengths) != sum(sizes):
            continue
        if letter not in out and min(lengths) < max(lengths):
            continue  # a dim of 1 is broadcast along it
        wants = [_along(letter, sizes, terms[k], shapes[k]) for k in range(len(states))]
        if letter in out:
            yield Option(tuple(wants), Cut(out.index(letter), sizes))
        else:
            yield Option(tuple(PARTIAL if k == bias else want for k, want in enumerate(wants)), PARTIAL)
    yield from turned
    if PARTIAL in states:
        # One factor's parts add up to the product's; a bias counts once.
        for k in [k for k in factors if states[k] == PARTIAL] or factors[:1]:
            yield Option(
                tuple(PARTIAL if j in (k, bias) else WHOLE for j in range(len(states))),
                PARTIAL,
            )


def _turned(
    states: Sequence[State],
    shapes: Sequence[Shape],
    terms: tuple[Letters, ...],
    out: Letters,
    places: int,
    fixed: frozenset[str],
) -> Iterator[Option]:
    """Cuts along other letters that the result and all cut operands have: rows last."""
    holders = [k for k, state in enumerate(states) if isinstance(state, Cut)]
    held = {terms[k][states[k].dim] for k in holders}  # type: ignore[union-attr]
    first = terms[holders[0]]
    for letter in (*first[1:], first[0]):
        if letter in held or letter in fixed or letter not in out or any(terms[k].count(letter) != 1 for k in holders):
            continue
        size = shapes[holders[0]][first.index(letter)]
        if size >= places:
            sizes = chunked(0, size, places).sizes
            yield Option(
                tuple(_along(letter, sizes, term, shape) for term, shape in zip(terms, shapes, strict=True)),
                Cut(out.index(letter), sizes),
            )


def _along(letter: str, sizes: tuple[int, ...], term: Letters, shape: Shape) -> State:
    if letter not in term:
        return WHOLE
    dim = term.index(letter)
    return Cut(dim, sizes) if shape[dim] == sum(sizes) else WHOLE  # of 1: broadcast along it


@lru_cache(maxsize=1024)
def matmul(x: Shape, y: Shape) -> tuple[tuple[Letters, Letters], Letters]:
    """The letters of x @ y: vectors have no row or column, batches are broadcast."""
    batch = len(broadcast([x[:-2], y[:-2]]))

    def leading(shape: Shape) -> Letters:
        return tuple(f"b{batch - len(shape) + k}" for k in range(len(shape)))

    rows, columns = ("n",) * (len(x) > 1), ("m",) * (len(y) > 1)
    left = (*leading(x[:-2]), *rows, "k")
    right = (*leading(y[:-2]), "k", *columns)
    return (left, right), (*(f"b{k}" for k in range(batch)), *rows, *columns)


@lru_cache(maxsize=1024)
def einsum(text: str, ndims: tuple[int, ...]) -> tuple[tuple[Letters, ...], Letters] | None:
    """The letters of an equation; None where it says too little (no arrow, dots of several lengths)."""
    left, arrow, right = text.replace(" ", "").partition("->")
    terms = left.split(",")
    dotted = {ndim - len(term) + 3 for term, ndim in zip(terms, ndims, strict=True) if "..." in term}
    if not arrow or len(dotted) > 1:
        return None
    dots = [f"...{k}" for k in range(dotted.pop() if dotted else 0)]

    def letters(term: str) -> Letters:
        before, dot, behind = term.partition("...")
        return (*before, *(dots if dot else ()), *behind)

    return tuple(map(letters, terms)), letters(right)


def linear(ndim: int, bias: bool, weight: int = 2) -> tuple[tuple[Letters, ...], Letters, int | None]:
    """The letters of x @ w.T + b."""
    lead = tuple(f"b{k}" for k in range(ndim - 1))
    columns = ("m",) * (weight > 1)
    terms = ((*lead, "k"), (*columns, "k"), columns)
    return terms[: 2 + bias], (*lead, *columns), 2 if bias else None
