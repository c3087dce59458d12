"""Whom a relay passes datagrams on to, from where, and how many."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.relay.table import RelayLimits, RelayTable

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

S = 1_000_000_000
A, B, STRANGER = ("192.0.2.1", 1), ("192.0.2.2", 2), ("198.51.100.9", 9)


class Bench:
    def __init__(self, **limits: int) -> None:
        self.places: dict[str, Address] = {"a": A, "b": B}
        numbers = itertools.count(1)
        self.table = RelayTable(
            RelayLimits(**limits), place_of=self.places.get, draw=lambda size: next(numbers).to_bytes(size, "big")
        )

    def ask(self, source: str, target: str) -> bytes:
        label = self.table.ask(source, target)
        assert label is not None
        return label

    def pair(self) -> tuple[bytes, bytes]:
        return self.ask("a", "b"), self.ask("b", "a")

    def forward(
        self, label: bytes, source: Address = A, size: int = 100, now_ns: int = 0
    ) -> tuple[bytes, Address] | None:
        return self.table.forward(label, source, size, now_ns)


def test_what_one_of_a_pair_sends_goes_to_the_other_one_under_its_own_label_both_ways() -> None:
    bench = Bench()
    ab, ba = bench.pair()
    assert bench.forward(ab) == (ba, B)
    assert bench.forward(ba, B) == (ab, A)
    assert (bench.table.passed, bench.table.refused) == (2, 0)
    assert (bench.ask("a", "b"), len(bench.table)) == (ab, 2), "asked again, it is the same"


def test_nobody_is_sent_anything_by_whom_it_has_not_asked_for() -> None:
    bench = Bench()
    ab = bench.ask("a", "b")
    assert bench.forward(ab) is None
    bench.ask("b", "c")
    assert bench.forward(ab) is None
    ba = bench.ask("b", "a")
    assert bench.forward(ab) == (ba, B)


def test_a_label_is_good_from_where_its_node_is_and_from_nowhere_else() -> None:
    bench = Bench()
    ab, ba = bench.pair()
    assert bench.forward(ab, STRANGER) is None
    assert bench.forward(ab, (A[0], 7)) is None
    assert bench.forward(ba, A) is None
    assert bench.forward(bytes(8)) is None
    assert (bench.table.passed, bench.table.refused) == (0, 4)


def test_nothing_goes_to_or_comes_from_where_a_node_has_not_shown_itself_to_be() -> None:
    bench = Bench()
    ab, ba = bench.pair()
    del bench.places["b"]
    assert bench.forward(ab) is None
    assert bench.forward(ba, B) is None
    bench.places["b"] = STRANGER
    assert bench.forward(ab) == (ba, STRANGER), "it has moved, and shown it"
    assert bench.forward(ba, B) is None


def test_what_is_known_of_a_node_goes_with_its_link() -> None:
    bench = Bench()
    ab, ba = bench.pair()
    bench.table.gone("b")
    assert bench.forward(ab) is None
    assert bench.forward(ba, B) is None
    assert len(bench.table) == 1
    again = bench.ask("b", "a")
    assert again != ba
    assert bench.forward(ab) == (again, B)
    bench.table.gone("a")
    bench.table.gone("a")
    assert bench.forward(again, B) is None
    assert len(bench.table) == 1


def test_a_node_asks_for_so_many_and_never_for_itself() -> None:
    bench = Bench(legs=2)
    assert bench.table.ask("a", "a") is None
    bench.ask("a", "b")
    bench.ask("a", "c")
    assert bench.table.ask("a", "d") is None
    assert bench.table.ask("a", "b") is not None
    assert len(bench.table) == 2


def test_a_label_that_is_taken_is_not_given_twice() -> None:
    drawn = iter([b"12345678", b"12345678", b"87654321"])
    table = RelayTable(RelayLimits(), place_of=lambda node: A, draw=lambda size: next(drawn))
    assert (table.ask("a", "b"), table.ask("b", "a")) == (b"12345678", b"87654321")


def test_a_flood_of_one_leaves_the_others_what_there_is_beyond_its_bound() -> None:
    bench = Bench(leg_rate=1_000_000, total_rate=2_000_000)
    ab, ba = bench.pair()
    seconds, size = 4, 972  # with 28 bytes of headers: 1000
    flood = sum(
        bench.forward(ab, size=size, now_ns=at) is not None for at in range(0, seconds * S, S // 10_000)
    )  # ten times of what it may
    assert seconds * 1000 <= flood <= seconds * 1000 + 140
    assert bench.table.exceeded == seconds * 10_000 - flood
    quiet = sum(bench.forward(ba, B, size, seconds * S + at) is not None for at in range(0, S - 1, S // 900 + 1))
    assert quiet == 900


def test_all_together_have_a_bound_too() -> None:
    bench = Bench(leg_rate=1_000_000, total_rate=1_000_000)
    ab, ba = bench.pair()
    both = 0
    for at in range(0, 4 * S, S // 2000):
        both += bench.forward(ab, size=972, now_ns=at) is not None
        both += bench.forward(ba, B, size=972, now_ns=at) is not None
    assert 4000 <= both <= 4140


@pytest.mark.parametrize("limits", [{"leg_rate": 0}, {"total_rate": 10**9 + 1}, {"legs": 0}])
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        RelayLimits(**limits)
