"""Errors and the words of the membership protocol for them."""

from __future__ import annotations

import pytest

from quicoll.engine.failures import error_of_end, failed_node, kind_of
from quicoll.errors import Corrupted, LocalError, Mismatch, Partitioned, PeerError, QuicollError
from quicoll.membership.member.actions import Deactivate
from quicoll.membership.view import Member, View

VIEW = View(
    view_id=7,
    members=tuple(Member(rank=rank, node="abc"[rank], incarnation=1) for rank in range(3)),
    seed=0,
    committed_step=0,
    committed_view=0,
)


@pytest.mark.parametrize(("kind", "error"), [("mismatch", Mismatch), ("corrupted", Corrupted), ("failed", PeerError)])
def test_a_kind_of_failure_is_one_error_both_ways(kind: str, error: type[QuicollError]) -> None:
    made = error_of_end(VIEW, Deactivate(7, "why", culprit="b", kind=kind))
    assert (type(made), made.rank, made.node, made.view, made.message) == (error, 1, "b", 7, "why")
    assert kind_of(made) == kind


def test_a_rank_without_a_coordinator_is_partitioned_whatever_failed() -> None:
    assert isinstance(error_of_end(VIEW, Deactivate(7, "why", kind="mismatch", partitioned=True)), Partitioned)


def test_without_a_named_node_the_first_that_was_lost_is_the_cause() -> None:
    made = error_of_end(VIEW, Deactivate(7, "why", lost=("c", "d")))
    assert (made.rank, made.node, made.lost) == (2, "c", ("c", "d"))
    nobody = error_of_end(VIEW, Deactivate(7, "why"))
    assert (nobody.rank, nobody.node) == (None, "")


def test_the_node_that_failed_is_the_rank_s_or_ones_own_where_the_caller_did_wrong() -> None:
    assert failed_node(VIEW, PeerError("why", rank=2), "a") == "c"
    assert failed_node(VIEW, PeerError("why", node="x"), "a") == "x"
    assert failed_node(VIEW, PeerError("why"), "a") == ""
    assert failed_node(VIEW, LocalError("why"), "a") == "a"
