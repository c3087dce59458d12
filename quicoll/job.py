"""The public face: a job, its views, its steps. It runs on the caller's loop and speaks to the engine.

A step's life, as the caller sees it:

    enter   wait for a view that is at work; if it is a new one, bring every rank to the same state; then begin
    body    compute, call collectives; an error here ends the step on all ranks
    leave   vote with the digest of all results; the coordinator decides; committed on all ranks or on none

    outcome         the caller gets             its callbacks of on_commit
    committed       a normal exit               have run, in order
    aborted         StepAborted                 never run
    in doubt        Partitioned                 run at the next step's entry, if it turns out to be committed
    in doubt        CancelledError, of the      the same
                    wait for the decision
    own error       that error; others abort    never run

State and steps. The number of a step counts what the state has been through, `committed_step + 1`. It travels with the
state (a checkpoint, or a member's memory), while the coordinator numbers its decisions by itself; so a job that starts
again from a checkpoint goes on from the checkpoint's number. When a view begins, the ranks compare what they hold.
The newest state is the one of the latest decision, then of the highest step; whoever has an older one receives it
from the lowest rank that has it, checked by digest, before any step begins.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from quicoll.audit.log import AuditLog, audit_file
from quicoll.audit.recorder import Auditor
from quicoll.checks import done, plain, seconds, whole
from quicoll.collectives.context import Caller
from quicoll.collectives.group import Group
from quicoll.collectives.subgroups import STATE
from quicoll.config import Config
from quicoll.engine.start import start
from quicoll.errors import (
    AuditError,
    Corrupted,
    LocalError,
    Mismatch,
    Partitioned,
    PeerError,
    QuicollError,
    StepAborted,
)
from quicoll.numerics.buffers import memory, source, tensor_digest, wrap
from quicoll.numerics.dtypes import DType
from quicoll.numerics.seed import Seed

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from quicoll.engine.decisions import Decision
    from quicoll.engine.engine import Engine
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.observability.events import Observer
    from quicoll.observability.stragglers import Straggler

__all__ = ["Job", "Step", "attended", "join"]

log = logging.getLogger("quicoll")

Save = Callable[[], Mapping[str, Any]]
Load = Callable[[Mapping[str, Any]], None]

_MAX_STATE_TENSORS = 1 << 20
_PATIENCE_S = 1.0  # for the others, of a rank that leaves by an error


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a state that is handed over."""

    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    torch: bool
    digest: bytes


_manifest_encoder = msgspec.msgpack.Encoder()
_manifest_decoder = msgspec.msgpack.Decoder(tuple[_Tensor, ...])


class Step:
    """One attempt at a step, entered once. `number`: of the step, from 1. `view`: in which it runs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.number = 0
        self.view: View | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._over = False

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Run `callback()` exactly if the step is committed, before the context is left. Never otherwise.

        One that raises leaves this rank's state half changed: the error reaches the caller, and the rank counts as
        behind until it has been given the state by another one. Raises LocalError once the step has been left, and for
        what is not a plain function: a coroutine would be awaited by nobody.
        """
        if self._over:
            raise LocalError(f"step {self.number} has been left: nothing can be done at its commit any more")
        self._callbacks.append(plain(callback, "a callback of on_commit"))

    async def __aenter__(self) -> Step:
        await self._job._enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._job._leave(self, error)

    def _run_callbacks(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            done(callback(), "a callback of on_commit")


class Job:
    """A rank's part in a job. Made by `join`; not thread-safe: use it on the loop that made it.

    config: the settings in force, with their sources. group: the collectives over all ranks.
    """

    def __init__(self, config: Config, engine: Engine, runtime: Runtime, view: View) -> None:
        self.config = config
        self._caller = caller = Caller(config, engine, runtime, view)
        self.group = Group(caller)
        self._engine = engine
        self._runtime = runtime
        self._synchronised = 0  # the view in which our state was compared with the others'
        self._save: Save | None = None
        self._load: Load | None = None
        self._committed_step = 0
        self._decision = 0  # the coordinator's number of the decision that our state is of; 0: none
        self._doubtful: tuple[Step, int] | None = None  # and its view, from its vote to the decision
        self._left = False
        self._engaged = False  # a task is in `ready`, or at the entry or the end of a step

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The view this job's caller is in. Changes only where a step is entered, or by `ready`."""
        return self._caller.view

    @property
    def rank(self) -> int:
        """This rank's number in `view`, from 0; another view may give it another one."""
        return self._caller.rank

    @property
    def world_size(self) -> int:
        """How many ranks `view` has."""
        return self._caller.view.world_size

    @property
    def node(self) -> str:
        """This rank's name, as in its certificate: the same in every view."""
        return self.config.node

    @property
    def seed(self) -> Seed:
        """The job's seed: agreed, equal on all ranks, the same in every view."""
        return Seed(self._caller.view.seed)

    @property
    def committed_step(self) -> int:
        """The number of the last step that the state of this rank has been through; 0 at the start."""
        return self._committed_step

    def stragglers(self) -> tuple[Straggler, ...]:
        """Who came late to collectives as this rank saw it since it joined, whoever cost the most time first.

        Counted are operations that all ranks called, some of them later than most by more than `straggler_after` (and
        than two round trips). Each such time is an event "straggler" too. See `quicoll.observability.stragglers`.
        """
        return self._engine.stragglers.table

    def __repr__(self) -> str:
        return f"<Job rank {self.rank} of {self.world_size} view={self.view.view_id} step={self._committed_step}>"

    # -- audit ---------------------------------------------------------------------------------------------------

    def audit(self, path: str | Path) -> Path:
        """From here on note what every collective is given and gives, by digest, for `quicoll audit diff`.

        path: the directory of the run, made if it is not there; gives the file in it, named after this node. Every rank
        that is to be compared calls it. A file of the same job and node is continued, as after a restart. Each
        operation of a group that succeeds is one line, in the order of the calls; so is each attempt at a step. What
        the library itself sends when a view begins is left out.
        Cost: a pass of xxh3-128 over inputs and results (docs/determinism.md), on the caller's thread, and a line of a
        few hundred bytes; nothing is sent.
        Raises LocalError inside a step or when called twice, AuditError where the file cannot be written. If that
        happens later, the next operation or the end of the step raises it, and the step is not committed.
        """
        if self._caller.step is not None:
            raise LocalError("audit comes before a step, not inside of one")
        if self._caller.auditor is not None:
            raise LocalError("this job is audited already")
        file = audit_file(path, self.node)
        self._caller.auditor = Auditor(AuditLog(file, job=self.config.job, node=self.node))
        return file

    # -- state ---------------------------------------------------------------------------------------------------

    def register_state(self, save: Save, load: Load) -> None:
        """Say how this rank's state is read and written, so that ranks that are behind can be brought up to date.

        save() gives the state: names and tensors, equal on all ranks that are at the same step. load(state) puts
        one in place; the tensors are of the kinds (numpy, torch) that save() gave. Both run on the caller's loop, and
        are plain functions: LocalError for coroutine functions.
        """
        self._save = plain(save, "save")
        self._load = plain(load, "load")

    def resume_from(self, step: int) -> None:
        """Say that the state of this rank is the one after `step`, for instance because a checkpoint was loaded.

        To be called before the first step. Raises LocalError afterwards, or inside a step.
        """
        if self._decision or self._caller.step is not None:
            raise LocalError("resume_from comes before the first step")
        step = whole(step, "a step number")
        if not 0 <= step < 1 << 63:
            raise LocalError(f"a step number is not negative, and below 2**63: {step}")
        self._committed_step = step

    async def ready(self, *, timeout: float | None = None) -> None:
        """Wait until a view is at work and every rank has the same state in it. `step()` does this by itself.

        Raises Partitioned when there is no such view within `timeout` seconds (None: the job's hold_timeout), and
        StepAborted when a rank was lost meanwhile: call it again. What save() or load() raise, and LocalError where the
        state cannot be taken here, end the view for the others too. LocalError inside a step, and while another task is
        in here or in the entry or the end of a step.
        """
        with self._alone():
            await self._ready(timeout)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two tasks in here would both bring the state up to date, or begin the step, and the other ranks once."""
        if self._caller.step is not None:
            raise LocalError("a step is already open; steps do not nest, and ready() comes between them")
        if self._engaged:
            raise LocalError("another task is in ready(), or at the entry or the end of a step, of this job")
        self._engaged = True
        try:
            yield
        finally:
            self._engaged = False

    async def _ready(self, timeout: float | None = None) -> None:
        timeout = self.config.hold_timeout if timeout is None else seconds(timeout)
        if self._doubtful is not None:
            clock = asyncio.get_running_loop().time
            deadline = clock() + timeout
            await self._settle_doubt(timeout)
            timeout = max(deadline - clock(), 0.0)
        view = await self._caller.on_engine(self._engine.wait_view(timeout))
        if view.view_id == self._synchronised:
            return
        self._caller.enter(view)
        try:
            await self._synchronise()
        except (PeerError, Corrupted, Partitioned) as error:
            raise self._aborted(error, self._committed_step + 1) from error
        except BaseException as error:
            # Of save() or load(), or a state that cannot be taken here: the others must not wait for their deadline.
            await self._give_up_for(view.view_id, error)
            raise
        self._synchronised = view.view_id

    async def _synchronise(self) -> None:
        """Bring every rank of the view to the newest state that any of them holds."""
        mine = np.array([self._decision, self._committed_step, self._save is not None], np.int64)
        group = Group(self._caller, STATE)
        held = (await group.all_gather(mine)).reshape(-1, 3)
        newest = max((int(decision), int(step)) for decision, step, _ in held)
        current = [rank for rank, row in enumerate(held) if (int(row[0]), int(row[1])) == newest]
        if len(current) == self.world_size:
            return
        behind = [rank for rank in range(self.world_size) if rank not in current]
        givers = [rank for rank in current if held[rank][2]]
        # Every rank sees the same numbers, so all come to the same verdict and nobody waits for anybody.
        if not givers or not all(held[rank][2] for rank in behind):
            if newest[1] == 0 or self.rank in current:
                self._decision = newest[0]
                return
            raise LocalError(
                f"this rank's state is after step {self._committed_step}, the job's after step {newest[1]}: "
                "call job.register_state(save, load) so that it can be handed over"
            )
        await self._hand_over(group, givers[0], current, newest)

    async def _hand_over(self, group: Group, giver: int, current: list[int], newest: tuple[int, int]) -> None:
        state = _checked(self._save()) if self.rank == giver and self._save is not None else {}
        manifest = b""
        if self.rank == giver:
            manifest = _manifest_encoder.encode(tuple(_describe(name, state[name]) for name in sorted(state)))
        size = int((await group.broadcast(np.array([len(manifest)], np.int64), root=giver))[0])
        packed = np.frombuffer(manifest, np.uint8) if self.rank == giver else np.empty(size, np.uint8)
        packed = await group.broadcast(packed, root=giver)
        try:
            tensors = _manifest_decoder.decode(memory(packed))
        except msgspec.MsgspecError as error:
            raise PeerError(f"malformed state manifest: {error}", rank=giver, view=self.view.view_id) from error
        if len(tensors) > _MAX_STATE_TENSORS:
            raise PeerError(f"a state of {len(tensors)} tensors", rank=giver, view=self.view.view_id)
        received: dict[str, Any] = {}
        for tensor in tensors:
            value = state[tensor.name] if self.rank == giver else _empty(tensor)
            got = await group.broadcast(value, root=giver)
            if tensor_digest(got) != tensor.digest:
                raise Corrupted(f"the state's {tensor.name!r} fails its digest", rank=giver, view=self.view.view_id)
            received[tensor.name] = got
        if self.rank not in current:
            if self._load is None:
                raise LocalError("no state registered")
            done(self._load(received), "load")
            self._decision, self._committed_step = newest
            self._runtime.loop.call_soon_threadsafe(self._engine.state_received, giver, newest[1], newest[0])

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """The next step: `async with job.step() as step: ...`. See the module for what can come of it."""
        return Step(self)

    async def _enter(self, step: Step) -> None:
        if step.number:
            raise LocalError("a Step is one attempt: call job.step() for the next one")
        with self._alone():
            await self._ready()
            step.number = self._committed_step + 1
            step.view = self._caller.view
            if self._caller.auditor is not None:
                rank, world = self.rank, self.world_size
                self._caller.auditor.begin(step=step.number, view=self.view.view_id, rank=rank, world=world)
            try:
                await self._caller.on_engine(self._engine.begin(self.view.view_id, step.number))
            except (PeerError, Corrupted, Partitioned) as error:
                raise self._aborted(error, step.number) from error
            except BaseException as error:
                # Cancelled, perhaps when the step had begun there: nobody would ever vote for it.
                await self._give_up_for(self.view.view_id, error)
                raise
            self._caller.open(step.number)

    async def _leave(self, step: Step, error: BaseException | None) -> None:
        step._over = True
        unfinished = self._caller.settle()
        self._caller.close()
        with self._alone():
            await self._end(step, error, unfinished)

    async def _end(self, step: Step, error: BaseException | None, unfinished: int) -> None:
        view_id = self.view.view_id
        if error is None and self._caller.auditor is not None:
            try:
                self._caller.auditor.check()
            except AuditError as failed:
                await asyncio.shield(asyncio.ensure_future(self._give_up(view_id, str(failed))))
                raise
        if error is None:
            await self._commit(step, view_id, unfinished)
            return
        if isinstance(error, QuicollError) and not isinstance(error, LocalError | AuditError):
            if isinstance(error, PeerError | Corrupted | Partitioned):
                # The view is dead, so no vote of ours can come from this step any more: it is committed nowhere.
                raise self._aborted(error, step.number) from error
            return  # Mismatch, StepAborted: they say it all
        await self._give_up_for(view_id, error)

    async def _give_up_for(self, view_id: int, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        await asyncio.shield(asyncio.ensure_future(self._give_up(view_id, reason)))

    async def _give_up(self, view_id: int, reason: str) -> None:
        """Our own code failed: end the step on all ranks. Bounded, because it only queues a message."""
        await self._caller.on_engine(self._engine.give_up(view_id, reason))

    async def _commit(self, step: Step, view_id: int, unfinished: int) -> None:
        self._doubtful = (step, view_id)  # before the vote: whatever ends the wait, it has been cast or it has not
        try:
            decision = await self._caller.on_engine(
                self._engine.vote(
                    view_id,
                    *self._caller.digests(step.number),
                    timeout=self.config.hold_timeout,
                    unfinished=unfinished,
                )
            )
        except (PeerError, Corrupted) as error:
            self._doubtful = None
            raise self._aborted(error, step.number) from error
        except LocalError:  # the job is closed: there is nobody left to ask
            raise
        except BaseException as error:  # Partitioned, cancelled, or of a signal handler
            vote = await asyncio.shield(asyncio.ensure_future(self._unanswered(view_id, type(error).__name__)))
            if vote is None:
                self._doubtful = None
                if isinstance(error, Partitioned):
                    raise self._aborted(error, step.number) from error
            raise
        await self._decided(step, decision)

    async def _unanswered(self, view_id: int, reason: str) -> tuple[int, int] | None:
        return await self._caller.on_engine(self._engine.unanswered(view_id, reason))

    async def _decided(self, step: Step, decision: Decision) -> None:
        if not decision.commit:
            self._doubtful = None
            if decision.kind == "mismatch":
                raise Mismatch(decision.cause, node=decision.culprit, view=self.view.view_id, step=step.number)
            raise StepAborted(
                f"step {step.number} was not committed: {decision.cause}",
                lost=decision.lost,
                node=decision.culprit,
                view=self.view.view_id,
                step=step.number,
            )
        await self._apply(step, decision.index)

    async def _apply(self, step: Step, index: int) -> None:
        """The step is committed: change the state, and say that it is changed, in this order."""
        self._doubtful = None  # whatever becomes of the callbacks, they are not run another time
        try:
            step._run_callbacks()
        except BaseException as error:
            await self._give_up(self.view.view_id, f"{type(error).__name__} while applying step {step.number}")
            raise
        self._decision = index
        self._committed_step = step.number

    async def _settle_doubt(self, timeout: float) -> None:
        """A vote of ours was left without an answer: wait for it, for at most `timeout` seconds.

        Without it no other step may begin here: the next number depends on it, and the state too.
        """
        if self._doubtful is None:
            raise AssertionError("no vote is in doubt")
        step, view_id = self._doubtful
        vote = await self._unanswered(view_id, "left its step before its vote")
        if vote is not None:
            decision = await self._caller.on_engine(self._engine.decision(*vote, timeout))
            if decision.commit:
                await self._apply(step, decision.index)
        self._doubtful = None

    def _aborted(self, error: QuicollError, number: int) -> StepAborted:
        return StepAborted(
            f"step {number} was not committed: {error.message}",
            lost=error.lost,
            rank=error.rank,
            node=error.node,
            view=self.view.view_id,
            step=number,
            op=error.op,
        )

    # -- the end -------------------------------------------------------------------------------------------------

    async def aclose(self, reason: str = "done") -> None:
        """Leave the job: the others go on without this rank. Called by `join`'s context.

        Bounded: the others may first end the operations that this rank has been part of, which are over at the latest
        by the job's `timeout`. Another time it does nothing.
        """
        await self._leave_job(reason, self.config.timeout)

    async def _leave_job(self, reason: str, patience: float) -> None:
        if self._left:
            return
        self._left = True
        try:
            await self._caller.on_engine(self._engine.aclose(reason, patience=patience))
        finally:
            await self._runtime.aclose()
            self._end_audit()

    def _end_audit(self) -> None:
        if self._caller.auditor is not None:
            self._caller.auditor.close()


def _checked(state: object) -> dict[str, Any]:
    """What save() gave. Raises LocalError for what is no state."""
    if not isinstance(state, Mapping):
        raise LocalError(f"save() gives a mapping of names to tensors, not {type(state).__name__}")
    if len(state) > _MAX_STATE_TENSORS:
        raise LocalError(f"a state has at most {_MAX_STATE_TENSORS} tensors, not {len(state)}")
    for name in state:
        try:
            name.encode()
        except (AttributeError, UnicodeEncodeError):
            raise LocalError(f"a name in the state that save() gave is no text: {name!r}") from None
    return dict(state)


def _describe(name: str, value: Any) -> _Tensor:
    read = source(value)
    return _Tensor(name, read.dtype.name, read.shape, read.kind == "torch", tensor_digest(read))


def _empty(tensor: _Tensor) -> Any:
    """Memory for a tensor that is announced. Its size is bounded by what the sender, a member, holds itself."""
    dtype = DType.parse(tensor.dtype)
    flat = np.empty(math.prod(tensor.shape), dtype.storage)
    return wrap(flat, dtype, tensor.shape, "torch" if tensor.torch else "numpy")


@asynccontextmanager
async def join(*, observer: Observer | None = None, **settings: Any) -> AsyncIterator[Job]:
    """Join a job as one rank: `async with quicoll.join(coordinator=..., node=..., ...) as job`.

    Settings are those of `quicoll.Config`; argument > QUICOLL_* > torchrun's variables > default. Returns when the
    first view with this rank is at work. Leaving the context leaves the job.
    observer: called with every `quicoll.Event` of this rank, on the engine's thread.
    Raises LocalError for settings, certificates or an address that cannot work; PeerError when the coordinator
    cannot be reached or refuses us, or when the view is not complete within `join_timeout`.
    """
    config = await Config.resolve_in_loop(**settings)
    engine, runtime = await start(config, observer=observer)
    try:
        view = await runtime.call(engine.wait_view(config.join_timeout, joining=True))
    except BaseException:
        await _shut(engine, runtime)
        raise
    async with attended(Job(config, engine, runtime, view)) as job:
        yield job


@asynccontextmanager
async def attended(job: Job) -> AsyncIterator[Job]:
    """Leave the job at the block's end, however it ends."""
    try:
        yield job
    except BaseException as error:
        await job._leave_job(type(error).__name__, min(job.config.timeout, _PATIENCE_S))
        raise
    await job.aclose()


async def _shut(engine: Engine, runtime: Runtime) -> None:
    try:
        await runtime.call(engine.aclose("not joined"))
    finally:
        await runtime.aclose()
