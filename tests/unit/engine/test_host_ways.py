"""Ways between ranks of one host in a larger view: what goes by memory, what by the link, and how each ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from fake_links import FakeLink, FakeTransfer

from quicoll.engine.host import MetHost
from quicoll.engine.host_ways import LEAST, HostWays, SpoiledInMemory
from quicoll.local.layout import PARCELS, SegmentLayout
from quicoll.local.parcels import NOTICE_BYTES, Notice
from quicoll_transport.errors import LinkLost, ProtocolError

if TYPE_CHECKING:
    from quicoll_transport.endpoint import Link

LAYOUT = SegmentLayout(2, 4096, 0, 2 * 4096)
RANKS = (3, 5)  # of the view
TAG = b"view and group and #"


def tag(index: int) -> bytes:
    return TAG + index.to_bytes(4, "big")


class Memory:
    """Segments in which all is seen at once: quicoll.local.layout.HostMemory."""

    layout = LAYOUT

    def __init__(self, rank: int, segments: list[bytearray]) -> None:
        self.rank, self.segments = rank, segments

    def load(self, rank: int, word: int) -> int:
        return int.from_bytes(self.segments[rank][8 * word : 8 * word + 8], "little")

    def store(self, word: int, value: int) -> None:
        self.segments[self.rank][8 * word : 8 * word + 8] = value.to_bytes(8, "little")

    def view(self, rank: int, at: int, size: int) -> Any:
        return np.frombuffer(self.segments[rank], np.uint8)[at : at + size]

    def make(self, at: int, size: int) -> None:
        """There is memory for all of it."""


class Wakes:
    """What a rank hears of, and that it was closed."""

    def __init__(self) -> None:
        self.others: list[Wakes] = []
        self.on_back: Callable[[], None] = lambda: None
        self.on_ended: Callable[[int], None] = lambda number: None
        self.closed = 0

    def listen(self, on_back: Callable[[], None], on_ended: Callable[[int], None]) -> None:
        self.on_back, self.on_ended = on_back, on_ended

    def ring(self, rank: int, *, front: bool) -> None:
        assert not front
        self.others[rank].on_back()

    def close(self) -> None:
        self.closed += 1


class Pair:
    """Two ranks of a host, and what they have sent and posted on their links."""

    def __init__(self) -> None:
        segments = [bytearray(LAYOUT.size) for _ in RANKS]
        self.wakes = [Wakes() for _ in RANKS]
        self.logs: list[list[FakeTransfer]] = [[], []]
        self.gone: list[int] = []
        self.told = asyncio.Event()
        self.ways, self.way = [], []
        self.segments = segments
        for number in range(2):
            self.wakes[number].others = self.wakes
            memory = Memory(number, segments)
            met = cast("MetHost", MetHost(cast("Any", memory), cast("Any", memory), cast("Any", self.wakes[number])))
            ways = HostWays(met, RANKS, loop=asyncio.get_running_loop())
            ways.attach(self.on_gone)
            peer = RANKS[1 - number]
            links = {peer: cast("Link", FakeLink(peer, self.logs[number])), 4: cast("Link", FakeLink(4, []))}
            self.ways.append(ways)
            found = ways.to(links)
            assert list(found) == [peer]  # the others have their links
            self.way.append(found[peer])
        self.done: list[Any] = []

    def on_gone(self, rank: int) -> None:
        self.gone.append(rank)
        self.told.set()

    def carry(self, sent: FakeTransfer) -> None:
        """What rank 0 has sent arrives where rank 1 has posted for it."""
        posted = next(each for each in self.logs[1] if each.kind == "post" and each.tag == sent.tag)
        posted.arrive(sent.data)


@pytest.fixture
async def pair() -> Pair:
    return Pair()


async def test_a_long_message_is_a_notice_on_the_link_and_its_sender_hears_when_it_is_taken(pair: Pair) -> None:
    given, target = bytearray(range(256)) * 20, bytearray(5120)
    sending = pair.way[0].send(tag(1), memoryview(given), pair.done.append)
    (notice,) = pair.logs[0]
    assert (notice.kind, len(notice.data)) == ("copy", NOTICE_BYTES)
    expected = bytes(given)
    given[:] = bytes(len(given))  # it was copied
    posted = pair.way[1].post(tag(1), memoryview(target), pair.done.append)
    assert not sending.done
    assert not posted.done
    pair.carry(notice)
    assert target == expected
    assert sending.done
    assert posted.done
    assert {id(each) for each in pair.done} == {id(sending), id(posted)}
    assert sending.error is posted.error is None


@pytest.mark.parametrize("nbytes", [LEAST - 1, LAYOUT.parcel + 1])
async def test_what_is_short_or_longer_than_a_parcel_goes_over_the_link_on_both_sides(pair: Pair, nbytes: int) -> None:
    pair.way[0].send(tag(1), memoryview(bytes(nbytes)), pair.done.append)
    pair.way[1].post(tag(1), memoryview(bytearray(nbytes)), pair.done.append)
    assert [(each.kind, len(each.data)) for each in pair.logs[0] + pair.logs[1]] == [("send", nbytes), ("post", nbytes)]


async def test_where_all_places_are_taken_the_payload_follows_over_the_link(pair: Pair) -> None:
    for index in range(PARCELS):
        pair.way[0].send(tag(index), memoryview(bytes(LEAST)), pair.done.append)
    given, target = bytes([7]) * LEAST, bytearray(LEAST)
    pair.way[0].send(tag(PARCELS), memoryview(given), pair.done.append)
    *_, notice, payload = pair.logs[0]
    assert (notice.tag, Notice.read(notice.data).turn) == (tag(PARCELS), 0)
    assert (payload.kind, payload.tag) == ("send", tag(PARCELS | 1 << 31))
    posted = pair.way[1].post(tag(PARCELS), memoryview(target), pair.done.append)
    pair.carry(notice)
    assert not posted.done
    pair.carry(payload)
    assert posted.done
    assert target == given
    # One is taken, whichever it is, and the next message has a place again.
    pair.way[1].post(tag(3), memoryview(bytearray(LEAST)), pair.done.append)
    pair.carry(pair.logs[0][3])
    pair.way[0].send(tag(99), memoryview(given), pair.done.append)
    assert pair.logs[0][-1].kind == "copy"
    assert Notice.read(pair.logs[0][-1].data).turn > 0


async def test_other_bytes_than_were_given_and_a_notice_that_cannot_be_fail_the_message(pair: Pair) -> None:
    pair.way[0].send(tag(1), memoryview(bytes(LEAST)), pair.done.append)
    first = pair.way[1].post(tag(1), memoryview(bytearray(LEAST)), pair.done.append)
    pair.segments[0][LAYOUT.parcel_at(0) + 9] ^= 1
    pair.carry(pair.logs[0][0])
    assert isinstance(first.error, SpoiledInMemory)
    second = pair.way[1].post(tag(2), memoryview(bytearray(LEAST)), pair.done.append)
    pair.logs[1][-1].arrive(Notice(PARCELS, 1, LEAST, 0).packed())
    assert isinstance(second.error, ProtocolError)
    assert pair.done == [first, second]  # and the sender of the first goes on waiting, until the view ends


async def test_a_message_that_is_taken_back_is_written_nowhere_and_nobody_hears_of_it(pair: Pair) -> None:
    pair.way[0].send(tag(1), memoryview(bytes([1]) * LEAST), pair.done.append)
    target = bytearray(LEAST)
    posted = pair.way[1].post(tag(1), memoryview(target), pair.done.append)
    posted.abort()
    assert pair.logs[1][0].aborted
    assert posted.done
    assert posted.aborted
    assert target == bytes(LEAST)
    assert pair.done == []


async def test_the_failure_of_the_link_is_that_of_the_message(pair: Pair) -> None:
    posted = pair.way[1].post(tag(1), memoryview(bytearray(LEAST)), pair.done.append)
    lost = LinkLost("silent", peer="worker-3")
    pair.logs[1][0].fail(lost)
    assert posted.error is lost
    assert pair.done == [posted]


async def test_after_the_end_nothing_is_given_and_all_is_closed_once(pair: Pair) -> None:
    pair.way[0].send(tag(1), memoryview(bytes(LEAST)), pair.done.append)
    posted = pair.way[1].post(tag(1), memoryview(bytearray(LEAST)), pair.done.append)
    before = bytes(pair.segments[1])
    for ways in pair.ways:
        ways.end()
        ways.end()
    pair.carry(pair.logs[0][0])
    assert posted.done
    assert bytes(pair.segments[1]) == before
    assert [each.closed for each in pair.wakes] == [1, 1]


async def test_of_a_process_that_has_ended_is_told_a_moment_later_by_its_rank_in_the_view(pair: Pair) -> None:
    pair.wakes[0].on_ended(1)
    assert pair.gone == []
    await pair.told.wait()
    assert pair.gone == [5]
    pair.wakes[0].on_ended(1)
    pair.ways[0].end()
    pair.wakes[0].on_ended(1)  # nobody is told any more
    assert pair.gone == [5]
