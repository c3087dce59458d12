"""A host's clock: virtual time as one machine sees it.

Two clocks, as on a real machine. The monotonic one never goes back; it may run fast or slow (`drift`), and leap forward
(a virtual machine that was suspended). The wall clock is the monotonic one plus an offset that anybody may set, also
back (`step_wall`). Timers follow the monotonic clock and nothing else.

All is integer: nanoseconds, and parts per million of drift. Invariants: `local` is non-decreasing in true time;
`true(local(t)) <= t` and `local(true(m)) >= m`, so that a timer is never early by its own clock and never due for ever.
"""

from __future__ import annotations

from quicoll_transport.errors import ConfigurationError

__all__ = ["HostClock"]

_MILLION = 1_000_000
_DRIFTS = -900_000, 9_000_000  # ppm; a tenth and ten times the speed are beyond every real clock


class HostClock:
    """Made for true time `now_ns`, at which the monotonic clock shows `monotonic_ns` and the wall clock `wall_ns`."""

    __slots__ = ("_drift", "_monotonic", "_since", "_wall")

    def __init__(self, *, now_ns: int, monotonic_ns: int, wall_ns: int) -> None:
        self._since = now_ns
        self._monotonic = monotonic_ns
        self._wall = wall_ns - monotonic_ns
        self._drift = 0

    @property
    def drift(self) -> int:
        """Parts per million by which the clock is too fast (negative: too slow)."""
        return self._drift

    def local(self, now_ns: int) -> int:
        """Return what the monotonic clock shows at true time `now_ns`."""
        passed = now_ns - self._since
        if self._drift:
            passed = passed * (_MILLION + self._drift) // _MILLION
        return self._monotonic + passed

    def wall(self, now_ns: int) -> int:
        """Return what the wall clock shows at true time `now_ns`: nanoseconds since 1970 UTC."""
        return self.local(now_ns) + self._wall

    def true(self, local_ns: int) -> int:
        """Return the first true time at which the monotonic clock shows `local_ns` or more, at its present speed."""
        to_pass = local_ns - self._monotonic
        if self._drift:
            to_pass = -(-to_pass * _MILLION // (_MILLION + self._drift))
        return self._since + to_pass

    def set_drift(self, ppm: int, *, now_ns: int) -> None:
        """Make the clock `ppm` parts per million too fast. Timers have to be set anew."""
        least, most = _DRIFTS
        if not least <= ppm <= most:
            raise ConfigurationError(f"a drift lies between {least} and {most} ppm, not {ppm}")
        self._anchor(now_ns)
        self._drift = ppm

    def leap(self, ns: int, *, now_ns: int) -> None:
        """Move the monotonic clock forward, the wall clock with it. Timers have to be set anew."""
        if ns < 0:
            raise ConfigurationError(f"a monotonic clock never goes back, not by {-ns} ns either")
        self._anchor(now_ns)
        self._monotonic += ns

    def step_wall(self, ns: int) -> None:
        """Set the wall clock, forward or back."""
        self._wall += ns

    def _anchor(self, now_ns: int) -> None:
        self._monotonic, self._since = self.local(now_ns), now_ns
