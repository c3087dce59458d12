"""Errors of a simulation itself. None of these is an error of the transport that it runs."""

from __future__ import annotations

from quicoll_transport.errors import TransportError

__all__ = ["Deadlock", "Forbidden", "OutOfTime", "SimulationError", "Spinning"]


class SimulationError(TransportError):
    """Root of the simulator's own errors."""


class Deadlock(SimulationError):
    """A task waits, and nothing is runnable or scheduled that could wake it: a wait without a deadline."""


class Spinning(SimulationError):
    """Callback follows callback and the clock stands still: work that never ends."""


class OutOfTime(SimulationError):
    """The condition of a run did not hold within its limit of simulated time."""


class Forbidden(SimulationError):
    """Simulated code reached for the real world: a socket, a thread, a wait that would stop the clock."""
