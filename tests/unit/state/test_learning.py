"""Who learns, for how long, and what a teacher tells: the pure cores, and both ends without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import quicoll.state.learning
from quicoll.engine.lessons import BATCH, MAX_ASKED, Answer, Question
from quicoll.errors import PeerError
from quicoll.membership.view import Member, View
from quicoll.state.chunks import ChunkedState
from quicoll.state.learning import AT_ONCE_NS, FEW, REST, Course, Lesson, Share, Teacher, learn, teachers, who_learns
from quicoll.state.manifest import decode_manifest, encode_manifest
from quicoll.state.rank_state import RankState
from quicoll.state.transfer import CHUNK_BYTES, chunks_of, opened
from quicoll.state.tree import flatten
from quicoll.state.version import HeldState, StateVersion, compare

NEW, OLD = StateVersion(9, 9), StateVersion(3, 3)
MS = 1_000_000


def told(*versions: StateVersion, learned: tuple[int, ...] = (), nbytes: int = 100) -> list[HeldState]:
    return [HeldState(version, nbytes=nbytes, learned=rank in learned) for rank, version in enumerate(versions)]


def learners(held: list[HeldState], *, learn_from: int = 100, least: int = 1) -> tuple[int, ...]:
    return who_learns(compare(held), held, learn_from=learn_from, min_world_size=least)


# -- who learns ------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_behind_by_a_large_state_learns() -> None:
    assert learners(told(NEW, OLD, NEW)) == (1,)
    assert learners(told(OLD, NEW)) == (0,)
    assert learners(told(NEW, NEW)) == ()


def test_nobody_learns_a_small_state_or_where_the_setting_is_zero() -> None:
    assert learners(told(NEW, OLD), learn_from=101) == ()
    assert learners(told(NEW, OLD), learn_from=0) == ()


def test_nobody_learns_before_a_step_of_this_job_was_committed() -> None:
    assert learners(told(StateVersion(0, 5), StateVersion(0, 3), StateVersion(0, 5))) == ()


def test_no_more_ranks_learn_than_go_on_and_those_are_enough_for_a_view() -> None:
    assert learners(told(NEW, OLD, NEW, OLD)) == (1, 3)
    assert learners(told(OLD, OLD, NEW)) == ()
    assert learners(told(NEW, OLD, NEW), least=3) == ()
    assert learners(told(NEW, OLD, NEW), least=2) == (1,)


def test_a_rank_learns_once() -> None:
    assert learners(told(NEW, OLD, NEW, learned=(1,))) == ()
    assert learners(told(NEW, OLD, NEW, OLD, learned=(1,))) == (3,)


def test_learners_are_spread_over_the_holders_and_taught_by_one_of_their_site_where_that_may_be() -> None:
    nowhere = [""] * 8
    assert teachers((1, 3), {0: 0, 2: 0}, nowhere) == {1: 0, 3: 2}
    assert teachers((5, 6, 7), {0: 0, 2: 0}, nowhere) == {5: 0, 6: 2, 7: 0}
    assert teachers((5, 6), {0: 1, 2: 0}, nowhere) == {5: 2, 6: 0}
    assert teachers((1,), {0: 0, 2: 0}, ["north", "south", "south"]) == {1: 2}
    assert teachers((3, 4), {0: 0, 1: 0, 2: 0}, ["north", "south", "south", "south", "south"]) == {3: 1, 4: 2}
    assert teachers((2, 3), {0: 0, 1: 0}, ["north", "south", "south", "south"]) == {2: 1, 3: 0}
    assert teachers((1, 2, 3), {0: 4}, nowhere) == dict.fromkeys((1, 2, 3), 0)


# -- for how long ----------------------------------------------------------------------------------------------------


def passes(chunks: int, changing: list[int]) -> Course:
    """A course in which the n-th pass brings changing[n] chunks, one for each that is looked at, the first ones."""
    course = Course(chunks)
    for brings in changing:
        for at in range(chunks):
            assert course.position == at
            course.looked(1, int(at < brings))
            if course.over:
                return course
    return course


def test_one_pass_is_enough_where_it_brings_few_chunks() -> None:
    course = passes(100, [FEW])
    assert (course.over, course.passes, course.brought) == (True, 1, FEW)


def test_what_changed_during_a_pass_is_for_the_next_one() -> None:
    course = passes(100, [100, 40, 3])
    assert (course.over, course.passes, course.brought) == (True, 3, 143)


def test_a_pass_ends_as_soon_as_it_has_brought_more_than_half_of_the_one_before() -> None:
    course = passes(100, [100, 100])
    assert (course.over, course.passes, course.brought) == (True, 1, 151)


@pytest.mark.parametrize("chunks", [1, 5, 64, 1000])
def test_all_passes_together_bring_at_most_twice_the_state(chunks: int) -> None:
    """However much changes in each of them."""
    course = Course(chunks)
    halving, at = chunks, 0
    while not course.over:
        course.looked(1, int(at < halving))
        at += 1
        if at == chunks:
            at, halving = 0, max(halving // 2, 1)
    assert course.brought <= 2 * chunks
    assert course.passes <= chunks.bit_length() + 1


def test_a_state_without_chunks_is_learned_at_once() -> None:
    assert Course(0).over


def test_a_teacher_rests_nine_times_as_long_as_it_has_read() -> None:
    share = Share()
    assert share.begin(0)
    assert share.lasts(20 * MS)
    share.end(20 * MS)
    assert not share.begin(20 * MS)
    assert not share.begin(20 * MS + REST * 20 * MS - 1)
    assert share.begin(20 * MS + REST * 20 * MS)


def test_a_teacher_reads_for_a_bounded_time_at_once() -> None:
    share = Share()
    share.begin(5)
    assert share.lasts(5 + AT_ONCE_NS - 1)
    assert not share.lasts(5 + AT_ONCE_NS)


def test_a_state_that_is_learned_has_chunks_enough_for_it() -> None:
    records = decode_manifest(encode_manifest(flatten({"w": np.zeros(1 << 16, np.uint8)})), giver=0, view_id=1).records
    assert len(chunks_of(records, 0)) == 1
    assert len(chunks_of(records, 1 << 16)) == 16
    assert chunks_of(records, 1 << 40).nbytes(0) == 1 << 16 < CHUNK_BYTES


# -- teacher and learner ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _reading_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quicoll.state.learning, "_now_ns", lambda: 0)


class Runtime:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def call(self, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return asyncio.ensure_future(work)


class Lessons:
    """Both ends' engines, without a link: a question waits until the teacher is between two steps."""

    def __init__(self) -> None:
        self.open_: dict[str, tuple[int, int]] = {}
        self.question: Question | None = None
        self.answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.asked: list[tuple[int, int]] = []
        self.copies: list[np.ndarray[Any, Any]] = []
        self.ended = 0

    async def open(self, lesson: int, node: str, incarnation: int) -> None:
        self.open_[node] = lesson, incarnation

    async def close(self, node: str) -> None:
        self.open_.pop(node)
        if not self.answered.done():
            self.answered.set_exception(PeerError("teaches its state no more"))

    async def next_question(self, *, but: tuple[str, ...]) -> tuple[Question | None, tuple[str, ...]]:
        if self.question is None or self.question.node in but:
            return None, tuple(self.open_)
        question, self.question = self.question, None
        return question, tuple(self.open_)

    async def answer(self, question: Question, answer: Answer, *, timeout: float) -> None:
        self.answered.set_result(answer)
        self.copies += answer.chunks.values()

    async def ask(self, node: str, incarnation: int, lesson: int, **asked: Any) -> Answer:
        self.asked.append((asked["first"], len(asked["sizes"])))
        self.answered = asyncio.get_running_loop().create_future()
        self.question = Question("b", lesson, asked["number"], asked["first"], asked["digests"])
        return await self.answered

    def end(self, node: str, incarnation: int, lesson: int) -> None:
        self.ended += 1


class Pair:
    """Node "a" teaches node "b" a state of 100 chunks of 16 bytes, which 16 of 1600 bytes are learned from."""

    def __init__(self) -> None:
        self.lessons: Any = Lessons()
        self.runtime: Any = Runtime()
        self.held = {"w": np.arange(1600, dtype=np.uint16).astype(np.uint8)}
        self.mine = {"w": np.zeros(1600, np.uint8)}
        self.state = RankState()
        self.state.register(lambda: self.held, lambda state: None)
        self.records = decode_manifest(encode_manifest(flatten(self.held)), giver=0, view_id=7).records
        self.table = chunks_of(self.records, 256)
        self.teacher = Teacher(self.state, self.lessons, self.runtime)
        self.course = Course(len(self.table))

    def view(self, view_id: int, *nodes: str) -> View:
        members = tuple(Member(rank=rank, node=node, incarnation=ord(node)) for rank, node in enumerate(nodes))
        return View(view_id=view_id, members=members, seed=0, committed_step=0, committed_view=0)

    async def begin(self, *, steps: int = 1) -> asyncio.Future[str]:
        """steps: that the teacher does before it is asked."""
        await self.teacher.take(self.view(7, "a", "b"), (1,), self.records, self.table)
        self.state.version = StateVersion(steps, steps)
        chunked = ChunkedState(opened(self.records, [self.mine["w"]], writing=True), self.table)
        lesson = Lesson(7, "a", ord("a"), chunked)
        return asyncio.ensure_future(learn(lesson, self.course, self.lessons, self.runtime, timeout=1.0))

    async def turn(self, view: View | None = None) -> None:
        """The teacher is between two steps, after the learner has had time to ask."""
        for _ in range(2 * MAX_ASKED):
            await asyncio.sleep(0)
        await self.teacher.between_steps(view or self.view(8, "a"), timeout=1.0)


async def test_a_learner_gets_the_state_in_batches_between_steps() -> None:
    pair = Pair()
    learning = await pair.begin()
    turns = 0
    while not learning.done():
        await pair.turn()
        turns += 1
        assert turns < 100
    await learning
    assert pair.mine["w"].tolist() == pair.held["w"].tolist()
    assert (len(pair.table), pair.course.brought, pair.course.passes) == (100, 100, 2)
    assert max(count for _, count in pair.lessons.asked) == MAX_ASKED
    assert -(-100 // BATCH) < turns < 30
    await asyncio.sleep(0)
    assert pair.lessons.ended == 1


@pytest.mark.parametrize(("changes", "learns"), [(1.0, False), (0.8, False), (0.6, True), (0.1, True)])
async def test_a_state_of_which_a_step_changes_nearly_all_is_not_learned(changes: float, learns: bool) -> None:
    pair = Pair()
    learning = await pair.begin()
    pair.held["w"][: int(1600 * changes)] += 1
    await pair.turn()
    await pair.turn()
    assert learning.done() != learns
    assert bool(pair.course.brought) == learns
    if learns:
        learning.cancel()
    else:
        assert await learning == "nearly all of it changes in every step"
        assert pair.mine["w"].tolist() == [0] * 1600
        await asyncio.sleep(0)
        assert pair.lessons.ended == 1


async def test_a_teacher_waits_for_a_step_to_know_what_one_changes_but_not_for_long() -> None:
    pair = Pair()
    learning = await pair.begin(steps=0)
    pair.held["w"] += 1  # by a step that is not committed
    await pair.turn()
    assert pair.course.brought == 0
    await pair.turn()
    await pair.turn()
    assert pair.course.brought > 0
    learning.cancel()


async def test_what_a_step_changes_is_not_changed_in_what_was_told() -> None:
    pair = Pair()
    learning = await pair.begin()
    await pair.turn()
    first = pair.lessons.copies[0].copy()
    pair.held["w"][:] = 7
    assert pair.lessons.copies[0].tolist() == first.tolist()
    learning.cancel()


async def test_a_learner_that_is_cancelled_writes_no_more_and_says_so() -> None:
    pair = Pair()
    learning = await pair.begin()
    await pair.turn()
    learning.cancel()  # with an answer under way
    before = pair.mine["w"].tolist()
    await asyncio.gather(learning, return_exceptions=True)
    assert pair.mine["w"].tolist() == before == [0] * 1600
    await asyncio.sleep(0)
    assert pair.lessons.ended == 1


async def test_a_node_that_is_in_the_view_again_is_taught_no_more() -> None:
    pair = Pair()
    learning = await pair.begin()
    await pair.turn(pair.view(8, "a", "b"))
    with pytest.raises(PeerError, match="teaches its state no more"):
        await learning
    assert pair.lessons.open_ == {}


@pytest.mark.parametrize(
    "other", [{"w": np.zeros(8, np.uint8)}, {"v": np.zeros(1600, np.uint8)}, {"w": np.zeros(1600, np.uint8), "x": 1}]
)
async def test_a_state_of_another_kind_is_taught_no_more(other: dict[str, Any]) -> None:
    """A value that is no tensor is no matter here: it comes with the manifest of the view."""
    pair = Pair()
    learning = await pair.begin()
    pair.held = other
    await pair.turn()
    if "x" in other:
        assert not learning.done()
        learning.cancel()
    else:
        with pytest.raises(PeerError, match="teaches its state no more"):
            await learning


async def test_a_question_beyond_the_state_ends_the_lesson() -> None:
    pair = Pair()
    await pair.teacher.take(pair.view(7, "a", "b"), (1,), pair.records, pair.table)
    pair.state.version = StateVersion(1, 1)
    pair.lessons.question = Question("b", 7, 1, 99, bytes(32))
    await pair.teacher.between_steps(pair.view(8, "a"), timeout=1.0)
    assert pair.lessons.open_ == {}


async def test_a_question_of_an_earlier_lesson_is_not_answered() -> None:
    pair = Pair()
    await pair.teacher.take(pair.view(7, "a", "b"), (1,), pair.records, pair.table)
    pair.state.version = StateVersion(1, 1)
    pair.lessons.question = Question("b", 6, 1, 0, bytes(16))
    await pair.teacher.between_steps(pair.view(8, "a"), timeout=1.0)
    assert not pair.lessons.answered.done()


async def test_a_teacher_without_learners_asks_its_engine_nothing() -> None:
    nothing: Any = SimpleNamespace()
    await Teacher(RankState(), nothing, nothing).between_steps(Pair().view(8, "a"), timeout=1.0)
