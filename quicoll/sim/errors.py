"""How a simulated run ends badly."""

from __future__ import annotations

from quicoll.errors import QuicollError

__all__ = ["InvariantBroken", "RunFailed"]


class RunFailed(QuicollError):
    """A simulated run ended otherwise than it should. kind: which promise, for programs; at: seconds of true time."""

    def __init__(self, kind: str, message: str, *, at: float, node: str = "") -> None:
        super().__init__(f"{kind}: {message} [at {at:.6f} s of simulated time]", node=node)
        self.kind = kind
        self.at = at


class InvariantBroken(RunFailed):
    """One of the promises was broken: see quicoll.sim.invariants."""
