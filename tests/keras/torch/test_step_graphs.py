"""The passes over a step's graph before it is compiled: they change how it computes, and not what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from unidist.errors import CapabilityError
from unidist.keras.torch.step.graphs import prepared

Tensor = torch.Tensor


def _prepared(step: Callable[..., object], *given: Tensor) -> torch.fx.GraphModule:
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*(x.clone() for x in given))
    return prepared(traced)


def _names(program: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def _same(step: Callable[..., object], *given: Tensor) -> torch.fx.GraphModule:
    program = _prepared(step, *given)
    mine, others = [x.clone() for x in given], [x.clone() for x in given]
    torch.testing.assert_close(program(*mine), step(*others))
    torch.testing.assert_close(mine, others)
    return program


def _decayed(rate: Tensor, count: Tensor, *values: Tensor) -> list[Tensor]:
    return [value * (1 - torch.pow(torch.tensor(0.9), count + 1)) * rate for value in values]


def test_equal_numbers_are_computed_once_and_powers_outside_of_loops() -> None:
    program = _same(_decayed, torch.tensor(0.1), torch.tensor(3.0), torch.ones(4), torch.ones(2, 3))
    names = _names(program)
    assert sum("pow" in name for name in names) == 1
    assert sum("unidist.number" in name for name in names) == 1


def _stepping(rate: Tensor, count: Tensor, *values: Tensor) -> list[Tensor]:
    """As an optimizer, which reads its variables anew for each weight."""
    found = [value * torch.pow(torch.tensor(0.9), count.detach() + 1) * rate.detach() for value in values]
    count.detach().add_(1)
    return found


def test_what_is_read_before_it_is_written_is_one_number() -> None:
    program = _same(_stepping, torch.tensor(0.1), torch.tensor(3.0), torch.ones(4), torch.ones(2, 3))
    assert sum("pow" in name for name in _names(program)) == 1


def _counted(count: Tensor, value: Tensor) -> list[Tensor]:
    """As variables are written: by another view of their memory."""
    first = value * (count.detach() + 1)
    count.detach().add_(1)
    return [first, value * (count.detach() + 1)]


def test_a_number_that_is_written_in_between_is_another() -> None:
    _same(_counted, torch.tensor(3.0), torch.ones(4))


def _written(count: Tensor, value: Tensor) -> list[Tensor]:
    mine, other = count + 1, count + 1
    mine.mul_(2)
    return [value * mine, value * other]


def test_a_number_that_is_written_itself_stays_apart() -> None:
    _same(_written, torch.tensor(3.0), torch.ones(4))


def test_random_numbers_stay_apart() -> None:
    program = _prepared(lambda x: x * torch.rand(()) + torch.rand(()), torch.ones(4))
    drawn = [node for node in program.graph.nodes if "rand" in str(node.target)]
    assert [len(node.users) for node in drawn] == [1, 1]


def test_a_write_to_what_is_no_input_is_refused() -> None:
    kept = torch.zeros(3)
    with pytest.raises(CapabilityError, match="writes to a tensor that no variable"):
        _prepared(lambda x: kept.view(3).add_(x), torch.ones(3))
