"""The form of a record: a header, the texts that entries name, and a ring of entries.

Words are of 8 bytes, little-endian.

| offset | what |
|---|---|
| 0 | the header: the fields below, in their order |
| HEADER | texts: for each its length (4 bytes) and its UTF-8 |
| HEADER + TEXTS | the ring: ENTRIES entries of ENTRY words: number, text, site, begun, ended, count, thread |

Times are those of the machine's monotonic clock, in seconds; 0 is "not yet". An entry's number counts from 1, and its
place in the ring is the number modulo ENTRIES. Its count is its number among those of its text. One that was started,
and that no thread waits in yet, has the time of its begin below 0; one that ended by an error that of its end.
"""

from __future__ import annotations

from pathlib import Path

MAGIC = int.from_bytes(b"unidist1", "little")
HEADER, TEXTS = 4096, 128 << 10
ENTRIES, ENTRY = 256, 7
ENTRY_FORM = "<3Q2d2Q"
SIZE = HEADER + TEXTS + ENTRIES * ENTRY * 8
SUFFIX = ".flight"
# What a process may be asked by whoever watches it.
GO_ON, END, TELL = 0, 1, 2
# EX_TEMPFAIL of sysexits.h, with which a process ends that was asked to and has saved: started again it goes on.
LEFT = 75

# Seconds that the process's main thread has spent are kept by phase.
PHASES = (
    "starting",  # imports, and whatever a program does before it joins
    "joining",
    "program",  # the program's own work, and Keras's between steps
    "step",
    "data",  # between two steps
    "evaluating",
    "saving",
    "loading",
)
# Whole numbers.
WHOLE = (
    "magic",
    "rank",
    "processes",
    "pid",
    "order",
    "phase",
    "steps",  # that ended in this process
    "resumed",  # steps that the training had made where it was resumed
    "kept",  # of the steps, those before the last checkpoint that counts
    "committed",  # the last checkpoint that counts, plus 1; 0 where there is none
    "texts",  # bytes
    "kinds",
    "saves",  # 1 while a training would save and leave, where it is asked to
    "left",  # 1: it has saved, and leaves because it was asked to
)
# Seconds.
TIMES = (
    "began",
    "beat",
    "phase_began",
    "first_step_began",
    "first_step_ended",
    "last_step_ended",
    "committed_at",
    "timeout",  # how long this process waits for others; 0 where nothing says
)
FIELDS = (*WHOLE, *TIMES, *PHASES)
WORD = {name: number for number, name in enumerate(FIELDS)}
RING = (HEADER + TEXTS) // 8


def file_of(folder: Path, rank: int, suffix: str = SUFFIX) -> Path:
    """Returns where a rank's record is in the folder of an attempt, or what it keeps beside it."""
    return folder / f"rank-{rank}{suffix}"
