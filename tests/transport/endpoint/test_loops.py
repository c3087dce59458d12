"""A loop of ours asks for the time itself; one with another clock keeps that."""

from __future__ import annotations

import asyncio
import time

from quicoll_transport.endpoint.loops import with_own_clock


class Elsewhere(asyncio.SelectorEventLoop):
    """On a clock of its own."""

    def time(self) -> float:
        return 7.0


def test_a_loop_of_ours_has_the_systems_clock_and_its_timers_keep_to_it() -> None:
    loop = with_own_clock(asyncio.SelectorEventLoop())
    try:
        assert loop.time is time.monotonic
        over = loop.create_future()
        loop.call_at(time.monotonic() + 1e-6, over.set_result, "due")
        assert loop.run_until_complete(over) == "due"
    finally:
        loop.close()


def test_a_loop_with_another_clock_keeps_it() -> None:
    loop = with_own_clock(Elsewhere())
    try:
        assert loop.time() == 7.0
    finally:
        loop.close()
