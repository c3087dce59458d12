"""A member's seat in one view."""

from __future__ import annotations

from typing import Any

from quicoll.membership.member.actions import Deactivate, Decided
from quicoll.membership.member.local_view import LocalView, ViewEnd
from quicoll.membership.view import Member, View


def view() -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate("abc"))
    return View(view_id=3, members=members, seed=7, committed_step=4, committed_view=0)


def voted(ok: bool) -> LocalView:
    local = LocalView(view(), "a")
    local.begin(5, now_ns=0)
    local.cast_vote(5, ok=ok, digest=b"d", reason="", culprit="", groups=())
    return local


def end(local: LocalView) -> tuple[Any, ...]:
    return local.end(ViewEnd("why"))


def test_each_lost_peer_is_news_once_and_neither_this_node_nor_a_stranger_is() -> None:
    local = LocalView(view(), "a")
    assert [node for node in "abcx" if local.is_new_loss(node)] == ["b", "c"]
    assert local.withdraw("b", "silence").unreachable == ("b",)
    assert local.lost("c", "silence").lost == (("c", "silence"),)
    assert [node for node in "abcx" if local.is_new_loss(node)] == []


def test_no_step_is_free_while_one_is_open_nor_after_a_failure() -> None:
    local = LocalView(view(), "a")
    assert local.free
    local.begin(5, now_ns=0)
    assert not local.free
    local.decided()
    assert local.free
    local.fail("why", culprit="b", kind="failed", blamed=())
    assert not local.free


def test_only_a_vote_with_ok_leaves_a_doubt_and_takes_its_step_out_of_the_seat() -> None:
    begun = LocalView(view(), "a")
    begun.begin(5, now_ns=0)
    assert begun.step_in_doubt() is None
    assert voted(ok=False).step_in_doubt() is None
    local = voted(ok=True)
    assert local.step_in_doubt() == (3, 5)
    assert local.step_in_doubt() is None
    assert [type(action) for action in end(local)] == [Deactivate]


def test_the_end_of_a_view_comes_before_the_news_of_its_step() -> None:
    assert [type(action) for action in end(voted(ok=True))] == [Deactivate, Decided]
    assert [type(action) for action in end(LocalView(view(), "a"))] == [Deactivate]
