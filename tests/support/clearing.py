"""Keras's clear_session in processes that make one model after the other."""

from __future__ import annotations

import gc


def cleared() -> None:
    """Names as at a program's start, and no model of before.

    Keras collects garbage there. What is left then is the frameworks', as the programs that they have traced. It would
    be looked at again each time, for a sixth of the time of a process that traces one model after the other.
    """
    import keras

    keras.utils.clear_session()
    gc.freeze()
