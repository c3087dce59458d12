"""The links of a job as they are shown: rows, what is not known, how many fit, the same for programs."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from quicoll.cli.link_words import LINK_COLUMNS, link_facts, link_rows, silent_members, untold_links
from quicoll.cli.status_page import html_page
from quicoll.cli.status_words import Picture, facts_of, picture_of
from quicoll.cli.top import ShownLinks, drawn
from quicoll.membership.link_figures import LinkFigures, MeasuredLinks
from quicoll.membership.status import EventStatus, JobStatus, MemberStatus
from quicoll.membership.status_client import Glance

S = 10**9
GOOD: dict[str, Any] = {
    "rtt_ns": 1_240_000,
    "sent_rate": 12_300_000,
    "received_rate": 900,
    "sent_packets": 1000,
    "delivery_rate": 25_000_000,
    "bytes_in_flight": 65_536,
}


def node(rank: int, *links: LinkFigures, ago_ns: int = S, untold: int = 0, **fields: Any) -> MemberStatus:
    told = MeasuredLinks(window_ns=10 * S, links=links, untold=untold)
    whole = {"node": f"n{rank}", "state": "at work", "rank": rank, "links": told, "links_ns": ago_ns, **fields}
    return MemberStatus(**whole)


def status(*members: MemberStatus, **fields: Any) -> JobStatus:
    whole: dict[str, Any] = {"led_ns": 9 * S, "stage": "installed", "view_id": 2, "stage_ns": 9 * S, **fields}
    return JobStatus(world_size=max(1, len(members)), members=members, **whole)


def glance(*members: MemberStatus, **fields: Any) -> Glance:
    return Glance(job="train", coordinator="a:1", status=status(*members, **fields))


LOSSY = LinkFigures(peer=0, **{**GOOD, "lost_packets": 31})
THREE = (
    node(0, LinkFigures(peer=1, **GOOD), LinkFigures(peer=2, carrier="memory")),
    node(1, LOSSY, ago_ns=11 * S),
    node(2, LinkFigures(peer=0, carrier="lanes", doubted=True), untold=4),
)


def test_there_is_a_row_for_each_end_the_worst_first() -> None:
    rows = [row.cells for row in link_rows(status(*THREE))]
    unknown = ("not known",) * 4
    assert rows == [
        ("! n2", "n0", *unknown, "0", "not known", "0 B", "silent; by lanes"),
        ("n1", "n0", "12.3 MB/s", "900 B/s", "1.2 ms", "3.1 %", "0", "25.0 MB/s", "65.5 kB", "as of 11 s ago"),
        ("n0", "n1", "12.3 MB/s", "900 B/s", "1.2 ms", "0 %", "0", "25.0 MB/s", "65.5 kB", ""),
        ("n0", "n2", *unknown, "0", "not known", "0 B", "by memory"),
    ]
    assert {len(row) for row in rows} == {len(LINK_COLUMNS)}
    assert untold_links(status(*THREE)) == 4


def test_whose_links_are_not_known_is_said_while_a_view_of_several_is_installed() -> None:
    older = node(1, links=None, links_ns=None)
    assert silent_members(status(THREE[0], older)) == ["n1"]
    assert picture_of(glance(THREE[0], older), links=True).unknown == "not known: the links of n1"
    assert silent_members(status(older)) == []  # it has no links
    assert silent_members(status(THREE[0], older, stage="proposed")) == []
    gone = MemberStatus(node="x", state="lost")
    assert silent_members(status(*THREE, gone)) == []


def test_without_being_asked_for_links_a_picture_has_none() -> None:
    picture = picture_of(glance(*THREE))
    assert (picture.links, picture.untold, picture.unknown) == ((), 0, "")


def test_a_program_gets_all_figures_in_bytes_seconds_and_shares_with_both_nodes() -> None:
    facts = link_facts(status(*THREE))
    assert facts[1] == {
        "node": "n1",
        "rank": 1,
        "peer": "n0",
        "peer_rank": 0,
        "carrier": "link",
        "doubted": False,
        "rtt_s": 0.00124,
        "sent_rate": 12_300_000,
        "received_rate": 900,
        "loss": 0.031,
        "sent_packets": 1000,
        "lost_packets": 31,
        "resends": 0,
        "delivery_rate": 25_000_000,
        "bytes_in_flight": 65_536,
        "window_s": 10.0,
        "ago_s": 11.0,
    }
    assert [facts[3][name] for name in ("rtt_s", "sent_rate", "received_rate", "loss", "delivery_rate")] == [None] * 5
    whole = facts_of(glance(*THREE))
    assert (whole["links"], whole["untold_links"]) == (facts, 4)
    assert "links" not in whole["status"]["members"][0]
    unseen = facts_of(Glance(job="train", coordinator="a:1", trouble="no answer"))
    assert (unseen["links"], unseen["untold_links"]) == ([], 0)


def crowd(ranks: int) -> Picture:
    """All links of a view of so many ranks, rank 3 losing more with each of its peers."""
    members = []
    for rank in range(ranks):
        peers = [peer for peer in range(ranks) if peer != rank][:16]
        lost = {peer: 10 + peer if rank == 3 else 0 for peer in peers}
        members.append(node(rank, *(LinkFigures(peer=peer, **{**GOOD, "lost_packets": lost[peer]}) for peer in peers)))
    events = tuple(EventStatus(ago_ns=S, kind="held", said="event") for _ in range(20))
    return picture_of(glance(*members, events=events), links=True)


def on_terminal(picture: Picture, links: ShownLinks, *, width: int, height: int | None = None) -> list[str]:
    written = io.StringIO()
    console = Console(file=written, width=width, height=height or 100, highlight=False)
    console.print(drawn(picture, room=None if height is None else console.size, links=links))
    return written.getvalue().splitlines()


def links_in(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines if re.match(r"  (! )?n\d+ +n\d+ ", line)]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [24, 30, 50])
@pytest.mark.parametrize("ranks", [3, 5, 16, 64])
def test_links_keep_to_the_terminal_the_worst_first_and_leave_nodes_and_events_their_room(
    width: int, height: int, ranks: int
) -> None:
    picture = crowd(ranks)
    for shown in ShownLinks:
        lines = on_terminal(picture, shown, width=width, height=height)
        assert len(lines) < height
        assert max(map(len, lines)) <= width
        links = links_in(lines)
        assert bool(links) == (shown is not ShownLinks.NONE)
        assert sum(line.endswith("event") for line in lines) >= 3
        assert any(line.split()[:2] == ["0", "n0"] for line in lines)
        if links and ranks > 3:
            assert (links[0][0], links[0][-2 if width == 80 else -5]) == ("n3", "%" if width == 80 else "0")
            hidden = len(picture.links) + picture.untold - len(links)
            assert any(line.startswith(f"  and {hidden} more links") for line in lines) == bool(hidden)
    few, many = (
        len(links_in(on_terminal(picture, shown, width=width, height=height)))
        for shown in (ShownLinks.WORST, ShownLinks.ALL)
    )
    assert many >= few >= min(3, len(picture.links))


def test_without_a_screen_ten_are_shown_or_all_or_none() -> None:
    picture = crowd(16)
    assert len(picture.links) == 240
    assert len(links_in(on_terminal(picture, ShownLinks.WORST, width=80))) == 10
    assert "  and 230 more links" in on_terminal(picture, ShownLinks.WORST, width=80)
    assert len(links_in(on_terminal(picture, ShownLinks.ALL, width=80))) == 240
    none = on_terminal(picture, ShownLinks.NONE, width=80)
    assert links_in(none) == []
    assert not any("link" in line for line in none)


def test_a_wide_terminal_has_what_the_path_takes_and_what_is_in_flight_too() -> None:
    narrow, wide = (on_terminal(crowd(3), ShownLinks.WORST, width=width) for width in (80, 120))
    assert not any("PATH TAKES" in line for line in narrow)
    assert any("PATH TAKES  IN FLIGHT" in line for line in wide)
    assert any("25.0 MB/s    65.5 kB" in line for line in wide)


def test_what_a_node_is_named_is_shown_and_never_obeyed() -> None:
    evil = "\x1b[2J\N{RIGHT-TO-LEFT OVERRIDE}"
    rows = link_rows(status(node(0, LinkFigures(peer=1), node=f"a{evil}"), node(1, node=f"b{evil}")))
    assert all(cell.isprintable() for row in rows for cell in row.cells)
    assert picture_of(glance(node(0), node(1, node=evil + "b", links=None)), links=True).unknown.isprintable()


def test_the_page_has_the_worst_and_leads_to_all_and_escapes_names() -> None:
    picture = crowd(16)
    page = html_page(picture, every=1.0, most_links=20)
    table = page.partition('<table class="links">')[2].partition("</table>")[0]
    assert table.count("<tr") == 21
    assert '<a href="/links">and 220 more links</a>' in page
    assert html_page(picture, every=1.0).count("<td>n3</td>") + html_page(picture, every=1.0).count(">n3<") > 20
    assert "more links" not in html_page(picture, every=1.0)
    assert 'class="links"' not in html_page(picture, every=1.0, most_links=0)
    evil = picture_of(glance(node(0, LinkFigures(peer=1)), node(1, node="<script>"), node(2, links=None)), links=True)
    page = html_page(evil, every=1.0)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "not known: the links of n2" in page
