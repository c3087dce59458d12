"""Announcements for a view that is not at work yet: whose are kept, and how many."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterable

import pytest

from quicoll.engine.early import MAX_EARLY_BYTES, EarlyAnnouncements
from quicoll.engine.messages import Announce, decode_message, encode_message, size_in_memory
from quicoll.errors import PeerError
from quicoll.membership.view import Member, View

LINK = {"a": 1, "b": 2, "x": 3}


def view(view_id: int, nodes: str = "abc") -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate(nodes))
    return View(view_id=view_id, members=members, seed=0, committed_step=0, committed_view=0)


def word(view_id: int, seq: int = 0, signature: str = "barrier") -> Announce:
    return Announce(view_id, 0, seq, signature)


def flood(early: EarlyAnnouncements, messages: Iterable[bytes]) -> None:
    """All of them come from "a"."""
    for data in messages:
        message = decode_message(data, node="a")
        assert isinstance(message, Announce)
        early.keep(1, "a", message)


def test_what_members_of_the_view_that_is_formed_announce_is_there_when_it_goes_to_work() -> None:
    early = EarlyAnnouncements()
    early.expect(view(7))
    early.keep(2, "b", word(7, 0))
    early.keep(1, "a", word(7, 0))
    early.keep(2, "b", word(7, 1))
    assert early.take(view(7)) == [(1, word(7, 0)), (1, word(7, 1)), (0, word(7, 0))]
    assert early.take(view(7)) == []
    assert early.size == 0


@pytest.mark.parametrize(("node", "view_id"), [("a", 6), ("a", 8), ("a", 1 << 60), ("x", 7)])
def test_nothing_is_kept_for_another_view_or_from_another_node(node: str, view_id: int) -> None:
    early = EarlyAnnouncements()
    early.keep(LINK[node], node, word(view_id))  # none is formed
    early.expect(view(7))
    early.keep(LINK[node], node, word(view_id))
    assert early.size == 0


def test_what_was_kept_for_a_view_that_is_not_installed_is_forgotten_with_the_next_proposal() -> None:
    early = EarlyAnnouncements()
    early.expect(view(7))
    early.keep(1, "a", word(7))
    early.expect(view(8))
    assert early.size == 0
    early.keep(1, "a", word(8))
    assert early.take(view(9)) == []


def test_what_a_peer_may_have_kept_is_bounded_in_bytes_and_goes_with_its_link() -> None:
    early = EarlyAnnouncements()
    early.expect(view(7))
    data = encode_message(Announce(7, 0, 1 << 40, "s" * 4096, tuple(range(10**6, 10**6 + 1024)), (10**9,) * 2048))
    early.keep(2, "b", word(7))
    tracemalloc.start()
    with pytest.raises(PeerError, match=f"more than {MAX_EARLY_BYTES} bytes ahead"):
        flood(early, itertools.repeat(data, 100))  # thrice the bound
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.1 * MAX_EARLY_BYTES
    early.drop(1)
    assert early.size == size_in_memory(word(7))
    assert early.take(view(7)) == [(1, word(7))]  # nobody else's is gone


def test_many_small_ones_are_no_more_than_they_are_counted() -> None:
    early = EarlyAnnouncements()
    early.expect(view(7))
    tracemalloc.start()
    with pytest.raises(PeerError, match="bytes ahead"):
        flood(early, (encode_message(word(7, 10**6 + seq)) for seq in range(100_000)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.1 * MAX_EARLY_BYTES
    assert len(early.take(view(7))) > 5000
