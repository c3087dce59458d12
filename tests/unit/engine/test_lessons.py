"""What a learner and its teacher say to each other over their link: bounded, by lesson and process, never for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from lesson_link import Link

from quicoll.engine.lessons import BATCH, NOTHING, Answer, LessonTraffic
from quicoll.engine.messages import MAX_ASKED, Ask, Compared, EndLesson, decode_message, encode_message
from quicoll.errors import PeerError

LESSON, A, B = 7, 11, 22  # the incarnations of nodes "a", which teaches, and "b", which learns
DIGESTS = bytes(16 * 3)


class Pair:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.to_learner, self.to_teacher = Link("b", B), Link("a", A)
        self.to_learner.other, self.to_teacher.other = self.to_teacher, self.to_learner
        self.links: dict[str, Any] = {"a": self.to_teacher, "b": self.to_learner}
        self.teacher = LessonTraffic(loop=loop, link_to=lambda node: self.links.get(node))
        self.learner = LessonTraffic(loop=loop, link_to=lambda node: self.links.get(node))
        self.to_learner.to, self.to_teacher.to = self.teacher, self.learner

    def ask(self, *, lesson: int = LESSON, number: int = 1, sizes: Any = (4, 4, 2), timeout: float = 5.0) -> Any:
        asked = self.learner.ask(
            "a", A, lesson, number=number, first=10, digests=DIGESTS, sizes=list(sizes), timeout=timeout
        )
        return asyncio.ensure_future(asked)

    async def question(self) -> Any:
        for _ in range(5):
            await asyncio.sleep(0)
        question, _ = await self.teacher.next_question()
        return question


def chunk(size: int) -> Any:
    return np.arange(size, dtype=np.uint8)


async def test_a_question_is_answered_with_the_chunks_that_are_others() -> None:
    pair = Pair()
    await pair.teacher.open(LESSON, "b", B)
    asked = pair.ask()
    question = await pair.question()
    assert (question.node, question.lesson, question.first, question.digests) == ("b", LESSON, 10, DIGESTS)
    assert await pair.question() is None  # it is being answered
    await pair.teacher.answer(question, Answer(3, {0: chunk(4), 2: chunk(2)}), timeout=5.0)
    answer = await asked
    assert (answer.looked, {place: data.tolist() for place, data in answer.chunks.items()}) == (
        3,
        {0: [0, 1, 2, 3], 2: [0, 1]},
    )


async def test_a_node_that_was_taken_by_nobody_gets_nothing() -> None:
    pair = Pair()
    with pytest.raises(PeerError, match="teaches its state no more"):
        await pair.ask()
    assert await pair.question() is None
    assert pair.to_learner.sent == {}


@pytest.mark.parametrize(("lesson", "incarnation"), [(LESSON + 1, B), (LESSON, B + 1)])
async def test_another_lesson_or_another_process_of_the_node_gets_nothing(lesson: int, incarnation: int) -> None:
    pair = Pair()
    await pair.teacher.open(lesson, "b", incarnation)
    with pytest.raises(PeerError, match="teaches its state no more"):
        await pair.ask()
    assert pair.to_learner.sent == {}


async def test_one_answer_is_under_way_at_a_time_and_the_learners_take_turns() -> None:
    pair = Pair()
    third = Link("c", 33)
    third.other, third.to = pair.to_learner.other, pair.teacher
    pair.links["c"] = third
    await pair.teacher.open(LESSON, "b", B)
    await pair.teacher.open(LESSON, "c", 33)
    pair.teacher.receive(pair.to_learner, Ask(LESSON, 1, 0, DIGESTS))
    pair.teacher.receive(third, Ask(LESSON, 1, 0, DIGESTS))
    first, nodes = await pair.teacher.next_question()
    assert first is not None
    assert (first.node, sorted(nodes)) == ("b", ["b", "c"])
    pair.teacher.receive(pair.to_learner, Ask(LESSON, 2, 0, DIGESTS))
    await pair.teacher.answer(first, Answer(1, {0: chunk(4)}), timeout=5.0)
    await asyncio.sleep(0)
    assert (await pair.teacher.next_question())[0] is None
    next(iter(pair.to_learner.sent.values()))[1].future.set_result(None)
    await asyncio.sleep(0.01)
    second, _ = await pair.teacher.next_question()
    assert second is not None
    assert second.node == "c"


async def test_chunks_that_are_not_taken_in_time_end_the_lesson_and_are_taken_back() -> None:
    pair = Pair()
    await pair.teacher.open(LESSON, "b", B)
    pair.teacher.receive(pair.to_learner, Ask(LESSON, 1, 0, DIGESTS))
    question, _ = await pair.teacher.next_question()
    assert question is not None
    await pair.teacher.answer(question, Answer(1, {0: chunk(4)}), timeout=0.01)
    await asyncio.sleep(0.05)
    assert await pair.teacher.next_question() == (None, ())
    assert [transfer.aborted for _, transfer in pair.to_learner.sent.values()] == [True]
    assert pair.to_learner.heard[-1] == EndLesson(LESSON)


async def test_a_teacher_that_says_nothing_is_waited_for_so_long_and_no_longer() -> None:
    pair = Pair()
    pair.to_teacher.deaf = True
    with pytest.raises(PeerError, match="has told nothing of its state"):
        await pair.ask(timeout=0.01)


async def test_a_link_that_ends_ends_the_question_and_the_lesson() -> None:
    pair = Pair()
    await pair.teacher.open(LESSON, "b", B)
    asked = pair.ask()
    await pair.question()
    for link in (pair.to_teacher, pair.to_learner):
        link.ended, link.cause = True, "silent for 2 s"
    pair.learner.link_ended(pair.to_teacher)
    with pytest.raises(PeerError, match="lost: silent for 2 s"):
        await asked
    assert await pair.teacher.next_question() == (None, ())
    with pytest.raises(PeerError, match="there is no link to it"):
        await pair.ask()


@pytest.mark.parametrize(
    ("looked", "changed"),
    [(4, 0), (0, 1), (1, 2), (20, (1 << BATCH + 1) - 1)],
    ids=["beyond", "of none", "not looked at", "too many"],
)
async def test_an_answer_that_cannot_be_is_refused_before_anything_is_received(looked: int, changed: int) -> None:
    pair = Pair()
    pair.to_teacher.deaf = True
    asked = pair.ask(sizes=[4] * (20 if looked == 20 else 3))
    await asyncio.sleep(0)
    pair.learner.receive(pair.to_teacher, Compared(LESSON, 1, looked, changed))
    with pytest.raises(PeerError, match="which cannot be"):
        await asked
    assert pair.to_teacher.posted == {}


async def test_an_answer_of_no_chunk_says_that_there_is_nothing_to_be_learned() -> None:
    pair = Pair()
    pair.to_teacher.deaf = True
    asked = pair.ask()
    await asyncio.sleep(0)
    pair.learner.receive(pair.to_teacher, Compared(LESSON, 1, 0, 0))
    assert await asked == NOTHING


async def test_a_question_for_which_it_is_too_early_waits() -> None:
    pair = Pair()
    await pair.teacher.open(LESSON, "b", B)
    asked = pair.ask()
    for _ in range(5):
        await asyncio.sleep(0)
    assert await pair.teacher.next_question(but=("b",)) == (None, ("b",))
    question, _ = await pair.teacher.next_question()
    assert question is not None
    asked.cancel()


async def test_an_answer_to_an_earlier_question_is_dropped() -> None:
    pair = Pair()
    pair.to_teacher.deaf = True
    asked = pair.ask(number=2, timeout=0.01)
    await asyncio.sleep(0)
    pair.learner.receive(pair.to_teacher, Compared(LESSON, 1, 1, 0))
    with pytest.raises(PeerError, match="has told nothing"):
        await asked


async def test_a_learner_that_ends_wants_nothing_more_of_what_is_on_its_way() -> None:
    pair = Pair()
    await pair.teacher.open(LESSON, "b", B)
    asked = pair.ask()
    await pair.question()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    pair.learner.end("a", A, LESSON)
    await asyncio.sleep(0)
    assert await pair.teacher.next_question() == (None, ())
    ((prefix),) = pair.to_teacher.discarded
    assert int.from_bytes(prefix, "big") == 1 << 63 | LESSON  # no view has such a number


@pytest.mark.parametrize(
    "message", [Ask(LESSON, 1, 0, DIGESTS), Compared(LESSON, 1, MAX_ASKED, (1 << MAX_ASKED) - 1), EndLesson(LESSON)]
)
def test_messages_come_as_they_were_sent(message: Any) -> None:
    assert decode_message(encode_message(message), node="a") == message


@pytest.mark.parametrize(
    "message",
    [
        Ask(LESSON, 1, 0, bytes(17)),
        Ask(LESSON, 1, 0, b""),
        Ask(LESSON, 1, 0, bytes(16 * (MAX_ASKED + 1))),
        Ask(-1, 1, 0, bytes(16)),
        Compared(LESSON, 1, 1, -1),
        Compared(LESSON, 1, 1, 1 << 63),
        EndLesson(1 << 63),
    ],
)
def test_messages_that_no_rank_would_send_are_refused(message: Any) -> None:
    with pytest.raises(PeerError):
        decode_message(encode_message(message), node="a")


async def test_an_engine_that_stops_sends_nothing_any_more() -> None:
    pair = Pair()
    await pair.teacher.open(LESSON, "b", B)
    pair.teacher.receive(pair.to_learner, Ask(LESSON, 1, 0, DIGESTS))
    question, _ = await pair.teacher.next_question()
    assert question is not None
    await pair.teacher.answer(question, Answer(1, {0: chunk(4)}), timeout=60.0)
    await asyncio.sleep(0)
    pair.teacher.stop()
    await asyncio.sleep(0.01)
    assert [transfer.aborted for _, transfer in pair.to_learner.sent.values()] == [True]
