"""The message in which a coordinator says how its job is: its bounds, and what fits into them."""

from __future__ import annotations

import msgspec
import pytest

from quicoll.checks import MAX_NAME
from quicoll.membership.operators import MAX_OPERATION, decode_answer
from quicoll.membership.status import (
    MAX_STATUS,
    MAX_STATUS_EVENTS,
    MAX_STATUS_NODES,
    EventStatus,
    JobStatus,
    MemberState,
    MemberStatus,
    condition_of,
    fitting,
)

SECOND = 10**9


def status(members: int = 0, *, state: MemberState = "at work", why: str = "", troubled: int = 0) -> JobStatus:
    nodes = [
        MemberStatus(
            node=f"n{number}".ljust(64, "x"),
            state="lost" if number < troubled else state,
            rank=number,
            step=2**62,
            for_ns=2**62,
            why=why,
            rtt_ns=2**62,
            silent_ns=2**62,
            resends=2**62,
            address="x" * 70,
        )
        for number in range(members)
    ]
    events = tuple(EventStatus(ago_ns=2**62, kind="view_ended", said="\N{SNOWMAN}" * 200) for _ in range(32))
    return JobStatus(led_ns=2**62, stage="installed", world_size=1024, members=tuple(nodes), events=events)


def read(data: bytes) -> JobStatus:
    found = decode_answer(data, node="coordinator")
    assert isinstance(found, JobStatus)
    return found


def test_what_fits_is_whole() -> None:
    given = status(100, why="\N{SNOWMAN}" * 200)
    assert read(fitting(given)) == given


def test_without_links_a_status_has_no_field_that_an_older_reader_does_not_know() -> None:
    whole = msgspec.msgpack.decode(fitting(status(2)))
    assert not {"links", "links_ns"} & {*whole, *whole["members"][0]}


def test_a_status_of_the_most_nodes_with_the_longest_texts_is_within_the_bound_and_can_be_read() -> None:
    data = fitting(status(MAX_STATUS_NODES, why="\N{SNOWMAN}" * 200))
    assert len(data) <= MAX_STATUS <= MAX_OPERATION
    found = read(data)
    assert found.unlisted == 0  # what is said of each goes first
    assert {each.why for each in found.members} == {""}


def test_where_that_is_not_enough_those_that_are_as_they_should_be_go_and_are_counted() -> None:
    data = fitting(status(MAX_STATUS_NODES, troubled=10), most=16 * 1024)
    assert len(data) <= 16 * 1024
    found = read(data)
    assert found.unlisted == MAX_STATUS_NODES - len(found.members) > 0
    assert sum(each.state == "lost" for each in found.members) == 10
    assert found.events == ()
    found = read(fitting(status(100, state="lost"), most=8 * 1024))  # of trouble alone, the last goes first
    assert [each.rank for each in found.members] == list(range(100 - found.unlisted))


@pytest.mark.parametrize(
    "field",
    [
        {"members": [{"node": "n", "state": "asleep"}]},
        {"members": [{"node": "n" * (MAX_NAME + 1), "state": "lost"}]},
        {"members": [{"node": "n", "state": "lost", "why": "x" * 201}]},
        {"members": [{"node": "n", "state": "lost"}] * (MAX_STATUS_NODES + 1)},
        {"events": [{"ago_ns": 1, "kind": "k", "said": ""}] * (MAX_STATUS_EVENTS + 1)},
        {"committed_ns": -1},
        {"held": "x" * 201},
        {"more": 1},
    ],
    ids=str,
)
def test_what_breaks_a_bound_is_refused(field: dict[str, object]) -> None:
    whole = {"type": "status", "led_ns": 1, "stage": "forming", "world_size": 1}
    read(msgspec.msgpack.encode(whole))
    with pytest.raises(Exception, match="malformed operator's message"):
        decode_answer(msgspec.msgpack.encode({**whole, **field}), node="coordinator")


@pytest.mark.parametrize(
    ("fields", "condition"),
    [
        ({"stage": "forming"}, "forming"),
        ({"stage": "proposed", "without_ns": 299 * SECOND}, "forming"),
        ({"stage": "proposed", "without_ns": 301 * SECOND}, "stalled"),
        ({"stage": "proposed", "without_ns": 31 * SECOND, "step_ns": 1}, "stalled"),
        ({"stage": "forming", "held": "1 of 2"}, "forming"),
        ({"stage": "forming", "held": "1 of 2", "without_ns": 60 * SECOND}, "forming"),
        ({"stage": "forming", "held": "1 of 2", "without_ns": 61 * SECOND}, "held"),
        ({"stage": "forming", "held": "1 of 2", "members": [{"node": "a", "state": "joining"}]}, "forming"),
        ({"stage": "forming", "held": "no quorum", "members": [{"node": "a", "state": "missing"}]}, "held"),
        ({"stage": "forming", "held": "no quorum", "members": [{"node": "a", "state": "lost"}]}, "held"),
        ({"stage": "forming", "held": "1 of 2", "without_ns": 999 * SECOND}, "held"),
        ({"stage": "forming", "held": "the job is done", "done": True}, "done"),
        ({"stage": "installed"}, "at work"),
        ({"stage": "installed", "stage_ns": 2 * SECOND}, "idle"),
        ({"stage": "installed", "stage_ns": 9 * SECOND, "committed_ns": 1, "step_ns": 1}, "at work"),
        ({"stage": "installed", "stage_ns": 9 * SECOND, "committed_ns": 5 * SECOND, "step_ns": 1}, "idle"),
        ({"stage": "installed", "open_step": 3, "open_ns": 31 * SECOND, "step_ns": 1}, "stalled"),
        ({"stage": "installed", "journal_ns": 31 * SECOND, "step_ns": 1}, "stalled"),
    ],
    ids=str,
)
def test_a_status_has_one_condition(fields: dict[str, object], condition: str) -> None:
    whole = {"type": "status", "led_ns": 1, "world_size": 1, **fields}
    assert condition_of(msgspec.convert(whole, JobStatus)) == condition
