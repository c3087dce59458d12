"""The ranks of one view, joined by links: collectives run here, on the engine's loop.

A collective's identity is (view, group, seq), seq counting the calls of a group within a view in the order in which
they were issued. Before any payload is used the ranks compare what they called:

    announce    each rank sends its signature (collective, dtype, shape, op, order, ...) to every other
    execute     the plan runs meanwhile; results stand in memory of ours
    agree       all signatures are equal; only then does the caller see a result

Different code paths on different ranks so give Mismatch on all of them, naming both sides; a rank that never calls
is named when the deadline passes.

Some operations choose their algorithm by what the links have measured, and all ranks have to choose alike. The first
of them in a group brings this rank's measurements with its announcement; once all have come, every rank makes the same
network of them (`plan.cost.agreed`), which serves the group for as long as the view lasts. Those that are issued
meanwhile wait for it. Which one is the first follows from the order of the calls, so it is the same everywhere.

Who takes part. A plan numbers its ranks from 0; `Call.ranks` says which ranks of the view these are: all of them, those
of a sub-group in its order, or the two of a `send`. Only they announce to each other, and operations of one group know
nothing of those of another (quicoll.collectives.subgroups says why that cannot deadlock).

A communicator breaks once and for all: when a peer is lost, a collective fails or is cancelled, or the coordinator ends
the view. Then every operation in flight ends, and what still arrives for this view is dropped.

    whole     operations run
    broken    something failed here: every transfer is taken back, and the coordinator has been told
    judged    the coordinator has told every rank the same: why the view is over, and who is to blame

Callers are given the verdict and not what this rank saw of it, so that all ranks raise one kind of error with one
culprit; what was seen here is its `__cause__`. No new view can come before the verdict, so waiting for it costs
nothing, and it is bounded: by the operation's own deadline, by `_VERDICT_S`, and by the loss of the coordinator, which
is a verdict too. Where the verdict blames nobody (two ranks that called different things), each names the other.
A broken rule of the caller's is his alone: he is given it at once, the others hear of it by the verdict.

Parting. A rank that is done with an operation knows that all others called it, and that what it sent has arrived; not
that they have all of it from each other. Were it to leave the job then, the view would end, and with it their part of
an operation that has gone well. So a rank that leaves first tells its peers (`Farewell`), and each answers when it is
through with what ran there at that moment, but for operations that wait for the leaving rank's call, which will not
come; `part` waits for the answers. So those who leave do not wait for each other, and not for what begins later.

Causes and consequences. A rank whose operation fails withdraws its memory, and messages on their way there are refused;
a rank that gets spoiled bits again and again tells their source so. Where the calls agree, neither has another reason:
the cause is at the peer, who has told the coordinator of it. Were the consequence reported as well, it could arrive
first, and hide the cause. So consequences only wait for the verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quicoll.engine.executor import TransferFailed, Work, execute
from quicoll.engine.messages import Announce, Farewell, encode_word
from quicoll.errors import Corrupted, LocalError, Mismatch, PeerError, QuicollError, again
from quicoll.plan.cost import NetworkModel, agreed, quantised
from quicoll_transport.errors import LinkLost, MessageCorrupted
from quicoll_transport.errors import TransportError as _TransportError

if TYPE_CHECKING:
    from quicoll.membership.view import View
    from quicoll_transport.endpoint import Link

__all__ = ["Call", "Communicator", "site_numbers", "view_prefix"]

_TAG = struct.Struct("!QQII")  # view, group, seq, index
_MAX_AHEAD = 65536  # operations that a peer may be ahead of us
_VERDICT_S = 5.0


def site_numbers(view: View, ranks: Sequence[int] | None = None) -> tuple[int, ...]:
    """The site of each of `ranks` (None: all) as a number, from 0 in the order of appearance; who names none is where
    the others are that name none."""
    numbers: dict[str, int] = {}
    members = view.members if ranks is None else [view.members[rank] for rank in ranks]
    return tuple(numbers.setdefault(member.site, len(numbers)) for member in members)


def view_prefix(view_id: int) -> bytes:
    """What the tags of all messages of a view start with."""
    return view_id.to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class Known:
    """What a rank knows of the others when it makes its part of a collective.

    counts: what each has announced; None for those that have not yet, unless the call `gathers`. network: that which
    the group has agreed on; None unless the call `measures`.
    """

    counts: list[tuple[int, ...] | None]
    network: NetworkModel | None


@dataclass(frozen=True, slots=True)
class Call:
    """A collective as its caller asked for it.

    signature: everything that must be equal on all ranks. make gives the work of this rank. counts: this rank's sizes
    where they may differ. gathers: whether the work depends on those of all ranks. measures: whether it depends on the
    agreed network. ranks: who takes part, this rank included, as ranks of the view, in the order in which the plan
    numbers them; None: all. where: the group's name, "" for all ranks. watched: whether who comes late is of interest.
    """

    name: str
    signature: str
    make: Callable[[Known], Work]
    counts: tuple[int, ...] = ()
    gathers: bool = False
    measures: bool = False
    ranks: tuple[int, ...] | None = None
    where: str = ""
    watched: bool = True


@dataclass(slots=True, eq=False)
class _Slot:
    """Announcements for one operation, by rank of the view, and when they came here; `complete` is set when those of
    all `ranks` are there."""

    announced: dict[int, Announce] = field(default_factory=dict)
    arrived_ns: dict[int, int] = field(default_factory=dict)
    complete: asyncio.Future[None] | None = None
    ranks: tuple[int, ...] = ()


class Communicator:
    """One view's links and operations. See the module's head.

    error: what it broke of, None while it works. verdict: as told to all, None until then.
    `on_failure(error, blamed)` is called once, when it breaks from inside; blamed: ranks whose bits came spoiled, or
    who called something else.
    `on_called(op, arrived_ns)` for each operation that all have called: when each rank's call came to be known here.
    """

    def __init__(
        self,
        view: View,
        *,
        node: str,
        loop: asyncio.AbstractEventLoop,
        links: dict[int, Link],
        on_failure: Callable[[QuicollError, tuple[int, ...]], None],
        on_called: Callable[[str, dict[int, int]], None] = lambda op, arrived_ns: None,
    ) -> None:
        rank = view.rank_of(node)
        if rank is None:
            raise ValueError(f"{node} is not in view {view.view_id}")
        self.view = view
        self.rank = rank
        self.world = view.world_size
        self.error: QuicollError | None = None
        self.verdict: QuicollError | None = None
        self._loop = loop
        self._links = links
        self._on_failure = on_failure
        self._on_called = on_called
        self._next: dict[int, int] = {}
        self._networks: dict[int, asyncio.Future[NetworkModel]] = {}
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._broken: asyncio.Future[None] = loop.create_future()
        self._judged: asyncio.Future[None] = loop.create_future()
        self._spoiled = {rank: link.snapshot().corrupt for rank, link in links.items()}  # before this view
        self._running = 0
        # Peers that will leave and are not answered yet, each with the operations that it has to wait for.
        self._parting: dict[int, dict[tuple[int, int], None]] = {}
        self._unanswered: dict[int, None] = {}  # peers that have not answered our own farewell
        self._answered: asyncio.Future[None] | None = None

    @property
    def running(self) -> int:
        """Operations in flight."""
        return self._running

    # -- what arrives --------------------------------------------------------------------------------------------

    def announced(self, rank: int, announce: Announce) -> None:
        """A peer told what it called."""
        if self.error is not None:
            return
        at = self._next.get(announce.group, 0)
        if announce.seq < at and (announce.group, announce.seq) not in self._slots:
            self.fail(PeerError(f"announced operation {announce.seq} twice", rank=rank, view=self.view.view_id))
            return
        if announce.seq > at + _MAX_AHEAD or len(self._slots) > _MAX_AHEAD:
            self.fail(PeerError(f"is {announce.seq - at} operations ahead", rank=rank, view=self.view.view_id))
            return
        self._put(rank, announce)

    def _put(self, rank: int, announce: Announce) -> None:
        slot = self._slots.setdefault((announce.group, announce.seq), _Slot())
        if rank not in slot.announced:
            slot.announced[rank] = announce
            slot.arrived_ns[rank] = round(self._loop.time() * 1e9)
        if slot.complete is not None and not slot.complete.done() and self._is_settled(slot):
            slot.complete.set_result(None)

    def _is_settled(self, slot: _Slot) -> bool:
        """All who take part have announced, or two of them already differ, or somebody has who takes no part."""
        if all(rank in slot.announced for rank in slot.ranks):
            return True
        if any(rank not in slot.ranks for rank in slot.announced):
            return True
        own = slot.announced.get(self.rank)
        return own is not None and any(other.signature != own.signature for other in slot.announced.values())

    # -- parting -------------------------------------------------------------------------------------------------

    async def part(self, timeout: float) -> None:
        """Wait until no peer needs this view any more for an operation that this rank has called; at most `timeout`
        seconds, and only as long as the view is whole."""
        if self.error is not None or self._answered is not None:
            return
        self._answered = self._loop.create_future()
        for rank, link in self._links.items():
            try:
                link.send_app(encode_word(Farewell(self.view.view_id)))
            except _TransportError:
                continue
            self._unanswered[rank] = None
        if self._unanswered:
            await asyncio.wait({self._answered, self._broken}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def farewell(self, rank: int, word: Farewell) -> None:
        """A peer will leave, or needs us no longer."""
        if not word.done:
            running = [(key, slot) for key, slot in self._slots.items() if slot.complete is not None]
            self._parting[rank] = {
                key: None for key, slot in running if rank in slot.announced or rank not in slot.ranks
            }
            self._answer()
            return
        self._unanswered.pop(rank, None)
        if not self._unanswered and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _answer(self) -> None:
        """Let those go who have nothing to wait for here any more."""
        for rank, awaited in list(self._parting.items()):
            if self.error is None and any(key in self._slots for key in awaited):
                continue
            del self._parting[rank]
            with contextlib.suppress(_TransportError):
                self._links[rank].send_app(encode_word(Farewell(self.view.view_id, done=True)))

    # -- operations ----------------------------------------------------------------------------------------------

    async def run(self, call: Call, *, group: int, timeout: float, step: int | None) -> int:
        """Run a collective of this view; its number in the group. Raises our errors, and breaks the communicator if so.

        timeout: seconds for the whole of it. The number in the group is taken before the first await, so that the
        order of calls defines identity.
        """
        deadline = self._loop.time() + timeout
        if self.error is not None:
            raise self._again(await self.judgement(deadline) or self.error, call.name, step)
        seq = self._next.get(group, 0)
        self._next[group] = seq + 1
        name = f"{call.name}#{seq}@{call.where}" if call.where else f"{call.name}#{seq}"
        slot = self._slots.setdefault((group, seq), _Slot())
        slot.complete = self._loop.create_future()
        slot.ranks = tuple(range(self.world)) if call.ranks is None else call.ranks
        leads = call.measures and group not in self._networks
        if leads:
            self._networks[group] = self._loop.create_future()
        measured = self._measured(slot.ranks) if leads else ()
        announce = Announce(self.view.view_id, group, seq, call.signature, call.counts, measured)
        inner = self._loop.create_task(self._operate(call, name, announce, slot, leads=leads))
        self._running += 1
        try:
            seen = await self._seen(inner, slot, deadline, timeout, name, step)
            if seen is None:
                return seq
            error, blamed, consequence = seen
            if not consequence:
                self.fail(error, blamed)
            inner.cancel()  # its transfers are taken back before the wait and not after it
            told = error if isinstance(error, LocalError) else await self.judgement(deadline)
            self.fail(error)  # a consequence of a cause that nobody has told of
        except asyncio.CancelledError:
            self._fail_here(f"{name} was cancelled")
            raise
        except Exception as broken:  # of our own code or for lack of memory: nobody may have to wait for it
            self._fail_here(f"{name} failed: {type(broken).__name__}: {broken}")
            raise
        finally:
            self._running -= 1
            inner.cancel()
            try:
                await asyncio.wait({inner})
            finally:
                # Last, and with no await before `fail`: a late announcement must find the slot or the failure.
                del self._slots[group, seq]
                self._answer()
            if not inner.cancelled():
                inner.exception()
        raise self._again(told or error, name, step, seen=error) from None if told in (None, error) else error

    async def _seen(
        self, inner: asyncio.Task[None], slot: _Slot, deadline: float, timeout: float, name: str, step: int | None
    ) -> tuple[QuicollError, tuple[int, ...], bool] | None:
        """Wait for the end of an operation: None if it went well, otherwise what this rank saw of its failure, the
        ranks to blame for it, and whether it is but a consequence."""
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.wait({inner, self._broken}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return self._late(slot, timeout, name, step), (), False
        if self.error is not None:
            return self.error, (), False
        try:
            inner.result()
        except TransferFailed as failed:
            rank = slot.ranks[failed.rank]
            error = self._translate(failed, rank, name, step)
            return error, self._spoilers(rank) if isinstance(error, Corrupted) else (), failed.consequence
        except Mismatch as error:
            own = slot.announced[self.rank].signature
            others = sorted(rank for rank, told in slot.announced.items() if told.signature != own)
            return self._again(error, name, step), tuple(others), False
        except QuicollError as error:
            return self._again(error, name, step), (), False
        return None

    async def judgement(self, deadline: float | None = None) -> QuicollError | None:
        """Why a broken communicator is over, as all ranks are told; as this rank knows it, where that does not come by
        `deadline` (of the loop's clock) and within `_VERDICT_S`; None for one that is whole."""
        now = self._loop.time()
        until = now + _VERDICT_S if deadline is None else min(deadline, now + _VERDICT_S)
        await asyncio.wait({self._judged}, timeout=max(until - now, 0.0))
        return self.verdict or self.error

    async def _operate(self, call: Call, name: str, announce: Announce, slot: _Slot, *, leads: bool) -> None:
        complete = slot.complete
        if complete is None:
            raise AssertionError("an operation without its slot")
        data = encode_word(announce)
        for number, rank in enumerate(slot.ranks):
            if rank == self.rank:
                continue
            try:
                self._links[rank].send_app(data)
            except _TransportError as error:
                raise TransferFailed(number, error, sending=True) from error
        self._put(self.rank, announce)
        if call.gathers or leads or len(slot.ranks) == 1:
            await complete
            self._compare(slot)
        work = await self._work(call, announce.group, slot, leads=leads)
        prefix = _TAG.pack(self.view.view_id, announce.group, announce.seq, 0)[:-4]
        payload = asyncio.create_task(
            execute(
                work,
                link=lambda peer: self._links[slot.ranks[peer]],
                tag=lambda index: prefix + index.to_bytes(4, "big"),
            )
        )
        try:
            await complete
            self._compare(slot)
            if call.watched:
                self._on_called(name, slot.arrived_ns)
            await payload
        finally:
            # Whatever ends this operation, its transfers are taken back before anyone reuses the memory.
            payload.cancel()
            await asyncio.wait({payload})
            if not payload.cancelled():
                payload.exception()

    async def _work(self, call: Call, group: int, slot: _Slot, *, leads: bool) -> Work:
        network = None
        if call.measures:
            if leads:
                self._networks[group].set_result(self._agree(slot))
            network = await asyncio.shield(self._networks[group])
        counts = [slot.announced[r].counts if r in slot.announced else None for r in slot.ranks]
        return call.make(Known(counts, network))

    def _measured(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """What the links to `ranks` have measured: microseconds one way, then bytes a second, each 0 if not known.

        The rate is the one at which the peer acknowledged what was kept waiting for it. Congestion window by round trip
        is none: at a job's start it says what a path was not yet asked, later far more than the processors can move.
        """
        latency, rate = [0] * len(ranks), [0] * len(ranks)
        for number, rank in enumerate(ranks):
            if rank == self.rank:
                continue
            seen = self._links[rank].snapshot()
            rtt_ns = seen.path_min_rtt_ns or seen.rtt_ns
            if rtt_ns:
                latency[number] = quantised(rtt_ns // 2000)
                rate[number] = quantised(seen.delivery_rate or 0)
        return *latency, *rate

    def _agree(self, slot: _Slot) -> NetworkModel:
        for rank in slot.ranks:
            if len(slot.announced[rank].measured) != 2 * len(slot.ranks):
                raise PeerError("brings no measurements", rank=rank, node=self._node(rank), view=self.view.view_id)
        rows = [slot.announced[rank].measured for rank in slot.ranks]
        return agreed(rows, site_numbers(self.view, slot.ranks))

    def _compare(self, slot: _Slot) -> None:
        own = slot.announced[self.rank].signature
        for rank in sorted(slot.announced):
            if rank not in slot.ranks:
                raise PeerError("calls operations of a group that it is not in", rank=rank, node=self._node(rank))
            theirs = slot.announced[rank].signature
            if theirs != own:
                raise Mismatch(
                    f"rank {self.rank} ({self._node(self.rank)}) called {own}, "
                    f"rank {rank} ({self._node(rank)}) called {theirs}",
                    rank=rank,
                    node=self._node(rank),
                )

    # -- failure -------------------------------------------------------------------------------------------------

    def fail(self, error: QuicollError, blamed: tuple[int, ...] = ()) -> None:
        """Break from inside: every operation ends, and whoever owns the communicator is told."""
        if self.error is None:
            self._break(error)
            self._on_failure(error, blamed)

    def _fail_here(self, why: str) -> None:
        self.fail(PeerError(why, rank=self.rank, node=self._node(self.rank), view=self.view.view_id))

    def end(self, verdict: QuicollError) -> None:
        """The view is over, and this is what all ranks are told of it."""
        if self.verdict is None:
            self.verdict = verdict
            self._break(verdict)
            self._judged.set_result(None)

    def _break(self, error: QuicollError) -> None:
        """Nothing of this view is received any more."""
        if self.error is not None:
            return
        self.error = error
        self._broken.set_result(None)
        prefix = view_prefix(self.view.view_id)
        for link in self._links.values():
            if not link.ended:
                link.discard(prefix)

    def _again(
        self, error: QuicollError, name: str, step: int | None, *, seen: QuicollError | None = None
    ) -> QuicollError:
        """`errors.again`, in this view. seen: says who is to blame where `error` is of its kind and blames nobody."""
        rank, node = error.rank, error.node or ("" if error.rank is None else self._node(error.rank))
        if rank is None and not node and seen is not None and type(seen) is type(error):
            rank, node = seen.rank, seen.node
        return again(error, rank=rank, node=node, view=self.view.view_id, step=step, op=name)

    def _node(self, rank: int) -> str:
        return self.view.members[rank].node

    def _late(self, slot: _Slot, timeout: float, name: str, step: int | None) -> PeerError:
        absent = [rank for rank in slot.ranks if rank not in slot.announced]
        nodes = ", ".join(f"rank {rank} ({self._node(rank)})" for rank in absent)
        what = f"{nodes} did not call {name}" if absent else "its data did not arrive"
        others = [(rank, self._pending(rank)) for rank in absent]
        instead = "".join(f"; rank {rank} called {other[:200]}" for rank, other in others if other)
        culprit = absent[0] if absent else None
        return PeerError(
            f"{what} within {timeout:g} s{instead}",
            rank=culprit,
            node=self._node(culprit) if culprit is not None else "",
            view=self.view.view_id,
            step=step,
            op=name,
        )

    def _pending(self, rank: int) -> str:
        """What `rank` has called and this rank has not, the earliest that is known of; "" if there is nothing."""
        for slot in self._slots.values():
            if rank in slot.announced and self.rank not in slot.announced:
                return slot.announced[rank].signature
        return ""

    def _translate(self, failure: TransferFailed, rank: int, name: str, step: int | None) -> QuicollError:
        """The single place where the transport's errors become the collectives'."""
        where: dict[str, Any] = {"view": self.view.view_id, "step": step, "op": name}
        why = str(failure.error.args[0])
        if isinstance(failure.error, MessageCorrupted):
            source, target = (self.rank, rank) if failure.sending else (rank, self.rank)
            ends = f"rank {source} ({self._node(source)}) to rank {target} ({self._node(target)})"
            return Corrupted(f"bits from {ends} came spoiled again and again: {why}", rank=source, **where)
        lost = (self._node(rank),) if isinstance(failure.error, LinkLost) else ()
        return PeerError(why, rank=rank, node=self._node(rank), lost=lost, **where)

    def _spoilers(self, first: int) -> tuple[int, ...]:
        """Ranks whose bits came spoiled in this view, mended or not: `first`, then the others."""
        others = [rank for rank, link in self._links.items() if link.snapshot().corrupt > self._spoiled[rank]]
        return (first, *(rank for rank in sorted(others) if rank != first))
