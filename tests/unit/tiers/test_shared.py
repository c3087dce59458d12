"""Shared state as its user calls it: what is refused, what is in the vote, what comes of what peers tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from quicoll.engine.inline import InlineRuntime
from quicoll.errors import LocalError, PeerError, PiecesMissing
from quicoll.membership.view import Member, View
from quicoll.tiers.pieces import Horizon, packed
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

    def __init__(
        self,
        consistency: Consistency,
        *,
        max_bytes: int = 1000,
        runtime: InlineRuntime | None = None,
        **pulled: str,
    ) -> None:
        self.step: int | None = None
        self.committed = 3
        self.recorded: dict[tuple[int, int], bytes] = {}
        self.peer: list[Callable[[Any], Any]] = []
        made: Any = SharedState
        self.state: SharedState = made(
            "s",
            consistency,
            group=self,
            context=self,
            runtime=runtime or InlineRuntime(),
            spreader=self,
            committed_step=lambda: self.committed,
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

    async def pull(self, name: str, wanted: Any, *, horizon: Horizon, timeout: float) -> Pulled:
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
        lambda mine: ["s", b"1" * 16, *mine[2:]],
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
    bench.peer = [lambda mine: ["t", *mine[1:]]]
    with pytest.raises(LocalError, match="different states strong: s, t"):
        await bench.state.strong()


@pytest.mark.parametrize(
    "told",
    [
        None,
        ["s"],
        [3, b"", [0, 0], 0],
        ["s", b"0" * 17, [0, 0], 0],
        ["s", b"", [0, -1], 0],
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
        lambda mine: ["s", b"1" * 16, *mine[2:]],
        lambda mine: [[["b", [4, 1, "n1", b"0" * 16], "numpy", "float64", [1 << 61, 4]]]],
    ]
    with pytest.raises(PeerError, match="tells what cannot be"):
        await bench.state.strong()
    assert bench.pulls == []


async def test_what_several_calls_stage_in_one_step_has_to_fit_together() -> None:
    bench, step = Bench("strong", max_bytes=10), Attempt()
    bench.step = 4
    bench.state.stage(step, {"a": bytes(6)})
    with pytest.raises(LocalError, match="2 pieces of 12 bytes"):
        bench.state.stage(step, {"b": bytes(6)})
    bench.state.stage(step, {"b": bytes(8)}, delete=["a"])
    step.commit()
    assert await bench.state.read() == {"b": bytes(8)}


async def test_what_was_staged_in_a_step_that_was_not_committed_takes_no_room_and_changes_nothing() -> None:
    bench, aborted, step = Bench("strong", max_bytes=10), Attempt(), Attempt()
    bench.step = 4
    bench.state.stage(aborted, {"a": bytes(9)})
    bench.state.stage(step, {"b": bytes(9)})
    step.commit()
    assert await bench.state.read() == {"b": bytes(9)}


async def test_what_cannot_be_staged_is_in_no_vote() -> None:
    class Left(Attempt):
        def on_commit(self, callback: Callable[[], None]) -> None:
            raise LocalError("step 3 has been left")

    bench = Bench("strong")
    bench.step = 4
    with pytest.raises(LocalError, match="has been left"):
        bench.state.stage(Left(), {"a": b"1"})
    assert bench.recorded == {}
    step = Attempt()
    bench.state.stage(step, {"b": b"1"})
    step.commit()
    assert await bench.state.read() == {"b": b"1"}


async def test_a_strong_piece_is_deleted_by_a_committed_step_and_the_vote_tells_of_it() -> None:
    bench, step, other = Bench("strong"), Attempt(), Attempt()
    bench.step = 4
    bench.state.stage(step, {"a": b"1", "b": b"2"})
    step.commit()
    before = dict(bench.recorded)
    bench.state.stage(other, {}, delete=["a", "a", "never there"])
    assert len(bench.recorded) == len(before) + 1
    assert len(set(bench.recorded.values())) == 2
    assert list(await bench.state.read()) == ["a", "b"]
    other.commit()
    assert await bench.state.read() == {"b": b"2"}


@pytest.mark.parametrize("state", [{"a": b"1", "b": "text"}, {"a": bytes(2000)}, {"": b""}])
async def test_a_state_that_cannot_be_loaded_leaves_what_was_there(state: dict[str, Any]) -> None:
    bench = Bench("strong")
    bench.state.load_state({"kept": b"0"})
    with pytest.raises(LocalError):
        bench.state.load_state(state)
    assert await bench.state.read() == {"kept": b"0"}


async def test_eventual_pieces_are_deleted_in_the_call_that_writes_others() -> None:
    bench = Bench("eventual")
    await bench.state.write({"a": b"1", "b": b"2"})
    await bench.state.write({"c": b"3"}, delete=["a", "never there"])
    assert await bench.state.read() == {"b": b"2", "c": b"3"}
    for wrong in ("a", [1]):
        with pytest.raises(LocalError, match="a sequence of names"):
            await bench.state.write({}, delete=cast("Any", wrong))
    with pytest.raises(LocalError, match="both written and deleted: 'a'"):
        await bench.state.write({"a": b""}, delete=["a"])
    bench.peer = [lambda mine: mine]
    assert await bench.state.strong() == {"b": b"2", "c": b"3"}


async def test_deletions_that_all_ranks_hold_are_forgotten() -> None:
    bench = Bench("eventual")
    await bench.state.write({"a": b"1"})
    await bench.state.write({}, delete=["a"])
    assert bench.state.store.names == ["a"]
    bench.committed = 4
    bench.peer = [lambda mine: mine]
    assert await bench.state.strong() == {}
    assert (bench.state.store.names, bench.state.store.horizon) == ([], Horizon(4, 9))


class Late(InlineRuntime):
    """The engine has done what it was asked to, and its answers are still on their way."""

    def call(self, work: Any) -> asyncio.Future[Any]:
        self.work = self.loop.create_task(work)
        return self.loop.create_future()


async def test_what_a_cancelled_call_has_pinned_is_let_go() -> None:
    bench = Bench("eventual", runtime=Late())
    store = bench.state.store
    store.write({"a": packed("a", b"1")}, step=0, writer="n0")
    version = store.entries()[0].version
    call = asyncio.ensure_future(bench.state.strong())
    for _ in range(3):
        await asyncio.sleep(0)
    store.write({"a": packed("a", b"2")}, step=0, writer="n0")
    assert store.find("a", version) is not None
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert store.find("a", version) is None


async def test_a_call_that_was_cancelled_before_the_engine_came_to_it_pins_nothing() -> None:
    class Busy(Late):
        def call(self, work: Any) -> asyncio.Future[Any]:
            self.work = work
            return self.loop.create_future()

    busy = Busy()
    bench = Bench("eventual", runtime=busy)
    store = bench.state.store
    store.write({"a": packed("a", b"1")}, step=0, writer="n0")
    version = store.entries()[0].version
    call = asyncio.ensure_future(bench.state.strong())
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await busy.work
    store.write({"a": packed("a", b"2")}, step=0, writer="n0")
    assert store.find("a", version) is None
