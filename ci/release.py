#!/usr/bin/env python3
"""A release, tried and not published: `python3 ci/release.py --dry-run`. Run by hand, before one.

1. The sdist is built of what git has committed, and the wheel of the sdist. So what the sdist lacks, the wheel lacks.
2. Their metadata and files are checked: versions, what a wheel may hold, the license, the changes.
3. The wheel is installed with its extras into an environment of its own, by the versions of ci/constraints.txt. There,
   in an empty folder and without the checkout, `unidist demo` runs.

Downloads are some hundred megabytes. It ends with 1 where something is wrong, and says what.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "torch,demo"
BUILDING = "setuptools>=77"
# What a wheel has at its top, beside the folder of its metadata.
IN_WHEEL = {"unidist", "keras_unidist.py"}
IN_SDIST = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "keras_unidist.py", "unidist/py.typed"}
_BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
_WHERE = "import unidist, keras_unidist; print(unidist.__file__, unidist.__version__)"


def main(arguments: list[str]) -> int:
    if arguments != ["--dry-run"]:
        print(f"{__doc__}\nGive --dry-run: nothing else is there yet.")
        return 2
    with tempfile.TemporaryDirectory(prefix="unidist-release-") as folder:
        place = Path(folder)
        sdist, wheel = built(place)
        found = [
            *of_wheel(names_of(wheel), metadata_of(wheel)),
            *of_sdist(names_of(sdist)),
            *of_versions(metadata_of(wheel), (ROOT / "CHANGELOG.md").read_text()),
        ]
        for problem in found:
            print(f"wrong: {problem}")
        links = relative_links((ROOT / "README.md").read_text())
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {sdist.name}: {sdist.stat().st_size:,} bytes")
        print(f"note: {len(links)} links of README.md lead nowhere where an index shows it")
        return 1 if found else installed(wheel, place)


def built(place: Path) -> tuple[Path, Path]:
    """Returns the sdist of the commit, and the wheel of the sdist."""
    python = environment(place / "builder")
    run([python, "-m", "pip", "install", "--quiet", BUILDING], place)
    source, unpacked, made = place / "source", place / "unpacked", place / "made"
    source.mkdir()
    archive = subprocess.run(("git", "archive", "HEAD"), cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(("tar", "-x", "-C", str(source)), input=archive, check=True)
    run([python, "-c", _BUILD, "build_sdist", made], source)
    (sdist,) = made.glob("*.tar.gz")
    unpacked.mkdir()
    subprocess.run(("tar", "-xzf", str(sdist), "-C", str(unpacked)), check=True)
    run([python, "-c", _BUILD, "build_wheel", made], next(unpacked.iterdir()))
    (wheel,) = made.glob("*.whl")
    return sdist, wheel


def names_of(archive: Path) -> list[str]:
    """Returns the files of a wheel or an sdist; of an sdist without the folder that all of them are in."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as sdist:
        return [name.partition("/")[2] for name in sdist.getnames() if "/" in name]


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(file.read(name))


def of_wheel(names: Sequence[str], metadata: Message) -> list[str]:
    """Returns what is wrong with a wheel's files and metadata."""
    top = {name.partition("/")[0] for name in names}
    strange = sorted(name for name in top - IN_WHEEL if not name.endswith(".dist-info"))
    found = [f"the wheel has {name}, which is not of the package" for name in strange]
    found += [f"the wheel lacks {name}" for name in sorted(IN_WHEEL - top)]
    if "unidist/py.typed" not in names:
        found.append("the wheel lacks unidist/py.typed")
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        found.append("the wheel lacks the license")
    for field in ("Summary", "License-Expression", "Requires-Python", "Description-Content-Type"):
        if not metadata[field]:
            found.append(f"the metadata lacks {field}")
    offered = set(metadata.get_all("Provides-Extra") or ())
    return found + [f"there is no extra {extra}" for extra in EXTRAS.split(",") if extra not in offered]


def of_sdist(names: Sequence[str]) -> list[str]:
    return [f"the sdist lacks {name}" for name in sorted(IN_SDIST - set(names))]


def of_versions(metadata: Message, changes: str) -> list[str]:
    """Returns what is wrong with the version: it heads the changes, and it is none of development."""
    version = str(metadata["Version"])
    found = [] if re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version) else [f"{version} is no version of a release"]
    first = re.search(r"^## (\S+)", changes, re.MULTILINE)
    if first is None or first[1] != version:
        found.append(f"CHANGELOG.md begins with {first[1] if first else 'no version'}, and this is {version}")
    return found


def relative_links(readme: str) -> list[str]:
    """Returns targets that only a checkout has."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", readme) if not re.match(r"[a-z]+:|#", target)]


def installed(wheel: Path, place: Path) -> int:
    python, empty = environment(place / "fresh"), place / "empty"
    empty.mkdir()
    began = time.monotonic()
    constraints = ("--constraint", str(ROOT / "ci" / "constraints.txt"))
    run([python, "-m", "pip", "install", "--quiet", *constraints, f"{wheel}[{EXTRAS}]"], empty)
    print(f"installed in {time.monotonic() - began:.0f} s")
    where, version = run([python, "-c", _WHERE], empty).split()
    if not Path(where).is_relative_to(place / "fresh"):
        print(f"wrong: unidist {version} is imported from {where}")
        return 1
    print(run([python.parent / "unidist", "demo", "--quiet"], empty))
    return 0


def environment(folder: Path) -> Path:
    """Returns the Python of a new environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Runs it without settings of Python, Keras and unidist, and returns what it printed.

    Raises:
        SystemExit: it failed.
    """
    ours = ("KERAS", "UNIDIST", "PYTHON", "VIRTUAL_ENV", "TESTS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(words)}: ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
