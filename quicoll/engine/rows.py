"""The calls that ranks of one host make in one group, as a neighbourhood has them: a row of its own for each group.

A row has the order of its group's calls (their numbers), those that stand in slots, and the large ones that all have
agreed on, of which the first is carried. Rows know nothing of each other: a call of one waits for none of another.

    idle     no call of it is under way here; its room may go to another group (quicoll.local.rooms)
    at work  calls of it are under way: it is one of those that the neighbourhood takes further

The group of all ranks has its row from the beginning, and its memory is the first part of the segments. A sub-group's
row begins with its first call here.

Ranks have three numbers: in the view, which errors name; on the host, which say whose segment is whose and who is
woken; and in the group, which the protocols in quicoll.local count by.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeAlias

from quicoll.engine.late_stacks import ahead
from quicoll.errors import PeerError
from quicoll.local.large import carry
from quicoll.local.layout import CONSUMED, ENDED, STAGE
from quicoll.local.rooms import Room, RoomMemory, Rooms
from quicoll.local.small import Differing, SmallCall, SmallCalls, Spoiled

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator, Sequence

    from quicoll.local.layout import HostMemory
    from quicoll.local.passages import Passage
    from quicoll.observability.flight import CalledEntry

__all__ = ["CallRow", "Keeper", "Large", "NearCall", "Settle"]


class Keeper(Protocol):
    """What a call asks of the neighbourhood that it is in."""

    def now(self) -> float:
        """Return seconds, of the clock of the engine's loop."""
        ...

    def cancel(self, call: NearCall) -> None:
        """See `NearCall.cancel`."""
        ...


class NearCall:
    """A call under way.

    row: of its group. name: for people, as "all_reduce#3". settle: called once, by any thread. deadline: of the clock
    of the engine's loop. timeout: in seconds, for the error. step: the open one. ticks: of the engine since it was
    begun. attended: its caller looks for its end, or sleeps until then. arrived_ns: by rank, at which tick it was first
    seen to have called; None where no tick has come. ending: waits for why the view is over, once it has failed.
    entry: for the flight recorder, where there is one. due: when who has not called is asked where it is.
    """

    __slots__ = (
        "_near",
        "arrived_ns",
        "attended",
        "deadline",
        "due",
        "ending",
        "entry",
        "name",
        "row",
        "settle",
        "small",
        "step",
        "ticks",
        "timeout",
    )

    def __init__(
        self,
        near: Keeper,
        row: CallRow,
        small: SmallCall,
        name: str,
        *,
        timeout: float,
        step: int | None,
    ) -> None:
        self._near = near
        self.row = row
        self.small = small
        self.name = name
        self.settle: Settle = _nobody
        self.deadline = near.now() + timeout
        self.due = self.deadline - ahead(timeout)
        self.timeout = timeout
        self.step = step
        self.ticks = 0
        self.attended = False
        self.arrived_ns: dict[int, int] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.entry: CalledEntry | None = None

    def cancel(self) -> None:
        """Nobody waits for it any more, which ends the view. On the engine's thread; nothing where it is over."""
        self._near.cancel(self)


Settle: TypeAlias = "Callable[[int | None, BaseException | None, bool], None]"
"""Ends the wait for a call, with its number or with its error, and whether this is a loop that calls: no task of its
is in the middle of something."""


def _nobody(number: int | None, error: BaseException | None, idle: bool) -> None:
    raise AssertionError("a call has begun for which nobody waits")


class CallRow:
    """See the module's head.

    group: the id. ranks: of the view, by number in the group. rank: this one's number in it. places, peers: numbers on
    the host, of all and of the others. small: its calls in slots. under_way: how many have begun here and have not
    ended. larges: all have agreed on these. memory: for large ones; stage: at which the next one begins.
    """

    __slots__ = (
        "_numbers",
        "_room",
        "_rooms",
        "_small_memory",
        "group",
        "larges",
        "memory",
        "others",
        "peers",
        "rank",
        "ranks",
        "small",
        "stage",
        "under_way",
    )

    def __init__(
        self,
        group: int,
        ranks: Sequence[int],
        places: Sequence[int],
        rank: int,
        memory: HostMemory,
        memory_for_large: HostMemory,
        rooms: Rooms | None = None,
    ) -> None:
        """Start without a call.

        Args:
            group: The id.
            ranks: Of the view, by number in the group.
            places: Their numbers on the host.
            rank: This one's number in the group.
            memory: All of the host's.
            memory_for_large: The same, for the thread that carries large calls.
            rooms: Where sub-groups have theirs; None: this is the group of all ranks of the host.
        """
        self.group = group
        self.ranks = tuple(ranks)
        self.rank = rank
        self.peers = [place for number, place in enumerate(places) if number != rank]
        self.others = [number for number in range(len(places)) if number != rank]
        self.under_way = 0
        self.larges: deque[Large] = deque()
        self.stage = 0
        self._numbers = 0
        self._rooms = rooms
        self._room = room = Room(group, self._at_rest)
        if rooms is None:
            self.memory, self._small_memory = memory_for_large, memory
        else:
            self.memory = RoomMemory(memory_for_large, room, places, rank)
            self._small_memory = RoomMemory(memory, room, places, rank)
        self.small = SmallCalls(self._small_memory)

    @property
    def numbers(self) -> int:
        """How many calls of the group have a number."""
        return self._numbers

    def take_number(self) -> int:
        """Take the number of the next call, whichever way it goes. Whoever issues holds a lock of his own."""
        number = self._numbers
        self._numbers = number + 1
        return number

    def return_number(self) -> None:
        """Give the last number back: what it was for was refused, and nobody has heard of it."""
        self._numbers -= 1

    def publish(self) -> bool:
        """Write calls to slots, as `SmallCalls.publish` does, and open the room for that; return whether it is open.

        Raises:
            PeerError: There is no memory for it.
            Spoiled: As `SmallCalls.publish` does; the rank in it is that of the view.
        """
        if self._rooms is not None:
            try:
                if not self._rooms.open(self._room):
                    return False
            except OSError as error:
                raise self._short(error) from error
        try:
            self.small.publish()
        except Spoiled as error:
            raise self.spoiled(error) from error
        return True

    def take(self) -> list[SmallCall]:
        """Take calls that all have published, as `SmallCalls.take` does. `publish` has found the room open before.

        Raises:
            Exception: What `SmallCalls.take` raises; ranks in it are those of the view.
        """
        try:
            return self.small.take()
        except Spoiled as error:
            raise self.spoiled(error) from error
        except Differing as error:
            raise Differing({self.ranks[rank]: called for rank, called in error.called.items()}) from error

    def spoiled(self, error: Spoiled) -> Spoiled:
        """Return the same error with the rank in the view."""
        return Spoiled(self.ranks[error.rank], str(error), bits=error.bits)

    def present(self, call: SmallCall) -> list[int]:
        """Return the ranks of the view that have called as much as this call, ascending."""
        return sorted(self.ranks[rank] for rank in self.small.present(call))

    def missing(self, call: SmallCall) -> list[int]:
        """Return the other ranks of the view that take part in this call and have not called as much, ascending."""
        here = self.present(call)
        return sorted(rank for rank in self.ranks if rank not in here)

    def load(self, rank: int, word: int) -> int:
        """Return a word of a rank of the group. Under the lock of small calls."""
        return self._small_memory.load(rank, word)

    def reached(self, stage: int) -> bool:
        """Return whether all peers have reached a stage of large calls."""
        load = self.memory.load
        return not stage or all(load(rank, STAGE) >= stage for rank in self.others)

    def begin_large(self) -> None:
        """See that there is memory for large calls. Raises PeerError."""
        if self._rooms is not None:
            try:
                self._rooms.make_rings(self._room)
            except OSError as error:
                raise self._short(error) from error

    def _short(self, error: OSError) -> PeerError:
        why = f"no memory of the host for its calls in a sub-group ({error}); it shares none from the next view on"
        return PeerError(why, rank=self.ranks[self.rank])

    def end_large(self, stage: int) -> None:
        """The first large call has ended."""
        self.stage = stage
        self.larges.popleft()
        if self._rooms is not None:
            self.memory.store(ENDED, self.memory.load(self.rank, ENDED) + 1)

    def _at_rest(self) -> bool:
        if self.under_way or self.small.published != self.small.consumed:
            return False
        memory, taken = self._small_memory, self.small.published
        ended = memory.load(self.rank, ENDED)
        return all(memory.load(rank, CONSUMED) >= taken and memory.load(rank, ENDED) >= ended for rank in self.others)


class Large:
    """A large call that all have agreed on. needs: the stage that all have to have reached before it goes on."""

    __slots__ = ("_passage", "_run", "call", "needs")

    def __init__(self, call: NearCall, passage: Passage) -> None:
        self.call = call
        self._passage = passage
        self._run: Generator[int, None, int] | None = None
        self.needs = 0

    def close(self) -> None:
        """Read no input and write no output from here on."""
        if self._run is not None:
            self._run.close()

    def go_on(self, row: CallRow) -> int | None:
        """Go on to the next stage that has to be waited for. Return the last one's number at the end.

        Raises what the call fails by.
        """
        if self._run is None:
            row.begin_large()
            self._run = carry(row.memory, row.stage, self._passage)
        try:
            self.needs = next(self._run)
        except StopIteration as stop:
            return int(stop.value)
        except Spoiled as error:
            raise row.spoiled(error) from error
        return None
