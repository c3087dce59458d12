"""The engine keeps to its share beside a thread that computes, and only there."""

from __future__ import annotations

import pytest

from quicoll.engine.share import (
    BELIEVED_NS,
    HURRIED_NS,
    LEAST_NS,
    MOST_NS,
    PATIENCE_NS,
    REST_NS,
    SHARE,
    EngineShare,
    Used,
)

MS = 1_000_000


class Thread:
    """A thread on a virtual clock, which runs and rests as it is told."""

    def __init__(self, share: float | None, *, counts: bool = True) -> None:
        self.now = 5 * MS
        self.cpu = 7 * MS
        self.switches: int | None = 3 if counts else None
        self.share = EngineShare(share, self.now, self.used)

    @property
    def used(self) -> Used:
        return Used(self.cpu, self.switches)

    def turn(self, ns: int, *, waits: int = 0, switches: int = 0, awaited: bool = False, idle: bool = False) -> int:
        """Run for `ns` and wait for the lock for `waits`; then rest as long as may be. Return for how long."""
        self.now += ns + waits
        self.cpu += ns
        if self.switches is not None:
            self.switches += switches
        if awaited and not idle:
            self.share.pass_over(self.now)
            return 0
        rest = self.share.rest(self.now, self.used, lambda: awaited)
        if rest:
            self.sleep(rest)
        return rest

    def sleep(self, ns: int) -> None:
        self.now += ns
        if self.switches is not None:
            self.switches += 1
        if self.share.counts:
            self.share.slept(self.used)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("ns", [LEAST_NS, MS, 10 * MS])
def test_beside_a_thread_that_computes_it_takes_its_share_and_no_less(share: float, ns: int) -> None:
    thread = Thread(share)
    began, before = thread.now, thread.cpu
    for _ in range(400):
        assert thread.turn(ns, waits=ns // 10, switches=1) <= REST_NS
    took, passed = thread.cpu - before, thread.now - began
    if ns / (ns + REST_NS) < share:  # a turn that a rest can pay for
        assert took <= share * passed + MOST_NS + ns
    else:
        assert passed >= 399 * (ns + REST_NS)
    assert took > 0.9 * share * passed - ns


def test_a_small_operation_is_not_made_to_wait() -> None:
    thread = Thread(0.1)
    thread.sleep(50 * MS)
    assert thread.turn(MOST_NS, switches=4) == 0


def test_where_nobody_competes_it_never_rests() -> None:
    thread = Thread(0.1)
    for _ in range(100):
        assert thread.turn(5 * MS) == 0
        thread.sleep(MS // 10)  # its own sleep is no contention


def test_while_somebody_waits_it_never_rests_and_owes_nothing_afterwards() -> None:
    thread = Thread(0.1)
    for _ in range(100):
        assert thread.turn(5 * MS, switches=2, awaited=True) == 0
    assert thread.turn(LEAST_NS, switches=2) <= LEAST_NS * 10  # what it has taken since


def test_its_own_sleeps_while_somebody_waited_are_no_contention_afterwards() -> None:
    thread = Thread(0.1)
    for _ in range(50):
        thread.turn(5 * MS, awaited=True)
        thread.sleep(MS)
    assert [thread.turn(5 * MS) for _ in range(20)] == [0] * 20, "nobody else has computed"


def test_time_in_which_somebody_waited_and_little_was_done_is_credit() -> None:
    thread = Thread(None)
    while thread.share._owing_ns is None:
        thread.turn(MS, switches=1)
    thread.turn(LEAST_NS, awaited=True)
    thread.sleep(round(2 * MOST_NS / SHARE))
    assert thread.turn(LEAST_NS) == 0
    assert thread.share._owing_ns is None, "the next work that lasts is spread anew"


def test_what_a_call_takes_first_counts_after_a_time_without_any() -> None:
    thread = Thread(None)
    thread.turn(5 * MS, awaited=True)
    for _ in range(20):
        thread.sleep(50 * MS)
        thread.turn(LEAST_NS, awaited=True, idle=True)
    assert thread.turn(5 * MS, switches=2) > 0


def test_a_rest_is_never_longer_than_it_may_be() -> None:
    thread = Thread(0.1)
    thread.share = EngineShare(0.1, thread.now, thread.used, rest_ns=3 * MS)
    assert [thread.turn(100 * MS, switches=2) for _ in range(5)] == [3 * MS] * 5


def test_contention_that_is_over_is_forgotten() -> None:
    thread = Thread(0.1)
    assert thread.turn(12 * MS, switches=2) == REST_NS
    assert thread.turn(12 * MS) == REST_NS  # it has met nobody since, for less time than contention is believed
    assert thread.turn(BELIEVED_NS - REST_NS) == 0
    assert thread.turn(3 * MS, switches=1) > 0
    assert thread.turn(BELIEVED_NS, waits=1) == 0


def test_where_no_share_is_named_only_what_is_over_soon_is_spread() -> None:
    thread = Thread(None)
    for _ in range(3):
        began, before = thread.now, thread.cpu
        while thread.turn(MS, switches=1) or thread.now - began < MOST_NS + MS:
            pass
        assert PATIENCE_NS <= thread.now - began <= PATIENCE_NS + REST_NS + MOST_NS + MS
        assert thread.cpu - before <= SHARE * (thread.now - began) + MOST_NS + 2 * MS
        assert [thread.turn(5 * MS, switches=2) for _ in range(200)] == [0] * 200, "what goes on is not held up"
        thread.sleep(round(2 * MOST_NS / SHARE))  # it has had nothing to do for long enough
        assert thread.turn(LEAST_NS) == 0


def test_a_share_that_is_named_holds_for_as_long_as_there_is_work() -> None:
    thread = Thread(SHARE)
    began, before = thread.now, thread.cpu
    while thread.now - began < 20 * PATIENCE_NS:
        thread.turn(MS, switches=1)
    assert thread.cpu - before <= SHARE * (thread.now - began) + MOST_NS + MS


def test_a_share_of_all_is_no_bound() -> None:
    thread = Thread(1.0)
    assert [thread.turn(5 * MS, switches=2) for _ in range(20)] == [0] * 20


def test_a_system_that_counts_no_switches_has_no_rests() -> None:
    thread = Thread(0.1, counts=False)
    assert [thread.turn(5 * MS, waits=MS) for _ in range(20)] == [0] * 20


def test_it_is_asked_no_more_often_than_pays() -> None:
    thread = Thread(0.1)
    assert thread.share.due_ns == thread.now + LEAST_NS
    for awaited in (False, True, False):
        thread.turn(LEAST_NS, awaited=awaited)
        pause = HURRIED_NS if awaited else LEAST_NS
        assert thread.share.due_ns == thread.now + pause
