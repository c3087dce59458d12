"""Errors of a simulated run."""

from __future__ import annotations

from quicoll.errors import QuicollError

__all__ = ["InvariantBroken", "RunFailed"]


class RunFailed(QuicollError):
    """A simulated run ended otherwise than it should.

    kind: which promise, for programs; seed: of the run; at: seconds of true time. The `__cause__` is what the simulated
    code raised, where that ended the run.
    """

    def __init__(self, kind: str, message: str, *, seed: int, at: float, node: str = "") -> None:
        super().__init__(f"{kind}: {message} [seed {seed}, at {at:.6f} s of simulated time]", node=node)
        self.kind = kind
        self.seed = seed
        self.at = at


class InvariantBroken(RunFailed):
    """One of the promises was broken: see quicoll.sim.invariants."""
