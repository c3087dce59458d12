"""An engine in a process of its own, as its rank's program has it: `EngineFace`.

    opening    its process is being started; what is told meanwhile waits on the line
    at work    everything is told in the order in which it is called, and answered once
    gone       the process has ended, or gives no sign of life: whatever waits ends by LocalError, and so does whatever
               is called later

What stays here is what the program computes anyway: inputs are copied, unless they lie in memory that both have mapped
(places.py); plans are made; what travels in announcements is combined. So the program's thread for this has a few words
to read and to write for each operation, whatever its size.

Signs of life. Deadlines are the engine's, so a process that stands still would hold the program for ever. While
anything waits it is asked for a sign four times in `lost_after`, and in a second, and ended after twice `lost_after`
without one: then its peers have missed it as well. It is ended sooner where it gives no sign and a deadline has passed.
Questions that come late do not count: then it was this process that stood still.

Invariants: each call ends once, by its answer or with the process; memory that the engine was told of is used for
nothing else before that; a result is where it belongs before its caller hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from quicoll.engine.block_lessons import BlockTraffic, take_lesson
from quicoll.engine.calls import Known
from quicoll.engine.lessons import LessonTraffic
from quicoll.engine.messages import Ask as AskLesson
from quicoll.engine.messages import AskBlocks, Blocks, Compared, EndLesson, decode_message
from quicoll.engine.waiting import job_closed
from quicoll.engine_process.beside import (
    ProxyCertificates,
    ProxyEndpoint,
    ProxyFlight,
    ProxyObservers,
    ProxyStragglers,
    ProxyVoting,
)
from quicoll.engine_process.links import ProxyLinks
from quicoll.engine_process.places import TensorPlaces
from quicoll.engine_process.plans import ValuesHeard, ValuesTold, network_of, plan_row
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
    FromLink,
    GiveWork,
    LinkStands,
    LogTold,
    MakeWork,
    ReceivedOn,
    SignOfLife,
    TransmittedOn,
    body_of,
    decode_engine_word,
    encode_word,
    error_of,
    error_word,
    read_body,
    snapshot_of,
)
from quicoll.errors import LocalError, QuicollError
from quicoll.numerics.recycled import of_malloc
from quicoll.observability.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from quicoll.config import Config
    from quicoll.engine.answers import Cancellable
    from quicoll.engine.calls import Call
    from quicoll.engine.in_flight import Ended
    from quicoll.engine_process.links import ProxyLink
    from quicoll.engine_process.places import CallMemory, OwnArena
    from quicoll.engine_process.words import EngineWord, ErrorWord, ProgramWord, WorkWord
    from quicoll.membership.member.actions import Dismissal, FreeToLeave, JobOver
    from quicoll.membership.view import View
    from quicoll.numerics.dtypes import Array
    from quicoll.observability.events import Observers
    from quicoll_transport.events import LinkSnapshot

__all__ = ["EngineProxy", "ServingProcess"]

log = logging.getLogger("quicoll")

_ASKED: Final = 4  # times in `lost_after`, and in a second


class ServingProcess(Protocol):
    """The engine's process, or what a simulation has in its place."""

    def send(self, data: bytes) -> None: ...
    def end(self, why: str) -> None:
        """End it; `EngineProxy.process_ended` is called with `why` when it touches no memory any more."""
        ...

    async def aclose(self) -> None: ...


class EngineProxy:
    """See the module's head. Every method runs on the loop that it was given, but for what says otherwise.

    opened: done when the engine is there, or with why it is not.
    """

    def __init__(
        self,
        config: Config,
        *,
        loop: asyncio.AbstractEventLoop,
        arena: OwnArena,
        observers: Observers,
        stacks: Callable[[int], str],
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Begin without a process.

        Args:
            config: The rank's.
            loop: Where this runs.
            arena: The program's.
            observers: Get every event.
            stacks: Gives the stacks of this process, of so many characters at most.
            wall_clock: Date and time, aware.
        """
        self._loop = loop
        self._config = config
        self._process: ServingProcess | None = None
        self._observers = observers
        self._stacks = stacks
        self._gone: LocalError | None = None
        self._number = 0
        self._answers: dict[int, Callable[[bytes, ErrorWord | None], None]] = {}
        self._calls: dict[int, _ProxyCall] = {}
        plans = ValuesTold(plan_row)
        self._arena = arena
        self._places = TensorPlaces(arena, plans)
        self._networks = ValuesHeard(network_of)
        self._links = ProxyLinks(loop=loop, tell=self.tell, next_number=self.next_number, on_end=self._link_ended)
        self._signs = 0  # that were asked for and not given
        self._asking: asyncio.TimerHandle | None = None
        self.view_at_work = 0
        self.opened: asyncio.Future[None] = loop.create_future()
        self.opened.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever has given up waiting
        self.observers = ProxyObservers(self)
        self.endpoint = ProxyEndpoint(wall_clock)
        self.voting = ProxyVoting(self)
        self.certificates = ProxyCertificates(self, self.endpoint)
        self.stragglers = ProxyStragglers()
        self.lessons = LessonTraffic(loop=loop, link_to=self._links.to)
        self.block_lessons = BlockTraffic(loop=loop, link_to=self._links.to)

    def use(self, process: ServingProcess) -> None:
        """Have a process, which is being started."""
        self._process = process

    async def opening(self, timeout: float) -> None:
        """Wait until the engine is there.

        Args:
            timeout: Seconds.
        Raises:
            LocalError: It is not, and why.
        """
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self.opened)
        except TimeoutError:
            raise LocalError(f"the engine's process is not there after {timeout:g} s") from None

    @property
    def config(self) -> Config:
        """The settings of this rank, with those that it took from the coordinator."""
        return self._config

    def result_memory(self, nbytes: int) -> Array:
        """Return memory for a result, which the engine writes where it is; any, where the arena has no more of it."""
        try:
            return self._arena.take(nbytes)
        except MemoryError:
            return of_malloc(nbytes)

    def soon(self, work: Callable[[], None]) -> None:
        """Have something done on the loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: a signal that comes as the job ends
            self._loop.call_soon_threadsafe(work)

    # -- words ---------------------------------------------------------------------------------------------------

    def tell(self, word: ProgramWord) -> None:
        """Send a word to the engine; nothing happens where it is gone."""
        if self._process is not None and self._gone is None:
            self._process.send(encode_word(word))

    def tell_about(self, what: str, *arguments: object) -> None:
        """Tell what has no answer. what: one of TOLD."""
        self.tell(EngineTell(what, body_of(arguments)))

    def next_number(self) -> int:
        """Return a number for something that is answered."""
        self._number += 1
        return self._number

    def answered(self, number: int, answer: Callable[[bytes, ErrorWord | None], None]) -> None:
        """Have the answer to a number, which comes once."""
        self._answers[number] = answer
        self._ask_signs()

    async def ask(self, what: str, *arguments: object) -> Any:
        """Ask, and wait for the answer.

        Args:
            what: One of ASKED.
            *arguments: As it has them.
        Raises:
            LocalError: The engine's process is gone.
            Exception: What it raises there.
        """
        if self._gone is not None:
            raise self._gone_again()
        number = self.next_number()
        answer: asyncio.Future[Any] = self._loop.create_future()

        def told(value: bytes, error: ErrorWord | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(read_body(f"= {what}", value))
            else:
                answer.set_exception(_raised(error))

        self.answered(number, told)
        self.tell(EngineAsk(number, what, body_of(arguments)))
        try:
            return await answer
        finally:
            if number in self._answers:  # its caller was cancelled
                self.tell(EngineStop(number))

    def hear(self, data: bytes) -> None:
        """Take a word of the engine's."""
        word = decode_engine_word(data)
        match word:
            case EngineAnswer():
                answer = self._answers.pop(word.number, None)
                if answer is not None:
                    answer(word.value, word.error)
            case MakeWork():
                self._make_work(word)
            case CallEnded():
                call = self._calls.pop(word.number, None)
                if call is not None:
                    call.over(word)
            case _:
                self._follow(word)

    def _follow(self, word: EngineWord) -> None:
        match word:
            case EngineStands():
                self._stands(word)
            case EventTold():
                self._observers.give(Event(word.t_ns, self._config.node, word.kind, json.loads(word.fields)))
            case LogTold():
                logging.getLogger(word.name).log(word.level, "%s", word.text)
            case LinkStands():
                self._links.stands(word)
            case FromLink():
                self._lesson(word)
            case TransmittedOn():
                self._links.transferred(word.number, word.error)
            case ReceivedOn():
                self._links.received(word.number, word.data, word.error)
            case AskStacks():
                self.tell_about("stacks", word.number, self._stacks(word.most))
            case EngineOpened():
                self._open(word)
            case EngineAlive():
                self._signs = 0

    def _open(self, word: EngineOpened) -> None:
        if word.flight:
            self.observers.flight = ProxyFlight(self, self._config.node)
        if self.opened.done():
            return
        if word.error is None:
            self.opened.set_result(None)
        else:
            self.opened.set_exception(_raised(word.error))

    def _stands(self, word: EngineStands) -> None:
        self.view_at_work = word.view_at_work
        self.stragglers.table = word.stragglers
        config = self._config
        if (config.lost_after, config.hold_timeout) != (word.lost_after, word.hold_timeout):
            taken = {name: source for name, source in word.sources.items() if source == "coordinator"}
            self._config = replace(
                config,
                lost_after=word.lost_after,
                hold_timeout=word.hold_timeout,
                sources={**config.sources, **taken},
            )

    # -- the process -----------------------------------------------------------------------------------------------

    def process_ended(self, why: str) -> None:
        """The process is gone: end whatever waits for it."""
        if self._gone is not None:
            return
        log.error("%s: the engine's process is gone: %s", self._config.node, why)
        self._end(LocalError(f"the engine's process is gone: {why}", usable=False))

    def _end(self, error: LocalError) -> None:
        """End whatever waits, and whatever comes, by this error."""
        self._gone = error
        self.view_at_work = 0
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        told = error_word(error)
        if not self.opened.done():
            self.opened.set_exception(self._gone_again())
        answers, self._answers = self._answers, {}
        calls, self._calls = self._calls, {}
        for answer in answers.values():
            answer(b"", told)
        for number, call in calls.items():
            call.over(CallEnded(number, None, told, None))
        self._links.end(error.message)

    def _gone_again(self) -> LocalError:
        return LocalError(self._gone.message if self._gone is not None else "", usable=False)

    def _ask_signs(self) -> None:
        if self._asking is None:
            pause = self._pause
            self._asking = self._loop.call_later(pause, self._ask_sign, self._loop.time() + pause)

    @property
    def _pause(self) -> float:
        """Seconds between two questions for a sign."""
        return min(1.0, self._config.lost_after) / _ASKED

    def _ask_sign(self, due: float) -> None:
        self._asking = None
        if self._gone is not None or not (self._answers or self._calls):
            self._signs = 0
            return
        now, pause = self._loop.time(), self._pause
        if now - due >= pause / 2:
            self._signs = min(self._signs, 1)  # this process stood still
        overdue = self._signs > 1 and any(call.deadline < now for call in self._calls.values())
        silent = self._signs * pause
        if (silent >= 2 * self._config.lost_after or overdue) and self._process is not None:
            self._process.end(f"it has given no sign of life for {silent:g} s")
            return
        self._signs += 1
        self.tell(SignOfLife())
        self._ask_signs()

    # -- what the program asks for -------------------------------------------------------------------------------

    async def wait_view(
        self, timeout: float | None, *, joining: bool = False, after: int = 0
    ) -> View | JobOver | Dismissal | FreeToLeave:
        """As `Engine.wait_view`."""
        found = await self.ask("wait_view", timeout, joining, after)
        view: View | JobOver | Dismissal | FreeToLeave = found.view or found.over or found.dismissal or found.free
        return view

    async def what_is_missing(self) -> str:
        """As `Engine.what_is_missing`."""
        missing: str = await self.ask("what_is_missing")
        return missing

    def collective(
        self,
        view_id: int,
        call: Call,
        ended: Ended,
        *,
        group: int,
        timeout: float,
        step: int | None,
        number: int | None = None,
    ) -> Cancellable | None:
        """As `Engine.collective`."""
        if self._gone is not None:
            ended(None, self._gone_again())
            return None
        mine = self.next_number()
        deadline = self._loop.time() + timeout
        begun = self._calls[mine] = _ProxyCall(self, mine, view_id, call, ended, deadline)
        word = None
        if call.sizes is None and not call.gathers and not call.measures:
            word, _ = begun.work(Known([], None))  # what cannot be made is asked for, and fails there
        self.tell(
            BeginCall(
                mine,
                view_id,
                group,
                timeout,
                step,
                number,
                call.name,
                call.signature,
                call.counts,
                call.gathers,
                call.measures,
                call.ranks,
                call.where,
                call.watched,
                call.divides,
                None if call.sizes is None else tuple(call.sizes),
                call.given,
                word,
            )
        )
        self._ask_signs()
        return begun

    def make_memory(self, call: Call, known: Known) -> CallMemory:
        """Return the memory of a call. Raises whatever making it raises."""
        return self._places.of(call.make(known))

    def _make_work(self, word: MakeWork) -> None:
        network = None if not word.network else self._networks.value(word.network, word.told)
        call = self._calls.get(word.number)
        if call is None:
            self.tell(GiveWork(word.number, None, error_word(LocalError("the call is over"))))
            return
        work, error = call.work(Known(list(word.counts), network))
        self.tell(GiveWork(word.number, work, error))

    def near(self, view_id: int) -> None:
        """Return None: the engine's process shares no memory with other ranks."""
        return

    def next_call(
        self, view_id: int, groups: Mapping[int, int], timeout: float, step: int | None, ended: Ended
    ) -> Cancellable | None:
        """As `Engine.next_call`."""
        return self.wait(
            partial(AwaitCall, view=view_id, groups=dict(groups), timeout=timeout, step=step), "number", ended
        )

    def wait(
        self,
        word: Callable[..., ProgramWord],
        kind: str,
        ended: Callable[[Any, BaseException | None], None],
        made: Callable[[Any], Any] = lambda value: value,
    ) -> Cancellable | None:
        """Begin what ends with a call.

        Args:
            word: Makes the word of its number.
            kind: Of the answer.
            ended: Called once.
            made: Makes what `ended` gets of the answer.
        Returns:
            What is cancelled; None where the engine is gone.
        """
        if self._gone is not None:
            ended(None, self._gone_again())
            return None
        number = self.next_number()

        def told(value: bytes, error: ErrorWord | None) -> None:
            if error is not None:
                ended(None, error_of(error))
            else:
                ended(made(read_body(f"= {kind}", value)), None)

        self.answered(number, told)
        self.tell(word(number=number))
        return _Waiting(self, number)

    def divide(self, view_id: int) -> None:
        """As `Engine.divide`."""
        self.tell_about("divide", view_id)

    async def give_up(self, view_id: int, reason: str) -> None:
        """As `Engine.give_up`."""
        await self.ask("give_up", view_id, reason)

    async def break_view(self, view_id: int, error: QuicollError) -> None:
        """As `Engine.break_view`."""
        await self.ask("break_view", view_id, error_word(error))

    def failed(self, view_id: int, error: BaseException) -> None:
        """A call has failed here, which the others would not hear of."""
        work: Coroutine[Any, Any, None]
        if isinstance(error, QuicollError):
            work = self.break_view(view_id, error)
        else:
            work = self.give_up(view_id, f"{type(error).__name__}: {error}")
        self._loop.create_task(work).add_done_callback(lambda task: task.cancelled() or task.exception())

    async def ask_to_leave(self) -> bool:
        """As `Engine.ask_to_leave`."""
        told: bool = await self.ask("ask_to_leave")
        return told

    async def step_out(self, view_id: int) -> None:
        """As `Engine.step_out`."""
        await self.ask("step_out", view_id)

    def step_in(self) -> None:
        """As `Engine.step_in`."""
        self.tell_about("step_in")

    def owns_state(self) -> None:
        """As `Engine.owns_state`."""
        self.tell_about("owns_state")

    async def parted(self) -> None:
        """As `Engine.parted`."""
        await self.ask("parted")

    def state_received(self, rank: int, step: int, index: int, confirmed_by: tuple[str, ...]) -> None:
        """As `Engine.state_received`."""
        self.tell_about("state_received", rank, step, index, confirmed_by)

    def state_torn(self, step: int, cause: str) -> None:
        """As `Engine.state_torn`."""
        self.tell_about("state_torn", step, cause)

    def worker_links(self) -> Mapping[str, ProxyLink]:
        """As `Engine.worker_links`."""
        return self._links.up()

    async def links(self) -> tuple[LinkSnapshot, ...]:
        """As `Engine.links`."""
        return tuple([snapshot_of(row) for row in await self.ask("links")])

    async def aclose(self, reason: str, *, patience: float = 0.0, finished: int | None = None) -> None:
        """As `Engine.aclose`; then its process ends."""
        process = self._process
        if self._loop.is_closed():  # there is nobody left to wait, nor to be told
            return
        try:
            if self._gone is None and self.opened.done() and self.opened.exception() is None:
                await self.ask("aclose", reason, patience, finished)
        except LocalError as error:  # it is gone meanwhile
            log.debug("%s", error)
        finally:
            self.lessons.stop()
            self.block_lessons.stop()
            if self._gone is None:
                self._end(job_closed())
            self._observers.close()
            if process is not None:
                await process.aclose()

    # -- lessons -------------------------------------------------------------------------------------------------

    def _lesson(self, word: FromLink) -> None:
        link = self._links.of(word.link)
        if link is None:
            return
        message = decode_message(word.data, node=link.node)
        if isinstance(message, AskLesson | Compared | EndLesson | AskBlocks | Blocks):
            take_lesson(link, message, self.lessons, self.block_lessons)

    def _link_ended(self, link: ProxyLink) -> None:
        self.lessons.link_ended(link)
        self.block_lessons.link_ended(link)


class _Waiting:
    """What the engine waits for, for us."""

    __slots__ = ("_number", "_proxy")

    def __init__(self, proxy: EngineProxy, number: int) -> None:
        self._proxy = proxy
        self._number = number

    def cancel(self) -> None:
        self._proxy.tell(EngineStop(self._number))


class _ProxyCall:
    """A call that the engine has been told of. deadline: its own, by the loop's clock."""

    __slots__ = ("_call", "_ended", "_memory", "_number", "_proxy", "_view_id", "deadline")

    def __init__(
        self, proxy: EngineProxy, number: int, view_id: int, call: Call, ended: Ended, deadline: float
    ) -> None:
        self._proxy = proxy
        self._number = number
        self._view_id = view_id
        self._call = call
        self._ended = ended
        self.deadline = deadline
        self._memory: CallMemory | None = None

    def cancel(self) -> None:
        self._proxy.tell(EngineStop(self._number))

    def work(self, known: Known) -> tuple[WorkWord | None, ErrorWord | None]:
        """Return its work as it is told, or why there is none."""
        try:
            memory = self._memory = self._proxy.make_memory(self._call, known)
        except Exception as error:  # of the operation, or for lack of memory: the engine says so to the others
            return None, error_word(error)
        return memory.word, None

    def over(self, word: CallEnded) -> None:
        """The engine has done with it."""
        error = None if word.error is None else error_of(word.error)
        memory = self._memory
        try:
            if error is None and word.given is not None and self._call.combine is not None:
                self._call.combine(word.given, ())
            elif error is None and memory is not None:
                memory.bring()
        except Exception as failed:  # of the operation: the others have not heard of it
            self._proxy.failed(self._view_id, failed)
            error = failed
        self._memory = None
        self._ended(None if error is not None else word.seq, error)


def _raised(word: ErrorWord) -> Exception:
    """Return an error as one that is raised here: what was cancelled there is over here."""
    error = error_of(word)
    return error if isinstance(error, Exception) else LocalError("the engine is closed", usable=False)
