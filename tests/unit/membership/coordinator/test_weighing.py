"""What a failure costs: who is left out for it, and what the members are told."""

from __future__ import annotations

from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.diagnosis import ViewFailure
from quicoll.membership.coordinator.evidence import Contradiction, Evidence
from quicoll.membership.coordinator.formation import Formation
from quicoll.membership.coordinator.history import History, Seeded
from quicoll.membership.coordinator.roster import Candidate, Roster
from quicoll.membership.coordinator.weighing import Weighed, weigh
from quicoll.membership.messages import Join

HISTORY = History.of([Seeded(7)])
LATE = ViewFailure("no vote from c", culprit="c", lost=("b",), contradiction=Contradiction(("c",), enough=True))


class Setup:
    def __init__(self, *, world_size: int) -> None:
        config = CoordinatorConfig(world_size=world_size)
        self.evidence = Evidence(shortest_ns=config.retry_min_ns, longest_ns=config.retry_max_ns)
        roster = Roster(None, retry_min_ns=config.retry_min_ns, retry_max_ns=config.retry_max_ns)
        for node in "abcd":
            roster.add(Candidate(node, Join(incarnation=1), 0))
        self.formation = Formation(roster, self.evidence, config, history=HISTORY)

    def weigh(self, failure: ViewFailure) -> Weighed:
        everybody = self.formation.choose(HISTORY, now_ns=0)
        view = self.formation.next_view(everybody, HISTORY)
        return weigh(failure, view, self.evidence, self.formation, HISTORY, now_ns=0)


def test_a_failure_that_contradicts_nobody_costs_nobody_anything() -> None:
    setup = Setup(world_size=2)
    failure = ViewFailure("too few")
    assert setup.weigh(failure) == Weighed(failure, {})
    assert not setup.evidence.failing


def test_who_is_left_out_is_told_why_and_is_lost_for_the_others_too() -> None:
    weighed = Setup(world_size=2).weigh(LATE)
    assert list(weighed.left_out) == ["c"]
    assert weighed.failure.lost == ("b", "c")  # by rank
    assert weighed.failure.cause == f"no vote from c; c is {weighed.left_out['c']}"
    assert weighed.left_out["c"].startswith("left out for ")


def test_nobody_is_left_out_without_whom_there_is_no_view() -> None:
    # Without b, which is lost with this failure, and without c two nodes are left.
    assert Setup(world_size=3).weigh(LATE) == Weighed(LATE, {})


def test_one_failure_alone_leaves_no_trusted_node_out() -> None:
    failure = ViewFailure("b is gone", lost=("b",), contradiction=Contradiction(("b",)))
    assert Setup(world_size=2).weigh(failure) == Weighed(failure, {})
