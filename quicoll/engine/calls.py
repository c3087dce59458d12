"""What the ranks of one view have called: announcements compared, agreement on the network, who is late, farewells.

A core without input or output: events go in with their time in nanoseconds, what has to be done or raised comes out.

A collective's identity is (view, group, seq), seq counting the calls of a group within a view in the order in which
they were made. One `Slot` stands for one of them:

    heard       a peer has announced it, this rank has not called it yet
    called      this rank has called it (`call`), announcements are awaited
    settled     all who take part have announced; or two calls differ, or somebody announced who takes no part. Now
                `compare` says whether they are equal
    finished    the slot is gone; an announcement for its number is from now on an error of the peer's

Who takes part. A plan numbers its ranks from 0; `Call.ranks` says which ranks of the view these are: all of them, those
of a sub-group in its order, or the two of a `send`. Only they announce to each other, and operations of one group know
nothing of those of another (quicoll.collectives.subgroups says why that cannot deadlock).

The network. Some operations choose their algorithm by what the links have measured, and all ranks have to choose alike.
The first of them in a group (`Slot.leads`) brings this rank's measurements with its announcement; once all have come,
every rank makes the same network of them (`agree`), which serves the group for as long as the view lasts. Which call is
the first follows from the order of the calls, so it is the same everywhere. With them goes the number of the rules of
choice: ranks of two versions of quicoll hear of it there, and not at a deadline.

Farewells. A rank that is done with an operation knows that all others called it; not that they have all of it from it
and from each other. If it left the job then, the view would end, and with it their part of an
operation that has gone well. So a rank that leaves first says so to its peers, and each answers when it is through with
what ran there at that moment. Operations that wait for the leaving rank's call do not count: it will not come. So those
who leave do not wait for each other.
    A rank whose work has ended (`Farewell.next_step`) waits for what begins later too, where anything goes on in this
view without all ranks: either of the two has called an operation of some of them alone, or is in a sub-group
(`divided`). Two pairs of ranks seldom end at the same moment, and the one that is through first must not take the view
from the other.
Its answer comes when the other ends its own work, goes on to a step that the leaving rank has no part in, calls what
the leaving rank would have to call, or is alone; and the leaving rank's patience bounds the wait.

Invariants: numbers of a group are taken in the order of `open`, without gaps. At most MAX_AHEAD slots are kept for
peers, and of each peer MAX_AHEAD_BYTES of what this rank has not called yet. The first announcement of a rank for a
slot is the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quicoll.engine.differences import brief, difference
from quicoll.engine.given import open_given
from quicoll.engine.messages import Announce, Farewell, size_in_memory
from quicoll.errors import Mismatch, PeerError
from quicoll.numerics.bundle import Joined  # noqa: TC001 - compiled, a class needs it as it is made
from quicoll.numerics.dtypes import Array, DType  # noqa: TC001 - compiled, a class needs it as it is made
from quicoll.numerics.reduce import ReduceOp  # noqa: TC001 - compiled, a class needs it as it is made
from quicoll.plan import Plan  # noqa: TC001 - compiled, a class needs it as it is made
from quicoll.plan.choice import RULES
from quicoll.plan.network import NetworkModel, agreed, quantised

if TYPE_CHECKING:
    from quicoll.local.small import Counts, SmallCall
    from quicoll.membership.view import View

__all__ = ["MAX_AHEAD", "MAX_AHEAD_BYTES", "Call", "Calls", "Known", "Slot", "Work", "measurements", "site_numbers"]

MAX_AHEAD = 65536  # operations that a peer may be ahead of us
MAX_AHEAD_BYTES = 32 << 20  # of memory, that one peer's announcements of these take


# These three are made in each operation, and would take four times as long frozen. Nobody changes one.
@dataclass(slots=True)
class Work:
    """A plan with its memory. inputs and output: flat arrays in the storage type of `dtype`; inputs may be joined."""

    plan: Plan
    dtype: DType
    acc: DType
    op: ReduceOp
    inputs: Sequence[Array | Joined]
    output: Array


@dataclass(slots=True)
class Known:
    """What a rank knows of the others when it makes its part of a collective.

    counts: what each has announced; None for those that have not yet, unless the call `gathers`. network: that which
    the group has agreed on; None unless the call `measures`.
    """

    counts: list[tuple[int, ...] | None]
    network: NetworkModel | None


@dataclass(slots=True)
class Call:
    """A collective as its caller asked for it.

    signature: everything that must be equal on all ranks. make: gives the work of this rank. counts: this rank's sizes
    where they may differ. gathers: whether the work depends on those of all ranks. measures: whether it depends on the
    agreed network. ranks: who takes part, this rank included, as ranks of the view, in the order in which the plan
    numbers them; None: all. where: the group's name, "" for all ranks. watched: whether it matters who comes late.
    divides: whether it is of some ranks alone or sub-groups come of it, but for the library's own. sizes: where what
    the ranks give travels in their announcements, the bytes of each, by its number in the plan; then no work is made of
    it. combine: takes these, in that order, and leaves the result where its owner finds it. given: this rank's, sealed.
    ask: in the place of `make`, where the work comes later: gives it, or why there is none, once and on the engine's
    loop; it may be at once.
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
    divides: bool = False
    sizes: Sequence[int] | None = None
    combine: Callable[[Sequence[bytes], Counts], None] | None = None
    given: bytes = b""
    ask: Callable[[Known, Callable[[Work | None, Exception | None], None]], None] | None = None


@dataclass(frozen=True, slots=True)
class _Parting:
    """A peer that will leave. awaited: operations that it waits for. next_step: as in its Farewell."""

    awaited: list[tuple[int, int]]
    next_step: int | None


@dataclass(slots=True, eq=False)
class Slot:
    """One operation as this rank knows it; see the module's head.

    name: for people, as "all_reduce#3" or "all_reduce#3@0:1" in a sub-group. call: None until this rank has called.
    ranks: who takes part. leads: whether this is the call by which the group agrees on its network.
    announced, arrived_ns: by rank of the view, what it called and when that came to be known here.
    """

    group: int
    seq: int
    name: str = ""
    call: Call | None = None
    ranks: tuple[int, ...] = ()
    leads: bool = False
    settled: bool = False
    announced: dict[int, Announce] = field(default_factory=dict)
    arrived_ns: dict[int, int] = field(default_factory=dict)


class Near(Protocol):
    """What this module asks of the calls through the memory of one host, which are told by group and number."""

    @property
    def running(self) -> int: ...
    def numbers(self, group: int) -> int: ...
    def under_way(self, group: int, number: int) -> SmallCall | None: ...
    def called_by(self, rank: int) -> list[tuple[int, int]]: ...
    def members(self, group: int) -> tuple[int, ...]: ...
    def pending(self, rank: int) -> str: ...


class Calls:
    """All operations of one view on one rank. See the module's head.

    divided: whether something may go on in the view without all of its ranks, as far as is known here. parting: peers
    that will leave and are not answered yet.
    """

    def __init__(self, view: View, rank: int) -> None:
        """Start with no operation.

        Args:
            view: The view.
            rank: This rank in it.
        """
        self._view = view
        self._rank = rank
        self._everyone = tuple(range(view.world_size))
        self._over = False
        self._next: dict[int, int] = {}  # by group, the number of the next call
        self._slots: dict[tuple[int, int], Slot] = {}
        self._ahead: dict[int, int] = {}  # by rank, bytes of what it announced and this rank has not called
        self._networks: dict[int, NetworkModel | None] = {}  # by group; None while it is being agreed on
        self.near: Near | None = None  # the calls through the memory of one host, which are in no slot of these
        self.divided = False  # some of the ranks may do something without the others
        self._begun = 0  # the last step that was begun in this view, as the coordinator counts
        self.parting: dict[int, _Parting] = {}
        self._parted: dict[int, None] = {}  # all that have said so
        self._leaves = False  # this rank has said so
        self._unanswered: dict[int, None] = {}  # peers that have not answered this rank's own farewell

    # -- announcements -------------------------------------------------------------------------------------------

    def open(self, call: Call, group: int, number: int | None = None) -> Slot:
        """Take the next number of a group for a call of this rank.

        The order in which this is called defines the identity of operations. `called` follows once the announcement
        is on its way.

        Args:
            call: What is called.
            group: The id of its group.
            number: Its number, where calls through the memory of one host have numbers of this group too.
        Returns:
            The operation's slot, which may hold announcements of peers already.
        """
        seq = self._next.get(group, 0) if number is None else number
        self._next[group] = seq + 1
        slot = self._slots.get((group, seq))
        if slot is None:
            slot = self._slots[group, seq] = Slot(group, seq)
        slot.name = f"{call.name}#{seq}@{call.where}" if call.where else f"{call.name}#{seq}"
        slot.call = call
        slot.ranks = self._everyone if call.ranks is None else call.ranks
        self.divided = self.divided or call.divides
        slot.leads = call.measures and group not in self._networks
        if slot.leads:
            self._networks[group] = None
        return slot

    def called(self, slot: Slot, announce: Announce, now_ns: int) -> bool:
        """Note this rank's own announcement.

        Args:
            slot: What `open` gave.
            announce: What was sent to the others.
            now_ns: The time.
        Returns:
            Whether the slot has become settled by it.
        """
        own, announced = self._rank, slot.announced
        if own not in announced:
            for rank, theirs in announced.items():  # called now, so nobody is ahead with it any more
                self._ahead[rank] -= size_in_memory(theirs)
                if rank not in slot.ranks or theirs.signature != announce.signature:
                    slot.settled = True
            announced[own] = announce
            slot.arrived_ns[own] = now_ns
            if len(announced) == len(slot.ranks):
                slot.settled = True
        return slot.settled

    def announced(self, rank: int, announce: Announce, now_ns: int) -> Slot | None:
        """Note what a peer says that it called.

        Args:
            rank: The peer.
            announce: Its message, of this view.
            now_ns: The time.
        Returns:
            The slot that has become settled by it, None if none has.
        Raises:
            PeerError: The operation is over here, or it is too far ahead, or too much is.
        """
        key = (announce.group, announce.seq)
        slot = self._slots.get(key)
        at = self._next.get(announce.group, 0)
        ahead = announce.seq - (at if self.near is None else max(at, self.near.numbers(announce.group)))
        if announce.seq < at and slot is None and not self._is_small(announce):
            raise PeerError(f"announced operation {announce.seq} twice", rank=rank, view=self._view.view_id)
        if ahead > MAX_AHEAD or len(self._slots) > MAX_AHEAD:
            raise PeerError(f"is {ahead} operations ahead", rank=rank, view=self._view.view_id)
        if self._ahead.get(rank, 0) + size_in_memory(announce) > MAX_AHEAD_BYTES:
            raise PeerError(f"is {MAX_AHEAD_BYTES} bytes ahead", rank=rank, view=self._view.view_id)
        if slot is None:
            slot = self._slots[key] = Slot(*key)
        announced = slot.announced
        own = announced.get(self._rank)
        if rank not in announced:
            announced[rank] = announce
            slot.arrived_ns[rank] = now_ns
            if own is None:
                self._ahead[rank] = self._ahead.get(rank, 0) + size_in_memory(announce)
        if own is None or slot.settled:
            return None
        # What stands there was looked at when it came, or when this rank called.
        if len(announced) == len(slot.ranks) or rank not in slot.ranks or announced[rank].signature != own.signature:
            slot.settled = True
            return slot
        return None

    def compare(self, slot: Slot) -> None:
        """Check that what has been announced for a slot is one and the same call of those who take part in it.

        Raises:
            Mismatch: Two ranks called different things. Names what differs, and on which ranks, of those known.
            PeerError: A rank announced that takes no part.
        """
        own = slot.announced[self._rank].signature
        for rank, announce in slot.announced.items():
            if announce.signature != own or rank not in slot.ranks:
                break
        else:
            return
        self._demand_members(slot, slot.ranks)
        for rank in sorted(slot.announced):
            if slot.announced[rank].signature != own:
                called = {each: slot.announced[each].signature for each in slot.announced if each in slot.ranks}
                raise Mismatch(difference(called), rank=rank, node=self._node(rank))

    def given(self, slot: Slot, sizes: Sequence[int]) -> list[bytes]:
        """Return what each rank gave in its announcement, for a slot that has compared equal.

        Raises:
            Spoiled: It is not what it was, or not of the size that the call has it.
        """
        opened = []
        for rank, size in zip(slot.ranks, sizes, strict=True):
            opened.append(open_given(slot.announced[rank].given, size, rank))
        return opened

    def _demand_members(self, slot: Slot, ranks: Sequence[int]) -> None:
        for rank in sorted(slot.announced):
            if rank not in ranks:
                raise PeerError("calls operations of a group that it is not in", rank=rank, node=self._node(rank))

    def differing(self, slot: Slot) -> tuple[int, ...]:
        """Return the ranks that called something else than this one, ascending."""
        own = slot.announced[self._rank].signature
        return tuple(sorted(rank for rank, other in slot.announced.items() if other.signature != own))

    def finish(self, slot: Slot) -> None:
        """Forget an operation that is over on this rank. Peers that have waited for it may be answered (`answers`)."""
        del self._slots[slot.group, slot.seq]

    def close(self) -> None:
        """Note that the view is over here: nobody has to wait for its operations."""
        self._over = True

    def uncalled(self, groups: Iterable[int]) -> int | None:
        """Return a group whose next operation a peer has called and this rank has not; None where there is none.

        Args:
            groups: The groups that count. Of several the one that was heard of first is given.
        """
        found: tuple[int, int] | None = None
        for group in groups:
            slot = self._slots.get((group, self._next.get(group, 0)))
            if slot is not None and slot.call is None and slot.arrived_ns:
                heard = min(slot.arrived_ns.values())
                if found is None or heard < found[0]:
                    found = heard, group
        return None if found is None else found[1]

    def _is_small(self, announce: Announce) -> bool:
        """Whether a call through memory has this number: then the ranks called different things (`astray`)."""
        return self.near is not None and self.near.under_way(announce.group, announce.seq) is not None

    def astray(self) -> tuple[int, dict[int, str]] | None:
        """Return the number of a call through memory that was announced by peers, and what each has called.

        That call would wait for them, and they for this rank's announcement.

        Raises:
            PeerError: One of them takes no part in its group.
        """
        if self.near is not None:
            for (group, seq), slot in self._slots.items():
                mine = None if slot.call is not None else self.near.under_way(group, seq)
                if mine is not None:
                    self._demand_members(slot, self.near.members(group))
                    called = {rank: announce.signature for rank, announce in slot.announced.items()}
                    called[self._rank] = mine.signature
                    return seq, called
        return None

    # -- the network ---------------------------------------------------------------------------------------------

    def network(self, group: int) -> NetworkModel | None:
        """Return the network that a group has agreed on, None while it has not."""
        return self._networks.get(group)

    def agree(self, slot: Slot) -> NetworkModel:
        """Make the group's network of the measurements of all; for a slot that `leads` and has compared equal.

        Raises:
            PeerError: A rank brings no measurements, or not as many as there are ranks.
            Mismatch: A rank chooses by other rules.
        """
        rows: list[tuple[int, ...]] = []
        for rank in slot.ranks:
            row, values = slot.announced[rank].measured, 2 * len(slot.ranks)
            if len(row) not in (values, values + 1):
                raise PeerError("brings no measurements", rank=rank, node=self._node(rank), view=self._view.view_id)
            rules = row[0] if len(row) > values else 1  # versions before there was a number
            if rules != RULES:
                raise Mismatch(
                    f"rank {rank} ({self._node(rank)}) chooses algorithms by rules {rules}, this one by {RULES}: they "
                    "run different versions of quicoll; renew all ranks of a job at once",
                    rank=rank,
                    node=self._node(rank),
                )
            rows.append(row[1:])
        network = self._networks[slot.group] = agreed(rows, site_numbers(self._view, slot.ranks))
        return network

    def known(self, slot: Slot) -> Known:
        """Return what this rank knows of the others now."""
        call, announced = slot.call, slot.announced
        counts = [announced[rank].counts if rank in announced else None for rank in slot.ranks]
        return Known(counts, self._networks.get(slot.group) if call is not None and call.measures else None)

    # -- the deadline --------------------------------------------------------------------------------------------

    def late(self, slot: Slot, timeout: float, step: int | None) -> PeerError:
        """Return the error of an operation that has not ended by its deadline: who has not called it, and what instead.

        Args:
            slot: The operation.
            timeout: Its time in seconds, for the message.
            step: The number of the step that it belongs to, for the error.
        """
        absent = self.absent(slot)
        nodes = ", ".join(f"rank {rank} ({self._node(rank)})" for rank in absent)
        what = f"{nodes} did not call {slot.name}" if absent else "its data did not arrive"
        instead = "".join(f"; rank {rank} called {brief(other)}" for rank, other in absent.items() if other)
        first = next(iter(absent), None)
        return PeerError(
            f"{what} within {timeout:g} s{instead}",
            rank=first,
            node=self._node(first) if first is not None else "",
            view=self._view.view_id,
            step=step,
            op=slot.name,
        )

    def absent(self, slot: Slot) -> dict[int, str]:
        """Return the ranks whose call of an operation has not come, and what each has called instead, as far as known.

        Args:
            slot: The operation.
        """
        return {rank: self._pending(rank) for rank in slot.ranks if rank not in slot.announced}

    def _pending(self, rank: int) -> str:
        """What `rank` has called and this rank has not, the earliest that is known of; "" if there is nothing."""
        for slot in self._slots.values():
            if rank in slot.announced and self._rank not in slot.announced:
                return slot.announced[rank].signature
        return "" if self.near is None else self.near.pending(rank)

    # -- farewells -----------------------------------------------------------------------------------------------

    def leave(self, peers: Sequence[int]) -> None:
        """Note that this rank's own farewell is on its way to `peers`, whose answers are awaited."""
        self._leaves = True
        self._unanswered = dict.fromkeys(peers)

    @property
    def unanswered(self) -> bool:
        """Whether a peer has not answered this rank's farewell."""
        return bool(self._unanswered)

    def divide(self) -> None:
        """Note that this rank is in a sub-group, whose operations the other ranks have no part in."""
        self.divided = True

    def begun(self, step: int) -> None:
        """Note that this rank begins a step, as the coordinator counts."""
        self._begun = step

    def farewell(self, rank: int, message: Farewell) -> list[tuple[int, Farewell]]:
        """Note that a peer will leave, or answers this rank's own farewell.

        Returns:
            Answers that are due at once, by rank; to be sent. Others come from `finish` and `answers`.
        """
        if message.done:
            self._unanswered.pop(rank, None)
            return []
        awaited = [
            key
            for key, slot in self._slots.items()
            if slot.call is not None and (rank in slot.announced or rank not in slot.ranks)
        ]
        if self.near is not None:
            awaited += self.near.called_by(rank)
        self.divided = self.divided or message.divided
        self.parting[rank] = _Parting(awaited, message.next_step)
        self._parted[rank] = None
        return self.answers()

    def answers(self) -> list[tuple[int, Farewell]]:
        """Return the answers that are due, by rank; to be sent.

        They may be after a call, `leave`, `begun` and `close`.
        """
        if not self.parting:
            return []
        ready = [rank for rank, parting in self.parting.items() if self._over or self._needs_no_more(rank, parting)]
        for rank in ready:
            del self.parting[rank]
        return [(rank, Farewell(self._view.view_id, done=True)) for rank in ready]

    def _needs_no_more(self, rank: int, parting: _Parting) -> bool:
        """Whether this rank needs the view no more without `rank`."""
        near = self.near
        if any(key in self._slots for key in parting.awaited):
            return False
        if near is not None and any(near.under_way(group, number) for group, number in parting.awaited):
            return False
        if parting.next_step is None or not self.divided or self._leaves or self._begun >= parting.next_step:
            return True
        if len(self._parted) == len(self._everyone) - 1:
            return True
        if near is not None and near.running > len(near.called_by(rank)):
            return True
        own = [slot for slot in self._slots.values() if slot.call is not None]
        return any(rank in slot.ranks and rank not in slot.announced for slot in own)

    def _node(self, rank: int) -> str:
        return self._view.members[rank].node


def site_numbers(view: View, ranks: Sequence[int] | None = None) -> tuple[int, ...]:
    """Number the sites of ranks from 0 in the order in which they appear.

    Where all are of one site, or name none, and some of them are of one host and others elsewhere by where they are
    reached, hosts are sites: what is inside one goes through its memory, or never leaves it.

    Args:
        view: The view.
        ranks: Ranks of the view; None: all.
    Returns:
        The number of each rank's site. Ranks that name no site share one.
    """
    members = view.members if ranks is None else [view.members[rank] for rank in ranks]
    names = [member.site for member in members]
    hosts = [member.host for member in members]
    if len({*names}) == 1 and 1 < len({*hosts}) < len(hosts) and "" not in hosts:
        names = hosts
    numbers: dict[str, int] = {}
    return tuple([numbers.setdefault(name, len(numbers)) for name in names])


def measurements(paths: Sequence[tuple[int | None, int | None]]) -> tuple[int, ...]:
    """Return this rank's row of the network, as it is announced.

    Args:
        paths: For each rank that takes part the round-trip time in nanoseconds and the delivery rate in bytes a second
            of the link to it; (None, None) for this rank itself. A rate counts only where the time is known.
    Returns:
        The number of the rules by which this rank chooses; then for each rank the microseconds one way, then for each
        the rate; 0 where it is not known.
    """
    latency, rate = [0] * len(paths), [0] * len(paths)
    for number, (rtt_ns, bytes_per_s) in enumerate(paths):
        if rtt_ns:
            latency[number] = quantised(rtt_ns // 2000)
            rate[number] = quantised(bytes_per_s or 0)
    return RULES, *latency, *rate
