"""A release that lacks something is named: ci/release.py, without its builds and installations."""

from __future__ import annotations

import io
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from ci import release

CHANGES = "# Changes\n\n## 0.1.0 (not released)\n"
LICENSE = "keras_unidist-0.1.0.dist-info/licenses/LICENSE"
FILES = ["unidist/__init__.py", "unidist/py.typed", "keras_unidist.py", LICENSE]


def metadata(**other: str) -> Message:
    fields = {
        "Version": "0.1.0",
        "Summary": "s",
        "License-Expression": "l",
        "Requires-Python": ">=3.11",
        "Description-Content-Type": "text/markdown",
    }
    message = Message()
    for name, value in {**fields, **other}.items():
        message[name] = value
    for extra in ("torch", "demo"):
        message["Provides-Extra"] = extra
    return message


def test_a_release_that_has_everything_is_right() -> None:
    assert release.of_wheel(FILES, metadata()) == []
    assert release.of_sdist(sorted(release.IN_SDIST)) == []
    assert release.of_versions(metadata(), CHANGES) == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([*FILES, "tests/__init__.py"], "the wheel has tests, which is not of the package"),
        (FILES[:2] + FILES[3:], "the wheel lacks keras_unidist.py"),
        (FILES[:1] + FILES[2:], "the wheel lacks unidist/py.typed"),
        (FILES[:3], "the wheel lacks the license"),
    ],
)
def test_a_file_too_much_or_too_little_is_named(names: list[str], said: str) -> None:
    assert release.of_wheel(names, metadata()) == [said]


def test_metadata_that_are_missing_are_named() -> None:
    message = metadata(Summary="")
    del message["Provides-Extra"]
    assert release.of_wheel(FILES, message) == [
        "the metadata lacks Summary",
        "there is no extra torch",
        "there is no extra demo",
    ]
    assert release.of_sdist(["README.md"])[0] == "the sdist lacks LICENSE"


@pytest.mark.parametrize(
    ("version", "changes", "said"),
    [
        ("0.1.0.dev3", "## 0.1.0.dev3\n", "0.1.0.dev3 is no version of a release"),
        ("0.2.0", CHANGES, "CHANGELOG.md begins with 0.1.0, and this is 0.2.0"),
        ("0.1.0", "# Changes\n", "CHANGELOG.md begins with no version, and this is 0.1.0"),
    ],
)
def test_a_version_that_cannot_be_released_is_named(version: str, changes: str, said: str) -> None:
    assert release.of_versions(metadata(Version=version), changes) == [said]


def test_archives_are_read(tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a-0.1.0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("unidist/__init__.py", "")
        file.writestr("a-0.1.0.dist-info/METADATA", "Version: 0.1.0\nSummary: s\n")
    with tarfile.open(sdist, "w:gz") as file:
        file.addfile(tarfile.TarInfo("a-0.1.0/README.md"), io.BytesIO())
    assert release.names_of(wheel) == ["unidist/__init__.py", "a-0.1.0.dist-info/METADATA"]
    assert release.names_of(sdist) == ["README.md"]
    assert release.metadata_of(wheel)["Version"] == "0.1.0"


def test_links_that_only_a_checkout_has_are_found() -> None:
    text = "[a](docs/a.md) [b](https://x.org) [c](#c) ![d](docs/d.svg)"
    assert release.relative_links(text) == ["docs/a.md", "docs/d.svg"]


def test_nothing_is_done_without_being_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([]) == 2
    assert "--dry-run" in capsys.readouterr().out
