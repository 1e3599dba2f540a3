"""A file a promise, on every backend: its programs are beside what is said of them."""

from __future__ import annotations

from tests.parity.conftest import no_horovod_idles

__all__ = ["no_horovod_idles"]
