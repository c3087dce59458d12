"""The steps of a meeting, without a host: every order that chance finds, and a rank that ends at each of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from typing import Any

import pytest

from quicoll.local.meeting import (
    SECRET_BYTES,
    Await,
    Dial,
    Give,
    HangUp,
    Hear,
    Identify,
    MeetingFailed,
    MeetingPlace,
    MeetingStep,
    Recognise,
    Say,
    Take,
    meeting_steps,
)

STRANGER = -1
BLOCKED = object()


class Line:
    """One end. other: the other one. owner: the rank that has it."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.other: Line = self
        self.said: deque[Any] = deque()
        self.closed = False

    def heard(self) -> bool:
        """Whether something has come, or the other end has hung up."""
        return not self.closed and bool(self.said or self.other.closed)


class House:
    """A host of `world` ranks, one of which ends before its step of number `kill`: (rank, number)."""

    def __init__(self, world: int, seed: int, *, kill: tuple[int, int] | None = None, strangers: int = 0) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.kill = kill
        self.lines: list[Line] = []
        self.steps = [0] * world
        self.ended: dict[int, dict[int, tuple[Any, ...]] | MeetingFailed | None] = {}
        self._strangers = strangers
        secrets = {
            (rank, peer): bytes([rank, peer]) * (SECRET_BYTES // 2) for rank in range(world) for peer in range(world)
        }
        self._running: dict[int, Generator[MeetingStep, Any, dict[int, tuple[Any, ...]]]] = {}
        self._asked: dict[int, MeetingStep] = {}
        for rank in range(world):
            others = [peer for peer in range(world) if peer != rank]
            self._running[rank] = meeting_steps(
                view_id=7,
                rank=rank,
                places={peer: MeetingPlace(b"\0quicoll-%d" % peer, secrets[peer, rank]) for peer in others},
                secrets={peer: secrets[rank, peer] for peer in others},
            )
            self._asked[rank] = next(self._running[rank])

    def run(self) -> None:
        """Let all take their steps; when nobody can, the time is up for all."""
        for _ in range(self._strangers):
            self._stranger()
        while self._asked:
            for rank in self.random.sample(sorted(self._asked), len(self._asked)):
                if self._step(rank):
                    break
            else:
                for rank in sorted(self._asked):
                    self._go_on(rank, None, TimeoutError("not in time"))

    def _stranger(self) -> None:
        """Somebody dials, and says whatever it is."""
        line, there = self._line(STRANGER), self._line(self.random.randrange(self.world))
        line.other, there.other = there, line
        named = bytes([self.world - 1, *bytes(7)])  # whose proof it does not have
        said = (self.random.randbytes(8), named, named + bytes(32), named + bytes(33), bytes(40), b"much more" * 9)
        if self.random.random() < 0.7:
            there.said.append(self.random.choice(said))
        line.closed = self.random.random() < 0.5

    def _line(self, owner: int) -> Line:
        self.lines.append(Line(owner))
        return self.lines[-1]

    def _step(self, rank: int) -> bool:
        """Let a rank take its step; return whether it could."""
        if self.kill == (rank, self.steps[rank] + 1):
            self._gone(rank)
            self.ended[rank] = None
            return True
        try:
            answer = self._answer(rank, self._asked[rank])
        except OSError as error:
            self._go_on(rank, None, error)
            return True
        if answer is BLOCKED:
            return False
        self._go_on(rank, answer, None)
        return True

    def _go_on(self, rank: int, answer: Any, error: OSError | None) -> None:
        self.steps[rank] += 1
        steps = self._running[rank]
        try:
            self._asked[rank] = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            self._gone(rank)
            self.ended[rank] = stop.value
        except MeetingFailed as failed:
            self._gone(rank)
            self.ended[rank] = failed

    def _gone(self, rank: int) -> None:
        del self._asked[rank]
        for line in self.lines:
            if line.owner == rank:
                line.closed = True

    def _answer(self, rank: int, step: MeetingStep) -> Any:
        match step:
            case Dial():
                peer = int(step.name.rpartition(b"-")[2])
                if peer not in self._asked:
                    raise ConnectionRefusedError("nobody is there")
                line, there = self._line(rank), self._line(peer)
                line.other, there.other = there, line
                return line
            case Await():
                heard = [line for line in self.lines if line.owner == rank and line.heard()]
                return self.random.choice(heard) if heard else BLOCKED
            case Recognise():
                return True
            case Identify():
                return f"process of {step.line.other.owner}"
            case Say() | Give():
                if step.line.other.closed:
                    raise BrokenPipeError("it has hung up")
                handles = [f"{what} of {rank}" for what in ("segment", "front", "back")]
                step.line.other.said.append(step.data if isinstance(step, Say) else handles)
            case Hear() | Take():
                assert step.line.heard(), "it would wait for one rank, and others for it"
                nothing: Any = b"" if isinstance(step, Hear) else []
                return step.line.said.popleft() if step.line.said else nothing
            case HangUp():
                step.line.closed = True
        return None


def all_met(world: int, rank: int) -> dict[int, tuple[str, ...]]:
    return {
        peer: (*(f"{what} of {peer}" for what in ("segment", "front", "back")), f"process of {peer}")
        for peer in range(world)
        if peer != rank
    }


def steps_of(world: int, rank: int) -> int:
    """Those of a rank that meets all: of each line, one more where it has dialled itself."""
    return 9 * (world - 1) + rank


@pytest.mark.parametrize("world", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(10))
def test_all_meet_all_in_whatever_order_they_take_their_steps(world: int, seed: int) -> None:
    house = House(world, seed)
    house.run()
    assert house.ended == {rank: all_met(world, rank) for rank in range(world)}
    assert house.steps == [steps_of(world, rank) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_that_ends_before_any_of_its_steps_keeps_nobody_waiting_and_nobody_has_what_another_did_not_give(
    world: int,
) -> None:
    for rank in range(world):
        for number in range(1, steps_of(world, rank) + 1):
            house = House(world, 100 * rank + number, kill=(rank, number))
            house.run()
            assert house.ended[rank] is None
            for other in range(world):
                found = house.ended[other]
                if other != rank and not isinstance(found, MeetingFailed):
                    assert found == all_met(world, other)
            if number < 7:  # it has given nobody what it brought
                assert all(isinstance(house.ended[other], MeetingFailed) for other in range(world) if other != rank)


@pytest.mark.parametrize("seed", range(20))
def test_strangers_who_are_silent_hang_up_or_say_what_they_like_do_not_end_the_meeting(seed: int) -> None:
    house = House(3, seed, strangers=6)
    house.run()
    assert house.ended == {rank: all_met(3, rank) for rank in range(3)}
