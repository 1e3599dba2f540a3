"""Check: one question that was asked of the machine or of the world, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warning", "failed", "not checked"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: a short name, the same in every run.
        asked: what should be so.
        status: "ok"; "warning": it works and may be slow or bite later; "failed": a job fails or hangs by it;
            "not checked": it could not be found out, and `found` says why.
        found: what is so.
        advice: what to do; "" only where there is nothing to do.
    """

    name: str
    asked: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """Asks one thing of the machine or of the world; its methods give the check that an answer makes."""

    name: str
    asked: str

    def ok(self, found: str) -> Check:
        return Check(self.name, self.asked, "ok", found)

    def warning(self, found: str, advice: str) -> Check:
        return Check(self.name, self.asked, "warning", found, advice)

    def failed(self, found: str, advice: str) -> Check:
        return Check(self.name, self.asked, "failed", found, advice)

    def not_checked(self, found: str, advice: str = "") -> Check:
        return Check(self.name, self.asked, "not checked", found, advice)


def counted(number: int, noun: str) -> str:
    """ "1 process", "2 processes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
