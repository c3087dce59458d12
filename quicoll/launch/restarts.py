"""How often a process that dies is started again, and after what wait. It knows no clock: the time is an argument.

Deaths are counted within a window, because a run of weeks has its share of them and a process that dies at once, again
and again, has a fault that no restart mends: the one is to go on, the other to end with what the process said. The wait
doubles with each death in the window, so that a fault which comes at once is not met at full speed.

Some failures no restart mends, and each costs its user the time of a start and one more traceback (`hopeless`):

    LocalError, Mismatch, Diverged        of a process that has committed no step: it is the program, on the first start
    one of these                          after committed steps, and the next process of the node ends by it again
    any other line, exit status 1 to 127  twice in a row with the same line, and neither process has committed a step

A signal's end (a crash, the kernel's memory killer, 128 + number) is never one of them, nor are quicoll's other errors,
which tell of another rank or of the network, nor what says of itself that it may pass: a connection, a time limit,
memory that somebody else may free.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

__all__ = ["Death", "RestartBudget", "hopeless"]

_BACKOFF_MAX_S = 10.0
_SIGNALLED = 128
"""From here on an exit status is that of a signal, as shells and programs that end in order have it."""
_OWN = re.compile(r"quicoll(?:_transport)?\.errors\.(\w+)")
_OF_THE_PROGRAM = ("LocalError", "Mismatch", "Diverged")
_PASSES = re.compile(r"[\w.]*(?:Connection|Timeout|TimedOut|Unavailable|OutOfMemory)\w*(?::|$)|MemoryError")
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a process ended that was to go on.

    Attributes:
        status: Its exit status, negative for a signal.
        last_line: What it wrote last; of a Python program that an exception has ended, this one.
        committed: Whether it has committed a step.
    """

    status: int
    last_line: str
    committed: bool


def hopeless(death: Death, before: Death | None) -> str:
    """Return why a process is not to be started again, "" if it is; see the module's head.

    Args:
        death: How it ended.
        before: How the one before it of the same node ended; None where it is the first.
    """
    if not 0 < death.status < _SIGNALLED or not death.last_line:
        return ""
    again = before is not None and before.status == death.status and _alike(before.last_line, death.last_line)
    if own := _OWN.match(death.last_line):
        name = own[1]
        if name not in _OF_THE_PROGRAM:
            return ""
        if not death.committed:
            return f"a restart mends no {name} that comes before the first step"
        return f"a restart has not mended this {name}" if again else ""
    if _PASSES.match(death.last_line):
        return ""
    if again and before is not None and not (before.committed or death.committed):
        return "the second time in the same way, before its first step"
    return ""


def _alike(one: str, other: str) -> bool:
    """Whether two lines say the same; numbers do not count: views, ports and processes have other ones each time."""
    return _NUMBERS.sub("0", one) == _NUMBERS.sub("0", other)


class RestartBudget:
    """The restarts of one process. Times are seconds of one clock that never goes back."""

    def __init__(self, most: int, *, window: float, backoff: float) -> None:
        """Begin without a death.

        Args:
            most: Restarts within any `window`.
            window: Seconds for which a death counts.
            backoff: Seconds before the first restart; doubled for each further one in the window, up to 10.
        """
        self._most = most
        self._window = window
        self._backoff = backoff
        self._deaths: deque[float] = deque()

    @property
    def recent(self) -> int:
        """Deaths that counted when the last one came, with that one."""
        return len(self._deaths)

    def died(self, now: float) -> float | None:
        """Take note of a death.

        Args:
            now: When it was.
        Returns:
            Seconds to wait before the restart; None where there is to be none.
        """
        self._deaths.append(now)
        while self._deaths[0] <= now - self._window:
            self._deaths.popleft()
        if len(self._deaths) > self._most:
            return None
        return float(min(self._backoff * 2 ** (len(self._deaths) - 1), _BACKOFF_MAX_S))
