"""The errors: one family, each also the builtin error that a reader would expect."""

from __future__ import annotations

import inspect
import pickle

import pytest

import unidist
from unidist import errors


def test_all_errors_are_unidist_errors_and_public() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert len(kinds) == 12
    for kind in kinds:
        assert issubclass(kind, errors.UnidistError)
        assert getattr(unidist, kind.__name__) is kind
        assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.BackendNotAvailableError, ImportError),
        (errors.BackendMismatchError, RuntimeError),
        (errors.MeshError, ValueError),
        (errors.LayoutError, ValueError),
        (errors.CapabilityError, NotImplementedError),
        (errors.DesyncError, RuntimeError),
        (errors.ProcessLostError, RuntimeError),
        (errors.CheckpointError, OSError),
        (errors.DrawingError, ValueError),
        (errors.RankFailedError, RuntimeError),
    ],
)
def test_an_error_is_caught_as_its_builtin_kind(kind: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match=r"^what happened$"):
        raise kind("what happened")


def test_a_desync_names_ranks_collective_and_variable() -> None:
    error = errors.DesyncError("parted", ranks=(1, 3), collective="all_reduce", variable="dense/kernel")
    assert (error.ranks, error.collective, error.variable) == ((1, 3), "all_reduce", "dense/kernel")
    bare = errors.DesyncError("parted")
    assert (bare.ranks, bare.collective, bare.variable) == ((), None, None)
    assert str(bare) == "parted"


def test_a_checkpoints_error_names_file_and_tensor_also_from_another_process() -> None:
    error = errors.CheckpointError("damaged", file="model.safetensors", tensor="dense/kernel")
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert (str(one), one.file, one.tensor) == ("damaged", "model.safetensors", "dense/kernel")
    assert (errors.CheckpointError("x").file, errors.CheckpointError("x").tensor) == ("", "")
