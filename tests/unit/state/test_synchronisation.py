"""How ranks come to one state: who gives, what is sent, what is refused. Groups are in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from memory_group import Hub, MemoryGroup

from quicoll.errors import Corrupted, Diverged, LocalError, PeerError
from quicoll.membership.view import Member, View
from quicoll.numerics.buffers import tensor_digest
from quicoll.state.chunks import chunk_digest
from quicoll.state.rank_state import RankState
from quicoll.state.synchronisation import StateCheck, ViewState, synchronise
from quicoll.state.version import StateVersion

V = StateVersion
VIEW_ID = 7
OFFER, CHUNK = 2, 5  # which message it is: size, manifest, offer, request, ready, chunk
NODES = ("worker-0", "worker-1", "worker-2", "worker-3")
NOBODY_LEARNS: Any = SimpleNamespace(pupils=0)  # no teacher is asked more


def view(world: int, least: int = 1, committed: int = 0) -> View:
    """committed: the coordinator's last decision."""
    members = tuple(Member(rank=rank, node=node, incarnation=rank + 1) for rank, node in enumerate(NODES[:world]))
    return View(
        view_id=VIEW_ID, members=members, seed=0, committed_step=committed, committed_view=0, min_world_size=least
    )


class Rank:
    """A rank's state, with what it holds and what it was given."""

    def __init__(
        self, version: StateVersion, held: Any = None, *, registered: bool = True, own: tuple[str, ...] = ()
    ) -> None:
        self.state = RankState()
        self.state.version = version
        self.held: Any = {"w": np.arange(3.0)} if held is None else held
        self.loads: list[dict[Any, Any]] = []
        if registered:
            self.state.register(lambda: self.held, self.load, own)

    def load(self, new: Any) -> None:
        self.loads.append(dict(new))
        self.held = dict(new)


async def bring_together(hub: Hub, ranks: list[Rank], *, every: int = 100, committed: int | None = None) -> list[Any]:
    """committed: None for what the newest of them holds."""
    last = max(rank.state.version.decision for rank in ranks) if committed is None else committed

    async def one(number: int, rank: Rank) -> ViewState:
        group: Any = MemoryGroup(hub, number)
        try:
            return await synchronise(
                rank.state,
                group,
                view(len(ranks), committed=last),
                check_every=every + number,
                learn_from=0,
                teacher=NOBODY_LEARNS,
            )
        except Diverged:
            raise
        except Exception:
            await hub.fail()
            raise

    return await asyncio.gather(*(one(number, rank) for number, rank in enumerate(ranks)), return_exceptions=True)


def versions(ranks: list[Rank]) -> list[StateVersion]:
    return [rank.state.version for rank in ranks]


def givers(found: list[Any]) -> list[int | None]:
    return [each.giver for each in found]


# -- who is behind ---------------------------------------------------------------------------------------------------


async def test_ranks_with_one_state_send_nothing_but_a_row_and_what_they_have_heard() -> None:
    hub, ranks = Hub(3), [Rank(V(5, 5)) for _ in range(3)]
    found = await bring_together(hub, ranks)
    assert hub.log == ["all_gather"] * 2
    assert sum(len(row) * 8 for given in hub.gathered for row in given.values()) == 3 * (120 + 16)
    assert versions(ranks) == [V(5, 5)] * 3
    assert len({each.digest for each in found}) == 1
    assert [(each.giver, each.unequal, each.check_every) for each in found] == [(None, None, 100)] * 3


async def test_a_rank_behind_loads_the_whole_state_once_and_takes_its_version() -> None:
    held = {"w": np.arange(4, dtype=np.int16).reshape(2, 2), "a": {"x": [np.array([np.nan, -0.0]), 3]}}
    hub, ranks = Hub(3), [Rank(V(1, 1)), Rank(V(2, 2), held), Rank(V(2, 2), held)]
    found = await bring_together(hub, ranks)
    assert givers(found) == [1, None, None]
    assert (found[0].version, found[0].before) == (V(2, 2), V(1, 1))
    assert (hub.log[0], hub.log.count("barrier")) == ("all_gather", 1)
    assert {each for each in hub.log if " to " in each} == {"1 to 0", "0 to 1"}  # rank 2 has nothing to do with it
    assert versions(ranks) == [V(2, 2)] * 3
    (loaded,) = ranks[0].loads
    assert tensor_digest(loaded["w"]) == tensor_digest(held["w"])
    assert tensor_digest(loaded["a"]["x"][0]) == tensor_digest(held["a"]["x"][0])
    assert loaded["a"]["x"][1] == 3
    assert [rank.loads for rank in ranks[1:]] == [[], []]


async def test_a_checkpoint_is_not_taken_back_by_a_rank_that_holds_less_where_the_last_decision_is_lost() -> None:
    ranks = [Rank(V(7, 7), {"w": np.full(3, 7.0)}), *(Rank(V(0, 9), {"w": np.full(3, 9.0)}) for _ in range(2))]
    found = await bring_together(Hub(3), ranks, committed=9)
    assert givers(found) == [1, None, None]
    assert versions(ranks) == [V(0, 9)] * 3
    assert ranks[0].held["w"].tolist() == [9.0] * 3


async def test_what_comes_is_written_into_the_receivers_own_memory() -> None:
    mine = np.zeros(3)
    ranks = [Rank(V(2, 2)), Rank(V(1, 1), {"w": mine})]
    await bring_together(Hub(2), ranks)
    assert ranks[1].loads[0]["w"] is mine
    assert mine.tolist() == [0, 1, 2]


async def test_the_state_of_torchs_optimizers_is_handed_to_one_that_has_none() -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    states = []
    for seed in range(2):
        model, optimizer, scheduler = made(seed)
        state = RankState()

        def load(new: Any, model: Any = model, optimizer: Any = optimizer, scheduler: Any = scheduler) -> None:
            model.load_state_dict(new["model"])
            optimizer.load_state_dict(new["optimizer"])
            scheduler.load_state_dict(new["scheduler"])

        def save(model: Any = model, optimizer: Any = optimizer, scheduler: Any = scheduler) -> Any:
            return {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }

        state.register(save, load)
        states.append(state)
        if seed == 0:
            for _ in range(3):
                model(torch.randn(5, 3)).square().mean().backward()
                optimizer.step()
                scheduler.step()
            state.version = V(3, 3)
    hub = Hub(2)
    groups: list[Any] = [MemoryGroup(hub, rank) for rank in range(2)]
    await asyncio.gather(
        *(
            synchronise(states[r], groups[r], view(2, committed=3), check_every=0, learn_from=0, teacher=NOBODY_LEARNS)
            for r in range(2)
        )
    )
    first, second = (state.read() for state in states)
    assert first is not None
    assert second is not None
    assert first.digest == second.digest
    assert "optimizer.state.0.momentum_buffer" in [part.path for part in second.tensors]


async def test_an_empty_state_is_handed_over_too() -> None:
    ranks = [Rank(V(2, 2), {}), Rank(V(0, 0), {})]
    assert givers(await bring_together(Hub(2), ranks)) == [None, 0]
    assert ranks[1].loads == [{}]


async def test_before_the_first_step_no_state_is_needed_and_all_take_the_latest_decision() -> None:
    """A decision that committed nothing is known to some ranks only."""
    ranks = [Rank(V(4, 0), registered=False), Rank(V(0, 0), registered=False)]
    assert givers(await bring_together(Hub(2), ranks)) == [None, None]
    assert versions(ranks) == [V(4, 0)] * 2


async def test_a_rank_behind_that_cannot_be_helped_says_what_to_call_and_the_current_ones_go_on() -> None:
    ranks = [Rank(V(4, 9), registered=False), Rank(V(0, 2))]
    kept, failed = await bring_together(Hub(2), ranks)
    assert kept.giver is None
    assert isinstance(failed, LocalError)
    assert "after step 2, the job's after step 9: call job.register_state" in str(failed)
    assert versions(ranks) == [V(4, 9), V(0, 2)]


# -- states that differ ----------------------------------------------------------------------------------------------


def seeded(version: StateVersion, *seeds: int) -> list[Rank]:
    return [
        Rank(version, {"n": 1, "net": {"w": np.random.default_rng(seed).standard_normal(50), "z": np.zeros(3)}})
        for seed in seeds
    ]


async def test_at_the_start_the_lowest_ranks_state_is_handed_to_those_that_differ() -> None:
    ranks = seeded(V(), 1, 2, 1, 3)
    right = ranks[0].held["net"]["w"].copy()
    hub = Hub(4)
    found = await bring_together(hub, ranks)
    assert givers(found) == [None, 0, None, 0]
    for each in found:
        assert each.unequal is not None
        assert (each.unequal.ranks, each.unequal.tensor, each.unequal.giver) == ((1, 3), "net.w", 0)
        assert "the state of worker-1, worker-3 at the start is not that of worker-0" in each.unequal.text
    assert all(np.array_equal(rank.held["net"]["w"], right) for rank in ranks)
    assert len({each.digest for each in found}) == 1
    # A chain: 0 to 1 to 3, and what they ask for.
    assert {each for each in hub.log if " to " in each} >= {"0 to 1", "1 to 3"}
    assert not any("2" in each for each in hub.log)
    assert versions(ranks) == [V()] * 4


async def test_later_the_ranks_that_differ_from_most_are_healed_and_named_with_the_first_tensor() -> None:
    ranks = seeded(V(9, 9), 1, 1, 1)
    wrong = ranks[0].held["net"]["w"]
    wrong.view(np.uint64)[17] ^= 1
    found = await bring_together(Hub(3), ranks)
    assert givers(found) == [1, None, None]
    (unequal,) = {each.unequal for each in found}
    assert unequal.text == (
        "the state of worker-0 after step 9 is not what most ranks hold; the first difference is in 'net.w': "
        "float64 (50,), other bits on worker-0"
    )
    assert np.array_equal(wrong, ranks[1].held["net"]["w"])


@pytest.mark.parametrize("seeds", [(1, 2), (1, 2, 3), (1, 1, 2, 2)])
async def test_where_nobody_knows_what_is_right_all_ranks_stop_with_one_message(seeds: tuple[int, ...]) -> None:
    """Two checkpoints of one step, say."""
    hub, ranks = Hub(len(seeds)), seeded(V(0, 40), *seeds)
    found = await bring_together(hub, ranks)
    assert all(isinstance(each, Diverged) for each in found)
    assert len({str(each) for each in found}) == 1
    error = found[0]
    assert (error.step, error.view, error.nodes, error.tensor, error.usable) == (
        40,
        VIEW_ID,
        NODES[: len(seeds)],
        "net.w",
        False,
    )
    assert "start all ranks anew from one checkpoint" in str(error)
    assert set(hub.log) == {"all_gather"}
    assert [rank.loads for rank in ranks] == [[]] * len(seeds)


@pytest.mark.parametrize("version", [V(), V(9, 9)])
async def test_tensors_of_other_shapes_are_never_overwritten_and_both_shapes_are_named(version: StateVersion) -> None:
    """Shards that nobody has declared as each rank's own."""
    ranks = [Rank(version, {"a": rank, "shard": np.full(size, rank)}) for rank, size in enumerate([4, 4, 3])]
    found = await bring_together(Hub(3), ranks)
    assert all(isinstance(each, Diverged) for each in found)
    assert "'shard': int64 (4,) on worker-0, worker-1 and int64 (3,) on worker-2" in str(found[0])
    assert "register_state(own=...)" in str(found[0])
    assert [rank.held["shard"].tolist() for rank in ranks] == [[0] * 4, [1] * 4, [2] * 3]


async def test_what_is_each_ranks_own_is_neither_compared_nor_handed_over() -> None:
    def ranks_of(version: StateVersion) -> list[Rank]:
        return [
            Rank(version, {"w": np.full(2, rank), "data": {"shard": np.array([100 + rank])}}, own=("data.shard",))
            for rank in range(3)
        ]

    ranks = ranks_of(V())
    assert givers(await bring_together(Hub(3), ranks)) == [None, 0, 0]
    assert [rank.held["data"]["shard"].tolist() for rank in ranks] == [[100], [101], [102]]
    assert [rank.held["w"].tolist() for rank in ranks] == [[0, 0]] * 3
    # One that comes back anew.
    ranks[1].state.version = ranks[0].state.version = V(8, 8)
    assert givers(await bring_together(Hub(3), ranks)) == [None, None, 0]
    assert [rank.held["data"]["shard"].tolist() for rank in ranks] == [[100], [101], [102]]


async def test_ranks_that_declare_other_things_as_their_own_are_refused() -> None:
    held = {"w": np.ones(2), "s": np.ones(1)}
    found = await bring_together(Hub(2), [Rank(V(), held, own=("s",)), Rank(V(), held)])
    assert all(isinstance(each, Diverged) and "register_state(own=...)" in str(each) for each in found)


# -- states that are torn --------------------------------------------------------------------------------------------


async def test_a_transfer_that_breaks_leaves_a_torn_state_that_the_next_one_makes_whole() -> None:
    def tamper(number: int, value: Any) -> Any:
        return value ^ 1 if number == CHUNK else value

    held = {"a": np.arange(3), "b": np.arange(4)}
    mine = {"a": np.zeros(3, np.int64), "b": np.zeros(4, np.int64)}
    ranks = [Rank(V(2, 2), held), Rank(V(1, 1), mine)]
    _, failed = await bring_together(Hub(2, tamper), ranks)
    assert isinstance(failed, Corrupted)
    assert (failed.rank, failed.view) == (0, VIEW_ID)
    assert (ranks[1].state.torn, ranks[1].loads) == (True, [])
    # Rank 0 has gone and came back from a checkpoint that is older than what is torn: it gives all the same.
    ranks[0].state.version = V(0, 0)
    assert givers(await bring_together(Hub(2), ranks)) == [None, 0]
    assert (ranks[1].state.torn, ranks[1].state.version) == (False, V(0, 0))
    assert ranks[1].loads[0]["b"].tolist() == [0, 1, 2, 3]
    assert ranks[1].loads[0]["b"] is mine["b"]


async def test_a_torn_state_that_nobody_can_make_whole_is_an_error() -> None:
    ranks = [Rank(V(2, 2)), Rank(V(2, 2))]
    for rank in ranks:
        rank.state.torn = True
    found = await bring_together(Hub(2), ranks)
    assert all(isinstance(each, LocalError) and "half overwritten" in str(each) for each in found)


async def test_an_error_of_load_leaves_the_version_as_it_was_and_the_state_torn() -> None:
    ranks = [Rank(V(2, 2)), Rank(V(1, 1))]
    ranks[1].state.load = lambda new: 1 // 0
    _, failed = await bring_together(Hub(2), ranks)
    assert isinstance(failed, ZeroDivisionError)
    assert (ranks[1].state.version, ranks[1].state.torn) == (V(1, 1), True)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda rank, new: None, "'w' has other bits after it"),
        (lambda rank, new: rank.held.update(w=new["w"].astype(np.float32)), "float32 (3,), not float64 (3,)"),
        (lambda rank, new: rank.held.pop("w"), "save() gives no tensor 'w' after it"),
        (lambda rank, new: rank.held.update(w=new["w"]), "a value that is no tensor"),
    ],
)
async def test_a_load_that_does_not_put_the_state_in_place_is_refused(load: Callable[..., Any], said: str) -> None:
    giver, receiver = Rank(V(2, 2), {"w": np.arange(3.0), "n": 4}), Rank(V(1, 1), {"w": np.zeros(4), "n": 3})

    def wrong(new: Any) -> None:
        load(receiver, new)

    receiver.state.load = wrong
    _, failed = await bring_together(Hub(2), [giver, receiver])
    assert isinstance(failed, LocalError)
    assert "load() did not put the state in place that was handed over" in str(failed)
    assert said in str(failed)
    assert receiver.state.torn


# -- what is refused -------------------------------------------------------------------------------------------------


async def test_a_tensor_with_other_bits_than_the_manifest_says_is_corrupted_and_nothing_is_loaded() -> None:
    """A chunk and the digest that was offered for it, which fit each other."""

    def tamper(number: int, value: Any) -> Any:
        if number == CHUNK:
            value[1] ^= 1
        elif number == OFFER:
            chunk = np.concatenate([np.ones(2), np.ones(3)]).view(np.uint8)
            chunk[1] ^= 1
            value[:] = np.frombuffer(chunk_digest(chunk), np.uint8)
        return value

    ranks = [Rank(V(2, 2), {"a": np.ones(2), "b": np.ones(3)}), Rank(V(1, 1))]
    _, failed = await bring_together(Hub(2, tamper), ranks)
    assert isinstance(failed, Corrupted)
    assert (failed.rank, failed.view) == (0, VIEW_ID)
    assert "'a'" in str(failed)
    assert (ranks[1].loads, ranks[1].state.version) == ([], V(1, 1))


# -- a rank that lies ------------------------------------------------------------------------------------------------


async def test_a_state_that_is_announced_other_than_its_holders_have_told_is_refused_before_a_byte_of_it_is_taken() -> (
    None
):
    """The giver's manifest, offer and chunks all fit each other, and not what the other holder has."""
    held = [Rank(V(2, 2), {"a": np.ones(3), "n": 1}) for _ in range(2)]
    behind = Rank(V(1, 1), {"a": np.zeros(3), "n": 0})
    mine, read = behind.held["a"], held[0].state.read
    lying = iter([True])

    def forge() -> Any:
        """As told at first; then what is given has another bit."""
        found = read()
        assert found is not None
        told = found.digest
        if next(lying, False):
            held[0].held = {"a": np.array([1, 1, 1 + 2**-52]), "n": 1}
            forged = read()
            assert forged is not None
            object.__setattr__(forged, "digest", told)
            return forged
        return found

    held[0].state.read = forge
    hub = Hub(3)
    found = await bring_together(hub, [*held, behind])
    failed = found[2]
    assert isinstance(failed, Corrupted)
    assert (failed.rank, failed.view) == (0, VIEW_ID)
    assert "rank 0 announces another state than the one that it and all other holders have told" in str(failed)
    assert (mine.tolist(), behind.loads, behind.state.torn, behind.state.version) == ([0, 0, 0], [], False, V(1, 1))


@pytest.mark.parametrize("word", range(9))
async def test_a_rank_that_is_told_something_else_than_the_others_takes_part_in_nothing(word: int) -> None:
    """Whatever it would conclude from it: another giver, that it is not behind, that nobody knows what is right."""

    def mishear(number: int, sender: int, hearer: int, value: Any) -> Any:
        if (sender, hearer) == (0, 3):
            value[word if number == 0 else -1] ^= 1
        return value

    ranks = [*(Rank(V(2, 2)) for _ in range(3)), Rank(V(1, 1))]
    hub = Hub(4, mishear=mishear)
    found = await bring_together(hub, ranks)
    assert set(hub.log) == {"all_gather"}
    assert all(isinstance(each, Corrupted) for each in found), found
    assert [each.odd for each in found] == [(3,), (3,), (3,), ()]
    assert "the ranks were told different things of their states: worker-3, or who sends to it" in str(found[0])
    assert (ranks[3].loads, ranks[3].state.torn, ranks[3].state.version) == ([], False, V(1, 1))


async def test_two_ranks_that_have_heard_different_things_name_nobody() -> None:
    def mishear(number: int, sender: int, hearer: int, value: Any) -> Any:
        if number == 0 and sender == 0 and hearer == 1:
            value[1] += 1
        return value

    found = await bring_together(Hub(2, mishear=mishear), [Rank(V(2, 2)), Rank(V(1, 1))])
    assert [(type(each), each.odd) for each in found] == [(Corrupted, ())] * 2
    assert "who is wrong is not known" in str(found[0])


@pytest.mark.parametrize("torn", [False, True])
async def test_who_says_that_it_holds_what_was_never_committed_is_refused_by_all_others(torn: bool) -> None:
    """Or all would be behind it, whatever they hold, and would take its state."""
    held = [Rank(V(2, 2)), Rank(V(2, 2)), Rank(V(3, 3), {"w": np.ones(3)}), Rank(V(1, 1))]
    held[2].state.torn = torn
    found = await bring_together(Hub(4), held, committed=2)
    del found[2]
    assert [type(each) for each in found] == [Corrupted] * 3
    assert {(each.rank, each.odd) for each in found} == {(2, (2,))}
    assert "worker-2 says that it holds the state after decision 3, and the last one was 2" in str(found[0])
    assert [rank.loads for rank in held] == [[]] * 4


async def test_a_rank_whose_own_state_is_newer_than_its_view_knows_of_that_decision() -> None:
    """`check_state()` within a view, after steps of it."""
    found = await bring_together(Hub(2), [Rank(V(5, 5)), Rank(V(5, 5))], committed=2)
    assert [each.giver for each in found] == [None, None]


async def test_a_receiver_knows_who_else_holds_what_it_was_given() -> None:
    found = await bring_together(Hub(3), [Rank(V(2, 2)), Rank(V(1, 1)), Rank(V(2, 2))])
    assert [each.confirmed_by for each in found] == [(), (2,), ()]
    found = await bring_together(Hub(2), [Rank(V(2, 2)), Rank(V(1, 1))])
    assert [(each.giver, each.confirmed_by) for each in found] == [(None, ()), (0, ())]


async def test_a_rank_that_is_told_something_else_beside_a_step_says_so() -> None:
    def mishear(number: int, sender: int, hearer: int, value: Any) -> Any:
        if (sender, hearer) == (0, 2):
            value[-1] ^= 1
        return value

    with pytest.raises(Corrupted) as caught:
        await check(Hub(3, mishear=mishear), seeded(V(9, 9), 1, 1, 1))
    assert caught.value.odd == (2,)


# -- what else can be wrong with what comes --------------------------------------------------------------------------


async def test_a_malformed_manifest_is_the_givers_failure() -> None:
    def tamper(number: int, value: Any) -> Any:
        return np.zeros_like(value) if number == 1 else value

    _, failed = await bring_together(Hub(2, tamper), [Rank(V(2, 2)), Rank(V(1, 1))])
    assert isinstance(failed, PeerError)
    assert (failed.rank, failed.view, "malformed state manifest" in str(failed)) == (0, VIEW_ID, True)


@pytest.mark.parametrize("size", [-1, 1 << 40])
async def test_a_manifest_of_a_size_that_cannot_be_is_refused_before_there_is_memory_for_it(size: int) -> None:
    def tamper(number: int, value: Any) -> Any:
        return np.full_like(value, size) if number == 0 else value

    _, failed = await bring_together(Hub(2, tamper), [Rank(V(2, 2)), Rank(V(1, 1))])
    assert isinstance(failed, PeerError)
    assert f"a state manifest of {size} bytes" in str(failed)


async def test_what_is_no_state_any_more_is_the_error_of_the_rank_that_holds_it() -> None:
    ranks = [Rank(V(2, 2)), Rank(V(1, 1))]
    ranks[0].held = {"w": object()}
    failed, other = await bring_together(Hub(2), ranks)
    assert isinstance(failed, LocalError)
    assert "the state's 'w' is a builtins.object" in str(failed)
    assert isinstance(other, PeerError)


# -- comparing while a step is open ----------------------------------------------------------------------------------


async def check(hub: Hub, ranks: list[Rank], between: Callable[[], None] = lambda: None) -> list[Any]:
    groups: list[Any] = [MemoryGroup(hub, number) for number in range(len(ranks))]
    begun = [StateCheck(rank.state, group) for rank, group in zip(ranks, groups, strict=True)]
    between()
    return await asyncio.gather(*(each.result(NODES, VIEW_ID) for each in begun))


async def test_a_check_is_of_the_state_at_its_beginning() -> None:
    ranks = seeded(V(9, 9), 1, 1)

    def between() -> None:
        ranks[0].held["net"]["w"][:] = 0.0

    hub = Hub(2)
    assert await check(hub, ranks, between) == [None, None]
    assert hub.log == ["all_gather"] * 2
    found = await check(Hub(2), ranks)
    assert found[0] == found[1]
    assert (found[0].ranks, found[0].tensor, found[0].giver) == ((0, 1), "net.w", None)


async def test_a_check_names_the_rank_that_differs_from_most() -> None:
    ranks = seeded(V(9, 9), 1, 2, 1)
    (found,) = set(await check(Hub(3), ranks))
    assert (found.ranks, found.tensor, found.giver) == ((1,), "net.w", 0)


async def test_a_check_refuses_a_rank_that_is_ahead_of_the_others() -> None:
    """All others would have nothing that could be compared."""
    ranks = seeded(V(9, 9), 1, 1, 2)
    ranks[1].state.version = V(10, 10)
    with pytest.raises(Corrupted, match="worker-1 says that it holds the state after decision 10, and the last one"):
        await check(Hub(3), ranks)


async def test_a_check_among_ranks_without_a_state_finds_nothing() -> None:
    assert await check(Hub(2), [Rank(V(9, 9), registered=False)] * 2) == [None, None]
