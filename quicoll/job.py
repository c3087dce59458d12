"""A rank's part in a job, as its user sees it: what the group is, its steps, and how to leave it.

`Job` runs on its user's loop and speaks to the engine, which has a loop of its own. How a rank comes in:
`quicoll.joining`; steps: `quicoll.step`; how ranks come to one state: `quicoll.state`; collectives:
`quicoll.collectives`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.audit.environment import determinism_report, quicoll_version
from quicoll.audit.log import AuditLog, audit_file
from quicoll.audit.recorder import Auditor
from quicoll.audit.seal import Sealer, seal_file
from quicoll.checks import MAX_NAME, whole
from quicoll.collectives.context import CallContext
from quicoll.collectives.group import Group
from quicoll.collectives.subgroups import PIECES_DOWN, PIECES_UP, STATE, TIERS
from quicoll.engine.start import read_access
from quicoll.errors import LocalError
from quicoll.numerics.seed import Seed
from quicoll.state.rank_state import RankState
from quicoll.state.sharded import PieceGroups, ShardedSet
from quicoll.state.version import StateVersion
from quicoll.step.context import Step
from quicoll.step.protocol import StepProtocol
from quicoll.stop import StopRequest, sigterm_asks
from quicoll.tiers.shared import SharedState
from quicoll.tiers.spreading import Spreader
from quicoll.tiers.tiers import Tiers

if TYPE_CHECKING:
    from pathlib import Path

    from quicoll.config import Config
    from quicoll.engine.face import EngineFace
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.observability.stragglers import Straggler
    from quicoll.state.rank_state import Load, Save
    from quicoll.state.sharded import Sharded
    from quicoll.tiers.shared import Consistency
    from quicoll_transport.events import LinkSnapshot

__all__ = ["Internals", "Job"]


@dataclass(frozen=True, slots=True)
class Internals:
    """The parts behind a job, for quicoll's own test tools. They may change with any version."""

    engine: EngineFace
    runtime: Runtime


class Job:
    """A rank's part in a job. `join` or `connect` makes it; not thread-safe: use it on the loop that made it.

    Attributes:
        config: The settings in force, with their sources.
        group: The collectives over all ranks.
        tiers: The set of tiers in force, and how to agree on another one.
    """

    def __init__(
        self,
        config: Config,
        engine: EngineFace,
        runtime: Runtime,
        view: View,
        stop: StopRequest | None = None,
        held: AsyncExitStack | None = None,
    ) -> None:
        """Make the job of a rank that has joined.

        Args:
            config: Its settings.
            engine: Its engine.
            runtime: The loop on which the engine lives.
            view: The first view with this rank in it.
            stop: What asks this rank to stop; None makes one.
            held: What was begun for this rank, and ends when it has left; None: nothing.
        """
        self._held = held or AsyncExitStack()
        self.config = config
        self._engine = engine
        self._runtime = runtime
        self._context = CallContext(config, engine, runtime, view, engine.result_memory)
        self.group = Group(self._context)
        self._state = RankState()
        self._stop = stop or StopRequest()
        self._steps = StepProtocol(
            self._context,
            engine,
            runtime,
            state=self._state,
            state_group=Group(self._context, STATE),
            hold_timeout=config.hold_timeout,
            check_every=config.state_check_every,
            learn_from=config.learn_from_bytes,
            stop=self._stop,
            stop_timeout=config.stop_timeout,
        )
        agreeing = Group(self._context, TIERS)
        self.tiers = Tiers(agreeing, lambda: self._context.view, self.emit)
        self._spreader = Spreader(runtime.loop, engine.worker_links, engine.observers.emit)
        self._shared: dict[str, SharedState] = {}
        self._agreeing = agreeing
        self._left = False
        self._source = ""  # of the state, as its reader has named it

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The view this job's caller is in. It changes only where a step is entered, or by `ready`."""
        return self._context.view

    @property
    def rank(self) -> int:
        """This rank's number in `view`, from 0; another view may give it another one."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """How many ranks `view` has."""
        return self._context.view.world_size

    @property
    def is_spare(self) -> bool:
        """Whether this rank stands by, kept warm: the next entry of a step, or `ready`, waits until a place is free."""
        return self._context.is_spare

    @property
    def node(self) -> str:
        """This rank's name, as in its certificate: the same in every view."""
        return self.config.node

    @property
    def seed(self) -> Seed:
        """The job's seed: agreed, equal on all ranks, the same in every view."""
        return Seed(self._context.view.seed)

    @property
    def committed_step(self) -> int:
        """The number of the last step in the state of this rank; 0 at the start."""
        return self._state.version.step

    @property
    def state_torn(self) -> bool:
        """True while this rank's state is half overwritten: it was being handed over, and that did not come to its end.

        It is the state of no step then, and nothing to keep. The next view makes it whole, before any step begins.
        """
        return self._state.torn

    @property
    def internals(self) -> Internals:
        """The parts behind this job, for quicoll's own test tools."""
        return Internals(self._engine, self._runtime)

    def stragglers(self) -> tuple[Straggler, ...]:
        """Return who came late to collectives as this rank saw it since it joined.

        An operation counts if all ranks called it, some of them later than most by more than the setting
        `straggler_after` and than two round trips. Each such time is an event "straggler" too.

        Returns:
            One entry for each late node, the one that cost the most time first. See `quicoll.observability.stragglers`.
        """
        return self._engine.stragglers.table

    def emit(self, /, kind: str, **fields: object) -> None:
        """Give an event to this rank's observer, its file of events and the log.

        Args:
            kind: What happened, for instance "progress"; quicoll's own kinds are in docs/settings.md.
            **fields: What belongs to it; written as JSON to the file, and as text where JSON has no such type.
        """
        observers = self._engine.observers
        self._runtime.loop.call_soon_threadsafe(lambda: observers.emit(kind, **fields))

    def __repr__(self) -> str:
        return f"<Job rank {self.rank} of {self.world_size} view={self.view.view_id} step={self.committed_step}>"

    # -- audit ---------------------------------------------------------------------------------------------------

    def audit(self, path: str | Path, *, code: str = "") -> Path:
        """Record what every collective takes and gives from here on, by digest, for `quicoll audit diff`.

        Every rank that is to be compared calls it. A file of the same job and node is continued, as after a restart.
        Each operation of a group that succeeds is one line, in the order of the calls; so is each attempt at a step.
        What the library itself sends when a view begins is left out. The cost is a pass of xxh3-128 over inputs and
        results on the caller's thread (docs/determinism.md), and a line of a few hundred bytes; nothing is sent.

        It is signed with the key of this node's certificate, in a file beside it, for `quicoll audit verify`: at once,
        every hundred steps, at each change of views, and at the end.

        Args:
            path: The directory of the run; made if it does not exist.
            code: The version of your program, for instance a commit; stands in what is signed.
        Returns:
            The file in it, named after this node.
        Raises:
            LocalError: A step is open, or the job is audited already.
            AuditError: The file cannot be written. If that happens later, the next operation or the end of the step
                raises it, and the step is not committed.
        """
        if self._steps.entered:
            raise LocalError("audit comes before a step, not inside of one")
        if self._context.auditor is not None:
            raise LocalError("this job is audited already")
        file = audit_file(path, self.node)
        report = determinism_report()
        sealer = Sealer(
            seal_file(file),
            credentials=lambda: self._engine.endpoint.credentials,
            now=self._engine.endpoint.wall_clock,
            about={
                "version": quicoll_version(),
                "code": code,
                "fingerprint": report.fingerprint,
                "environment": {finding.name: finding.value for finding in report.findings},
                "step": self.committed_step,
                "source": self._source,
            },
        )
        self._context.auditor = Auditor(AuditLog(file, job=self.config.job, node=self.node, sealer=sealer))
        return file

    # -- state ---------------------------------------------------------------------------------------------------

    def register_state(
        self,
        save: Save,
        load: Load,
        own: Sequence[str] = (),
        *,
        sharded: Mapping[str, Sharded] | None = None,
        architecture: Mapping[str, str] | None = None,
    ) -> None:
        """Say how this rank's state is read and written, on every rank, before the first step.

        So ranks can be compared, and brought to one state: when a view begins, after its first step, and every
        `state_check_every` steps. At the start of training the lowest rank's state is given to the others. Later a rank
        that is behind, or that holds another state than most, is given theirs. What comes is written into the tensors
        that `save` gives, where they fit, and then handed to `load`; what `save` gives after it has to be what came.

        Both are plain functions and run on the caller's loop. `save` is called here once, to see that it gives a state.

        Args:
            save: Returns the state, equal on all ranks that are at the same step: a mapping of str or int to tensors,
                arrays, numbers, str, bytes, None, and mappings, lists and tuples of these; what `state_dict()` of
                torch's modules, optimizers and schedulers gives is one.
            load: Puts a state in place. It has the types that save returned; mappings come as dict.
            own: What in it is each rank's own: keys such as "sampler", or paths such as "data.sampler". It is not
                compared and never overwritten: load gets for it what save gave on this rank. Equal on all ranks.
            sharded: States that are divided between the ranks, by name; declared equally on all ranks. They are no part
                of what save gives. In a new view each rank has what it is to own before a step begins.
            architecture: What it is a state of, texts by name in an order, for instance `{"model": repr(model)}`. It is
                compared in each view before anything is handed over, and a rank that says something else than most of
                those that hold the newest state gets a LocalError that names it and the first difference.
        Raises:
            LocalError: One of them is no plain function, or what save gives is no state; names the key. Or there is
                nothing in it at a path of `own`, or `sharded` has something that is no Sharded or is in use, or
                `architecture` has something that is no text.
        """
        divided = None
        if sharded:
            up, down = Group(self._context, PIECES_UP), Group(self._context, PIECES_DOWN)
            divided = ShardedSet(sharded, PieceGroups(self.group, up, down))
        self._state.register(save, load, own, divided, architecture)
        if divided is not None:
            self._runtime.loop.call_soon_threadsafe(self._engine.owns_state)

    async def check_state(self) -> str:
        """Compare all ranks' states now. Every rank calls it, between steps.

        Ranks whose state differs from that of most are given it, as when a view begins.

        Returns:
            A digest of the state that all ranks have, in hexadecimal: the same on all of them. What is each rank's own
            does not count.
        Raises:
            LocalError: No state is registered; else as `ready`.
            Partitioned: As `ready`.
            StepAborted: As `ready`.
            Diverged: As `ready`.
        """
        return (await self._steps.check_state()).hex()

    def resume_from(self, step: int, *, source: str = "") -> None:
        """Say that the state of this rank is the one after `step`, for instance because a checkpoint was loaded.

        Args:
            step: The step's number, 0 to 2**63 - 1.
            source: What it was read from, for instance the checkpoint's path; for who reads the audit.
        Raises:
            LocalError: A step was committed or is open, or step is no such number.
            AuditError: It could not be noted in the audit.
        """
        if self._state.version.decision or self._steps.entered or self._steps.in_doubt:
            raise LocalError("resume_from comes before the first step")
        step = whole(step, "a step number")
        if not 0 <= step < 1 << 63:
            raise LocalError(f"a step number is not negative, and below 2**63: {step}")
        if self._context.auditor is not None:
            self._context.auditor.resumed(step, source)
        self._source = source
        self._state.version = StateVersion(self._state.version.decision, step)
        if self._state.sharded is not None:
            self._state.sharded.begin_at(step)

    async def ready(self, *, timeout: float | None = None) -> None:
        """Wait until a view is at work and every rank has the same state in it. `step()` does this by itself.

        What `save` or `load` raise ends the view for the other ranks too.

        Args:
            timeout: Seconds; None takes the job's hold_timeout.
        Raises:
            LocalError: A step is open, another task is in here or at the entry or the end of a step, or this rank
                cannot take the state.
            Partitioned: There is no such view within timeout.
            StepAborted: A rank was lost meanwhile, or the last step was left before it was decided, and is committed on
                no rank. Call it again.
            Mismatch: The ranks differed in the last step, which was left before it was decided.
            Diverged: The ranks hold different states, and nobody knows which is right. Every rank gets it.
            Terminated: This rank was asked to stop.
            Dismissed: This rank was told to leave the job, which goes on without it.
        """
        await self._steps.ready(timeout)

    def shared_state(
        self,
        name: str,
        *,
        consistency: Consistency = "strong",
        max_bytes: int = 256 << 20,
        rate: float = 8 << 20,
    ) -> SharedState:
        """Make state that the ranks share by name: arrays, tensors or bytes, each a piece with a name.

        Args:
            name: Of the state, 1 to 128 characters; the same on all ranks, as are the other arguments.
            consistency: "strong": it changes by committed steps, alike on all ranks. "eventual": any rank writes at any
                time, pieces spread in the background, and `SharedState.strong` makes them strong for a step.
            max_bytes: Of all its pieces, on each rank.
            rate: Bytes a second that each rank asks of the others in the background, at most.
        Returns:
            The state, without a piece.
        Raises:
            LocalError: There is one of this name, an argument cannot be, or the job is closed.
        """
        if self._left:
            raise LocalError("the job is closed")
        max_bytes = whole(max_bytes, "max_bytes")
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise LocalError(f"a shared state has a name of 1 to {MAX_NAME} characters, not {name!r}")
        if consistency not in ("strong", "eventual"):
            raise LocalError(f'the consistency is "strong" or "eventual", not {consistency!r}')
        if max_bytes < 0 or not rate > 0:
            raise LocalError(f"max_bytes is not negative and rate above 0, not {max_bytes} and {rate}")
        if name in self._shared:
            raise LocalError(f"there is a shared state {name!r} already")
        made = self._shared[name] = SharedState(
            name,
            consistency,
            group=self._agreeing,
            context=self._context,
            runtime=self._runtime,
            spreader=self._spreader,
            committed_step=lambda: self.committed_step,
            max_bytes=max_bytes,
        )
        if consistency == "eventual":
            self._runtime.loop.call_soon_threadsafe(self._spreader.open, name, made.store, float(rate), made.known_step)
        return made

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, *, overlap: bool = False) -> Step:
        """Make the next step: `async with job.step() as step: ...`.

        Entering it waits for a view and for one state on all ranks, as `ready` does; leaving it votes. Where all ranks
        leave it without an error and with the same results, it is committed: the callbacks of `step.on_commit` run and
        the context ends normally. Otherwise no callback runs and the context raises:

        Args:
            overlap: Leave it when its vote is cast, without waiting for the decision. The next step can be entered at
                once, and compute; `Step.ready` there waits for the decision, runs the callbacks of this one, and raises
                what leaving it would have raised. So do the next entry of `ready`, and the end of the job's block.
                Until then the state is the one before this step, and no collective can be called.
        Raises:
            StepAborted: It was committed on no rank. Try it again: the next attempt has the same number.
            Diverged: As `ready`.
            Mismatch: The ranks called different operations or have different results; committed on no rank.
            Partitioned: This rank is cut off. Where it had voted, the next entry finds out what became of the step and
                runs its callbacks if it was committed.
            LocalError: A step is open already, or another task is at the entry or the end of one.
            Terminated: This rank was asked to stop (`stop`, SIGTERM); no step was entered.
            Dismissed: This rank was told to leave the job, which goes on without it; no step was entered.
        """
        return Step(self._steps, overlap=overlap)

    # -- certificates and links ----------------------------------------------------------------------------------

    async def rotate_certificates(self) -> str:
        """Read this rank's certificate, key, authorities and deny list anew, and use them from now on.

        New handshakes show the new certificate; links that live go on, but for those of certificates that the deny list
        (`deny`) names now. The event "certificates_rotated" tells of it.

        Returns:
            The SHA-256 fingerprint of the certificate in use.
        Raises:
            LocalError: The files cannot be used, or are another node's or job's. Nothing has changed.
        """
        return await self._runtime.call(self._engine.certificates.rotate(read_access(self.config)))

    async def deny(self, fingerprint: str) -> None:
        """Shut a certificate out: its links to this rank end at once, and it gets no new one.

        It holds until this process ends; name the certificate in the coordinator's deny list, and it stays out of the
        job. Its node may come back with another certificate. The event "certificate_denied" tells of it.

        Args:
            fingerprint: SHA-256 of the certificate, 64 hexadecimal digits, colons allowed.
        Raises:
            LocalError: It is no fingerprint.
        """
        await self._runtime.call(self._engine.certificates.deny(fingerprint))

    async def links(self) -> tuple[LinkSnapshot, ...]:
        """Return the figures of each link of this rank at this moment: round trips, bytes, resends, congestion window.

        Returns:
            One for each peer that it has a link to and for the coordinator, in the order of their roles and names.
        """
        return await self._runtime.call(self._engine.links())

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether this rank was asked to stop, by `stop` or by SIGTERM. A program without steps looks here."""
        return self._stop.asked

    def stop(self) -> None:
        """Ask this rank to stop: the next entry of a step, or a wait there, raises `quicoll.Terminated`.

        A step that is open goes on for `stop_timeout` seconds at most. From any thread, and from a signal handler.
        """
        self._stop.ask()

    def stop_at_sigterm(self) -> AbstractContextManager[None]:
        """Make a block in which SIGTERM calls `stop`; `quicoll.train.Worker.run` is one.

        A second SIGTERM ends the process at once. Nothing is changed where the program handles SIGTERM itself, outside
        of the main thread, and where the setting `handle_sigterm` is False.

        Returns:
            The context manager.
        """
        return nullcontext() if self.config.handle_sigterm is False else sigterm_asks(self._stop, insist=False)

    async def aclose(self, reason: str = "done", *, patience: float | None = None, finished: bool = True) -> None:
        """Leave the job; the others go on without this rank. The context of `join` calls it. Another call does nothing.

        After `connect` it is yours to call; a process that ends without it leaves with a warning, and unfinished.

        Args:
            reason: Why, for the other ranks' events.
            patience: Seconds in which the others may end the operations that this rank took part in; None takes the
                job's `timeout`, by which they are over in any case.
            finished: Whether this rank's work has ended as it should. The job is done when that holds for half of its
                ranks or more and no other goes on; who comes later gets `JobDone`. A rank that leaves others to go on
                without it may say False. Then a step that was left before it was decided stays in doubt.
        Raises:
            StepAborted: The last step was left before it was decided, and was committed on no rank; nobody has left the
                job. `Step.ready` has the other errors.
        """
        if self._left:
            return
        if finished:
            await self._steps.settle()
        self._left = True
        patience = self.config.timeout if patience is None else patience
        step = self.committed_step if finished else None
        with suppress(RuntimeError):  # the loop has been closed: nothing spreads any more
            self._runtime.loop.call_soon_threadsafe(self._spreader.close)
        try:
            await self._runtime.call(self._engine.aclose(reason, patience=patience, finished=step))
        finally:
            try:
                await self._runtime.aclose()
                self._context.close_down()
            finally:
                await self._held.aclose()
