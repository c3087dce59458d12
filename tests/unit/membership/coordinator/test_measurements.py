"""What a coordinator keeps of its members' links: the last word of each, of the installed view, within bounds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from coordinator_bench import SECOND, Bench, letters

from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.measurements import Measurements
from quicoll.membership.link_figures import MOST_LINKS, LinkFigures, MeasuredLinks, badness
from quicoll.membership.operators import decode_answer
from quicoll.membership.status import MAX_STATUS, MAX_STATUS_LINKS, fitting
from quicoll.membership.view import MAX_INT, MAX_MEMBERS, Member, View

if TYPE_CHECKING:
    from quicoll.membership.status import MemberStatus


def told(*links: LinkFigures, **fields: Any) -> MeasuredLinks:
    return MeasuredLinks(**{"window_ns": SECOND, "links": links, **fields})


def say(bench: Bench, node: str, *links: LinkFigures, view_id: int | None = None, **fields: Any) -> None:
    bench.say(node, m.Measured(view_id=bench.view_id if view_id is None else view_id, links=told(*links, **fields)))


def member(bench: Bench, node: str) -> MemberStatus:
    status = bench.core.status(now_ns=bench.now, links=True)
    (found,) = (each for each in status.members if each.node == node)
    return found


def view_of(world_size: int, view_id: int = 1) -> View:
    members = tuple(Member(rank=rank, node=f"n{rank}", incarnation=1) for rank in range(world_size))
    return View(view_id=view_id, members=members, seed=1, committed_step=0, committed_view=0)


def test_the_last_word_of_each_member_is_kept_with_its_age_and_told_only_to_who_asks_for_it() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    assert member(bench, "a").links is None
    say(bench, "a", LinkFigures(peer=1, rtt_ns=5))
    bench.now += 2 * SECOND
    say(bench, "b", LinkFigures(peer=0))
    say(bench, "a", LinkFigures(peer=1, rtt_ns=6), LinkFigures(peer=2))
    bench.now += SECOND // 2
    seen = member(bench, "a")
    assert seen.links == told(LinkFigures(peer=1, rtt_ns=6), LinkFigures(peer=2))
    assert (seen.links_ns, member(bench, "b").links_ns) == (SECOND // 2, SECOND // 2)
    assert member(bench, "c").links is None
    assert all(each.links is None for each in bench.core.status(now_ns=bench.now).members)


def test_it_is_of_the_installed_view_and_gone_with_it() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    old = bench.view_id
    say(bench, "a", LinkFigures(peer=1))
    say(bench, "b", LinkFigures(peer=0))
    bench.lose("c")
    bench.advance(SECOND)
    assert all(each.links is None for each in bench.core.status(now_ns=bench.now, links=True).members)
    bench.confirm()
    assert bench.view_id > old
    assert member(bench, "a").links is None
    say(bench, "a", LinkFigures(peer=1), view_id=old)  # it did not know of the end yet
    assert member(bench, "a").links is None
    say(bench, "a", LinkFigures(peer=1))
    assert member(bench, "a").links is not None
    assert member(bench, "b").links is None  # what it said was of the view before


def test_nothing_follows_from_it() -> None:
    heard, silent = Bench(3), Bench(3)
    for bench in (heard, silent):
        bench.installed(*"abc")
        bench.begin("a")
        if bench is heard:
            for node in "abc":
                say(bench, node, LinkFigures(peer=0, doubted=True, sent_packets=1, lost_packets=1))
        bench.advance(20 * SECOND)
    assert heard.carried_out == silent.carried_out


def test_who_speaks_of_a_view_that_cannot_be_its_own_is_put_out_as_with_any_message() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    say(bench, "b", LinkFigures(peer=0), view_id=99)
    assert [each.node for each in bench.carried_out if isinstance(each, a.DropLink)] == ["b"]


def test_what_cannot_be_is_left_out_and_the_rest_counts() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    say(
        bench,
        "b",
        LinkFigures(peer=1),  # itself
        LinkFigures(peer=3),
        LinkFigures(peer=MAX_MEMBERS - 1),
        *(LinkFigures(peer=2, resends=number) for number in range(10)),
        untold=MAX_INT,
    )
    links = member(bench, "b").links
    assert links == told(LinkFigures(peer=2, resends=9), untold=1)  # there is one other link


def test_links_are_in_order_whatever_order_they_are_told_in() -> None:
    bench = Bench(16)
    bench.installed(*letters(16))
    rng = random.Random(3)
    links = [LinkFigures(peer=peer, resends=rng.randrange(5), rtt_ns=peer) for peer in range(1, 16)]
    rng.shuffle(links)
    say(bench, "a", *links)
    seen = member(bench, "a").links
    assert seen is not None
    assert list(seen.links) == sorted(links, key=badness, reverse=True)


def test_a_member_that_tells_the_worst_of_itself_takes_no_place_of_another() -> None:
    world = 200
    view, kept = view_of(world), Measurements()
    for rank in range(world):
        evil = rank == 7
        others = [peer for peer in range(world) if peer != rank][:MOST_LINKS]
        links = [LinkFigures(peer=peer, doubted=evil, resends=MAX_INT if evil else peer) for peer in others]
        kept.take(view, f"n{rank}", told(*links, untold=world - 1 - MOST_LINKS), 0)
    found = kept.of(view, SECOND)
    shares = {len(links.links) for links, _ in found.values()}
    assert shares == {MAX_STATUS_LINKS // world}
    assert all(links.untold + len(links.links) == world - 1 for links, _ in found.values())
    assert found["n0"][0].links[0].peer == MOST_LINKS  # its worst


def test_the_largest_view_fits_a_status_whatever_its_members_say() -> None:
    bench = Bench(MAX_MEMBERS)
    nodes = [f"{number:04}".ljust(64, "x") for number in range(MAX_MEMBERS)]
    bench.installed(*nodes)
    for rank, node in enumerate(nodes):
        links = [
            LinkFigures(
                peer=(rank + 1 + offset) % MAX_MEMBERS,
                rtt_ns=MAX_INT,
                sent_rate=MAX_INT,
                received_rate=MAX_INT,
                sent_packets=MAX_INT,
                lost_packets=MAX_INT,
                resends=MAX_INT,
                delivery_rate=MAX_INT,
                bytes_in_flight=MAX_INT,
            )
            for offset in range(MOST_LINKS)
        ]
        say(bench, node, *links, window_ns=MAX_INT, untold=MAX_INT)
    status = bench.core.status(now_ns=bench.now, links=True)
    assert sum(len(each.links.links) for each in status.members if each.links is not None) == MAX_STATUS_LINKS
    data = fitting(status)
    assert len(data) <= MAX_STATUS
    found: Any = decode_answer(data, node="coordinator")
    assert len(found.members) == MAX_MEMBERS
    less: Any = decode_answer(fitting(status, most=len(data) - 1), node="coordinator")
    assert len(less.members) == MAX_MEMBERS
    assert {each.links for each in less.members} == {None}  # they go first


def test_whatever_a_member_says_within_the_message_s_bounds_the_status_can_be_read() -> None:
    bench = Bench(4)
    bench.installed(*"abcd")
    rng = random.Random(11)
    sizes = [0, 1, 2**31, MAX_INT - 1, MAX_INT]
    for _ in range(300):
        links = [
            LinkFigures(
                peer=rng.randrange(MAX_MEMBERS) if rng.random() < 0.2 else rng.randrange(4),
                carrier=rng.choice(["link", "lanes", "memory"]),
                doubted=rng.random() < 0.5,
                rtt_ns=rng.choice([None, *sizes]),
                sent_rate=rng.choice([None, *sizes]),
                received_rate=rng.choice([None, *sizes]),
                sent_packets=rng.choice(sizes),
                lost_packets=rng.choice(sizes),
                resends=rng.choice(sizes),
                delivery_rate=rng.choice([None, *sizes]),
                bytes_in_flight=rng.choice(sizes),
            )
            for _ in range(rng.randrange(MOST_LINKS + 1))
        ]
        message = m.Measured(view_id=1, links=told(*links, untold=rng.choice(sizes), window_ns=rng.choice(sizes)))
        heard = m.decode(m.encode(message), sender="member")
        assert isinstance(heard, m.Measured)
        bench.say(rng.choice("abcd"), heard)
        decode_answer(fitting(bench.core.status(now_ns=bench.now, links=True)), node="coordinator")
    assert bench.core.view is not None
