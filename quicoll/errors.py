"""Errors of quicoll: the class says what went wrong, `usable` whether the group goes on.

    LocalError      you broke a rule; nothing was sent, the group is as usable as before
    Mismatch        the ranks called different things; every rank gets it, naming both sides
    PeerError       another rank failed or is late; this view is dead
    Corrupted       bytes changed between memory and memory, or two ranks hold different bits; this view is dead
    Partitioned     this rank cannot reach a quorum; it holds, and takes part again once it can
    StepAborted     the step was committed nowhere; inputs and outputs are untouched; begin it again
    Diverged        the ranks hold different states and nobody knows which is right; the job stops on all ranks
    ShardLost       a part of a sharded state is nowhere to be found; every rank gets it, before a step begins
    PiecesMissing   shared state could not be made strong in time: it says which rank lacks which pieces
    CheckpointError a checkpoint cannot be written or read; what was there before is still there
    AuditError      an audit cannot be written or read; nothing else is affected
    JournalError    the coordinator's journal cannot be used; what it holds is still there; the coordinator ends
    JobDone         the job is done, there is nothing to take part in; not caught, it ends the program with status 0

After any error but LocalError, PiecesMissing, CheckpointError and AuditError the next `job.step()` waits for the next
view; after Diverged it raises Diverged again.

`Terminated` and `Dismissed` are no errors but ends of the program that were asked for: SystemExits, so that no `except
Exception` takes them for a failure.
"""

from __future__ import annotations

__all__ = [
    "AuditError",
    "CheckpointError",
    "Corrupted",
    "Dismissed",
    "Diverged",
    "JobDone",
    "JournalError",
    "LocalError",
    "Mismatch",
    "Partitioned",
    "PeerError",
    "PiecesMissing",
    "QuicollError",
    "ShardLost",
    "StepAborted",
    "Terminated",
]


class QuicollError(Exception):
    """Root of quicoll's errors; never raised itself.

    Attributes:
        message: What happened, without the place.
        rank: The rank that caused it; None if no single rank did.
        node: That rank's node name; "" if no single rank did.
        view: The view in which it happened; None outside of one.
        step: The step in which it happened; None outside of one.
        op: The operation in which it happened, "" outside of one: "all_reduce#12" for the 13th collective of the view,
            "all_reduce#3@0:1" for one of the sub-group 0:1.
        lost: Nodes whose loss caused it, sorted; may be empty.
        usable: True if the current view still works.
    """

    usable: bool = False

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        node: str = "",
        view: int | None = None,
        step: int | None = None,
        op: str = "",
        lost: tuple[str, ...] = (),
        usable: bool | None = None,
    ) -> None:
        where = [
            f"{name}={value}"
            for name, value in (("rank", rank), ("node", node), ("view", view), ("step", step), ("op", op))
            if value is not None and value != ""
        ]
        super().__init__(f"{message} ({', '.join(where)})" if where else message)
        self.message = message
        self.rank = rank
        self.node = node
        self.view = view
        self.step = step
        self.op = op
        self.lost = lost
        if usable is not None:
            self.usable = usable


def again(error: QuicollError, *, rank: int | None, node: str, view: int, step: int | None, op: str) -> QuicollError:
    """Return an error of the same kind for one more operation that the same failure ended.

    It is not usable, whatever `error` said: other ranks have seen the operation begin and not end.

    Args:
        error: The failure as the first operation met it.
        rank: The rank that caused it.
        node: Its node name.
        view: The view of this operation.
        step: The step of this operation; None outside of one.
        op: The name of this operation.
    """
    return type(error)(error.message, rank=rank, node=node, view=view, step=step, op=op, lost=error.lost, usable=False)


class LocalError(QuicollError, ValueError):
    """The caller broke a rule. Nothing was sent, no buffer was changed, the group is still usable."""

    usable = True


class Mismatch(QuicollError):
    """Ranks called different collectives, or the same with other shapes, dtypes or options; no payload was used."""


class PeerError(QuicollError):
    """Another rank was lost, failed, or did not come by the deadline; the view is dead."""


class Corrupted(QuicollError):
    """A payload failed its checksum after all resends, or ranks hold different results; nothing was applied.

    Attributes:
        odd: Where it was found by comparing digests, the ranks that have, or sent, what is not right, or were sent
            other bits; may be empty. None where a checksum showed it, or the coordinator told it.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        node: str = "",
        view: int | None = None,
        step: int | None = None,
        op: str = "",
        lost: tuple[str, ...] = (),
        usable: bool | None = None,
        odd: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(message, rank=rank, node=node, view=view, step=step, op=op, lost=lost, usable=usable)
        self.odd = odd


class Partitioned(QuicollError):
    """This rank is cut off from a quorum of the last view. It makes no progress until it is heard again."""


class StepAborted(QuicollError):
    """The step was committed on no rank. If an error of this rank is the reason, it is the `__cause__`."""


class JobDone(QuicollError, SystemExit):
    """The other ranks have ended the job as they should; a rank that comes later has nothing left to do.

    That is a good end, so it is a `SystemExit` too: a program that does not catch it ends with status 0 and without a
    traceback, and `quicoll run` counts its worker as done. `except quicoll.JobDone` (or QuicollError) catches it, for a
    program that wants the final state. No rank is left that could hand it over: it is in the checkpoint of that step,
    where the job wrote one (`quicoll.checkpoint.of_step`, `quicoll.train.final_result`).

    Attributes:
        step: The step at which the job ended, as the ranks that ended it count.
        holds_state: Whether this rank's registered state is the one after that step.
    """

    def __init__(self, message: str, *, step: int, holds_state: bool = False) -> None:
        super().__init__(message, step=step)
        self.step: int = step
        self.holds_state = holds_state
        self.code = 0


class Diverged(QuicollError):
    """The ranks hold different states of one step, and there is no majority for one of them. Every rank gets this.

    Not to be tried again: no further step is possible in this process. Start all ranks anew from one checkpoint or one
    seed, and declare what is each rank's own (`Job.register_state`).

    Attributes:
        nodes: Those that hold different states, by rank.
        tensor: The path of the first tensor or value that differs.
    """

    def __init__(self, message: str, *, step: int, view: int, nodes: tuple[str, ...], tensor: str) -> None:
        super().__init__(message, step=step, view=view)
        self.nodes = nodes
        self.tensor = tensor


class ShardLost(QuicollError):
    """A part of a sharded state is held by no rank, and no checkpoint of that step has it. Every rank gets this.

    No step begins without it. Where the lost node comes back with what it held, the next entry of a step goes on;
    otherwise start all ranks anew from a checkpoint, or give the state a backup (`quicoll.Sharded`).

    Attributes:
        piece: The name of the state and of its piece, as "adam.m".
        start: The first element that is missing.
        stop: The one after the last.
        nodes: Who held it.
    """

    def __init__(
        self, message: str, *, piece: str, start: int, stop: int, nodes: tuple[str, ...], step: int, view: int
    ) -> None:
        super().__init__(message, node=nodes[0] if len(nodes) == 1 else "", step=step, view=view)
        self.piece = piece
        self.start = start
        self.stop = stop
        self.nodes = nodes


class PiecesMissing(QuicollError):
    """Shared state could not be made strong in time; every rank gets this. The group is still usable: try it again.

    Attributes:
        state: The name of the shared state.
        lacking: The names of pieces that were not there in their newest version, by node.
    """

    usable = True

    def __init__(self, message: str, *, state: str, lacking: dict[str, tuple[str, ...]], view: int) -> None:
        super().__init__(message, view=view)
        self.state = state
        self.lacking = lacking


class CheckpointError(QuicollError):
    """A checkpoint could not be written or read. Earlier checkpoints are untouched, the group is still usable.

    Attributes:
        path: The file or directory, "" if there is none.
    """

    usable = True

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{message}: {path}" if path else message)
        self.path = path


class AuditError(QuicollError):
    """An audit could not be written or read. The group is still usable.

    Attributes:
        path: The file or directory.
    """

    usable = True

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(f"audit {path}: {message}")
        self.path = path


class JournalError(QuicollError):
    """The coordinator's journal cannot be opened, read or written.

    Every decision that was announced is in it and stays there. The coordinator ends: after a write that failed, only
    who reads the journal again knows whether the record is in it. One of several that share a journal in a database
    stands by instead where the database was not to be reached, or another one leads.

    Attributes:
        path: The journal's file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(f"journal {path}: {message}")
        self.path = path


class Terminated(SystemExit):
    """This rank was asked to stop, by SIGTERM or `Job.stop`, and is at the entry of a step; no step is open.

    Where nobody catches it, the job is left in order and the process ends with status 143, which is SIGTERM's.
    """

    def __init__(self) -> None:
        super().__init__(143)  # 128 + SIGTERM


class Dismissed(SystemExit):
    """This rank has left the job, which goes on without it: an operator asked for fewer ranks, or for this one to go.

    It comes at the entry of a step or a wait there; no step is open, and this rank holds the result of the last one
    that it took part in. Where nobody catches it, the process ends with status 0, and `quicoll run` does not start it
    again.

    Attributes:
        message: Who leaves, and for what.
    """

    def __init__(self, message: str) -> None:
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message
