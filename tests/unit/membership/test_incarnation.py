"""The order of a node's processes: given by who was admitted last, by no clock."""

from __future__ import annotations

import pytest
from coordinator_bench import Bench

from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.incarnation import CHANCE_BYTES, MOST_STARTS, above, first
from quicoll.membership.member import actions as a
from quicoll.membership.member.core import MemberCore
from quicoll.membership.member.states import MemberState
from quicoll.membership.view import MAX_INT

LOW, HIGH = first(bytes(CHANCE_BYTES)), first(b"\xff" * CHANCE_BYTES)


def test_an_incarnation_above_another_keeps_the_chance_of_its_process() -> None:
    assert LOW < HIGH < above(HIGH, LOW) < above(HIGH, HIGH)
    assert above(above(HIGH, LOW), LOW) - above(HIGH, LOW) == 1 << 32
    assert above(1_767_225_600_000_000_000, LOW) > 1_767_225_600_000_000_000, "of a clock, as they once were"
    with pytest.raises(LocalError, match="no incarnation above"):
        above(MAX_INT, LOW)
    with pytest.raises(LocalError, match="4 random bytes"):
        first(b"")


def drained(core: MemberCore) -> list[a.MemberAction]:
    found = []
    while (action := core.next_action()) is not None:
        found.append(action)
    return found


def answered(core: MemberCore, bench: Bench) -> m.CoordinatorMessage:
    """It joins; what the coordinator answers."""
    core.connected(now_ns=0)
    (told,) = drained(core)
    assert isinstance(told, a.TellCoordinator)
    assert isinstance(told.message, m.Join)
    bench.inbox.clear()
    bench.core.receive(core.node, told.message, now_ns=0, incarnation=core.incarnation)
    bench.drain()
    answer = bench.inbox[core.node][0]
    core.receive(answer, now_ns=0)
    return answer


@pytest.mark.parametrize("restarted", [False, True])
def test_a_process_whose_number_is_lower_starts_over_above_the_one_before(restarted: bool) -> None:
    """Whatever made it lower: chance, or a clock that was set back where numbers came from clocks."""
    bench = Bench(2)
    bench.installed(*"ab", incarnation=HIGH)
    if restarted:
        bench = Bench(2, records=bench.records)
    core = MemberCore("a", LOW)
    assert answered(core, bench) == m.Outdated(latest=HIGH)
    assert drained(core) == [a.StartOver(above(HIGH, LOW))]
    assert core.state is MemberState.DETACHED
    assert isinstance(answered(core, bench), m.Welcome)


def test_the_coordinator_without_its_journal_takes_any() -> None:
    core = MemberCore("a", LOW)
    assert isinstance(answered(core, Bench(2)), m.Welcome)


def test_of_two_processes_of_a_name_the_later_stays_and_the_earlier_ends_with_the_reason() -> None:
    bench = Bench(1)
    earlier, later = MemberCore("a", HIGH), MemberCore("a", LOW)
    answered(earlier, bench)
    answered(later, bench)
    drained(later)
    assert isinstance(answered(later, bench), m.Welcome)
    # the earlier hears it on the way to its link, or over the one that it still gets
    earlier.outdated(later.incarnation, now_ns=0)
    assert drained(earlier)[-1] == a.Refused("another process of a has joined after this one")
    assert earlier.state is MemberState.LEFT
    late = MemberCore("a", HIGH)
    answered(late, Bench(1))
    late.disconnected("silence", now_ns=0)
    drained(late)
    answered(late, bench)
    assert drained(late)[-1] == a.Refused("another process of a has joined after this one")


def test_a_process_that_hears_of_a_later_one_before_it_has_a_link_starts_over() -> None:
    core = MemberCore("a", LOW)
    core.outdated(HIGH, now_ns=0)
    assert drained(core) == [a.StartOver(above(HIGH, LOW))]
    assert core.state is MemberState.DETACHED


def test_nobody_climbs_for_ever() -> None:
    core = MemberCore("a", LOW)
    for _ in range(MOST_STARTS):
        core.outdated(above(core.incarnation, HIGH), now_ns=0)
        assert isinstance(drained(core)[0], a.StartOver)
    core.outdated(above(core.incarnation, HIGH), now_ns=0)
    (refused,) = drained(core)
    assert isinstance(refused, a.Refused)
    assert "8 other processes of a" in refused.reason


@pytest.mark.parametrize(
    ("latest", "reason"), [(LOW - 1, "is said to be later than"), (MAX_INT, "no incarnation above")]
)
def test_a_coordinator_that_answers_nonsense_is_not_followed(latest: int, reason: str) -> None:
    core = MemberCore("a", LOW)
    core.connected(now_ns=0)
    drained(core)
    core.receive(m.Outdated(latest=latest), now_ns=0)
    (refused,) = drained(core)
    assert isinstance(refused, a.Refused)
    assert reason in refused.reason
