"""What a program tells its engine's process, and what becomes of what waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from plan_networks import alike, reductions

from quicoll.config import Config
from quicoll.engine.calls import Call, Known, Work
from quicoll.engine.messages import EndLesson, encode_message
from quicoll.engine_process.plans import ValuesTold, network_row
from quicoll.engine_process.proxy import EngineProxy
from quicoll.engine_process.words import (
    AwaitCall,
    BeginCall,
    CallEnded,
    EngineAnswer,
    EngineAsk,
    EngineOpened,
    EngineStands,
    EngineStop,
    FromLink,
    GiveWork,
    LinkStands,
    MakeWork,
    ReceivedOn,
    ReceiveOn,
    TransmitOn,
    TransmittedOn,
    ViewFound,
    body_of,
    decode_program_word,
    encode_word,
    error_of,
    error_word,
    read_body,
)
from quicoll.errors import LocalError, Partitioned, PeerError
from quicoll.membership.member.actions import JobOver
from quicoll.numerics.dtypes import FLOAT32
from quicoll.numerics.reduce import ReduceOp
from quicoll.observability.events import Observers
from quicoll_transport.errors import DeadlineExceeded, TransportError

PLAN = reductions("direct", alike(2), 40)[0]


class Process:
    """The engine's process, which does what a test says."""

    def __init__(self) -> None:
        self.words: list[Any] = []
        self.ended: list[str] = []
        self.is_ended = asyncio.Event()
        self.closed = 0

    def send(self, data: bytes) -> None:
        self.words.append(decode_program_word(data))

    def end(self, why: str) -> None:
        self.ended.append(why)
        self.is_ended.set()

    async def aclose(self) -> None:
        self.closed += 1

    def take(self, kind: type) -> Any:
        """The last word, which is of this kind."""
        word = self.words.pop()
        assert isinstance(word, kind), word
        return word


class Arena:
    """Memory that nobody shares: each part has its own place."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []

    def take(self, nbytes: int) -> np.ndarray:
        self.parts.append(np.zeros(nbytes + 4096, np.uint8))
        return self.parts[-1]

    def place(self, values: np.ndarray) -> int:
        for number, part in enumerate(self.parts):
            if np.shares_memory(part, values):
                return number + 1
        return 0


class Bench:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.events: list[Any] = []
        self.arena, self.process = Arena(), Process()
        config = Config.resolve(environ={}, node="a", lost_after=0.4)
        observers = Observers("a", lambda: 0, self.events.append)
        self.proxy = EngineProxy(
            config, loop=loop, arena=self.arena, observers=observers, stacks=lambda most: "main: x"[:most]
        )
        self.proxy.use(self.process)
        self.hear(EngineOpened(None, False))

    def hear(self, word: Any) -> None:
        self.proxy.hear(encode_word(word))


@pytest.fixture
async def bench() -> Any:
    made = Bench()
    yield made
    if made.proxy._asking is not None:
        made.proxy._asking.cancel()


def made_call(out: np.ndarray, x: np.ndarray, **more: Any) -> Call:
    def make(known: Known) -> Work:
        return Work(PLAN, FLOAT32, FLOAT32, ReduceOp.SUM, [x], out)

    return Call("all_reduce", "signature", make, **more)


class Ends:
    def __init__(self) -> None:
        self.told: list[tuple[Any, Any]] = []

    def __call__(self, value: Any, error: Any) -> None:
        self.told.append((value, error))


async def test_what_is_asked_is_answered_by_its_number_and_an_error_is_raised(bench: Bench) -> None:
    first, second = (asyncio.ensure_future(bench.proxy.wait_view(1.0, after=after)) for after in (3, 4))
    await asyncio.sleep(0)
    one, two = bench.process.words
    assert [read_body(f"? {word.what}", word.arguments) for word in (one, two)] == [(1.0, False, 3), (1.0, False, 4)]
    bench.hear(EngineAnswer(two.number, body_of(ViewFound(over=JobOver(9))), None))
    bench.hear(EngineAnswer(one.number, b"", error_word(Partitioned("no view", node="a"))))
    assert await second == JobOver(9)
    with pytest.raises(Partitioned, match="no view"):
        await first
    bench.hear(EngineAnswer(one.number, body_of(ViewFound()), None))  # another time it is nobody's


async def test_who_is_cancelled_has_the_engine_stop(bench: Bench) -> None:
    asking = asyncio.ensure_future(bench.proxy.wait_view(None))
    await asyncio.sleep(0)
    number = bench.process.take(EngineAsk).number
    asking.cancel()
    await asyncio.wait({asking})
    assert bench.process.take(EngineStop).number == number
    ended = Ends()
    waiting = bench.proxy.next_call(1, {5: 6}, 2.0, None, ended)
    number = bench.process.take(AwaitCall).number
    assert waiting is not None
    waiting.cancel()
    assert bench.process.take(EngineStop).number == number
    assert ended.told == []  # until it is answered
    bench.hear(EngineAnswer(number, b"", error_word(asyncio.CancelledError())))
    assert isinstance(ended.told[0][1], asyncio.CancelledError)


async def test_a_call_that_depends_on_nothing_is_told_with_its_work_and_its_result_is_brought(bench: Bench) -> None:
    out, ended = np.full(10, -1, np.float32), Ends()
    bench.proxy.collective(7, made_call(out, np.ones(10, np.float32)), ended, group=0, timeout=1.0, step=3)
    word = bench.process.take(BeginCall)
    assert (word.view, word.step, word.work.dtype, word.work.op) == (7, 3, "float32", "sum")
    result = bench.arena.parts[word.work.output[0] - 1]
    np.asarray(bench.proxy._calls[word.number]._memory._copy)[:40] = np.full(10, 6, np.float32).view(np.uint8)
    assert result.any()
    assert (out == -1).all()
    bench.hear(CallEnded(word.number, 4, None, None))
    assert (out == 6).all()
    assert ended.told == [(4, None)]


async def test_of_a_call_that_has_failed_nothing_is_written(bench: Bench) -> None:
    out, ended = np.full(10, -1, np.float32), Ends()
    bench.proxy.collective(7, made_call(out, np.ones(10, np.float32)), ended, group=0, timeout=1.0, step=None)
    number = bench.process.take(BeginCall).number
    bench.hear(CallEnded(number, None, error_word(PeerError("lost", rank=1)), None))
    assert (out == -1).all()
    assert isinstance(ended.told[0][1], PeerError)


async def test_work_that_is_asked_for_is_given_with_the_network_that_was_told_once(bench: Bench) -> None:
    seen: list[Known] = []

    def make(known: Known) -> Work:
        seen.append(known)
        return Work(PLAN, FLOAT32, FLOAT32, ReduceOp.SUM, [np.ones(10, np.float32)], np.ones(10, np.float32))

    network = ValuesTold(network_row).word(alike(2))
    for told in (network, (network[0], b"")):
        bench.proxy.collective(7, Call("g", "s", make, measures=True), Ends(), group=0, timeout=1.0, step=None)
        word = bench.process.take(BeginCall)
        assert word.work is None
        bench.hear(MakeWork(word.number, ((3,), None), *told))
        given = bench.process.take(GiveWork)
        assert given.error is None
        assert bool(given.work.told) is (told is network)  # nor is the plan told again
    assert [each.counts for each in seen] == [[(3,), None]] * 2
    assert seen[0].network is seen[1].network
    assert seen[0].network == alike(2)


async def test_work_that_cannot_be_made_is_the_engines_to_tell(bench: Bench) -> None:
    def make(known: Known) -> Work:
        raise PeerError("divides its rows between 3 ranks", rank=1)

    bench.proxy.collective(7, Call("g", "s", make), Ends(), group=0, timeout=1.0, step=None)
    word = bench.process.take(BeginCall)
    assert word.work is None
    bench.hear(MakeWork(word.number, (), 0, b""))
    told = bench.process.take(GiveWork)
    assert str(error_of(told.error)) == "divides its rows between 3 ranks (rank=1)"
    bench.hear(MakeWork(99, (), 0, b""))  # of a call that is over
    assert "over" in bench.process.take(GiveWork).error.message


async def test_what_cannot_be_combined_ends_the_view_for_all(bench: Bench) -> None:
    def combine(payloads: Any, counts: Any) -> None:
        raise PeerError(f"gives {payloads[0]!r}", rank=1)

    ended = Ends()
    call = made_call(np.ones(1, np.float32), np.ones(1, np.float32), sizes=[4, 4], combine=combine)
    bench.proxy.collective(7, call, ended, group=0, timeout=1.0, step=None)
    number = bench.process.take(BeginCall).number
    bench.hear(CallEnded(number, 4, None, (b"x", b"y")))
    assert ended.told[0][0] is None
    assert isinstance(ended.told[0][1], PeerError)
    await asyncio.sleep(0)
    asked = bench.process.take(EngineAsk)
    assert asked.what == "break_view"
    view, error = read_body("? break_view", asked.arguments)
    assert (view, error.message) == (7, "gives b'x'")


async def test_with_the_process_all_that_waits_ends_and_so_does_what_is_called_later(bench: Bench) -> None:
    ended, voted = Ends(), Ends()
    asking = asyncio.ensure_future(bench.proxy.links())
    bench.proxy.collective(
        7, made_call(np.ones(1, np.float32), np.ones(1, np.float32)), ended, group=0, timeout=1.0, step=None
    )
    bench.proxy.voting.vote(7, b"d" * 16, (), voted, timeout=1.0, unfinished=())
    bench.hear(LinkStands(4, "b", 5, True, False, ""))
    bench.hear(EngineStands(7, 0.4, 600.0, {}, ()))
    link = bench.proxy.worker_links()["b"]
    transfer = link.send(b"t" * 24, memoryview(b"x"))
    receiving = asyncio.ensure_future(link.channel(1).receive())
    await asyncio.sleep(0)
    bench.proxy.process_ended("its process has ended (signal 9)")
    for error in (ended.told[0][1], voted.told[0][1]):
        assert isinstance(error, LocalError)
        assert error.message == "the engine's process is gone: its process has ended (signal 9)"
        assert not error.usable
    with pytest.raises(LocalError, match="is gone"):
        await asking
    with pytest.raises(TransportError, match="is gone"):
        await transfer.future
    with pytest.raises(TransportError, match="is gone"):
        await receiving
    assert link.ended
    assert bench.proxy.worker_links() == {}
    assert bench.proxy.view_at_work == 0
    later = Ends()
    assert bench.proxy.collective(7, Call("b", "s", lambda _: None), later, group=0, timeout=1, step=None) is None
    assert bench.proxy.voting.decision(7, 1, later, timeout=1.0) is None
    assert [type(error) for _, error in later.told] == [LocalError] * 2
    with pytest.raises(LocalError, match="is gone"):
        await bench.proxy.what_is_missing()
    with pytest.raises(TransportError, match="has ended"):
        link.send_app(b"x")
    await bench.proxy.aclose("done")
    assert bench.process.closed == 1


async def test_a_process_that_gives_no_sign_is_ended_and_only_when_it_is_gone_do_calls_end(bench: Bench) -> None:
    asking = asyncio.ensure_future(bench.proxy.links())
    await bench.process.is_ended.wait()
    assert bench.process.ended == ["it has given no sign of life for 0.8 s"]
    assert not asking.done()
    bench.proxy.process_ended(bench.process.ended[0])
    with pytest.raises(LocalError, match=r"no sign of life for 0\.8 s"):
        await asking


async def test_messages_between_ranks_go_with_their_words_and_are_taken_back(bench: Bench) -> None:
    bench.hear(LinkStands(4, "b", 5, True, False, ""))
    link = bench.proxy.worker_links()["b"]
    sent = link.send(b"t" * 24, memoryview(np.arange(3, dtype=np.uint8)))
    word = bench.process.take(TransmitOn)
    assert (word.link, word.tag, word.data) == (4, b"t" * 24, b"\0\1\2")
    bench.hear(TransmittedOn(word.number, ""))
    await sent.within(1.0, what="it")
    buffer = np.zeros(4, np.uint16)
    posted = link.post(b"t" * 24, buffer.data)
    word = bench.process.take(ReceiveOn)
    assert word.nbytes == 8
    bench.hear(ReceivedOn(word.number, bytes(range(8)), ""))
    await posted.future
    assert buffer.tobytes() == bytes(range(8))
    short = link.post(b"t" * 24, buffer.data)
    bench.hear(ReceivedOn(bench.process.take(ReceiveOn).number, b"123", ""))
    with pytest.raises(TransportError, match="3 bytes have come where 8 belong"):
        await short.future
    late = link.post(b"t" * 24, buffer.data)
    word = bench.process.take(ReceiveOn)
    with pytest.raises(DeadlineExceeded, match="a chunk did not end within"):
        await late.within(0.0, what="a chunk")
    assert bench.process.take(EngineStop).number == word.number
    bench.hear(ReceivedOn(word.number, b"12345678", ""))  # comes to nobody
    assert buffer.tobytes() == bytes(range(8))


async def test_what_a_peer_says_of_a_lesson_and_the_end_of_its_link_come_to_who_learns(bench: Bench) -> None:
    bench.hear(LinkStands(4, "b", 5, True, False, ""))
    learning = asyncio.ensure_future(
        bench.proxy.lessons.ask("b", 5, 7, number=1, first=0, digests=b"d" * 16, sizes=[4], timeout=1.0)
    )
    await asyncio.sleep(0)
    bench.hear(FromLink(4, encode_message(EndLesson(7))))
    with pytest.raises(PeerError, match="teaches its state no more"):
        await learning
    bench.hear(FromLink(99, encode_message(EndLesson(7))))  # of a link that has ended
    learning = asyncio.ensure_future(
        bench.proxy.lessons.ask("b", 5, 7, number=2, first=0, digests=b"d" * 16, sizes=[4], timeout=1.0)
    )
    await asyncio.sleep(0)
    bench.hear(LinkStands(4, "b", 5, False, True, "silent"))
    with pytest.raises(PeerError, match="lost: silent"):
        await learning


async def test_settings_of_the_coordinator_are_taken(bench: Bench) -> None:
    bench.hear(EngineStands(0, 0.7, 90.0, {"lost_after": "coordinator", "timeout": "default"}, ()))
    assert (bench.proxy.config.lost_after, bench.proxy.config.hold_timeout) == (0.7, 90.0)
    assert bench.proxy.config.sources["lost_after"] == "coordinator"
