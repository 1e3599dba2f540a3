#!/usr/bin/env python3
"""The first hour of a stranger, with whatever pip resolves today: `python3 ci/fresh.py`.

In a copy of the checkout, with no constraints of ours: README's first command, word for word, up to the end of
`unidist demo`, and README's programs; the same in a second environment, with JAX in torch's place. Then the other
frameworks as their extras ask for them, and the tests of ci/of_keras.txt on all of it. What passed is written into
ci/fresh.toml. Commit that file.

The copy with its environments (9 GB with CUDA's packages, some minutes) is kept under ~/.cache/unidist-ci, by what pip
has resolved.

    python3 ci/fresh.py             always
    python3 ci/fresh.py --if-due    as `.ci/run` does: only if no entry of ci/fresh.toml is of the versions that pip
                                    resolves now and of the inputs as they are: pyproject.toml, ci/constraints.txt,
                                    README's commands, what unidist replaces in the frameworks
    python3 ci/fresh.py --versions  only what pip resolves

Horovod is left out: it is built from its source for each version (ci/install_horovod.sh).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ci.test import EXTRAS, KEPT_DAYS, OF_KERAS, say  # noqa: E402 - found by the line above

RECORD = ROOT / "ci" / "fresh.toml"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unidist-ci"
FRAMEWORKS = ("keras", "torch", "jax", "tensorflow", "keras-hub", "numpy")
OTHERS = ("tensorboard", "keras-hub")
HEADING = "# Written by ci/fresh.py: the newest sets of versions with which a stranger's first hour went well.\n"
KEPT = 4


def main(arguments: list[str]) -> int:
    versions = resolved()
    say(", ".join(f"{name} {version}" for name, version in versions.items()))
    if arguments == ["--versions"]:
        return 0
    entry = {"python": platform.python_version(), "inputs": inputs(), **versions}
    if arguments == ["--if-due"] and any(is_same(entry, green) for green in greens()):
        say("fresh environment: these versions and inputs are green in ci/fresh.toml")
        return 0
    if code := first_hour(versions):
        return code
    write(entry)
    say(f"wrote {RECORD.relative_to(ROOT)}: commit it")
    return 0


def resolved() -> dict[str, str]:
    """What pip takes today for what the package and its extras name. Metadata alone is read."""
    wanted = requirements()
    report = pip().parent.parent / "report.json"
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report))
    subprocess.run((pip(), "-m", "pip", "install", *options, *wanted), env=environment(), check=True, timeout=600)
    found = {
        one["metadata"]["name"].lower(): one["metadata"]["version"] for one in json.loads(report.read_text())["install"]
    }
    return {name: found[name] for name in FRAMEWORKS}


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(one for extra in ("torch", "jax", "tensorflow", "demo") for one in optional[extra]),
    ]
    return [*dict.fromkeys(asked), "keras-hub"]


def pip() -> Path:
    """The Python of a small environment whose pip reads metadata without the packages (PEP 658)."""
    home = CACHE / "pip"
    if not (home / "complete").exists():
        venv.create(home, clear=True, with_pip=True)
        install = ("-m", "pip", "install", "--quiet", "--upgrade", "pip")
        subprocess.run((home / "bin" / "python", *install), env=environment(), check=True, timeout=600)
        (home / "complete").touch()
    return home / "bin" / "python"


def environment() -> dict[str, str]:
    """What a stranger has: no settings of Python, Keras or this package, no constraints of the checkout."""
    ours = ("KERAS", "UNIDIST", "PYTHON", "VIRTUAL_ENV", "TESTS")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def inputs() -> str:
    """A digest of what a stranger's first hour hangs on, beside the versions."""
    hooks = [
        line
        for path in sorted((ROOT / "unidist" / "keras").rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\bHook\(|\bown\(", line)
    ]
    texts = [
        (ROOT / name).read_text()
        for name in ("pyproject.toml", "ci/constraints.txt", "unidist/keras/patching/compat.py")
    ]
    return hashlib.sha256("\n".join([*texts, *commands(), *hooks]).encode()).hexdigest()[:16]


def commands() -> list[str]:
    """README's commands in the order in which they stand."""
    return re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def greens() -> list[Mapping[str, str]]:
    found: list[Mapping[str, str]] = tomllib.loads(RECORD.read_text())["green"] if RECORD.exists() else []
    return found


def is_same(entry: Mapping[str, str], green: Mapping[str, str]) -> bool:
    minor = entry["python"].rpartition(".")[0]
    others = ("inputs", *FRAMEWORKS)
    return green["python"].startswith(f"{minor}.") and all(entry[name] == green.get(name) for name in others)


def write(entry: Mapping[str, str]) -> None:
    """The newest entry first; those of the same versions are replaced."""
    versions = {name: entry[name] for name in FRAMEWORKS}
    others = [one for one in greens() if {name: one.get(name) for name in FRAMEWORKS} != versions]
    kept = [{"date": time.strftime("%Y-%m-%d"), **entry}, *others][:KEPT]
    tables = ["".join(f'{name} = "{value}"\n' for name, value in one.items()) for one in kept]
    RECORD.write_text(HEADING + "".join(f"\n[[green]]\n{table}" for table in tables))


def first_hour(versions: Mapping[str, str]) -> int:
    key = hashlib.sha256(json.dumps([sys.version, versions]).encode()).hexdigest()[:12]
    checkout = CACHE / f"fresh-{key}"
    copy(checkout)
    installing = commands()[0].strip()
    for command in (installing, installing.replace(".venv", ".venv-jax").replace("[torch,", "[jax,")):
        python = f"{command.split()[3]}/bin/python"
        if code := run(command, checkout) or run_programs(python, checkout):
            return code
    extras = ",".join(dict.fromkeys((*EXTRAS, "tensorflow")))
    others = " ".join(OTHERS)
    if code := run(f'.venv/bin/pip install --quiet ".[{extras}]" {others}', checkout):
        return code
    (checkout / "complete").touch()
    forget_unused()
    return run(f'.venv/bin/python -m pytest -q -n 2 -k "not horovod" {OF_KERAS}', checkout)


def run_programs(python: str, checkout: Path) -> int:
    """Runs README's programs as written."""
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    for name, program in blocks:
        (checkout / name).write_text(program)
        if code := run(f"{python} {name}", checkout):
            return code
    return 0


def copy(checkout: Path) -> None:
    """Lays there what a clone would hold if the working tree were committed. Earlier environments stay."""
    checkout.mkdir(parents=True, exist_ok=True)
    for old in checkout.iterdir():
        if old.is_dir() and not old.name.startswith(".venv"):
            shutil.rmtree(old)
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)


def forget_unused() -> None:
    for done in CACHE.glob("fresh-*/complete"):
        if time.time() - done.stat().st_mtime > KEPT_DAYS * 86400:
            shutil.rmtree(done.parent)


def run(command: str, folder: Path) -> int:
    say(command)
    began = time.monotonic()
    code = subprocess.run(("bash", "-c", command), cwd=folder, env=environment()).returncode
    say(f"ended with {code} after {time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
