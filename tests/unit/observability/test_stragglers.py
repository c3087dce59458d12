"""Who is late, by how much, and that no second is counted twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError

import pytest

from quicoll.observability.stragglers import Late, Straggler, Stragglers

MS = 1_000_000


class Bench:
    """One observer; times in milliseconds."""

    def __init__(self, *, after: int = 100, rtt: Sequence[int] = ()) -> None:
        self.core = Stragglers(after_ns=after * MS)
        self.rtt = rtt
        self.asked: list[int] = []

    def called(self, op: str, *at: int, nodes: str = "abcdefgh") -> tuple[Late, ...]:
        return self.core.called(
            op, {rank: ms * MS for rank, ms in enumerate(at)}, rtt_ns=self._rtt_ns, node=nodes.__getitem__
        )

    def _rtt_ns(self, rank: int) -> int:
        self.asked.append(rank)
        return self.rtt[rank] * MS if self.rtt else 0


def test_the_last_rank_is_late_by_what_it_came_after_the_median() -> None:
    bench = Bench()
    assert bench.called("all_reduce#0", 1000, 1010, 1500, 1020, 1005) == (Late(2, "all_reduce#0", 0.49),)
    assert bench.core.table == (Straggler(2, "c", 1, 0.49, "all_reduce#0", 0.49),)


def test_of_two_ranks_the_first_sets_the_measure_and_a_lone_one_is_never_late() -> None:
    bench = Bench()
    assert bench.called("a", 700, 100) == (Late(0, "a", 0.6),)
    assert bench.called("b", 9000) == ()
    assert bench.called("c") == ()


@pytest.mark.parametrize(("at", "late"), [(1100, False), (1101, True)])
def test_a_rank_is_late_beyond_the_threshold_and_not_at_it(at: int, late: bool) -> None:
    assert bool(Bench(after=100).called("a", 1000, 1000, at)) is late


def test_two_round_trips_are_never_late_however_small_the_setting() -> None:
    bench = Bench(after=1, rtt=(0, 80, 80))
    assert bench.called("a", 1000, 1000, 1160) == ()
    assert bench.called("b", 2000, 2000, 2161) == (Late(2, "b", 0.161),)
    assert bench.asked == [2, 2]


def test_who_is_late_every_time_stays_late() -> None:
    bench = Bench()
    for k in range(50):
        assert bench.called(f"op#{k}", 1000 * k, 1000 * k, 1000 * k + 300)[0].seconds == 0.3
    (row,) = bench.core.table
    assert (row.node, row.times, row.total_s) == ("c", 50, pytest.approx(15.0))


def test_several_late_ranks_are_each_reported_by_rank_and_the_median_does_not_move() -> None:
    bench = Bench()
    assert bench.called("a", 900, 100, 100, 500, 100) == (Late(0, "a", 0.8), Late(3, "a", 0.4))
    assert [row.node for row in bench.core.table] == ["a", "d"]


def test_time_is_counted_once_for_operations_that_wait_at_the_same_time() -> None:
    bench = Bench()
    assert bench.called("op#0", 0, 0, 1000)[0].seconds == 1.0
    for k in range(1, 30):
        assert bench.called(f"op#{k}", k, k, 1000 + k) == ()
    assert bench.called("op#30", 30, 30, 1400) == (Late(2, "op#30", 0.4),)
    (row,) = bench.core.table
    assert (row.times, row.worst_op, row.total_s) == (2, "op#0", pytest.approx(1.4))


def test_the_worst_keeps_its_operation_and_the_first_of_equals_stays() -> None:
    bench = Bench()
    for k, (op, late) in enumerate((("small", 200), ("large", 700), ("as large", 700), ("small again", 150))):
        base = 10_000 * k
        bench.called(op, base, base + late)
    (row,) = bench.core.table
    assert (row.worst_op, row.worst_s, row.times) == ("large", 0.7, 4)


def test_the_table_is_by_node_over_views_immutable_and_the_dearest_comes_first() -> None:
    bench = Bench()
    bench.called("a", 0, 0, 300)
    before = bench.core.table
    bench.called("b", 1000, 1000, 1900, nodes="acb")  # in the next view the same rank is another node
    assert [(row.node, row.rank) for row in bench.core.table] == [("b", 2), ("c", 2)]
    bench.called("c", 2000, 2900, 2000, nodes="acb")
    assert [(row.node, row.rank, row.times) for row in bench.core.table] == [("c", 1, 2), ("b", 2, 1)]
    assert before == (Straggler(2, "c", 1, 0.3, "a", 0.3),)
    with pytest.raises(FrozenInstanceError):
        before[0].times = 5


def test_arrivals_in_any_order_of_ranks_give_the_same_report() -> None:
    one, other = Stragglers(after_ns=MS), Stragglers(after_ns=MS)
    arrived = {0: 5 * MS, 1: 900 * MS, 2: 7 * MS}
    turned = dict(reversed(arrived.items()))
    for core, given in ((one, arrived), (other, turned)):
        assert core.called("x", given, rtt_ns=lambda rank: 0, node=str) == (Late(1, "x", 0.893),)
    assert one.table == other.table
