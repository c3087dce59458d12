"""A BBR controller that is told of whole round trips, one by one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from acknowledged import acknowledged
from recovery_link import MS

from quicoll_transport.quic.bbr import Bbr, BbrState
from quicoll_transport.quic.controller import LossSample

if TYPE_CHECKING:
    from quicoll_transport.quic.arrival_line import FairRate

__all__ = ["CONTENTS", "RATE", "RTT", "SIZE", "Driven", "S", "cruising"]

SIZE = 1452
RATE, RTT = 12_500_000, 40 * MS
CONTENTS = RATE * RTT // 10**9
S = 10**9


class Driven:
    """See the module's head. states: those that it was in, in order."""

    def __init__(self, seed: int = 1) -> None:
        self.bbr = Bbr(SIZE, random.Random(seed).randbytes)
        self.now = self.delivered = 0
        self.states = [self.bbr.state]

    def lose(self, nbytes: int, *, flight: int = CONTENTS, begins: bool = True) -> None:
        self.bbr.on_lost(LossSample(self.now, nbytes, flight, self.now - RTT, begins))
        self._look()

    def round(
        self,
        rate: int = RATE,
        *,
        rtt: int = RTT,
        lost: int = 0,
        limited: bool = False,
        flight: int | None = None,
        fair_rate: FairRate | None = None,
    ) -> None:
        """The answer to a round trip in which the path delivered at `rate`; `flight`: what is in flight after it."""
        self.now += rtt
        acked = max(rate * rtt // S - lost, SIZE)
        flight = acked if flight is None else flight
        if lost:
            self.lose(lost, flight=acked + lost)
        before, self.delivered = self.delivered, self.delivered + acked
        self.bbr.on_acked(
            acknowledged(
                self.now,
                acked,
                rtt_ns=rtt,
                in_flight=flight,
                delivered=self.delivered,
                prior_delivered=before,
                rate=rate,
                app_limited=limited,
                fair_rate=fair_rate,
            )
        )
        self._look()

    def _look(self) -> None:
        if self.states[-1] is not self.bbr.state:
            self.states.append(self.bbr.state)

    def until(self, state: BbrState, *, rounds: int = 200, rate: int = RATE, rtt: int = RTT) -> None:
        """Go on, each round as the one before, until a state is there."""
        for _ in range(rounds):
            if self.bbr.state is state:
                return
            self.round(rate, rtt=rtt)
        raise AssertionError(f"{state} did not come; {self.states}")

    def paced(self) -> int:
        rate = self.bbr.rate(RTT)
        assert rate is not None
        return rate


def cruising() -> Driven:
    driven = Driven()
    driven.until(BbrState.CRUISE)
    return driven
