"""Scalars: writes a file that TensorBoard shows, with tensorboard's messages, without TensorFlow.

The file is a TFRecord: of each message its length, the length's checksum, its bytes and their checksum.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unidist.checkpoint.checksums import crc

_MESSAGES = "tensorboard.compat.proto.event_pb2"


class Scalars:
    """A file of scalars.

    Args:
        directory: where it is made.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        self._event: Any = importlib.import_module(_MESSAGES).Event
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.unidist"
        self._file = (directory / name).open("ab")
        self._write(self._event(wall_time=now, file_version="brain.Event:2"))

    def add(self, values: Mapping[str, float], step: int) -> None:
        event = self._event(wall_time=time.time(), step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._write(event)

    def _write(self, event: Any) -> None:
        data = event.SerializeToString()
        length = len(data).to_bytes(8, "little")
        self._file.write(length + _checksum(length) + data + _checksum(data))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _checksum(data: bytes) -> bytes:
    """Returns CRC32C, masked as TFRecord wants it.

    The checksum of bytes that hold their checksum would say nothing.
    """
    found = crc(data)
    return (((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
