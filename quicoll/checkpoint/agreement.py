"""When a checkpoint is taken, and what all ranks of a view know of it: one state machine on each, equal on all.

    IDLE --due--> WRITING --all shares are told, and the step is committed--> SEALING --the manifest is there--> IDLE

    WRITING   each rank took a copy of what it is to write, and writes it to a file beside the training
    SEALING   the manifest is agreed; who seals (rank 0; where disks are not shared, every rank) writes it
    IDLE      the checkpoint is complete, or failed, or none was taken yet

Ranks exchange a `CheckpointReport` in the body of a step, where they have something to tell: in the first one of a
view, and while a checkpoint is under way. What follows is computed by each rank from the same reports (`conclude`) and
takes effect when that step is committed (`follow`): the results of the exchange are part of the step's vote, so ranks
that heard different things commit nothing. So all ranks know that the checkpoint is agreed, or none does.

Invariants.
1. In one view all ranks are in the same stage of the same checkpoint at every step's entry. A rank that comes later is
   in a new view; with a new view whatever is under way is given up by all, and a new one is due at once.
2. A manifest is written only of files that every rank has told to be durable, and of the state after a step that was
   committed: a checkpoint is begun in the body of the next step, before that one changes anything.
3. Training never waits for a disk: a checkpoint that is due while the last one is under way begins after it. What
   fails, on any rank, is known to all and gives up this checkpoint alone; older ones are as they were.

What a crash leaves, by the moment at which it comes, and who cleans up (`catalogue.no_longer_needed`, run by who seals
after each checkpoint that is complete):

    while files are written      temporary files, data without a manifest: no checkpoint. Removed after the next one
    before the manifest          data without a manifest: no checkpoint. The same
    while it is written          a temporary file: no checkpoint. The same; temporary ones when they are an hour old
    after its rename             the checkpoint is complete; durable when the directory was synced, and before that it
                                 is there or not. That all ranks are told of it comes after
    the sync after it fails      the ranks take it for failed and go on; if it is found later, it is whole
    while old ones are removed   manifests go first, durably: data without a manifest. Removed after the next one
    a manifest or data damaged   it is found by its digest, and the checkpoint before it is used
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from quicoll.checkpoint.manifest import CheckpointManifest, decoded_share, merged
from quicoll.errors import CheckpointError

__all__ = ["Agreement", "CheckpointOutcome", "CheckpointReport", "CheckpointStage", "decoded_report", "encoded_report"]


class CheckpointStage(enum.Enum):
    """See the module's head."""

    IDLE = "idle"
    WRITING = "writing"
    SEALING = "sealing"


class CheckpointReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank tells the others.

    newest: the newest complete checkpoint that it knows of. step: of the one under way; -1: none. share: what it has
    written (`manifest.Share`), b"" before. sealed: whether it has nothing left to write. error: why it cannot go on.
    """

    newest: int
    step: int = -1
    share: bytes = b""
    sealed: bool = False
    error: str = ""


_decoder = msgspec.msgpack.Decoder(CheckpointReport)


def encoded_report(report: CheckpointReport) -> bytes:
    """Return the bytes of a report."""
    return msgspec.msgpack.encode(report)


def decoded_report(data: object) -> CheckpointReport:
    """Read what another rank has told.

    Raises:
        CheckpointError: It is malformed.
    """
    try:
        if not isinstance(data, bytes):
            raise CheckpointError(f"a rank told {type(data).__name__} in the place of a report")
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"a rank told something that is no report of a checkpoint: {error}") from error


@dataclass(frozen=True, slots=True)
class CheckpointOutcome:
    """What follows from the reports of all ranks.

    step: Of the checkpoint that was under way; -1: none was, and one that has begun since is not meant. stage: The next
    one. manifest: of the checkpoint, from the moment when it is agreed. complete: it is there. error: why it is given
    up.
    """

    step: int
    stage: CheckpointStage
    manifest: CheckpointManifest | None = None
    complete: bool = False
    error: str = ""


@dataclass(slots=True)
class _UnderWay:
    """The checkpoint that is being taken. share, sealed, error: what this rank knows of its own part."""

    step: int
    metadata: dict[str, str]
    share: bytes = b""
    sealed: bool = False
    error: str = ""
    manifest: CheckpointManifest | None = field(default=None)


class Agreement:
    """See the module's head.

    Attributes:
        stage: Where this rank stands.
        newest: The step of the newest complete checkpoint that any rank of the view knows of.
    """

    def __init__(self, *, every: int, newest: int) -> None:
        """Begin with none under way.

        Args:
            every: A checkpoint is due when a multiple of it was passed since the newest one; 0: never.
            newest: The step of the checkpoint that this rank began with; 0: none.
        """
        self.stage = CheckpointStage.IDLE
        self.newest = newest
        self._every = every
        self._view = 0
        self._attempted = 0
        self._told = False
        self._here: _UnderWay | None = None

    @property
    def step(self) -> int:
        """Of the checkpoint under way; -1: none is."""
        return -1 if self._here is None else self._here.step

    @property
    def has_news(self) -> bool:
        """Whether the ranks have to exchange reports: the same on all ranks of the view."""
        return not self._told or self._here is not None

    def enter(self, view: int) -> None:
        """Take note of the view that this rank is in. In a new one nothing is under way any more."""
        if view != self._view:
            self._view, self._told, self._attempted = view, False, 0
            self.stage, self._here = CheckpointStage.IDLE, None

    def restored(self, step: int) -> None:
        """Take note that the checkpoint of this step is complete, and what this rank goes on from."""
        self.newest = max(self.newest, step)

    def due(self, step: int, *, last: bool = False) -> bool:
        """Return whether a checkpoint of the state after `step` has to be begun; the same on all ranks of the view.

        Args:
            step: The last one that is committed.
            last: Whether no step comes after it; then its checkpoint is due whatever its number.
        """
        if self.stage is not CheckpointStage.IDLE or not self._told or not self._every:
            return False
        before = max(self.newest, self._attempted)
        return step > before and (last or step // self._every > before // self._every)

    def begin(self, step: int, metadata: dict[str, str]) -> None:
        """Begin the checkpoint of the state after `step`."""
        self._attempted = step
        self.stage, self._here = CheckpointStage.WRITING, _UnderWay(step, metadata)

    # -- what becomes of this rank's part: of a checkpoint that was given up meanwhile it counts for nothing --------

    def written(self, view: int, step: int, share: bytes) -> None:
        """Take note that this rank's file is durable."""
        here = self._mine(view, step)
        if here is not None:
            here.share = share

    def sealed(self, view: int, step: int) -> None:
        """Take note that the manifest is durable, or that this rank is not to write it."""
        here = self._mine(view, step)
        if here is not None:
            here.sealed = True

    def failed(self, view: int, step: int, error: str) -> None:
        """Take note that this rank cannot write its part."""
        here = self._mine(view, step)
        if here is not None:
            here.error = error

    def _mine(self, view: int, step: int) -> _UnderWay | None:
        return self._here if view == self._view and step == self.step else None

    # -- the exchange ----------------------------------------------------------------------------------------------

    def report(self) -> CheckpointReport:
        """Return what this rank tells the others."""
        here = self._here
        if here is None:
            return CheckpointReport(self.newest)
        return CheckpointReport(self.newest, here.step, here.share, here.sealed, here.error)

    def conclude(self, reports: Sequence[CheckpointReport], nodes: Sequence[str]) -> CheckpointOutcome:
        """Return what follows from the reports of all ranks. What is newest counts at once, the rest when followed.

        Args:
            reports: By rank.
            nodes: Their names.
        """
        self._told = True
        self.newest = max(self.newest, *(report.newest for report in reports))
        here = self._here
        if here is None:
            return CheckpointOutcome(-1, CheckpointStage.IDLE)
        for report, node in zip(reports, nodes, strict=True):
            if report.step != here.step:
                return CheckpointOutcome(
                    here.step, CheckpointStage.IDLE, error=f"{node} takes no part in the checkpoint of step {here.step}"
                )
            if report.error:
                return CheckpointOutcome(here.step, CheckpointStage.IDLE, error=f"{node}: {report.error}")
        if self.stage is CheckpointStage.SEALING:
            sealed = all(report.sealed for report in reports)
            return CheckpointOutcome(
                here.step, CheckpointStage.IDLE if sealed else CheckpointStage.SEALING, here.manifest, complete=sealed
            )
        if not all(report.share for report in reports):
            return CheckpointOutcome(here.step, CheckpointStage.WRITING)
        try:
            shares = [decoded_share(report.share) for report in reports]
            manifest = merged(shares, step=here.step, view=self._view, metadata=here.metadata)
        except CheckpointError as error:
            return CheckpointOutcome(here.step, CheckpointStage.IDLE, error=error.message)
        return CheckpointOutcome(here.step, CheckpointStage.SEALING, manifest)

    def follow(self, outcome: CheckpointOutcome) -> None:
        """Go on as was concluded: the step whose body had the exchange is committed."""
        here = self._here
        if here is None or outcome.step != here.step:
            return
        self.stage, here.manifest = outcome.stage, outcome.manifest
        if outcome.complete:
            self.newest = max(self.newest, here.step)
        if outcome.stage is CheckpointStage.IDLE:
            self._here = None
