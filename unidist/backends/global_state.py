"""Keeps the adapter in use, its declaration, and whether it has joined a world. One for the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from unidist.algebra import mesh as mesh_module
from unidist.backends import environment
from unidist.backends.desync import line_of
from unidist.backends.entry import Entry
from unidist.backends.joining import check_same, joined_already
from unidist.backends.noting import noted
from unidist.backends.protocol import Cluster, DistributionBackend
from unidist.errors import BackendNotAvailableError
from unidist.flight.recorder import open_in_environment, recorder

_NONE = Entry(target="")
_current: DistributionBackend | None = None
_entry_in_use = _NONE
_joined: Literal["no", "by launcher", "by initialize"] = "no"


def current() -> DistributionBackend:
    """The backend in use. Raises BackendNotAvailableError where none was chosen."""
    if _current is None:
        raise BackendNotAvailableError('no backend is in use: call unidist.use("torch"), "jax", "sim"... first')
    return _current


def has_current() -> bool:
    return _current is not None


def in_use() -> Entry:
    """Returns the declaration of the adapter in use; an empty one where none is in use."""
    return _entry_in_use


def has_joined() -> bool:
    """Returns whether the backend in use has joined a world, by the launcher's word or by `initialize`."""
    return _current is not None and _joined != "no"


def take(adapter: DistributionBackend, declared: Entry, cluster: Cluster | None) -> None:
    """Makes an adapter the current one, in place of the last; under a launcher it joins its world."""
    if _current is not None:
        _current.shutdown()
    _set(None, "no")
    launched = environment.detect() is not None
    if launched:
        _join(adapter, cluster or Cluster())
    _set(adapter, "by launcher" if launched else "no", declared)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Runs what is inside without a backend until one is chosen.

    Afterwards that one is shut down and the one before is back.
    """
    before = _current, _joined, _entry_in_use
    _set(None, "no")
    try:
        yield
    finally:
        if _current is not None:
            _current.shutdown()
        _set(*before)


def _set(
    adapter: DistributionBackend | None, joined: Literal["no", "by launcher", "by initialize"], declared: Entry = _NONE
) -> None:
    global _current, _joined, _entry_in_use
    _current, _joined, _entry_in_use = adapter, joined, declared
    mesh_module.set_world(None if adapter is None else adapter.list_devices)


def initialize(cluster: Cluster, *, retimes: bool = False) -> None:
    """Joins a world.

    Args:
        cluster: how.
        retimes: whether its timeout shall hold for a world that the launcher's word has joined already.

    Raises:
        BackendMismatchError: called a second time, or against what the launcher said.
        CapabilityError: the adapter cannot change its timeout.
    """
    global _joined
    adapter = current()
    if _joined == "by initialize":
        raise joined_already(adapter.process_index(), adapter.process_count())
    if _joined == "no":
        _join(adapter, cluster)
    else:
        check_same(cluster, adapter.process_index(), adapter.process_count(), "the launcher started this", "")
        if retimes:
            adapter.set_timeout(cluster.timeout)
            recorder.set_timeout(cluster.timeout)
    _joined = "by initialize"


def _join(adapter: DistributionBackend, cluster: Cluster) -> None:
    launch = environment.detect()
    index, count = cluster.process_index, cluster.process_count
    if launch is not None:
        index, count = launch.process_index, launch.process_count
    open_in_environment(index or 0, count or 1, line_of)
    recorder.set_timeout(cluster.timeout)
    before = recorder.enter("joining")
    with noted("the meeting of all processes"):
        adapter.initialize(cluster)
    recorder.back(before)
    if before == 0:
        recorder.enter("program")


def shutdown() -> None:
    """Leaves the world of the backend in use."""
    global _joined
    current().shutdown()
    recorder.close()
    _joined = "no"
