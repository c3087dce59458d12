"""Shared pieces on their way between ranks, in the background, on the engine's loop.

Every half second each shared state asks one peer whether it has something newer (quicoll.tiers.exchange), the peers in
the order of their names, one after the other; so among n ranks each one has asked each other one within n / 2 seconds
of links that work. Where all have the same, that is a digest there and a word back.

Whom. The nodes with a link to this one that is up: those of the view, and those that were or will be in one. Links are
the engine's; here nothing is dialled and none is ended, but that of a peer whose messages are malformed.

Out of the way. Messages travel on a channel of each link, as payload, behind heartbeats and control messages; one of at
most CHUNK bytes is under way for a shared state, and it asks for no more than `rate` bytes a second. A pull for
`SharedState.strong`, for which a step waits, asks for MAX_CHUNK at a time, of PULLS pieces at once, and is not paced.

    failure                                 what follows
    no answer within ANSWER_S; a lost link  the round is over; another peer is next
    a malformed message                     the link is closed, as for any message of a peer
    bytes with another digest, other lies   the event "piece_refused"; nothing merged; another peer is next
    a peer that answers late each time      its round takes as long, for this rank alone; a step's pull does not wait
                                            for rounds, and ends by its deadline
    a piece that does not fit here          the event "piece_refused"; the rest is taken
    no memory for a piece                   logged; the round is over, another peer is next

Bounds. Each link has one reader, and ANSWERS answers under way at most: who asks for more gets no answer to it, and
asks again when its time is over. A reader holds one message; what waits unread is within the link's credit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quicoll.errors import PeerError
from quicoll.tiers.exchange import (
    MAX_CHUNK,
    MAX_PIECE_MESSAGE,
    ComparePieces,
    FetchPiece,
    ListPieces,
    PieceArrival,
    PieceChunk,
    PieceMessage,
    PieceRound,
    answer_question,
    decode_pieces,
    encode_pieces,
)
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from quicoll.engine.messenger import Messenger
    from quicoll.tiers.exchange import PieceAnswer, PieceQuestion
    from quicoll.tiers.pieces import Horizon, PieceEntry, PieceStore, SharedPiece

__all__ = ["ANSWERS", "CHUNK", "INTERVAL_S", "PULLS", "Pulled", "Spreader"]

log = logging.getLogger("quicoll")

INTERVAL_S = 0.5
"""Between two rounds of a shared state."""
CHUNK = 64 << 10
"""Bytes that are asked for at a time in the background."""
PULLS = 4
"""Pieces that are pulled at once."""
ANSWERS = 8
"""Answers under way to one peer."""
ANSWER_S = 5.0
_PAGE_BYTES = 16 << 10  # that a page counts for: 64 entries have less, unless their names are long
_SHOWN = 4  # names in one warning
_CHANNEL = 0x7069_6563  # "piec": clear of whatever numbers a program counts


@dataclass(slots=True)
class _Spread:
    """A shared state that is spread. told: the last refusal of each peer, so that each is told of once."""

    name: str
    store: PieceStore
    rate: float
    known_step: Callable[[], int]
    last: str = ""  # the peer that was asked last
    told: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull has brought. lacking: why a piece is not here, by name."""

    pieces: Mapping[str, SharedPiece]
    lacking: Mapping[str, str]


class Spreader:
    """All shared states of one rank. See the module's head. Every method runs on the engine's loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        links: Callable[[], Mapping[str, Messenger]],
        emit: Callable[..., None],
    ) -> None:
        """Begin without a shared state; nothing is sent and read before there is one.

        Args:
            loop: The engine's.
            links: Gives the links that are up, by node.
            emit: Called with (kind, **fields) for each event.
        """
        self._loop = loop
        self._links = links
        self._emit = emit
        self._states: dict[str, _Spread] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._readers: dict[int, None] = {}  # links that are read, by number
        self._sending: dict[int, int] = {}  # answers under way, by number of the link
        self._waiting: dict[tuple[int, int], asyncio.Future[PieceAnswer]] = {}  # by link and question
        self._asked = 0
        self._closed = False

    # -- for this rank -------------------------------------------------------------------------------------------

    def open(self, name: str, store: PieceStore, rate: float, known_step: Callable[[], int]) -> None:
        """Spread a shared state.

        Args:
            name: Of the state, the same on all ranks.
            store: Its pieces; to be changed on this loop alone.
            rate: Bytes a second that it asks its peers for, at most.
            known_step: Gives the last step that this rank knows to be committed.
        """
        if not self._states:
            self._run(self._listen())
        self._states[name] = spread = _Spread(name, store, rate, known_step)
        self._run(self._spread(spread))

    def close(self) -> None:
        """Send and read nothing any more."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()

    async def pull(
        self, name: str, wanted: Sequence[tuple[PieceEntry, Sequence[str]]], *, horizon: Horizon, timeout: float
    ) -> Pulled:
        """Get these versions of pieces, as fast as it goes.

        Args:
            name: Of the shared state.
            wanted: Each piece, and the nodes that have just this version.
            horizon: Of these nodes.
            timeout: Seconds for all of it.
        Returns:
            The pieces that came, and why the others did not. Those that are newer than what is here are merged.
        """
        pieces: dict[str, SharedPiece] = {}
        lacking = {entry.name: f"did not come within {timeout:g} s" for entry, _ in wanted}
        left = list(enumerate(wanted))[::-1]

        async def work() -> None:
            while left:
                number, (entry, holders) = left.pop()
                first = number % len(holders) if holders else 0
                found = await self._pull(name, entry, (*holders[first:], *holders[:first]), horizon, lacking)
                if found is not None:
                    pieces[entry.name] = found
                    del lacking[entry.name]

        workers = [self._loop.create_task(work()) for _ in range(min(PULLS, len(left)))]
        try:
            if workers:
                await asyncio.wait(workers, timeout=timeout)
        finally:
            for worker in workers:
                worker.cancel()
        for worker in workers:
            if worker.done() and not worker.cancelled():
                worker.result()
        return Pulled(pieces, lacking)

    async def _pull(
        self, name: str, entry: PieceEntry, holders: Sequence[str], horizon: Horizon, lacking: dict[str, str]
    ) -> SharedPiece | None:
        store = self._states[name].store
        refused = store.no_room(entry) if store.wants(entry, horizon) else store.too_large(entry)
        if refused:
            lacking[entry.name] = refused
            return None
        attempts = 0
        while True:
            attempts += 1
            for holder in holders:
                arrival = PieceArrival(name, entry, MAX_CHUNK)
                error = await self._arrived(holder, arrival)
                piece = None if error else arrival.whole()
                if piece is not None:
                    store.merge(piece, horizon)
                    return piece
                lacking[entry.name] = f"{holder}: {error or 'gave other bits than its digest says'}"
            # Links may come back until the time is over; who asks too often gets nothing sooner.
            await asyncio.sleep(min(0.05 * attempts, INTERVAL_S))

    async def _arrived(self, holder: str, arrival: PieceArrival) -> str:
        """Fetch a piece from one node. Return why that was not possible, "" if it was."""
        while (question := arrival.question) is not None:
            try:
                told = await self._ask(holder, question)
            except PeerError as error:
                return error.message
            if not isinstance(told, PieceChunk) or told.data is None:
                return "does not have this version any more"
            wrong = arrival.take(told.data)
            if wrong:
                return wrong
        return ""

    # -- rounds --------------------------------------------------------------------------------------------------

    async def _spread(self, spread: _Spread) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            nodes = sorted(self._links())
            if nodes:
                spread.last = next((node for node in nodes if node > spread.last), nodes[0])
                try:
                    await self._round(spread, spread.last)
                except MemoryError:  # for this piece; others may be smaller, and this one may fit later
                    log.error("%s: no memory for a piece of %s", spread.name, spread.last)

    async def _round(self, spread: _Spread, node: str) -> None:
        exchange = PieceRound(spread.name, spread.store, CHUNK, step=spread.known_step())
        free_at = self._loop.time()
        while (question := exchange.question) is not None:
            cost = question.size if isinstance(question, FetchPiece) else _PAGE_BYTES
            await asyncio.sleep(max(free_at - self._loop.time(), 0.0))
            free_at = max(free_at, self._loop.time()) + cost / spread.rate
            try:
                exchange.take(await self._ask(node, question))
            except PeerError as error:
                log.debug("%s of %s: %s", spread.name, node, error.message)
                return
        refused = exchange.error or exchange.refused
        if exchange.lost:
            some = ", ".join(map(repr, exchange.lost[:_SHOWN]))
            more = f" and {len(exchange.lost) - _SHOWN} more" if len(exchange.lost) > _SHOWN else ""
            log.warning(
                "%s: the pieces %s%s are gone: they were deleted, or written where no view was, before the other ranks "
                "forgot deletions",
                spread.name,
                some,
                more,
            )
        if refused != spread.told.get(node, ""):
            spread.told[node] = refused
            if refused:
                self._emit("piece_refused", state=spread.name, peer=node, reason=refused)

    async def _ask(self, node: str, question: PieceQuestion) -> PieceAnswer:
        """Ask a peer. Raises PeerError where there is no answer in time."""
        link = self._links().get(node)
        if link is None:
            raise PeerError("there is no link to it", node=node)
        self._asked += 1
        key = link.number, self._asked
        told: asyncio.Future[PieceAnswer] = self._loop.create_future()
        self._waiting[key] = told
        self._read_from(link)
        transfer = None
        try:
            transfer = link.channel(_CHANNEL).send(encode_pieces(PieceMessage(self._asked, question)))
            async with asyncio.timeout(ANSWER_S):
                return await told
        except TransportError as error:
            raise PeerError(str(error.args[0]), node=node) from error
        except TimeoutError:
            raise PeerError(f"did not answer within {ANSWER_S:g} s", node=node) from None
        finally:
            del self._waiting[key]
            if transfer is not None and not transfer.done:
                transfer.abort()

    # -- what comes ----------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Read from the links that come up."""
        while True:
            for link in self._links().values():
                self._read_from(link)
            await asyncio.sleep(INTERVAL_S / 2)

    def _read_from(self, link: Messenger) -> None:
        if link.number not in self._readers:
            self._readers[link.number] = None
            self._run(self._read(link))

    async def _read(self, link: Messenger) -> None:
        channel = link.channel(_CHANNEL)
        channel.limit = MAX_PIECE_MESSAGE
        try:
            while not link.ended:
                try:
                    data = await channel.receive()
                except TransportError as error:  # the link has ended; or one message is too large, or stayed corrupt
                    log.info("%s: a message about shared state: %s", link.node, error)
                    continue
                self._receive(link, decode_pieces(data, node=link.node))
        except PeerError as error:
            log.error("%s", error)
            link.close("malformed message about shared state")
        finally:
            self._readers.pop(link.number, None)
            self._sending.pop(link.number, None)
            for key, waiting in self._waiting.items():
                if key[0] == link.number and not waiting.done():
                    waiting.set_exception(PeerError("the link to it has ended", node=link.node))

    def _receive(self, link: Messenger, message: PieceMessage) -> None:
        body = message.body
        if isinstance(body, ComparePieces | ListPieces | FetchPiece):
            if self._sending.get(link.number, 0) < ANSWERS:
                self._sending[link.number] = self._sending.get(link.number, 0) + 1
                self._run(self._answer(link, message.number, answer_question(self._store, body)))
            return
        waiting = self._waiting.get((link.number, message.number))
        if waiting is not None and not waiting.done():
            waiting.set_result(body)

    async def _answer(self, link: Messenger, number: int, told: PieceAnswer) -> None:
        try:
            transfer = link.channel(_CHANNEL).send(encode_pieces(PieceMessage(number, told)))
            await transfer.within(ANSWER_S, what="an answer about shared state")
        except TransportError as error:
            log.debug("%s gets no answer: %s", link.node, error)
        finally:
            if link.number in self._sending:
                self._sending[link.number] -= 1

    def _store(self, name: str) -> PieceStore | None:
        spread = self._states.get(name)
        return None if spread is None else spread.store

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            work.close()
            return
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("spreading shared state failed", exc_info=error)
