"""A scheduler of pytest-xdist: files that mostly wait have a worker of their own.

A file of tests that wait leaves its worker's core to nobody, and one worker more for all files makes each of them
slower: worlds and references are started in every worker. So the last worker takes files that wait, and no others. The
other workers take them when nothing else is left.

Written for pytest-xdist 3.8, whose LoadScopeScheduling hands out its `workqueue` from the front.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class WaitingApart(LoadFileScheduling):
    """Whole files for each worker, in their order.

    Args:
        waiting: the files that the last worker takes.
    """

    def __init__(self, config: pytest.Config, log: Any, waiting: frozenset[str]) -> None:
        super().__init__(config, log)
        self._waiting = waiting
        self._last = f"gw{self.numnodes - 1}"

    def _next(self, node: Any) -> str | None:
        """The file that a worker takes next; None: there is none for it."""
        wait = [file for file in self.workqueue if file in self._waiting]
        if node.gateway.id == self._last:
            return wait[0] if wait else None
        return next((file for file in self.workqueue if file not in self._waiting), wait[0] if wait else None)

    def _assign_work_unit(self, node: Any) -> None:
        file = self._next(node)
        if file is not None:
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        if self._next(node) is None:
            node.shutdown()
        else:
            super()._reschedule(node)
