"""Rooms: where the calls of a sub-group stand in the segments of its ranks.

The group of all ranks has the first part of every segment. Of sub-groups there may be any number, each of some of the
ranks, and nobody sees which others a rank is in. So every rank gives each of its groups a room of its own segment, by
its own choice, and says in its directory (OWNERS) whose each room is. Its peers look there. A room is to its group what
the first part of a segment is to all ranks (`RoomMemory`): the protocols in small.py and large.py know no difference.

The room of a group in a rank's segment:

    closed    nobody reads or writes it; what its words said is kept by its rank. So it begins, and so it is again when
              another group needs the room
    open      it has memory, its words stand there, and the directory says whose it is

A rank opens a room when it calls something of the group. It closes one to give it to another group, when KEPT rooms are
in use, and only where the group is at rest on this rank: it has nothing under way here, and every peer has taken all
calls that stand there (CONSUMED) and is through with all large ones (ENDED). Of those the one that was used longest ago
goes. Where no room is left and none is at rest, a call waits, as it does for a slot. So what rooms take is bounded, and
a program that splits in each step goes on as at first.

Order of stores. To open: words; then the group's id. To close: 0 for the id; then the turn grows by one; and only then
may others' words be written there. Who looks reads turn, id, turn: if the turn was the same, the id is of that turn.
Who reads a word there reads the turn after it: if that is still the same, the word was this group's.

Why a closed room needs no words. A rank that closes has taken as many calls as it has published; its peers have taken
all of these, and whoever has taken n calls has seen n published by each. So what it has published and taken, and the
stage and number of large calls that it has ended, are those of the peer that looks, where that one has nothing under
way; and where it has, they are the count of what it has taken. `RoomMemory.load` answers so.

Failure cases: killed at any instruction: a room is open whole or not at all, else as in layout.py. A peer that lies
about its rooms: it names one of those that there are, or none; its counts there are bounded as everywhere. No memory
for a room: OSError, before anything is written there.

Invariants (tests step every load and store, with fewer rooms than groups, and kill a rank at each of them):
    - a group has one room in a segment at most, and a room one group
    - nothing in a room changes hands while a peer may read it
    - what is read as a group's was written by its rank for that group
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from quicoll.local.layout import CONSUMED, ENDED, OWNERS, PUBLISHED, ROOMS, STAGE
from quicoll.local.small import Spoiled

if TYPE_CHECKING:
    from quicoll.local.layout import HostMemory, SegmentLayout
    from quicoll.numerics.dtypes import Array

__all__ = ["KEPT", "Room", "RoomMemory", "Rooms", "open_rooms"]

KEPT: Final = 16  # rooms that are in use before one is taken from a group at rest

_WORDS: Final = (PUBLISHED, CONSUMED, STAGE, ENDED)
_CLOSED: Final = -1


class Room:
    """A rank's own room of a group.

    group: the id. at_rest: returns whether this rank has nothing under way in the group, and its peers are through with
    all that it had. number: of the room, and base: where it begins, below 0 where it is closed. words: what they said,
    while it is closed.
    """

    __slots__ = ("at_rest", "base", "group", "number", "words")

    def __init__(self, group: int, at_rest: Callable[[], bool]) -> None:
        self.group = group
        self.at_rest = at_rest
        self.base = _CLOSED
        self.number = 0
        self.words = dict.fromkeys(_WORDS, 0)


class Rooms:
    """This rank's own rooms, and whose they are. One thread at a time."""

    def __init__(self, memory: HostMemory) -> None:
        """Start with none in use.

        Args:
            memory: All of the host's.
        """
        self._memory = memory
        self._layout = memory.layout
        self._held: dict[int, Room] = {}  # by number; the one that was used longest ago is the first
        self._ever = 0  # rooms that have memory
        self._with_rings: set[int] = set()  # asked for membership alone

    def open(self, room: Room) -> bool:
        """Open a room for its group, which is going to use it; return whether it is open.

        Raises:
            OSError: There is no memory for it.
        """
        if room.base >= 0:
            self._held[room.number] = self._held.pop(room.number)
            return True
        number = self._free()
        if number is None:
            return False
        memory, base = self._memory, self._layout.room(number)
        if number == self._ever:
            memory.make(base, self._layout.of_group(2).rings_at)
            self._ever += 1
            memory.store(ROOMS, self._ever)
        for word, value in room.words.items():
            memory.store(base // 8 + word, value)
        memory.store(OWNERS + 2 * number, room.group)
        room.number, room.base = number, base
        self._held[number] = room
        return True

    def make_rings(self, room: Room) -> None:
        """See that there is memory for large calls of an open room. Raises OSError."""
        if room.number not in self._with_rings:
            whole, rings_at = self._layout.of_group(2).base, self._layout.of_group(2).rings_at
            self._memory.make(room.base + rings_at, whole - rings_at)
            self._with_rings.add(room.number)

    def _free(self) -> int | None:
        """Return a room that nobody has, or has any more; None where there is none."""
        if len(self._held) < self._ever:
            return next(number for number in range(self._ever) if number not in self._held)
        if self._ever < min(KEPT, self._layout.rooms):
            return self._ever
        for number, room in self._held.items():
            if room.at_rest():
                self._close(room)
                return number
        return self._ever if self._ever < self._layout.rooms else None

    def _close(self, room: Room) -> None:
        memory, own = self._memory, self._memory.rank
        room.words = {word: memory.load(own, room.base // 8 + word) for word in _WORDS}
        memory.store(OWNERS + 2 * room.number, 0)
        turn = OWNERS + 2 * room.number + 1
        memory.store(turn, memory.load(own, turn) + 1)
        room.base = _CLOSED
        del self._held[room.number]


def open_rooms(memory: HostMemory, rank: int) -> list[tuple[int, int]]:
    """Return group and beginning of each open room of a rank of the host, in their order."""
    layout = memory.layout
    numbers = range(min(memory.load(rank, ROOMS), layout.rooms))
    owners = [(memory.load(rank, OWNERS + 2 * number), layout.room(number)) for number in numbers]
    return [(group, at) for group, at in owners if group]


class RoomMemory:
    """The rooms of a group as one of its ranks sees them: `HostMemory` of that group alone.

    Each thread that uses it has one of its own. rank: of this rank in the group.
    """

    def __init__(self, memory: HostMemory, room: Room, places: Sequence[int], rank: int) -> None:
        """Start without knowing where the peers have their rooms.

        Args:
            memory: All of the host's.
            room: This rank's own.
            places: The numbers that the group's ranks have on the host, by rank in the group.
            rank: This one in the group.
        """
        self.rank = rank
        self.layout: SegmentLayout = memory.layout.of_group(len(places))
        self._memory = memory
        self._room = room
        self._places = tuple(places)
        self._at = [_CLOSED] * len(places)  # where each peer's room begins, where it was seen last
        self._turn_words = [0] * len(places)
        self._turns = [0] * len(places)

    def load(self, rank: int, word: int) -> int:
        room, memory = self._room, self._memory
        if rank == self.rank:
            return self._own(word)
        place = self._places[rank]
        for _ in range(2):
            at = self._at[rank]
            if at >= 0:
                value = memory.load(place, at // 8 + word)
                if memory.load(place, self._turn_words[rank]) == self._turns[rank]:
                    return value
            if not self._find(rank, place, room.number):
                break
        return self._own(CONSUMED if word == PUBLISHED else word)

    def _own(self, word: int) -> int:
        room = self._room
        return room.words[word] if room.base < 0 else self._memory.load(self._memory.rank, room.base // 8 + word)

    def _find(self, rank: int, place: int, likely: int) -> bool:
        """Look in a peer's directory for its room; the same number as ours is the likeliest."""
        memory, layout = self._memory, self._memory.layout
        self._at[rank] = _CLOSED
        there = min(memory.load(place, ROOMS), layout.rooms)
        for each in range(there + 1):
            number = likely if each == 0 else each - 1
            owner = OWNERS + 2 * number
            turn = memory.load(place, owner + 1)
            if memory.load(place, owner) == self._room.group and memory.load(place, owner + 1) == turn:
                self._at[rank], self._turn_words[rank], self._turns[rank] = layout.room(number), owner + 1, turn
                return True
        return False

    def store(self, word: int, value: int) -> None:
        self._memory.store(self._open() // 8 + word, value)

    def fence(self) -> None:
        self._memory.fence()

    def read(self, rank: int, at: int, size: int) -> bytes:
        return self._memory.read(self._places[rank], self._where(rank) + at, size)

    def write(self, at: int, data: bytes | memoryview) -> None:
        self._memory.write(self._open() + at, data)

    def view(self, rank: int, at: int, size: int) -> Array:
        return self._memory.view(self._places[rank], self._where(rank) + at, size)

    def make(self, at: int, size: int) -> None:
        self._memory.make(self._open() + at, size)

    def place(self, values: Array) -> int:
        return self._memory.place(values)

    def withdraw(self, record: int) -> None:
        self._memory.withdraw(self._open() + record)

    def lent(self, rank: int, place: int, size: int) -> Array | None:
        return self._memory.lent(self._places[rank], place, size)

    def _open(self) -> int:
        if self._room.base < 0:
            raise AssertionError("a closed room is written to")
        return self._room.base

    def _where(self, rank: int) -> int:
        """Return where a rank's room begins, of which something is awaited: so it stays open."""
        if rank == self.rank:
            return self._open()
        if self._at[rank] < 0 and not self._find(rank, self._places[rank], self._room.number):
            raise Spoiled(rank, "its room is closed, and a call stands there", bits=False)
        return self._at[rank]
