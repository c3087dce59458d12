"""How the blocks of a sharded state come to the ranks that are to have them. Groups are in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from memory_group import Hub, MemoryGroup

from quicoll.errors import Corrupted, Diverged, LocalError, PeerError, ShardLost
from quicoll.membership.view import Member, View
from quicoll.state.layout import Layout
from quicoll.state.redistribution import redistribute
from quicoll.state.sharded import PieceGroups, Sharded, ShardedSet

LENGTH, BLOCKS = 23, 6
PIECES = {"m": "float32", "v": "int16"}
Read = Callable[[int, str, int, int], Any]


def view(nodes: Sequence[str], parting: tuple[str, ...] = ()) -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=rank + 1) for rank, node in enumerate(nodes))
    return View(view_id=7, members=members, seed=0, committed_step=5, committed_view=6, parting=parting)


class OpenStep:
    """A step that a test commits, or does not."""

    def __init__(self, number: int, here: View) -> None:
        self.number, self.view = number, here
        self.callbacks: list[Callable[[], None]] = []

    def on_commit(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)


class Node:
    """A process: its part of a sharded state, from view to view."""

    def __init__(self, name: str, backup: int = 0, read: Read | None = None, renew: bool = False) -> None:
        self.name = name
        self.sharded = Sharded(LENGTH, PIECES, blocks=BLOCKS, backup=backup, read=read, renew=renew)
        self.set: Any = None

    def enter(self, hubs: Sequence[Hub], rank: int) -> None:
        groups: list[Any] = [MemoryGroup(hub, rank) for hub in hubs]
        pieces = PieceGroups(*groups[1:])
        self.state_group = groups[0]
        self.set = ShardedSet({"a": self.sharded}, pieces) if self.set is None else self.set
        self.set.groups = pieces
        self.sharded.attach("a", pieces)


class Cluster:
    """Nodes that meet in one view after another."""

    def __init__(self, world: int, backup: int = 0, read: Read | None = None, renew: bool = False) -> None:
        self.nodes = [Node(f"n{number}", backup, read, renew) for number in range(world)]
        self.step = 0
        self.view = view([node.name for node in self.nodes])
        self.hubs: list[Hub] = []

    async def meet(self, nodes: Sequence[Node], parting: tuple[str, ...] = (), tamper: Any = None) -> list[Any]:
        """Begin a view: replicated records first, as synchronisation does, then the blocks."""
        self.nodes = list(nodes)
        self.view = view([node.name for node in nodes], parting)
        self.hubs = [Hub(len(nodes)) for _ in range(4)]
        if tamper is not None:
            self.hubs[2].tamper = self.hubs[3].tamper = tamper
        newest = max(nodes, key=lambda node: node.sharded.pieces.since)
        for rank, node in enumerate(nodes):
            node.enter(self.hubs, rank)
            node.set.take({"a": newest.sharded.pieces.record()})

        async def one(node: Node) -> Any:
            try:
                return await redistribute(node.set, node.state_group, self.view)
            except ShardLost:
                raise
            except Exception:
                for hub in self.hubs:
                    await hub.fail()
                raise

        return await asyncio.gather(*map(one, nodes), return_exceptions=True)

    async def train(self, *, commit: bool = True) -> None:
        """One step on every rank, with values that tell of step, piece and element."""
        number = self.step + 1
        steps = [OpenStep(number, self.view) for _ in self.nodes]
        await asyncio.gather(
            *(
                node.sharded.stage(
                    step,
                    {name: values(number, name, node.sharded.mine.start, node.sharded.mine.stop) for name in PIECES},
                )
                for node, step in zip(self.nodes, steps, strict=True)
            )
        )
        if commit:
            self.step = number
            for step in steps:
                for callback in step.callbacks:
                    callback()

    def check(self) -> None:
        """Every rank has what it is to own, as of the last committed step, and the copies that it is to keep."""
        spec = self.nodes[0].sharded.pieces.spec
        layout = Layout(BLOCKS, tuple(range(len(self.nodes))), spec.backup)
        for rank, node in enumerate(self.nodes):
            mine = node.sharded.mine
            assert (mine.start, mine.stop) == spec.bounds(layout.owned(rank))
            for name in PIECES:
                assert np.array_equal(node.sharded[name], values(self.step, name, mine.start, mine.stop))
            for block in range(BLOCKS):
                if rank in layout.keepers(block):
                    start, stop = spec.bounds(range(block, block + 1))
                    for name, part in zip(PIECES, node.sharded.pieces.parts(block), strict=True):
                        assert np.array_equal(part, values(self.step, name, start, stop))


def values(step: int, name: str, start: int, stop: int) -> Any:
    if not step:
        return np.zeros(stop - start, PIECES[name])
    return (np.arange(start, stop) * 7 + step * 100 + len(name) + ord(name)).astype(PIECES[name])


async def test_before_the_first_step_there_are_zeros_and_nothing_is_told() -> None:
    cluster = Cluster(3)
    assert await cluster.meet(cluster.nodes) == [0, 0, 0]
    cluster.check()
    assert [hub.log for hub in cluster.hubs] == [[], [], [], []]


@pytest.mark.parametrize("backup", [0, 1, 2])
async def test_blocks_follow_the_ranks_through_growth_and_parting(backup: int) -> None:
    cluster = Cluster(4, backup)
    four = cluster.nodes
    eight = [*four[:3], *(Node(f"n{number}", backup) for number in range(4, 9))]
    await cluster.meet(four)
    await cluster.train()
    for parting, after in ((four[3:], four[:3]), ([], eight), (eight[:6], eight[6:]), ([], [*eight[6:], *four[2:]])):
        if parting:
            found = await cluster.meet(cluster.nodes, tuple(node.name for node in parting))
            assert not any(isinstance(each, Exception) for each in found), found
            assert all(node.sharded.mine == slice(0, 0) for node in parting)
        found = await cluster.meet(after)
        assert not any(isinstance(each, Exception) for each in found), found
        cluster.check()
        await cluster.train()
        cluster.check()


async def test_what_was_staged_in_a_step_that_is_aborted_is_nowhere() -> None:
    cluster = Cluster(3, backup=1)
    await cluster.meet(cluster.nodes)
    await cluster.train()
    await cluster.train(commit=False)
    cluster.check()
    await cluster.meet(cluster.nodes[1:])
    cluster.check()


async def test_where_nothing_has_changed_nothing_but_bits_are_told() -> None:
    cluster = Cluster(3, backup=1)
    await cluster.meet(cluster.nodes)
    await cluster.train()
    assert await cluster.meet(cluster.nodes) == [0, 0, 0]
    assert [hub.log for hub in cluster.hubs] == [["all_gather"] * 2, [], [], []]


async def test_a_lost_owners_blocks_come_from_its_backup_and_get_a_new_one() -> None:
    cluster = Cluster(4, backup=1)
    await cluster.meet(cluster.nodes)
    await cluster.train()
    for survivors in ((0, 2, 3), (0, 2), (1,)):
        found = await cluster.meet([cluster.nodes[number] for number in survivors])
        assert not any(isinstance(each, Exception) for each in found), found
        cluster.check()


async def test_several_that_hold_a_block_share_the_work_and_nothing_travels_twice() -> None:
    cluster = Cluster(3, backup=2)
    await cluster.meet(cluster.nodes)
    await cluster.train()
    found = await cluster.meet([*cluster.nodes, Node("n9", 2)])
    assert found[:3] == [0, 0, 0]
    givers = {line.split(" to ")[0] for hub in cluster.hubs[2:] for line in hub.log if line.endswith("to 3")}
    assert len(givers) > 1


async def test_a_block_that_is_nowhere_is_named_on_all_ranks_and_found_when_its_node_is_back() -> None:
    cluster = Cluster(3)
    nodes = cluster.nodes
    await cluster.meet(nodes)
    await cluster.train()
    found = await cluster.meet([nodes[0], nodes[2]])
    assert all(isinstance(each, ShardLost) for each in found), found
    assert len({str(each) for each in found}) == 1
    assert (found[0].piece, found[0].start, found[0].stop, found[0].nodes) == ("a.m", 7, 15, ("n1",))
    assert (found[0].step, found[0].view, found[0].node) == (1, 7, "n1")
    assert await cluster.meet(nodes) == [0, 0, 0]
    cluster.check()


async def test_a_block_that_is_nowhere_is_zeros_where_its_user_asked_for_that_until_a_step_gives_it_values() -> None:
    cluster = Cluster(3, renew=True)
    nodes = cluster.nodes
    await cluster.meet(nodes)
    await cluster.train()
    assert not any(isinstance(each, BaseException) for each in await cluster.meet([nodes[0], nodes[2]]))
    for node in (nodes[0], nodes[2]):
        mine = node.sharded.mine
        for name in PIECES:
            wanted = values(1, name, 0, LENGTH)
            wanted[7:15] = 0
            assert np.array_equal(node.sharded[name], wanted[mine])
    await cluster.train()
    cluster.check()


async def test_a_node_that_is_back_before_the_next_commit_has_its_block_still() -> None:
    cluster = Cluster(3, renew=True)
    nodes = cluster.nodes
    await cluster.meet(nodes)
    await cluster.train()
    await cluster.meet([nodes[0], nodes[2]])
    await cluster.train(commit=False)
    found = await cluster.meet(nodes)
    assert not any(isinstance(each, BaseException) for each in found), found
    cluster.check()


async def test_what_was_renewed_in_a_view_is_looked_for_again_and_renewed_in_the_next_one() -> None:
    cluster = Cluster(3, backup=1, renew=True)
    nodes = cluster.nodes
    await cluster.meet(nodes)
    await cluster.train()
    for _ in range(2):
        assert await cluster.meet([nodes[0]]) == [0]
        mine = nodes[0].sharded["m"].copy()
        assert not mine[7:15].any()
        assert mine[:7].all()
    await cluster.train()
    cluster.check()


async def test_an_older_copy_of_a_block_counts_as_none() -> None:
    cluster = Cluster(3)
    nodes = cluster.nodes
    await cluster.meet(nodes)
    await cluster.train()
    await cluster.train()
    await cluster.meet([nodes[0], nodes[1], nodes[2]], ("n1",))  # which is cut off then, with blocks of step 2
    await cluster.meet([nodes[0], nodes[2]])
    await cluster.train()
    found = await cluster.meet(nodes)
    assert found[1] > 0  # it gets anew what it had before
    cluster.check()


async def test_what_is_lost_is_read_for_the_last_committed_step_by_those_that_are_to_keep_it() -> None:
    asked: list[tuple[int, str, int, int]] = []

    def read(step: int, name: str, start: int, stop: int) -> Any:
        if step:
            asked.append((step, name, start, stop))
        return values(step, name, start, stop)

    cluster = Cluster(3, read=read)
    await cluster.meet(cluster.nodes)
    await cluster.train()
    await cluster.train()
    await cluster.meet([cluster.nodes[0], cluster.nodes[2]])
    cluster.check()
    assert sorted(asked) == [(2, name, start, stop) for name in ("m", "v") for start, stop in ((7, 11), (11, 15))]


@pytest.mark.parametrize("wrong", ["stale", "raises", "short"])
async def test_a_checkpoint_that_has_not_what_was_agreed_is_not_taken(wrong: str) -> None:
    def read(step: int, name: str, start: int, stop: int) -> Any:
        if not step:
            return values(0, name, start, stop)
        if wrong == "raises":
            raise OSError("no such checkpoint")
        return values(step - 1 if wrong == "stale" else step, name, start, stop - (wrong == "short"))

    cluster = Cluster(3, read=read)
    await cluster.meet(cluster.nodes)
    await cluster.train()
    await cluster.train()
    found = await cluster.meet([cluster.nodes[0], cluster.nodes[2]])
    assert all(isinstance(each, ShardLost) for each in found), found


async def test_bytes_that_change_on_the_way_are_refused_and_the_next_view_goes_on_where_it_was() -> None:
    cluster = Cluster(2)
    await cluster.meet(cluster.nodes)
    await cluster.train()
    old = cluster.nodes

    def tamper(number: int, value: Any) -> Any:
        return value + 1 if value.dtype == np.uint8 and value.size > 20 and number > 2 else value

    new = Node("n9")
    found = await cluster.meet([*old, new], tamper=tamper)
    assert any(isinstance(each, Corrupted) for each in found), found
    assert not any(new.sharded.pieces.has(block) for block in range(BLOCKS))
    await cluster.meet([*old, new])
    cluster.check()


async def test_a_state_that_was_loaded_is_read_by_its_owners_and_never_begun_with_zeros() -> None:
    cluster = Cluster(2, read=values)
    for node in cluster.nodes:
        node.sharded.pieces.begin_at(4)
    cluster.step = 4
    await cluster.meet(cluster.nodes)
    cluster.check()
    without = Cluster(2)
    for node in without.nodes:
        node.sharded.pieces.begin_at(4)
    found = await without.meet(without.nodes)
    assert all(isinstance(each, LocalError) and "give quicoll.Sharded a read=" in str(each) for each in found), found


async def test_where_all_are_about_to_leave_nothing_is_handed_over() -> None:
    cluster = Cluster(2)
    await cluster.meet(cluster.nodes)
    await cluster.train()
    assert await cluster.meet(cluster.nodes, ("n0", "n1")) == [0, 0]


# -- a job that goes on from a checkpoint, with disks of its ranks' own ---------------------------------------------


class Disk:
    """The blocks that one node's disk has, as after step 4. index: whether it knows where they are."""

    def __init__(self, blocks: Sequence[int], *, index: bool = True, wrong: Sequence[int] = ()) -> None:
        self.blocks, self.wrong = blocks, wrong
        self.known: bytes | None = b"where pieces are" if index else None
        self.reads: list[int] = []

    def read(self, step: int, name: str, start: int, stop: int) -> Any:
        block = next(each for each in range(BLOCKS) if each * LENGTH // BLOCKS == start)
        if step != 4 or block not in self.blocks or self.known is None:
            raise OSError(f"elements {start} to {stop} are not on this disk")
        self.reads.append(block)
        return values(step, name, start, stop) + (block in self.wrong)

    def of_step(self, step: int) -> bytes | None:
        return self.known if step == 4 else None

    def take(self, step: int, index: bytes) -> None:
        if index != b"where pieces are":
            raise ValueError("this is no index")
        self.known = index


def resumed(disks: Sequence[Disk], backup: int = 0) -> Cluster:
    cluster = Cluster(len(disks), backup)
    cluster.step = 4
    for node, disk in zip(cluster.nodes, disks, strict=True):
        node.sharded = Sharded(LENGTH, PIECES, blocks=BLOCKS, backup=backup, read=disk.read)
        node.sharded.index = disk
        node.sharded.pieces.begin_at(4)
    return cluster


@pytest.mark.parametrize("backup", [0, 1])
@pytest.mark.parametrize(
    "disks",
    [
        ([0, 1, 2, 3, 4, 5], []),  # a node was replaced
        ([3, 4, 5], [0, 1, 2]),  # the disks have changed places
        ([0, 1], [2, 3], [4, 5], []),  # more ranks than wrote it
        ([], [5, 0, 1], [1, 2, 3, 4]),  # fewer, and a copy of one block
    ],
)
async def test_a_begin_finds_every_block_on_whatever_ranks_disk_it_is(disks: Any, backup: int) -> None:
    cluster = resumed([Disk(blocks) for blocks in disks], backup)
    found = await cluster.meet(cluster.nodes)
    assert not any(isinstance(each, Exception) for each in found), found
    assert sum(found) > 0
    cluster.check()
    await cluster.train()
    cluster.check()


async def test_a_begin_from_disks_that_have_it_all_tells_but_bits_and_moves_nothing() -> None:
    cluster = resumed([Disk([0, 1, 2]), Disk([3, 4, 5])])
    assert await cluster.meet(cluster.nodes) == [0, 0]
    assert [hub.log for hub in cluster.hubs] == [["all_gather"] * 2, [], [], []]
    cluster.check()


async def test_a_begin_reads_for_others_no_more_than_they_lack() -> None:
    disks = [Disk(range(BLOCKS)), Disk([3, 4])]
    cluster = resumed(disks)
    assert await cluster.meet(cluster.nodes) == [0, 1]
    assert [sorted(set(disk.reads)) for disk in disks] == [[0, 1, 2, 5], [3, 4]]


async def test_a_disk_that_lacks_the_index_gets_it_and_gives_what_it_has() -> None:
    """Its process was killed as the checkpoint was completed: the pieces are there, the manifest is elsewhere."""
    disks = [Disk([0, 1]), Disk([2, 3], index=False), Disk([4, 5])]
    cluster = resumed(disks)
    assert await cluster.meet(cluster.nodes) == [0, 0, 0]
    cluster.check()
    assert disks[1].known == disks[0].known


async def test_an_index_that_cannot_be_used_costs_what_is_on_that_disk_alone() -> None:
    disks = [Disk(range(BLOCKS)), Disk([2, 3], index=False)]
    disks[0].known = b"something else"
    cluster = resumed(disks)
    assert await cluster.meet(cluster.nodes) == [0, 3]
    cluster.check()


async def test_a_block_on_no_disk_stops_a_begin_with_its_name_and_is_found_when_its_disk_is_back() -> None:
    disks = [Disk([0, 1]), Disk([4, 5])]
    cluster = resumed(disks)
    found = await cluster.meet(cluster.nodes)
    assert all(isinstance(each, ShardLost) for each in found), found
    assert {str(each) for each in found} == {
        "elements 7 to 15 of 'a' (m, v) as after step 4, from which the job goes on, can be read on none of n0, n1: "
        "each has logged why (view=7, step=4)"
    }
    assert (found[0].piece, found[0].start, found[0].stop, found[0].nodes) == ("a.m", 7, 15, ())
    disks[1].blocks = [2, 3, 4, 5]
    found = await cluster.meet(cluster.nodes)
    assert found == [1, 0]
    cluster.check()


async def test_disks_that_give_two_things_for_one_block_stop_the_job() -> None:
    """Two checkpoints of one step: neither is taken for the other's backup."""
    cluster = resumed([Disk([2, 0]), Disk([0, 2, 3], wrong=[2]), Disk([4, 5]), Disk([1])], backup=2)
    found = await cluster.meet(cluster.nodes)
    assert all(isinstance(each, Diverged) for each in found), found
    assert len({str(each) for each in found}) == 1
    assert (found[0].tensor, set(found[0].nodes)) == ("a.m", {"n0", "n1"})
    assert "elements 7 to 11 of 'a' as after step 4 were read with other bits on" in str(found[0])


async def test_bytes_that_change_on_the_way_at_a_begin_are_refused_and_the_next_view_has_them() -> None:
    cluster = resumed([Disk(range(BLOCKS)), Disk([])])

    def tamper(number: int, value: Any) -> Any:
        return value + 1 if value.dtype == np.uint8 and value.size > 20 and number > 2 else value

    found = await cluster.meet(cluster.nodes, tamper=tamper)
    assert any(isinstance(each, Corrupted) for each in found), found
    assert all(isinstance(each, Corrupted | PeerError) for each in found), found
    assert not any(cluster.nodes[1].sharded.pieces.has(block) for block in range(BLOCKS))
    assert await cluster.meet(cluster.nodes) == [0, 3]
    cluster.check()


async def test_a_lost_block_is_read_on_a_rank_that_is_not_to_keep_it_where_its_keeper_cannot() -> None:
    def reading(has: bool) -> Read:
        def read(step: int, name: str, start: int, stop: int) -> Any:
            if step and not has:
                raise OSError("this disk is empty")
            return values(step, name, start, stop)

        return read

    cluster = Cluster(4)
    for number, node in enumerate(cluster.nodes):
        node.sharded = Sharded(LENGTH, PIECES, blocks=BLOCKS, read=reading(number == 3))
    nodes = cluster.nodes
    await cluster.meet(nodes)
    await cluster.train()
    found = await cluster.meet([nodes[0], nodes[2], nodes[3]])
    assert not any(isinstance(each, Exception) for each in found), found
    cluster.check()
