"""The `unidist` command: arguments and printing only. Imports what a command needs when it is called."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unidist import __version__
from unidist.errors import UnidistError
from unidist.tables import table

if TYPE_CHECKING:
    from unidist.backends.registry import BackendInfo

Handler = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. `handle` does the work and gives the exit code, `add` declares the arguments.

    One without `add` parses its arguments by itself: options too reach it as they are.
    """

    name: str
    summary: str
    handle: Handler
    add: Callable[[argparse.ArgumentParser], None] | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's entry point. Exit code 2: a typed error, reported in one paragraph."""
    what = "Trains Keras 3 models on several devices, with the losses and weights of one."
    parser = argparse.ArgumentParser(prog="unidist", description=what)
    parser.add_argument("--version", action="version", version=f"unidist {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands():
        sub = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.summary,
            # No argument begins with NUL: to argparse all of them are positional then, also "--help".
            prefix_chars="-" if command.add else "\0",
            add_help=command.add is not None,
        )
        if command.add:
            command.add(sub)
        else:
            sub.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
        sub.set_defaults(handle=command.handle, parser=sub)
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        parser.print_help(sys.stderr)
        return 2
    names = [command.name for command in commands()]
    if given[0] not in names and (alike := difflib.get_close_matches(given[0], names, 1)):
        parser.error(f"no command {given[0]!r}; is it {alike[0]!r}?")
    parsed, strange = parser.parse_known_args(given)
    if strange:
        _refuse(parsed.parser, strange)
    handle: Handler = parsed.handle
    try:
        return handle(parsed)
    except UnidistError as error:
        print(f"unidist: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _refuse(parser: argparse.ArgumentParser, strange: list[str]) -> None:
    options = [option for action in parser._actions for option in action.option_strings]
    alike = [found for one in strange for found in difflib.get_close_matches(one, options, 1)]
    parser.error(f"unrecognized arguments: {' '.join(strange)}" + (f"; is it {', '.join(alike)}?" if alike else ""))


def commands() -> list[Command]:
    """All subcommands, in the order in which help shows them."""
    return [
        Command(
            "backends", "What is installed, what it can do, and how to get what is missing", _backends, lambda _: None
        ),
        Command("doctor", "Check this machine, and with -n each link of a world of processes", _doctor, _add_doctor),
        Command("checkpoint", "List, show, verify, diff, export checkpoints", _checkpoint),
        Command("demo", "Train on virtual devices and compare with one device", _main_of("unidist.demo")),
        Command("parity", "Compare a training on each backend with one device", _main_of("unidist.parity")),
        Command(
            "plan", "Show a model's layouts on a mesh, and what they cost", _main_of("unidist.keras.planning.command")
        ),
        Command("run", "Start a script in several processes", _run, _add_run),
    ]


def _main_of(module: str) -> Handler:
    return lambda parsed: int(importlib.import_module(module).main(parsed.arguments))


def _checkpoint(parsed: argparse.Namespace) -> int:
    from unidist.checkpoint import command

    def by_keras(*given: object) -> None:
        importlib.import_module("unidist.keras.checkpoint.exporting").export(*given)

    return command.main(parsed.arguments, by_keras)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "unidist run [options] (SCRIPT | -m MODULE) [arguments of the script]"
    _add_world(parser)
    parser.add_argument(
        "-n", "--processes", default="1", metavar="N", help="processes on this node, or gpu: one for each (default: 1)"
    )
    parser.add_argument("--grace", type=float, default=5.0, help="seconds from asking to end to killing (default: 5)")
    parser.add_argument(
        "--timeout", type=float, help="seconds that processes wait for each other (default: UNIDIST_TIMEOUT, else 300)"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="start all again after a failure, N times (default: 0)"
    )
    parser.add_argument(
        "--min-processes", type=int, metavar="N", help="go on with so many of all processes where others are lost"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="keep what each rank prints, and its record, in this folder")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", metavar="SCRIPT", help="the script, or with -m the module")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments, passed on as they are")
    # Else argparse asks for them where the script is missing.
    rest.required = False


def _add_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        help="torch, jax, tensorflow, horovod or a registered one (default: UNIDIST_BACKEND, else that of Keras: "
        "KERAS_BACKEND, keras.json, or the first installed of torch, jax, tensorflow)",
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes, each with as many processes (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, help="this node's number, from 0 (default: 0)")
    parser.add_argument("--address", metavar="HOST:PORT", help="node 0's address; one node finds a free port by itself")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="N", help="JAX, TensorFlow: (virtual) devices of each process"
    )


def _backend(parsed: argparse.Namespace) -> str:
    from unidist.backends import registry

    return parsed.backend or registry.name_for_processes()


def _run(parsed: argparse.Namespace) -> int:
    from unidist import launch, log
    from unidist.launch.counting import processes_of

    program = ("-m", parsed.program) if parsed.module else (parsed.program,)
    request = launch.Request(
        backend=_backend(parsed),
        command=(*program, *parsed.arguments),
        processes=processes_of(parsed.processes),
        nodes=parsed.nodes,
        node_rank=parsed.node_rank,
        address=parsed.address,
        devices_per_process=parsed.devices_per_process,
        grace=parsed.grace,
        timeout=parsed.timeout,
        max_restarts=parsed.max_restarts,
        min_processes=parsed.min_processes,
        log_dir=parsed.log_dir,
    )
    log.start(lambda: None)
    code = launch.run(request)
    if code == 128 + signal.SIGPIPE:
        _forget_output()
    return code


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--processes", type=int, help="start as many on this node and try each link (default: start none)"
    )
    _add_world(parser)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that an exchange may take (default: 60)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--post-mortem", metavar="DIR", help="tell what a run was at, by the records in its --log-dir; starts nothing"
    )


def _doctor(parsed: argparse.Namespace) -> int:
    from unidist import doctor
    from unidist.doctor import post_mortem

    if parsed.post_mortem is not None:
        return post_mortem.main(parsed.post_mortem, as_json=parsed.json)
    request = None
    if parsed.processes is not None or parsed.nodes > 1:
        request = doctor.request(
            _backend(parsed),
            1 if parsed.processes is None else parsed.processes,
            nodes=parsed.nodes,
            node_rank=parsed.node_rank,
            address=parsed.address,
            devices_per_process=parsed.devices_per_process,
            timeout=parsed.timeout,
        )
    found = doctor.examine(request, say=lambda text: print(f"unidist doctor: {text}...", file=sys.stderr))
    print(doctor.as_json(found) if parsed.json else doctor.as_text(found))
    return 1 if found.failed else 0


def _forget_output() -> None:
    """Nobody reads: what is still in the buffers must not fail a second time, at Python's exit."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nothing, stream.fileno())
    os.close(nothing)


def _backends(parsed: argparse.Namespace) -> int:
    from unidist.backends import registry

    infos = registry.backends().values()
    rows = [
        ("backend", "installed", "version", "view", "can do"),
        *(
            (info.name, "yes" if info.installed else "no", info.version or "-", info.view or "-", _abilities(info))
            for info in infos
        ),
    ]
    print(table(rows))
    missing = [info for info in infos if not info.installed]
    if missing:
        print()
    for info in missing:
        print(f"{info.name}: {info.hint}")
    return 0


def _abilities(info: BackendInfo) -> str:
    from unidist.algebra.layout import REDUCE_OPS
    from unidist.backends.protocol import ALL_DTYPES

    can = info.capabilities
    if can is None:
        return "-"
    said = ["several processes" if can.processes else "one process", f"uneven shards {can.uneven}"]
    said.append("differentiable" if can.differentiable else "not differentiable")
    if gaps := sorted(ALL_DTYPES - can.dtypes):
        said.append(f"no {', '.join(gaps)}")
    if gaps := sorted(set(REDUCE_OPS) - can.reduce_ops):
        said.append(f"no {', '.join(gaps)} reduction")
    return ", ".join(said)


if __name__ == "__main__":
    sys.exit(main())
