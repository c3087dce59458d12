"""A rank whose job, steps and operations tell the checker (quicoll.sim.invariants) what happens to them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from quicoll.collectives.group import Group
from quicoll.collectives.subgroups import STATE, WORLD, Scope
from quicoll.errors import QuicollError
from quicoll.job import Job
from quicoll.sim.digests import bits_digest
from quicoll.sim.disk.files import Halted
from quicoll.sim.invariants import MemoryUse
from quicoll.sim.machine import Departed
from quicoll.sim.misconduct import Forgery
from quicoll.step.context import Step
from quicoll.step.protocol import StepProtocol

if TYPE_CHECKING:
    from quicoll.collectives.context import CallContext
    from quicoll.collectives.handle import Handle
    from quicoll.config import Config
    from quicoll.engine.decisions import Decision
    from quicoll.engine.engine import Engine
    from quicoll.engine.face import EngineFace
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.sim.invariants import Checker
    from quicoll.sim.machine import Machine
    from quicoll.state.rank_state import RankState
    from quicoll.state.synchronisation import ViewState
    from quicoll.state.version import StateVersion
    from quicoll.step.attempt import StepAttempt
    from quicoll.stop import StopRequest
    from quicoll_transport.sim import HostLoop

__all__ = ["GRACE_S", "CheckedGroup", "CheckedJob", "CheckedSteps", "collectives", "memory_use", "within"]

_OF_PAIRS = ("send", "recv")  # which two ranks call and the others do not
GRACE_S = 1.0  # of the host's own clock: a deadline's own work, and the answer's way back


class CheckedJob(Job):
    """A job whose every step and collective is looked at."""

    def __init__(
        self,
        config: Config,
        engine: EngineFace,
        runtime: Runtime,
        view: View,
        *,
        stop: StopRequest,
        machine: Machine,
        checker: Checker,
        compute_s: float,
    ) -> None:
        super().__init__(config, engine, runtime, view, stop)
        self._compute_s = compute_s
        self.group = CheckedGroup(self._context, machine=machine, checker=checker)
        self._steps = CheckedSteps(
            self._context,
            engine,
            runtime,
            state=self._state,
            config=config,
            stop=stop,
            machine=machine,
            checker=checker,
            compute_s=compute_s,
        )
        self._checker = checker
        Forgery(self._state, lambda: machine.forges, machine.loop, lambda what: self._forged(machine, what))

    def _forged(self, machine: Machine, what: str) -> None:
        machine.forgeries[what] = machine.forgeries.get(what, 0) + 1
        machine.note("forged", what=what)
        self._checker.forged(self.node)

    def flip_bit(self, bit: int) -> str:
        """Flip a bit of the registered state, where its memory is what `save` gives.

        Args:
            bit: Counted over the bits of all tensors that can be written, round and round.
        Returns:
            The path of the tensor; "" where there is none.
        """
        flat = self._state.read()
        tensors = [] if flat is None else [part for part in flat.tensors if _writable(part.value)]
        bits = 8 * sum(part.value.nbytes for part in tensors)
        if not bits:
            return ""
        self._checker.spoiled(self.node)
        bit %= bits
        for part in tensors:
            if bit < 8 * part.value.nbytes:
                part.value.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
                return part.path
            bit -= 8 * part.value.nbytes
        raise AssertionError("a bit beyond the last one")

    def step(self, *, overlap: bool = False) -> Step:
        return ComputedStep(self._steps, self._compute_s, overlap=overlap)


class ComputedStep(Step):
    """A step whose body begins `compute_s` seconds after its entry: what the user's code computes takes no time of its
    own here, and a loop that never sleeps would do thousands of steps between two faults."""

    def __init__(self, protocol: StepProtocol, compute_s: float, *, overlap: bool) -> None:
        super().__init__(protocol, overlap=overlap)
        self._compute_s = compute_s

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self._compute_s:
            try:
                await asyncio.sleep(self._compute_s)
            except BaseException as error:  # cancelled: who fails to enter is not asked to leave
                await self.__aexit__(type(error), error, error.__traceback__)
                raise
        return self


class CheckedSteps(StepProtocol):
    """A step protocol that reports each of its turns to the checker."""

    def __init__(
        self,
        context: CallContext,
        engine: EngineFace,
        runtime: Runtime,
        *,
        state: RankState,
        config: Config,
        stop: StopRequest,
        machine: Machine,
        checker: Checker,
        compute_s: float,
    ) -> None:
        super().__init__(
            context,
            engine,
            runtime,
            state=state,
            state_group=Group(context, STATE),
            hold_timeout=config.hold_timeout,
            stop=stop,
            stop_timeout=config.stop_timeout,
            check_every=config.state_check_every,
            learn_from=config.learn_from_bytes,
        )
        self._config = config
        self._machine = machine
        self._checker = checker
        self._compute_s = compute_s
        self._entered: dict[str, bytes] = {}  # digests of the state's tensors when the step was entered
        self._attempted: StateVersion | None = None  # what that state was; None once it was compared or handed over

    def _held(self) -> Any:
        """What this rank has in common with the others; None where it has registered nothing."""
        return None if self.state.save is None else _without(self.state.save(), self.state.own)

    def _tensors(self) -> dict[str, bytes]:
        return {str(name): bits_digest(value) for name, value in (self._held() or {}).items()}

    def _report_state(self) -> None:
        version = self.state.version
        self._checker.state(self._config.node, version.decision, version.step, self._held())

    async def synchronise(self) -> ViewState:
        self._look_at_what_is_left()
        self._attempted = None
        version = self.state.version
        if version.step and not version.decision and not self.state.torn:
            self._checker.brought(self._config.node, version.step)
        try:
            found = await super().synchronise()
        finally:
            if self.state.torn:
                self._checker.torn(self._config.node)
        if not found.learners:
            self._checker.compared(self._config.node)
            if found.giver is not None:
                self._report_taken(found, found.giver)
            self._report_state()
        return found

    def _report_taken(self, found: ViewState, giver: int) -> None:
        nodes, version = self._context.view.nodes, found.version
        self._checker.taken(
            self._config.node,
            nodes[giver],
            version.decision,
            version.step,
            self._held(),
            confirmed=bool(found.confirmed_by),
            members=nodes,
        )

    async def enter(self, attempt: StepAttempt) -> None:
        # Waiting for a view, then the agreements by which ranks come to one state, each bounded by the job's timeout:
        # one row, three to name what differs, size, manifest and the tensors.
        limit = self._config.hold_timeout + 8 * self._config.timeout
        if self._machine.departs:
            raise Departed
        self._look_at_what_is_left()
        began = self._machine.loop.time()
        try:
            with within(limit, "the entry of a step", machine=self._machine, checker=self._checker):
                await super().enter(attempt)
        except QuicollError:
            # Whoever tries again at once would otherwise do so for ever at one moment.
            if self._machine.loop.time() == began:
                await asyncio.sleep(self._compute_s)
            raise

    async def proceed(self, attempt: StepAttempt) -> None:
        limit = self._config.hold_timeout + self._config.timeout  # for the decision, and for who learns between steps
        with within(limit, "the begin of a step", machine=self._machine, checker=self._checker):
            await super().proceed(attempt)

    async def begin(self, attempt: StepAttempt, view: View) -> None:
        await super().begin(attempt, view)
        self._checker.began(self._config.node, attempt.number, view.view_id)
        self._machine.note("step_began", step=attempt.number, view=view.view_id)
        self._entered, self._attempted = self._tensors(), self.state.version

    def _look_at_what_is_left(self) -> None:
        """After a step that was not committed the state is what it was, however the ranks agree on another one later.

        It is looked at when the next one is entered, since a loop may set back by itself what it has changed.
        """
        if self._attempted == self.state.version:
            self._checker.not_committed(self._config.node, self.state.version.step + 1, self._entered, self._tensors())

    async def commit(self, attempt: StepAttempt, view_id: int, unfinished: tuple[str, ...]) -> None:
        changed = {name: bits for name, bits in self._tensors().items() if self._entered.get(name) != bits}

        def cast(voted_in: int, index: int) -> None:
            if voted_in == view_id:
                self._checker.voted(self._config.node, view_id, index)
                self._checker.habits.changed(self._config.node, view_id, index, attempt.number, changed)

        self._machine.on_cast = cast
        self._machine.on_vote()
        engine = self._machine.engine
        carrier = None if engine is None else memory_use(engine, view_id, self._context.view.nodes)
        if carrier is not None:
            self._checker.carries(self._config.node, view_id, carrier)
        with within(self._config.hold_timeout, "a vote", machine=self._machine, checker=self._checker):
            await super().commit(attempt, view_id, unfinished)

    async def decided(self, attempt: StepAttempt, decision: Decision) -> None:
        self._checker.decided(self._config.node, self._context.view.view_id, decision.index, decision.commit)
        await super().decided(attempt, decision)

    async def apply(self, attempt: StepAttempt, index: int) -> None:
        await super().apply(attempt, index)
        self._machine.commits += 1
        self._report_state()


class CheckedGroup(Group):
    """A group whose every collective is held to its deadline, and whose tensors are looked at before and after."""

    def __init__(self, context: CallContext, scope: Scope = WORLD, *, machine: Machine, checker: Checker) -> None:
        super().__init__(context, scope)
        self._machine = machine
        self._checker = checker

    def _divided(self, scope: Scope) -> CheckedGroup:
        return CheckedGroup(self._context, scope, machine=self._machine, checker=self._checker)


def _checked(name: str) -> Callable[..., Handle[Any]]:
    inner: Callable[..., Handle[Any]] = getattr(Group, name)

    @functools.wraps(inner)
    def collective(self: CheckedGroup, *args: Any, **settings: Any) -> Handle[Any]:
        machine, checker, node = self._machine, self._checker, self._machine.host.name
        out = settings.get("out")
        timeout = settings.get("timeout")
        limit = self._context.config.timeout if timeout is None else timeout
        given = [args, *((key, settings[key]) for key in sorted(settings) if key != "out")]  # tensors may have names
        inputs, target = bits_digest(given), bits_digest((out,))
        view, group_id = self._context.view, self._scope.group_id
        try:
            handle = inner(self, *args, **settings)
        except Halted:  # others may have heard of the call before its caller was ended
            if name not in _OF_PAIRS:
                checker.called(node, view.view_id, group_id)
            raise
        machine.note("collective_began", op=name)
        call = None
        if name not in _OF_PAIRS:
            members = [view.members[rank].node for rank in self.ranks]
            call = checker.called(node, view.view_id, group_id)
        loop, start, disturbed = machine.loop, machine.loop.time(), machine.disturbances

        def ended(future: asyncio.Future[int]) -> None:
            # Before whoever awaits it goes on, and before a result is handed over: the tensors are still our business.
            error = None if future.cancelled() else future.exception()
            fine = not future.cancelled() and error is None
            if error is not None:
                machine.troubled(error)
            machine.note("collective_ended", op=name, fine=fine)
            if fine and call is not None:
                checker.returned(node, call, name, members)
            took = loop.time() - start
            _look_at_time(took, limit, name, disturbed, loop, machine, checker)
            if isinstance(error, QuicollError) and took < limit and machine.disturbances == disturbed:
                checker.failed(node, error)
            if bits_digest(given) != inputs:
                checker.break_("untouched", f"{name} changed its input", node=node)
            if not handle.pending.operation.in_place and bits_digest((out,)) != target:
                what = "changed its out before the result was asked for" if fine else "failed and changed its out"
                checker.break_("untouched", f"{name} {what}", node=node)

        handle.add_done_callback(ended)
        return handle

    return collective


def collectives() -> list[str]:
    """The public collectives of a group: what gives a handle."""
    found: dict[str, None] = {}
    for kind in Group.__mro__:
        for name, member in vars(kind).items():
            returns = str(getattr(member, "__annotations__", {}).get("return", ""))
            if not name.startswith("_") and returns.startswith("Handle"):
                found[name] = None
    return sorted(found)


for _name in collectives():
    setattr(CheckedGroup, _name, _checked(_name))


@contextmanager
def within(limit: float, what: str, *, machine: Machine, checker: Checker) -> Iterator[None]:
    """The body ends within `limit` seconds of the host's own clock, and GRACE_S."""
    loop = machine.loop
    start, disturbed = loop.time(), machine.disturbances
    try:
        yield
    finally:
        _look_at_time(loop.time() - start, limit, what, disturbed, loop, machine, checker)


def _look_at_time(
    took: float, limit: float, what: str, disturbed: int, loop: HostLoop, machine: Machine, checker: Checker
) -> None:
    if not loop.dead and machine.disturbances == disturbed and not machine.disturbed and took > limit + GRACE_S:
        name = machine.host.name
        checker.break_("deadline", f"{what} on {name} took {took:.3f} s, {limit:g} s were given", node=name)


def memory_use(engine: Engine, view_id: int, nodes: Sequence[str]) -> MemoryUse | None:
    """Return what a rank uses of its host's memory; None where the view is not the one installed last. nodes: of it."""
    ranks = engine.by_memory(view_id)
    return None if ranks is None else MemoryUse(engine.near(view_id) is not None, tuple(nodes[rank] for rank in ranks))


def _without(state: Any, own: tuple[tuple[str, ...], ...], path: tuple[str, ...] = ()) -> Any:
    """A state without what is each rank's own."""
    if not isinstance(state, Mapping) or not own:
        return state
    below = {key: (*path, str(key)) for key in state}
    return {key: _without(value, own, below[key]) for key, value in state.items() if below[key] not in own}


def _writable(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.flags.writeable and value.flags.c_contiguous
