"""Which bytes each packet of a run carried."""

from __future__ import annotations

from itertools import pairwise

import pytest

from quicoll_transport.quic.records import Carried, SentStripe
from quicoll_transport.quic.recovery import PacketRun
from quicoll_transport.quic.streams import SendStream


def made(count: int, *, start: int = 1000, step: int = 100, last: int = 30, fin: bool = True) -> PacketRun[Carried]:
    stream = SendStream(2, 1 << 20)
    stripe = SentStripe(stream, start, step, start + (count - 1) * step + last, fin)
    return PacketRun(50, 50 + count, 120, 70, 0, (stripe,))


def part(run: PacketRun[Carried], first: int, end: int) -> tuple[int, int, bool]:
    (stripe,) = run.items
    assert isinstance(stripe, SentStripe)
    return stripe.part(run, first, end)


def test_packets_of_a_run_carry_what_lies_between_their_places() -> None:
    run = made(5)
    assert part(run, 50, 51) == (1000, 1100, False)
    assert part(run, 52, 54) == (1200, 1400, False)
    assert part(run, 54, 55) == (1400, 1430, True)
    assert part(run, 50, 55) == (1000, 1430, True)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_parts_of_a_run_are_the_run_however_it_is_divided(count: int) -> None:
    run = made(count)
    for cut in range(51, 50 + count):
        bounds = [50, cut, 50 + count]
        parts = [part(run, first, end) for first, end in pairwise(bounds)]
        assert parts[0][1] == parts[1][0]
        assert (parts[0][0], parts[-1][1]) == part(run, 50, 50 + count)[:2]
        assert [fin for _, _, fin in parts] == [False, True], "the end is said by the last packet alone"


def test_a_single_packet_has_all_whatever_its_step() -> None:
    """Packets that are not made as a run have a step of 0."""
    run: PacketRun[Carried] = PacketRun(7, 8, 120, 0, 0, (SentStripe(SendStream(2, 100), 10, 0, 60, False),))
    assert part(run, 7, 8) == (10, 60, False)
