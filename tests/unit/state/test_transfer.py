"""A state on its way from rank to rank: what travels, how long it may take, what is refused, what a failure leaves.

The group is in memory, on a virtual clock: each path from one rank to another carries so many bytes a second, and an
operation that does not end in time breaks the view for all, as the real one does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quicoll.errors import Corrupted, LocalError, PeerError
from quicoll.numerics.buffers import tensor_digest
from quicoll.state import transfer as module
from quicoll.state.manifest import TensorRecord
from quicoll.state.transfer import together, transfer
from quicoll_transport.sim import World

VIEW = 7
CHUNK = 256
TIMEOUT = 10.0
FAST = 1e9

Tamper = Callable[[int, int, int, Any], Any]


class Paths:
    """What the ranks of a view send each other. The k-th send from one rank to another meets the k-th recv.

    rate: bytes a second on each path. tamper: changes what the k-th message from one rank to another brings.
    log: (source, to, bytes) of each message that arrived. most: operations that a rank had under way towards another.
    """

    def __init__(self, world: World, *, rate: float = FAST, tamper: Tamper = lambda a, b, k, value: value) -> None:
        self.loop = world.host(f"host{len(world.hosts)}").start()
        self.world, self.rate, self.tamper = world, rate, tamper
        self.log: list[tuple[int, int, int]] = []
        self.waiting: dict[tuple[int, int, int], dict[str, tuple[Any, asyncio.Future[Any]]]] = {}
        self.count: Counter[tuple[str, int, int]] = Counter()
        self.under_way: Counter[tuple[str, int, int]] = Counter()
        self.most: Counter[tuple[str, int, int]] = Counter()
        self.free_at: dict[tuple[int, int], float] = {}
        self.broken: PeerError | None = None
        self.breaks_after = 1 << 60  # messages

    def operate(self, kind: str, source: int, to: int, value: Any) -> asyncio.Future[Any]:
        key = (kind, source, to)
        number = self.count[key]
        self.count[key] += 1
        future: asyncio.Future[Any] = self.loop.create_future()
        if self.broken is not None:
            future.set_exception(self.broken)
            return future
        self.under_way[key] += 1
        self.most[key] = max(self.most[key], self.under_way[key])
        timer = self.loop.call_later(TIMEOUT, self.fail, PeerError(f"{kind} {number} from {source} to {to} is late"))

        def over(_: object) -> None:
            timer.cancel()
            self.under_way[key] -= 1

        future.add_done_callback(over)
        meeting = self.waiting.setdefault((source, to, number), {})
        meeting[kind] = (value, future)
        if len(meeting) == 2:
            (given, _), (like, _) = meeting["send"], meeting["recv"]
            assert (given.shape, given.dtype) == (like.shape, like.dtype)
            # Where chunks are of megabytes the other messages weigh nothing.
            seconds = given.nbytes / self.rate if given.nbytes == CHUNK else 0.0
            at = max(self.free_at.get((source, to), 0.0), self.loop.time()) + seconds
            self.free_at[source, to] = at
            self.loop.call_at(at, self.arrive, source, to, number)
        return future

    def arrive(self, source: int, to: int, number: int) -> None:
        meeting = self.waiting.pop((source, to, number), None)
        if meeting is None:
            return
        (given, sent), (_, received) = meeting["send"], meeting["recv"]
        if self.broken is not None or sent.done() or received.done():
            return
        self.log.append((source, to, given.nbytes))
        received.set_result(self.tamper(source, to, number, given.copy()))
        sent.set_result(None)
        if len(self.log) == self.breaks_after:
            self.fail(PeerError("the path was cut"))

    def fail(self, error: PeerError) -> None:
        if self.broken is None:
            self.broken = error
        for meeting in self.waiting.values():
            for _, future in meeting.values():
                if not future.done():
                    future.set_exception(error)

    def chunks(self, *path: int) -> int:
        """Full chunks that have travelled, on a path or on all."""
        return sum(nbytes == CHUNK for source, to, nbytes in self.log if not path or (source, to) == path)

    def run(self, *work: Coroutine[Any, Any, Any], limit_s: float = 1e6) -> list[Any]:
        """What each gives or raises."""
        tasks = [self.loop.create_task(each) for each in work]
        self.world.run(lambda: all(task.done() for task in tasks), limit_ns=round(limit_s * 1e9))
        return [task.exception() or task.result() for task in tasks]


class MemoryGroup:
    def __init__(self, paths: Paths, rank: int) -> None:
        self.paths, self.rank = paths, rank

    def send(self, x: Any, *, to: int) -> asyncio.Future[None]:
        return self.paths.operate("send", self.rank, to, x)

    def recv(self, like: Any, *, source: int) -> asyncio.Future[Any]:
        return self.paths.operate("recv", source, self.rank, like)


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as made:
        yield made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


def record(name: str, value: Any) -> TensorRecord:
    dtype = str(value.dtype).removeprefix("torch.")
    kind = "torch" if isinstance(value, torch.Tensor) else "numpy"
    return TensorRecord(name, dtype, tuple(value.shape), kind, tensor_digest(value))


def records_of(state: list[Any]) -> list[TensorRecord]:
    return [record(f"t{number}", value) for number, value in enumerate(state)]


def drawn(chunks: int, seed: int = 1) -> list[Any]:
    """One tensor of so many full chunks."""
    return [np.random.default_rng(seed).integers(0, 255, chunks * CHUNK, np.uint8)]


def blank(state: list[Any]) -> list[Any]:
    return [torch.zeros_like(value) if isinstance(value, torch.Tensor) else np.zeros_like(value) for value in state]


def part(
    paths: Paths, rank: int, tensors: list[Any], records: list[TensorRecord], *, giver: int = 0, to: Any = (1,)
) -> Coroutine[Any, Any, None]:
    group: Any = MemoryGroup(paths, rank)
    return transfer(group, giver=giver, receivers=to, records=records, tensors=tensors, view_id=VIEW)


def chain(paths: Paths, state: list[Any], *taken: list[Any]) -> list[Any]:
    """Hand `state` from rank 0 to ranks 1, 2, ... that hold `taken`; what each call gives or raises."""
    records, to = records_of(state), tuple(range(1, len(taken) + 1))
    return paths.run(*(part(paths, rank, held, records, to=to) for rank, held in enumerate([state, *taken])))


def equal(left: list[Any], right: list[Any]) -> bool:
    return [tensor_digest(value) for value in left] == [tensor_digest(value) for value in right]


# -- what travels ----------------------------------------------------------------------------------------------------


def test_a_receiver_gets_every_bit_into_the_memory_that_it_passed(world: World) -> None:
    rng = np.random.default_rng(3)
    state = [
        rng.standard_normal(500),
        torch.from_numpy(rng.standard_normal((9, 31))).bfloat16().t(),
        np.array(np.nan, np.float32),
        rng.standard_normal((40, 40)).astype(np.float32).T,
        torch.zeros(3, 0),
    ]
    taken = blank(state)
    assert chain(Paths(world), state, taken) == [None, None]
    assert equal(state, taken)


def test_only_those_who_take_part_exchange_anything(world: World) -> None:
    paths, state = Paths(world), drawn(3)
    taken, records = blank(state), records_of(state)
    done = paths.run(*(part(paths, r, t, records, giver=3, to=(1,)) for r, t in ((3, state), (1, taken))))
    assert done == [None, None]
    assert {(source, to) for source, to, _ in paths.log} == {(3, 1), (1, 3)}


def test_what_the_receiver_holds_already_does_not_travel(world: World) -> None:
    state = drawn(50)
    taken = [state[0].copy()]
    taken[0][7 * CHUNK] ^= 1
    taken[0][-1] ^= 1
    paths = Paths(world)
    assert chain(paths, state, taken) == [None, None]
    assert paths.chunks() == 2
    assert equal(state, taken)
    paths = Paths(world)
    assert chain(paths, state, taken) == [None, None]
    assert paths.log == [(0, 1, 50 * 16), (1, 0, 7)]


@pytest.mark.parametrize("messages", [3, 10, 40, 60])
def test_a_transfer_that_was_cut_goes_on_where_it_was(world: World, messages: int) -> None:
    state = drawn(64)
    taken = blank(state)
    first, second = Paths(world), Paths(world)
    first.breaks_after = messages
    for failed in chain(first, state, taken):
        assert isinstance(failed, PeerError)
        assert "the path was cut" in str(failed)
    assert first.chunks() == messages - 3  # an offer, a request, and what is ready
    assert chain(second, state, taken) == [None, None]
    assert second.chunks() <= 64 - first.chunks() + module.WINDOW
    assert equal(state, taken)


def test_thousands_of_small_tensors_are_a_handful_of_messages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 20)
    rng = np.random.default_rng(1)
    state = [rng.standard_normal(3, dtype=np.float32) for _ in range(3_000)]
    paths, taken = Paths(world), blank(state)
    assert chain(paths, state, taken) == [None, None]
    assert [(source, to) for source, to, _ in paths.log] == [(0, 1), (1, 0), (0, 1), (0, 1)]
    assert equal(state, taken)


@pytest.mark.parametrize("state", [[], [np.empty((0, 3)), torch.zeros(0)]])
def test_a_state_without_elements_is_handed_over_without_a_message(world: World, state: list[Any]) -> None:
    paths = Paths(world)
    assert chain(paths, state, blank(state)) == [None, None]
    assert paths.log == []


# -- several receivers -----------------------------------------------------------------------------------------------


def test_the_giver_sends_the_state_once_to_four_receivers_who_are_through_about_together(world: World) -> None:
    """A star would take four times as long."""
    state = drawn(200)
    one, four = Paths(world, rate=CHUNK), Paths(world, rate=CHUNK)
    began = one.loop.time()
    assert chain(one, state, blank(state)) == [None] * 2
    alone = one.loop.time() - began
    taken = [blank(state) for _ in range(4)]
    began = four.loop.time()
    assert chain(four, state, *taken) == [None] * 5
    assert four.loop.time() - began < 1.1 * alone
    assert [four.chunks(rank, rank + 1) for rank in range(4)] == [200] * 4
    assert all(equal(state, each) for each in taken)


def test_each_receiver_asks_for_what_it_lacks_and_serves_the_next_from_all_that_it_has(world: World) -> None:
    state = drawn(30)
    current, half = [state[0].copy()], [state[0].copy()]
    half[0][: 15 * CHUNK] = 0
    last = blank(state)
    paths = Paths(world)
    assert chain(paths, state, current, half, last) == [None] * 4
    assert [paths.chunks(rank, rank + 1) for rank in range(3)] == [0, 15, 30]
    assert equal(state, current)
    assert equal(state, half)
    assert equal(state, last)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_no_more_than_a_window_of_chunks_is_under_way_on_any_path(world: World, slow: int) -> None:
    """slow: the rank whose loop is busy most of the time."""
    paths, state = Paths(world, rate=CHUNK * 10), drawn(40)

    def arrive(source: int, to: int, number: int, value: Any) -> Any:
        if slow in (source, to):
            paths.free_at[source, to] += 0.5
        return value

    paths.tamper = arrive
    assert chain(paths, state, blank(state), blank(state)) == [None] * 3
    assert max(paths.most.values()) <= module.WINDOW + 1  # and what is ready
    assert paths.most["send", 0, 1] == module.WINDOW


# -- time ------------------------------------------------------------------------------------------------------------


def test_a_state_that_takes_many_times_the_timeout_arrives_as_long_as_its_chunks_do(world: World) -> None:
    state = drawn(200)
    paths, taken = Paths(world, rate=CHUNK * module.WINDOW / TIMEOUT * 1.5), blank(state)
    began = paths.loop.time()
    assert chain(paths, state, taken) == [None, None]
    assert paths.loop.time() - began > 30 * TIMEOUT
    assert equal(state, taken)


def test_a_receiver_whose_chunks_come_late_hears_that_the_one_before_gets_on(world: World) -> None:
    """The second receiver lacks nothing but the last chunk, which the first one gets after 30 times the timeout."""
    state = drawn(200)
    late, last = [state[0].copy()], [state[0].copy()]
    late[0][-1] ^= 1
    last[0][-1] ^= 1
    paths, first = Paths(world, rate=CHUNK * module.WINDOW / TIMEOUT * 1.5), blank(state)
    began = paths.loop.time()
    assert chain(paths, state, first, late, last) == [None] * 4
    assert paths.loop.time() - began > 30 * TIMEOUT
    assert [paths.chunks(rank, rank + 1) for rank in range(3)] == [200, 1, 1]
    assert equal(state, late)
    assert equal(state, last)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_rank_that_does_nothing_any_more_ends_it_for_all_within_a_timeout(world: World, silent: int) -> None:
    state = drawn(100)
    paths, held = Paths(world, rate=CHUNK), [state, blank(state), blank(state)]
    records = records_of(state)
    tasks = [paths.loop.create_task(part(paths, rank, held[rank], records, to=(1, 2))) for rank in range(3)]
    world.run(limit_ns=30_000_000_000)
    stopped = tasks.pop(silent)
    stopped.cancel()  # its operations under way are not taken back, so nobody hears of it
    began = paths.loop.time()
    world.run(lambda: all(task.done() for task in tasks), limit_ns=10**15)
    assert paths.loop.time() - began < 2 * TIMEOUT
    for task in tasks:
        assert isinstance(task.exception(), PeerError)


def test_a_giver_that_never_calls_is_waited_for_no_longer_than_the_timeout(world: World) -> None:
    state = drawn(3)
    paths = Paths(world)
    (failed,) = paths.run(part(paths, 1, blank(state), records_of(state)))
    assert isinstance(failed, PeerError)
    assert "recv 0 from 0 to 1 is late" in str(failed)


def test_a_receiver_that_is_cancelled_writes_nothing_from_then_on(world: World) -> None:
    state = drawn(100)
    paths, taken = Paths(world, rate=CHUNK), blank(state)
    records = records_of(state)
    giving = paths.loop.create_task(part(paths, 0, state, records))
    taking = paths.loop.create_task(part(paths, 1, taken, records))
    world.run(limit_ns=20_000_000_000)
    taking.cancel()
    world.run(taking.done, limit_ns=0)
    assert taking.cancelled()
    at = tensor_digest(taken[0])
    assert 0 < np.count_nonzero(taken[0]) < 100 * CHUNK
    world.run(giving.done, limit_ns=10**15)
    assert isinstance(giving.exception(), PeerError)
    assert tensor_digest(taken[0]) == at


def test_the_wait_for_all_outlasts_every_transfer() -> None:
    asked: list[float] = []

    class Group:
        async def barrier(self, *, timeout: float) -> None:
            asked.append(timeout)

    waiting = together(Group())
    with pytest.raises(StopIteration):
        waiting.send(None)
    assert asked == [86_400.0]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_chunk_with_other_bits_is_corrupted_and_is_not_put_in_place(world: World) -> None:
    def tamper(source: int, to: int, number: int, value: Any) -> Any:
        if (source, number) == (0, 4):  # after the offer and what is ready: the third chunk
            value[9] ^= 1
        return value

    state = [*drawn(2), np.arange(20, dtype=np.int16), np.arange(30, dtype=np.int64)]
    taken = blank(state)
    _, failed = chain(Paths(world, tamper=tamper), state, taken)
    assert isinstance(failed, Corrupted)
    assert (failed.rank, failed.view) == (0, VIEW)
    assert "chunk 2 of the state, of 't1', came with other bits than rank 0 announced" in str(failed)
    assert equal(taken[:1], state[:1])
    assert not taken[1].any()


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_manifest_has_the_last_word_on_every_tensor(world: World, wrong: int) -> None:
    state = [*drawn(2), np.arange(3), np.empty((0, 2))]
    records = records_of(state)
    other = records[wrong]
    records[wrong] = TensorRecord(other.path, other.dtype, other.shape, other.kind, bytes(16))
    paths = Paths(world)
    given, failed = paths.run(part(paths, 0, state, records), part(paths, 1, blank(state), records))
    assert given is None
    assert isinstance(failed, Corrupted)
    assert (failed.rank, failed.view) == (0, VIEW)
    assert f"the state's 't{wrong}', as rank 0 sent it, fails its digest" in str(failed)


def test_a_state_that_changes_while_it_is_handed_over_is_corrupted(world: World) -> None:
    state = drawn(50)
    paths = Paths(world, rate=CHUNK)
    paths.loop.call_later(20.0, lambda: state[0].__setitem__(-1, state[0][-1] ^ 1))
    taken = blank(state)
    _, failed = chain(paths, state, taken)
    assert isinstance(failed, Corrupted)
    assert "chunk 49 of the state" in str(failed)
    assert not taken[0][-CHUNK:].any()


def test_a_request_for_chunks_that_there_are_not_is_refused(world: World) -> None:
    def tamper(source: int, to: int, number: int, value: Any) -> Any:
        return value | 1 if source == 1 else value

    state, paths = drawn(5), Paths(world, tamper=tamper)
    paths.loop.call_later(100.0, paths.fail, PeerError("the view ended"))
    failed, _ = chain(paths, state, blank(state))
    assert isinstance(failed, PeerError)
    assert (failed.rank, failed.view) == (1, VIEW)
    assert "asked for chunks of the state that there are not, beyond 5" in str(failed)
    assert paths.chunks() == 0


@pytest.mark.parametrize("count", [-1, 6, 1 << 62])
def test_more_chunks_than_were_asked_for_are_refused(world: World, count: int) -> None:
    def tamper(source: int, to: int, number: int, value: Any) -> Any:
        return np.array([count]) if (source, number) == (0, 1) else value

    state, paths = drawn(5), Paths(world, tamper=tamper)
    _, failed = chain(paths, state, blank(state))
    assert isinstance(failed, PeerError)
    assert (failed.rank, failed.view) == (0, VIEW)
    assert f"said that {count} chunks of the state come, where 5 are missing" in str(failed)
    assert paths.most["recv", 0, 1] == 1


@pytest.mark.parametrize("place", [1, 2])
def test_a_rank_that_never_has_a_chunk_to_send_is_not_heard_for_ever(world: World, place: int) -> None:
    """The giver has all from the start. Who stands behind others may say so as often as these can have got on."""
    state = drawn(5)
    paths, receivers = Paths(world), tuple(range(1, place + 1))
    group: Any = MemoryGroup(paths, place - 1)
    said = 0

    async def hostile() -> None:
        nonlocal said
        await group.send(np.zeros(5 * 16, np.uint8), to=place)
        await group.recv(np.empty(1, np.uint8), source=place)
        while True:
            await group.send(np.zeros(1, np.int64), to=place)
            said += 1

    talking = paths.loop.create_task(hostile())
    (failed,) = paths.run(part(paths, place, blank(state), records_of(state), to=receivers))
    talking.cancel()
    assert isinstance(failed, PeerError)
    assert (failed.rank, failed.view) == (place - 1, VIEW)
    assert "has no chunk of the state to send, again and again" in str(failed)
    assert said == 6 * (place - 1) + 1


@pytest.mark.parametrize(
    ("rank", "giver", "receivers"), [(2, 0, (1,)), (0, 0, ()), (1, 0, (1, 1)), (0, 0, (0,)), (0, 1, (1, 0))]
)
def test_a_rank_that_takes_no_part_and_a_chain_that_is_none_are_refused(
    world: World, rank: int, giver: int, receivers: tuple[int, ...]
) -> None:
    paths, state = Paths(world), drawn(1)
    (failed,) = paths.run(part(paths, rank, state, records_of(state), giver=giver, to=receivers))
    assert isinstance(failed, LocalError)
    assert f"rank {rank} cannot hand over a state from rank {giver} to ranks" in str(failed)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([], "a state of 1 tensors is handed over, and there are 0"),
        ([np.zeros(2 * CHUNK, np.int8)], "'t0' of a state is (512,) of int8 here, (512,) of uint8 in its manifest"),
        ([np.zeros(CHUNK, np.uint8)], "'t0' of a state is (256,) of uint8 here, (512,) of uint8 in its manifest"),
        ([bytes(2 * CHUNK)], "not a bytes"),
    ],
)
def test_memory_that_is_not_as_the_manifest_says_is_refused_before_anything_is_sent(
    world: World, tensors: list[Any], said: str
) -> None:
    """A manifest of absurd sizes comes to nothing here: there is no such memory."""
    paths = Paths(world)
    (failed,) = paths.run(part(paths, 1, tensors, records_of(drawn(2))))
    assert isinstance(failed, LocalError)
    assert said in str(failed)
    assert not paths.count
