#!/usr/bin/env python3
"""The site of the documents: `python3 ci/docs.py` builds it into docs/_build, which git ignores.

Makes an environment over that of ci/test.py, with what ci/docs.txt lists. Looks at the prose (ci/prose.py), then builds
with Sphinx, where a warning is a failure, and a link that leads nowhere is a warning.

    python3 ci/docs.py              the site; open docs/_build/index.html
    python3 ci/docs.py --examples   first run every example of the documents (tests/docs)
    python3 ci/docs.py --prose      only look at the prose
    python3 ci/docs.py --look       then open each page in a browser (ci/looking.py); docs/_build/screenshots
    python3 ci/docs.py --look DIR   only look at the pages of DIR
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ci.prose import avoided, documents, of_words_alone, problems  # noqa: E402 - found by the line above
from ci.test import PYTEST, environment, layered, run, say, turn_to_optimized_python  # noqa: E402

LOOKING = ROOT / "ci" / "looking.py"
PACKAGES = ROOT / "ci" / "docs.txt"
BUILT = ROOT / "docs" / "_build"
# The first is the smallest, and what Debian installs; the others draw the same.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def main(arguments: list[str]) -> int:
    found = [problem for page in documents(ROOT) for problem in problems(page)]
    found += [problem for file in of_words_alone(ROOT) for problem in avoided(file)]
    for problem in found:
        say(problem)
    if found or "--prose" in arguments:
        return int(bool(found))
    turn_to_optimized_python()
    # What is missing is said before anything is built.
    chromium = browser() if "--look" in arguments else ""
    python = environment()
    if "--examples" in arguments and (code := run(python, *PYTEST, "tests/docs")):
        return code
    python = layered(python, packages())
    if arguments[:1] == ["--look"] and arguments[1:]:
        return run(python, LOOKING, chromium, Path(arguments[1]).resolve())
    if code := build(python) or (chromium and run(python, LOOKING, chromium, BUILT, "--site")):
        return code
    for page in (bare := without_example()):
        say(f"{page}: a public name's page shows no example")
    say(f"open {BUILT / 'index.html'}")
    return int(bool(bare))


def browser() -> str:
    """The program of a Chromium; root gets it from the system's packages where there is none."""
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found and shutil.which("apt-get") and os.geteuid() == 0:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", BROWSERS[0])
        found = [path for name in BROWSERS[:1] if (path := shutil.which(name))]
    if not found:
        sys.exit(f"ci: no browser to look at the site with: install one of {', '.join(BROWSERS)}, and run this again")
    return found[0]


def packages() -> list[str]:
    return [line for line in PACKAGES.read_text().splitlines() if line and not line.startswith("#")]


def build(python: Path) -> int:
    """From nothing: what is left of pages that are gone would stay in the site."""
    shutil.rmtree(BUILT, ignore_errors=True)
    strict = ("--fail-on-warning", "--keep-going", "--nitpicky", "--fresh-env")
    # What the pages of names import: Keras on torch. What Keras imports besides where it finds it takes seconds.
    hidden = [str(ROOT / "ci" / folder) for folder in ("without_tensorflow", "without_sklearn")]
    env = {"KERAS_BACKEND": "torch", "PYTHONPATH": ":".join((str(ROOT), *hidden))}
    cache = BUILT.with_name("_build_doctrees")
    code = run(python, "-m", "sphinx", "--quiet", *strict, "-d", cache, ROOT / "docs", BUILT, env=env)
    shutil.rmtree(cache, ignore_errors=True)
    return code


def without_example() -> list[str]:
    """Pages of public names that show none: Sphinx has read something else than the name's docstring."""
    pages = sorted(page for page in (BUILT / "api").glob("*.html") if page.name != "index.html")
    return [page.name for page in pages if "&gt;&gt;&gt; " not in page.read_text()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
