"""The site as a browser shows it, at a desk's and a phone's width; and what is wrong with planted pages is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ci.docs
from tests.docs.documents import ROOT

# The first run on a machine installs the browser, and what Sphinx needs.
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

GOOD = """<!doctype html><html><head><meta name="viewport" content="width=device-width"></head><body>
<h1 id="here">Good</h1><p>A <a href="good.html#here">link</a>, <a href="#here">another</a>, one
<a href="https://elsewhere.invalid/">elsewhere</a>, and a wide thing in its own box:</p>
<div style="overflow-x: auto"><div style="width: 3000px">wide</div></div>
<div class="highlight-python"><pre style="overflow: auto; width: 300px">short</pre></div>
<img src="picture.svg" style="max-width: none"></body></html>"""
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="20"><text y="15">small</text></svg>'
# What stands in a page, and how what is wrong with it is said.
PLANTED = {
    "wide": ('<div style="width: 3000px">wide</div>', "pixels wider than a window of 1280"),
    "phone": ('<div style="width: 600px">wide</div>', "pixels wider than a window of 390"),
    "dead": ('<a href="gone.html">link</a>', "a link leads to gone.html, which is not there"),
    "anchor": ('<a href="good.html#gone">link</a>', "a link leads to #gone of good.html, which is not there"),
    "said": ("<script>console.error('oh no')</script>", "console: oh no"),
    "raised": ("<script>nothing.is_here()</script>", "exception: nothing is not defined"),
    "asked": ('<script src="gone.js"></script>', "404: gone.js"),
    "left": ('<script src="http://127.0.0.2:9/x.js"></script>', "asks for http://127.0.0.2:9/x.js"),
    "picture": ('<img src="gone.svg">', "the picture gone.svg is not there"),
    "small": ('<img src="picture.svg" width="150">', "the picture picture.svg is too small to read"),
    "cut": (
        '<div class="highlight-python"><pre style="overflow: auto; width: 90px">import a_rather_long_name</pre></div>',
        "an example has a line that is cut off: 'import a_rather_long_name'",
    ),
}


def _docs(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "ci" / "docs.py", *arguments], capture_output=True, text=True, timeout=850, check=False
    )


def _plant(folder: Path, **pages: str) -> Path:
    folder.mkdir()
    (folder / "picture.svg").write_text(PICTURE)
    for name, body in {"good": "", **pages}.items():
        (folder / f"{name}.html").write_text(GOOD.replace("</body>", f"{body}</body>"))
    return folder


@pytest.fixture(scope="module")
def of_planted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines that looking at the planted pages prints."""
    bodies = {name: body for name, (body, _) in PLANTED.items()}
    done = _docs("--look", _plant(tmp_path_factory.mktemp("site") / "pages", **bodies))
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("page", PLANTED)
def test_what_is_wrong_with_a_page_is_found(page: str, of_planted: list[str]) -> None:
    said = [line for line in of_planted if line.startswith(f"{page}.html: ")]
    assert any(PLANTED[page][1] in line for line in said), of_planted
    if page == "phone":
        assert len(said) == 1


def test_a_good_page_has_no_problem(of_planted: list[str], tmp_path: Path) -> None:
    assert not [line for line in of_planted if line.startswith("good.html: ")]
    done = _docs("--look", _plant(tmp_path / "pages"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "looked at 1 pages: 0 problems" in done.stdout


def test_without_a_browser_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="install one of chromium-headless-shell, chromium, "):
        ci.docs.browser()


def test_the_site_is_right_in_a_browser() -> None:
    done = _docs("--look")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    shots = {path.name: path.read_bytes() for path in (ROOT / "docs/_build/screenshots").glob("*.png")}
    for page in ("index", "guide-five-minutes", "api-DataParallel"):
        for width in (1280, 390):
            light, dark = (shots[f"{page}-{width}-{scheme}.png"] for scheme in ("light", "dark"))
            assert int.from_bytes(light[16:20]) == int.from_bytes(dark[16:20]) == width
            assert light != dark
    signature = re.sub(r"<[^>]*>", "", (ROOT / "docs/_build/api/DataParallel.html").read_text())
    assert "zero: int = 0," in signature
