"""Shared state as its user calls it: what is refused, what is in the vote, what comes of what peers tell."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from quicoll.engine.runtime import InlineRuntime
from quicoll.errors import LocalError, PeerError, PiecesMissing
from quicoll.membership.view import Member, View
from quicoll.tiers.shared import Consistency, SharedState
from quicoll.tiers.spreading import Pulled

VIEW = View(
    view_id=9,
    members=tuple(Member(rank=rank, node=f"n{rank}", incarnation=1) for rank in range(2)),
    seed=1,
    committed_step=0,
    committed_view=0,
)


class Attempt:
    """A step whose end the test says."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def on_commit(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def commit(self) -> None:
        for callback in self.callbacks:
            callback()


class Bench:
    """Rank 0 of two. peer: what rank 1 tells in each exchange, given what this rank does."""

    def __init__(self, consistency: Consistency, *, max_bytes: int = 1000, **pulled: str) -> None:
        self.step: int | None = None
        self.recorded: dict[tuple[int, int], bytes] = {}
        self.peer: list[Callable[[Any], Any]] = []
        made: Any = SharedState
        self.state: SharedState = made(
            "s",
            consistency,
            group=self,
            context=self,
            runtime=InlineRuntime(),
            spreader=self,
            committed_step=lambda: 3,
            max_bytes=max_bytes,
        )
        self.config = SimpleNamespace(node="n0", timeout=5.0)
        self.view = VIEW
        self.lacking = pulled
        self.pulls: list[list[str]] = []

    def record(self, group: int, seq: int, result: bytes) -> None:
        self.recorded[group, seq] = result

    async def all_gather_object(self, value: Any, timeout: float | None = None) -> list[Any]:
        mine = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        return [mine, self.peer.pop(0)(mine)]

    async def pull(self, name: str, wanted: Any, *, timeout: float) -> Pulled:
        self.pulls.append([f"{entry.name} from {','.join(nodes)}" for entry, nodes in wanted])
        return Pulled({}, self.lacking)


async def test_what_is_staged_is_there_when_the_step_is_committed_and_not_before() -> None:
    bench, step = Bench("strong"), Attempt()
    bench.step = 4
    value = np.arange(3)
    bench.state.stage(step, {"a": value, "b": b"x"})
    value += 1
    assert await bench.state.read() == {}
    step.commit()
    values = await bench.state.strong()
    assert (list(values), values["a"].tolist(), values["b"]) == (["a", "b"], [0, 1, 2], b"x")
    values["a"] += 7
    assert bench.state.state()["a"].tolist() == [0, 1, 2]


async def test_the_vote_tells_other_values_and_other_pieces_apart_and_not_their_order() -> None:
    def recorded(*staged: dict[str, Any]) -> dict[tuple[int, int], bytes]:
        bench = Bench("strong")
        bench.step = 4
        for values in staged:
            bench.state.stage(Attempt(), values)
        return bench.recorded

    one = recorded({"a": np.array([1]), "b": b"2"})
    assert one == recorded({"b": b"2"}, {"a": np.array([1])})
    for other in ({"a": np.array([2]), "b": b"2"}, {"a": np.array([1.0]), "b": b"2"}, {"a": np.array([1]), "c": b"2"}):
        assert recorded(other) != one


async def test_a_strong_state_is_handed_over_as_it_is() -> None:
    bench, step = Bench("strong"), Attempt()
    bench.step = 4
    bench.state.stage(step, {"a": np.arange(3)})
    step.commit()
    other = Bench("strong", max_bytes=40)
    other.state.load_state(bench.state.state())
    assert (await other.state.read())["a"].tolist() == [0, 1, 2]
    other.step = 5
    with pytest.raises(LocalError, match="2 pieces of 44 bytes: at most 4096, and max_bytes=40"):
        other.state.stage(Attempt(), {"b": bytes(20)})


async def test_what_is_of_the_other_consistency_is_refused() -> None:
    strong, eventual = Bench("strong"), Bench("eventual")
    eventual.step = 4
    with pytest.raises(LocalError, match=r"'s' is strong: stage\(step, values\)"):
        await strong.state.write({"a": b""})
    with pytest.raises(LocalError, match="inside of one"):
        strong.state.stage(Attempt(), {"a": b""})
    with pytest.raises(LocalError, match=r"'s' is eventual: write\(values\)"):
        eventual.state.stage(Attempt(), {"a": b""})
    with pytest.raises(LocalError, match="no part of the registered one"):
        eventual.state.state()
    with pytest.raises(LocalError, match="'s' is eventual"):
        eventual.state.load_state({})
    with pytest.raises(LocalError, match="above 0"):
        await eventual.state.strong(timeout=0)


async def test_equal_states_are_strong_by_one_exchange() -> None:
    bench = Bench("eventual")
    await bench.state.write({"a": b"1"})
    bench.peer = [lambda mine: mine]
    assert await bench.state.strong() == {"a": b"1"}
    assert (bench.pulls, bench.peer) == ([], [])


async def test_who_lacks_a_piece_is_named_and_why() -> None:
    bench = Bench("eventual", b="n1: did not answer")
    await bench.state.write({"a": b"1"})
    version = [4, 1, "n1", b"0" * 16]
    bench.peer = [
        lambda mine: ["s", b"1" * 16],
        lambda mine: [[["b", version, "bytes", "uint8", [7]]]],
        lambda mine: [["a"], "n0: there is no link to it"],
    ]
    with pytest.raises(PiecesMissing) as caught:
        await bench.state.strong()
    assert bench.pulls == [["b from n1"]]
    assert caught.value.lacking == {"n0": ("b",), "n1": ("a",)}
    assert caught.value.message == (
        "the shared state 's' is not strong: n0 lacks 'b' (n1: did not answer); "
        "n1 lacks 'a' (n0: there is no link to it)"
    )


async def test_ranks_that_make_different_states_strong_are_told() -> None:
    bench = Bench("eventual")
    bench.peer = [lambda mine: ["t", mine[1]]]
    with pytest.raises(LocalError, match="different states strong: s, t"):
        await bench.state.strong()


@pytest.mark.parametrize(
    "told",
    [
        None,
        ["s"],
        [3, b""],
        ["s", b"0" * 17],
    ],
)
async def test_what_a_peer_tells_that_cannot_be_is_its_fault(told: Any) -> None:
    bench = Bench("eventual")
    bench.peer = [lambda mine: told]
    with pytest.raises(PeerError, match="tells what cannot be of the shared state 's'") as caught:
        await bench.state.strong()
    assert (caught.value.rank, caught.value.node) == (1, "n1")


async def test_a_listing_that_cannot_be_is_refused_before_anything_is_fetched() -> None:
    bench = Bench("eventual")
    bench.peer = [
        lambda mine: ["s", b"1" * 16],
        lambda mine: [[["b", [4, 1, "n1", b"0" * 16], "numpy", "float64", [1 << 61, 4]]]],
    ]
    with pytest.raises(PeerError, match="tells what cannot be"):
        await bench.state.strong()
    assert bench.pulls == []
