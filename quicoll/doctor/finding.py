"""What an examination finds: a sentence about the state of one thing, and what to do where it is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["CheckResult", "State", "fine", "note", "wrong"]

State: TypeAlias = Literal["fine", "note", "wrong"]
"""note: it works, and somebody may want to know. wrong: a job will not work, or not as it should."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One sentence of an examination.

    Attributes:
        check: What was looked at, one word.
        state: How it is.
        says: The sentence.
        advice: What to do; "" where there is nothing to do.
    """

    check: str
    state: State
    says: str
    advice: str = ""


def fine(check: str, says: str) -> CheckResult:
    """Return a finding about what is as it should be.

    Args:
        check: What was looked at.
        says: The sentence.
    """
    return CheckResult(check, "fine", says)


def note(check: str, says: str, advice: str = "") -> CheckResult:
    """Return a finding about what works and is worth knowing.

    Args:
        check: What was looked at.
        says: The sentence.
        advice: What could be done.
    """
    return CheckResult(check, "note", says, advice)


def wrong(check: str, says: str, advice: str) -> CheckResult:
    """Return a finding about what does not work.

    Args:
        check: What was looked at.
        says: The sentence.
        advice: What to do.
    """
    return CheckResult(check, "wrong", says, advice)
