"""`unidist plan`: the plan of a file's model, its map out and in, and large models in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import unidist
from unidist import cli

MODEL = """
import keras

def mlp():
    x = keras.Input((8,))
    y = keras.layers.Dense(16, "relu", name="up")(x)
    return keras.Model(x, keras.layers.Dense(8, name="down")(y), name="mlp")

def reads_values():
    model = mlp()
    return model.layers[1].kernel.numpy() and model

def compiled():
    model = mlp()
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    return model

def nothing():
    return None
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_plan_shows_layouts_reasons_and_traffic(file, capsys) -> None:
    assert cli.main(["plan", f"{file}:mlp", "--mesh", "data=2,model=4", "--batch", "10", "--zero", "1"]) == 0
    text = capsys.readouterr().out
    for part in (
        "zero=1",
        "reduce_scatter",
        "mlp on data=2, model=4",
        "column: first of a pair with down",
        "all_reduce",
        "slots of Adam",
    ):
        assert part in text


def test_plan_takes_a_function_that_compiles_its_model(file, capsys) -> None:
    """An optimizer makes its rate of a number, which Keras refuses where variables get no values."""
    assert cli.main(["plan", f"{file}:compiled", "--mesh", "model=4"]) == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["slots", "of", "SGD", "304"] in told


def test_plan_counts_slots_in_host_memory(file, capsys) -> None:
    assert cli.main(["plan", f"{file}:mlp", "--mesh", "data=2", "--offload", "states"]) == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(line for line in told if line[:2] == ["slots", "of"])[-1] == "0"
    assert next(line for line in told if line[:4] == ["slots", "in", "host", "memory"])[-1] == "2,240"


def test_the_map_goes_out_is_edited_and_comes_back(file, tmp_path, capsys) -> None:
    assert cli.main(["plan", f"{file}:mlp", "--mesh", "model=4", "--json"]) == 0
    text = capsys.readouterr().out
    rules = json.loads(text)["rules"]
    assert rules == {"up/kernel": [None, "model"], "up/bias": ["model"], "down/kernel": ["model"]}
    edited = tmp_path / "map.json"
    edited.write_text(text.replace('"down/kernel": ["model"]', '"down/kernel": [null, "model"]'))
    assert cli.main(["plan", f"{file}:mlp", "--mesh", "model=4", "--layout-map", str(edited)]) == 0
    assert "column, alone: rule 'down/kernel'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "mesh", "message"),
    [
        ("{}:mlp", "model", "--mesh 'model': write axes and sizes"),
        ("{}:other", "model=2", "has no function 'other'"),
        ("gone.py:mlp", "model=2", "no file 'gone.py'"),
        ("{}:nothing", "model=2", "returned 'NoneType', not a keras.Model"),
        ("{}:reads_values", "model=2", "variables get no values"),
    ],
)
def test_what_is_wrong_is_told(file, capsys, target, mesh, message) -> None:
    assert cli.main(["plan", target.format(file), "--mesh", mesh]) == 2
    assert message in capsys.readouterr().err


LARGE = """
import resource, time
import keras_hub
from unidist.keras.planning import command
began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
command.main([{target!r}, "--mesh", "data=2,model=4"])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("seconds", time.perf_counter() - began, "peak MB", after / 1024, "of planning", (after - before) / 1024)
"""
LLAMA = """
import keras_hub

def model():
    return keras_hub.models.LlamaBackbone(vocabulary_size=32000, num_layers=32, num_query_heads=32,
        num_key_value_heads=32, hidden_dim=4096, intermediate_dim=11008)
"""


@pytest.mark.slow
def test_a_model_of_seven_billion_parameters_is_planned_in_little_memory(tmp_path) -> None:
    (tmp_path / "large.py").write_text(LLAMA)
    program = LARGE.format(target=f"{tmp_path}/large.py:model")
    env = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join((os.environ["PYTHONPATH"], *sys.path))}
    out = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert out.returncode == 0, out.stderr
    assert "(34.0 GB)" in out.stdout
    words = out.stdout.split()
    # Its activations of two rows and eight places, once: what is imported comes to more.
    assert float(words[words.index("planning") + 1]) < 400
    # Two norms' scales of each layer beside what is cut; all else of a block is in its two pairs.
    assert out.stdout.count("second of a pair") == 64


def test_a_plan_that_cuts_nothing_says_so_in_its_last_line(file, capsys) -> None:
    """One that cuts something says nothing of it, nor one without an axis for it."""
    assert cli.main(["plan", f"{file}:mlp", "--mesh", "data=2,model=5"]) == 0
    out = capsys.readouterr().out
    assert "0.0% of its bytes sharded" in out
    last = out.rstrip("\n").splitlines()[-1]
    assert last.startswith("nothing is cut over model=5: each of these devices holds the whole model")
    assert "the largest: " in last
    assert "divides by 5" in last
    for mesh in ("data=2,model=2", "data=5"):
        assert cli.main(["plan", f"{file}:mlp", "--mesh", mesh]) == 0
        assert "nothing is cut" not in capsys.readouterr().out


def test_a_plans_map_is_what_the_strategy_takes() -> None:
    import keras

    mesh = unidist.Mesh({"model": 2})
    unidist.use("sim", devices=2)
    x = keras.Input((8,))
    model = keras.Model(x, keras.layers.Dense(6, name="down")(keras.layers.Dense(16, "relu", name="up")(x)))
    found = unidist.plan(model, mesh)
    unidist.parallelize(model, unidist.ModelParallel(mesh, found.layout_map))
    rows = {row.path: row for row in unidist.describe(model).rows}
    assert {path for path, row in rows.items() if row.is_sharded} == set(found.layout_map)
    assert sum(row.bytes_per_device for row in rows.values() if row.kind == "weights") == found.bytes_per_device
