"""For all tests: no launcher above us, few threads for each of many processes, and no process left behind.

JAX's compiled programs of one run, by whichever process, are kept in one place until its end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support import covered, sampling
from tests.support.hiding import FROM_PROGRAMS, HIDDEN
from unidist.backends.environment import without_launcher
from unidist.testing import forkserver

if TYPE_CHECKING:
    from tests.parity.worlds import Alone, Worlds

ROOT = Path(__file__).parent.parent
_CACHE = "JAX_COMPILATION_CACHE_DIR"
SERVERS_FIT = 16 * 2**30  # bytes of memory
_MISSING = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    for name in set(os.environ) - set(without_launcher(os.environ)):
        del os.environ[name]
    for name in [n for n in os.environ if n.startswith(("SLURM_", "UNIDIST_"))]:
        del os.environ[name]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Workers of pytest-xdist inherit the folder of the process that starts them.
    if _CACHE not in os.environ:
        folder = os.environ[_CACHE] = tempfile.mkdtemp(prefix="unidist-jax-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # A run goes from one framework to the next and back: a pair of servers for each, with Keras and without.
    if psutil.virtual_memory().total > SERVERS_FIT:
        forkserver.KEPT = 10
    hidden = [str(ROOT / folder) for folder in HIDDEN.values()]
    sys.path[:0] = hidden
    hidden += [str(ROOT / folder) for folder in FROM_PROGRAMS]
    os.environ["PYTHONPATH"] = os.pathsep.join([*hidden, *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what ci/covered.toml says, but for `--all` and tests that are named one by one."""
    if sampling.WHOLE or sampling.SEED != sampling.USUAL or any("::" in argument for argument in config.args):
        return
    names = {item.nodeid for item in items}
    left_out = [item for item in items if item.nodeid in covered.left_out()]
    if not config.option.keyword and (missing := covered.unknown(names, {name.partition("::")[0] for name in names})):
        # What is raised here, a worker of pytest-xdist keeps to itself: one test is left, which fails and says it.
        config.stash[_MISSING] = missing
        left_out = items[1:]
    if left_out:
        left = set(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left]


def pytest_report_header() -> str:
    return (
        "matrices of cases: all" if sampling.WHOLE else f"matrices of cases: every pair of values, seed {sampling.SEED}"
    )


@pytest.fixture(scope="session", autouse=True)
def the_register_names_what_is_there(pytestconfig: pytest.Config) -> None:
    if missing := pytestconfig.stash.get(_MISSING, []):
        pytest.fail("ci/covered.toml or ci/breakages names what is not there:\n" + "\n".join(missing), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def no_process_stays() -> Iterator[None]:
    """Set up before all other fixtures, so torn down after them: whatever they started must have ended by then."""
    yield
    forkserver.close_all()
    assert _children() == {}, "processes that a test started are still running"


@pytest.fixture(scope="module", autouse=True)
def what_was_there_before_stays() -> None:
    """Keras's clear_session collects garbage, once in most tests of models that are in this process. It would look each
    time at all modules of all tests, and at what files before this one have kept: for half a second and more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def alone() -> Iterator[Alone]:
    """What one device computes."""
    from tests.parity.worlds import Alone

    found = Alone()
    yield found
    found.close()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """What many devices compute."""
    from tests.parity.worlds import Worlds

    # Those of two files in a row mostly fit beside each other; ended ones lose what they have compiled.
    found = Worlds(limit=16 if psutil.virtual_memory().total > SERVERS_FIT else 12)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def keras_backend_stays() -> Iterator[None]:
    """`unidist.use` sets KERAS_BACKEND: the programs of the next test shall not inherit it."""
    before = os.environ.get("KERAS_BACKEND")
    yield
    if before is None:
        os.environ.pop("KERAS_BACKEND", None)
    else:
        os.environ["KERAS_BACKEND"] = before


def _children() -> dict[int, str]:
    """The running children of this process, but for the helper that multiprocessing keeps."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and "multiprocessing.resource_tracker" not in command:
                found[child.pid] = command
    return found
