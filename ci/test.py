#!/usr/bin/env python3
"""All checks, on a machine with nothing but Python: `python3 ci/test.py`.

Makes a virtual environment outside the checkout, keyed on what it installs, with the versions of ci/constraints.txt.
Its Python is the system's, if that is of the same version and the one that runs this was not optimized when it was
built. Horovod is built from its source where no earlier run has left its wheel, which takes some minutes. Then, at
once, ruff, import-linter, mypy, a sample of Keras's own tests (ci/keras_own.py) and, where it is due, ci/fresh.py; then
every test in one pytest run of three workers: tests/unit, then the longest files first (ci/timing.py). Ends where a
check has failed, or at the twentieth failure of a test.

    python3 ci/test.py                      all of it
    python3 ci/test.py tests/unit -k mesh   only these tests, with pytest's own arguments
    python3 ci/test.py --changed [REF]      the tests that what differs from REF (HEAD) can break: ci/changed.py
    python3 ci/test.py --all ...            matrices that are sampled are run whole
    python3 ci/test.py --repeat N TEST ...  these tests N times over, one after the other; how often they failed
    python3 ci/test.py --measure            all of it, and what its time went to; writes ci/durations.json anew
    python3 ci/test.py --keras nightly ...  with another Keras, "nightly" or a version; without tests, ci/of_keras.txt
    python3 ci/test.py --gpu                only tests/gpu, on a machine with a GPU
    python3 ci/test.py --checks             only ruff, import-linter and mypy
    python3 ci/test.py --python             only the environment; prints its Python
    python3 ci/fresh.py                     a stranger's first hour, with whatever pip resolves today
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
FRESH = ROOT / "ci" / "fresh.py"
CHANGED = ROOT / "ci" / "changed.py"
HOROVOD = ROOT / "ci" / "install_horovod.sh"
EXTRAS = ("dev", "torch", "jax", "demo")
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("lint-imports",),
    ("mypy",),
)
# Two that compute, and one for what mostly waits (ci/timing.py): a test starts up to four processes of its own, and on
# two cores a third that computes makes all of them take more of a core's time. By files: the processes and references
# of one are shared.
WORKERS = 3
SPREAD = ("-p", "ci.timing", "-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder")
PYTEST = ("-m", "pytest", "--maxfail=20", "--durations=10", *SPREAD)
# What notices first where another Keras differs: names inside it, steps of every Keras backend, Keras's own strategies.
OF_KERAS = "@ci/of_keras.txt"
# Keras's own tests under strategies: a sample, or with --all each.
KERAS_OWN = ROOT / "ci" / "keras_own.py"
DURATIONS = ROOT / "ci" / "durations.json"
MEASURING = ROOT / "ci" / "measuring"
# Run by each Python of the environment when it starts (the module `site`). With CPython's own thresholds a fifth of the
# cores' time of a run goes into collecting garbage: frameworks are imported again and again, and leave much to look at.
COLLECTING = "import gc; gc.set_threshold(50_000, 10, 10)\n"
KEPT_DAYS = 30


def main(arguments: list[str]) -> int:
    turn_to_optimized_python()
    # A shell's background jobs ignore Ctrl-C, and so would the tests' programs, which tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    python = environment()
    if arguments == ["--python"]:
        print(python)
        return 0
    if not arguments or arguments in (["--checks"], ["--measure"], ["--all"]):
        fresh = [(sys.executable, str(FRESH), "--if-due")] if arguments in ([], ["--all"]) else []
        # What mypy read of torch and JAX is kept with the environment: from nothing it takes half a minute.
        kept = {"MYPY_CACHE_DIR": str(python.parents[1] / "mypy")}
        checks = [(str(python.parent / name), *words) for name, *words in CHECKS]
        own = [(str(python), str(KERAS_OWN))] if not arguments else []
        if code := run_together([*checks, *fresh, *own], env=kept):
            return code
    if arguments == ["--checks"]:
        return 0
    if arguments[:1] == ["--changed"]:
        found = subprocess.run(
            [sys.executable, CHANGED, *arguments[1:2]], stdout=subprocess.PIPE, text=True, check=True
        )
        arguments = found.stdout.splitlines()
    if arguments[:1] == ["--repeat"]:
        return repeat(python, int(arguments[1]), arguments[2:])
    if arguments == ["--measure"]:
        install_ip()
        return measure(python)
    if arguments[:1] == ["--gpu"]:
        # One after the other: they share the GPU.
        return run(python, *PYTEST, "-n", "0", "tests/gpu", *arguments[1:])
    if arguments[:1] == ["--keras"]:
        other = with_keras(python, arguments[1])
        return run(other, *PYTEST, *(arguments[2:] or [OF_KERAS]))
    install_ip()
    whole = {"TESTS_ALL": "1"} if "--all" in arguments else {}
    tests = [argument for argument in arguments if argument != "--all"]
    if whole and not tests and (code := run(python, KERAS_OWN, "--all")):
        return code
    with programs(python) as compiled:
        return run(python, *PYTEST, *(tests or ["tests"]), env={**whole, **compiled})


def install_ip() -> None:
    """iproute2's `ip`, with which tests make two hosts of one. Without it they say so, and are skipped."""
    if shutil.which("ip") is None and shutil.which("apt-get") is not None and os.geteuid() == 0:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "iproute2")


def repeat(python: Path, times: int, tests: list[str]) -> int:
    """Runs the tests again and again, to find one that fails now and then."""
    codes = [run(python, *PYTEST, "-n", "0", *tests) for _ in range(times)]
    failed = sum(code != 0 for code in codes)
    say(f"{failed} of {times} runs failed")
    return int(failed > 0)


def measure(python: Path) -> int:
    """All tests, with what each process says of its time; the order of the next runs follows."""
    with tempfile.TemporaryDirectory(prefix="unidist-measured-") as folder:
        told = Path(folder) / "times.json"
        paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(MEASURING)))}
        with programs(python) as compiled:
            code = run(python, *PYTEST, "tests", env={"TIMES": str(told), "MEASURED": folder, **paths, **compiled})
        if told.exists():
            DURATIONS.write_text(summary(json.loads(told.read_text()), Path(folder)))
            say(f"wrote {DURATIONS.relative_to(ROOT)}")
    return code


def summary(told: dict[str, Any], folder: Path) -> str:
    """What ci/durations.json holds: seconds by file, and of all seconds of the cores the share of each kind."""
    spent: dict[str, float] = {"imports": 0.0, "compiling": 0.0}
    for record in folder.glob("*.process"):
        for name, seconds in json.loads(record.read_text()).items():
            spent[name] += seconds
    cores = os.cpu_count() or 1
    used = sum(file["cpu"] for file in told["files"].values())
    shares = {name: seconds / (told["seconds"] * cores) for name, seconds in spent.items()}
    # A worker that waits for a world uses no core itself, but its tests do not go on.
    shares["starting worlds"] = told["starting"] / (told["seconds"] * WORKERS)
    shares["waiting"] = max(0.0, 1 - used / (told["seconds"] * cores))
    files = {name: {kind: round(s, 1) for kind, s in took.items()} for name, took in sorted(told["files"].items())}
    content = {
        "minutes": round(told["seconds"] / 60, 1),
        "cores": cores,
        "milliseconds of a loop of Python": {kind: round(ms, 1) for kind, ms in told["loop"].items()},
        "shares of all cores' time": {name: round(share, 3) for name, share in shares.items()},
        "files": files,
    }
    return json.dumps(content, indent=1) + "\n"


@contextlib.contextmanager
def programs(python: Path) -> Iterator[dict[str, str]]:
    """The variable of a folder of programs that XLA has compiled, beside those of earlier runs.

    They are kept with the environment, whose versions they depend on. Each run has a folder of its own: what a process
    that is killed leaves half written does not reach the next run.
    """
    kept = python.parent.parent / "programs"
    kept.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="programs-", dir=kept.parent) as folder:
        for one in kept.iterdir():
            if time.time() - one.stat().st_mtime > KEPT_DAYS * 86400:
                one.unlink()
            else:
                os.link(one, Path(folder) / one.name)
        yield {"JAX_COMPILATION_CACHE_DIR": folder}
        for one in Path(folder).glob("*-cache"):
            if not (kept / one.name).exists() and is_whole(one):
                with contextlib.suppress(FileExistsError):
                    os.link(one, kept / one.name)


def is_whole(program: Path) -> bool:
    """Whether a file that JAX has compressed with zlib was written to its end."""
    stream = zlib.decompressobj()
    try:
        stream.decompress(program.read_bytes())
    except zlib.error:
        return False
    return stream.eof


def turn_to_optimized_python() -> None:
    """Starts this program again in the system's Python, if this one was built without profile-guided optimization.

    So are pyenv's. Importing and tracing take a tenth longer in them.
    """
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    is_optimized = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    if is_optimized or os.path.realpath(sys._base_executable) == os.path.realpath(system) or not os.path.exists(system):  # type: ignore[attr-defined]
        return
    # What the environment needs of it: Horovod is built with its headers.
    able = "import ensurepip, os, sysconfig, venv; assert os.path.exists(sysconfig.get_path('include') + '/Python.h')"
    if subprocess.run((system, "-c", able), stderr=subprocess.DEVNULL).returncode == 0:
        say(f"{sys.executable} was not optimized when it was built: going on with {system}")
        os.execv(system, (system, *sys.argv))


def environment() -> Path:
    """The Python of the virtual environment, made where it is missing or was left half made."""
    wanted = requirements()
    content = "\n".join([sys.version, *wanted, CONSTRAINTS.read_text(), HOROVOD.read_text()])
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unidist-ci"
    base.mkdir(parents=True, exist_ok=True)
    home = base / hashlib.sha256(content.encode()).hexdigest()[:16]
    done = home / "complete"
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            say(f"making {home}")
            venv.create(home, clear=True, with_pip=True)
            pip = (home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            if code := run(*pip, "--constraint", CONSTRAINTS, *wanted) or run(HOROVOD, home / "bin" / "python"):
                sys.exit(code)
        done.touch()
        collect_less(home)
        forget_unused(base)
    return home / "bin" / "python"


def collect_less(home: Path) -> None:
    """Also in an environment that an earlier run has made."""
    (packages,) = home.glob("lib/*/site-packages")
    started = packages / "collecting.pth"
    if not started.exists() or started.read_text() != COLLECTING:
        started.write_text(COLLECTING)


def with_keras(python: Path, version: str) -> Path:
    """The Python of an environment that has another Keras and all else from the main one; a nightly is a week's."""
    if version == "nightly":
        return layered(python, ["keras-nightly"], time.strftime("%G-%V"))
    return layered(python, [f"keras=={version}"])


def layered(python: Path, wanted: list[str], age: str = "") -> Path:
    """The Python of an environment that has these packages, without what they need, and all else from the main one."""
    home = python.parents[1]
    other = home.with_name(hashlib.sha256("\n".join([home.name, *wanted, age]).encode()).hexdigest()[:16])
    with (home.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (other / "complete").exists():
            say(f"making {other}")
            venv.create(other, clear=True)
            (packages,), (behind,) = other.glob("lib/*/site-packages"), home.glob("lib/*/site-packages")
            # Read after the environment's own packages, so that these are found first.
            (packages / "main.pth").write_text(f"{behind}\n")
            install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", *wanted)
            if code := run(python, "-m", "pip", "--python", other / "bin" / "python", *install):
                sys.exit(code)
        (other / "complete").touch()
        collect_less(other)
    return other / "bin" / "python"


def requirements() -> list[str]:
    """What the package and the extras under test depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    # tensorflow-cpu: tests feed tf.data to models on torch and JAX, and Horovod moves its tensors.
    # tensorboard: Keras's callback writes for it. keras-hub: its models are trained under tensor parallelism.
    others = ("tensorflow-cpu", "tensorboard", "keras-hub")
    return [*project["dependencies"], *(one for extra in EXTRAS for one in optional[extra]), *others]


def forget_unused(base: Path) -> None:
    """Removes environments that no run has used for a while: each is some gigabytes."""
    for done in base.glob("*/complete"):
        if time.time() - done.stat().st_mtime > KEPT_DAYS * 86400:
            shutil.rmtree(done.parent)


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> int:
    """Runs a command in the checkout, with this checkout's package and without the caller's Python settings."""
    say(" ".join(str(part) for part in command))
    return subprocess.run(command, cwd=ROOT, env={**surroundings(Path(command[0]), ROOT), **(env or {})}).returncode


def run_together(commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> int:
    """Runs commands at once; shows what each said when it and all before it have ended."""
    running = []
    for command in commands:
        own = {**surroundings(Path(command[0]), ROOT), **env}
        running.append(
            subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    codes = []
    for command, process in zip(commands, running, strict=True):
        shown, _ = process.communicate()
        say(" ".join(command))
        print(shown, end="", flush=True)
        codes.append(process.returncode)
    return next((code for code in codes if code), 0)


def surroundings(program: Path, checkout: Path) -> dict[str, str]:
    """The environment of a program of the virtual environment, with a checkout's package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = os.pathsep.join((str(program.parent), os.environ.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "PYTHONPATH": str(checkout)}


def say(text: str) -> None:
    print(f"ci: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
