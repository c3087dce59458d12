"""An engine that serves a program at the other end of a line: what is told is done, and answered.

    opening    the engine is not there yet; what is told meanwhile waits, in its order
    serving    words are carried out as they come, so calls get their numbers in the order in which they were told
    over       the engine is closed: asked for, or since the program is gone

Invariants: whatever has a number is answered once, also what nobody waits for any more (`EngineStop`) and what fails;
of a call that is over nothing touches memory of the program. Deadlines are the engine's: what is told has its own.

A program that is gone, however that came, leaves the job by the engine that it leaves behind: its peers hear at once
what they would take `lost_after` to find out.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from quicoll.engine.calls import Call
from quicoll.engine.messages import encode_message
from quicoll.engine_process.places import work_of
from quicoll.engine_process.plans import ValuesHeard, ValuesTold, network_row, plan_of
from quicoll.engine_process.words import (
    AskStacks,
    AwaitCall,
    AwaitDecision,
    BeginCall,
    CallEnded,
    CastVote,
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
    MakeWork,
    ReceivedOn,
    ReceiveOn,
    SignOfLife,
    ToLink,
    TransmitOn,
    TransmittedOn,
    ViewFound,
    body_of,
    decision_row,
    decode_program_word,
    encode_word,
    error_of,
    error_word,
    read_body,
    snapshot_row,
)
from quicoll.errors import LocalError, QuicollError
from quicoll.lanes.shown import credentials_shown
from quicoll.membership.member.actions import Dismissal, FreeToLeave, JobOver
from quicoll_transport.endpoint import LinkState
from quicoll_transport.errors import TransportError
from quicoll_transport.security.access import Access
from quicoll_transport.security.identity import WORKER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from quicoll.engine.answers import Cancellable
    from quicoll.engine.calls import Known, Work
    from quicoll.engine.engine import Engine
    from quicoll.engine.messages import BlockMessage, LessonMessage
    from quicoll.engine_process.places import Lending
    from quicoll.engine_process.words import EngineWord, ErrorWord, ProgramWord, WorkWord
    from quicoll.local.small import Counts
    from quicoll.observability.events import Event
    from quicoll.observability.flight import FlightRecorder
    from quicoll_transport.endpoint import Link, Transfer

__all__ = ["EngineServer"]

log = logging.getLogger("quicoll")

PROGRAM_ENDED: Final = "its process has ended"
"""What the others hear of a rank whose program is gone."""


class EngineServer:
    """See the module's head. On the engine's loop."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        arena: Lending,
        tell: Callable[[bytes], None],
        on_over: Callable[[], None],
    ) -> None:
        """Begin without an engine.

        Args:
            loop: The engine's.
            arena: The program's.
            tell: Sends a word to the program.
            on_over: Called once, when the engine is closed.
        """
        self._loop = loop
        self._arena = arena
        self._tell_bytes = tell
        self._on_over = on_over
        self._engine: Engine | None = None
        self._flight: FlightRecorder | None = None
        self._early: list[ProgramWord] = []
        self._begun: dict[int, Cancellable] = {}
        self._makes: dict[int, Callable[[Work | None, Exception | None], None]] = {}
        self._stacks: dict[int, Callable[[str], None]] = {}
        self._asked_stacks = 0
        self._plans = ValuesHeard(plan_of)
        self._networks = ValuesTold(network_row)
        self._links: dict[int, Link] = {}
        self._standing: EngineStands | None = None
        self._over = False

    # -- the engine ----------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Tell of an event; to be one of the engine's observers."""
        fields = json.dumps(event.fields, default=str).encode()
        self._tell(EventTold(event.t_ns, event.kind, fields))
        if event.kind == "straggler":
            self._stand()

    def stacks(self, most: int, give: Callable[[str], None]) -> None:
        """Give the stacks of the program, once it has told them; to be the engine's way to ask for them."""
        self._asked_stacks += 1
        self._stacks[self._asked_stacks] = give
        while len(self._stacks) > 16:  # of a program that does not answer
            del self._stacks[next(iter(self._stacks))]
        self._tell(AskStacks(self._asked_stacks, most))

    def use(self, engine: Engine) -> None:
        """Serve an engine, which is there now."""
        self._engine = engine
        self._flight = engine.observers.flight
        engine.attend(on_change=self._stand, on_link=self._link_changed, on_lesson=self._lesson)
        for link in engine.endpoint.links.values():
            self._link_changed(link)
        self._tell(EngineOpened(None, self._flight is not None))
        self._stand()
        early, self._early = self._early, []
        for word in early:
            self._carry_out(word)

    def not_opened(self, error: BaseException) -> None:
        """There is no engine."""
        self._tell(EngineOpened(error_word(error), False))
        self._end()

    async def program_ended(self) -> None:
        """The program is gone: leave."""
        if self._engine is not None and not self._over:
            await self._engine.aclose(PROGRAM_ENDED)
        self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._on_over()

    # -- words ---------------------------------------------------------------------------------------------------

    def _tell(self, word: EngineWord) -> None:
        self._tell_bytes(encode_word(word))

    def hear(self, data: bytes) -> None:
        """Take a word of the program's, but for the first."""
        word = decode_program_word(data)
        if self._engine is None:
            self._early.append(word)
        else:
            self._carry_out(word)

    def _carry_out(self, word: ProgramWord) -> None:
        engine = self._engine
        if engine is None:
            raise AssertionError("words wait for the engine")
        match word:
            case BeginCall():
                self._begin(engine, word)
            case GiveWork():
                self._give_work(word)
            case EngineAsk():
                self._run(word.number, self._answer(engine, word.what, word.arguments))
            case EngineTell():
                self._told(engine, word.what, word.arguments)
            case EngineStop():
                begun = self._begun.get(word.number)
                if begun is not None:
                    begun.cancel()
            case CastVote():
                vote = partial(engine.voting.vote, word.view, word.digest, word.groups)
                self._wait(word.number, partial(vote, timeout=word.timeout, unfinished=word.unfinished), decision_row)
            case AwaitDecision():
                wait = partial(engine.voting.decision, word.view, word.index)
                self._wait(word.number, partial(wait, timeout=word.timeout), decision_row)
            case AwaitCall():
                call = partial(engine.next_call, word.view, word.groups, word.timeout, word.step)
                self._wait(word.number, call, int)
            case ToLink():
                self._to_link(word)
            case TransmitOn():
                self._transmit(word)
            case ReceiveOn():
                self._receive(word)
            case SignOfLife():
                self._tell(EngineAlive())

    def _wait(
        self,
        number: int,
        begin: Callable[[Callable[[Any, BaseException | None], None]], Cancellable | None],
        row: Callable[[Any], Any],
    ) -> None:
        """Begin what ends with a call, and answer then."""
        over = False

        def ended(found: Any, error: BaseException | None) -> None:
            nonlocal over
            over = True
            self._begun.pop(number, None)
            told = None if error is None else error_word(error)
            self._tell(EngineAnswer(number, body_of(None if error is not None else row(found)), told))

        begun = begin(ended)
        if begun is not None and not over:
            self._begun[number] = begun

    def _run(self, number: int, work: Awaitable[Any]) -> None:
        """Run what is a task, and answer then."""

        async def answer() -> None:
            value: Any = None
            told: ErrorWord | None = None
            try:
                value = await work
            except asyncio.CancelledError as error:
                told = error_word(error)
            except Exception as error:  # of our own code too: somebody waits
                told = error_word(error)
            self._begun.pop(number, None)
            self._tell(EngineAnswer(number, body_of(value), told))

        self._begun[number] = self._loop.create_task(answer())

    async def _answer(self, engine: Engine, what: str, arguments: bytes) -> Any:
        given = read_body(f"? {what}", arguments)
        match what:
            case "wait_view":
                found = await engine.wait_view(given[0], joining=given[1], after=given[2])
                self._stand()
                return _found(found)
            case "break_view":
                error = error_of(given[1])
                if isinstance(error, QuicollError):
                    await engine.break_view(given[0], error)
                return None
            case "unanswered":
                return await engine.voting.unanswered(*given)
            case "links":
                return [snapshot_row(link) for link in await engine.links()]
            case "rotate":
                told, denied = given
                return await engine.certificates.rotate(Access(credentials_shown(told), denied))
            case "deny":
                return await engine.certificates.deny(*given)
            case "aclose":
                await engine.aclose(given[0], patience=given[1], finished=given[2])
                self._loop.call_soon(self._end)
                return None
            case _:
                return await getattr(engine, what)(*given)  # one of ASKED, by the name that it has there

    def _told(self, engine: Engine, what: str, arguments: bytes) -> None:
        given = read_body(f"! {what}", arguments)
        flight = self._flight
        match what:
            case "begin_step":
                engine.voting.begin(*given)
            case "emit":
                engine.observers.emit(given[0], **json.loads(given[1]))
            case "stacks":
                give = self._stacks.pop(given[0], None)
                if give is not None:
                    give(given[1])
            case "flight_left":
                if flight is not None:
                    flight.left(*given)
            case "flight_asked":
                if flight is not None:
                    flight.asked(*given)
                    flight.flush()
            case "flight_stack":
                if flight is not None:
                    flight.stack(*given)
            case _:
                getattr(engine, what)(*given)  # one of TOLD, by the name that it has there

    # -- calls ---------------------------------------------------------------------------------------------------

    def _begin(self, engine: Engine, word: BeginCall) -> None:
        number = word.number
        given: list[bytes] = []
        over = False

        def combine(payloads: Sequence[bytes], counts: Counts) -> None:
            given.extend(payloads)

        def ended(seq: int | None, error: BaseException | None) -> None:
            nonlocal over
            over = True
            self._begun.pop(number, None)
            self._makes.pop(number, None)
            told = None if error is None else error_word(error)
            self._tell(CallEnded(number, seq, told, tuple(given) if word.sizes is not None and error is None else None))

        # Now, whether or not it comes to be needed: the program takes its plan for known from here on.
        work = None if word.work is None else self._work(word.work)
        call = Call(
            word.name,
            word.signature,
            _nothing_made if work is None else lambda _: work,
            word.counts,
            word.gathers,
            word.measures,
            word.ranks,
            word.where,
            word.watched,
            word.divides,
            word.sizes,
            None if word.sizes is None else combine,
            word.given,
            partial(self._ask_work, number) if work is None else None,
        )
        begun = engine.collective(
            word.view, call, ended, group=word.group, timeout=word.timeout, step=word.step, number=word.taken
        )
        if begun is not None and not over:
            self._begun[number] = begun

    def _work(self, word: WorkWord) -> Work:
        return work_of(word, self._arena, self._plans)

    def _ask_work(self, number: int, known: Known, give: Callable[[Work | None, Exception | None], None]) -> None:
        self._makes[number] = give
        network, told = (0, b"") if known.network is None else self._networks.word(known.network)
        self._tell(MakeWork(number, tuple(known.counts), network, told))

    def _give_work(self, word: GiveWork) -> None:
        work = None if word.work is None else self._work(word.work)  # also of a call that is over: its plan is told now
        give = self._makes.pop(word.number, None)
        if give is None:
            return
        error = None if word.error is None else error_of(word.error)
        give(work, error if error is None or isinstance(error, Exception) else LocalError(str(error), usable=False))

    # -- what the program follows --------------------------------------------------------------------------------

    def _stand(self) -> None:
        engine = self._engine
        if engine is None:
            return
        config = engine.config
        standing = EngineStands(
            engine.view_at_work, config.lost_after, config.hold_timeout, dict(config.sources), engine.stragglers.table
        )
        if standing != self._standing:
            self._standing = standing
            self._tell(standing)

    # -- links ---------------------------------------------------------------------------------------------------

    def _link_changed(self, link: Link) -> None:
        if link.identity.role != WORKER or (link.ended and link.number not in self._links):
            return
        if link.ended:
            del self._links[link.number]
        else:
            self._links[link.number] = link
        up = link.state is LinkState.UP
        self._tell(LinkStands(link.number, link.node, link.remote_incarnation, up, link.ended, link.cause))

    def _lesson(self, link: Link, message: LessonMessage | BlockMessage) -> None:
        self._tell(FromLink(link.number, encode_message(message)))

    def _to_link(self, word: ToLink) -> None:
        link = self._links.get(word.link)
        if link is None:
            return
        match word.what:
            case "app":
                try:
                    link.send_app(word.data)
                except TransportError as error:  # it has ended, of which the program hears
                    log.debug("%s: %s", link.node, error)
            case "discard":
                link.discard(word.data)
            case _:
                link.close(word.data.decode())

    def _transmit(self, word: TransmitOn) -> None:
        number, link = word.number, self._links.get(word.link)
        if link is None:
            self._tell(TransmittedOn(number, "the link to it has ended"))
            return
        try:
            if word.tag:
                transfer = link.send(word.tag, memoryview(word.data))
            else:
                transfer = link.channel(word.channel).send(word.data)
        except TransportError as error:
            self._tell(TransmittedOn(number, str(error.args[0])))
            return
        self._follow(number, transfer, lambda error: self._tell(TransmittedOn(number, error)))

    def _receive(self, word: ReceiveOn) -> None:
        number, link = word.number, self._links.get(word.link)
        if link is None:
            self._tell(ReceivedOn(number, b"", "the link to it has ended"))
            return
        if not word.tag:
            self._begun[number] = self._loop.create_task(self._next_message(number, link, word))
            return
        buffer = bytearray(word.nbytes)
        try:
            transfer = link.post(word.tag, memoryview(buffer))
        except TransportError as error:
            self._tell(ReceivedOn(number, b"", str(error.args[0])))
            return
        self._follow(number, transfer, lambda error: self._tell(ReceivedOn(number, bytes(buffer), error)))

    async def _next_message(self, number: int, link: Link, word: ReceiveOn) -> None:
        data, failed = b"", ""
        channel = link.channel(word.channel)
        channel.limit = word.nbytes
        try:
            data = bytes(await channel.receive())
        except TransportError as error:
            failed = str(error.args[0])
        except asyncio.CancelledError:
            failed = "it is not waited for any more"
        self._begun.pop(number, None)
        self._tell(ReceivedOn(number, data, failed))

    def _follow(self, number: int, transfer: Transfer, over: Callable[[str], None]) -> None:
        def done(future: asyncio.Future[None]) -> None:
            self._begun.pop(number, None)
            error = None if future.cancelled() else future.exception()
            over("it was taken back" if future.cancelled() else "" if error is None else str(error.args[0]))

        self._begun[number] = transfer.future
        transfer.future.add_done_callback(done)


def _found(found: Any) -> ViewFound:
    if isinstance(found, JobOver):
        return ViewFound(over=found)
    if isinstance(found, Dismissal):
        return ViewFound(dismissal=found)
    return ViewFound(free=found) if isinstance(found, FreeToLeave) else ViewFound(view=found)


def _nothing_made(known: Known) -> Work:
    raise AssertionError("the work of this call is asked for")
