"""What README's table of comparison says that unidist has, each row beside the tests that show it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.documents import ROOT, table

HEAD = "| | DDP, FSDP2 | Accelerate | Lightning | Horovod | keras.distribution | unidist |"
# By row, what unidist's cell says and tests that run whenever all tests do. None: it says that something is not there.
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "trains": (
        "Keras models on torch, JAX, TensorFlow",
        ("tests/docs/test_readme.py::test_one_line_changes_the_backend_and_not_the_numbers",),
    ),
    "ZeRO": (
        "zero=1`, `zero=3",
        ("tests/docs/test_readme.py::test_a_stage_of_zero_changes_what_a_device_holds_and_no_loss",),
    ),
    "slots in host memory": ('offload="states"` on torch', ("tests/parity/test_offload.py",)),
    "tensor parallel": ("found, or by rules", ("tests/keras/hub/test_backbones.py",)),
    "sequences cut": (
        'an axis "context", by Ulysses or a ring',
        (
            "tests/parity/test_contexts.py::test_it_trains_as_one_device",
            "tests/parity/test_contexts.py::test_keys_go_round",
            "tests/parity/test_contexts.py::test_the_compiler_cuts_it_as_one_device",
        ),
    ),
    "experts cut": (
        'found, also over data shards; `experts="dispatch"',
        (
            "tests/parity/test_experts.py::test_it_trains_as_one_device",
            "tests/keras/hub/test_experts.py::test_dispatched_experts_compute_their_own_rows",
        ),
    ),
    "recomputed blocks": (
        'remat="block"',
        (
            "tests/parity/test_recomputed.py::test_it_trains_as_one_device",
            "tests/parity/test_recomputed.py::test_of_eight_blocks_one_is_held_and_the_inputs_of_all",
        ),
    ),
    "replicas of shards": ("shard_axis=", ("tests/parity/test_replicas.py::test_it_trains_as_one_device",)),
    "LoRA, int8 under it": (
        "cut as kernels are",
        (
            "tests/keras/hub/test_low_rank.py::test_a_step_sends_one_sum_more_for_each_layer",
            "tests/keras/hub/test_quantized.py::test_int8_sends_what_the_plain_kernels_send_and_the_largest_values",
        ),
    ),
    "Muon": (
        "Keras's, a matrix a device",
        ("tests/keras/torch/test_zero.py::test_muon_orthogonalizes_each_matrix_on_one_rank",),
    ),
    "pipelines": ("no", ()),
    "virtual devices in one process": ("yes", ("tests/sim/test_world.py",)),
    "used on GPUs": ("written, never run", ()),
}


def test_every_row_has_its_tests() -> None:
    said = {row[0]: row[-1] for row in table("README.md", HEAD)}
    assert said == {name: cell for name, (cell, _) in ROWS.items()}
    assert all(tests for name, (cell, tests) in ROWS.items() if cell not in ("no", "written, never run"))


@pytest.mark.processes
def test_its_tests_are_there_and_run_with_all_others(request: pytest.FixtureRequest) -> None:
    """Not with `--all` alone: whoever sampled all cases of one away would have left its row without a check."""
    wanted = [test for _, tests in ROWS.values() for test in tests]
    there = [item.nodeid for item in request.session.items]
    if not {test.partition("::")[0] for test in wanted} <= {name.partition("::")[0] for name in there}:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *wanted]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        there = done.stdout.splitlines()
    for test in wanted:
        assert any(name.startswith(test) for name in there), test
