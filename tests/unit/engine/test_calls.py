"""What the ranks of a view have called: compared, agreed, late, and left behind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quicoll.engine.calls import MAX_AHEAD, MAX_AHEAD_BYTES, Call, Calls, Known, Slot, Work, measurements, site_numbers
from quicoll.engine.messages import Announce, Farewell, size_in_memory
from quicoll.errors import Mismatch, PeerError
from quicoll.membership.view import Member, View
from quicoll.plan.choice import RULES

VIEW_ID = 7
WORLD, PAIR = 0, 5  # ids of groups
DONE = Farewell(VIEW_ID, done=True)
BYE = Farewell(VIEW_ID)
ENDED = Farewell(VIEW_ID, next_step=7)


def view(nodes: str, sites: str = "") -> View:
    members = tuple(
        Member(rank=rank, node=node, incarnation=1, site=sites[rank] if sites else "")
        for rank, node in enumerate(nodes)
    )
    return View(view_id=VIEW_ID, members=members, seed=0, committed_step=0, committed_view=0)


def make(known: Known) -> Work:
    raise AssertionError("nothing is executed here")


def call(name: str = "all_reduce", signature: str = "", **options: Any) -> Call:
    return Call(name, signature or f"{name} float32 8", make, **options)


def announce(
    seq: int, signature: str = "all_reduce float32 8", group: int = WORLD, *, measured: tuple[int, ...] = ()
) -> Announce:
    return Announce(VIEW_ID, group, seq, signature, (), measured)


class Rank:
    """Calls of rank 0, on a clock that goes on by one with every event."""

    def __init__(self, nodes: str = "abc", sites: str = "") -> None:
        self.calls = Calls(view(nodes, sites), 0)
        self.now_ns = 0

    def tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def call(self, what: Call, group: int = WORLD, measured: tuple[int, ...] = ()) -> Slot:
        slot = self.calls.open(what, group)
        self.calls.called(slot, announce(slot.seq, what.signature, group, measured=measured), self.tick())
        return slot

    def finish(self, slot: Slot) -> list[tuple[int, Farewell]]:
        self.calls.finish(slot)
        return self.calls.answers()

    def hear(self, rank: int, seq: int, *args: Any, **options: Any) -> Slot | None:
        return self.calls.announced(rank, announce(seq, *args, **options), self.tick())


# -- comparing -------------------------------------------------------------------------------------------------------


def test_equal_calls_are_settled_by_the_last_of_them_and_compare_equal() -> None:
    rank = Rank()
    assert rank.hear(2, 0) is None
    slot = rank.call(call())
    assert not slot.settled
    assert rank.hear(1, 0) is slot
    assert slot.settled
    rank.calls.compare(slot)
    assert slot.arrived_ns == {2: 1, 0: 2, 1: 3}
    assert slot.name == "all_reduce#0"


def test_this_ranks_own_call_settles_where_it_is_the_last() -> None:
    rank = Rank("ab")
    rank.hear(1, 0)
    slot = rank.calls.open(call(), WORLD)
    assert rank.calls.called(slot, announce(0), 5)
    assert slot.arrived_ns[0] == 5


def test_two_calls_that_differ_settle_before_the_others_have_called_and_both_are_named() -> None:
    rank = Rank()
    slot = rank.call(call())
    assert rank.hear(2, 0, "barrier") is slot
    with pytest.raises(Mismatch) as e:
        rank.calls.compare(slot)
    assert e.value.message == "rank 0 called all_reduce float32 8, rank 2 called barrier"
    assert (e.value.rank, e.value.node) == (2, "c")
    assert rank.calls.differing(slot) == (2,)


def test_a_difference_that_came_before_this_rank_called_is_seen_when_it_calls() -> None:
    rank = Rank()
    assert rank.hear(1, 0, "barrier") is None
    slot = rank.call(call())
    assert slot.settled
    assert rank.calls.differing(slot) == (1,)


def test_all_that_differ_are_named_in_order_of_rank() -> None:
    rank = Rank("abcd")
    slot = rank.call(call())
    for other in (3, 2, 1):
        rank.hear(other, 0, "all_reduce float32 8" if other == 2 else "barrier")
    with pytest.raises(Mismatch, match="ranks 0, 2 called all_reduce float32 8, ranks 1, 3 called barrier") as e:
        rank.calls.compare(slot)
    assert (e.value.rank, rank.calls.differing(slot)) == (1, (1, 3))


def test_a_rank_that_announces_in_a_group_that_it_is_not_in_is_an_error() -> None:
    rank = Rank()
    slot = rank.call(call(ranks=(0, 1), where="0:1"), PAIR)
    assert slot.name == "all_reduce#0@0:1"
    assert rank.hear(2, 0, group=PAIR) is slot
    with pytest.raises(PeerError, match="a group that it is not in") as e:
        rank.calls.compare(slot)
    assert (e.value.rank, e.value.node) == (2, "c")


def test_groups_count_for_themselves() -> None:
    rank = Rank()
    assert [rank.call(call(), group).seq for group in (WORLD, PAIR, WORLD, PAIR, PAIR)] == [0, 0, 1, 1, 2]


def test_the_first_announcement_of_a_rank_counts() -> None:
    rank = Rank()
    slot = rank.call(call())
    rank.hear(1, 0)
    rank.hear(1, 0, "barrier")
    assert slot.announced[1].signature == "all_reduce float32 8"
    assert not slot.settled


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_an_announcement_for_an_operation_that_is_over_is_an_error() -> None:
    rank = Rank("ab")
    slot = rank.call(call())
    rank.hear(1, 0)
    rank.calls.finish(slot)
    with pytest.raises(PeerError, match="announced operation 0 twice") as e:
        rank.hear(1, 0)
    assert (e.value.rank, e.value.view) == (1, VIEW_ID)


def test_what_a_peer_is_ahead_is_bounded_in_bytes_too() -> None:
    rank = Rank()
    signature = "s" * 4096
    said = 0
    while said * size_in_memory(announce(said, signature)) <= MAX_AHEAD_BYTES - size_in_memory(announce(0, signature)):
        rank.hear(1, said, signature)
        said += 1
    with pytest.raises(PeerError, match=f"is {MAX_AHEAD_BYTES} bytes ahead"):
        rank.hear(1, said, signature)
    rank.hear(2, 0)  # each peer has its own
    for _ in range(said):
        rank.call(call(signature=signature))  # this rank catches up
    assert rank.hear(1, said, signature) is None


def test_a_peer_may_be_so_far_ahead_and_no_farther() -> None:
    rank = Rank()
    rank.hear(1, MAX_AHEAD)
    with pytest.raises(PeerError, match=f"is {MAX_AHEAD + 1} operations ahead"):
        rank.hear(1, MAX_AHEAD + 1)
    rank.call(call())
    rank.hear(1, MAX_AHEAD + 1)  # counted from what this rank has called


def test_what_is_kept_for_peers_is_bounded_over_all_groups() -> None:
    rank = Rank()
    for group in range(MAX_AHEAD + 1):
        rank.hear(1, 0, group=group)
    with pytest.raises(PeerError, match="operations ahead"):
        rank.hear(1, 0, group=MAX_AHEAD + 1)


# -- the deadline ----------------------------------------------------------------------------------------------------


def test_ranks_that_did_not_call_are_named_and_the_first_is_the_cause() -> None:
    rank = Rank("abcd")
    slot = rank.call(call())
    rank.hear(2, 0)
    error = rank.calls.late(slot, 1.5, 12)
    assert error.message == "rank 1 (b), rank 3 (d) did not call all_reduce#0 within 1.5 s"
    assert (error.rank, error.node, error.view, error.step, error.op) == (1, "b", VIEW_ID, 12, "all_reduce#0")


def test_what_a_late_rank_called_instead_is_told_and_cut_to_size() -> None:
    rank = Rank("ab")
    slot = rank.call(call())
    rank.hear(1, 0, "x" * 300, group=PAIR)
    rank.hear(1, 1, "second", group=PAIR)
    error = rank.calls.late(slot, 2.0, None)
    assert error.message == f"rank 1 (b) did not call all_reduce#0 within 2 s; rank 1 called {'x' * 80}..."


def test_where_all_have_called_it_is_the_data_that_is_late_and_nobody_is_named() -> None:
    rank = Rank("ab")
    slot = rank.call(call())
    rank.hear(1, 0)
    error = rank.calls.late(slot, 2.0, None)
    assert (error.message, error.rank, error.node) == ("its data did not arrive within 2 s", None, "")


# -- the network -----------------------------------------------------------------------------------------------------


def test_the_first_call_of_a_group_that_measures_leads_and_the_network_serves_those_that_follow() -> None:
    rank = Rank("ab")
    assert not rank.call(call("barrier")).leads
    leading = rank.call(call(measures=True), measured=(RULES, 0, 4, 0, 1 << 20))
    following = rank.call(call(measures=True))
    assert (leading.leads, following.leads) == (True, False)
    assert rank.calls.network(WORLD) is None
    rank.hear(1, 1, measured=(RULES, 4, 0, 1 << 20, 0))
    network = rank.calls.agree(leading)
    assert rank.calls.network(WORLD) is network
    assert network.world == 2
    assert rank.calls.known(following).network is network
    assert rank.calls.known(rank.call(call())).network is None
    assert rank.call(call(measures=True), PAIR).leads


def test_all_ranks_make_the_same_network_of_the_same_rows() -> None:
    rows = {0: (0, 4, 9, 0, 100, 200), 1: (5, 0, 7, 100, 0, 300), 2: (9, 7, 0, 200, 300, 0)}
    made = []
    for own in range(3):
        calls = Calls(view("abc", "xyx"), own)
        slot = calls.open(call(measures=True), WORLD)
        for other in sorted(rows, key=lambda rank: rank != own):
            message = announce(0, measured=(RULES, *rows[other]))
            if other == own:
                calls.called(slot, message, 0)
            else:
                calls.announced(other, message, 0)
        made.append(calls.agree(slot))
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("measured", [(), (1, 2, 3), (1, 2, 3, 4, 5, 6)])
def test_a_rank_that_brings_no_measurements_is_an_error(measured: tuple[int, ...]) -> None:
    rank = Rank("ab")
    slot = rank.call(call(measures=True), measured=(RULES, 0, 4, 0, 1 << 20))
    rank.hear(1, 0, measured=measured)
    with pytest.raises(PeerError, match="brings no measurements") as e:
        rank.calls.agree(slot)
    assert (e.value.rank, e.value.node) == (1, "b")


@pytest.mark.parametrize("measured", [(4, 0, 1 << 20, 0), (RULES + 1, 4, 0, 1 << 20, 0)])
def test_a_rank_that_chooses_by_other_rules_is_named_and_told_of_versions(measured: tuple[int, ...]) -> None:
    """It would take another algorithm, and both would wait until their deadline. The first rules had no number."""
    rank = Rank("ab")
    slot = rank.call(call(measures=True), measured=(RULES, 0, 4, 0, 1 << 20))
    rank.hear(1, 0, measured=measured)
    with pytest.raises(Mismatch, match=r"rank 1 \(b\) chooses .* different versions of quicoll") as e:
        rank.calls.agree(slot)
    assert (e.value.rank, e.value.node) == (1, "b")
    assert rank.calls.network(WORLD) is None


def test_counts_are_known_of_those_that_have_announced() -> None:
    rank = Rank()
    slot = rank.calls.open(call(gathers=True), WORLD)
    rank.calls.called(slot, Announce(VIEW_ID, WORLD, 0, "", (3,)), 0)
    rank.calls.announced(2, Announce(VIEW_ID, WORLD, 0, "", (5,)), 0)
    assert rank.calls.known(slot) == Known([(3,), None, (5,)], None)


def test_a_rate_counts_where_the_round_trip_is_known() -> None:
    row = measurements([(None, None), (8_000_000, 1 << 20), (None, 1 << 20), (8_000_000, None)])
    assert row[0] == RULES
    latency, rate = row[1:5], row[5:]
    assert (latency[0], latency[2], rate[0], rate[2]) == (0, 0, 0, 0)
    assert latency[1] == latency[3]
    assert 3000 <= latency[1] <= 5000  # half of 8 ms in microseconds, quantised
    assert (rate[1], rate[3]) == (1 << 20, 0)  # not measured yet: not known


def test_sites_are_numbered_as_they_appear() -> None:
    seen = view("abcde", "nsnsx")
    assert site_numbers(seen) == (0, 1, 0, 1, 2)
    assert site_numbers(seen, [4, 1, 2]) == (0, 1, 2)
    assert site_numbers(view("ab")) == (0, 0)


def test_hosts_are_sites_where_no_sites_are_named_and_some_ranks_share_one() -> None:
    def at(hosts: str, sites: str = "") -> tuple[int, ...]:
        seen = view("abcd"[: len(hosts)], sites)
        members = tuple(
            msgspec.structs.replace(each, addresses=((host, 7),) if host != "-" else ())
            for each, host in zip(seen.members, hosts, strict=True)
        )
        return site_numbers(msgspec.structs.replace(seen, members=members))

    assert at("xxyy") == (0, 0, 1, 1)
    assert at("xyxz") == (0, 1, 0, 2)
    assert at("xxxx") == at("xyzw") == (0, 0, 0, 0)  # nothing is inside one, or all is
    assert at("xx-y") == (0, 0, 0, 0)  # where one is, is not known
    assert at("xxyy", "nsns") == (0, 1, 0, 1)  # who names sites knows better
    assert at("xxyy", "nnnn") == (0, 0, 1, 1)


# -- farewells -------------------------------------------------------------------------------------------------------


def test_a_peer_that_leaves_is_answered_at_once_where_nothing_runs() -> None:
    assert Rank().calls.farewell(1, BYE) == [(1, DONE)]


def test_a_peer_that_leaves_waits_for_what_it_has_called_and_not_for_what_begins_later() -> None:
    rank = Rank()
    first, second = rank.call(call()), rank.call(call())
    for seq in (0, 1):
        rank.hear(1, seq)
    assert rank.calls.farewell(1, BYE) == []
    later = rank.call(call())
    assert rank.finish(first) == []
    assert rank.finish(second) == [(1, DONE)]
    assert rank.finish(later) == []


def test_nobody_waits_for_an_operation_that_waits_for_the_leaving_rank() -> None:
    rank = Rank()
    rank.call(call())
    rank.hear(2, 0)
    assert rank.calls.farewell(1, BYE) == [(1, DONE)]


def test_a_leaving_rank_waits_for_operations_of_groups_that_it_is_not_in() -> None:
    """This rank may need the view for them; the leaving rank's end would end it."""
    rank = Rank()
    slot = rank.call(call(ranks=(0, 2), where="0:1"), PAIR)
    assert rank.calls.farewell(1, BYE) == []
    assert rank.finish(slot) == [(1, DONE)]


def test_what_only_a_peer_has_called_holds_nobody_back() -> None:
    rank = Rank()
    rank.hear(1, 0)
    assert rank.calls.farewell(1, BYE) == [(1, DONE)]


def pair_called() -> Rank:
    """A rank that has done something with rank 2 alone, and may again."""
    rank = Rank()
    slot = rank.call(call(ranks=(0, 2), where="0:1", divides=True), PAIR)
    rank.hear(2, 0, group=PAIR)
    rank.calls.finish(slot)
    return rank


def test_a_rank_whose_work_has_ended_is_answered_at_once_where_nothing_goes_without_it() -> None:
    rank = Rank()
    rank.calls.finish(rank.call(call()))
    rank.calls.finish(rank.call(call(ranks=(0, 2)), PAIR))  # the library's own
    assert rank.calls.farewell(1, ENDED) == [(1, DONE)]


def test_a_rank_whose_work_has_ended_waits_for_what_others_begin_later_without_it() -> None:
    rank = pair_called()
    assert rank.calls.farewell(1, ENDED) == []
    later = rank.call(call(ranks=(0, 2), where="0:1", divides=True), PAIR)
    assert rank.calls.answers() == []
    assert rank.finish(later) == []
    rank.calls.leave([2])
    assert rank.calls.answers() == [(1, DONE)]


def test_who_fails_or_is_sent_away_does_not_wait_for_what_others_begin_later() -> None:
    assert pair_called().calls.farewell(1, BYE) == [(1, DONE)]


def test_what_the_leaving_rank_knows_of_sub_groups_counts() -> None:
    assert Rank().calls.farewell(1, Farewell(VIEW_ID, next_step=7, divided=True)) == []


@pytest.mark.parametrize("how", ["split", "named"])
def test_a_sub_group_in_which_nothing_was_called_yet_counts(how: str) -> None:
    rank = Rank()
    if how == "split":
        rank.calls.finish(rank.call(call(divides=True)))
    else:
        rank.calls.divide()
    assert rank.calls.farewell(1, ENDED) == []
    assert rank.finish(rank.call(call(ranks=(0, 2), where="0:1", divides=True), PAIR)) == []


def test_a_rank_whose_work_has_ended_is_answered_when_the_other_calls_what_it_would_have_to_call() -> None:
    rank = pair_called()
    assert rank.calls.farewell(1, ENDED) == []
    rank.call(call())
    assert rank.calls.answers() == [(1, DONE)]


def test_a_rank_whose_work_has_ended_is_answered_when_the_other_begins_a_step_that_it_has_no_part_in() -> None:
    rank = pair_called()
    rank.calls.begun(6)  # the last of the leaving rank's, whose decision is on its way here
    assert rank.calls.farewell(1, ENDED) == []
    rank.calls.begun(7)
    assert rank.calls.answers() == [(1, DONE)]


def test_who_is_alone_answers_all_whose_work_has_ended() -> None:
    rank = pair_called()
    assert rank.calls.farewell(1, ENDED) == []
    assert rank.calls.farewell(2, ENDED) == [(1, DONE), (2, DONE)]


def test_all_who_wait_are_answered_when_the_view_is_over() -> None:
    rank = Rank()
    slot, other = rank.call(call()), rank.call(call())
    for peer in (1, 2):
        for seq in (0, 1):
            rank.hear(peer, seq)
        rank.calls.farewell(peer, BYE)
    rank.calls.close()
    assert rank.finish(slot) == [(1, DONE), (2, DONE)]
    assert rank.calls.farewell(1, BYE) == [(1, DONE)]
    assert rank.finish(other) == []


def test_the_own_farewell_waits_for_every_peers_answer() -> None:
    calls = Rank().calls
    calls.leave([1, 2])
    assert calls.unanswered
    assert calls.farewell(2, DONE) == []
    assert calls.unanswered
    calls.farewell(1, DONE)
    assert not calls.unanswered


def test_what_a_peer_has_called_first_and_this_rank_has_not_is_found() -> None:
    rank = Rank()
    assert rank.calls.uncalled([4, 5]) is None
    rank.hear(2, 0, group=5)
    rank.hear(1, 0, group=4)
    rank.hear(1, 1, group=5)  # not the next one of its group
    assert rank.calls.uncalled([4, 5]) == 5
    assert rank.calls.uncalled([4]) == 4
    rank.call(call(ranks=(2, 0)), group=5)
    assert rank.calls.uncalled([4, 5]) == 4  # heard of before the second one
    rank.call(call(ranks=(1, 0)), group=4)
    assert rank.calls.uncalled([4, 5]) == 5
    assert rank.calls.uncalled([WORLD]) is None
