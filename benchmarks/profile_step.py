"""Where the time of one warm training step goes, on torch with two gloo processes of one thread each. Run by hand:

    unidist run -n 2 benchmarks/profile_step.py [--of dp|tp|bert|zero1|zero3] [--by-hand] [--steps 40] [--top 15]

A step is timed as it is, then under cProfile, then under torch.profiler. The table is cProfile's: the own time of each
function goes to the room that its code belongs to, and that of C++ to what is done there.

    Keras            Python of Keras
    unidist          Python of unidist
    torch            Python of torch
    Python elsewhere the rest of Python: the standard library, NumPy, builtins
    torch's C++      operations with their dispatch, and all of autograd's backward that is not Python
    collectives      calls of process groups: starting them, and waiting for them (what is exposed)

cProfile makes calls slower: the cost of an empty call and of an empty builtin under it is measured here and taken off
each row by its number of calls. What is left is printed beside the time of the step as it is. torch.profiler shows how
much of the C++ is in the operations themselves (it has a cost too, which is printed).
--by-hand: the same of the program that the step is compared with, where it has one.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import unidist

unidist.use("torch")

import keras  # noqa: E402
import torch  # noqa: E402
from torch.profiler import ProfilerActivity  # noqa: E402

Step = Callable[[], object]
# (file, line, name), as pstats has it
Function = tuple[str, int, str]

ROOMS = {
    "unidist": str(Path(unidist.__file__).parent),
    "Keras": str(Path(keras.__file__).parent),
    "torch": str(Path(torch.__file__).parent),
}
STARTING, WAITING = "collectives: starting", "collectives: waiting"
NATIVE, ELSEWHERE = "torch's C++", "Python elsewhere"
ROWS = ("Keras", "unidist", "torch", ELSEWHERE, NATIVE, STARTING, WAITING)
EMPTY_CALLS = 200_000


def program(of: str, by_hand: bool) -> Step:
    """A step of one of the other programs here, which has run once."""
    if of in ("dp", "tp"):
        module = importlib.import_module("keras_torch")
        if by_hand:
            return module.torch_under_ddp() if of == "dp" else module.torch_tensor_parallel()
        rows = module.ROWS * unidist.process_count()
        return module.ours(unidist.DataParallel(), rows) if of == "dp" else module.tensor_parallel()
    if of == "bert":
        module = importlib.import_module("keras_tp_bert")
        return module.by_hand() if by_hand else module.ours("auto")
    module = importlib.import_module("zero_torch")
    if by_hand:
        return module.redundancy_optimizer() if of == "zero1" else module.fully_sharded()
    return module.ours(int(of[-1]))[0]


def repeated(step: Step, count: int) -> list[float]:
    """Seconds of each."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    return found


# Python ---------------------------------------------------------------------------------------------------------------


def room_of(function: Function) -> str:
    path, _, name = function
    if path == "~":  # not of a file of Python
        if "_distributed_c10d" in name or "ProcessGroup" in name:
            return WAITING if "wait" in name else STARTING
        return NATIVE if "torch" in name or "Tensor" in name else ELSEWHERE
    return next((room for room, folder in ROOMS.items() if path.startswith(folder)), ELSEWHERE)


def cost_of_a_call() -> tuple[float, float]:
    """Seconds that cProfile adds to a call of a function, and of a builtin."""

    def empty() -> None:
        pass

    def seconds(call: Callable[[], object]) -> float:
        times = range(EMPTY_CALLS)
        began = time.perf_counter()
        for _ in times:
            call()
        return time.perf_counter() - began

    costs = []
    for call in (empty, [].clear):
        plain = min(seconds(call) for _ in range(3))
        profile = cProfile.Profile()
        profile.enable()
        profiled = min(seconds(call) for _ in range(3))
        profile.disable()
        costs.append(max(0.0, profiled - plain) / EMPTY_CALLS)
    return costs[0], costs[1]


def functions_of(step: Step, count: int) -> tuple[float, dict[Function, tuple[int, float]]]:
    """Seconds of all steps under cProfile; of each function its calls and the seconds of its own."""
    profile = cProfile.Profile()
    profile.enable()
    began = time.perf_counter()
    for _ in range(count):
        step()
    taken = time.perf_counter() - began
    profile.disable()
    stats: Any = pstats.Stats(profile)
    return taken, {function: (calls, own) for function, (_, calls, own, _, _) in stats.stats.items()}


def print_rooms(functions: dict[Function, tuple[int, float]], steps: int, usual: float) -> None:
    of_python, of_builtin = cost_of_a_call()
    calls: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for function, (count, own) in functions.items():
        room = room_of(function)
        calls[room] += count
        times[room] += own - count * (of_builtin if function[0] == "~" else of_python)
    total = sum(times.values())
    print(f"  {'':26}{'calls':>9}{'ms':>9}{'':>4}share")
    for room in ROWS:
        print(f"  {room:26}{calls[room] / steps:9.0f}{times[room] / steps * 1e3:9.3f}{times[room] / total:>9.1%}")
    print(f"  {'together':26}{sum(calls.values()) / steps:9.0f}{total / steps * 1e3:9.3f}")
    print(
        f"  (cProfile adds {of_python * 1e9:.0f} ns to a call and {of_builtin * 1e9:.0f} ns to one of a builtin, taken "
        f"off here; the step as it is takes {usual * 1e3:.3f} ms)"
    )


def print_top(functions: dict[Function, tuple[int, float]], steps: int, count: int) -> None:
    print(f"  the largest, with cProfile's own time{'':12}{'calls':>9}{'us':>9}")
    largest = sorted(functions.items(), key=lambda one: -one[1][1])
    python = [one for one in largest if room_of(one[0]) in ("unidist", "Keras", "torch", ELSEWHERE)]
    for function, (calls, own) in python[:count]:
        path, line, name = function
        where = name if path == "~" else f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"
        print(f"    {where:60.60}{calls / steps:6.0f}{own / steps * 1e6:9.1f}")


# C++ ------------------------------------------------------------------------------------------------------------------


def operations_of(step: Step, count: int) -> tuple[float, list[tuple[str, int, float]]]:
    """Seconds of all steps under torch.profiler; name, calls and own seconds of each operation."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as found:
        began = time.perf_counter()
        for _ in range(count):
            step()
        taken = time.perf_counter() - began
    averages: Any = found.key_averages()
    rows = [(one.key, one.count, one.self_cpu_time_total / 1e6) for one in averages]
    return taken, sorted(rows, key=lambda row: -row[2])


def print_operations(taken: float, rows: list[tuple[str, int, float]], steps: int, usual: float, count: int) -> None:
    kernels = sum(own for name, _, own in rows if name.startswith("aten::")) / steps * 1e3
    print(f"  torch.profiler: {kernels:.3f} ms in operations; under it a step took {taken / steps / usual:.2f} as long")
    for name, calls, own in rows[:count]:
        print(f"    {name:60.60}{calls / steps:6.0f}{own / steps * 1e6:9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=["dp", "tp", "bert", "zero1", "zero3"], default="dp")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--top", type=int, default=15, help="functions and operations that are named")
    options = parser.parse_args()
    torch.set_num_threads(1)
    step = program(options.of, options.by_hand)
    repeated(step, 5)
    unidist.barrier()
    usual = statistics.median(repeated(step, options.steps))
    unidist.barrier()
    taken, functions = functions_of(step, options.steps)
    unidist.barrier()
    under, operations = operations_of(step, options.steps)
    if unidist.process_index() == 0:
        print(f"{options.of}{', by hand' if options.by_hand else ''}: {usual * 1e3:.3f} ms a step")
        print(f"  (under cProfile {taken / options.steps * 1e3:.3f} ms)")
        print_rooms(functions, options.steps, usual)
        print_top(functions, options.steps, options.top)
        print_operations(under, operations, options.steps, usual, options.top)


if __name__ == "__main__":
    main()
