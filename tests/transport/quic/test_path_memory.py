"""What is remembered of paths: by whom, how much, how long; and that sessions of one endpoint share it."""

from __future__ import annotations

from quicoll_transport.quic import path_memory
from quicoll_transport.quic.path_memory import KnownPath, PathMemory

S = 10**9
PATH = KnownPath(25_000_000, 50_000_000)


def test_nothing_is_known_of_a_path_until_something_was_learned() -> None:
    memory = PathMemory()
    assert memory.of(b"a", "10.0.0.1").recall(0) is None
    assert len(memory) == 0, "asking keeps nothing"


def test_what_was_learned_holds_for_this_peer_at_this_address_alone() -> None:
    memory = PathMemory()
    memory.of(b"a", "10.0.0.1").learn(PATH, 0, is_certain=True)
    assert memory.of(b"a", "10.0.0.1").recall(1) == PATH
    assert memory.of(b"b", "10.0.0.1").recall(1) is None
    assert memory.of(b"a", "10.0.0.2").recall(1) is None


def test_a_lower_bound_overwrites_only_less_and_what_is_certain_overwrites_all() -> None:
    path = PathMemory().of(b"a", "10.0.0.1")
    path.learn(PATH, 0, is_certain=True)
    path.learn(PATH._replace(rate=1000), 1, is_certain=False)
    assert path.recall(1) == PATH
    more = PATH._replace(rate=PATH.rate + 1)
    path.learn(more, 1, is_certain=False)
    assert path.recall(1) == more
    path.learn(PATH._replace(rate=1000), 2, is_certain=True)
    assert path.recall(2) == PATH._replace(rate=1000)


def test_ten_minutes_after_it_was_learned_it_is_forgotten() -> None:
    memory = PathMemory()
    path = memory.of(b"a", "10.0.0.1")
    path.learn(PATH, 5 * S, is_certain=True)
    assert path.recall(605 * S) == PATH
    assert path.recall(605 * S + 1) is None
    assert len(memory) == 0
    path.learn(PATH._replace(rate=1), 606 * S, is_certain=False)
    assert path.recall(606 * S) == PATH._replace(rate=1), "what is old is no bound"


def test_of_a_full_memory_what_was_learned_longest_ago_goes_first() -> None:
    memory, most = PathMemory(), path_memory._MOST
    for number in range(most):
        memory.of(b"a", str(number)).learn(PATH, number, is_certain=True)
    memory.of(b"a", "0").learn(PATH, most, is_certain=True)
    memory.of(b"a", "more").learn(PATH, most, is_certain=True)
    assert len(memory) == most
    assert memory.of(b"a", "1").recall(most) is None
    assert memory.of(b"a", "0").recall(most) == PATH
    assert memory.of(b"a", "more").recall(most) == PATH


def test_a_path_without_a_rate_or_without_a_round_trip_is_not_remembered() -> None:
    memory = PathMemory()
    memory.of(b"a", "10.0.0.1").learn(KnownPath(0, 1), 0, is_certain=True)
    memory.of(b"a", "10.0.0.1").learn(KnownPath(1, 0), 0, is_certain=True)
    assert len(memory) == 0


def test_what_is_forgotten_is_gone() -> None:
    memory = PathMemory()
    path = memory.of(b"a", "10.0.0.1")
    path.forget()
    path.learn(PATH, 0, is_certain=True)
    path.forget()
    assert path.recall(0) is None
    assert len(memory) == 0
