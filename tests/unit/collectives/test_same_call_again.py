"""A call made before is looked up. What is wrong with this one is said all the same, before anything is sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quicoll import blocking
from quicoll.collectives.base import MOST_PREPARED
from quicoll.collectives.context import CallContext
from quicoll.collectives.group import Group
from quicoll.collectives.reductions import AllReduce
from quicoll.engine.calls import Known
from quicoll.engine.runtime import ThreadRuntime
from quicoll.errors import LocalError, PeerError
from quicoll.membership.view import Member, View
from quicoll.numerics.destinations import IN_PLACE_BYTES

LARGE = IN_PLACE_BYTES // 4  # of float32


class Sender:
    """As an endpoint; nothing is sent."""

    def gather(self) -> None: ...
    def send_gathered(self) -> None: ...


class Engine:
    """Ends what it begins, with the error that is set, or leaves that to the test. begun: what has come, by name.
    ends: what ends those that have not. calls: these."""

    def __init__(self) -> None:
        self.endpoint = Sender()
        self.begun: list[str] = []
        self.error: PeerError | None = None
        self.ends: list[Callable[..., None]] | None = None
        self.calls: list[Any] = []

    def divide(self, view_id: int) -> None:
        """Nothing comes of it."""

    def near(self, view_id: int) -> None:
        """No other rank is on this host."""

    def collective(self, view_id: int, call: Any, ended: Callable[..., None], **how: Any) -> None:
        self.begun.append(call.signature)
        if self.ends is not None:
            self.calls.append(call)
            self.ends.append(ended)
            return
        if self.error is None:
            ended(len(self.begun), None)
        else:
            ended(None, self.error)


class World:
    """A group of two, of which only this rank is there."""

    def __init__(self) -> None:
        members = tuple(Member(rank=rank, node=name, incarnation=1) for rank, name in enumerate("ab"))
        self.views = [
            View(view_id=number, members=members, seed=bytes(32), committed_step=0, committed_view=0)
            for number in (1, 2)
        ]
        self.engine = Engine()
        self.runtime = ThreadRuntime("test")
        config: Any = SimpleNamespace(node="b", timeout=30.0, chunk_bytes=1 << 20)
        engine: Any = self.engine
        self.context = CallContext(config, engine, self.runtime, self.views[0])
        self.group = Group(self.context)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.runtime.aclose()


def kinds() -> list[Any]:
    return [np.ones((4, 3), np.float32), torch.ones(4, 3)]


@pytest.mark.parametrize("x", kinds(), ids=["numpy", "torch"])
async def test_what_cannot_be_is_refused_after_a_good_call_of_the_same_shape(world: World, x: Any) -> None:
    group, out = world.group, x + 1
    for _ in range(3):
        await group.all_reduce(x)
        assert (await group.all_reduce(x, out=out)) is out
    before = len(world.engine.begun)
    assert len(group._here.prepared) == 1
    strange: list[tuple[Any, dict[str, Any], str]] = [
        (x, {"out": out[:2]}, "out is"),
        (x, {"out": x.astype(np.float64) if isinstance(x, np.ndarray) else x.double()}, "out is"),
        (x, {"out": np.broadcast_to(np.ones(3, np.float32), (4, 3))}, "out is read-only"),
        (x, {"out": torch.ones(3).expand(4, 3)}, "several elements in one place"),
        (x, {"out": torch.ones(4, 3, requires_grad=True)}, "out requires grad"),
        (x, {"out": torch.ones(4, 3, device="meta")}, "device meta"),
        (x, {"op": "median"}, "median"),
        (x, {"op": "sum", "precision": "quadruple"}, "quadruple"),
        (x, {"timeout": -1}, "timeout"),
        (torch.ones(4, 3, requires_grad=True), {}, "requires grad"),
        (torch.ones(4, 3, device="meta"), {}, "device meta"),
        (torch.ones(4, 3).to_sparse(), {}, "layout"),
        (np.ma.masked_array(np.ones((4, 3), np.float32)), {}, "masked"),
        (np.ones((4, 3), ">f4"), {}, "byte order"),
        ([x, x.astype(np.int8) if isinstance(x, np.ndarray) else x.to(torch.int8)], {}, "differ"),
        ([x, 1.0], {}, "item 1 of the list is a float"),
        (None, {}, "neither array nor tensor"),
    ]
    for given, options, said in strange:
        for _ in range(2):
            with pytest.raises(LocalError, match=said):
                group.all_reduce(given, **options)
    assert len(world.engine.begun) == before


@pytest.mark.parametrize("x", kinds(), ids=["numpy", "torch"])
async def test_another_shape_dtype_or_option_is_another_call(world: World, x: Any) -> None:
    group = world.group
    double = x.astype(np.float64) if isinstance(x, np.ndarray) else x.double()
    for given in (x, x.reshape(3, 4), x[:2], double, [x], [x, x]):
        for options in ({}, {"op": "max"}, {"exact": True} if given is x else {"algorithm": "direct"}):
            await group.all_reduce(given, **options)
    begun = world.engine.begun
    assert len({*begun}) == len(begun) == 6 * 3


@pytest.mark.parametrize("x", kinds(), ids=["numpy", "torch"])
async def test_a_tensor_with_gaps_is_copied_after_a_good_call_of_the_same_shape(world: World, x: Any) -> None:
    here = world.group._here
    whole = AllReduce(here, x)
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    gaps = wide[:, ::2] if isinstance(x, np.ndarray) else torch.from_numpy(wide)[:, ::2]
    again = AllReduce(here, gaps)
    assert again.signature == whole.signature
    assert again.like.first.copied
    assert again.flats[0][0:12].tolist() == wide[:, ::2].ravel().tolist()


async def test_a_parameter_is_taken_where_nothing_is_recorded_and_refused_elsewhere(world: World) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    for _ in range(2):
        with torch.no_grad():
            await world.group.all_reduce(parameter)
        with pytest.raises(LocalError, match="requires grad"):
            world.group.all_reduce(parameter)


async def test_memory_that_is_being_written_is_refused_in_a_call_that_was_good_before(world: World) -> None:
    x, out = np.ones(LARGE, np.float32), np.empty(LARGE, np.float32)
    first = world.group.all_reduce(x, out=out)
    await first
    second = world.group.all_reduce(x, out=out)
    for given, options in ((out, {}), (x, {"out": out[:]}), (out[5:], {})):
        with pytest.raises(LocalError, match="await that one first"):
            world.group.all_reduce(given, **options)
    await second
    await world.group.all_reduce(x, out=out)


@pytest.mark.parametrize("x", kinds(), ids=["numpy", "torch"])
async def test_a_group_of_another_view_and_a_closed_engine_refuse_a_call_that_was_good(world: World, x: Any) -> None:
    part = world.group.subgroup([1], "part")
    await part.all_reduce(x)
    await world.group.all_reduce(x)
    world.context.enter(world.views[1])
    with pytest.raises(LocalError, match="was made in view 1, the view is 2"):
        part.all_reduce(x)
    await world.group.all_reduce(x)
    await world.runtime.aclose()
    for _ in range(2):
        with pytest.raises(LocalError, match="the engine is closed"):
            world.group.all_reduce(x)


@pytest.mark.parametrize("x", kinds(), ids=["numpy", "torch"])
async def test_a_call_that_was_good_belongs_to_its_loop_and_is_refused_on_the_engines_thread(
    world: World, x: Any
) -> None:
    group, waiting = world.group, blocking.Group(world.group)
    handle = group.all_reduce(x)
    await handle

    async def elsewhere() -> None:
        await handle

    with pytest.raises(LocalError, match="on another event loop"):
        await asyncio.to_thread(asyncio.run, elsewhere())
    with pytest.raises(LocalError, match="no event loop is running"):
        await asyncio.to_thread(group.all_reduce, x)
    with pytest.raises(LocalError, match="an event loop is running"):
        waiting.all_reduce(x)
    await asyncio.to_thread(waiting.all_reduce, x)

    async def on_the_engine() -> None:
        group.all_reduce(x)

    with pytest.raises(LocalError, match="the engine's own thread"):
        await world.context.on_engine(on_the_engine())


@pytest.mark.parametrize("x", kinds(), ids=["numpy", "torch"])
async def test_in_a_broken_view_a_call_that_was_good_fails_and_leaves_its_out_alone(world: World, x: Any) -> None:
    out = x * 7
    await world.group.all_reduce(x, out=out)
    out[:] = 7
    world.context.open(1)
    world.engine.error = PeerError("lost", rank=0)
    for _ in range(2):
        with pytest.raises(PeerError, match="lost"):
            await world.group.all_reduce(x, out=out)
    assert bool((out == 7).all())
    world.engine.error = None
    assert (await world.group.all_reduce(x, out=out)) is out


def address(value: Any) -> int:
    return int(value.data_ptr() if isinstance(value, torch.Tensor) else value.__array_interface__["data"][0])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
async def test_a_large_result_lies_where_an_earlier_one_was_that_is_held_no_more(world: World, kind: str) -> None:
    x: Any = np.ones(LARGE, np.float32) if kind == "numpy" else torch.ones(LARGE)
    group, recycler = world.group, world.context.recycler

    async def reduced() -> Any:
        result = await group.all_reduce(x)
        await world.context.on_engine(asyncio.sleep(0))  # the engine's thread has left the turn that ended it
        return result

    first, second = await reduced(), await reduced()
    where = address(first)
    assert address(second) != where
    part = first[-1:]
    del first
    third = await reduced()
    assert address(third) not in (where, address(second))
    del part
    assert recycler.kept == x.nbytes
    assert address(await reduced()) == where
    held = group.all_reduce(x)
    assert recycler.kept == 0
    await held
    await world.context.on_engine(asyncio.sleep(0))
    assert recycler.kept == 0, "a handle gives its result again"
    del held
    assert recycler.kept == x.nbytes
    world.context.close_down()
    assert recycler.kept == 0
    del third
    assert recycler.kept == 0


async def test_memory_of_an_operation_under_way_is_nobody_elses_though_its_handle_is_dropped(world: World) -> None:
    x = np.ones(LARGE, np.float32)
    ends: list[Callable[..., None]] = []
    world.engine.ends = ends
    world.group.all_reduce(x, algorithm="direct")  # nobody waits for it
    second = world.group.all_reduce(x, algorithm="direct")
    await world.context.on_engine(asyncio.sleep(0))
    assert len(ends) == 2
    assert world.context.recycler.kept == 0
    work = world.engine.calls[0].make(Known([(), ()], None))
    assert address(work.output) != address(second.pending.operation.bits())
    del work
    world.engine.calls.clear()
    for ended in ends:
        ended(1, None)
    ends.clear()
    assert (await second).shape == (LARGE,)
    assert world.context.recycler.kept == x.nbytes


async def test_a_failure_that_nobody_looks_at_is_not_reported(world: World) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: reported.append(about))
    world.engine.error = PeerError("lost", rank=0)
    ended = asyncio.Event()
    handle = world.group.barrier()
    handle.add_done_callback(lambda _: ended.set())
    await ended.wait()
    del handle
    await asyncio.sleep(0)
    assert reported == []


def test_threads_that_call_the_same_at_once_get_each_their_own() -> None:
    world, start = World(), threading.Barrier(4)
    waiting = blocking.Group(world.group)
    found: list[Any] = []

    def call() -> None:
        start.wait()
        found.extend(waiting.all_reduce(np.ones(3, np.float32)) for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(world.engine.begun) == len(found) == 200
    assert len({each.__array_interface__["data"][0] for each in found}) == 200
    asyncio.run(world.runtime.aclose())


async def test_as_many_calls_are_kept_to_be_repeated_as_are_prepared_and_none_that_has_options(world: World) -> None:
    group, x = world.group, np.ones(3, np.float32)
    repeats = group._here.repeats
    for options in ({"exact": True}, {"algorithm": "direct"}, {"precision": "float64"}, {"reduce_order": "ring"}):
        await group.all_reduce(x, **options)
    assert len(repeats) == 0
    for size in range(MOST_PREPARED + 9):
        await group.all_reduce(np.ones(size % 250 + 1, "f4" if size < 250 else "f8"))
    assert len(repeats) == MOST_PREPARED


@pytest.mark.parametrize("x", kinds(), ids=["numpy", "torch"])
async def test_what_is_repeated_gives_what_was_reduced_and_not_what_was_given_first(world: World, x: Any) -> None:
    world.engine.ends = []
    for value in (1, 2, 3):
        handle = world.group.all_reduce(x * value)
        await world.context.on_engine(asyncio.sleep(0))
        call, ended = world.engine.calls[-1], world.engine.ends[-1]
        mine = call.given[:-8]
        call.combine([mine, mine], [(), ()])
        world.runtime.loop.call_soon_threadsafe(ended, value, None)
        assert (await handle).tolist() == (x * 2 * value).tolist()
