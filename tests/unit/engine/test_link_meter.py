"""What a rank says of its links: rates and counts of the last seconds, the worst links, when it is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quicoll.engine.link_meter import SAMPLES, LinkMeter, SeenLink
from quicoll.membership.link_figures import MOST_LINKS
from quicoll.membership.messages import encode

S = 10**9


def link(number: int = 1, **figures: Any) -> SeenLink:
    told = {
        "link": number,
        "connections": 1,
        "suspect": False,
        "rtt_ns": 3_000_000,
        "bytes_sent": 0,
        "bytes_received": 0,
        "resends": 0,
        "sent_packets": 0,
        "lost_packets": 0,
        "spurious_packets": 0,
        "delivery_rate": None,
        "bytes_in_flight": 0,
        **figures,
    }
    snapshot: Any = SimpleNamespace(**told)
    return SeenLink(snapshot)


def begun(seen: dict[int, SeenLink], *, rank: int = 0, world_size: int = 2) -> LinkMeter:
    return LinkMeter(4, rank=rank, world_size=world_size, seen=seen, now_ns=0)


def test_rates_and_counts_are_those_since_the_view_began_and_later_of_the_last_times() -> None:
    meter = begun({1: link(bytes_sent=1000, sent_packets=10, resends=5)})
    message = meter.measure(
        {1: link(bytes_sent=5000, bytes_received=800, sent_packets=110, lost_packets=4, spurious_packets=1, resends=6)},
        now_ns=2 * S,
    )
    (figures,) = message.links.links
    assert (message.view_id, message.links.window_ns, message.links.untold) == (4, 2 * S, 0)
    assert (figures.peer, figures.sent_rate, figures.received_rate) == (1, 2000, 400)
    assert (figures.sent_packets, figures.lost_packets, figures.loss, figures.resends) == (100, 3, 0.03, 1)
    assert (figures.rtt_ns, figures.carrier, figures.delivery_rate) == (3_000_000, "link", None)
    same = link(bytes_sent=5000, bytes_received=800, sent_packets=110, lost_packets=4, spurious_packets=1, resends=6)
    for turn in range(2, SAMPLES + 1):
        quiet = meter.measure({1: same}, now_ns=2 * turn * S)
        assert quiet.links.links[0].resends == 1  # it is still within the window
    quiet = meter.measure({1: same}, now_ns=2 * (SAMPLES + 1) * S)
    (figures,) = quiet.links.links
    assert quiet.links.window_ns == 2 * SAMPLES * S
    assert (figures.sent_rate, figures.sent_packets, figures.resends, figures.loss) == (0, 0, 0, None)


def test_a_new_link_and_a_new_connection_begin_at_nothing_and_no_count_is_below_it() -> None:
    meter = begun({1: link(1, bytes_sent=9000, sent_packets=90, lost_packets=9, resends=9)})
    (figures,) = meter.measure(
        {1: link(1, connections=2, bytes_sent=9500, sent_packets=20, lost_packets=2, resends=10)}, now_ns=S
    ).links.links
    assert (figures.sent_rate, figures.sent_packets, figures.lost_packets, figures.resends) == (500, 20, 2, 1)
    (figures,) = meter.measure({1: link(2, bytes_sent=600, sent_packets=5, resends=2)}, now_ns=2 * S).links.links
    assert (figures.sent_rate, figures.sent_packets, figures.resends) == (300, 5, 2)
    arrived = link(2, bytes_sent=600, sent_packets=6, lost_packets=4, spurious_packets=4)
    meter = begun({1: link(2, bytes_sent=600, sent_packets=6, lost_packets=4)})
    assert meter.measure({1: arrived}, now_ns=S).links.links[0].lost_packets == 0


def test_what_lanes_carry_counts_and_what_carries_is_said() -> None:
    quiet = link()
    meter = begun({1: quiet._replace(carrier="lanes"), 2: quiet._replace(carrier="memory")}, world_size=3)
    seen = {
        1: quiet._replace(carrier="lanes", beside_sent=4000, beside_received=2000),
        2: quiet._replace(carrier="memory"),
    }
    found = {each.peer: each for each in meter.measure(seen, now_ns=2 * S).links.links}
    assert (found[1].carrier, found[1].sent_rate, found[1].received_rate) == ("lanes", 2000, 1000)
    assert (found[2].carrier, found[2].sent_rate) == ("memory", 0)


def test_of_many_links_the_worst_are_told_of_and_how_many_more_there_are() -> None:
    world = 40
    meter = begun({peer: link() for peer in range(1, world)}, world_size=world)
    seen = {peer: link(resends=peer % 20, suspect=peer == 21) for peer in range(1, world)}
    message = meter.measure(seen, now_ns=2 * S)
    told = message.links.links
    assert (len(told), message.links.untold) == (MOST_LINKS, world - 1 - MOST_LINKS)
    assert [each.peer for each in told[:4]] == [21, 19, 39, 18]
    encode(message)  # within its bounds


@pytest.mark.parametrize("world_size", [2, 3, 100, 1024])
def test_ranks_speak_in_turn_each_as_often_as_its_world_allows(world_size: int) -> None:
    meters = [begun({}, rank=rank, world_size=world_size) for rank in range(world_size)]
    every = max(2 * S, world_size * S // 50)
    firsts = [meter.due_ns for meter in meters]
    assert every <= firsts[0] == min(firsts)
    assert max(firsts) < 2 * every
    assert len({*firsts}) == world_size
    last = meters[-1]
    for _ in range(5):
        due = last.due_ns
        last.measure({}, now_ns=due + 1000)
        assert last.due_ns == due + every
    last.measure({}, now_ns=last.due_ns + 100 * every)  # it slept
    assert last.due_ns > firsts[-1] + 100 * every
