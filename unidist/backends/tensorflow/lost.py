"""Turns TensorFlow's errors, where another process of the world is gone, into ours."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from unidist.backends.tensorflow.joining import Membership
from unidist.errors import ProcessLostError

# A step that the lost process takes part in fails with the first error's status, which is not always "unavailable".
_WORDS = re.compile(
    r"connection (reset|refused|closed|aborted)|failed to connect|socket closed|broken pipe|heartbeat", re.IGNORECASE
)


@contextlib.contextmanager
def told(world: Membership, what: str) -> Iterator[None]:
    """Runs what takes part in collectives.

    Args:
        what: what this process does, for the message.

    Raises:
        ProcessLostError: another process of the world has ended.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if (lost := loss(error, world, what)) is not None:
            raise lost from error
        raise


def loss(error: Exception, world: Membership, what: str) -> ProcessLostError | None:
    """Returns the loss of another process that an error stands for, or None."""
    if world.count == 1 or not isinstance(error, tf.errors.OpError):
        return None
    found = _WORDS.search(error.message)
    if found is None and not isinstance(error, tf.errors.UnavailableError):
        return None
    why = found.group() if found else error.message.strip().splitlines()[0][:200]
    return ProcessLostError(
        f"{what} on process {world.index} of {world.count}: another process of the group ended ({why}). Look at the "
        "output of the other processes for the first error; then start all processes again"
    )
