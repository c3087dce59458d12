"""One rank's step protocol, with an engine that answers as a test says, and a caller's context; both are fakes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.engine.decisions import Decision
from quicoll.errors import AuditError, Partitioned, QuicollError
from quicoll.membership.view import Member, View
from quicoll.state.comparison import row
from quicoll.state.rank_state import RankState
from quicoll.state.tree import flatten
from quicoll.step.context import Step
from quicoll.step.protocol import StepProtocol
from quicoll.stop import StopRequest
from quicoll_transport.sim import World

if TYPE_CHECKING:
    from quicoll.state.version import StateVersion

__all__ = [
    "HOLD",
    "LEARN_FROM",
    "STOP_TIMEOUT",
    "FakeAuditor",
    "FakeContext",
    "FakeEngine",
    "FakeGroup",
    "FakeRuntime",
    "Rank",
    "aborted",
    "committed",
    "raising",
    "told",
    "view",
    "virtually",
]

HOLD = 60.0
TIMEOUT = 30.0
STOP_TIMEOUT = 2.0
LEARN_FROM = 64


def view(number: int, world: int = 1, *, committed_step: int = 0) -> View:
    members = tuple(Member(rank=rank, node=f"worker-{rank}", incarnation=1) for rank in range(world))
    return View(view_id=number, members=members, seed=0, committed_step=committed_step, committed_view=0)


def committed(index: int = 11) -> Decision:
    return Decision(index, True, "", (), "", "failed")


def aborted(kind: Any = "failed") -> Decision:
    return Decision(11, False, "worker-1 was lost", ("worker-1",), "worker-1", kind)


class FakeRuntime:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def call(self, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return asyncio.ensure_future(work)

    def begin(self, start: Callable[[Any], Any], sender: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self.loop.create_future()

        def ended(value: Any, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        begun = start(ended)
        answer.add_done_callback(lambda _: begun.cancel())
        return answer

    def post(self, work: Callable[[], None]) -> None:
        work()

    async def aclose(self) -> None: ...


class FakeEngine:
    """Answers with `answers[method]`: a value, an error to raise, or a function. `calls`: what was asked.

    view_at_work: what the engine says of itself; 0 has each entry ask for a view.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {
            "wait_view": view(1),
            "vote": committed(),
            "unanswered": None,
            "decision": committed(),
            "give_up": None,
            "break_view": None,
            "step_out": None,
            "ask_to_leave": False,
        }
        self.view_at_work = 0
        self.endpoint: Any = None
        self.lessons: Any = None
        self.block_lessons: Any = None

    async def _answer(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, *arguments))
        answer = self.answers[method]
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, asyncio.Event):  # an answer that nobody waits for to its end
            await answer.wait()
        if isinstance(answer, asyncio.Future):  # one that the test gives in a while
            return await asyncio.shield(answer)
        return answer() if callable(answer) else answer

    async def wait_view(self, timeout: float, *, after: int = 0) -> Any:
        return await self._answer("wait_view", timeout, *([after] if after else []))

    async def ask_to_leave(self) -> bool:
        return bool(await self._answer("ask_to_leave"))

    async def step_out(self, view_id: int) -> None:
        await self._answer("step_out", view_id)

    def step_in(self) -> None:
        self.calls.append(("step_in",))

    def begin(self, view_id: int, number: int) -> None:
        self.calls.append(("begin", view_id, number))

    def _tell(self, ended: Callable[[Any, Any], None], work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        def over(task: asyncio.Task[Any]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            ended(None if error is not None else task.result(), error)

        task = asyncio.ensure_future(work)
        task.add_done_callback(over)
        return task

    def vote(self, view_id: int, digest: bytes, groups: Any, ended: Any, *, timeout: float, unfinished: int) -> Any:
        return self._tell(ended, self._answer("vote", view_id, digest, groups, timeout, unfinished))

    async def unanswered(self, view_id: int, reason: str) -> Any:
        return await self._answer("unanswered", view_id, reason)

    def decision(self, view_id: int, index: int, ended: Any, *, timeout: float) -> Any:
        return self._tell(ended, self._answer("decision", view_id, index, timeout))

    async def give_up(self, view_id: int, reason: str) -> None:
        await self._answer("give_up", view_id, reason)

    async def break_view(self, view_id: int, error: QuicollError) -> None:
        await self._answer("break_view", view_id, error)

    def state_received(self, rank: int, step: int, index: int, confirmed_by: list[str]) -> None:
        self.calls.append(("state_received", rank, step, index, *confirmed_by))

    def state_torn(self, step: int, cause: str) -> None:
        self.calls.append(("state_torn", step, cause))

    @property
    def observers(self) -> FakeEngine:
        return self

    @property
    def voting(self) -> FakeEngine:
        return self

    def emit(self, kind: str, **fields: Any) -> None:
        self.calls.append((kind, fields))

    def asked(self, method: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == method]


class FakeAuditor:
    def __init__(self, error: AuditError | None = None) -> None:
        self.error = error
        self.begun: list[dict[str, int]] = []

    def begin(self, **step: int) -> None:
        self.begun.append(step)

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class FakeContext:
    """Of the caller: one rank."""

    def __init__(self) -> None:
        self.view = view(1)
        self.config = SimpleNamespace(timeout=TIMEOUT)
        self.rank = 0
        self.world_size = 1
        self.is_spare = False
        self.auditor: FakeAuditor | None = None
        self.unfinished = 0
        self.undecided: int | None = None
        self.log: list[Any] = []

    def enter(self, view: View) -> None:
        self.view = view

    def open(self, step: int, at_commit: Any = None) -> None:
        self.log.append(step)

    def close(self) -> None:
        self.log.append("closed")

    def settle(self) -> int:
        return self.unfinished

    def digests(self, step: int) -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
        return b"digest of %d" % step, ((5, b"of group 5"),)


HEARD = 2
"""Words of the digest of what a rank has heard."""


class FakeGroup:
    """Of this rank, and of others that hold `others`, tell it as rows, and have heard the same."""

    def __init__(self) -> None:
        self.rank = 0
        self.compared = 0
        self.others: list[Any] = []
        self.error: BaseException | None = None

    @property
    def world_size(self) -> int:
        return 1 + len(self.others)

    async def all_gather(self, mine: Any, *, counts: Sequence[int]) -> Any:
        assert counts == [len(mine)] * self.world_size
        self.compared += len(mine) != HEARD
        if self.error is not None:
            raise self.error
        if len(mine) == HEARD:
            return np.concatenate([mine] * (1 + len(self.others)))
        return np.concatenate([*self.others[: self.rank], mine, *self.others[self.rank :]])


def told(version: StateVersion, held: Any) -> Any:
    """The row of a rank that holds this."""
    state = RankState()
    state.version = version
    return row(state, flatten(held), check_every=0, learn_from=LEARN_FROM)


class Rank:
    def __init__(self, check_every: int = 0) -> None:
        self.engine = FakeEngine()
        self.context = FakeContext()
        self.group = FakeGroup()
        self.state = RankState()
        self.stop = StopRequest()
        self.protocol = StepProtocol(
            self.context,
            self.engine,
            FakeRuntime(),
            state=self.state,
            state_group=self.group,
            hold_timeout=HOLD,
            check_every=check_every,
            learn_from=LEARN_FROM,
            stop=self.stop,
            stop_timeout=STOP_TIMEOUT,
        )
        self.ran: list[int] = []

    def step(self, *, overlap: bool = False) -> Step:
        return Step(self.protocol, overlap=overlap)

    async def one(self, body: Callable[[], None] = lambda: None) -> int:
        """A step whose callbacks note its number, and whose body is as given."""
        async with self.step() as step:
            step.on_commit(lambda: self.ran.append(step.number))
            body()
        return step.number

    async def in_doubt(self, **answers: Any) -> None:
        """A step that was voted for, and whose decision did not come in time."""
        self.engine.answers |= {"vote": Partitioned("no decision within 60 s"), "unanswered": (1, 11), **answers}
        with pytest.raises(Partitioned):
            await self.one()
        assert self.protocol.in_doubt


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test on a virtual clock: time stands still while it computes, whatever else the machine does."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        with World(1) as world:
            task = world.host("a").start().create_task(test(**arguments))
            world.run(limit_ns=10_000_000_000)
            task.result()

    return run
