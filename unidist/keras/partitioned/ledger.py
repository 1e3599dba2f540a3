from __future__ import annotations

from typing import Any


class Traffic:
    def __init__(self, f: Any) -> None: ...
    def record(self, *a: Any) -> None: ...
