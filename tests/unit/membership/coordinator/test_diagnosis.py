"""Who is to blame for the end of a view, by what its members say of each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicoll.membership import messages as m
from quicoll.membership.coordinator.diagnosis import Diagnosis, ViewFailure, most_suspected
from quicoll.membership.coordinator.evidence import Contradiction
from quicoll.membership.view import Member, View

GATHER_NS = 500


def diagnosis(nodes: str) -> Diagnosis:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate(nodes))
    return Diagnosis(
        View(view_id=1, members=members, seed=7, committed_step=0, committed_view=0), None, gather_ns=GATHER_NS
    )


def judged(nodes: str, words: list[tuple[str, dict[str, Any]]], *, without: str = "") -> ViewFailure:
    present = [node for node in nodes if node not in without]
    heard = diagnosis(nodes)
    for node, fields in words:
        heard.add_report(node, m.Report(view_id=1, **fields), connected=present, now_ns=0)
    return heard.failure(present)


def lost(*nodes: str) -> dict[str, Any]:
    return {"lost": tuple((node, "silence") for node in nodes), "culprit": nodes[0]}


def spoiled(*nodes: str) -> dict[str, Any]:
    return {"blamed": nodes, "culprit": nodes[0], "kind": "corrupted", "reason": "spoiled"}


def differs(*nodes: str) -> dict[str, Any]:
    return {"blamed": nodes, "culprit": nodes[0], "kind": "mismatch", "reason": "differs"}


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ([("b", spoiled("a"))], "a"),  # one pair: the source
        ([("a", spoiled("b")), ("c", spoiled("b"))], "b"),  # its bits came spoiled to two
        ([("c", spoiled("a", "b"))], "c"),  # the bits of two came spoiled to it
        ([("c", spoiled("a")), ("c", spoiled("b"))], "c"),
        ([("b", spoiled("c")), ("c", spoiled("b"))], "c"),  # one pair, both directions: the source of the first
        ([("a", spoiled("b")), ("c", spoiled("d"))], "b"),  # two pairs, nothing in common: the source of the first
        ([("a", spoiled("d")), ("b", spoiled("d")), ("c", spoiled("b"))], ""),  # b and d are in two each
    ],
)
def test_the_node_in_most_spoiled_pairs_is_to_blame_or_the_source_of_the_first(words: Any, culprit: str) -> None:
    failure = judged("abcd", words)
    assert failure.culprit == (culprit or words[0][1]["culprit"])
    assert (failure.kind, failure.lost) == ("corrupted", ())


@pytest.mark.parametrize(
    ("nodes", "words", "culprit"),
    [
        ("ab", [("a", differs("b")), ("b", differs("a"))], ""),
        ("abc", [("a", differs("b", "c")), ("b", differs("a")), ("c", differs("a"))], "a"),
        ("abc", [("a", differs("b")), ("b", differs("a")), ("c", differs("a"))], "a"),  # a saw b's call alone
        ("abcd", [("a", differs("c")), ("b", differs("c", "d")), ("c", differs("a", "b")), ("d", differs("b"))], ""),
        ("abcde", [("a", differs("c", "d", "e")), ("b", differs("c", "d", "e")), ("c", differs("a", "b"))], ""),
    ],
)
def test_of_different_calls_one_that_differs_from_all_others_is_to_blame(nodes: str, words: Any, culprit: str) -> None:
    failure = judged(nodes, words)
    assert (failure.kind, failure.culprit) == ("mismatch", culprit)
    assert failure.cause == "differs"  # the reason names the ranks, alike at all ends


@pytest.mark.parametrize(
    ("words", "culprit", "excluded"),
    [
        ([("a", lost("b"))], "b", "b"),  # of a single pair the higher rank
        ([("b", lost("a"))], "b", "b"),
        ([("a", lost("b")), ("c", lost("a"))], "a", "a"),
        ([("a", lost("b", "c", "d"))], "a", "a"),
        ([("a", lost("b")), ("c", lost("d"))], "d", "bd"),
    ],
)
def test_who_lost_most_others_is_to_blame_and_told_as_lost(words: Any, culprit: str, excluded: str) -> None:
    failure = judged("abcd", words)
    assert (failure.kind, failure.culprit, failure.lost) == ("failed", culprit, tuple(excluded))


def test_a_node_that_is_gone_explains_what_was_said_of_it() -> None:
    heard = diagnosis("abc")
    heard.add_report("b", m.Report(view_id=1, lost=(("a", "silence"),)), connected="abc", now_ns=0)
    heard.node_lost("a", "a was lost: silence")
    assert heard.complete("bc", now_ns=0)
    assert heard.failure("bc") == ViewFailure(
        "a was lost: silence", culprit="a", lost=("a",), contradiction=Contradiction(("a",), paths=True)
    )
    assert heard.excluded("bc") == {}


def test_a_node_of_no_part_in_the_view_that_is_gone_explains_nothing() -> None:
    heard = diagnosis("abc")
    heard.add_report("b", m.Report(view_id=1, reason="why"), connected="abc", now_ns=0)
    heard.node_lost("x", "x left")
    assert heard.failure("abc") == ViewFailure("b: why", contradiction=Contradiction(("b",)))


def odd(*nodes: str) -> dict[str, Any]:
    return {"blamed": nodes, "culprit": nodes[0] if len(nodes) == 1 else "", "kind": "differs", "reason": "differs"}


@pytest.mark.parametrize(
    ("words", "strong", "weak"),
    [
        ([("d", odd()), ("a", odd("d")), ("b", odd("d")), ("c", odd("d"))], "d", "abc"),
        ([("a", odd("d")), ("b", odd("d"))], "d", "abc"),  # who reports nothing may have sent to it all the same
        ([("a", odd("c", "d")), ("b", odd("c", "d"))], "abcd", ""),
        ([("a", odd()), ("b", odd())], "abcd", ""),
    ],
)
def test_where_ranks_find_that_digests_differ_the_odd_one_may_have_been_lied_to(
    words: Any, strong: str, weak: str
) -> None:
    failure = judged("abcd", words)
    assert failure.kind == "differs"
    found = failure.contradiction
    assert (sorted(found.strong), sorted(found.weak), found.sent) == (list(strong), list(weak), True)


def test_the_odd_one_cannot_say_who_is_odd_so_the_others_are_waited_for() -> None:
    heard = diagnosis("abc")
    heard.add_report("c", m.Report(view_id=1, **odd()), connected="abc", now_ns=10)
    assert not heard.complete("abc", now_ns=10 + GATHER_NS - 1)
    assert heard.complete("abc", now_ns=10 + GATHER_NS)


def test_an_accusation_waits_for_the_others_and_anything_else_for_nobody() -> None:
    heard = diagnosis("abc")
    heard.add_report("a", m.Report(view_id=1, reason="left its step", culprit="a"), connected="abc", now_ns=0)
    assert heard.complete("abc", now_ns=0)
    for words in (lost("b"), spoiled("b"), differs("b")):
        heard = diagnosis("abc")
        heard.add_report("a", m.Report(view_id=1, **words), connected="abc", now_ns=10)
        assert not heard.complete("abc", now_ns=10 + GATHER_NS - 1)
        assert heard.complete("abc", now_ns=10 + GATHER_NS)
        assert heard.complete("a", now_ns=10)  # all who are there have spoken


def test_the_first_report_says_what_kind_of_failure_it_was_and_others_add_nothing_of_their_own_kind() -> None:
    failure = judged("abc", [("a", spoiled("b")), ("c", {"reason": "left its step", "culprit": "c"})])
    assert failure == ViewFailure("a: spoiled", "corrupted", "b", contradiction=Contradiction(("a", "b"), ("c",)))


def test_what_names_nobody_of_the_view_accuses_nobody() -> None:
    words = [("a", lost("x")), ("a", lost("a"))]
    failure = ViewFailure("a: the view cannot go on", culprit="x", contradiction=Contradiction(("a",)))
    assert judged("abc", words) == failure


def test_of_each_member_one_reason_and_one_pair_with_each_other_is_kept() -> None:
    """However often it reports: ten thousand times a second is what a link lets through."""
    heard = diagnosis("abc")
    for number in range(1000):
        report = m.Report(
            view_id=1,
            blamed=("b", "c", f"y{number}"),
            reason=f"{number:>500}",
            lost=(("b", f"{number:>500}"),),
            culprit=f"x{number}",
        )
        heard.add_report("a", report, connected="abc", now_ns=0)
    sizes = [len(each) for each in vars(heard).values() if isinstance(each, dict)]
    assert max(sizes) <= 2
    assert len(vars(heard)["_suspicions"].pairs) == 1


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), max_size=12), st.randoms())
def test_the_suspect_does_not_depend_on_order_or_direction(pairs: list[tuple[str, str]], random: Any) -> None:
    pairs = [(a, b) for a, b in pairs if a != b]
    found = most_suspected(pairs)
    turned = [random.choice([(a, b), (b, a)]) for a, b in pairs]
    random.shuffle(turned)
    assert most_suspected(turned) == found
    node, most, involved = found
    assert involved == len({name for pair in pairs for name in pair})
    if node:
        assert most == len({pair for pair in map(frozenset, pairs) if node in pair})
