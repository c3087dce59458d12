"""How deep a run of the tests goes: an ordinary one takes, of a family of cases, those that show the behaviour.

`make deep` (QUICOLL_TEST_DEEP=1) takes all of them, before a release for instance. A choice is fixed: the same run
takes the same cases on every machine and in every process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

DEEP = os.environ.get("QUICOLL_TEST_DEEP", "0") != "0"


def some(every: Iterable[T], one_in: int, first: int = 0) -> list[T]:
    """Return one in so many of these cases, beginning with this one; all of them where the run is a deep one."""
    return list(every) if DEEP else list(every)[first::one_in]


def deep(usual: T, full: T) -> T:
    """Return what an ordinary run uses, or what a deep one does."""
    return full if DEEP else usual
