"""What serves an engine: words wait for it, what has a number is answered once, and who is left behind leaves."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plan_networks import alike, reductions

from quicoll.engine.calls import Known
from quicoll.engine_process.plans import ValuesTold, plan_row
from quicoll.engine_process.server import PROGRAM_ENDED, EngineServer
from quicoll.engine_process.words import (
    AskStacks,
    AwaitCall,
    BeginCall,
    CallEnded,
    EngineAlive,
    EngineAnswer,
    EngineAsk,
    EngineOpened,
    EngineStands,
    EngineStop,
    EngineTell,
    EventTold,
    GiveWork,
    MakeWork,
    ReceivedOn,
    ReceiveOn,
    SignOfLife,
    TransmitOn,
    TransmittedOn,
    WorkWord,
    body_of,
    decode_engine_word,
    encode_word,
    error_of,
    error_word,
    read_body,
)
from quicoll.errors import LocalError, PeerError
from quicoll.observability.events import Event

PLAN = reductions("direct", alike(2), 40)[0]


class Begun:
    def __init__(self, ended: Any) -> None:
        self.ended = ended
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1
        self.ended(None, asyncio.CancelledError())


class Engine:
    """An engine that notes what it is asked, and whose operations a test ends."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(lost_after=2.0, hold_timeout=600.0, sources={})
        self.view_at_work = 3
        self.stragglers = SimpleNamespace(table=())
        self.endpoint = SimpleNamespace(links={})
        self.observers = SimpleNamespace(flight=None, emit=lambda kind, **fields: self.done.append((kind, fields)))
        self.voting = SimpleNamespace(begin=lambda *given: self.done.append(("begin", given)))
        self.done: list[Any] = []
        self.calls: list[tuple[Any, Begun]] = []
        self.closed: list[str] = []
        self.on_change: Any = None

    def attend(self, *, on_change: Any, on_link: Any, on_lesson: Any) -> None:
        self.on_change = on_change

    def collective(self, view_id: int, call: Any, ended: Any, **more: Any) -> Begun | None:
        if view_id != self.view_at_work:
            ended(None, PeerError("the view is over", view=view_id))
            return None
        self.calls.append((call, Begun(ended)))
        return self.calls[-1][1]

    def next_call(self, view_id: int, groups: Any, timeout: float, step: Any, ended: Any) -> Begun:
        self.calls.append((groups, Begun(ended)))
        return self.calls[-1][1]

    async def give_up(self, view_id: int, reason: str) -> None:
        raise PeerError(reason, view=view_id)

    async def what_is_missing(self) -> str:
        await asyncio.get_running_loop().create_future()
        return ""

    async def aclose(self, reason: str, **more: Any) -> None:
        self.closed.append(reason)


class Bench:
    def __init__(self) -> None:
        self.words: list[Any] = []
        self.over = 0
        self.engine: Any = Engine()
        self.memory = np.zeros(1000, np.uint8)
        self.plans = ValuesTold(plan_row)
        self.server = EngineServer(
            loop=asyncio.get_running_loop(),
            arena=SimpleNamespace(lent=lambda place, nbytes: self.memory[place - 1 : place - 1 + nbytes]),
            tell=lambda data: self.words.append(decode_engine_word(data)),
            on_over=self.end,
        )

    def end(self) -> None:
        self.over += 1

    def tell(self, word: Any) -> None:
        self.server.hear(encode_word(word))

    def take(self, kind: type) -> Any:
        word = self.words.pop()
        assert isinstance(word, kind), word
        return word

    def work(self) -> WorkWord:
        return WorkWord(*self.plans.word(PLAN), "float32", "float32", "sum", (((1, 40),),), (41, 40))

    def call(self, number: int, **more: Any) -> BeginCall:
        given: dict[str, Any] = {
            "number": number, "view": 3, "group": 0, "timeout": 1.0, "step": None, "taken": None, "name": "all_reduce",
            "signature": "s", "counts": (), "gathers": False, "measures": False, "ranks": None, "where": "",
            "watched": True, "divides": False, "sizes": None, "given": b"", "work": None, **more,
        }  # fmt: skip
        return BeginCall(**given)


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    made.server.use(made.engine)
    made.words.clear()
    return made


async def test_what_is_told_before_the_engine_is_there_is_done_in_its_order() -> None:
    bench = Bench()
    bench.tell(EngineTell("begin_step", body_of((3, 1))))
    bench.tell(bench.call(1))
    bench.tell(SignOfLife())
    assert bench.words == []
    bench.server.use(bench.engine)
    assert [type(word) for word in bench.words] == [EngineOpened, EngineStands, EngineAlive]
    assert bench.engine.done == [("begin", (3, 1))]
    assert len(bench.engine.calls) == 1


async def test_why_there_is_no_engine_is_told_and_ends_the_process() -> None:
    bench = Bench()
    bench.server.not_opened(LocalError("no such address"))
    assert str(error_of(bench.take(EngineOpened).error)) == "no such address"
    assert bench.over == 1


async def test_a_call_comes_to_the_engine_as_it_was_told_and_its_end_goes_back(bench: Bench) -> None:
    bench.tell(bench.call(1, work=bench.work(), counts=(2,), ranks=(0, 2), where="0:1"))
    call, begun = bench.engine.calls[0]
    assert (call.counts, call.ranks, call.where, call.ask) == ((2,), (0, 2), "0:1", None)
    work = call.make(Known([], None))
    work.output[:] = 5
    assert work.plan == PLAN
    assert bench.memory[40:80].view(np.float32).tolist() == [5.0] * 10
    begun.ended(7, None)
    assert bench.take(CallEnded) == CallEnded(1, 7, None, None)


async def test_what_was_announced_is_handed_over_with_the_end(bench: Bench) -> None:
    bench.tell(bench.call(1, sizes=(1, 2), given=b"sealed"))
    call, begun = bench.engine.calls[0]
    assert call.given == b"sealed"
    call.combine([b"a", b"bb"], ())
    begun.ended(7, None)
    assert bench.take(CallEnded).given == (b"a", b"bb")


async def test_a_call_of_another_view_is_refused_and_its_plan_is_known_all_the_same(bench: Bench) -> None:
    bench.tell(bench.call(1, view=2, work=bench.work()))
    assert error_of(bench.take(CallEnded).error).message == "the view is over"
    again = bench.work()
    assert not again.told
    bench.tell(bench.call(2, work=again))
    assert bench.engine.calls[0][0].make(Known([], None)).plan == PLAN


async def test_work_that_comes_when_the_call_is_over_is_nobodys_and_its_plan_is_known(bench: Bench) -> None:
    bench.tell(bench.call(1))
    call, begun = bench.engine.calls[0]
    given: list[Any] = []
    call.ask(Known([(1,), None], None), lambda work, error: given.append((work, error)))
    assert bench.take(MakeWork) == MakeWork(1, ((1,), None), 0, b"")
    begun.ended(None, PeerError("late"))
    bench.tell(GiveWork(1, bench.work(), None))
    assert given == []
    bench.tell(bench.call(2, work=bench.work()))
    call, begun = bench.engine.calls[1]
    assert call.make(Known([], None)).plan == PLAN


async def test_work_or_why_there_is_none_comes_to_who_asked(bench: Bench) -> None:
    given: list[Any] = []
    for number, error in ((1, None), (2, error_word(PeerError("no rows", rank=1)))):
        bench.tell(bench.call(number))
        bench.engine.calls[-1][0].ask(Known([], alike(2)), lambda work, error: given.append((work, error)))
        bench.tell(GiveWork(number, None if error else bench.work(), error))
    assert given[0][0].plan == PLAN
    assert given[1][0] is None
    assert str(given[1][1]) == "no rows (rank=1)"
    told = [word for word in bench.words if isinstance(word, MakeWork)]
    assert [(word.network, bool(word.told)) for word in told] == [(1, True), (2, True)]


async def test_who_stops_waiting_is_answered_once(bench: Bench) -> None:
    bench.tell(bench.call(1))
    bench.tell(AwaitCall(2, 3, {4: 5}, 1.0, None))
    bench.tell(EngineAsk(3, "what_is_missing", body_of(())))
    await asyncio.sleep(0)
    for number in (1, 2, 3, 1, 99):
        bench.tell(EngineStop(number))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answers = {word.number: word.error.kind for word in bench.words}
    assert answers == {1: "cancelled", 2: "cancelled", 3: "cancelled"}
    assert len(bench.words) == 3
    assert [begun.cancelled for _, begun in bench.engine.calls] == [1, 1]


async def test_an_error_of_what_was_asked_is_its_answer(bench: Bench) -> None:
    bench.tell(EngineAsk(1, "give_up", body_of((3, "TypeError"))))
    await asyncio.sleep(0)
    answer = bench.take(EngineAnswer)
    assert str(error_of(answer.error)) == "TypeError (view=3)"


async def test_events_and_what_the_program_follows_are_told(bench: Bench) -> None:
    bench.server.observe(Event(5, "a", "progress", {"step": 3, "at": (1, 2)}))
    told = bench.take(EventTold)
    assert (told.t_ns, told.kind, json.loads(told.fields)) == (5, "progress", {"step": 3, "at": [1, 2]})
    bench.engine.view_at_work = 0
    bench.engine.on_change()
    bench.engine.on_change()
    assert bench.take(EngineStands).view_at_work == 0
    assert bench.words == []  # what has not changed is not told again
    bench.tell(EngineTell("emit", body_of(("mine", b'{"x": 1}'))))
    assert bench.engine.done == [("mine", {"x": 1})]


async def test_stacks_are_the_programs_and_come_to_who_asked(bench: Bench) -> None:
    texts: list[str] = []
    for _ in range(2):
        bench.server.stacks(100, texts.append)
    second, first = bench.take(AskStacks), bench.take(AskStacks)
    bench.tell(EngineTell("stacks", body_of((second.number, "main: x"))))
    bench.tell(EngineTell("stacks", body_of((second.number, "again"))))
    assert texts == ["main: x"]
    for _ in range(20):
        bench.server.stacks(100, texts.append)
    bench.tell(EngineTell("stacks", body_of((first.number, "too late"))))
    assert texts == ["main: x"]


async def test_a_link_that_is_not_there_is_told_so(bench: Bench) -> None:
    bench.tell(TransmitOn(1, 4, b"t", 0, b"x"))
    assert "has ended" in bench.take(TransmittedOn).error
    bench.tell(ReceiveOn(2, 4, b"", 1, 100))
    assert "has ended" in bench.take(ReceivedOn).error


async def test_the_end_of_the_program_is_told_to_the_others_once(bench: Bench) -> None:
    await bench.server.program_ended()
    await bench.server.program_ended()
    assert bench.engine.closed == [PROGRAM_ENDED]
    assert bench.over == 1


async def test_a_job_that_is_left_in_order_ends_the_process_after_the_answer(bench: Bench) -> None:
    bench.tell(EngineAsk(1, "aclose", body_of(("done", 1.0, 12))))
    for _ in range(3):
        await asyncio.sleep(0)
    assert read_body("= aclose", bench.take(EngineAnswer).value) is None
    assert bench.engine.closed == ["done"]
    assert bench.over == 1
