"""Functions with a rule, by family: each is tried with every layout of every input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.torch.sharded.lockstep import Case

Tensor = torch.Tensor
# Family -> name -> the function and the shapes of its inputs.
FUNCTIONS: dict[str, dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]] = {}


class Whole(tuple[int, ...]):
    """A shape of whole numbers below a bound."""

    high: int


def ints(shape: tuple[int, ...], high: int) -> Whole:
    found = Whole(shape)
    found.high = high
    return found


class Bools(tuple[int, ...]):
    """A shape of bools."""


class Bytes(tuple[int, ...]):
    """A shape of whole numbers of eight bits, with a sign."""


def family(name: str, **functions: tuple[Any, ...]) -> None:
    FUNCTIONS.setdefault(name, {}).update({key: (value[0], value[1:]) for key, value in functions.items()})


def built(shape: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(shape, Whole):
        return torch.randint(0, shape.high, tuple(shape), generator=generator)
    if isinstance(shape, Bytes):
        return torch.randint(-128, 128, tuple(shape), generator=generator).to(torch.int8)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return x > 0 if isinstance(shape, Bools) else x


def case(name: str, key: str) -> Case:
    function, shapes = FUNCTIONS[name][key]
    return Case(f"{name} {key}", function, [built(shape, 11 * k + len(key)) for k, shape in enumerate(shapes)])


A, ROW = (5, 4), (4,)
family(
    "elementwise",
    add=(torch.add, A, A),
    add_row=(torch.add, A, ROW),
    add_both=(torch.add, (5, 1, 4), (5, 3, 1)),
    sub=(torch.sub, A, A),
    alpha=(lambda x, y: torch.add(x, y, alpha=2), A, A),
    add_number=(lambda x: x + 2.0, A),
    from_number=(lambda x: 1.0 - x, A),
    from_one=(lambda x: 1 - x - 3, A),
    mul=(torch.mul, A, A),
    mul_number=(lambda x: 3 * x, A),
    mul_row=(torch.mul, (1, 4), A),
    div=(torch.div, A, A),
    div_number=(lambda x: x / 4, A),
    over=(lambda x: 2 / (x + 9), A),
    floor=(lambda x: torch.div(x, 0.5, rounding_mode="floor"), A),
    neg=(torch.neg, A),
    clone=(torch.clone, A),
    gelu=(F.gelu, A),
    power=(lambda x: x**2, A),
    where=(lambda c, a, b: torch.where(c, a, b), Bools(A), A, ROW),
    clamp=(lambda x: x.clamp(-0.5, 0.5), A),
    less=(lambda x, y: (x < y).double(), A, A),
    both=(lambda x, y: x & y, Bools(A), Bools((5, 1))),
    single=(lambda x: x.float().double(), A),
    laid=(lambda x: x.to(torch.float64, memory_format=torch.contiguous_format), A),
    long=(lambda x: (x * 3).long(), A),
    masked_fill=(lambda x, m: x.masked_fill(m, 1.5), A, Bools(A)),
    twice=(lambda x: (lambda z: z.pow(2).sum() * z + z)(x * 2), A),
    lerp=(torch.lerp, A, A, A),
    mse=(F.mse_loss, A, A),
    bce=(lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), A, A),
)


def _reduced(name: str, dims: Any, keepdim: bool, x: Tensor) -> Any:
    return getattr(torch, name)(x, dims, keepdim=keepdim)


for _dim in (None, 0, 1, (0, 2), -1):
    for _keep in (False, True):
        _dims = (0, 1, 2) if _dim is None else _dim
        family(
            "reduction",
            **{
                f"{_name}_{_dim}_{_keep}": (partial(_reduced, _name, _dims, _keep), (5, 3, 4))
                for _name in ("sum", "mean", "amax", "amin", "var", "std", "logsumexp")
            },
        )
family(
    "reduction",
    all=(lambda x: torch.all(x), Bools(A)),
    any=(lambda x: torch.any(x, 0), Bools(A)),
    count=(torch.sum, Bools(A)),
    number=(lambda x: torch.sum(x, 0), ()),
    ties=(lambda x: torch.amax(x.sign() * 0 + 1, 0) * x.sum(), A),
    tied=(lambda x: torch.amax(x - x.detach(), 0), (7, 4)),
    tied_min=(lambda x: torch.amin(x - x.detach()), (7, 4)),
    biased=(lambda x: torch.std(x, 0, False) + torch.var(x, dim=0, unbiased=False) + torch.std(x, False), A),
    flat=(lambda x: torch.std(x.detach() * 0 + x.sum(0), 0), A),
    max=(torch.max, A),
    max_dim=(lambda x: torch.max(x, 1), A),
    argmax=(lambda x: torch.argmax(x, 0), A),
    maximum=(torch.max, A, A),
)
for _dim in (0, 1):
    family(
        "dims",
        **{
            f"{_name}_{_dim}": (lambda x, f=_f, d=_dim: f(x, d), A)
            for _name, _f in {
                "cumsum": torch.cumsum,
                "sort": torch.sort,
                "topk": lambda x, d: torch.topk(x, 2, d),
                "flip": lambda x, d: x.flip(d),
                "roll": lambda x, d: torch.roll(x, 1, d),
                "split": lambda x, d: torch.split(x, 2, d),
                "chunk": lambda x, d: torch.chunk(x, 2, d),
                "unbind": torch.unbind,
                "narrow": lambda x, d: x.narrow(d, 1, 2),
                "select": lambda x, d: x.select(d, 1),
                "repeat_interleave": lambda x, d: torch.repeat_interleave(x, 2, d),
                "cumprod": torch.cumprod,
            }.items()
        },
    )
    family(
        "norms",
        **{
            f"{_name}_{_dim}": (lambda x, f=_f, d=_dim: f(x, d), A)
            for _name, _f in {"softmax": torch.softmax, "log_softmax": F.log_softmax}.items()
        },
    )
NORMS = torch.linalg
family(
    "vector norms",
    **{
        f"{_name}{_dim}": (lambda x, f=_f, d=_dim: f(x, d), A)
        for _dim in (0, 1, None)
        for _name, _f in {
            "two": lambda x, d: NORMS.vector_norm(x, dim=d),
            "cube": lambda x, d: NORMS.vector_norm(x, 3, d, True),
            "one": lambda x, d: NORMS.vector_norm(x, 1, d),
            "most": lambda x, d: NORMS.vector_norm(x, float("inf"), d),
            "least": lambda x, d: NORMS.vector_norm(x, ord=-float("inf"), dim=d, keepdim=True),
            "count": lambda x, d: NORMS.vector_norm(x * 0.0, 0, d) + x.sum(),
            "none": lambda x, d: NORMS.vector_norm(x * 0.0, 2, d),
            "norm": lambda x, d: NORMS.norm(x, dim=d),
            "old": lambda x, d: torch.norm(x, dim=d),
            "p": lambda x, d: x.norm(3, d),
        }.items()
    },
    half=(lambda x: NORMS.vector_norm(x, 0.5, 0), A),
    cast=(lambda x: NORMS.vector_norm(x.float(), dim=0, dtype=torch.float64), A),
    halves=(lambda x: NORMS.vector_norm((x.detach() * 1000).half(), dim=0).double(), A),
    both=(lambda x: NORMS.vector_norm(x, 2, (0, 2)), (5, 3, 4)),
    matrix=(lambda x: NORMS.norm(x, "nuc", (1, 2)), (5, 3, 4)),
    rows=(lambda x: NORMS.matrix_norm(x, 1, (0, 2)), (5, 3, 4)),
    fro=(lambda x: NORMS.matrix_norm(x, dim=(0, 2)), (5, 3, 4)),
    frobenius=(lambda x: NORMS.norm(x, "fro", (1, 2), keepdim=True), (5, 3, 4)),
    columns=(lambda x: NORMS.norm(x, 1), A),
)
family(
    "permute",
    permute=(lambda x: x.permute(2, 0, 1), (5, 3, 4)),
    transpose=(lambda x: x.transpose(1, 2), (5, 3, 4)),
    moveaxis=(lambda x: torch.moveaxis(x, 0, 2), (5, 3, 4)),
    move_two=(lambda x: torch.moveaxis(x, (0, 1), (2, 0)), (5, 3, 4)),
    T=(lambda x: x.T, A),
    H=(lambda x: x.H, A),
    mT=(lambda x: x.mT, (5, 3, 4)),
    t=(lambda x: x.t(), A),
    unsqueeze=(lambda x: x.unsqueeze(1), A),
    last=(lambda x: x.unsqueeze(-1), A),
    squeeze=(lambda x: x.squeeze(), (5, 1, 4)),
    squeeze_dim=(lambda x: x.squeeze(1), (5, 1, 4)),
    squeeze_local=(lambda x: x.squeeze(), (3, 2, 4)),
    expand=(lambda x: x.expand(2, 5, 4), A),
    expand_one=(lambda x: x.expand(5, 4), (5, 1)),
    broadcast=(lambda x: torch.broadcast_to(x, (5, 3, 4)), (5, 1, 4)),
    tril=(lambda x: x.tril(), (5, 3, 3)),
    pad=(lambda x: F.pad(x, (1, 1)), A),
    pad_ones=(lambda x: F.pad(x, (1, 1), value=1.0), A),
    pad_rows=(lambda x: F.pad(x, (0, 0, 2, 1), value=-1.0), A),
    pad_mirrored=(lambda x: F.pad(x, (1, 2), "reflect"), (5, 3, 4)),
    pad_round=(lambda x: F.pad(x, (1, 1), mode="circular"), (3, 4)),
    pad_edges=(lambda x: F.pad(x, (1, 1, 0, 2), mode="replicate"), (5, 2, 3, 4)),
    tile=(lambda x: x.repeat(2, 1, 3), A),
)
family(
    "view",
    **{
        f"{_a} {_b}": (lambda x, b=_b: x.reshape(b), _a)
        for _a, _b in (
            ((5, 3, 4), (5, 12)),
            ((5, 3, 4), (15, 4)),
            ((5, 12), (5, 3, 4)),
            ((5, 12), (5, 4, 3)),
            ((20, 3), (5, 4, 3)),
            ((5, 3, 4), (-1,)),
            ((60,), (5, 12)),
            (A, (5, 1, 4)),
            ((5, 1, 4), A),
            ((1, 5, 4), A),
            ((6, 4), (2, 3, 4)),
            ((6, 4), (3, 8)),
            ((4, 5), A),
            ((3, 5, 4), (5, 12)),
            ((4, 4), (2, 2, 4)),
        )
    },
    flatten=(lambda x: torch.flatten(x, 1), (5, 3, 4)),
    view=(lambda x: x.view(5, -1), (5, 3, 4)),
    unflatten=(lambda x: x.unflatten(1, (2, -1)), A),
)
family(
    "contraction",
    matmul=(torch.matmul, A, (4, 3)),
    self=(lambda x: x @ x.T, A),
    square=(lambda x: x @ x, (4, 4)),
    batch=(torch.matmul, (5, 3, 4), (4, 2)),
    both=(torch.matmul, (5, 2, 3, 4), (5, 2, 4, 3)),
    broadcast=(torch.matmul, (5, 3, 4), (1, 4, 2)),
    vector=(torch.matmul, A, ROW),
    dot=(torch.matmul, (5,), (5,)),
    bmm=(torch.bmm, (5, 3, 4), (5, 4, 2)),
    linear=(F.linear, A, (3, 4), (3,)),
    linear_3=(F.linear, (5, 2, 4), (3, 4), (3,)),
    linear_plain=(F.linear, A, (3, 4)),
    addmm=(torch.addmm, (5, 3), A, (4, 3)),
    outer=(torch.outer, (5,), (4,)),
    einsum_q=(lambda x, w: torch.einsum("bqm,muh->bquh", x, w), (5, 3, 4), (4, 2, 3)),
    einsum_a=(lambda q, k: torch.einsum("bquh,bkuh->buqk", q, k), (5, 3, 2, 4), (5, 3, 2, 4)),
    einsum_o=(lambda x, w: torch.einsum("bquh,uhm->bqm", x, w), (5, 3, 4, 2), (4, 2, 3)),
    einsum_dots=(lambda x, w: torch.einsum("...d,de->...e", x, w), (5, 3, 4), (4, 2)),
    einsum_sum=(lambda x, y: torch.einsum("ij,j->", x, y), A, ROW),
    einsum_diagonal=(lambda x: torch.einsum("ii->i", x), (5, 5)),
    experts=(lambda x, w: torch.einsum("td,edi->eti", x, w), A, (3, 4, 2)),
    tensordot=(lambda x, y: torch.tensordot(x, y, ([2, 0], [1, 0])), (5, 3, 4), (5, 4, 2)),
)
family(
    "indexing",
    all=(lambda x: x[:], A),
    columns=(lambda x: x[:, 1:3], A),
    rows=(lambda x: x[1:4], A),
    row=(lambda x: x[0], A),
    column=(lambda x: x[:, 0], A),
    new=(lambda x: x[:, None], A),
    dots=(lambda x: x[..., -1], A),
    dots_new=(lambda x: x[..., None], A),
    step=(lambda x: x[:, ::2], A),
    stop=(lambda x: x[:5, :4], A),
    less=(lambda x: x[:-1], A),
    loop=(lambda x: sum(x[k] for k in range(x.shape[0])), A),
    each=(lambda x: torch.stack(list(x)), A),
    places=(lambda x, i: x[i], A, ints((3,), 5)),
    places_1=(lambda x, i: x[:, i], A, ints((3,), 4)),
    mask=(lambda x: x[x > 0].sum(), A),
    index_select=(lambda x, i: torch.index_select(x, 1, i), A, ints((3,), 4)),
    embedding=(F.embedding, ints((5, 3), 7), (7, 4)),
    padded=(lambda i, w: F.embedding(i, w, padding_idx=2), ints((5, 3), 7), (7, 4)),
    gather=(lambda x, i: torch.gather(x, 1, i), A, ints((5, 2), 4)),
    take=(lambda x, i: torch.take_along_dim(x, i, 1), A, ints((5, 2), 4)),
    one_hot=(lambda i: F.one_hot(i, 7), ints((5, 3), 7)),
)


def _set(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1
    z[:, 1:3] = y
    z[:, 0] = 2.0
    return z


def _set_row(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1
    z[2] = y
    return z


def _masked(x: Tensor, m: Tensor) -> Tensor:
    z = x * 1
    z[m] = 3.0
    return z


family(
    "scatter",
    scatter=(lambda x, i, y: x.scatter(1, i, y), A, ints((5, 1), 4), (5, 1)),
    scatter_add=(lambda x, i, y: x.scatter_add(1, i, y), A, ints((5, 2), 4), (5, 2)),
    reduce_sum=(lambda x, i, y: x.scatter_reduce(1, i, y, "sum"), A, ints((5, 2), 4), (5, 2)),
    reduce_alone=(lambda x, i, y: x.scatter_reduce(0, i, y, "sum", include_self=False), A, ints((3, 4), 5), (3, 4)),
    reduce_most=(lambda x, i, y: torch.scatter_reduce(x, 1, i, src=y, reduce="amax"), A, ints((5, 2), 4), (5, 2)),
    reduce_mean=(lambda x, i, y: x.scatter_reduce(1, i, y, reduce="mean"), A, ints(A, 4), A),
    scatter_add_all=(lambda x, i, y: x.scatter_add(1, i, y), A, ints(A, 4), A),
    scatter_add_0=(lambda x, i, y: x.scatter_add(0, i, y), A, ints((3, 4), 5), (3, 4)),
    index_add=(lambda x, i, y: x.index_add(0, i, y), A, ints((3,), 5), (3, 4)),
    index_fill=(lambda x, i: x.index_fill(1, i, 2.0), A, ints((2,), 4)),
    set=(_set, A, (5, 2)),
    set_row=(_set_row, A, ROW),
    set_mask=(_masked, A, Bools(A)),
)
for _dim in (0, 1):
    family(
        "joins",
        **{
            f"cat_{_dim}": (lambda x, y, d=_dim: torch.cat([x, y], d), A, A),
            f"stack_{_dim}": (lambda x, y, d=_dim: torch.stack([x, y], d), A, A),
        },
    )
family(
    "joins",
    cat_uneven=(lambda x, y: torch.cat([x, y], 1), A, (5, 2)),
    stack_last=(lambda x, y: torch.stack([x, y], -1), A, A),
)
HEADS = (5, 2, 3, 4)
family(
    "norms",
    layer_norm=(lambda x, w, b: F.layer_norm(x, (4,), w, b), (5, 3, 4), ROW, ROW),
    rms_norm=(lambda x, w: F.rms_norm(x, (4,), w), (5, 3, 4), ROW),
    group_norm=(lambda x, w, b: F.group_norm(x, 2, w, b), (5, 4, 3), ROW, ROW),
    batch_norm=(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (5, 4, 3), ROW, ROW),
    given=(lambda x, m, v: F.batch_norm(x, m.detach(), v.detach() ** 2 + 1), (5, 4, 3), ROW, ROW),
)
family(
    "attention",
    plain=(F.scaled_dot_product_attention, HEADS, HEADS, HEADS),
    causal=(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS, HEADS, HEADS),
    masked=(lambda q, m: F.scaled_dot_product_attention(q, q + 1, q - 1, m), (5, 4, 3, 4), (5, 1, 3, 3)),
    grouped=(lambda q, k: F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True), (5, 4, 3, 4), HEADS),
)
family(
    "windows",
    conv1d=(F.conv1d, (5, 4, 6), (3, 4, 2), (3,)),
    conv2d=(F.conv2d, (5, 2, 4, 4), (3, 2, 2, 2), (3,)),
    plain=(F.conv1d, (5, 4, 6), (3, 4, 2)),
    groups=(lambda x, w: F.conv1d(x, w, groups=2), (5, 4, 6), (6, 2, 2)),
    transposed=(F.conv_transpose1d, (5, 4, 6), (4, 3, 2), (3,)),
    max_pool=(lambda x: F.max_pool1d(x, 2), (5, 4, 6)),
    avg_pool=(lambda x: F.avg_pool2d(x, 2), (5, 3, 4, 4)),
    larger=(lambda x: F.interpolate(x, scale_factor=2), (5, 2, 3)),
    bicubic=(lambda x: F.interpolate(x, size=(4, 5), mode="bicubic"), (2, 3, 3, 4)),
)
family(
    "creation",
    zeros=(lambda x: torch.zeros_like(x) + x, A),
    ones=(lambda x: torch.ones_like(x).sum() * x, A),
    arange=(lambda x: x * torch.arange(x.shape[0]).unsqueeze(1), A),
    count=(lambda x: x.sum() / x.shape[0], A),
    new=(lambda x: x.new_zeros(5, 4) + x, A),
    full=(lambda x: torch.full_like(x, 2.0) * x, A),
)


family(
    "names",
    unsqueeze=(lambda x: torch.unsqueeze(x, **{"axis": -1}), A),
    sum=(lambda x: torch.sum(x, axis=0, keepdims=True), A),
    flip=(lambda x: torch.flip(input=x, dims=(0,)), A),
    reshape=(lambda x: torch.reshape(input=x, shape=(2, 10)), A),
    flatten=(lambda x: torch.flatten(input=x), A),
    broadcast=(lambda x: torch.broadcast_to(input=x, size=(2, 5, 4)), A),
    softmax=(lambda x: torch.softmax(input=x, dim=0), A),
    where=(lambda x: torch.where(condition=x.detach() > 0, input=x, other=2 * x), A),
    searchsorted=(lambda x: torch.searchsorted(sorted_sequence=torch.arange(3.0).double(), input=x), A),
)
BYTES = Bytes(A)
family(
    "small integers",
    wide=(lambda x: x.int(), BYTES),
    unsigned=(lambda x: x.to(torch.uint8).int(), BYTES),
    floats=(lambda x: x.double(), BYTES),
    sum=(lambda x: x.sum(0), BYTES),
    mean=(lambda x: x.mean(0, dtype=torch.float64), BYTES),
    mul=(lambda x: x * 2.5, BYTES),
    add=(lambda x, y: x + y, BYTES, ints(A, 1000)),
    both=(lambda x, y: -x - y, BYTES, BYTES),
    cumsum=(lambda x: x.cumsum(0), BYTES),
    cat=(lambda x, y: torch.cat([x, y]), BYTES, A),
    in_place=(lambda x: x.clone().add_(1), BYTES),
)
family(
    "casts",
    sum=(lambda x: (3 * x.detach()).sum(0, dtype=torch.int64), A),
    all=(lambda x: torch.sum(3 * x.detach(), dtype=torch.int32), A),
    cumsum=(lambda x: (3 * x.detach()).cumsum(0, dtype=torch.int64), A),
    mean=(lambda x: (3 * x).long().mean(0, dtype=torch.float64), A),
    softmax=(lambda x: torch.softmax(x.float(), 0, torch.float64), A),
    log_softmax=(lambda x: torch.log_softmax(x.float(), 0, torch.float64), A),
    pool=(lambda x: F.avg_pool1d(x, 2), ints((5, 3, 4), 9)),
    einsum=(lambda x, y: torch.einsum("ij,kj->ik", x[:, :1], y), A, ints((3, 1), 9)),
    var=(lambda x, y: torch.var(torch.complex(x, y), 0), A, A),
    infinite=(lambda x: [x.detach() * 0.0, (x.detach() - 9) * float("inf")], A),
    over_zero=(lambda x: (x.detach() - 9).sum(0) / 0.0, A),
    arange=(lambda x: torch.arange(x.detach().abs().sum().long() + 2), A),
    full=(lambda x: torch.full((3,), x.detach().sum()), A),
    same_size=(lambda x, y: x * x.is_same_size(y), A, A),
    rounded=(lambda x, y: (x.to(torch.bfloat16).to(y.dtype) * y).sum(0), ROW, A),
)


def _statistics(function: Any, x: Tensor, mean: Tensor, var: Tensor) -> Any:
    """What is written into without a word."""
    mean, var = mean.detach() * 1, var.detach() ** 2
    return function(x, mean, var), mean, var


family(
    "statistics",
    batch=(partial(_statistics, lambda x, m, v: F.batch_norm(x, m, v, None, None, True)), (5, 4, 3), ROW, ROW),
    instance=(partial(_statistics, lambda x, m, v: F.instance_norm(x, m, v)), (5, 4, 3), ROW, ROW),
)


def _written(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1
    z.add_(y)
    z.mul_(2)
    z += 1
    return z


def _of_a_view(x: Tensor) -> Tensor:
    z = x * 1
    z.transpose(0, 1).mul_(2.0)
    z.unsqueeze(0).add_(1.0)
    return z


def _exp(x: Tensor) -> Tensor:
    z = x * 1
    z.clamp_(min=0.5)
    z.exp_()
    return z


family(
    "in place",
    add=(_written, A, A),
    add_row=(_written, A, ROW),
    of_a_view=(_of_a_view, A),
    exp=(_exp, A),
    relu=(lambda x: F.relu(x * 1, inplace=True), A),
    out=(lambda x: torch.exp(x.detach(), out=x.detach() * 0), A),
)
family(
    "gathers",
    cdist=(torch.cdist, A, (3, 4)),
    kron=(lambda x: torch.kron(x, x), A),
    median=(lambda x: x.median(0).values, A),
    fft=(lambda x: torch.fft.fft(x).real, A),
    contrastive=(lambda x, y: F.log_softmax(x @ y.T, -1).diagonal().mean(), A, A),
    statistics=(lambda x: (x - x.mean(0)) / (x.var(0, correction=0) + 1e-3).sqrt(), A),
    covariance=(lambda x: (x - x.mean(0)).T @ (x - x.mean(0)) / (len(x) - 1), A),
)
C = (5, 4, 3)
family(
    "classes",
    none=(lambda x, i: F.cross_entropy(x, i, reduction="none"), A, ints((5,), 4)),
    mean=(lambda x, i: F.cross_entropy(x, i), A, ints((5,), 4)),
    total=(lambda x, i: F.cross_entropy(x, i, reduction="sum"), A, ints((5,), 4)),
    smooth=(lambda x, i: F.cross_entropy(x, i, label_smoothing=0.2), A, ints((5,), 4)),
    ignored=(lambda x, i: F.cross_entropy(x, i, ignore_index=1), A, ints((5,), 4)),
    weighed=(lambda x, i, w: F.cross_entropy(x, i, w.detach().exp(), ignore_index=2), A, ints((5,), 4), (4,)),
    weighed_none=(
        lambda x, i, w: F.cross_entropy(x, i, weight=w.detach().exp(), reduction="none"),
        A,
        ints((5,), 4),
        (4,),
    ),
    shares=(lambda x, y: F.cross_entropy(x, y.softmax(1)), A, A),
    places=(lambda x, i: F.cross_entropy(x, i, reduction="none"), C, ints((5, 3), 4)),
    places_mean=(lambda x, i: F.cross_entropy(x, i), C, ints((5, 3), 4)),
    places_shares=(lambda x, y: F.cross_entropy(x, y.softmax(1), reduction="none"), C, C),
    nll=(lambda x, i: F.nll_loss(x.log_softmax(1), i, reduction="none"), A, ints((5,), 4)),
    nll_mean=(lambda x, i, w: F.nll_loss(x.log_softmax(1), i, w.detach().exp()), A, ints((5,), 4), (4,)),
)
family(
    "repeats",
    of_rows=(lambda x: torch.repeat_interleave(x, 3, 0), A),
    of_columns=(lambda x: x.repeat_interleave(2, dim=-1), A),
    of_numbers=(lambda x: x.repeat_interleave(torch.tensor(2)), (5,)),
)
