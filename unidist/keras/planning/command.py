"""`unidist plan`: a model's plan from the command line, with no device and no values."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unidist import log
from unidist.algebra import Mesh
from unidist.algebra.mesh import parse_mesh
from unidist.backends import on_keras
from unidist.drawing.page import report
from unidist.errors import ArgumentError, DrawingError, LayoutError, UnidistError
from unidist.strategies.zero import STAGES


def main(arguments: Sequence[str]) -> int:
    """Prints the plan of FILE.py:FUNCTION's model. Exit code 0."""
    options = _parse(arguments)
    page = _page(options.html)
    os.environ["KERAS_BACKEND"] = on_keras.choice().name
    mesh = Mesh(parse_mesh(options.mesh))
    with log.while_long(f"importing Keras on {os.environ['KERAS_BACKEND']}"):
        function = load(options.target)
        from unidist.keras.planning.plan import plan

    model = build(function)
    made = plan(
        model,
        mesh,
        _layout_map(options.layout_map),
        data_axis=_axes(options.data_axis),
        model_axis=_axes(options.model_axis),
        zero=options.zero,
        batch=options.batch,
        sequence=options.sequence,
        sequence_parallel=options.sequence_parallel,
        context_axis=_axes(options.context_axis),
        expert_axis=_axes(options.expert_axis),
        shard_axis=_axes(options.shard_axis),
        offload=options.offload,
        experts=options.experts,
        remat=options.remat,
    )
    print(made.layout_map.to_json() if options.json else made.show(options.width))
    if page is not None:
        page.write_text(report(made), encoding="utf-8")
        print(f"unidist plan: wrote {page}", file=sys.stderr)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="unidist plan",
        description="How each variable of a model would be laid out, what a device holds, what a training step sends. "
        "No device is needed, and the model's values are not made.",
    )
    parser.add_argument("target", metavar="FILE.py:FUNCTION", help="a function without arguments that returns a model")
    parser.add_argument("--mesh", required=True, help="axes and sizes, as data=2,model=4")
    parser.add_argument("--layout-map", metavar="FILE.json", help="rules that --json wrote, instead of found ones")
    parser.add_argument("--data-axis", metavar="AXES", help="the axes that cut the batch, as data or replica,data")
    parser.add_argument("--model-axis", metavar="AXES", help="the axes that cut variables")
    parser.add_argument("--context-axis", metavar="AXES", help="the axes that cut sequences (default: context)")
    parser.add_argument("--expert-axis", metavar="AXES", help="the axes that cut stacks of kernels (default: expert)")
    parser.add_argument("--zero", type=int, default=0, choices=STAGES, help="stage of ZeRO (default: 0)")
    parser.add_argument("--shard-axis", metavar="AXES", help="the data axes that ZeRO cuts over (default: all)")
    parser.add_argument("--offload", default="none", choices=("none", "states"), help="what rests in host memory")
    parser.add_argument("--experts", default="all", choices=("all", "dispatch"), help="which rows experts compute")
    parser.add_argument("--remat", default="none", choices=("none", "block", "attention"), help="what is recomputed")
    parser.add_argument("--batch", type=int, help="rows of a global batch (default: 8 for each data shard)")
    parser.add_argument("--sequence", type=int, default=128, help="length of open dims (default: 128)")
    parser.add_argument("--sequence-parallel", action="store_true", help="predict a step with sequence parallelism")
    parser.add_argument("--width", type=int, default=160, help="columns of the tables (default: 160)")
    parser.add_argument("--html", metavar="FILE.html", help="write a report with pictures too, as one file")
    parser.add_argument("--json", action="store_true", help="print the layout map alone, to edit and to give back")
    return parser.parse_args(list(arguments))


def _page(file: str | None) -> Path | None:
    if file is None:
        return None
    path = Path(file)
    if path.suffix.lower() not in (".html", ".htm") or not path.parent.is_dir():
        raise DrawingError(f"--html {file!r}: name a file that ends in .html, in a folder that is there")
    return path


def _axes(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(text.split(","))


def load(target: str) -> Callable[[], Any]:
    """Returns the function of FILE.py:function.

    The file is run, as by an import. Raises ArgumentError where there is none.
    """
    file, _, function = target.rpartition(":")
    path = Path(file)
    if not file or not function:
        raise ArgumentError(f"{target!r}: write FILE.py:function, as {file or function}:model")
    if not path.is_file():
        raise ArgumentError(f"{target!r}: no file {file!r} in {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{target!r}: {file!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    # What the file's script would import from beside it.
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ArgumentError(f"{target!r}: {file} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def build(function: Callable[[], Any]) -> Any:
    """The function's model, with variables that have no values.

    Raises:
        LayoutError: it fails, or returns no model.
    """
    import keras

    from unidist.keras.planning.valueless import leave_without, without_values

    try:
        with without_values():
            model = function()
    except UnidistError:
        raise
    except Exception as error:
        # Whatever the function may raise: the user must learn under which conditions it ran.
        raise LayoutError(
            f"{function.__name__} failed: {type(error).__name__}: {error}. It is called without arguments, and the "
            "model's variables get no values (keras.StatelessScope), so it can neither load nor call with data"
        ) from error
    if not isinstance(model, keras.Model):
        raise LayoutError(f"{function.__name__} returned {type(model).__name__!r}, not a keras.Model")
    leave_without(model)
    return model


def _layout_map(file: str | None) -> Any:
    from unidist.planner.layout_map import LayoutMap

    if file is None:
        return "auto"
    path = Path(file)
    if not path.is_file():
        raise ArgumentError(f"--layout-map {file!r}: no such file in {Path.cwd()}")
    return LayoutMap.from_json(path.read_text())
