"""What links are asked for between `gather` and `send_gathered` goes together, and in the same turn of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from endpoint_world import Watch
from link_pair import tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from endpoint_world import World

    from quicoll_transport.endpoint import Endpoint, Link
    from quicoll_transport.net.runs import DatagramRun

pytestmark = pytest.mark.loopback


def counted(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take down how many datagrams the endpoint gives its socket at a time."""
    sent: list[int] = []
    send = endpoint._io.send

    def noting(runs: Sequence[DatagramRun]) -> None:
        if runs:
            sent.append(sum(map(len, runs)))
        send(runs)

    monkeypatch.setattr(endpoint._io, "send", noting)
    return sent


def endpoint_of(world: World, link: Link) -> Endpoint:
    return next(each for each in world.endpoints if link in each.links.values())


@pytest.mark.interpreted
async def test_what_is_asked_for_while_gathering_is_one_datagram_in_this_turn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await world.pair()
    heard = Watch(b)
    endpoint = endpoint_of(world, a)
    sent = counted(endpoint, monkeypatch)
    endpoint.gather()
    for number in range(3):
        a.send_app(f"call {number}".encode())
        a.send_copy(tag(number), memoryview(bytes(4)))
    assert not sent
    endpoint.send_gathered()
    assert sent == [1]  # before any other turn of the loop
    await heard.until(lambda: len(heard.words) == 3)
    assert heard.words == [b"call 0", b"call 1", b"call 2"]
    before = len(sent)
    a.send_app(b"alone")  # and afterwards as ever: with the next turn
    assert len(sent) == before
    await heard.until(lambda: len(heard.words) == 4)


async def test_a_message_that_waits_already_is_told_of_before_what_is_gathered_goes(world: World) -> None:
    a, b = await world.pair()
    heard = Watch(b)
    a.send_copy(tag(1), memoryview(b"here"))
    a.send_app(b"said after it")
    await heard.until(lambda: bool(heard.words))
    endpoint = endpoint_of(world, b)
    memory, told = bytearray(4), []
    endpoint.gather()
    b.post(tag(1), memoryview(memory), lambda transfer: told.append(bytes(memory)))
    assert not told  # never from within `post`
    endpoint.send_gathered()
    assert told == [b"here"]


async def test_what_is_sent_when_all_is_heard_goes_before_any_other_turn(world: World) -> None:
    a, b = await world.pair()
    at_a, at_b = Watch(a), Watch(b)
    endpoint = endpoint_of(world, b)
    when: list[tuple[int, bool]] = []

    def heard() -> None:
        if len(at_b.words) > len(when):
            endpoint.gather()
            b.send_app(b"next %d" % len(when))
            endpoint.send_gathered()
            when.append((len(at_b.words), bool(endpoint._core.waiting)))

    endpoint.heard = heard
    for number in range(3):
        a.send_app(b"call %d" % number)
        await at_a.until(lambda number=number: len(at_a.words) > number)
    assert when == [(1, False), (2, False), (3, False)]
    assert at_a.words == [b"next 0", b"next 1", b"next 2"]


async def test_who_answers_at_once_is_not_asked_for_more_before_that_has_gone(world: World) -> None:
    a, b = await world.pair()
    at_a = Watch(a)
    endpoint = endpoint_of(world, b)
    told: list[str] = []

    def said(link: Link, data: bytes) -> None:
        told.append("said")
        link.later(lambda _: b.send_app(b"answer"), None)

    b.listen(said, lambda link: None)
    endpoint.heard = lambda: told.append("heard") if told and not at_a.words else None
    a.send_app(b"call")
    await at_a.until(lambda: bool(at_a.words))
    assert told == ["said"]
