"""Who is left out where digests differ again and again: the culprit, whoever is the odd one. A virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from coordinator_bench import MS, SECOND, Bench, letters

from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.elimination import TRIALS
from quicoll.membership.coordinator.evidence import MAX_VIEWS, VIEW_INTERVAL_NS, Contradiction, Evidence
from quicoll.membership.coordinator.history import Noted, Proposed
from quicoll.membership.coordinator.lessons import MAX_NOTED, Lessons
from quicoll.membership.coordinator.stage import CoordinatorState

STEP = 200 * MS

Fault = Callable[[Sequence[str]], dict[str, bytes]]
"""The digests of those that have another one than most, by the nodes of the view."""


def lies_to(liar: str, *victims: str, alike: bool = True) -> Fault:
    """A rank sends these other bits, the same ones to each or not."""

    def digests(nodes: Sequence[str]) -> dict[str, bytes]:
        there = [node for node in victims if node in nodes] if liar in nodes else []
        return {node: b"wrong" if alike else b"wrong" + node.encode() for node in there}

    return digests


def bad_memory(node: str) -> Fault:
    """A rank spoils what it gets, whoever sends it."""
    return lambda nodes: {node: b"wrong"} if node in nodes and len(nodes) > 1 else {}


class Job:
    """A cluster that takes a step in STEP of virtual time, and one of whose nodes is bad."""

    def __init__(self, ranks: int, fault: Fault) -> None:
        self.nodes = letters(ranks)
        self.bench = Bench(ranks)
        self.fault = fault
        self.failed = 0
        self.steps: Counter[str] = Counter()  # committed, by node
        self.bench.join(*self.nodes)

    def run(self, seconds: float) -> None:
        self.failed, self.steps = 0, Counter()
        bench = self.bench
        until = bench.now + round(seconds * SECOND)
        while bench.now < until:
            while bench.core.state is CoordinatorState.PROPOSED:
                bench.confirm()
            view = bench.core.view
            if view is not None:
                wrong = self.fault(view.nodes)
                before = bench.core.history.committed_step
                for node in view.nodes:
                    bench.vote(node, digest=wrong.get(node, b"right"))
                if bench.core.history.committed_step > before:
                    self.steps.update(view.nodes)
                else:
                    self.failed += 1
            bench.advance(STEP)

    def missed(self) -> dict[str, int]:
        """Of each node, how many steps it missed."""
        return {node: max(self.steps.values()) - self.steps[node] for node in self.nodes}

    def restart(self) -> None:
        """Another coordinator with the same journal; its clock begins anew."""
        records = self.bench.records
        self.bench = Bench(len(self.nodes), records=records)
        self.bench.join(*self.nodes, committed_step=self.bench.core.history.committed_step)


LIARS = [
    *((ranks, liar, lies_to(liar, victim)) for ranks in (3, 4, 5) for liar, victim in ("ba", "ab", "cb", "bc")),
    *((ranks, "b", lies_to("b", *(node for node in letters(ranks) if node != "b"))) for ranks in (3, 4, 5)),
    *((ranks, "a", lies_to("a", *letters(ranks)[1:], alike=False)) for ranks in (3, 4, 5)),
    (5, "b", lies_to("b", "a", "c")),
    (5, "c", lies_to("c", "d", "e")),
    (4, "b", lies_to("b", "a", "c", alike=False)),
    *((ranks, node, bad_memory(node)) for ranks in (3, 4, 5) for node in ("a", "b", letters(ranks)[-1])),
]


def innocent(job: Job, culprit: str) -> dict[str, int]:
    return {node: missed for node, missed in job.missed().items() if node != culprit}


@pytest.mark.parametrize(("ranks", "culprit", "fault"), LIARS)
def test_the_culprit_is_out_and_all_others_are_in(ranks: int, culprit: str, fault: Fault) -> None:
    job = Job(ranks, fault)
    job.run(16)
    assert job.failed <= 3 + 3 * ranks
    job.run(48)
    assert job.failed <= 3  # the culprit's trials, after 8, 16 and 32 seconds
    assert job.steps[culprit] == 0
    assert set(innocent(job, culprit).values()) == {0}
    assert max(job.steps.values()) > 0.95 * 48 * SECOND / STEP


@pytest.mark.parametrize(("ranks", "culprit", "fault"), LIARS[::5])
def test_the_longest_time_without_a_commit_follows_from_the_failed_steps_and_the_allowance(
    ranks: int, culprit: str, fault: Fault
) -> None:
    """Where earlier faults have spent the allowance of views: that is most of the pause."""
    job = Job(ranks, fault)
    for _ in range(MAX_VIEWS - 1):  # and the first one
        job.bench.core._succession._evidence.proposed(now_ns=job.bench.now)
    longest = since = 0
    began = job.bench.now
    while job.bench.now < began + 90 * SECOND:
        job.run(STEP / SECOND)
        since = 0 if job.steps else since + STEP
        longest = max(longest, since)
    failures = 3 + 3 * ranks
    assert 2 * VIEW_INTERVAL_NS < longest <= failures * (VIEW_INTERVAL_NS + STEP)


def test_what_is_told_grows_with_what_is_known() -> None:
    job = Job(4, lies_to("b", "a"))
    job.run(16)
    told = [str(each.event.cause).partition(" is left out for ")[2] for each in job.bench.notes(a.ViewAborted)]
    assert list(filter(None, told)) == [
        "1 s, for what failed again and again: a, or who sends to it",
        "1 s, to see whether it sends wrong bits: a, or who sends to it",  # d, which does not
        "1 s, to see whether it sends wrong bits: a, or who sends to it",  # c
        "1 s, to see whether it sends wrong bits: a, or who sends to it",  # b, and there the digests are one
        "2 s, for what failed again and again: a or b, and only when they work together",
        "4 s, for what failed again and again: a or b, and only when they work together",
        "8 s, for what failed again and again: a or b, and only when they work together",
    ]


def test_one_that_only_pretends_to_be_lied_to_is_found_with_the_second_that_it_contradicts() -> None:
    """It may have one honest node left out, which nobody can tell from a liar, and not another one as well."""
    job = Job(5, lambda nodes: {"c": b"wrong"} if "c" in nodes and "a" in nodes else {})
    job.run(20)
    assert (job.bench.core.view or job.bench.proposed()).nodes == tuple("bcde")
    job.fault = bad_memory("c")
    job.run(20)
    job.run(10)
    assert job.steps["c"] == 0
    assert set(innocent(job, "c").values()) == {0}


def test_a_fault_that_comes_and_goes_costs_no_honest_node_its_place_for_good() -> None:
    count = 0

    def now_and_then(nodes: Sequence[str]) -> dict[str, bytes]:
        nonlocal count
        count += 1
        return {"b": b"wrong"} if "b" in nodes and count % 7 == 0 else {}

    job = Job(4, now_and_then)
    job.run(200)
    job.run(60)
    assert sum(innocent(job, "b").values()) == 0
    assert max(job.steps.values()) > 0.9 * 60 * SECOND / STEP


def test_in_a_large_world_its_senders_are_tried_a_few_at_a_time() -> None:
    ranks = 24
    job = Job(ranks, bad_memory("z"))
    job.nodes[1] = "z"
    job.bench = Bench(ranks)
    job.bench.join(*job.nodes)
    in_a_row = longest = 0
    for _ in range(300):
        job.run(STEP / SECOND)
        in_a_row = in_a_row + 1 if job.failed else 0
        longest = max(longest, in_a_row)
    assert longest <= TRIALS + 1
    job.run(200)
    assert job.failed <= 4 * (TRIALS + 1)
    assert max(job.steps.values()) > 0.95 * 200 * SECOND / STEP


@pytest.mark.parametrize(("ranks", "culprit", "fault"), [LIARS[0], LIARS[5], LIARS[13], LIARS[-1]])
def test_the_journal_has_one_row_more_and_two_writes_for_a_view_at_most(ranks: int, culprit: str, fault: Fault) -> None:
    job = Job(ranks, fault)
    job.run(300)
    views = [each for each in job.bench.records if isinstance(each, Proposed)]
    noted = [each for each in job.bench.records if isinstance(each, Noted)]
    assert 3 < len(noted) <= 2 * len(views)
    assert max(len(repr(each)) for each in noted) < 1000


# A coordinator that starts again


@pytest.mark.parametrize(("ranks", "culprit", "fault"), LIARS)
def test_who_is_left_out_stays_out_when_the_coordinator_starts_again(ranks: int, culprit: str, fault: Fault) -> None:
    job = Job(ranks, fault)
    job.run(20)
    assert job.failed
    job.restart()
    job.run(40)
    assert job.failed <= 5  # its trials go on; nothing is learnt anew
    assert job.steps[culprit] == 0
    assert max(innocent(job, culprit).values()) <= 2 * SECOND // STEP


def test_no_number_of_restarts_keeps_a_node_out_for_ever_or_lets_it_in_at_once() -> None:
    job = Job(3, lies_to("b", "a"))
    job.run(100)
    job.fault = lambda nodes: {}  # its memory has been replaced
    job.steps.clear()
    lives = 0
    while not job.steps["b"]:
        lives += 1
        job.restart()
        job.run(4)
    assert 3 <= lives <= 6  # of 64 seconds, 32, 16, 8, 4


def test_a_node_that_was_trusted_again_has_a_clean_slate_after_a_restart() -> None:
    job = Job(3, lies_to("b", "a"))
    job.run(20)
    job.fault = lambda nodes: {}
    job.run(400)
    assert job.bench.core.history.lessons == Lessons()
    noted = [each for each in job.bench.records if isinstance(each, Noted)]
    job.restart()
    job.run(100)
    assert [each for each in job.bench.records if isinstance(each, Noted)] == noted


def test_what_is_noted_is_bounded() -> None:
    evidence = Evidence(shortest_ns=SECOND, longest_ns=30 * SECOND)
    nodes = tuple(f"n{number}" for number in range(100))
    for node in nodes:
        evidence.failed(nodes, Contradiction((node,), enough=True), can_spare=lambda _: True, now_ns=0)
        found = evidence.news(now_ns=0)
    assert found is not None
    assert len(found.nodes) == MAX_NOTED
    assert evidence.news(now_ns=0) is None
