"""Each operation without a network: made, prepared from what the ranks announce, its work executed in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fake_links import execute
from wire_oracle import reduced

from quicoll.collectives.base import GroupView
from quicoll.collectives.gathered import GatheredAllReduce
from quicoll.collectives.movements import AllToAll, Barrier, Broadcast, Gather, Scatter
from quicoll.collectives.objects import MAX_OBJECT_BYTES, AllGatherObject, BroadcastObject
from quicoll.collectives.point_to_point import Receive, Send
from quicoll.collectives.reductions import AllReduce, Reduce, ReduceScatter
from quicoll.collectives.shards import Leaves, Shards
from quicoll.collectives.split import Split
from quicoll.collectives.subgroups import MAX_COLOR, MAX_KEY, STATE, WORLD, Scope
from quicoll.engine.calls import Known, Work
from quicoll.engine.given import open_given
from quicoll.errors import LocalError, PeerError
from quicoll.numerics.canonical_order import leaves_of
from quicoll.plan.network import NetworkModel

if TYPE_CHECKING:
    from quicoll.collectives.operation import Operation

VIEW = 7


def place(rank: int, world: int = 3, scope: Scope = WORLD, *, sites: Sequence[int] | None = None) -> GroupView:
    """The group of all ranks of a view, or a sub-group."""
    ranks = tuple(range(world)) if scope.ranks is None else scope.ranks
    return GroupView(VIEW, scope, rank, ranks, tuple(sites or [0] * len(ranks)), chunk_bytes=64)


def part(rank: int, *ranks: int) -> GroupView:
    """A sub-group of `ranks` of the view, as its member `rank` sees it."""
    return place(rank, scope=WORLD.sub(0, 5, ranks, rank, view_id=VIEW))


class Transfer:
    def __init__(self, on_done: Callable[[Transfer], None] | None) -> None:
        self.done = self.aborted = False
        self.error = None
        self.on_done = on_done

    def arrive(self) -> None:
        self.done = True
        if self.on_done is not None:
            self.on_done(self)

    def abort(self) -> None:
        if not self.done:
            self.done = self.aborted = True


class Wires:
    """Links between ranks of one process: a message is copied when both ends have named it."""

    def __init__(self) -> None:
        self.bytes_of: dict[int, int] = {}  # by the rank that has sent them
        self.sent: dict[Any, tuple[bytes, Transfer]] = {}
        self.posted: dict[Any, tuple[memoryview, Transfer]] = {}

    def links(self, rank: int, world: int) -> dict[int, Any]:
        wires = self

        class End:
            def __init__(self, peer: int) -> None:
                self.peer = peer

            def send(self, tag: bytes, memory: memoryview, on_done: Callable[[Transfer], None]) -> Transfer:
                return wires.meet((rank, self.peer, tag), on_done, sent=bytes(memory))

            def send_copy(self, tag: bytes, memory: memoryview) -> None:
                wires.meet((rank, self.peer, tag), None, sent=bytes(memory))

            def post(self, tag: bytes, memory: memoryview, on_done: Callable[[Transfer], None]) -> Transfer:
                return wires.meet((self.peer, rank, tag), on_done, posted=memory)

        return {peer: End(peer) for peer in range(world)}

    def meet(
        self,
        key: Any,
        on_done: Callable[[Transfer], None] | None,
        *,
        sent: bytes | None = None,
        posted: memoryview | None = None,
    ) -> Transfer:
        transfer = Transfer(on_done)
        if sent is not None:
            self.bytes_of[key[0]] = self.bytes_of.get(key[0], 0) + len(sent)
            self.sent[key] = (sent, transfer)
        if posted is not None:
            self.posted[key] = (posted, transfer)
        if key in self.sent and key in self.posted:
            (payload, one), (memory, other) = self.sent.pop(key), self.posted.pop(key)
            memory[:] = payload
            one.arrive()
            other.arrive()
        return transfer


def known(operations: Sequence[Operation[Any]]) -> Known:
    """What each rank knows once all have called: all counts, and a network where one is agreed on."""
    here = operations[0].here
    network = NetworkModel.between(here.sites, latency=1e-4, rate=1e8, far_latency=0.02, far_rate=1e7)
    counts = [operation.counts if operation.gathers else None for operation in operations]
    return Known(counts, network if operations[0].measures else None)


def run(operations: Sequence[Operation[Any]], wires: Wires | None = None) -> list[Any]:
    """Carry out the operations of all ranks, by what they announce or by their plans; gives their results."""
    for operation in operations:
        if operation.announced:
            operation.seal()
    calls = [operation.call() for operation in operations]
    assert len({call.signature for call in calls}) == 1
    if calls[0].combine is not None:
        for call in calls:
            assert call.combine is not None
            assert call.sizes is not None
            given = [open_given(each.given, size, 0) for each, size in zip(calls, call.sizes, strict=True)]
            call.combine(given, ())
        return [operation.result() for operation in operations]
    wires = Wires() if wires is None else wires
    works = [operation.call().make(known(operations)) for operation in operations]

    async def every() -> None:
        await asyncio.gather(
            *(
                execute(work, links=wires.links(rank, len(works)), ranks=range(len(works)), prefix=b"")
                for rank, work in enumerate(works)
            )
        )

    asyncio.run(every())
    assert not wires.sent
    assert not wires.posted
    return [operation.result() for operation in operations]


def values(rank: int, rows: int = 5) -> Any:
    return np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + 100 * rank


def test_an_all_reduce_has_the_same_bits_everywhere_and_by_every_algorithm() -> None:
    total = sum(values(rank) for rank in range(3))
    for algorithm in ("auto", "direct", "tree", "hierarchical", "exchange"):
        operations = [AllReduce(place(rank, sites=(0, 0, 1)), values(rank), algorithm=algorithm) for rank in range(3)]
        for result, operation in zip(run(operations), operations, strict=True):
            assert result.tolist() == total.tolist()
            assert operation.bits().tolist() == total.reshape(-1).tolist()
        assert not operations[0].measures
        assert operations[0].announced == (algorithm == "auto")


def test_what_is_too_large_for_an_announcement_goes_by_a_plan_and_so_it_does_among_many_ranks() -> None:
    most, more = np.zeros(256, np.float32), np.zeros(257, np.float32)
    assert AllReduce(place(0), most).announced
    assert not AllReduce(place(0), more).announced
    assert AllReduce(place(0), more).measures
    assert not AllReduce(place(0), most, algorithm="exchange").announced
    assert Broadcast(place(1), most).announced
    assert not Broadcast(place(1), more).announced
    assert ReduceScatter(place(1), most).announced
    assert AllReduce(place(0, 16), most).announced
    assert not AllReduce(place(0, 17), most).announced


def test_leaves_of_one_rank_are_announced_together_as_far_as_they_fit() -> None:
    for elements, announced in ((128, True), (129, False)):  # two leaves on a rank at most
        made = []
        for rank in range(3):
            mine = leaves_of(rank, 3, 5)
            values = tuple(np.full(elements, 10.0**leaf, np.float32) for leaf in mine)
            made.append(AllReduce(place(rank), Leaves(Shards(5, mine.start, len(mine), VIEW), values)))
        assert {operation.announced for operation in made} == {announced}
        if announced:
            assert [result.tolist() for result in run(made)] == [[11111.0] * elements] * 3


def test_a_ring_says_so_to_the_audit_and_to_the_other_ranks() -> None:
    operations = [AllReduce(place(rank), values(rank), reduce_order="ring") for rank in range(3)]
    assert run(operations)[0].tolist() == sum(values(rank) for rank in range(3)).tolist()
    issued = operations[0].issued()
    assert (issued.op, issued.terms) == ("all_reduce float32 (5,2) sum default ring", "world=3")
    assert operations[0].signature.startswith("all_reduce/ring ")


def test_what_travels_encoded_is_decoded_once_and_the_audit_sees_the_tensors() -> None:
    operations = [AllReduce(place(rank), values(rank), wire="bfloat16", op="max") for rank in range(3)]
    results = run(operations)
    assert np.allclose(results[0], values(2), rtol=2**-8)
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    issued = operations[1].issued()
    assert issued.op == "all_reduce float32 (5,2) max default wire=bfloat16"
    ((number, elements),) = issued.inputs
    assert (number, elements[:].tolist()) == (1, values(1).reshape(-1).tolist())


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("wire", "times"), [("bfloat16", 2), ("int8", 1024 / 260), ("int4", 256 / 34), ("topk:1/64", 16384 / 224)]
)
def test_a_wire_format_sends_as_many_bytes_as_is_stated(wire: str, times: float, world: int) -> None:
    """Of one leaf on each rank, by all of them: 2 (p - 1) encoded leaves; where leaves are gathered p (p - 1)."""
    leaves = [np.random.default_rng(rank).standard_normal(world * 4096).astype(np.float32) for rank in range(world)]
    made: type[AllReduce] = GatheredAllReduce if wire.startswith("topk") else AllReduce
    wires = Wires()
    operations = [made(place(rank, world), leaves[rank], wire=wire, algorithm="direct") for rank in range(world)]
    results = run(operations, wires)
    assert {result.tobytes() for result in results} == {reduced(wire, leaves, "sum").tobytes()}
    encoded = world * 16384 / times
    ways = world if made is GatheredAllReduce else 2  # to all from each, or to owners and back
    assert sum(wires.bytes_of.values()) == ways * (world - 1) * encoded


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ["auto", "direct", "hierarchical"])
def test_gathered_leaves_have_the_same_bits_by_every_algorithm_at_every_world_size(world: int, algorithm: str) -> None:
    leaves = [np.random.default_rng(leaf).standard_normal(5000).astype(np.float32) for leaf in range(6)]
    sites = [rank % 2 for rank in range(world)]
    operations = []
    for rank in range(world):
        mine = leaves_of(rank, world, 6)
        given = Shards(6, mine.start, len(mine), VIEW).leaves([leaves[leaf] for leaf in mine])
        here = place(rank, world, sites=sites)
        operations.append(GatheredAllReduce(here, given, op="avg", wire="topk:1/100", algorithm=algorithm))
    expected = reduced("topk:1/100", leaves, "avg").tobytes()
    assert {result.tobytes() for result in run(operations)} == {expected}
    assert operations[0].issued().op == "all_reduce float32 (5000) avg default wire=topk:1/100"


def test_an_algorithm_that_gathers_no_leaves_is_refused_for_top_k() -> None:
    for algorithm in ("tree", "exchange"):
        with pytest.raises(LocalError, match="by one of auto, direct, hierarchical, local, not"):
            GatheredAllReduce(place(0), values(0), wire="topk:1/64", algorithm=algorithm)
    with pytest.raises(LocalError, match="do not share a host's memory"):
        GatheredAllReduce(place(0), values(0), wire="topk:1/64", algorithm="local")
    with pytest.raises(LocalError, match="not encoded: leave wire or reduce_order out"):
        GatheredAllReduce(place(0), values(0), wire="topk:1/64", reduce_order="ring")


def test_a_list_gives_a_list_and_leaves_count_by_shard() -> None:
    shards = [leaves_of(rank, 2, 5) for rank in range(2)]
    operations = []
    for rank, mine in enumerate(shards):
        leaves = Shards(5, mine.start, len(mine), VIEW).leaves([[np.full(2, float(s)), np.ones(3)] for s in mine])
        operations.append(AllReduce(place(rank, 2), leaves, op="avg"))
    for result in run(operations):
        assert [part.tolist() for part in result] == [[2.0, 2.0], [1.0, 1.0, 1.0]]
    assert [number for number, _ in operations[1].inputs()] == list(shards[1])


def test_a_reduce_gives_the_root_alone_a_result() -> None:
    operations = [Reduce(place(rank), values(rank), root=1, op="min") for rank in range(3)]
    assert [None if result is None else result.tolist() for result in run(operations)] == [
        None,
        values(0).tolist(),
        None,
    ]
    assert [operation.holds for operation in operations] == [False, True, False]
    assert operations[0].issued().result is None
    assert operations[1].issued().op == "reduce float32 (5,2) min default root=1"


def test_a_reduce_scatter_gives_each_rank_its_rows() -> None:
    total = sum(values(rank) for rank in range(3))
    results = run([ReduceScatter(place(rank), values(rank), counts=[0, 4, 1]) for rank in range(3)])
    assert [result.tolist() for result in results] == [[], total[:4].tolist(), total[4:].tolist()]
    assert ReduceScatter(place(0), values(0), counts=[0, 4, 1]).terms() == "counts=0,4,1"
    assert ReduceScatter(place(0), values(0)).terms() == ""


def test_a_broadcast_reads_the_root_alone_and_writes_out() -> None:
    outs = [np.zeros((5, 2), np.float32) for _ in range(3)]
    operations = [Broadcast(place(rank), values(rank), root=2, out=outs[rank]) for rank in range(3)]
    results = run(operations)
    assert all(result is out for result, out in zip(results, outs, strict=True))
    assert [out.tolist() for out in outs] == [values(2).tolist()] * 3
    assert [len(operation.inputs()) for operation in operations] == [0, 0, 1]


def test_gathers_take_as_many_rows_as_each_rank_announces() -> None:
    rows = [2, 0, 3]
    whole = np.concatenate([values(rank, count) for rank, count in enumerate(rows)])
    results = run([Gather(place(rank), values(rank, count)) for rank, count in enumerate(rows)])
    assert [result.tolist() for result in results] == [whole.tolist()] * 3
    operations = [Gather(place(rank), values(rank, count), root=1) for rank, count in enumerate(rows)]
    results = run(operations)
    assert (results[0], results[1].tolist(), results[2]) == (None, whole.tolist(), None)
    assert operations[0].issued().op == "gather float32 (n,2) root=1"


def test_a_scatter_divides_as_the_root_announces() -> None:
    results = run([Scatter(place(rank), values(rank), root=1, counts=[1, 0, 4]) for rank in range(3)])
    assert [result.tolist() for result in results] == [values(1)[:1].tolist(), [], values(1)[1:].tolist()]


def test_an_all_to_all_gives_what_it_was_given_a_tensor_or_a_list() -> None:
    results = run([AllToAll(place(rank), values(rank), counts=[1, 2, 2]) for rank in range(3)])
    assert results[0].tolist() == [values(rank)[0].tolist() for rank in range(3)]
    parts = [[np.full((to, 1), rank) for to in range(3)] for rank in range(3)]
    results = run([AllToAll(place(rank), parts[rank]) for rank in range(3)])
    assert [part.tolist() for part in results[2]] == [[[0], [0]], [[1], [1]], [[2], [2]]]


def test_objects_of_any_size_reach_every_rank() -> None:
    assert run([BroadcastObject(place(rank), {"of": rank}, root=1) for rank in range(3)]) == [{"of": 1}] * 3
    assert run([AllGatherObject(place(rank), ["x"] * rank) for rank in range(3)]) == [[[], ["x"], ["x", "x"]]] * 3


def test_send_and_recv_are_one_operation_of_two_ranks_of_the_view() -> None:
    here = [part(rank, 4, 1, 6) for rank in range(3)]
    send, recv = Send(here[2], values(3), to=0), Receive(here[0], values(0), source=2)
    assert (send.ranks, recv.ranks, send.group_id) == ((6, 4), (6, 4), recv.group_id)
    assert send.group_id not in (WORLD.group_id, here[0].scope.group_id)
    assert Send(here[0], values(3), to=2).group_id != send.group_id
    sent, received = run([send, recv])
    assert (sent, received.tolist()) == (None, values(3).tolist())
    assert [len(each.inputs()) for each in (send, recv)] == [1, 0]
    assert not send.call().watched


def test_a_barrier_sends_nothing_and_gives_nothing() -> None:
    assert run([Barrier(place(rank)) for rank in range(3)]) == [None] * 3


def test_a_split_puts_ranks_of_one_color_together_in_the_order_of_their_keys() -> None:
    colors, keys = [1, None, 1], [5, 0, -5]
    operations = [Split(place(rank), colors[rank], keys[rank], number=3, made=lambda scope: scope) for rank in range(3)]
    first, none, last = run(operations)
    assert none is None
    assert (first.ranks, first.rank, last.rank, first.name) == ((2, 0), 1, 0, "3:1")
    assert first.group_id == last.group_id
    assert first.view_id == VIEW
    assert operations[1].terms() == "color=none key=0"
    assert operations[0].bits().shape == (3, 2)


def test_a_sub_group_adds_its_name_and_ranks_to_what_is_compared() -> None:
    call = Barrier(part(1, 4, 2)).call()
    assert (call.ranks, call.where, call.signature.endswith(" group=0:5")) == ((4, 2), "0:5", True)
    everyone = Barrier(place(0)).call()
    assert (everyone.ranks, everyone.where, everyone.watched) == (None, "", True)
    assert not Barrier(place(0, scope=STATE)).call().watched


OUT = np.zeros((5, 2), np.float32)

REFUSED: dict[str, tuple[Callable[[], Operation[Any]], str]] = {
    "algorithm": (lambda: AllReduce(place(0), values(0), algorithm="best"), "algorithm 'best' is not known"),
    "order": (lambda: AllReduce(place(0), values(0), reduce_order="any"), "reduce_order 'any'"),
    "ring and algorithm": (
        lambda: AllReduce(place(0), values(0), reduce_order="ring", algorithm="tree"),
        "an algorithm of its own",
    ),
    "ring and exact": (lambda: AllReduce(place(0), values(0), reduce_order="ring", exact=True), "has no order"),
    "ring and wire": (lambda: AllReduce(place(0), values(0), reduce_order="ring", wire="int8"), "partial sums"),
    "exact and precision": (
        lambda: AllReduce(place(0), values(0), exact=True, precision="float64"),
        "accumulator of its own",
    ),
    "op": (lambda: AllReduce(place(0), values(0), op="mean"), "op 'mean' is not supported"),
    "a number": (lambda: AllReduce(place(0), 3.0), "neither array nor tensor"),
    "leaves that differ": (
        lambda: AllReduce(place(0), Leaves(Shards(4, 0, 2, VIEW), (np.ones(2), np.ones(3)))),
        "leaves differ",
    ),
    "leaves of another view": (
        lambda: AllReduce(place(0), Leaves(Shards(3, 0, 1, VIEW - 1), (np.ones(2),))),
        "made for view 6, the view is 7",
    ),
    "leaves of another rank": (
        lambda: Reduce(place(0), Leaves(Shards(3, 1, 1, VIEW), (np.ones(2),))),
        "not those of this rank",
    ),
    "out twice": (lambda: AllReduce(place(0), [values(0)] * 2, out=[OUT, OUT]), "items 0 and 1 in one place"),
    "out twice in a broadcast": (lambda: Broadcast(place(0), [values(0)] * 2, out=[OUT, OUT]), "in one place"),
    "a number in a list": (lambda: AllReduce(place(0), [np.float32(1), 1.0]), "item 1 of the list is a float"),
    "out": (lambda: AllReduce(place(0), values(0), out=np.zeros(3)), "out is"),
    "root": (lambda: Reduce(place(0), values(0), root=3), "root 3 is not a rank of a world of 3"),
    "list to scatter": (lambda: ReduceScatter(place(0), [np.ones(3)]), "a tensor, not a list"),
    "0-dim": (lambda: ReduceScatter(place(0), np.ones(())), "a 0-dim tensor has none"),
    "counts": (lambda: ReduceScatter(place(0), values(0), counts=[5]), r"do not divide 5 rows between 3 ranks"),
    "None to broadcast": (lambda: Broadcast(place(0), None, root=1), "a tensor on every rank"),
    "None to scatter": (lambda: Scatter(place(0), None, root=1), "a tensor on every rank"),
    "out of a gather": (lambda: Gather(place(0), values(0), out=np.zeros((9, 3), np.float32)), "out is"),
    "parts": (lambda: AllToAll(place(0), [np.ones(1)] * 2), "2 parts for 3 ranks"),
    "parts and counts": (lambda: AllToAll(place(0), [np.ones(1)] * 3, counts=[1, 1, 1]), "leave counts and out out"),
    "parts that differ": (lambda: AllToAll(place(0), [np.ones((1, k)) for k in range(3)]), "that differ in n alone"),
    "to itself": (lambda: Send(place(0), values(0), to=0), "cannot send to itself"),
    "no rank": (lambda: Receive(place(0), values(0), source=-1), "source -1 is not a rank"),
    "object": (lambda: AllGatherObject(place(0), object()), "msgpack cannot carry"),
    "large object": (lambda: BroadcastObject(place(0), bytes(MAX_OBJECT_BYTES)), "send a tensor"),
    "color": (lambda: Split(place(0), -1, 0, number=0, made=repr), "a color is an integer from 0"),
    "key": (lambda: Split(place(0), 0, MAX_KEY + 1, number=0, made=repr), "a key is an integer from"),
    "color of text": (lambda: Split(place(0), "red", 0, number=0, made=repr), "are integers"),
    "depth": (
        lambda: Split(replace(place(0), scope=Scope(9, "/".join(["0:0"] * 32))), 0, 0, number=0, made=repr),
        "at most 32 deep",
    ),
}


@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused_when_the_operation_is_made(make: Callable[[], Operation[Any]], said: str) -> None:
    with pytest.raises(LocalError, match=said):
        make()


RECORDED: dict[str, Callable[[Any], Operation[Any]]] = {
    "all_reduce": lambda x: AllReduce(place(0), x),
    "all_reduce of a list": lambda x: AllReduce(place(0), [x.detach(), x]),
    "all_reduce out": lambda x: AllReduce(place(0), x.detach(), out=x),
    "all_reduce out of a list": lambda x: AllReduce(place(0), [x.detach()] * 2, out=[torch.zeros(3, 2), x]),
    "all_reduce of leaves": lambda x: AllReduce(place(0), Leaves(Shards(3, 0, 1, VIEW), (x,))),
    "all_reduce like": lambda x: AllReduce(place(0), Leaves(Shards(2, 0, 0, VIEW), (), like=x)),
    "reduce": lambda x: Reduce(place(0), x),
    "reduce out": lambda x: Reduce(place(0), x.detach(), out=x),
    "reduce_scatter": lambda x: ReduceScatter(place(0), x),
    "reduce_scatter out": lambda x: ReduceScatter(place(0), torch.zeros(9, 2), out=x),
    "broadcast": lambda x: Broadcast(place(0), x),
    "broadcast elsewhere": lambda x: Broadcast(place(1), x),
    "broadcast out": lambda x: Broadcast(place(1), x.detach(), out=x),
    "gather": lambda x: Gather(place(1), x, root=0),
    "all_gather": lambda x: Gather(place(0), x),
    "all_gather out": lambda x: Gather(place(0), x.detach(), out=x),
    "scatter": lambda x: Scatter(place(0), x),
    "scatter elsewhere": lambda x: Scatter(place(1), x),
    "scatter out": lambda x: Scatter(place(0), x.detach(), out=x),
    "all_to_all": lambda x: AllToAll(place(0), x),
    "all_to_all of parts": lambda x: AllToAll(place(0), [x.detach(), x, x.detach()]),
    "all_to_all out": lambda x: AllToAll(place(0), x.detach(), out=x),
    "send": lambda x: Send(place(0), x, to=1),
    "recv": lambda x: Receive(place(0), x, source=1),
    "recv out": lambda x: Receive(place(0), x.detach(), source=1, out=x),
}


@pytest.mark.parametrize("make", RECORDED.values(), ids=RECORDED.keys())
def test_no_operation_takes_a_tensor_from_its_graph_without_a_word(make: Callable[[Any], Operation[Any]]) -> None:
    """What comes out has no gradient, so a tensor that autograd records is refused; where it records nothing, taken."""
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    for value in (parameter, parameter * 2):
        with pytest.raises(LocalError, match=r"requires grad.*detach\(\), or make the call under torch.no_grad"):
            make(value)
        with torch.no_grad():
            make(value)


def test_parameters_are_broadcast_and_gathered_into_others_where_nothing_is_recorded() -> None:
    """The rows of a gather are known only on the engine's thread, where autograd records by default."""
    given = [torch.nn.Parameter(torch.full((2, 2), float(rank))) for rank in range(3)]
    outs = [torch.nn.Parameter(torch.zeros(6, 2)) for _ in range(3)]
    with torch.no_grad():
        broadcasts = [Broadcast(place(rank), x, root=2, out=x) for rank, x in enumerate(given)]
        gathers = [Gather(place(rank), x, out=out) for rank, (x, out) in enumerate(zip(given, outs, strict=True))]
    for results, places, rows in ((run(gathers), outs, [0, 0, 1, 1, 2, 2]), (run(broadcasts), given, [2, 2])):
        assert all(result is place for result, place in zip(results, places, strict=True))
        assert all(place.tolist() == [[row, row] for row in rows] for place in places)
        assert all(place.requires_grad for place in places)


def test_a_numpy_scalar_is_reduced_as_a_0_dimensional_array() -> None:
    for result in run([AllReduce(place(rank), np.float64(rank + 0.5)) for rank in range(3)]):
        assert (result.shape, result.dtype, float(result)) == ((), np.float64, 4.5)
    for result in run([AllReduce(place(rank), [np.int64(rank), np.ones(2, np.int64)]) for rank in range(3)]):
        assert [part.tolist() for part in result] == [3, [3, 3]]


def test_bfloat16_on_the_wire_rounds_each_leaf_and_the_result_though_the_sum_is_made_in_float64() -> None:
    def rounded(value: Any) -> Any:
        return torch.as_tensor(value).to(torch.bfloat16).to(torch.float64).numpy()

    leaves = [np.array([1 + 2.0**-9 + 2.0**-40, 3.0**rank, -(7.0**-rank)]) for rank in range(3)]
    sums = {"float64": sum(map(rounded, leaves)), "exact": sum(map(rounded, leaves))}
    for precision, total in sums.items():
        for given in (leaves, [leaf.astype(np.float32) for leaf in leaves]):
            operations = [
                AllReduce(place(rank), x, wire="bfloat16", precision=precision) for rank, x in enumerate(given)
            ]
            for result in run(operations):
                assert result.tolist() == rounded(total).tolist()


def scattered() -> Scatter:
    return Scatter(part(1, 4, 2), values(0), root=0)


MALFORMED: dict[str, tuple[Callable[[], Operation[Any]], list[Any], str, int]] = {
    "no rows": (lambda: Gather(part(0, 4, 2), values(0)), [(5,), ()], "how many rows it has", 2),
    "two rows": (lambda: Gather(part(0, 4, 2), values(0), root=0), [(1, 2), (5,)], "how many rows it has", 4),
    "too many rows": (lambda: Gather(part(0, 4, 2), values(0)), [(5,), (1 << 50,)], "announces 9007199254740992 b", 2),
    "rows for another world": (scattered, [(1, 2, 3), ()], "divides its rows between 3 ranks", 4),
    "too many to scatter": (scattered, [(1 << 50, 1), ()], "is the most", 4),
    "no table": (lambda: AllToAll(part(0, 4, 2), values(0)), [(3, 2), None], "divides its rows between 0 ranks", 2),
    "too large a table": (lambda: AllToAll(part(0, 4, 2), values(0)), [(3, 2), (1 << 50, 0)], "is the most", 2),
    "no size": (lambda: BroadcastObject(part(1, 4, 2), root=0), [(), (0,)], "an object of -1 bytes", 4),
    "a large object": (
        lambda: AllGatherObject(part(0, 4, 2), 1),
        [(1,), (MAX_OBJECT_BYTES + 1,)],
        "an object of 16777217 bytes",
        2,
    ),
    "no color": (lambda: Split(part(0, 4, 2), 0, 0, number=0, made=repr), [(1, MAX_KEY), (1,)], "without a color", 2),
    "a color too large": (
        lambda: Split(part(0, 4, 2), 0, 0, number=0, made=repr),
        [(MAX_COLOR + 2, 0), (1, 1)],
        "without a color",
        4,
    ),
}


@pytest.mark.parametrize(("make", "counts", "said", "rank"), MALFORMED.values(), ids=MALFORMED.keys())
def test_what_a_rank_must_not_announce_is_its_error_by_its_rank_in_the_view(
    make: Callable[[], Operation[Any]], counts: list[Any], said: str, rank: int
) -> None:
    with pytest.raises(PeerError, match=said) as raised:
        make().prepare(Known(counts, None))
    assert raised.value.rank == rank


@pytest.mark.parametrize("sent", [b"\xc1", b"\xa1\xff"], ids=["the one byte that msgpack never uses", "no UTF-8"])
def test_an_object_that_is_none_is_the_error_of_the_rank_that_sent_it(sent: bytes) -> None:
    operation = BroadcastObject(part(1, 4, 2), root=0)
    work: Work = operation.prepare(Known([(len(sent),), (0,)], None))
    work.output[:] = np.frombuffer(sent, np.uint8)
    with pytest.raises(PeerError, match="sent a malformed object") as raised:
        operation.result()
    assert raised.value.rank == 4
