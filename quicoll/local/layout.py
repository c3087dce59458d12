"""What stands where in a rank's memory, and what its readers rely on.

Every rank of a view has one segment of memory, which it alone writes and the other ranks of its host read. So a word
has one writer, there is no lock that a dead rank could hold, and whatever a rank does wrong it does to its own words.

    words      each on a cache line of its own; 8 bytes, little endian, written and read in one piece
               PUBLISHED   calls that have been written to their slots (small.py)
               CONSUMED    calls that have been taken from all slots, after which these may be written again
               STAGE       stages of large calls that are done (large.py)
               WAKE        which of this rank's sleepers are to be woken when a word that they wait for grows
               PROCESSOR   on which one this rank has called last, where it may be told from others
               ROOMS       rooms that have ever been in use, and then for each whose it is and its turn (rooms.py)
    sums       records of what is given: a checksum, and where it stands in the giver's arena (arena.py), if it does;
               and checksums of results
    slots      SLOTS calls: head, text of the call, counts, payload where it is small
    inputs     RING chunks of a large call: what the others reduce or copy
    results    RING shares of chunks: what the others copy out
    rooms      MAX_ROOMS times the same again, for sub-groups: words, sums, slots, inputs, results (rooms.py)
    parcels    a table of what this rank has taken, then PARCELS places for payloads that it gives (parcels.py)

Which ranks share a host, and that all of them have each other's segments, is settled before a view is installed
(meeting.py, quicoll.engine.neighbours): with the first operation all of them use their memory or none does.

Memory order. A rank writes what a count stands for, then the count; who has seen the count reads what it stands for.
That is right where stores of a processor become visible to the others in their order, and loads are done in theirs:
on x86-64 (Intel SDM vol. 3, 8.2.2; AMD64 APM vol. 2, 7.2). Elsewhere barriers would be needed that Python does not
have, so elsewhere there is no such memory (`sealing.unusable`). One thing that order does not give is needed too: who
writes a count and then looks at WAKE, while the other writes WAKE and then looks at the count, must not both see what
was before. Between the two stands `fence`, a full barrier, on either side. A word is an aligned 8 bytes, which that
processor loads and stores in one piece; CPython copies it with one instruction.

Failure cases, for all of it:
    killed at any instruction    what was counted is whole, what was not does not exist. Others wait for a count that
                                 will not grow: the kernel says at once that the process has ended (pidfd), the link
                                 that is lost ends the view, and with it every wait
    stopped at any instruction   the same, by the silence of its link; or the deadline of the call, whichever is first
    a peer that lies             its counts are bounded by our own, its lengths by the layout, its text is shown and
                                 not trusted; payloads are copied, and what was copied is checked. It can spoil a
                                 result no more than by calling with other numbers, which is its right
    a segment cut short          sealed against that, or refused (memory.py, arena.py); so no read can end in SIGBUS
    no memory                    is asked for before it is used: then there is no segment, and the reason is told; that
                                 of a room when it is first used: then the call fails, and the view ends; that of a
                                 parcel likewise: then its payload goes by the network
    a child of a fork            does not join in: each call looks at the process's id before it touches anything
    the end of the view          calls end with its error. The memory has no name: it goes with its last process
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array

__all__ = [
    "BACK",
    "CHUNK",
    "CONSUMED",
    "ENDED",
    "FRONT",
    "MAX_ITEM",
    "MAX_ROOMS",
    "MAX_WORLD",
    "OWNERS",
    "PARCELS",
    "PROCESSOR",
    "PUBLISHED",
    "RECORD",
    "RING",
    "ROOM",
    "ROOMS",
    "SLOTS",
    "SMALL_BYTES",
    "STAGE",
    "TEXT_BYTES",
    "WAKE",
    "WITHDRAWN",
    "HostMemory",
    "SegmentLayout",
]

PUBLISHED: Final = 8  # the numbers of words are those of 8 bytes: 8 of them are a cache line
CONSUMED: Final = 16
STAGE: Final = 24
WAKE: Final = 32
ENDED: Final = 40  # of a room alone: large calls that have ended
ROOMS: Final = 48
PROCESSOR: Final = 56
OWNERS: Final = 64  # two words for each room: its group, its turn

FRONT: Final = 1  # bits of WAKE: a caller sleeps
BACK: Final = 2  # the engine is to go on
ROOM: Final = 4  # with CONSUMED as well, because a call waits for a slot

MAX_WORLD: Final = 64  # ranks of one host
MAX_ROOMS: Final = 192  # sub-groups that a rank has calls of under way at a time; of these words a page is full
SLOTS: Final = 16  # calls that a rank may be ahead
SMALL_BYTES: Final = 64 << 10  # of a rank's share in a small call
TEXT_BYTES: Final = 4096 - 64  # of the call's text, which is for people; its digest decides
RING: Final = 2
CHUNK: Final = 2 << 20  # bytes of a ring's place in a room, and the least that any has
RECORD: Final = 16  # bytes of what is said of a part that is given
WITHDRAWN: Final = (1 << 64) - 1  # in the place of a place: its rank has given up
MAX_ITEM: Final = 512  # bytes of an element of a large call
PARCELS: Final = 16  # payloads that a rank has given and others have not taken

_MIB = 1 << 20
_PAGE = 4096
_WORDS = _PAGE
_SUMS_AT = _WORDS
_SLOT = 64 + TEXT_BYTES + 8 * MAX_WORLD + SMALL_BYTES


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where things stand in the segments of a view; equal for all of its ranks.

    world: ranks. chunk: bytes of a chunk of a large call of all of them. rooms: that there are for sub-groups. parcel:
    the most bytes of a parcel, whole pages.
    """

    world: int
    chunk: int
    rooms: int = MAX_ROOMS
    parcel: int = _MIB

    @classmethod
    def of_ranks(cls, world: int) -> SegmentLayout:
        """Return the layout for so many ranks.

        A round has a price of its own on every rank, in calls and cold caches, whatever goes through it; and a line of
        memory that another processor has read is dear to write again, the less so the longer ago that was
        (docs/performance.md). So chunks grow with the number of their parts, as far as all segments together remain in
        bounds.
        """
        return cls(world, max(CHUNK, min(2 * world * _MIB, 8 * _MIB, 128 // world * _MIB)))

    @property
    def slots_at(self) -> int:
        """Where the slots of small calls begin, after the records and checksums of both rings."""
        return _SUMS_AT + -(-RING * (RECORD * self.world + 8) // _PAGE) * _PAGE

    def slot(self, number: int) -> int:
        """Return where the slot of a call begins: 64 bytes of head, then text, then counts and payload."""
        return self.slots_at + number % SLOTS * _SLOT

    def text(self, number: int) -> int:
        """Return where the text of a call begins."""
        return self.slot(number) + 64

    def payload(self, number: int) -> int:
        """Return where the counts of a call begin, with its payload behind them."""
        return self.slot(number) + 64 + TEXT_BYTES

    def input(self, chunk: int) -> int:
        """Return where a rank's own values of a chunk stand."""
        return self.slots_at + SLOTS * _SLOT + chunk % RING * self.chunk

    @property
    def share(self) -> int:
        """Bytes that a rank's share of a chunk has at most: it is cut at 16 elements, of MAX_ITEM bytes at most."""
        return -(-self.chunk // self.world // _PAGE) * _PAGE + 2 * _PAGE

    def result(self, chunk: int) -> int:
        """Return where the result of a rank's share of a chunk stands."""
        return self.input(0) + RING * self.chunk + chunk % RING * self.share

    def input_record(self, chunk: int, reader: int) -> int:
        """Return where the record of that part of a chunk stands which rank `reader` reads; under its writer's own
        number that of what all read. RECORD bytes: checksum, and place in the writer's arena (large.py)."""
        return _SUMS_AT + RECORD * (chunk % RING * self.world + reader)

    def result_sum(self, chunk: int) -> int:
        """Return where the checksum of a share's result stands."""
        return _SUMS_AT + RECORD * RING * self.world + 8 * (chunk % RING)

    @property
    def base(self) -> int:
        """Bytes of a segment without its rooms: what is for all ranks."""
        return self.input(0) + RING * (self.chunk + self.share)

    @property
    def rings_at(self) -> int:
        """Where the rings begin."""
        return self.input(0)

    def of_group(self, world: int) -> SegmentLayout:
        """Return where things stand in a room of a group of so many ranks, counted from its beginning."""
        return SegmentLayout(world, min(self.chunk, CHUNK), 0, 0)

    def room(self, number: int) -> int:
        """Return where a room begins. Each is large enough for a group of two, whose ranks' shares are the largest."""
        return self.base + number * self.of_group(2).base

    @property
    def taken_at(self) -> int:
        """Where the table begins of which parcels this rank has taken."""
        return -(-self.room(self.rooms) // _PAGE) * _PAGE

    @property
    def taken_bytes(self) -> int:
        """Bytes of that table."""
        return -(-8 * PARCELS * self.world // _PAGE) * _PAGE

    def taken(self, writer: int, place: int) -> int:
        """Return the word that says which turn of a writer's place this rank has taken last."""
        return self.taken_at // 8 + writer * PARCELS + place

    def parcel_at(self, place: int) -> int:
        """Return where a place for a parcel begins."""
        return self.taken_at + self.taken_bytes + place * self.parcel

    @property
    def size(self) -> int:
        """Bytes of a segment."""
        return self.parcel_at(PARCELS)


class HostMemory(Protocol):
    """The segments of a view's ranks, as one of them sees them.

    rank: of this rank. layout: of all segments.
    """

    rank: int
    layout: SegmentLayout

    def load(self, rank: int, word: int) -> int:
        """Return a word of a rank."""
        ...

    def store(self, word: int, value: int) -> None:
        """Write a word of this rank, visible after all that it has written before."""
        ...

    def fence(self) -> None:
        """Make all that was written here visible before anything is read from now on."""
        ...

    def read(self, rank: int, at: int, size: int) -> bytes:
        """Return a copy of bytes of a rank."""
        ...

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write bytes of this rank."""
        ...

    def view(self, rank: int, at: int, size: int) -> Array:
        """Return bytes of a rank where they stand, which others may change at any time."""
        ...

    def make(self, at: int, size: int) -> None:
        """See that there is memory for bytes of this rank's rooms, before they are first written.

        Raises:
            OSError: There is none.
        """
        ...

    def place(self, values: Array) -> int:
        """Return where contiguous memory of this process stands in what its peers may read, counted from 1; 0 where it
        does not."""
        ...

    def withdraw(self, record: int) -> None:
        """Say WITHDRAWN in a record of this rank's, visible before whatever it writes from now on; nothing where its
        process has ended."""
        ...

    def lent(self, rank: int, place: int, size: int) -> Array | None:
        """Return bytes of a rank's tensors where they stand, which it may change at any time; None where that rank has
        none there, or has shown none to this one.

        Args:
            rank: Whose.
            place: As it has said itself, whatever it is.
            size: How many.
        """
        ...
