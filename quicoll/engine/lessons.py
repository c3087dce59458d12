"""Chunks of a state on their way from a member of a view to a node outside of it, over the link that the two have.

    learner                                   teacher
    Ask(first, digests of its chunks)  --->   kept until the caller is between two steps, and then answered once
                                       <---   Compared(how many were looked at, which are others there); of none: each
                                              step changes nearly all of the state, there is nothing to be learned
    memory for each of those           <---   each of those, as a message of its own
    ... and the next Ask
    EndLesson                          --->   forgotten
                                       <---   EndLesson: there is no such lesson, or no more of it

A lesson has the number of the view in which both agreed on it; quicoll.state.learning says what it is for, and when it
ends. Here is what goes over the link, by whom, and until when.

    failure                                    what follows
    the link ends, either process is another   the learner's question fails; the teacher forgets the lesson
    an Ask of no lesson that was agreed on     EndLesson. So no chunk goes to a node that was in no view with this one
    no answer within the time that was given   the learner's question fails
    chunks that are not taken in that time     the teacher takes them back, and forgets the lesson
    a Compared that cannot be                  the learner's question fails; nothing of it is received

Invariants: a teacher has one answer under way at a time, of BATCH chunks at most, whose memory is its own; so all of
its learners together cost it that much. A learner has memory for one answer. Each end keeps one small question of the
other; what comes unasked is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quicoll.engine.messages import MAX_ASKED, Ask, Compared, EndLesson, encode_message
from quicoll.errors import PeerError
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from quicoll.engine.messages import LessonMessage
    from quicoll.engine.messenger import Messenger
    from quicoll.numerics.dtypes import Array

__all__ = [
    "BATCH",
    "MAX_ASKED",
    "NOTHING",
    "Answer",
    "LessonTraffic",
    "Question",
    "lesson_tag",
    "live_link",
    "tell_peer",
]

log = logging.getLogger("quicoll")

BATCH = 8
"""Chunks that one answer brings at most."""

_TAG = struct.Struct("!QQQ")  # lesson, number of the question, place in it
_APART = 1 << 63  # from the tags of views, whose first number is below it


@dataclass(frozen=True, slots=True)
class Question:
    """Which of its chunks a learner wants to compare: those from `first` on. digests: of them, one after another."""

    node: str
    lesson: int
    number: int
    first: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """looked: how many of the chunks that were asked for were looked at. chunks: those that are others, by place."""

    looked: int
    chunks: Mapping[int, Array]


NOTHING = Answer(0, {})
"""There is nothing to be learned of this state."""


@dataclass(slots=True)
class _Pupil:
    lesson: int
    incarnation: int
    asked: Question | None = None


class LessonTraffic:
    """Both ends of all lessons of one rank, on the engine's loop. See the module's head."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop, link_to: Callable[[str], Messenger | None]) -> None:
        """Begin without a lesson.

        Args:
            loop: The engine's.
            link_to: Gives the link to a node; None where there is none.
        """
        self._loop = loop
        self._link_to = link_to
        self._pupils: dict[str, _Pupil] = {}
        self._sending: asyncio.Task[None] | None = None
        # Node, lesson and number of the question that this rank has asked.
        self._waiting: tuple[str, int, int, asyncio.Future[Compared]] | None = None

    # -- for the teacher's caller --------------------------------------------------------------------------------

    async def open(self, lesson: int, node: str, incarnation: int) -> None:
        """Take a node as a learner, in the place of what it learned before.

        Args:
            lesson: Its number.
            node: The node.
            incarnation: Of its process, as the view has it.
        """
        self._pupils[node] = _Pupil(lesson, incarnation)

    async def next_question(self, *, but: Sequence[str] = ()) -> tuple[Question | None, tuple[str, ...]]:
        """Return the question that waits longest, if one can be answered now; and the nodes that still learn here.

        Args:
            but: Nodes whose questions go on waiting.
        """
        for node in [
            node for node in self._pupils if live_link(self._link_to, node, self._pupils[node].incarnation) is None
        ]:
            del self._pupils[node]
        if self._sending is not None:
            return None, tuple(self._pupils)
        for node, pupil in self._pupils.items():
            if pupil.asked is not None and node not in but:
                question, pupil.asked = pupil.asked, None
                self._pupils[node] = self._pupils.pop(node)  # the others are first the next time
                return question, tuple(self._pupils)
        return None, tuple(self._pupils)

    async def answer(self, question: Question, answer: Answer, *, timeout: float) -> None:
        """Send an answer; returns before it has arrived.

        Args:
            question: Of `next_question`.
            answer: The chunks' memory must not change any more.
            timeout: Seconds for each chunk.
        """
        pupil = self._pupils.get(question.node)
        if pupil is not None and pupil.lesson == question.lesson and self._sending is None:
            self._sending = self._loop.create_task(self._send(question, answer, timeout))

    async def close(self, node: str) -> None:
        """Teach a node no more; it is told."""
        pupil = self._pupils.pop(node, None)
        if pupil is not None and (link := live_link(self._link_to, node, pupil.incarnation)) is not None:
            tell_peer(link, EndLesson(pupil.lesson))

    async def _send(self, question: Question, answer: Answer, timeout: float) -> None:
        node, pupil = question.node, self._pupils[question.node]
        transfers = []
        try:
            link = live_link(self._link_to, node, pupil.incarnation)
            if link is None:
                return
            changed = sum(1 << place for place in answer.chunks)
            link.send_app(encode_message(Compared(question.lesson, question.number, answer.looked, changed)))
            for place, chunk in answer.chunks.items():
                transfers.append(link.send(lesson_tag(question.lesson, question.number, place), chunk.data))
            for transfer in transfers:
                await transfer.within(timeout, what="a chunk for a rank that learns the state")
        except TransportError as error:
            log.info("%s learns no more of the state here: %s", node, error)
            if self._pupils.get(node) is pupil:
                await self.close(node)
        finally:
            for transfer in transfers:
                transfer.abort()
            self._sending = None

    # -- for the learner's caller --------------------------------------------------------------------------------

    async def ask(
        self,
        node: str,
        incarnation: int,
        lesson: int,
        *,
        number: int,
        first: int,
        digests: bytes,
        sizes: Sequence[int],
        timeout: float,
    ) -> Answer:
        """Ask a teacher which chunks are not as there, and receive some of them. One question at a time.

        Args:
            node: The teacher.
            incarnation: Of its process, as the view has it.
            lesson: Its number.
            number: Of the question in the lesson, each once.
            first: The first chunk of the question.
            digests: Of that one and those after it.
            sizes: Their bytes.
            timeout: Seconds for the answer, and for each chunk after it.
        Raises:
            PeerError: The teacher is lost, says nothing in time, or what it must not; or it teaches no more.
        """
        link = live_link(self._link_to, node, incarnation)
        if link is None:
            raise PeerError("there is no link to it", node=node)
        told: asyncio.Future[Compared] = self._loop.create_future()
        told.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting = node, lesson, number, told
        posted = []
        try:
            link.send_app(encode_message(Ask(lesson, number, first, digests)))
            async with asyncio.timeout(timeout):
                found = await told
            places = [place for place in range(len(sizes)) if found.changed >> place & 1]
            if not 0 <= found.looked <= len(sizes) or found.changed >> found.looked or len(places) > BATCH:
                raise PeerError(f"looked at {found.looked} of {len(sizes)} chunks, which cannot be", node=node)
            chunks = {place: np.empty(sizes[place], np.uint8) for place in places}
            for place, chunk in chunks.items():
                posted.append(link.post(lesson_tag(lesson, number, place), chunk.data))
            for transfer in posted:
                await transfer.within(timeout, what="a chunk of the state")
        except TransportError as error:
            raise PeerError(str(error.args[0]), node=node) from error
        except TimeoutError:
            raise PeerError(f"has told nothing of its state for {timeout:g} s", node=node) from None
        finally:
            self._waiting = None
            for transfer in posted:
                transfer.abort()
        return Answer(found.looked, chunks)

    def end(self, node: str, incarnation: int, lesson: int) -> None:
        """Ask no more; what is still on its way is wanted by nobody."""
        link = live_link(self._link_to, node, incarnation)
        if link is not None:
            link.discard(lesson_tag(lesson, 0, 0)[:8])
            tell_peer(link, EndLesson(lesson))

    # -- links ---------------------------------------------------------------------------------------------------

    def receive(self, link: Messenger, message: LessonMessage) -> None:
        """Take what a peer says about a lesson."""
        node, pupil = link.node, self._pupils.get(link.node)
        mine = pupil is not None and (pupil.lesson, pupil.incarnation) == (message.lesson, link.remote_incarnation)
        if isinstance(message, Ask):
            if pupil is None or not mine:
                tell_peer(link, EndLesson(message.lesson))
            else:
                pupil.asked = Question(node, message.lesson, message.number, message.first, message.digests)
            return
        if isinstance(message, EndLesson) and mine:
            del self._pupils[node]
        if self._waiting is None or self._waiting[:2] != (node, message.lesson) or self._waiting[3].done():
            return
        if isinstance(message, EndLesson):
            self._waiting[3].set_exception(PeerError("teaches its state no more", node=node))
        elif message.number == self._waiting[2]:
            self._waiting[3].set_result(message)

    def link_ended(self, link: Messenger) -> None:
        """Take note that the link to a peer has ended."""
        if self._waiting is not None and self._waiting[0] == link.node and not self._waiting[3].done():
            self._waiting[3].set_exception(PeerError(f"lost: {link.cause}", node=link.node))

    def stop(self) -> None:
        """Send nothing any more."""
        if self._sending is not None:
            self._sending.cancel()


def live_link(link_to: Callable[[str], Messenger | None], node: str, incarnation: int) -> Messenger | None:
    """Return the link to this very process of a node, None where there is none."""
    link = link_to(node)
    return None if link is None or link.ended or link.remote_incarnation != incarnation else link


def lesson_tag(lesson: int, number: int, place: int) -> bytes:
    """Return the tag of what comes as an answer. place: of a chunk or block in the question."""
    return _TAG.pack(_APART | lesson, number, place)


def tell_peer(link: Messenger, message: LessonMessage) -> None:
    """Send a message, if the link is still there."""
    with contextlib.suppress(TransportError):
        link.send_app(encode_message(message))
