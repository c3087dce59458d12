"""How often a process that dies is started again, and after what wait. It knows no clock: the time is an argument.

Deaths are counted within a window, because a run of weeks has its share of them and a process that dies at once, again
and again, has a fault that no restart mends: the one is to go on, the other to end with what the process said. The wait
doubles with each death in the window, so that a fault which comes at once is not met at full speed.
"""

from __future__ import annotations

from collections import deque

__all__ = ["RestartBudget"]

_BACKOFF_MAX_S = 10.0


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
