"""`unidist.Telemetry`: writes down how fast a training goes, what it sends, waits for and holds."""

from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from unidist.checkpoint.checksums import crc
from unidist.errors import ArgumentError, CapabilityError
from unidist.keras import hooks
from unidist.keras.consistency.processes import taking_part
from unidist.keras.fit_observer import Follower
from unidist.keras.records import model_record
from unidist.keras.step_stats import Rows, Sent, Waits, memory
from unidist.keras.strategies.distribution import adopt

_log = logging.getLogger(__name__)
_now = time.perf_counter
# Seconds between two writes to the files.
_FLUSH = 1.0


class Telemetry(Follower):
    """A callback of `fit` that writes down how fast the training goes.

    Each process appends a JSON line to `rank-N.jsonl`, where N is its first rank, after every `every` steps. Process 0
    writes the same for TensorBoard, if tensorboard is installed. Nothing is asked of the devices: no step waits for it.

    | key | what |
    |---|---|
    | step, epoch, time | steps of the training, before it was resumed too; the time as of `time.time()` |
    | seconds, last_seconds | of a step, from the end of the one before: the median since the last line, and the last |
    | rows_per_second | of all processes; null where a batch's size is not known |
    | tokens_per_second | the same times the length of sequences, where the inputs are whole numbers of two dims |
    | bytes_per_step | what this process sent in each |
    | exposed_seconds | of each, in which it waited in collectives; null where a step is one compiled program |
    | memory | the most bytes in use so far, by device; of the process, on CPUs |
    | logs | loss and metrics, where another callback asks for those of each step |

    When an epoch ends, a line has its logs, those of the validation too. Files are written about once a second.

    Args:
        directory: where the files are; it is made.
        every: how many steps a line sums up.

    Raises:
        ArgumentError: `every` is no positive whole number.

    Example:
        >>> import json, keras, numpy as np, pathlib, tempfile, unidist
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> telemetry = unidist.Telemetry(tempfile.mkdtemp(), every=2)
        >>> _ = model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, callbacks=[telemetry], verbose=0)
        >>> lines = (pathlib.Path(telemetry.directory) / "rank-0.jsonl").read_text().splitlines()
        >>> [json.loads(line)["step"] for line in lines]
        [2, 4, 4]
    """

    def __init__(self, directory: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__()
        if type(every) is not int or every < 1:
            raise ArgumentError(f"every={every!r}: give a number of steps, 1 or more")
        self.directory = os.fspath(directory)
        self.every = every
        self._fit: _Fit | None = None
        hooks.table().turn_on_all_there_are()

    # It counts what steps draw, and not what a training that goes on draws again.
    place = 1

    def fit_begins(self, model: Any, epochs: int) -> None:
        self._fit = _Fit(Path(self.directory), self.every, model)

    def data_is_ready(self, iterator: Any) -> None:
        if self._fit is not None:
            self._fit.read(iterator)

    def training_begins(self, callbacks: Any, others: Callable[[], None]) -> None:
        others()
        if self._fit is not None:
            self._fit.begin(callbacks)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._fit is None:
            raise CapabilityError(
                "unidist.Telemetry follows the fit of Keras's own trainers, and this is none. Make the callback in a "
                "line before that of fit: telemetry = unidist.Telemetry(...); after unidist.shutdown() make it anew"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._fit is not None:
            self._fit.epoch, self._fit.ended = epoch, None

    def step_begins(self) -> None:
        if self._fit is not None:
            self._fit.begin_step()

    def step_ended(self, logs: Any) -> None:
        if self._fit is not None:
            self._fit.end_step(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._fit is not None:
            self._fit.end_epoch(logs)

    def fit_ended(self) -> None:
        if self._fit is not None:
            self._fit.close()
        self._fit = None


class _Fit:
    def __init__(self, directory: Path, every: int, model: Any) -> None:
        self._every, self._model = every, model
        self.epoch = 0
        self.ended: float | None = None
        several = taking_part.get()
        place, rank = (0, 0) if several is None else (several.place, several.firsts[several.place])
        self._processes = 1 if several is None else len(several.ranks)
        directory.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (directory / f"rank-{rank}.jsonl").open("a")
        self._flushed = 0.0
        self._scalars = None
        if place == 0:
            try:
                self._scalars = _Scalars(directory)
            except ImportError:
                _log.info("tensorboard is not installed: %s gets JSON lines alone", directory)
        self._sent = Sent()
        self._waits = Waits()
        self._rows: Rows | None = None
        self._step = 0
        self._forget()

    def _forget(self) -> None:
        self._seconds: list[float] = []
        self._counts: list[tuple[int | None, int | None]] = []
        self._bytes: list[float | None] = []

    def read(self, iterator: Any) -> None:
        if self._rows is None:
            distribution = model_record.distribution_of(self._model)
            is_own = distribution is not None and not adopt(distribution).strategy.auto_shard_dataset
            self._rows, self._iterator = Rows(iterator, self._processes if is_own else 1), iterator

    def begin(self, callbacks: Any) -> None:
        assert self._rows is not None
        # Of the batch that the model was built with.
        self._rows.take()
        self._step = max((one.steps_before for one in callbacks.callbacks if isinstance(one, Follower)), default=0)

    def begin_step(self) -> None:
        self._began = _now()
        seen, all_of_them = self._iterator._steps_seen, self._iterator._num_batches
        self._sent.begin(is_last=bool(all_of_them) and seen >= all_of_them)

    def end_step(self, logs: Any) -> None:
        assert self._rows is not None
        now = _now()
        counts = self._rows.take()
        self._counts.append(counts)
        self._bytes.append(self._sent.end(counts[0]))
        self._seconds.append(now - (self.ended or self._began))
        self.ended = now
        self._step += self._iterator.steps_per_execution
        if len(self._seconds) >= self._every:
            self._tell(logs)

    def end_epoch(self, logs: Any) -> None:
        if self._seconds:
            self._tell(None)
        told = _numbers(logs)
        line = {"step": self._step, "epoch": self.epoch, "time": time.time(), "epoch_logs": told}
        self._write(line, {f"epoch/{name}": value for name, value in told.items()})

    def _tell(self, logs: Any) -> None:
        all_seconds = sum(self._seconds)
        rows, tokens = (_sum(column) for column in zip(*self._counts, strict=True))
        sent, exposed, count = _sum(self._bytes), self._waits.take(), len(self._seconds)
        figures = {
            "seconds": statistics.median(self._seconds),
            "last_seconds": self._seconds[-1],
            "rows_per_second": None if rows is None else rows / all_seconds,
            "tokens_per_second": None if tokens is None else tokens / all_seconds,
            "bytes_per_step": None if sent is None else sent / count,
            "exposed_seconds": None if exposed is None else exposed / count,
        }
        told, held = _numbers(logs), memory()
        line = {"step": self._step, "epoch": self.epoch, "time": time.time(), **figures, "memory": held, "logs": told}
        scalars = {f"training/{name}": value for name, value in figures.items() if value is not None}
        scalars |= {f"memory/{name}": float(value) for name, value in held.items()}
        self._write(line, scalars | {f"step/{name}": value for name, value in told.items()})
        self._forget()

    def _write(self, told: dict[str, Any], scalars: dict[str, float]) -> None:
        self._file.write(json.dumps(told) + "\n")
        if self._scalars is not None and scalars:
            self._scalars.add(scalars, self._step)
        # A write to a file takes longer than all else here.
        if (now := time.monotonic()) - self._flushed > _FLUSH:
            self._flushed = now
            self._file.flush()
            if self._scalars is not None:
                self._scalars.flush()

    def close(self) -> None:
        self._sent.close()
        self._file.close()
        if self._scalars is not None:
            self._scalars.close()


class _Scalars:
    """Writes a file that TensorBoard shows, with tensorboard's messages, without TensorFlow.

    The file is a TFRecord: of each message its length, the length's checksum, its bytes and their checksum.
    tensorboard's own writer takes the checksums in Python, which is a sixth of a millisecond a line.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
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


def _numbers(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in (logs or {}).items()}


def _sum(numbers: Any) -> Any:
    return None if any(number is None for number in numbers) else sum(numbers)
