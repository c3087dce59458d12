"""Blocks of sharded states on their way from a rank that owns them to a spare, over the link that the two have.

    spare                                      owner
    AskBlocks(what they are made of)    --->   kept until a block here has another digest than the one that was sent
                                        <---   Blocks(first place, which ones from there on follow)
    memory for each of those            <---   each of those, as a message of its own
    ... and the next AskBlocks
    EndLesson                           --->   forgotten
                                        <---   EndLesson: there is no such lesson, or no more of it

A **place** is one piece of one block, by its number in a list that both ends make of the view in which the spare was
shown (quicoll.state.warm_blocks). An owner publishes what it has as of each committed step; that memory is never
written again, so it is sent as it lies there, while the steps go on. It remembers what it has sent, and sends what has
become another since, in turns: where steps are faster than the link, every place gets its turn all the same.

    failure                                    what follows
    the link ends, either process is another   the spare's question fails; the owner forgets the lesson
    a question of no lesson, or of places that EndLesson: nothing goes to a node that was in no view with this rank
      are made of something else
    a place is not owned here any more         EndLesson; the spare is shown again, and asks whoever owns it then
    places that are not taken in time          the owner takes them back, and forgets the lesson
    a Blocks that cannot be                    the spare's question fails; nothing of it is received

Invariants. No step waits for a spare: what is sent to it is sent beside them, and one answer is under way to each at a
time. A spare takes memory for one answer of each owner, of PLACES places and ANSWER_BYTES or one place; what comes
unasked is dropped. Its question waits for as long as no step changes anything: like a spare itself, it has no deadline,
and ends with the link, the lesson, or a view for the spare. Nothing here says that the bytes are right: whoever takes
the place compares each block with the digest that was agreed in the vote.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quicoll.engine.lessons import lesson_tag, live_link, tell_peer
from quicoll.engine.messages import BLOCK_LESSONS, PLACES, AskBlocks, Blocks, EndLesson, encode_message
from quicoll.errors import PeerError
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from quicoll.engine.lessons import LessonTraffic
    from quicoll.engine.messages import BlockMessage, LessonMessage
    from quicoll.engine.messenger import Messenger
    from quicoll.numerics.dtypes import Array

__all__ = ["ANSWER_BYTES", "BlockSupply", "BlockTraffic", "take_lesson"]

log = logging.getLogger("quicoll")

ANSWER_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class BlockSupply:
    """What an owner has after a step. digests: a row of 16 bytes for each place. part: gives the flat memory of a
    place, which is never written again; None where it is not here."""

    digests: Array
    part: Callable[[int], Array | None]


@dataclass(slots=True, eq=False)
class _Spare:
    """sent: the digest that each place had when it was sent last. asked: the number of its question. next_place: whose
    turn it is."""

    lesson: int
    incarnation: int
    made_of: bytes
    timeout: float
    sent: Array
    asked: int | None = None
    next_place: int = 0
    supply: BlockSupply | None = None
    sending: asyncio.Task[None] | None = field(default=None, repr=False)


class BlockTraffic:
    """Both ends of all lessons of one rank, on the engine's loop. See the module's head."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop, link_to: Callable[[str], Messenger | None]) -> None:
        """Begin without a lesson.

        Args:
            loop: The engine's.
            link_to: Gives the link to a node; None where there is none.
        """
        self._loop = loop
        self._link_to = link_to
        self._spares: dict[str, _Spare] = {}
        self._waiting: dict[tuple[str, int], tuple[int, asyncio.Future[Blocks]]] = {}

    # -- for an owner's caller -----------------------------------------------------------------------------------

    async def open(
        self, view_id: int, node: str, incarnation: int, *, made_of: bytes, places: int, timeout: float
    ) -> None:
        """Take a spare, in the place of what it got before.

        Args:
            view_id: The view in which it is shown.
            node: The spare.
            incarnation: Of its process, as the view has it.
            made_of: A digest of what the places are.
            places: How many there are.
            timeout: Seconds that each has to arrive.
        """
        self._forget(node)
        nothing = np.zeros((places, 16), np.uint8)
        self._spares[node] = _Spare(BLOCK_LESSONS | view_id, incarnation, made_of, timeout, nothing)

    async def publish(self, supplies: Mapping[str, BlockSupply]) -> tuple[str, ...]:
        """Let spares have what is here now, as they ask for it.

        Args:
            supplies: By spare.
        Returns:
            The spares that still learn here.
        """
        for node in [node for node, spare in self._spares.items() if self._live(node, spare.incarnation) is None]:
            self._forget(node)
        for node, supply in supplies.items():
            spare = self._spares.get(node)
            if spare is not None:
                spare.supply = supply
                self._answer(node, spare)
        return tuple(self._spares)

    async def close(self, node: str) -> None:
        """Give a spare no more; it is told."""
        self._close(node)

    def _answer(self, node: str, spare: _Spare) -> None:
        if spare.asked is None or spare.supply is None or spare.sending is not None:
            return
        changed = np.flatnonzero((spare.supply.digests != spare.sent).any(axis=1))
        if not len(changed):
            return
        first = int(changed[np.searchsorted(changed, spare.next_place) % len(changed)])
        parts: dict[int, Array] = {}
        nbytes = 0
        for place in map(int, changed[np.searchsorted(changed, first) :]):
            part = spare.supply.part(place)
            if part is None:
                log.info("%s gets no more blocks here: others own them now", node)
                self._close(node)
                return
            if place >= first + PLACES or (parts and nbytes + part.nbytes > ANSWER_BYTES):
                break
            parts[place] = part
            nbytes += part.nbytes
        number, spare.asked = spare.asked, None
        spare.sending = self._loop.create_task(self._send(node, spare, number, spare.supply.digests, parts))

    async def _send(self, node: str, spare: _Spare, number: int, digests: Array, parts: Mapping[int, Array]) -> None:
        transfers = []
        first = next(iter(parts))
        try:
            link = self._live(node, spare.incarnation)
            if link is None:
                return
            following = sum(1 << (place - first) for place in parts)
            link.send_app(encode_message(Blocks(spare.lesson, number, first, following)))
            for place, part in parts.items():
                transfers.append(link.send(lesson_tag(spare.lesson, number, place), part.view(np.uint8).data))
            for transfer in transfers:
                await transfer.within(spare.timeout, what="a block for a spare")
            sent = list(parts)
            spare.sent[sent] = digests[sent]
            spare.next_place = sent[-1] + 1
        except TransportError as error:
            log.info("%s gets no more blocks here: %s", node, error)
            if self._spares.get(node) is spare:
                self._close(node)
        finally:
            for transfer in transfers:
                transfer.abort()
            spare.sending = None
        if self._spares.get(node) is spare:
            self._answer(node, spare)

    def _close(self, node: str) -> None:
        spare = self._spares.get(node)
        self._forget(node)
        if spare is not None and (link := self._live(node, spare.incarnation)) is not None:
            tell_peer(link, EndLesson(spare.lesson))

    def _forget(self, node: str) -> None:
        spare = self._spares.pop(node, None)
        if spare is not None and spare.sending is not None:
            spare.sending.cancel()

    # -- for a spare's caller ------------------------------------------------------------------------------------

    async def ask(
        self,
        node: str,
        incarnation: int,
        view_id: int,
        *,
        number: int,
        made_of: bytes,
        sizes: Sequence[int],
        timeout: float,
    ) -> dict[int, Array]:
        """Ask an owner for what has become another since the last question, and receive it. Waits until a step does.

        Args:
            node: The owner.
            incarnation: Of its process, as the view has it.
            view_id: The view in which this rank was shown.
            number: Of the question in the lesson, each once.
            made_of: A digest of what the places are.
            sizes: Their bytes.
            timeout: Seconds for each place, once the owner has said that it comes.
        Returns:
            Fresh memory with their bytes, by place.
        Raises:
            PeerError: The owner is lost, gives no more, or says what it must not.
        """
        lesson = BLOCK_LESSONS | view_id
        link = self._live(node, incarnation)
        if link is None:
            raise PeerError("there is no link to it", node=node)
        told: asyncio.Future[Blocks] = self._loop.create_future()
        told.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting[node, lesson] = number, told
        posted = []
        try:
            link.send_app(encode_message(AskBlocks(lesson, number, made_of)))
            found = await told
            places = [found.first + bit for bit in range(PLACES) if found.following >> bit & 1]
            fits = bool(places) and not found.following >> PLACES and places[-1] < len(sizes)
            if not fits or (len(places) > 1 and sum(sizes[place] for place in places) > ANSWER_BYTES):
                raise PeerError(f"sends blocks that cannot be: {len(places)} of {len(sizes)} places", node=node)
            parts = {place: np.empty(sizes[place], np.uint8) for place in places}
            for place, part in parts.items():
                posted.append(link.post(lesson_tag(lesson, number, place), part.data))
            for transfer in posted:
                await transfer.within(timeout, what="a block of the state")
        except TransportError as error:
            raise PeerError(str(error.args[0]), node=node) from error
        finally:
            if self._waiting.get((node, lesson), (0, None))[1] is told:  # not that of a later question
                del self._waiting[node, lesson]
            for transfer in posted:
                transfer.abort()
        return parts

    def end(self, node: str, incarnation: int, view_id: int) -> None:
        """Ask no more; what is still on its way is wanted by nobody."""
        link = self._live(node, incarnation)
        if link is not None:
            link.discard(lesson_tag(BLOCK_LESSONS | view_id, 0, 0)[:8])
            tell_peer(link, EndLesson(BLOCK_LESSONS | view_id))

    # -- links ---------------------------------------------------------------------------------------------------

    def receive(self, link: Messenger, message: BlockMessage) -> None:
        """Take what a peer says about a lesson."""
        node, spare = link.node, self._spares.get(link.node)
        mine = spare is not None and (spare.lesson, spare.incarnation) == (message.lesson, link.remote_incarnation)
        if isinstance(message, AskBlocks):
            if spare is None or not mine or message.made_of != spare.made_of:
                tell_peer(link, EndLesson(message.lesson))
            else:
                spare.asked = message.number
                self._answer(node, spare)
            return
        if isinstance(message, EndLesson) and mine:
            self._forget(node)
        number, told = self._waiting.get((node, message.lesson), (0, None))
        if told is None or told.done():
            return
        if isinstance(message, EndLesson):
            told.set_exception(PeerError("gives its blocks no more", node=node))
        elif message.number == number:
            told.set_result(message)

    def link_ended(self, link: Messenger) -> None:
        """Take note that the link to a peer has ended."""
        for (node, _), (_, told) in self._waiting.items():
            if node == link.node and not told.done():
                told.set_exception(PeerError(f"lost: {link.cause}", node=link.node))

    def stop(self) -> None:
        """Send nothing any more."""
        for node in list(self._spares):
            self._forget(node)

    def _live(self, node: str, incarnation: int) -> Messenger | None:
        return live_link(self._link_to, node, incarnation)


def take_lesson(
    link: Messenger, message: LessonMessage | BlockMessage, lessons: LessonTraffic, blocks: BlockTraffic
) -> None:
    """Give what a peer says about a lesson to whom it is for.

    Args:
        link: It came on.
        message: It.
        lessons: Those of states.
        blocks: Those of blocks.
    """
    if isinstance(message, AskBlocks | Blocks) or (isinstance(message, EndLesson) and message.lesson >= BLOCK_LESSONS):
        blocks.receive(link, message)
    else:
        lessons.receive(link, message)
