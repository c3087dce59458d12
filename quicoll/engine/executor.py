"""Runs one rank's plan over its ways to the others (`Way`): posts, sends, reduces, in the order and with the waits that
the plan states. A way is a link, or goes through the memory of a host that two ranks share (host_ways.py).

Memory: the inputs are read in place and sent from where they lie (but for a chunk that spans several tensors of a
list); results arrive straight in the output; each open lane takes its scratch, nothing else. A message of INLINE_BYTES
at most is copied instead, and nobody here waits for its end: the rank that waits for the message says what went wrong
with it, and a link that ends breaks the view. Not so for `send`, which promises its caller that all has arrived.

Far links. The last acknowledgement comes half a round trip after the last result, and until then what was sent has to
stay as it is. So what goes to a rank that is _FAR_NS away is copied as well, _MOST_KEPT bytes of it at a time: it holds
back the lanes behind it as ever, but not the end of the plan. A message is *kept* from then on:

    kept -> over       acknowledged, or failed while the plan still runs, which ends the plan
    kept -> on its own the plan has ended well: the link goes on sending, and nobody here hears of it, as with a copy
    kept -> aborted    the plan was closed before its end

Lanes are started in order and the same number is open on every rank, so the first lane unfinished anywhere is open
everywhere (quicoll.plan.model says why that suffices).

Nothing here is a task. A lane is a generator that stands where it needs a message which has not come; the end of a
transfer lets it go on, in the turn of the loop in which it came. Who waits for the whole is called when it has ended
(`wake`), and then asks `finished`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quicoll.numerics.buffers import memory
from quicoll.numerics.reduce import reduce_tree
from quicoll.plan import Buf, CopyStep, Lane, RecvStep, ReduceStep, SendStep, Span
from quicoll_transport.errors import MessageCorrupted, MessageRefused, TransportError
from quicoll_transport.link.frames import INLINE_BYTES

if TYPE_CHECKING:
    from quicoll.engine.calls import Work
    from quicoll.numerics.dtypes import Array

__all__ = ["Execution", "Moving", "TransferFailed", "Way"]


_MOST_COPIED = 64 << 10  # bytes of one operation: what is cut into many short messages stays where it lies
_MOST_KEPT = 32 << 20  # bytes of one operation that are under way as copies
_FAR_NS = 5_000_000  # of the shortest round trip; a copy of a MiB takes a fiftieth of it


class Moving(Protocol):
    """A message under way, as `quicoll_transport.endpoint.Transfer`. done: it is there (error is None), has failed, or
    was taken back (aborted)."""

    done: bool
    aborted: bool
    error: TransportError | None

    def abort(self) -> None:
        """Take it back: its memory is the caller's again. Nothing happens to one that is done."""
        ...


class Way(Protocol):
    """To one rank, as `quicoll_transport.endpoint.Link` is one."""

    @property
    def min_rtt_ns(self) -> int | None:
        """The shortest round trip; None where it is not measured."""
        ...

    def send(self, tag: bytes, payload: memoryview, on_done: Callable[[Moving], None]) -> Moving:
        """Send bytes from the caller's memory, which must not change until it is done or taken back."""
        ...

    def send_copy(self, tag: bytes, payload: memoryview) -> None:
        """Send a few bytes, which are the caller's again at once; INLINE_BYTES at most."""
        ...

    def post(self, tag: bytes, buffer: memoryview, on_done: Callable[[Moving], None]) -> Moving:
        """Receive the message with this tag, of exactly as many bytes, into the caller's memory."""
        ...


class TransferFailed(Exception):
    """A message to or from `rank` failed; `error` says how. Never leaves the engine: the communicator turns it into
    ours.

    sending: whether it was one of ours. consequence: whether the cause is at the peer, who knows of it
    (quicoll.engine.communicator).
    """

    def __init__(self, rank: int, error: TransportError, *, sending: bool) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.error = error
        self.sending = sending

    @property
    def consequence(self) -> bool:
        return isinstance(self.error, MessageRefused) or (self.sending and isinstance(self.error, MessageCorrupted))


class Execution:
    """One plan under way. Ended or not, `close` it: then its transfers are taken back, and nothing is read of the
    inputs or written to the output any more."""

    def __init__(
        self,
        work: Work,
        *,
        ways: Mapping[int, Way],
        ranks: Sequence[int],
        prefix: bytes,
        wake: Callable[[], None],
    ) -> None:
        """Begin: memory is posted, and what is ready is sent.

        Args:
            work: The plan and its memory.
            ways: To the peers, by rank of the view.
            ranks: The ranks of the view that take part, in the order in which the plan numbers them.
            prefix: What the tags of this operation's messages start with; four bytes of the message's index follow.
            wake: Called when it has ended, well or not; not before this returns.
        """
        self._ways = ways
        self._ranks = ranks
        self._prefix = prefix
        self._room = -1 if work.plan.collective == "send" else _MOST_COPIED  # for copies
        self._kept: dict[Moving, int] = {}  # bytes of each
        self._kept_bytes = 0
        self._far: dict[int, bool] = {}  # by number in the plan
        self._wake: Callable[[], None] = _nobody
        self._lanes = iter(work.plan.lanes)
        self._failures: list[TransferFailed] = []
        self._error: Exception | None = None
        self._blocked: dict[Moving, _Runner] = {}  # by what it waits for
        self._runners: list[_Runner] = [self._run_lanes(work) for _ in range(max(work.plan.open_lanes, 1))]
        self._open = len(self._runners)
        for runner in self._runners:
            self._go_on(runner)
        self._wake = wake

    def finished(self) -> bool:
        """Return whether the plan has run to its end.

        Raises:
            TransferFailed: A message failed, even if a lane waits for another: the cause has to be reported before
                anybody's deadline.
        """
        if self._failures:
            # Which one of several must not depend on timing more than it has to: the lowest rank's. What only follows
            # from another rank's failure comes last.
            first = min(self._failures, key=lambda failure: (failure.consequence, failure.rank))
            raise first from first.error
        if self._error is not None:
            raise self._error
        return self._open == 0

    @property
    def failed(self) -> bool:
        """Whether `finished` would raise."""
        return bool(self._failures) or self._error is not None

    def close(self) -> None:
        """Take back what is under way. Nothing happens to what is done.

        Nothing of the plan's memory is held afterwards, though messages that go on by themselves may still know of us.
        """
        self._blocked.clear()
        for runner in self._runners:
            runner.close()
        self._runners.clear()
        if self._open:
            for transfer in self._kept:
                transfer.abort()
            self._kept.clear()
        self._wake = _nobody

    def _go_on(self, runner: _Runner) -> None:
        """Let some lanes go on until they wait for a transfer, or have ended."""
        if self._failures or self._error is not None:
            return
        try:
            self._blocked[next(runner)] = runner
        except StopIteration:
            self._open -= 1
            if self._open == 0:
                self._wake()
        except Exception as error:
            self._error = error
            self._wake()

    def _over(self, rank: int, sending: bool, transfer: Moving) -> None:
        """A transfer is done: if it failed, everything ends that has not."""
        kept = self._kept.pop(transfer, None)
        if kept is not None:
            self._kept_bytes -= kept
            if self._open == 0:
                return
        if transfer.error is not None:
            self._failures.append(TransferFailed(rank, transfer.error, sending=sending))
            self._wake()
        elif (runner := self._blocked.pop(transfer, None)) is not None:
            self._go_on(runner)

    def _post(self, step: RecvStep, memory: memoryview) -> Moving:
        way = self._ways[self._ranks[step.peer]]
        return way.post(self._prefix + step.index.to_bytes(4, "big"), memory, partial(self._over, step.peer, False))

    def _send(self, step: SendStep, memory: memoryview, *, later: bool) -> Moving | None:
        """Send a message; None where it is copied. later: whether its end is awaited behind the lane's."""
        way = self._ways[self._ranks[step.peer]]
        tag = self._prefix + step.index.to_bytes(4, "big")
        if len(memory) <= min(INLINE_BYTES, self._room):
            self._room -= len(memory)
            way.send_copy(tag, memory)
            return None
        over = partial(self._over, step.peer, True)
        if not later or self._kept_bytes + len(memory) > _MOST_KEPT or not self._is_far(step.peer):
            return way.send(tag, memory, over)
        transfer = way.send(tag, memoryview(bytes(memory)), over)
        if not transfer.done:
            self._kept[transfer] = len(memory)
            self._kept_bytes += len(memory)
        return transfer

    def _is_far(self, peer: int) -> bool:
        """Return whether an acknowledgement of a rank takes long; asked once, so that a plan is of one kind."""
        far = self._far.get(peer)
        if far is None:
            far = self._far[peer] = (self._ways[self._ranks[peer]].min_rtt_ns or 0) >= _FAR_NS
        return far

    def _run_lanes(self, work: Work) -> _Runner:
        unacknowledged: list[Moving] = []
        try:
            for lane in self._lanes:
                before = len(unacknowledged)
                yield from self._run_lane(work, lane, unacknowledged)
                yield from _all_arrived(unacknowledged[:before])
                del unacknowledged[:before]
            yield from _all_arrived([transfer for transfer in unacknowledged if transfer not in self._kept])
        finally:
            for transfer in unacknowledged:
                if transfer not in self._kept:
                    transfer.abort()

    def _run_lane(self, work: Work, lane: Lane, unacknowledged: list[Moving]) -> _Runner:
        """Run a lane until its result is there. unacknowledged: gets those of its Sends that may be awaited later."""
        scratch = [np.empty(slot.elements, (work.acc if slot.wide else work.dtype).storage) for slot in lane.scratch]

        def array(span: Span) -> Array:
            if span.buf is Buf.INPUT:
                return work.inputs[span.slot][span.start : span.stop]
            if span.buf is Buf.OUTPUT:
                return work.output[span.start : span.stop]
            return scratch[span.slot][span.start : span.stop]

        posted: dict[int, Moving] = {}
        sent: list[Moving] = []
        try:
            for position, step in enumerate(lane.steps):
                if isinstance(step, RecvStep):
                    posted[position] = self._post(step, memory(array(step.dst)))
            for step, waits in zip(lane.steps, lane.waits, strict=True):
                for position in waits:
                    if not _arrived(transfer := posted[position]):
                        yield transfer
                if isinstance(step, SendStep):
                    later = bool(posted) and step.src.buf is not Buf.SCRATCH  # as the plan's model has it
                    if (sending := self._send(step, memory(array(step.src)), later=later)) is not None:
                        (unacknowledged if later else sent).append(sending)
                elif isinstance(step, CopyStep):
                    np.copyto(array(step.dst), array(step.src))
                elif isinstance(step, ReduceStep):
                    reduce_tree(
                        step.tree,
                        array,
                        op=work.op,
                        dtype=work.dtype,
                        acc=work.acc,
                        out=array(step.dst),
                        final=step.finish,
                        leaves=work.plan.leaves,
                    )
            yield from _all_arrived([*posted.values(), *sent])
        finally:
            for transfer in [*posted.values(), *sent]:
                transfer.abort()


def _nobody() -> None:
    """Who hears of a plan's end before it runs, or once it was closed."""


def _all_arrived(transfers: Sequence[Moving]) -> _Runner:
    for transfer in transfers:
        if not _arrived(transfer):
            yield transfer


_Runner = Generator["Moving", None, None]
"""One lane after the other; yields the transfer that the present one waits for."""


def _arrived(transfer: Moving) -> bool:
    """Whether a transfer is done and went well. Of one that failed `Execution._over` hears in a moment."""
    return transfer.done and not transfer.aborted and transfer.error is None
