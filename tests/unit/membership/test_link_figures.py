"""What a member says of its links: bounds of the message, which link is worse, how often it is said."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from quicoll.errors import LocalError, PeerError
from quicoll.membership.link_figures import MOST_LINKS, LinkFigures, MeasuredLinks, badness, told_every_ns
from quicoll.membership.messages import Measured, decode, encode
from quicoll.membership.view import MAX_INT, MAX_MEMBERS

LINK: list[Any] = [1, "link", False, 5, 6, 7, 8, 0, 0, None, 0]


def said(links: Any = (LINK,), **fields: Any) -> bytes:
    figures = {"window_ns": 10**10, "links": links, "untold": 0, **fields.pop("figures", {})}
    return msgspec.msgpack.encode({"type": "measured", "view_id": 3, "links": figures, **fields})


def with_field(place: int, value: Any) -> list[Any]:
    return [*LINK[:place], value, *LINK[place + 1 :]]


def test_what_is_said_is_heard() -> None:
    links = tuple(
        LinkFigures(
            peer=peer,
            carrier="lanes",
            doubted=True,
            rtt_ns=MAX_INT,
            sent_rate=MAX_INT,
            received_rate=MAX_INT,
            sent_packets=MAX_INT,
            lost_packets=MAX_INT,
            resends=MAX_INT,
            delivery_rate=MAX_INT,
            bytes_in_flight=MAX_INT,
        )
        for peer in range(MOST_LINKS)
    )
    message = Measured(view_id=3, links=MeasuredLinks(window_ns=1, links=links, untold=MAX_INT))
    data = encode(message)
    assert decode(data, sender="member") == message
    assert len(data) < 1600  # the largest of all


@pytest.mark.parametrize(
    "data",
    [
        said([LINK] * (MOST_LINKS + 1)),
        said([LINK] * 100_000),
        said([with_field(0, MAX_MEMBERS)]),
        said([with_field(0, -1)]),
        said([with_field(0, None)]),
        said([with_field(1, "smoke")]),
        said([with_field(2, 1)]),
        *(said([with_field(place, MAX_INT + 1)]) for place in range(3, 11)),
        *(said([with_field(place, -1)]) for place in range(3, 11)),
        said([with_field(4, 0.5)]),
        said([with_field(4, "x" * 100_000)]),
        said([[*LINK, 1]]),
        said([[]]),
        said({}),
        said(figures={"untold": -1}),
        said(figures={"window_ns": -1}),
        said(figures={"more": 1}),
        said(view_id=-1),
        said(more=1),
    ],
)
def test_what_breaks_a_bound_is_refused(data: bytes) -> None:
    decode(said(), sender="member")
    with pytest.raises(PeerError, match="malformed membership message from a member"):
        decode(data, sender="member", node="evil")


def test_random_values_in_the_place_of_figures_are_read_or_refused_and_nothing_else() -> None:
    rng = random.Random(5)
    values = [None, True, -1, 0, 1, 2**31, MAX_INT, MAX_INT + 1, 2**64 - 1, 1.5, float("nan"), "", "link", b"x", [], {}]
    taken = 0
    for _ in range(3000):
        link = [value if rng.random() < 0.8 else rng.choice(values) for value in LINK]
        try:
            found = decode(said([link] * rng.randrange(20)), sender="member")
        except PeerError:
            continue
        assert isinstance(found, Measured)
        assert sorted(found.links.links, key=badness) is not None
        assert all(each.loss is None or 0.0 <= each.loss <= 1.0 for each in found.links.links)
        taken += 1
    assert 100 < taken < 2900


def test_more_links_than_may_be_told_of_are_an_error_of_who_says_it() -> None:
    links = tuple(LinkFigures(peer=peer) for peer in range(MOST_LINKS + 1))
    with pytest.raises(LocalError, match="not a valid Measured"):
        encode(Measured(view_id=1, links=MeasuredLinks(window_ns=1, links=links)))


def test_worse_is_who_is_silent_then_who_loses_more_then_who_sends_again_then_who_is_far() -> None:
    best_first = [
        LinkFigures(peer=1),
        LinkFigures(peer=2, rtt_ns=10**9, sent_packets=10**6, lost_packets=400),  # not half a thousandth
        LinkFigures(peer=3, resends=1),
        LinkFigures(peer=4, resends=9),
        LinkFigures(peer=5, sent_packets=10, lost_packets=1),  # as one of a thousand, not of ten
        LinkFigures(peer=6, sent_packets=10**5, lost_packets=1000),
        LinkFigures(peer=7, sent_packets=40, lost_packets=20),
        LinkFigures(peer=8, sent_packets=0, lost_packets=MAX_INT),
        LinkFigures(peer=9, doubted=True),
    ]
    shuffled = random.Random(1).sample(best_first, len(best_first))
    assert sorted(shuffled, key=badness) == best_first


def test_of_no_packets_no_loss_is_known() -> None:
    assert LinkFigures(peer=1).loss is None
    assert LinkFigures(peer=1, sent_packets=200, lost_packets=5).loss == 0.025
    assert LinkFigures(peer=1, sent_packets=1, lost_packets=5).loss == 1.0


@pytest.mark.parametrize("world_size", [2, 3, 16, 100, 101, 256, MAX_MEMBERS])
def test_a_coordinator_hears_fifty_words_a_second_at_most(world_size: int) -> None:
    assert world_size / (told_every_ns(world_size) / 1e9) <= 50
    assert told_every_ns(world_size) >= 2 * 10**9
