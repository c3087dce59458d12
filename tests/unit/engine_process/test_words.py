"""Words come as they were told: errors with all that they say, decisions, figures of links, questions and answers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import fields
from typing import Any

import pytest

from quicoll.engine.decisions import Decision
from quicoll.engine_process.starting import nice_of
from quicoll.engine_process.words import (
    ASKED,
    TOLD,
    BeginCall,
    OpenEngine,
    ViewFound,
    body_of,
    decision_of,
    decision_row,
    decode_program_word,
    encode_word,
    error_of,
    error_word,
    read_body,
    snapshot_of,
    snapshot_row,
)
from quicoll.errors import Corrupted, LocalError, Mismatch, Partitioned, PeerError, QuicollError
from quicoll.lanes.orders import Shown
from quicoll.membership.member.actions import FreeToLeave, JobOver
from quicoll.membership.view import Member, View
from quicoll_transport.endpoint import LinkState
from quicoll_transport.events import LinkSnapshot


def noted(error: QuicollError) -> QuicollError:
    error.add_note("where b was 1.0 s before this error:\nmain: wait (x.py:3)")
    error.__cause__ = LocalError("of this", usable=False)
    return error


@pytest.mark.parametrize(
    "error",
    [
        LocalError("a rule"),
        LocalError("gone", usable=False),
        Mismatch("they differ", rank=1, node="b", view=3, step=4, op="all_reduce#3@0:1"),
        noted(PeerError("lost: silent", rank=1, node="b", view=3, lost=("b", "c"))),
        Corrupted("bits", view=3, odd=(1, 2)),
        Corrupted("bits", view=3),
        Partitioned("no view", node="a"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_on_the_other_side(error: QuicollError) -> None:
    found = error_of(error_word(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    names = [*vars(error), "usable"]
    assert [getattr(found, name) for name in names] == [getattr(error, name) for name in names]
    assert str(found.__cause__) == str(error.__cause__)
    assert type(found.__cause__) is type(error.__cause__)


def test_what_is_cancelled_is_so_on_the_other_side_and_what_is_not_ours_is_told_with_its_class() -> None:
    assert isinstance(error_of(error_word(asyncio.CancelledError())), asyncio.CancelledError)
    found = error_of(error_word(KeyError("x")))
    assert isinstance(found, LocalError)
    assert found.message == "KeyError: 'x'"
    assert not found.usable


def test_a_decision_and_the_figures_of_a_link_come_as_they_are() -> None:
    decision = Decision(7, False, "lost", ("b",), "b", "lost")
    assert decision_of(read_body("= decision", body_of(decision_row(decision)))) == decision
    given: dict[str, Any] = {each.name: number for number, each in enumerate(fields(LinkSnapshot))}
    given |= {"state": LinkState.UP, "peer": "worker/b", "cause": "", "suspect": True, "rtt_ns": None}
    link = LinkSnapshot(**given)
    (row,) = read_body("= links", body_of([snapshot_row(link)]))
    assert snapshot_of(row) == link


def test_a_view_and_that_there_is_none_come_as_they_are() -> None:
    members = tuple(
        Member(rank=rank, node=node, incarnation=3, addresses=(("h", 1),)) for rank, node in enumerate("ab")
    )
    view = View(view_id=3, members=members, seed=9, committed_step=4, committed_view=2)
    for found in (ViewFound(view=view), ViewFound(over=JobOver(8)), ViewFound(free=FreeToLeave())):
        assert read_body("= wait_view", body_of(found)) == found


def test_whatever_is_asked_or_told_has_a_form_and_a_wrong_one_is_refused() -> None:
    assert read_body("? wait_view", body_of((None, True, 3))) == (None, True, 3)
    assert read_body("! state_received", body_of((1, 2, 3, ("b",)))) == (1, 2, 3, ("b",))
    for kind in [*(f"? {name}" for name in ASKED), *(f"! {name}" for name in TOLD)]:
        with pytest.raises(Exception, match="Expected"):
            read_body(kind, body_of({"no": "form"}))


def test_a_call_comes_with_all_that_it_has() -> None:
    word = BeginCall(
        1, 2, 3, 0.5, None, 4, "all_reduce", "s", (1,), True, False, (0, 2), "0:1", True, False, (4, 4), b"g", None
    )
    assert decode_program_word(encode_word(word)) == word


def test_no_word_shows_a_key(caplog: pytest.LogCaptureFixture) -> None:
    word = OpenEngine(1, b"{}", Shown((b"c",), 0, b"secret"), 0, 12, logging.INFO)
    assert "secret" not in repr(word)
    assert decode_program_word(encode_word(word)) == word


@pytest.mark.parametrize(("share", "nice"), [(1.0, 0), (0.5, 0), (0.1, 10), ("auto", 12), (0.07, 12), (0.01, 19)])
def test_an_engine_steps_back_as_far_as_its_share_says(share: float | str, nice: int) -> None:
    assert nice_of(share) == nice
    if nice not in (0, 19):  # a step of nice is worth a factor of 1.25
        part = 0.07 if isinstance(share, str) else share
        assert abs(1 / (1 + 1.25**nice) - part) < 0.01
