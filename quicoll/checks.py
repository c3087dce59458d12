"""Check what callers pass, before anything else is done with it. Each function raises LocalError for a bad value."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from quicoll.errors import LocalError

__all__ = [
    "MAX_ADDRESSES",
    "MAX_LANES",
    "MAX_MEMBERS",
    "MAX_NAME",
    "MAX_SECONDS",
    "MAX_WHOLE",
    "done",
    "plain",
    "seconds",
    "whole",
]

F = TypeVar("F", bound=Callable[..., Any])

MAX_SECONDS = 1e6
MAX_MEMBERS = 1024
"""Of a view, and candidates for one. Bounds every message and the coordinator's memory."""
MAX_ADDRESSES = 4
"""Of a node."""
MAX_LANES = 8
"""Of a rank."""
MAX_NAME = 128
"""Characters of a node's or a site's name."""
MAX_WHOLE = 2**63 - 1  # SQLite's INTEGER and every struct format "q"


def seconds(value: Any, name: str = "timeout") -> float:
    """Return a duration as a float.

    Args:
        value: Any number above 0 and below a million. NaN is refused: a deadline that is no number would never pass.
        name: What it is, for the error.
    """
    try:
        given = float(value)
    except (TypeError, ValueError):
        raise LocalError(f"{name} is a number of seconds, not {value!r}") from None
    if not 0 < given < MAX_SECONDS:
        raise LocalError(f"{name} must be above 0 and below a million seconds, not {value!r}")
    return given


def whole(value: Any, name: str) -> int:
    """Return an integer as an int.

    Args:
        value: An integer of any type, numpy's too, but neither 3.0 nor True.
        name: What it is, for the error.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise LocalError(f"{name} must be an integer, not {value!r}") from None


def plain(function: F, name: str) -> F:
    """Return a function that has done its work when it returns; refuse a coroutine function.

    Args:
        function: The function.
        name: What it is, for the error.
    """
    if not callable(function):
        raise LocalError(f"{name} is a function, not {function!r}")
    if inspect.iscoroutinefunction(function):
        raise LocalError(f"{name} is a plain function: {function!r} gives a coroutine, and nobody would await it")
    return function


def done(result: Any, name: str) -> None:
    """Refuse what a plain function returned if it has yet to be awaited: its work is not done.

    Args:
        result: What the function returned.
        name: What the function is, for the error.
    """
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise LocalError(f"{name} gave something to await, which nobody does: its work is not done")
