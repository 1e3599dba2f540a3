"""The documents' pictures are what the code makes; models are drawn as laid out; the command writes its report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import preloaded
from tests.docs.documents import ROOT, blocks, pages
from tests.drawing import programs
from tests.drawing.svg import rects, root, said, texts
from tests.visible import OF_KERAS
from unidist import cli
from unidist.testing.processes import ProcessWorld

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
pytestmark = pytest.mark.processes


@pytest.fixture
def world() -> Iterator[ProcessWorld]:
    """A process for each test: Keras gives the planned models of one values when the other trains."""
    with ProcessWorld(1, launcher=None, env=OF_KERAS["torch"], timeout=200, preload=preloaded.KERAS["torch"]) as found:
        yield found


def test_the_documents_pictures_are_made_by_the_code(world) -> None:
    made, lines = world.call(programs.documented)[0], world.call(programs.named)[0]
    assert len(made) >= 12
    assert {path.name for path in FOLDER.glob("*.svg")} == set(made)
    for name, svg in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == svg, f"{name}: run docs/pictures.py"
        assert len(svg.encode()) < 40_000
        assert root(svg).tag.endswith("svg")
        assert 20 < len(lines[name]) < 150
        assert "\n" not in lines[name]


def test_the_pages_show_each_picture_and_say_what_it_is() -> None:
    text = "\n".join((ROOT / page).read_text() for page in pages())
    shown = re.findall(r"^!\[([^\]]{20,150})\]\((?:docs/|\.\./)?pictures/(\w+\.svg)\)$", text, flags=re.MULTILINE)
    assert {name for _, name in shown} == {path.name for path in FOLDER.glob("*.svg")}
    assert len(shown) == len(re.findall(r"pictures/\w+\.svg", text))


@pytest.mark.parametrize("block", blocks("docs/pictures.md"), ids=lambda block: f"line{block.line}")
def test_the_pages_cells_run(world, block, tmp_path: Path) -> None:
    world.call(programs.cell, block.text, str(tmp_path))
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == (["memory.svg", "plan.svg"] if "draw(" in block.text else [])


def test_a_model_is_drawn_as_it_lies(world) -> None:
    found = world.call(programs.of_a_model)[0]
    kinds = {rect.title.partition(": ")[0].rpartition("/")[2]: rect.kind for rect in rects(found["description"])}
    assert kinds == {"up": "c0", "down<b>": "c1"}
    assert "its inputs come cut" in "".join(rect.title for rect in rects(found["model"]))
    assert "net as it is laid out on the devices" in texts(found["model"])
    # What a step sends is a plan's to predict.
    assert "sent by a rank" not in said(found["model"])
    assert f"slots {int(found['slots']):,} bytes" in "".join(rect.title for rect in rects(found["memory"]))
    assert "all_reduce over data" in texts(found["ledger"])
    assert "down&lt;b&gt;/kernel" in found["in a notebook"]
    assert "<b>" not in found["in a notebook"]
    assert "<svg" in found["in a notebook"]
    assert "down<b>/kernel" in found["text"]


MODEL = """
import keras

def mlp():
    x = keras.Input((8,))
    y = keras.layers.Dense(16, "relu", name="up")(x)
    return keras.Model(x, keras.layers.Dense(8, name="down")(y), name="mlp")
"""


def test_the_command_writes_a_report(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    file, page = tmp_path / "model.py", tmp_path / "report.html"
    file.write_text(MODEL)
    assert cli.main(["plan", f"{file}:mlp", "--mesh", "data=2,model=4", "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "column: first of a pair with down" in out
    assert f"wrote {page}" in err
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<title>mlp on data=2, model=4</title>" in text
    for wrong in (tmp_path / "report.pdf", tmp_path / "missing" / "report.html"):
        assert cli.main(["plan", f"{file}:mlp", "--mesh", "data=2", "--html", str(wrong)]) == 2
        assert "DrawingError" in capsys.readouterr().err
        assert not wrong.exists()
