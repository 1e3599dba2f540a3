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
    program = _prepared(lambda x: [x * torch.rand(()) + torch.rand(())], torch.ones(4))
    drawn = [node for node in program.graph.nodes if "rand" in str(node.target)]
    assert [len(node.users) for node in drawn] == [1, 1]


def test_a_write_to_what_is_no_input_is_refused() -> None:
    kept = torch.zeros(3)
    with pytest.raises(CapabilityError, match="writes to a tensor that no variable"):
        _prepared(lambda x: kept.view(3).add_(x), torch.ones(3))


def _fetching(one: Tensor, other: Tensor) -> list[Tensor]:
    """As stored shards: what is fetched is written where a layer reads it, and once more for backward."""
    held = torch.empty((2, 3))
    turned = held.detach().t()
    held.detach().copy_(one * 2)
    first = other @ turned
    held.detach().copy_(one * 3)
    return [first, other @ turned, held.detach() + 1]


def test_what_is_copied_whole_is_read_where_it_was() -> None:
    names = _names(_same(_fetching, torch.arange(6.0).view(2, 3), torch.ones(2, 3)))
    assert not any("copy_" in name or "empty" in name for name in names)


def _in_parts(one: Tensor) -> list[Tensor]:
    held = torch.empty((2, 3))
    held[0].copy_(one)
    held[1].copy_(one * 2)
    return [held * 1]


def _turned(one: Tensor) -> list[Tensor]:
    held = torch.empty((3, 3))
    held.t().copy_(one.expand(3, 3))
    return [held * 1]


def _of_other_strides(one: Tensor) -> list[Tensor]:
    """A view of what is written to is none of what is copied there."""
    held = torch.empty((3, 2, 2))
    held.copy_(torch.stack([one, one + 1, one + 2, one + 3]).t().view(3, 2, 2))
    return [held.view(6, 2) * 1]


@pytest.mark.parametrize("step", [_in_parts, _turned, _of_other_strides])
def test_what_is_copied_in_another_way_stays(step: Callable[[Tensor], list[Tensor]]) -> None:
    assert any("copy_" in name for name in _names(_same(step, torch.arange(3.0))))


def test_a_program_gives_what_a_gather_reads_that_goes_on_behind_it() -> None:
    """A copy, where it is an input: given as it is, the compiler would take the variable for it."""
    gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor
    program = _prepared(
        lambda x: [gather(x, 2, "0"), wait(gather(x + 1, 2, "0")), gather(x + 2, 2, "0")], torch.ones(4)
    )
    (given,) = (node.args[0] for node in program.graph.nodes if node.op == "output")
    read = [given[0].args[0], given[2].args[0]]
    assert given[3:] == read
    assert [node.target for node in read] == [torch.ops.aten.clone.default, torch.ops.aten.add.Tensor]
