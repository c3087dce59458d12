"""One collective of one rank, from its checked arguments to its result.

    made        on the caller's thread. All that can be refused is refused here, before anything is sent
    sealed      likewise, where what the ranks give travels in their announcements: copied, with its checksum
    call        on the engine's thread: what it is to the engine
    prepare     on the engine's loop, once the ranks know each other's sizes: this rank's plan and its memory
    bits        on the caller's thread, after the end: the result as flat memory, for the vote and the audit
    result      on the caller's thread, after `bits`: what the caller gets

Of one that is given residuals these are not written here: the context knows when (context.py, "Residuals").

Who issues an operation, from which thread, and how its end is waited for, is no concern of it (see context.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from quicoll.audit.recorder import IssuedCall
from quicoll.collectives.shards import Leaves
from quicoll.engine.calls import Call
from quicoll.engine.given import seal_given
from quicoll.engine.messages import MAX_NUMBER
from quicoll.errors import LocalError
from quicoll.numerics.buffers import reach

if TYPE_CHECKING:
    from quicoll.collectives.base import GroupView
    from quicoll.engine.calls import Known, Work
    from quicoll.local.small import Counts, SmallCall
    from quicoll.numerics.bundle import Joined
    from quicoll.numerics.dtypes import Array
    from quicoll.numerics.feedback import ErrorFeedback
    from quicoll.numerics.overlap import Reach

__all__ = ["Operation", "flattened"]

T = TypeVar("T")


class _Answer(Protocol):
    """The future of an operation's number in its group, of whatever kind."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...


class Operation(Generic[T]):
    """Subclasses set what differs from these defaults, and define `prepare`, `result` and `bits`; those that may be
    `announced` define `sizes`, `payload` and `combine` too."""

    name: str
    signature: str  # all that has to be equal on all ranks, but for the group
    counts: tuple[int, ...] = ()  # this rank's sizes, where they may differ from rank to rank
    gathers = False  # whether the work depends on the counts of all ranks
    measures = False  # whether it depends on the agreed network
    ranks: tuple[int, ...] | None = None  # of the view, where not all of the group take part
    divides = False  # whether sub-groups come of it
    watched = True  # whether a rank that comes late is a straggler
    shared = False  # whether all ranks get the same bits
    holds = True  # whether this rank gets a result
    in_place = False  # whether the caller's `out` changes while it is under way
    announced = False  # whether what the ranks give travels in their announcements
    sealed = b""  # what this rank gives in its own
    # The caller's tensors, inputs and last `out`; of a list or leaves each, None where there is none.
    given: tuple[Any, ...] = ()
    feedback: ErrorFeedback | None = None  # residuals, which are written once it has succeeded
    answer: _Answer | None = None  # from when it was issued
    group_id: int  # under which it is counted

    def __init__(self, here: GroupView) -> None:
        self.here = here
        self.group_id = here.scope.group_id

    def prepare(self, known: Known) -> Work:
        """Return this rank's plan with its memory. Raises PeerError for what other ranks must not announce."""
        raise NotImplementedError

    def small_call(self, number: int) -> SmallCall | None:
        """Return it as a call of which all ranks see what each gives, through the memory of one host. None where that
        is not its way; asked for only between ranks that share one.

        Args:
            number: Its number in the group.
        """
        return None

    def sizes(self) -> Sequence[int]:
        """Return the bytes that each rank gives, where it is `announced`."""
        raise NotImplementedError

    def payload(self) -> bytes:
        """Return a copy of what this rank gives, where all see it."""
        raise NotImplementedError

    def combine(self, payloads: Sequence[bytes], counts: Counts) -> None:
        """Take what each rank gives, and leave the result where its owner finds it."""
        raise NotImplementedError

    def seal(self) -> None:
        """Copy what travels in the announcement, on the caller's thread: from here on its tensors may change."""
        self.sealed = seal_given(self.payload())

    def result(self) -> T:
        """Return what the caller gets; with `out`, write it there. Raises LocalError where `out` was changed."""
        raise NotImplementedError

    def bits(self) -> Array:
        """Return the result as flat memory; asked for only where this rank `holds` one."""
        raise NotImplementedError

    @property
    def called(self) -> str:
        """All that has to be equal on all ranks, and the group where that is not of all ranks."""
        name = self.here.scope.name
        return f"{self.signature} group={name}" if name else self.signature

    @property
    def failed(self) -> bool:
        """Whether it has ended without a result."""
        answer = self.answer
        return answer is not None and answer.done() and (answer.cancelled() or answer.exception() is not None)

    def step_aside(self) -> None:
        """Leave the caller's `out` alone until `result`. Before the operation is issued."""

    def reaches(self) -> list[Reach]:
        """Return where the memory of the caller's tensors lies."""
        given = [reach(value) for value in flattened(self.given)]
        return given if self.feedback is None else given + self.feedback.reaches()

    def written(self) -> list[Reach]:
        """Return where the caller's memory lies that is written before its result was taken, or as it is."""
        out = [reach(self.given[-1])] if self.in_place else []
        return out if self.feedback is None else out + self.feedback.reaches()

    def demand_counts(self) -> None:
        """Raise LocalError for counts that cannot be announced."""
        if self.counts and max(self.counts) > MAX_NUMBER:
            raise LocalError(f"{max(self.counts)} is more than can be announced; {MAX_NUMBER} is the most")

    def call(self) -> Call:
        """Return the operation as the engine takes it."""
        scope = self.here.scope
        divides = scope.watched and (self.divides or bool(scope.name) or self.ranks is not None)
        sizes, combine = (self.sizes(), self.combine) if self.announced else (None, None)
        if not scope.name:
            return Call(
                self.name,
                self.signature,
                self.prepare,
                self.counts,
                self.gathers,
                self.measures,
                self.ranks,
                watched=self.watched,
                divides=divides,
                sizes=sizes,
                combine=combine,
                given=self.sealed,
            )
        return Call(
            self.name,
            self.called,
            self.prepare,
            self.counts,
            self.gathers,
            self.measures,
            scope.ranks if self.ranks is None else self.ranks,
            scope.name,
            self.watched and scope.watched,
            divides,
            sizes,
            combine,
            self.sealed,
        )

    # -- for the audit -------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return what was called, for the audit and for people."""
        raise NotImplementedError

    def terms(self) -> str:
        """Return what else the result depends on, for the audit."""
        return ""

    def inputs(self) -> Sequence[tuple[int, Array | Joined]]:
        """Return number and elements of each leaf that this rank gives, for the audit."""
        return ()

    def issued(self) -> IssuedCall:
        """Return the operation as the audit takes it."""
        return IssuedCall(
            self.here.scope.name or "world",
            self.text(),
            self.inputs(),
            self.bits if self.holds else None,
            agreed=self.shared,
            terms=self.terms(),
            members=0 if self.ranks is None else len(self.ranks),
        )


def flattened(values: Any) -> list[Any]:
    """Return the tensors in what a caller passed: tensors, lists of them, leaves of either, None."""
    if isinstance(values, Leaves):
        return flattened(values.values)
    if isinstance(values, list | tuple):
        return [each for value in values for each in flattened(value)]
    return [] if values is None else [values]
