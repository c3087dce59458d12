"""How ranks come to one state: who gives, what is sent, what is refused. Groups are in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from quicoll.errors import Corrupted, LocalError, PeerError
from quicoll.numerics.buffers import tensor_digest
from quicoll.state import manifest
from quicoll.state.manifest import TensorRecord, decode_manifest, encode_manifest
from quicoll.state.rank_state import RankState
from quicoll.state.synchronisation import Handover, synchronise
from quicoll.state.version import StateComparison, StateVersion, compare

V = StateVersion
VIEW = 7


class Hub:
    """What the ranks of one group exchange: the value of each operation by its number and rank.

    tamper: changes what the n-th broadcast brings to the receivers. log: each collective once, in order. pairs: what
    one rank has sent to another and is not received yet; sent: how often, and how many bytes.
    """

    def __init__(self, world: int, tamper: Callable[[int, Any], Any] = lambda number, value: value) -> None:
        self.world = world
        self.tamper = tamper
        self.log: list[str] = []
        self.given: dict[int, dict[int, Any]] = {}
        self.changed = asyncio.Condition()
        self.failed = False
        self.pairs: dict[tuple[int, int], list[Any]] = {}
        self.sent: list[tuple[int, int]] = []

    async def exchange(self, number: int, rank: int, name: str, value: Any) -> dict[int, Any]:
        async with self.changed:
            if number == len(self.log):
                self.log.append(name)
            assert self.log[number] == name
            given = self.given.setdefault(number, {})
            given[rank] = value
            self.changed.notify_all()
            await self.changed.wait_for(lambda: len(given) == self.world or self.failed)
            if len(given) < self.world:
                raise PeerError("a rank failed")
            return given

    async def put(self, source: int, to: int, value: Any) -> None:
        async with self.changed:
            self.pairs.setdefault((source, to), []).append(value)
            self.sent.append((source, to))
            self.changed.notify_all()

    async def take(self, source: int, to: int) -> Any:
        async with self.changed:
            queue = self.pairs.setdefault((source, to), [])
            await self.changed.wait_for(lambda: queue or self.failed)
            if not queue:
                raise PeerError("a rank failed")
            return queue.pop(0)

    async def fail(self) -> None:
        async with self.changed:
            self.failed = True
            self.changed.notify_all()


class MemoryGroup:
    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.number = 0

    async def _exchange(self, name: str, value: Any) -> dict[int, Any]:
        self.number += 1
        return await self.hub.exchange(self.number - 1, self.rank, name, value)

    async def all_gather(self, x: Any) -> Any:
        given = await self._exchange("all_gather", x)
        return np.concatenate([given[rank] for rank in range(self.hub.world)])

    async def broadcast(self, x: Any, *, root: int) -> Any:
        number = self.number
        given = await self._exchange(f"broadcast from {root}", x)
        if self.rank == root:
            return x
        assert (x.shape, x.dtype) == (given[root].shape, given[root].dtype)
        return self.hub.tamper(number, given[root].copy())

    async def barrier(self, *, timeout: float) -> None:
        await self._exchange("barrier", None)

    async def send(self, x: Any, *, to: int) -> None:
        await self.hub.put(self.rank, to, x.copy())

    async def recv(self, like: Any, *, source: int) -> Any:
        value = await self.hub.take(source, self.rank)
        assert (value.shape, value.dtype) == (like.shape, like.dtype)
        return value


class Rank:
    """A rank's state, with what it holds and what it was given."""

    def __init__(self, version: StateVersion, held: Any = None, *, registered: bool = True) -> None:
        self.state = RankState()
        self.state.version = version
        self.held = {"w": np.arange(3.0)} if held is None else held
        self.loads: list[dict[str, Any]] = []
        if registered:
            self.state.register(lambda: self.held, lambda new: self.loads.append(dict(new)))


async def bring_together(hub: Hub, ranks: list[Rank]) -> list[Any]:
    async def one(number: int, rank: Rank) -> Handover | None:
        try:
            return await synchronise(rank.state, MemoryGroup(hub, number), view_id=VIEW)  # type: ignore[arg-type]
        except Exception:
            await hub.fail()
            raise

    return await asyncio.gather(*(one(number, rank) for number, rank in enumerate(ranks)), return_exceptions=True)


def versions(ranks: list[Rank]) -> list[StateVersion]:
    return [rank.state.version for rank in ranks]


# -- who gives to whom -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([(V(3, 3), True)], StateComparison(V(3, 3), (0,), (), 0)),
        ([(V(3, 3), False)] * 2, StateComparison(V(3, 3), (0, 1), (), None)),
        ([(V(2, 2), True), (V(3, 3), True), (V(3, 3), True)], StateComparison(V(3, 3), (1, 2), (0,), 1)),
        # The decision counts first: a checkpoint of a higher step is older than what the job did since.
        ([(V(0, 90), True), (V(4, 4), True)], StateComparison(V(4, 4), (1,), (0,), 1)),
        ([(V(0, 90), True), (V(0, 80), True)], StateComparison(V(0, 90), (0,), (1,), 0)),
        # The lowest current rank that can give does so.
        ([(V(3, 3), False), (V(3, 3), True), (V(1, 1), True)], StateComparison(V(3, 3), (0, 1), (2,), 1)),
        # One rank that cannot take it is enough for none to be given.
        ([(V(3, 3), True), (V(1, 1), False), (V(1, 1), True)], StateComparison(V(3, 3), (0,), (1, 2), None)),
        ([(V(3, 3), False), (V(1, 1), True)], StateComparison(V(3, 3), (0,), (1,), None)),
    ],
)
def test_the_lowest_rank_with_the_newest_state_gives_it_to_all_that_are_behind(
    held: list[tuple[StateVersion, bool]], found: StateComparison
) -> None:
    assert compare(held) == found


async def test_ranks_at_one_version_send_nothing_but_their_versions() -> None:
    hub, ranks = Hub(3), [Rank(V(5, 5)) for _ in range(3)]
    assert await bring_together(hub, ranks) == [None] * 3
    assert hub.log == ["all_gather"]
    assert versions(ranks) == [V(5, 5)] * 3


async def test_a_rank_behind_loads_the_whole_state_once_and_takes_its_version() -> None:
    held = {"w": np.arange(4, dtype=np.int16).reshape(2, 2), "a": np.array([np.nan, -0.0])}
    hub, ranks = Hub(3), [Rank(V(1, 1)), Rank(V(2, 2), held), Rank(V(2, 2), held)]
    assert await bring_together(hub, ranks) == [Handover(1, V(2, 2)), None, None]
    assert hub.log == ["all_gather", *["broadcast from 1"] * 2, "barrier"]
    assert {frozenset(pair) for pair in hub.sent} == {frozenset((0, 1))}
    assert versions(ranks) == [V(2, 2)] * 3
    (loaded,) = ranks[0].loads
    assert list(loaded) == ["a", "w"]
    assert [tensor_digest(loaded[name]) for name in loaded] == [tensor_digest(held[name]) for name in loaded]
    assert [rank.loads for rank in ranks[1:]] == [[], []]


async def test_an_empty_state_is_handed_over_too() -> None:
    ranks = [Rank(V(2, 2), {}), Rank(V(0, 0), {})]
    assert await bring_together(Hub(2), ranks) == [None, Handover(0, V(2, 2))]
    assert ranks[1].loads == [{}]


async def test_before_the_first_step_no_state_is_needed_and_all_take_the_latest_decision() -> None:
    """A decision that committed nothing is known to some ranks only."""
    ranks = [Rank(V(4, 0), registered=False), Rank(V(0, 0), registered=False)]
    assert await bring_together(Hub(2), ranks) == [None, None]
    assert versions(ranks) == [V(4, 0)] * 2


async def test_a_rank_behind_that_cannot_be_helped_says_what_to_call_and_the_current_ones_go_on() -> None:
    ranks = [Rank(V(4, 9), registered=False), Rank(V(0, 2))]
    kept, failed = await bring_together(Hub(2), ranks)
    assert kept is None
    assert isinstance(failed, LocalError)
    assert "after step 2, the job's after step 9: call job.register_state" in str(failed)
    assert versions(ranks) == [V(4, 9), V(0, 2)]


# -- what is refused -------------------------------------------------------------------------------------------------


async def test_a_tensor_with_other_bits_than_announced_is_corrupted_and_nothing_is_loaded() -> None:
    def tamper(number: int, value: Any) -> Any:
        """Spoil the digest of the last tensor, whose bytes end the manifest."""
        return np.concatenate([value[:-1], value[-1:] ^ 1]) if number == 2 else value

    ranks = [Rank(V(2, 2), {"a": np.ones(2), "b": np.ones(3)}), Rank(V(1, 1))]
    _, failed = await bring_together(Hub(2, tamper), ranks)
    assert isinstance(failed, Corrupted)
    assert (failed.rank, failed.view) == (0, VIEW)
    assert "'b'" in str(failed)
    assert (ranks[1].loads, ranks[1].state.version) == ([], V(1, 1))


async def test_a_malformed_manifest_is_the_givers_failure() -> None:
    def tamper(number: int, value: Any) -> Any:
        return np.zeros_like(value) if number == 2 else value

    _, failed = await bring_together(Hub(2, tamper), [Rank(V(2, 2)), Rank(V(1, 1))])
    assert isinstance(failed, PeerError)
    assert (failed.rank, failed.view, "malformed state manifest" in str(failed)) == (0, VIEW, True)


@pytest.mark.parametrize("size", [-1, 1 << 40])
async def test_a_manifest_of_a_size_that_cannot_be_is_refused_before_there_is_memory_for_it(size: int) -> None:
    def tamper(number: int, value: Any) -> Any:
        return np.full_like(value, size) if number == 1 else value

    group = MemoryGroup(Hub(2, tamper), 1)
    giver = MemoryGroup(group.hub, 0)
    giving = asyncio.ensure_future(synchronise(Rank(V(2, 2)).state, giver, view_id=VIEW))  # type: ignore[arg-type]
    with pytest.raises(PeerError, match=rf"a state manifest of {size} bytes .*rank=0, view=7"):
        await synchronise(Rank(V(1, 1)).state, group, view_id=VIEW)  # type: ignore[arg-type]
    await group.hub.fail()
    with pytest.raises(PeerError):
        await giving


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([1, 2], "a mapping of names to tensors, not list"),
        ({1: np.ones(1)}, "is no text: 1"),
        ({"\ud800": np.ones(1)}, "is no text"),
        ({"w": "text"}, "neither array nor tensor"),
    ],
)
async def test_what_is_no_state_is_the_error_of_the_rank_that_holds_it(held: Any, said: str) -> None:
    failed, _ = await bring_together(Hub(2), [Rank(V(2, 2), held), Rank(V(1, 1))])
    assert isinstance(failed, LocalError)
    assert said in str(failed)


async def test_an_error_of_load_leaves_the_version_as_it_was() -> None:
    ranks = [Rank(V(2, 2)), Rank(V(1, 1))]
    ranks[1].state.load = lambda new: 1 // 0  # type: ignore[assignment]
    _, failed = await bring_together(Hub(2), ranks)
    assert isinstance(failed, ZeroDivisionError)
    assert ranks[1].state.version == V(1, 1)


def test_save_and_load_are_plain_functions() -> None:
    async def later() -> dict[str, Any]:
        return {}

    with pytest.raises(LocalError, match="save is a plain function"):
        RankState().register(later, lambda new: None)  # type: ignore[arg-type]
    with pytest.raises(LocalError, match="load is a function"):
        RankState().register(dict, None)  # type: ignore[arg-type]


# -- the manifest ----------------------------------------------------------------------------------------------------


def test_a_manifest_has_the_tensors_by_name_with_their_digests() -> None:
    held = {"b": np.ones((2, 0), np.uint8), "a": np.array(3.0, np.float32)}
    got = decode_manifest(encode_manifest(held), giver=0, view_id=VIEW)
    assert got == (
        TensorRecord("a", "float32", (), False, tensor_digest(held["a"])),
        TensorRecord("b", "uint8", (2, 0), False, tensor_digest(held["b"])),
    )


@pytest.mark.parametrize(
    "record",
    [
        {"name": "a", "dtype": "float32", "shape": [-1], "torch": False, "digest": b""},
        {"name": "a", "dtype": "float32", "shape": [1], "torch": False},
        {"name": "a", "dtype": "float32", "shape": [1], "torch": False, "digest": b"", "more": 1},
        {"name": "a", "dtype": "float33", "shape": [1], "torch": False, "digest": b""},
        {"name": 1, "dtype": "float32", "shape": [1], "torch": False, "digest": b""},
    ],
)
def test_a_record_that_is_none_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match=r"malformed state manifest.*rank=3, view=7"):
        decode_manifest(msgspec.msgpack.encode([record]), giver=3, view_id=VIEW)


def test_the_number_of_tensors_is_bounded_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = encode_manifest({"a": np.ones(1), "b": np.ones(1)})
    monkeypatch.setattr(manifest, "_MAX_TENSORS", 1)
    with pytest.raises(PeerError, match="a state of 2 tensors"):
        decode_manifest(packed, giver=0, view_id=VIEW)


async def test_a_state_of_too_many_tensors_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_MAX_TENSORS", 1)
    hub = Hub(2)
    failed, _ = await bring_together(hub, [Rank(V(2, 2), {"a": np.ones(1), "b": np.ones(1)}), Rank(V(1, 1))])
    assert isinstance(failed, LocalError)
    assert "at most 1 tensors, not 2" in str(failed)
    assert hub.log == ["all_gather", "broadcast from 0"]  # the receiver waits for the size that never comes
