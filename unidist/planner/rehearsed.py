"""Holds what a rehearsal finds: what a step of one rank sends, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from unidist.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Says what was seen of a step on tensors without values.

    Attributes:
        sent: what layers send, forward and backward.
        kept: bytes that forward keeps for backward, of activations; None: it was not looked at.
    """

    sent: Ledger
    kept: int | None = None
