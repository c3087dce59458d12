"""What a simulation itself can run into. None of these is an error of the transport that it runs."""

from __future__ import annotations

from quicoll_transport.errors import TransportError

__all__ = ["Deadlock", "Forbidden", "OutOfTime", "SimulationError", "Spinning"]


class SimulationError(TransportError):
    """Root of the simulator's own errors."""


class Deadlock(SimulationError):
    """Somebody waits, and nothing is runnable or scheduled that could wake them: a wait without a deadline."""


class Spinning(SimulationError):
    """Callback follows callback and the clock stands still: work that never ends."""


class OutOfTime(SimulationError):
    """What was waited for did not come about within the simulated time that it was given."""


class Forbidden(SimulationError):
    """Simulated code reached for the real world: a socket, a thread, a wait that would stop the clock."""
