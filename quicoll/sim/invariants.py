"""Invariants of every run, whatever breaks; checked while it runs and at its end.

    same-bits       the state after a decision has one digest on all ranks that hold it, and so has the state after a
                    step; where the workload knows it, that of a computation without any network
    one-decision    a step has one decision: the journal takes each number once, in order, and no rank hears of a vote
                    that another rank heard otherwise, nor of a commit that the journal does not hold
    all-or-none     a step is committed with the votes of all members of its view, and applied by none without a commit:
                    who tries it again has the state from which it tried it before
    durable         a commit that the journal has taken is in it after every restart; a rank's state never goes back
                    while its process lives, and a rank never begins a step from an older state than another living
                    rank holds
    quorum          a view has more than half of the members of the one before it that have not left
    deadline        a collective ends by its timeout, a step's entry and its vote by theirs, with GRACE_S of the host's
                    own time beyond them (not looked at where the host was paused, slow or leapt meanwhile)
    one-verdict     of a view that ended, operations that blame a node all blame one, on every rank, and for one kind of
                    failure (but for who has run out of time; and of two calls that differ each may be the wrong one)
    together        a collective that went well on a rank was called by all ranks of its group before it ended there
    untouched       inputs of a collective are the same after it, and `out` as well where it failed and was not written
                    in place
    memory          what a link holds beyond posted buffers is within its credit; there are no links to strangers
    no-leftover     a process that ended by itself has no task, timer or socket left
    progress        after the last healing every rank commits a step within the run's `recovery` seconds, or is done
    no-surprise     no error reaches an event loop's exception handler; a process ends by an error that blames the
                    world around it, or by none

Nothing here uses what it checks: the journal's records are followed as they are appended, digests are taken with
BLAKE2b over names, types, shapes and bytes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from quicoll.collectives.group import Group
from quicoll.collectives.shards import Leaves
from quicoll.collectives.subgroups import STATE, WORLD, Scope
from quicoll.errors import Corrupted, Mismatch, PeerError, QuicollError
from quicoll.job import Job
from quicoll.membership.coordinator.history import Committed, InstalledView, Left
from quicoll.sim.errors import InvariantBroken
from quicoll.sim.hints import Habits
from quicoll.sim.machine import Departed
from quicoll.step import Step, StepProtocol

if TYPE_CHECKING:
    from quicoll.collectives.context import CallContext
    from quicoll.collectives.handle import Handle
    from quicoll.config import Config
    from quicoll.engine.decisions import Decision
    from quicoll.engine.engine import Engine
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.coordinator.history import History, JournalRecord
    from quicoll.membership.journal import RecordStore
    from quicoll.membership.view import View
    from quicoll.sim.machine import Machine
    from quicoll.state.rank_state import RankState
    from quicoll.state.version import StateVersion
    from quicoll.step import StepAttempt
    from quicoll.stop import StopRequest
    from quicoll_transport.sim import HostLoop

__all__ = ["GRACE_S", "INVARIANTS", "CheckedGroup", "CheckedJob", "CheckedSteps", "CheckedStore", "Checker"]

_OF_PAIRS = ("send", "recv")  # which two ranks call and the others do not
GRACE_S = 1.0  # of the host's own clock: a deadline's own work, and the answer's way back

INVARIANTS = (
    "same-bits",
    "one-decision",
    "all-or-none",
    "durable",
    "quorum",
    "deadline",
    "one-verdict",
    "together",
    "untouched",
    "memory",
    "no-leftover",
    "progress",
    "no-surprise",
)

_Call = tuple[int, int, int]  # view, group, number

ReferenceDigest = Callable[[int], bytes]
ReplayedDigest = Callable[[int, Mapping[str, Any]], bytes]
"""Digest of the state after a step, of the step and of the state, which may tell how it came to be."""


class Checker:
    """Follows one run. `broken`: the first invariant that was broken. replay: digest of the state after a step."""

    def __init__(
        self, now_s: Callable[[], float], *, seed: int, world_size: int, replay: ReplayedDigest | None = None
    ) -> None:
        self._now_s = now_s
        self._seed = seed
        self._world_size = world_size
        self._replay = replay
        self.habits = Habits()
        self.broken: InvariantBroken | None = None
        self.commits: dict[int, tuple[int, bytes]] = {}  # what the journal took: by number, the view and the digest
        self.views: dict[int, View] = {}
        self.installed: View | None = None
        self._left: dict[str, None] = {}
        self._votes: dict[tuple[int, int], dict[str, None]] = {}
        self._decisions: dict[tuple[int, int], tuple[bool, str]] = {}
        self._states: dict[tuple[int, int], tuple[bytes, str]] = {}  # by decision and step
        self._spoiled: dict[str, None] = {}  # an ordered set: nodes whose state had a bit flipped, until it is compared
        self._verdicts: dict[int, tuple[str, str, str]] = {}  # by view: the kind of failure, who is blamed, on whom
        self._calls: dict[_Call, dict[str, None]] = {}  # who has called it
        self._counts: dict[tuple[str, int, int], int] = {}  # by node, view and group
        self.held: dict[str, tuple[int, int]] = {}  # by node: decision and step of the state of its living process

    def break_(self, kind: str, message: str, *, node: str = "") -> None:
        """An invariant is broken. The first one counts; the run ends at once."""
        if self.broken is None:
            self.broken = InvariantBroken(kind, message, seed=self._seed, at=self._now_s(), node=node)

    # -- the journal ---------------------------------------------------------------------------------------------

    def appended(self, record: JournalRecord) -> None:
        """The journal has taken a record."""
        if isinstance(record, Committed):
            if record.step in self.commits:
                self.break_("one-decision", f"step {record.step} was committed twice")
            elif self.commits and record.step != max(self.commits) + 1:
                self.break_("one-decision", f"step {record.step} was committed after step {max(self.commits)}")
            if self.installed is None or record.view_id != self.installed.view_id:
                self.break_("one-decision", f"step {record.step} was committed in view {record.view_id}, not the last")
            self.commits[record.step] = record.view_id, record.digest
            self._look_at_votes(record)
        elif isinstance(record, InstalledView):
            self._install(record.view)
        elif isinstance(record, Left):
            self._left[record.node] = None

    def _look_at_votes(self, record: Committed) -> None:
        votes = self._votes.get((record.view_id, record.step), {})
        view = self.views.get(record.view_id)
        missing = [node for node in view.nodes if node not in votes] if view is not None else []
        if missing:
            self.break_("all-or-none", f"step {record.step} was committed without the vote of {', '.join(missing)}")

    def _install(self, view: View) -> None:
        before = self.installed
        nodes = list(view.nodes)
        base = [node for node in before.nodes if node not in self._left] if before is not None else []
        if base and 2 * len([node for node in nodes if node in base]) <= len(base):
            self.break_("quorum", f"view {view.view_id} of {nodes} after {base}: no majority of it")
        if not base and len(nodes) < self._world_size:
            self.break_("quorum", f"view {view.view_id} of {nodes} begins the job, which has {self._world_size} ranks")
        if before is not None and view.view_id <= before.view_id:
            self.break_("one-decision", f"view {view.view_id} was installed after view {before.view_id}")
        self.views[view.view_id] = self.installed = view
        self._left.clear()

    def opened(self, history: History) -> None:
        """A coordinator has started and read its journal: all that was taken has to be in it, at most one more."""
        last = max(self.commits, default=0)
        if history.committed_step < last:
            self.break_("durable", f"the journal ends at step {history.committed_step}; step {last} was committed")
        elif history.committed_step > last + 1:
            self.break_("durable", f"the journal holds step {history.committed_step}; {last} was the last it took")
        view_id = self.installed.view_id if self.installed is not None else 0
        found = history.view.view_id if history.view is not None else 0
        if found < view_id:
            self.break_("durable", f"the journal's last view is {found}; view {view_id} was installed")
        # The record in flight when the process ended may be there or not; nobody was told, so either is right.
        if history.view is not None and found > view_id:
            self._install(history.view)
        if history.committed_step == last + 1 and history.view is not None:
            self.commits[last + 1] = history.view.view_id, b""

    # -- the ranks -----------------------------------------------------------------------------------------------

    def voted(self, node: str, view_id: int, index: int) -> None:
        """A rank is about to vote yes."""
        self._votes.setdefault((view_id, index), {})[node] = None

    def decided(self, node: str, view_id: int, index: int, commit: bool) -> None:
        """A rank has heard the decision on its vote."""
        known = self._decisions.setdefault((view_id, index), (commit, node))
        if known[0] is not commit:
            words = {True: "committed", False: "aborted"}
            self.break_(
                "one-decision",
                f"step {index} of view {view_id} is {words[commit]} on {node}, {words[known[0]]} on {known[1]}",
                node=node,
            )
        if commit and (index not in self.commits or self.commits[index][0] != view_id):
            self.break_(
                "one-decision", f"{node} heard of a commit of {index} that the journal does not hold", node=node
            )

    def state(self, node: str, decision: int, step: int, state: Mapping[str, Any] | None) -> None:
        """A rank holds the state after `step`, of the coordinator's decision `decision` (0: none yet)."""
        before = self.held.get(node)
        if before is not None and (decision, step) < before:
            self.break_("durable", f"the state of {node} went back from {before} to {(decision, step)}", node=node)
        self.held[node] = decision, step
        if decision and decision not in self.commits:
            self.break_("all-or-none", f"{node} holds the state of step {decision}, which was not committed", node=node)
        if state is None or node in self._spoiled:
            return
        digest = state_digest(state)
        known = self._states.setdefault((decision, step), (digest, node))
        if known[0] != digest:
            self.break_("same-bits", f"after step {step} {node} holds other bits than {known[1]}", node=node)
        if self._replay is not None and self._replay(step, state) != digest:
            self.break_("same-bits", f"after step {step} {node} holds other bits than the reference", node=node)

    def spoiled(self, node: str) -> None:
        """A bit of a rank's state is about to flip: until its state was compared, its bits are not looked at. What it
        computes meanwhile goes into all ranks' results alike, so there is no reference from here on."""
        self._spoiled[node] = None
        self._replay = None

    def compared(self, node: str) -> None:
        """A rank's state was compared with the others', and is as it should be."""
        self._spoiled.pop(node, None)

    def not_committed(self, node: str, step: int, entered: Mapping[str, bytes], left: Mapping[str, bytes]) -> None:
        """A rank tries a step another time: from the state from which it tried it before."""
        changed = sorted(name for name in left if entered.get(name) != left[name])
        if changed and node not in self._spoiled:
            what = f"changed {', '.join(map(repr, changed[:4]))}, though step {step} was not committed"
            self.break_("all-or-none", f"{node} {what}", node=node)

    def began(self, node: str, step: int) -> None:
        """A rank begins a step: no living rank may know more than it starts from."""
        mine = self.held.get(node, (0, 0))
        for member, theirs in self.held.items():  # those that are left out as well: their state would be taken back
            if theirs[0] > mine[0]:  # no later decision can be without our vote
                self.break_("durable", f"{node} begins step {step} from {mine}, and {member} holds {theirs}", node=node)

    def failed(self, node: str, error: QuicollError) -> None:
        """An operation of a rank ended in time, by an error."""
        if error.view is None or not error.node or type(error) not in (PeerError, Corrupted, Mismatch):
            return
        kind, culprit = type(error).__name__, error.node if not isinstance(error, Mismatch) else ""
        known = self._verdicts.setdefault(error.view, (kind, culprit, node))
        if known[:2] != (kind, culprit):
            self.break_(
                "one-verdict",
                f"view {error.view} ended by {kind} of {culprit} on {node}, by {known[0]} of {known[1]} on {known[2]}",
                node=node,
            )

    def called(self, node: str, view_id: int, group_id: int) -> _Call:
        """A rank calls a collective of a group: which one it is, by its place among those of the group."""
        at = node, view_id, group_id
        number = self._counts.get(at, 0)
        self._counts[at] = number + 1
        call = view_id, group_id, number
        self._calls.setdefault(call, {})[node] = None
        return call

    def returned(self, node: str, call: _Call, name: str, members: list[str]) -> None:
        """It went well on this rank."""
        absent = [member for member in members if member not in self._calls[call]]
        if absent:
            which = f"{name} (call {call[2]} of its group in view {call[0]})"
            self.break_("together", f"{which} ended on {node} before {', '.join(absent)} called it", node=node)

    def ended(self, node: str) -> None:
        """The process is gone, and its state with it."""
        self._spoiled.pop(node, None)
        self.held.pop(node, None)


class CheckedStore:
    """A RecordStore that tells the checker of what it has taken."""

    def __init__(self, store: RecordStore, checker: Checker) -> None:
        self._store = store
        self._checker = checker
        checker.opened(store.load())

    def load(self) -> History:
        return self._store.load()

    def append(self, record: JournalRecord) -> None:
        self._store.append(record)
        self._checker.appended(record)

    def close(self) -> None:
        self._store.close()


class CheckedJob(Job):
    """A job whose every step and collective is looked at."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
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

    def step(self) -> Step:
        return ComputedStep(self._steps, self._compute_s)


class ComputedStep(Step):
    """A step whose body begins `compute_s` seconds after its entry: what the user's code computes takes no time of its
    own here, and a loop that never sleeps would do thousands of steps between two faults."""

    def __init__(self, protocol: StepProtocol, compute_s: float) -> None:
        super().__init__(protocol)
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
        engine: Engine,
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
        return {str(name): _bits(value) for name, value in (self._held() or {}).items()}

    def _report_state(self) -> None:
        version = self.state.version
        self._checker.state(self._config.node, version.decision, version.step, self._held())

    async def synchronise(self) -> None:
        self._look_at_what_is_left()
        self._attempted = None
        await super().synchronise()
        self._checker.compared(self._config.node)
        self._report_state()

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
        self._checker.began(self._config.node, attempt.number)
        self._machine.note("step_began", step=attempt.number, view=self._context.view.view_id)
        self._entered, self._attempted = self._tensors(), self.state.version

    def _look_at_what_is_left(self) -> None:
        """After a step that was not committed the state is what it was, however the ranks agree on another one later.

        It is looked at when the next one is entered, since a loop may set back by itself what it has changed.
        """
        if self._attempted == self.state.version:
            self._checker.not_committed(self._config.node, self.state.version.step + 1, self._entered, self._tensors())

    async def commit(self, attempt: StepAttempt, view_id: int, unfinished: int) -> None:
        opened = self._engine.steps.open
        if opened is not None:
            self._checker.voted(self._config.node, view_id, opened[0])
            changed = {name: bits for name, bits in self._tensors().items() if self._entered.get(name) != bits}
            self._checker.habits.changed(self._config.node, view_id, opened[0], attempt.number, changed)
            self._machine.on_vote()
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
        inputs, target = _bits(given), _bits((out,))
        handle = inner(self, *args, **settings)
        machine.note("collective_began", op=name)
        call = None
        if name not in _OF_PAIRS:
            view = self._context.view
            members = [view.members[rank].node for rank in self.ranks]
            call = checker.called(node, view.view_id, self._scope.group_id)
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
            if _bits(given) != inputs:
                checker.break_("untouched", f"{name} changed its input", node=node)
            if not handle.pending.operation.in_place and _bits((out,)) != target:
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


def state_digest(state: Any) -> bytes:
    """16 bytes over names, types, shapes and bits, by name."""
    found = blake2b(digest_size=16)
    for name in sorted(state, key=str):
        found.update(_bits((name, state[name])))
    return found.digest()


def _without(state: Any, own: tuple[tuple[str, ...], ...], path: tuple[str, ...] = ()) -> Any:
    """A state without what is each rank's own."""
    if not isinstance(state, Mapping) or not own:
        return state
    below = {key: (*path, str(key)) for key in state}
    return {key: _without(value, own, below[key]) for key, value in state.items() if below[key] not in own}


def _writable(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.flags.writeable and value.flags.c_contiguous


def _bits(values: Any) -> bytes:
    """A digest of tensors, however they are packed; of other things by their text."""
    found = blake2b(digest_size=16)
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, Leaves):
            pending += [value.values, value.shards.total]
        elif isinstance(value, list | tuple):
            pending += [*reversed(value), len(value)]
        elif isinstance(value, Mapping):
            pending += [*(value[key] for key in sorted(value, key=str)), sorted(map(str, value))]
        elif isinstance(value, np.ndarray):
            found.update(f"{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        elif hasattr(value, "detach") and hasattr(value, "numpy"):
            import torch

            # A copy: one element is contiguous whatever its stride, and viewed as bytes only where that is 1.
            flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
            found.update(f"{value.dtype}{tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
        else:
            found.update(_plain(value))
    return found.digest()


def _plain(value: Any) -> bytes:
    """What it holds that is no tensor: a buffer its bytes, as its text may show an address alone; else its text."""
    try:
        view = memoryview(value)
    except TypeError:
        return repr(value).encode()
    return f"{view.format}{view.shape}".encode() + view.tobytes()
