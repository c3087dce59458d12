"""Who failed views have in common, who is left out for it, and how soon views may follow each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from coordinator_bench import MS, SECOND, Bench

from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.evidence import (
    MAX_VIEWS,
    VIEW_INTERVAL_NS,
    Contradiction,
    Evidence,
    Verdict,
    contradiction_of,
)
from quicoll.membership.coordinator.history import InstalledView, Proposed
from quicoll.membership.coordinator.stage import CoordinatorState

HOUR = 3600 * SECOND
SHORTEST, LONGEST = 1 * SECOND, 30 * SECOND


def anybody(node: str) -> bool:
    return True


def nobody(node: str) -> bool:
    return False


class Trial:
    """Evidence with its clock."""

    def __init__(self) -> None:
        self.evidence = Evidence(shortest_ns=SHORTEST, longest_ns=LONGEST)
        self.now = 0

    def fail(
        self,
        members: str,
        strong: str,
        weak: str = "",
        *,
        sent: bool = False,
        paths: bool = False,
        can_spare: Callable[[str], bool] = anybody,
    ) -> Verdict:
        contradiction = Contradiction(tuple(strong), tuple(weak), sent=sent, paths=paths)
        return self.evidence.failed(tuple(members), contradiction, can_spare=can_spare, now_ns=self.now)

    def differ(self, members: str, minority: str) -> Verdict:
        return self.fail(members, minority, "".join(node for node in members if node not in minority), sent=True)

    def work(self, members: str, seconds: float = 0.0) -> None:
        """These members commit for a while."""
        self.evidence.committed(tuple(members), now_ns=self.now)
        self.now += round(seconds * SECOND)
        self.evidence.committed(tuple(members), now_ns=self.now)

    def out(self) -> str:
        return "".join(self.evidence.left_out(now_ns=self.now))


# One view, and several


@pytest.mark.parametrize(
    ("pairs", "paths", "strong", "weak"),
    [
        (["ab"], False, "ab", ""),
        (["ab"], True, "", "ab"),  # a pair that lost each other: it may be the path
        (["ab", "cd"], True, "", "abcd"),
        (["ab", "ac"], True, "a", "bc"),
        (["ab", "cb", "db"], False, "b", "acd"),
        (["ab", "ac", "ad"], False, "a", "bcd"),  # who names everybody is in each pair
        (["ab", "ba"], False, "ab", ""),
        (["aa"], False, "a", ""),
        ([], False, "", ""),
    ],
)
def test_who_is_in_most_pairs_is_a_strong_part(pairs: list[str], paths: bool, strong: str, weak: str) -> None:
    found = contradiction_of([(pair[0], pair[1]) for pair in pairs], paths=paths)
    assert (sorted(found.strong), sorted(found.weak)) == (list(strong), list(weak))


def test_two_failures_have_nobody_left_out_and_the_third_has_the_minority() -> None:
    trial = Trial()
    assert trial.differ("abc", "b") == trial.differ("abc", "b") == Verdict()
    assert trial.differ("abc", "b") == Verdict(
        "b", 1 * SECOND, "for what failed again and again: b, or who sends to it"
    )
    assert trial.out() == "b"
    trial.now += 1 * SECOND
    assert trial.out() == ""


def test_on_probation_one_failure_is_enough_and_the_times_double_up_to_a_bound() -> None:
    trial = Trial()
    times = []
    for _ in range(3):
        verdict = trial.fail("abc", "b")
    for _ in range(12):
        times.append(verdict.for_ns // SECOND)
        trial.work("ac", verdict.for_ns / SECOND)
        verdict = trial.fail("abc", "b")
    assert times == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


def test_where_it_may_be_the_path_a_node_is_left_out_for_no_longer_than_for_broken_paths() -> None:
    trial = Trial()
    times = []
    for _ in range(10):
        verdict = trial.fail("abcd", "b", "ac", paths=True)
        times.append(verdict.for_ns // SECOND)
        trial.now += verdict.for_ns
    assert times == [0, 0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_pair_that_cannot_reach_each_other_is_not_left_out_for_that_alone() -> None:
    trial = Trial()
    assert {trial.fail("abc", "", "ac", paths=True) for _ in range(20)} == {Verdict()}


def test_a_node_that_did_well_for_twice_its_time_is_trusted_again() -> None:
    trial = Trial()
    for _ in range(3):
        trial.differ("abc", "b")
    trial.work("abc", 1 + 61)
    assert trial.differ("abc", "b") == Verdict()
    trial.work("abc", 3600)
    assert [trial.differ("abc", "b").for_ns for _ in range(3)] == [0, 0, 1 * SECOND]


def test_rare_failures_have_nobody_left_out() -> None:
    trial = Trial()
    for _ in range(100):
        assert trial.differ("abc", "b") == Verdict()
        trial.work("abc", 60)


def test_what_stops_the_job_does_not_make_itself_forgotten() -> None:
    """A rank that hangs costs the deadline of an operation each time, however long that is."""
    trial = Trial()
    for _ in range(2):
        trial.now += 600 * SECOND
        assert trial.fail("abc", "b", "ac") == Verdict()
    trial.now += 600 * SECOND
    assert trial.fail("abc", "b", "ac").left_out == "b"


def test_late_votes_are_enough_at_once() -> None:
    trial = Trial()
    contradiction = Contradiction(("b",), enough=True)
    verdict = trial.evidence.failed(("a", "b"), contradiction, can_spare=anybody, now_ns=0)
    assert verdict.left_out == "b"


def test_who_costs_much_each_time_is_left_out_for_ten_times_as_long_in_the_end() -> None:
    trial = Trial()
    times = []
    for _ in range(16):
        trial.evidence.proposed(now_ns=trial.now)
        trial.now += 100 * SECOND
        verdict = trial.fail("abc", "b")
        times.append(verdict.for_ns // SECOND)
        trial.work("ac", verdict.for_ns / SECOND)
    assert times == [0, 0, 1, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1000, 1000, 1000]


# What is known


def test_what_is_known_is_narrowed_by_views_that_work() -> None:
    trial = Trial()
    for _ in range(3):
        trial.differ("abc", "b")
    assert trial.evidence.known("b") == "b, or who sends to it"
    trial.work("ac")
    assert trial.evidence.known("b") == "b, or who sends to it"
    trial.work("bc")
    assert trial.evidence.known("b") == "b or a, and only when they work together"


@pytest.mark.parametrize(
    ("strong", "weak", "sent", "known"),
    [
        ("b", "ac", True, "b, or who sends to it"),
        ("ab", "", True, "a or b"),
        ("ab", "", False, "a or b"),
        ("a", "", False, "a"),
    ],
)
def test_no_more_is_said_than_is_known(strong: str, weak: str, sent: bool, known: str) -> None:
    trial = Trial()
    trial.fail("abc", strong, weak, sent=sent)
    assert trial.evidence.known(strong[0]) == known


def test_one_that_is_in_every_contradiction_is_named_alone() -> None:
    trial = Trial()
    trial.fail("abcd", "ab")
    trial.fail("abcd", "ac")
    assert trial.fail("abcd", "ad") == Verdict("a", 1 * SECOND, "for what failed again and again: a")


# Who is left out


def test_failures_that_go_on_without_a_node_clear_it() -> None:
    """With four ranks and no larger side each may be it; what comes next tells more."""
    trial = Trial()
    for _ in range(3):
        verdict = trial.fail("abcd", "abcd", sent=True)
    assert verdict.left_out == "d"
    assert trial.differ("abc", "b").left_out == "b"
    assert trial.out() == "b"


def test_two_that_fail_in_turn_and_come_back_for_each_other_are_not_left_out_for_longer_each_time() -> None:
    """Seed 7256: one was left out for 64 s in the third second, of which it had been out for less than one."""
    trial = Trial()
    times = []
    for _ in range(24):
        members = "".join(node for node in "abcd" if node not in trial.out())
        verdict = trial.fail(members, "b" if "b" in members else "c")
        times += [verdict.for_ns // SECOND] * bool(verdict.left_out)
        trial.now += SECOND // 3
    assert len(times) > 10
    assert max(times) < 10


def test_two_that_contradict_each_other_take_turns() -> None:
    trial = Trial()
    out = ""
    for _ in range(9):
        verdict = trial.fail("abc", "ab")
        out += verdict.left_out
        trial.now += verdict.for_ns
    assert out == "bababab"


def test_who_names_one_node_after_the_other_is_itself_left_out_before_the_second() -> None:
    trial = Trial()
    out = ""
    for victim in "bbbcdecde":
        verdict = trial.fail("abcde", f"a{victim}")
        out += verdict.left_out
        trial.now += verdict.for_ns
    assert out[0] == "b"
    assert set(out[1:]) == {"a"}


@pytest.mark.parametrize(("sent", "failures"), [(True, 1), (False, 2)])
def test_where_nobody_can_be_spared_those_that_are_out_come_back(sent: bool, failures: int) -> None:
    """Of digests the first failure shows that it was left out for nothing."""
    trial = Trial()
    for _ in range(3):
        trial.fail("abc", "b", "ac", sent=sent)
    for _ in range(failures):
        assert trial.out() == "b"
        verdict = trial.fail("ac", "ac", sent=sent, can_spare=nobody)
    assert verdict == Verdict(returned=("b",))
    assert trial.out() == ""


# When the next view may be proposed


def test_after_three_failures_without_a_commit_the_next_views_wait_longer_and_longer() -> None:
    trial = Trial()
    waits = []
    for _ in range(10):
        trial.fail("ab", "ab", can_spare=nobody)
        waits.append(max(0, trial.evidence.may_propose_ns() - trial.now) // SECOND)
        trial.now = max(trial.now, trial.evidence.may_propose_ns())
    assert waits == [0, 0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert trial.evidence.why_waits() == "10 views in a row failed; the next one waits; part of each failure: a or b"
    trial.work("ab")
    trial.fail("ab", "ab", can_spare=nobody)
    assert trial.evidence.may_propose_ns() <= trial.now


def test_a_node_that_is_left_out_spares_the_others_the_wait() -> None:
    trial = Trial()
    for _ in range(3):
        trial.fail("abc", "abc", can_spare=nobody)
    assert trial.differ("abc", "b").left_out
    assert trial.evidence.may_propose_ns() <= trial.now


def test_views_have_an_allowance_whatever_is_committed_in_between() -> None:
    trial = Trial()
    times = []
    while trial.now < HOUR:
        trial.now = max(trial.now, trial.evidence.may_propose_ns())
        times.append(trial.now)
        trial.evidence.proposed(now_ns=trial.now)
        trial.work("ab")
    assert times[MAX_VIEWS - 1] == 0
    assert times[MAX_VIEWS] == VIEW_INTERVAL_NS
    assert len(times) <= MAX_VIEWS + HOUR // VIEW_INTERVAL_NS + 1


def test_nothing_grows_with_the_number_of_failures() -> None:
    trial = Trial()
    for number in range(10_000):
        trial.fail("abc", "abc"[number % 3])
        trial.work("abc"[: 1 + number % 3])
    sizes = [len(each) for each in vars(trial.evidence).values() if hasattr(each, "__len__")]
    assert max(sizes) <= 16
    standing = vars(trial.evidence)["_standings"]["a"]
    assert standing.total.value.bit_length() < 64


# One bad member, for an hour


Act = Callable[[Bench, str, random.Random], None]


def report(**fields: object) -> Act:
    def act(bench: Bench, node: str, rng: random.Random) -> None:
        bench.say(node, m.Report(view_id=bench.view_id, **fields))

    return act


def votes_no(bench: Bench, node: str, rng: random.Random) -> None:
    bench.say(node, m.Vote(view_id=bench.view_id, step=bench.step, ok=False, reason="no"))


def computes_wrong(bench: Bench, node: str, rng: random.Random) -> None:
    assert bench.core.view is not None
    for member in bench.core.view.nodes:
        bench.vote(member, digest=b"wrong" if member == node else b"d")


def starts_anew(bench: Bench, node: str, rng: random.Random) -> None:
    bench.join(node, incarnation=bench.incarnations[node] + 1)


def leaves_and_comes_back(bench: Bench, node: str, rng: random.Random) -> None:
    bench.say(node, m.Leave())
    bench.join(node, incarnation=bench.incarnations[node] + 1)


def does_not_vote(bench: Bench, node: str, rng: random.Random) -> None:
    assert bench.core.view is not None
    bench.vote(*(member for member in bench.core.view.nodes if member != node))
    bench.advance(bench.config.vote_timeout_ns)


def breaks_the_rules(bench: Bench, node: str, rng: random.Random) -> None:
    bench.say(node, m.BeginStep(view_id=bench.view_id, step=bench.step + 5))


def names_anybody(bench: Bench, node: str, rng: random.Random) -> None:
    assert bench.core.view is not None
    others = [other for other in bench.core.view.nodes if other != node]
    named = tuple(rng.sample(others, rng.randint(0, len(others))))
    kind = rng.choice(["failed", "mismatch", "corrupted", "differs"])
    lost = tuple((other, "silence") for other in others if rng.random() < 0.3)
    fields = {"blamed": named, "kind": kind, "lost": lost, "culprit": rng.choice(["", *others])}
    bench.say(node, m.Report(view_id=bench.view_id, reason="because", **fields))


class Hour:
    """An hour, or several, in which one node does `act` in each view that it is in; the others take a step in 10 s.

    every: it does so in each so many views once.
    """

    def __init__(self, act: Act, *, every: int = 1, nodes: str = "abcdef", bad: str = "c", hours: int = 1) -> None:
        rng = random.Random(7)
        self.bench = bench = Bench(len(nodes))
        self.most_out = 0  # of the others at once
        acted = seen = 0
        views = 0
        bench.join(*nodes)
        while bench.now < hours * HOUR:
            while bench.core.state is CoordinatorState.PROPOSED:
                bench.confirm()
            view = bench.core.view
            if view is not None:
                if view.view_id > seen:
                    seen, views = view.view_id, views + 1
                    self.most_out = max(self.most_out, len(set(nodes) - {*view.nodes, bad}))
                if bad in view.nodes and view.view_id > acted and views % every == 0:
                    acted = view.view_id
                    act(bench, bad, rng)
                    continue
                bench.vote(*view.nodes)
            at = bench.core.next_timer()
            bench.advance(min(10 * SECOND, 10 * SECOND if at is None else at - bench.now))

    @property
    def commits(self) -> int:
        return self.bench.core.history.committed_step

    def rows(self) -> int:
        return len([each for each in self.bench.records if isinstance(each, Proposed | InstalledView)])


@pytest.mark.parametrize(
    "act",
    [
        report(reason="no"),
        report(lost=(("a", "silence"),), culprit="a"),
        report(lost=(("f", "silence"),), culprit="f"),
        report(blamed=("a",), culprit="a", kind="corrupted", reason="spoiled"),
        report(blamed=("a",), culprit="a", kind="differs", reason="heard otherwise"),
        report(blamed=tuple("abdef"), kind="differs", reason="heard otherwise"),
        report(blamed=tuple("abdef"), kind="mismatch", reason="differs"),
        report(culprit="a", reason="a did not call"),
        votes_no,
        computes_wrong,
        starts_anew,
        breaks_the_rules,
        names_anybody,
    ],
)
def test_a_member_that_ends_every_view_costs_the_others_little(act: Act) -> None:
    hour = Hour(act)
    assert hour.rows() <= 520
    assert hour.commits > 330
    assert hour.most_out <= 1


def test_a_member_that_ends_every_second_view_does_no_better() -> None:
    hour = Hour(report(reason="no"), every=2)
    assert hour.rows() <= 520
    assert hour.commits > 330


def test_a_member_that_leaves_and_comes_back_all_the_time_is_held_to_the_allowance() -> None:
    hour = Hour(leaves_and_comes_back)
    assert hour.rows() <= 2 * (MAX_VIEWS + HOUR // VIEW_INTERVAL_NS)


@pytest.mark.slow
def test_a_member_that_never_votes_costs_minutes_each_time_and_a_tenth_of_the_day() -> None:
    day = Hour(does_not_vote, hours=24)
    assert day.rows() <= 150
    assert day.commits > 0.85 * 24 * 360


@pytest.mark.parametrize("nodes", ["ab", "abc"])
def test_two_that_differ_wait_and_three_go_on_without_one(nodes: str) -> None:
    hour = Hour(computes_wrong, nodes=nodes, bad="b")
    assert hour.rows() <= 2 * (10 + 3600 // 30)
    if nodes == "abc":
        assert hour.commits > 330


def test_all_members_hear_who_is_left_out_and_it_hears_why() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    for _ in range(3):
        bench.inbox.clear()
        for node in "abc":
            bench.vote(node, digest=b"wrong" if node == "b" else b"d")
        if "b" in bench.proposed().nodes:
            bench.confirm()
    ended = bench.notes(a.ViewAborted)[-1].event
    assert ended.lost == ("b",)
    assert "b is left out for 1 s, for what failed again and again: b, or who sends to it" in ended.cause
    assert "b, or who sends to it" in bench.told("b", m.Withhold).cause
    assert bench.proposed().nodes == ("a", "c")


def test_the_reports_of_all_are_heard_when_the_view_before_failed_too() -> None:
    """The fastest report names the wrong one; with the others it is plain."""
    bench = Bench(4, gather_ns=500 * MS)
    bench.installed(*"abcd")
    bench.say("a", m.Report(view_id=1, reason="no"))
    bench.confirm()
    bench.say("a", m.Report(view_id=2, reason="d did not call", culprit="d"))
    assert bench.core.state is CoordinatorState.FORMING
    for node in "bc":
        bench.say(node, m.Report(view_id=2, reason="a did not call", culprit="a"))
    bench.advance(500 * MS)
    ended = bench.notes(a.ViewAborted)[-1].event
    assert (ended.cause, ended.culprit) == ("a: d did not call; b, c: a did not call", "a")
    assert bench.proposed().nodes == tuple("abcd")


def test_one_node_after_the_other_cannot_be_left_out_by_what_one_says_of_paths() -> None:
    bench = Bench(4)
    bench.installed(*"abcd")
    left: list[Sequence[str]] = []
    for _ in range(2):
        last = bench.core.view
        assert last is not None
        victim = last.nodes[-1]
        bench.say("a", m.Report(view_id=bench.view_id, lost=((victim, "silence"),), culprit=victim))
        bench.advance(bench.config.gather_ns)
        left.append(bench.proposed().nodes)
        bench.confirm()
    assert left == [("a", "b", "c"), ("b", "c")]
