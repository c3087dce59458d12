"""What a process joins with, and what of it the coordinator changes."""

from __future__ import annotations

from quicoll.membership.incarnation import MOST_STARTS
from quicoll.membership.member.actions import Refused, StartOver
from quicoll.membership.member.job_progress import JobProgress
from quicoll.membership.member.own_join import OwnJoin
from quicoll.membership.messages import Join


def joins(**fields: bool) -> OwnJoin:
    return OwnJoin("a", Join(incarnation=5, lost_after_ns=10, **fields))


def test_a_join_has_what_the_process_holds_now() -> None:
    own, progress = joins(), JobProgress(3)
    assert own.message(progress) == Join(incarnation=5, lost_after_ns=10, committed_step=3)
    progress.doubt = (1, 4)
    assert own.message(progress).doubt == (1, 4)


def test_a_setting_is_adopted_once_and_only_where_none_is_insisted_on() -> None:
    own = joins(adopts=True)
    assert own.adopt(20) == ""
    assert own.message(JobProgress(0)).lost_after_ns == 20
    assert own.adopt(20).startswith("a setting that was not asked for")
    insists = joins()
    assert insists.adopt(20).startswith("a setting that was not asked for")
    assert insists.message(JobProgress(0)).lost_after_ns == 10


def test_a_process_that_was_never_admitted_starts_over_above_the_latest() -> None:
    own = joins()
    follows = own.outdated(9, admitted=False)
    assert isinstance(follows, StartOver)
    assert follows.incarnation == own.incarnation == own.message(JobProgress(0)).incarnation
    assert own.incarnation > 9


def test_a_process_that_was_admitted_is_over() -> None:
    own = joins()
    assert own.outdated(9, admitted=True) == Refused("another process of a has joined after this one")
    assert own.incarnation == 5


def test_an_earlier_process_outdates_none() -> None:
    follows = joins().outdated(4, admitted=False)
    assert follows == Refused("the coordinator broke the protocol: incarnation 4 is said to be later than 5")


def test_a_process_does_not_start_over_for_ever() -> None:
    own = joins()
    for _ in range(MOST_STARTS):
        assert isinstance(own.outdated(own.incarnation, admitted=False), StartOver)
    last = own.incarnation
    assert isinstance(own.outdated(last, admitted=False), Refused)
    assert own.incarnation == last
