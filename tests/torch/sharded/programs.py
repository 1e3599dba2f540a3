"""What processes run: the same program on carriers in each, compared with plain tensors."""

from __future__ import annotations

from typing import Any

import torch

import unidist
from unidist.algebra import Mesh
from unidist.backends.torch.sharded import Space, distribute, space
from unidist.propagation.layouts import chunked


def trained() -> dict[str, Any]:
    """A net with columns and rows cut over one axis and uneven rows of a batch over the other; gradients too."""
    backend: Any = unidist.backend()
    here = space(backend, Mesh({"data": 1, "model": 2}))
    return {"columns": _net(here), "rows": _rows(space(backend, Mesh({"data": 2}))), "gathers": dict(here.gathers)}


def _values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _net(here: Space) -> float:
    x, up, down = _values(3, 4, seed=0), _values(6, 4, seed=1), _values(2, 6, seed=2)

    def net(x: Any, up: Any, down: Any) -> Any:
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, up))
        return torch.softmax(torch.nn.functional.linear(hidden, down), -1).square().sum()

    cut = [
        distribute(up, here.spec(("R", chunked(0, 6, 2)), up.shape)),
        distribute(down, here.spec(("R", chunked(1, 6, 2)), down.shape)),
    ]
    for w in cut:
        w.requires_grad_()
    net(x, *cut).backward()
    plain = [up.clone().requires_grad_(), down.clone().requires_grad_()]
    net(x, *plain).backward()
    return max(float((w.grad.whole() - p.grad).abs().max()) for w, p in zip(cut, plain, strict=True))


def _rows(here: Space) -> float:
    x, w = _values(5, 4, seed=3), _values(4, 3, seed=4)

    def loss(x: Any, w: Any) -> Any:
        y = x @ w
        y = (y - y.mean(0)) / (y.var(0) + 1e-3).sqrt() + torch.amax(y, 0)
        return torch.nn.functional.log_softmax(y @ y.T, -1).diagonal().mean()

    mine, plain = w.clone().requires_grad_(), w.clone().requires_grad_()
    loss(distribute(x, here.spec((chunked(0, 5, 2),), x.shape)), mine).backward()
    loss(x, plain).backward()
    total = here.all_reduce(mine.grad, (0,))  # type: ignore[arg-type]
    return float((total - plain.grad).abs().max())
