"""A rank that is behind by a large state learns it beside the steps of the others, before it takes part.

When a view begins all ranks tell what they hold (synchronisation.py). If some are behind a job that is at work, by a
state of `learn_from_bytes` or more, all ranks see it from the same numbers (`who_learns`), and those are learners:

    named       in the view   each is given a teacher, one of the holders of that state (`teachers`), which sends it
                              its manifest
    out         Learn         the coordinator makes the next view without them, as if they had left; the others go on
    learning    outside       they ask the teacher for chunks (quicoll.engine.lessons); `Course` says for which, and
                              when that is enough
    back        Learned       they are proposed at the next boundary; there `transfer` moves what has changed since

A rank has to be in a view to be named: only there it has said by `register_state` what its state is made of, and only
who was in a view with the teacher, by the coordinator's word, is given anything. So learning costs the others two views
more than a transfer, each a few round trips and a digest of the state.

Where every step changes nearly all of the state nothing of it can be learned: it would travel one and a half times in
vain. So a teacher takes the digests of SAMPLES chunks when it is named, and again after a step. Where MOSTLY of them
are others by then it says so, and the learner is back at once; the view hands it the state as if it had never left.

The way is that of a virtual machine that moves while it runs (Clark et al. 2005, "Live migration of virtual machines").
The learner asks with the digests of its own chunks, in passes over the whole state; the teacher answers with those that
are others there. It has learned enough after a pass that brought FEW chunks or less, or as soon as a pass has brought
more than half as many as the one before: what changes in every step is for the view. So all passes together bring at
most twice the state.

The teacher reads between two steps, when no code of the user runs: at the entry of a step, on its caller's thread. What
has changed it copies (BATCH chunks at most), and sends while the step goes on. It reads for AT_ONCE_NS at most, or for
one chunk, and then not again for REST times as long as that took: a tenth of its time. Chunks of one answer are of one
step, those of different answers of different ones: what a learner has is no state, which is no matter, since nothing
but the bytes of each chunk counts, and `transfer` looks at all of them.

    failure                                     what follows
    the teacher is lost, ends, has another      the learner is back, with what it has
      state by now, or says nothing in time
    the teacher's steps are not committed       it answers without knowing what a step changes
    the coordinator is lost, or starts anew     the learner joins again, and so is back
    the others become too few for a view        the coordinator has the learner in one at once, which ends its learning
    the learner is lost                         it is in no view; the teacher forgets it with the link
    the learner's caller gives up               it is back; the state is torn, as after any transfer that broke

A spare that is kept warm (`Member.spare`, quicoll.membership.coordinator.spares) learns in the same way from the view
on in which it was shown, in passes without an end, with rests of REST passes between them. Where its teacher is gone it
says so, and is shown in another view. Where nearly all of the state changes in every step it asks for nothing, and only
waits.

Invariants. A rank that learns is torn from the first byte on, holds no step for the coordinator, and counts as behind
every version until a transfer has ended. It learns once, until it holds a whole state again: whatever its learning came
to, the next view hands it the state. It writes to its state's memory only while its caller waits in the entry of a
step, and no more once that wait is over. Each wait for the teacher has the job's timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from quicoll.engine.lessons import BATCH, MAX_ASKED, NOTHING, Answer
from quicoll.errors import LocalError
from quicoll.state.chunks import DIGEST_BYTES, ChunkedState, ChunkTable
from quicoll.state.tensor_memory import readable

if TYPE_CHECKING:
    from quicoll.engine.lessons import LessonTraffic, Question
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.numerics.dtypes import Array
    from quicoll.state.manifest import TensorRecord
    from quicoll.state.rank_state import RankState
    from quicoll.state.tensor_memory import TensorMemory
    from quicoll.state.version import HeldState, StateComparison, StateVersion

__all__ = [
    "AT_ONCE_NS",
    "FEW",
    "MOSTLY",
    "REST",
    "SAMPLES",
    "Course",
    "Lesson",
    "Share",
    "Teacher",
    "learn",
    "teachers",
    "who_learns",
]

log = logging.getLogger("quicoll")

FEW = 4
"""Chunks that a transfer brings in no time worth another pass: one window of it."""
SAMPLES = 16
"""Chunks, spread evenly, by which a teacher sees how much of the state a step changes."""
MOSTLY = 0.75
AT_ONCE_NS = 50_000_000
REST = 9


def who_learns(
    found: StateComparison, held: Sequence[HeldState], *, learn_from: int, min_world_size: int
) -> tuple[int, ...]:
    """Return the ranks that are to learn the state outside of the view; the same on all of its ranks.

    None does before a step was committed, since then nobody has anything to go on with; nor where those that learn
    would be more than those that go on, or leave fewer than a view has.

    Args:
        found: What follows from `held`.
        held: What all ranks have told.
        learn_from: Least bytes of a state that is learned; 0: none is.
        min_world_size: Least ranks of a view.
    """
    if found.giver is None or not learn_from or not found.newest.decision:
        return ()
    learners = tuple(rank for rank in found.behind if not held[rank].learned)
    rest = len(held) - len(learners)
    large = held[found.giver].nbytes >= learn_from
    return learners if large and len(learners) <= rest and rest >= min_world_size else ()


def teachers(learners: Sequence[int], holders: Mapping[int, int], sites: Sequence[str]) -> dict[int, int]:
    """Return which holder teaches each learner: all about as many, one of the learner's own site where that may be.

    Args:
        learners: Ranks.
        holders: Ranks that hold the state, at least one, and how many learn from each already.
        sites: Of all ranks.
    """
    found: dict[int, int] = {}
    taught = dict(holders)
    for learner in learners:
        teacher = min(holders, key=lambda rank: (taught[rank], sites[rank] != sites[learner], rank))
        taught[teacher] += 1
        found[learner] = teacher
    return found


class Course:
    """Which chunks a learner asks for next, and when it has learned enough. Pure.

    position: the first chunk to ask for. over: it has learned enough. passes: those that are complete. brought: chunks
    that came, in all passes. endless: whether it never is enough, as for a spare that stands by.
    """

    def __init__(self, chunks: int, *, endless: bool = False) -> None:
        """Begin with the first pass over so many chunks."""
        self.endless = endless
        self.position = 0
        self.over = not chunks
        self.passes = 0
        self.brought = 0
        self._chunks = chunks
        self._here = 0  # brought in this pass
        self._before: int | None = None  # in the one before

    def looked(self, count: int, brought: int) -> None:
        """Take in that the teacher has looked at the next `count` chunks, `brought` of which came."""
        self.position += count
        self.brought += brought
        self._here += brought
        self.over = not self.endless and self._before is not None and 2 * self._here > self._before
        if self.position >= self._chunks:
            self.over = not self.endless and (self.over or self._here <= FEW)
            self.passes += 1
            self.position, self._before, self._here = 0, self._here, 0


class Share:
    """When a teacher may read, on its caller's clock, so that it costs a tenth of the time. Pure."""

    def __init__(self) -> None:
        """It may read now."""
        self._began_ns = 0
        self._free_ns: int | None = None

    def begin(self, now_ns: int) -> bool:
        """Begin to read. Return whether it may."""
        if self._free_ns is not None and now_ns < self._free_ns:
            return False
        self._began_ns = now_ns
        return True

    def lasts(self, now_ns: int) -> bool:
        """Return whether it may read on."""
        return now_ns - self._began_ns < AT_ONCE_NS

    def end(self, now_ns: int) -> None:
        """It has read enough for now."""
        self._free_ns = now_ns + REST * (now_ns - self._began_ns)


# -- the learner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What a learner is to learn.

    Attributes:
        number: Of the view in which that was agreed.
        teacher: The node that has the state.
        incarnation: Of its process.
        state: The memory in which the chunks end.
    """

    number: int
    teacher: str
    incarnation: int
    state: ChunkedState


async def learn(lesson: Lesson, course: Course, lessons: LessonTraffic, runtime: Runtime, *, timeout: float) -> str:
    """Ask for chunks until that is enough. When this ends, however it does, nobody writes to the memory any more.

    Args:
        lesson: What is learned.
        course: Of as many chunks; what came of it, if this raises.
        lessons: The engine's.
        runtime: The loop on which the engine lives.
        timeout: Seconds for each answer.
    Returns:
        Why no more of it is learned; "" where it was enough.
    Raises:
        QuicollError: The teacher teaches no more, or not in time.
    """
    state, number = lesson.state, 0
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        while not course.over:
            first = course.position
            if not first:
                if course.endless and course.passes:  # let the teacher rest
                    await asyncio.sleep(REST * (clock() - began))
                began = clock()
            asked = range(first, min(first + MAX_ASKED, len(state.table)))
            digests = []
            for chunk in asked:
                digests.append(state.digest(chunk))
                await asyncio.sleep(0)
            number += 1
            answer = await runtime.call(
                lessons.ask(
                    lesson.teacher,
                    lesson.incarnation,
                    lesson.number,
                    number=number,
                    first=first,
                    digests=b"".join(digests),
                    sizes=[state.table.nbytes(chunk) for chunk in asked],
                    timeout=timeout,
                )
            )
            if not answer.looked:
                return "nearly all of it changes in every step"
            for place, data in answer.chunks.items():
                state.write(first + place, data)
            course.looked(answer.looked, len(answer.chunks))
        return ""
    finally:
        runtime.loop.call_soon_threadsafe(lessons.end, lesson.teacher, lesson.incarnation, lesson.number)


# -- the teacher -----------------------------------------------------------------------------------------------------


class _Opened(Sequence["TensorMemory"]):
    """The tensors of a state for reading, each opened when a chunk of it is read."""

    def __init__(self, records: Sequence[TensorRecord], values: Sequence[Any]) -> None:
        self._records, self._values = records, values
        self._opened: dict[int, TensorMemory] = {}

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, number: int) -> TensorMemory: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[TensorMemory]: ...
    def __getitem__(self, number: int | slice) -> TensorMemory | Sequence[TensorMemory]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if number not in self._opened:
            record = self._records[number]
            self._opened[number] = readable(record.path, self._values[number], dtype=record.dtype, shape=record.shape)
        return self._opened[number]


@dataclass(slots=True, eq=False)
class _Pupil:
    """version: of the state whose samples these are, digests by chunk; None once they were looked at, or it took too
    long to have others. waited: an entry of a step has come without a step since."""

    lesson: int
    records: Sequence[TensorRecord]
    table: ChunkTable
    version: StateVersion | None
    samples: dict[int, bytes]
    waited: bool = False


class Teacher:
    """One rank's side of all lessons that it gives, on its caller's loop."""

    def __init__(self, state: RankState, lessons: LessonTraffic, runtime: Runtime) -> None:
        """Begin without a learner.

        Args:
            state: What this rank holds.
            lessons: The engine's.
            runtime: The loop on which the engine lives.
        """
        self._state = state
        self._lessons = lessons
        self._runtime = runtime
        self._pupils: dict[str, _Pupil] = {}
        self._share = Share()

    @property
    def pupils(self) -> int:
        """How many learn from this rank."""
        return len(self._pupils)

    async def take(
        self, view: View, learners: Sequence[int], records: Sequence[TensorRecord], table: ChunkTable
    ) -> None:
        """Take learners, before they are told of it.

        Args:
            view: In which that was agreed.
            learners: Their ranks in it.
            records: The state's manifest.
            table: Its chunks.
        """
        state = self._chunked(records, table)
        every = max(len(table) / SAMPLES, 1.0)
        chosen = [int(every * number) for number in range(min(SAMPLES, len(table)))]
        for rank in learners:
            member = view.members[rank]
            samples = {} if state is None else {chunk: state.digest(chunk) for chunk in chosen}
            self._pupils[member.node] = _Pupil(view.view_id, records, table, self._state.version, samples)
            await self._runtime.call(self._lessons.open(view.view_id, member.node, member.incarnation))

    async def between_steps(self, view: View, *, timeout: float) -> None:
        """Answer a question, if one waits and it is time. No code of the user may run meanwhile.

        Args:
            view: The view at work. Who is in it learns no more.
            timeout: Seconds that a chunk has to arrive.
        Raises:
            LocalError: What `save` returned is no state.
        """
        if not self._pupils:
            return
        for node in [node for node, pupil in self._pupils.items() if view.rank_of(node) is not None]:
            if self._pupils[node].lesson != view.view_id:
                await self._forget(node)
        if not self._pupils or not self._share.begin(_now_ns()):
            return
        question, nodes = await self._runtime.call(self._lessons.next_question(but=self._too_early()))
        self._pupils = {node: pupil for node, pupil in self._pupils.items() if node in nodes}
        pupil = None if question is None else self._pupils.get(question.node)
        if question is None or pupil is None or pupil.lesson != question.lesson:
            return
        self._share.begin(_now_ns())
        answer = self._read(question, pupil)
        self._share.end(_now_ns())
        if answer is None:
            await self._forget(question.node)
        else:
            await self._runtime.call(self._lessons.answer(question, answer, timeout=timeout))

    async def end_lessons(self) -> None:
        """Teach nobody any more. Who has learned is back with what it has."""
        for node in list(self._pupils):
            await self._forget(node)

    def _too_early(self) -> tuple[str, ...]:
        """Learners for whom no step was done yet: what one changes is not known. At the second entry it is no matter,
        since steps may fail again and again."""
        early = []
        for node, pupil in self._pupils.items():
            if pupil.version == self._state.version:
                if pupil.waited:
                    pupil.version = None
                else:
                    early.append(node)
                pupil.waited = True
        return tuple(early)

    async def _forget(self, node: str) -> None:
        del self._pupils[node]
        await self._runtime.call(self._lessons.close(node))

    def _read(self, question: Question, pupil: _Pupil) -> Answer | None:
        """What is to be told; None where the state is not made of what the learner knows of, or has no such chunks."""
        state = self._chunked(pupil.records, pupil.table)
        if state is None:
            return None
        asked = [question.digests[at : at + DIGEST_BYTES] for at in range(0, len(question.digests), DIGEST_BYTES)]
        if question.first + len(asked) > len(pupil.table):
            return None
        chunks: dict[int, Array] = {}
        looked = 0
        try:
            if pupil.version is not None:
                pupil.version = None
                others = sum(state.digest(chunk) != before for chunk, before in pupil.samples.items())
                if others >= MOSTLY * len(pupil.samples) > 0:
                    return NOTHING
            while looked < len(asked) and len(chunks) < BATCH and (not looked or self._share.lasts(_now_ns())):
                chunk = question.first + looked
                if state.digest(chunk) != asked[looked]:
                    chunks[looked] = state.read(chunk).copy()  # the step that follows may change it
                looked += 1
        except LocalError as error:
            log.info("%s learns no more of the state here: %s", question.node, error)
            return None
        return Answer(looked, chunks)

    def _chunked(self, records: Sequence[TensorRecord], table: ChunkTable) -> ChunkedState | None:
        """This rank's state for reading; None where it is not made of these tensors."""
        values = self._state.values()
        if [path for path, _ in values] != [record.path for record in records]:
            return None
        return ChunkedState(_Opened(records, [value for _, value in values]), table)


def _now_ns() -> int:
    return round(asyncio.get_running_loop().time() * 1e9)
