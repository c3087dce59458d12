"""Parcels: payloads of single messages between two ranks of a host, where not all ranks of the view are on it.

Calls in slots and rings (small.py, large.py) are of all ranks of a group at once. Here is what one rank gives one
other, in whatever order a plan has it: the rank puts the payload into a place of its segment, and tells the other one
by a message over the network that carries no more than where it is (`Notice`). Who has taken it says so in a word of
his own.

A place of a rank, of which it alone knows the state:

    free     nobody reads it
    given    to one rank, with a turn that no parcel of this rank had before; its notice is on the way, or there
    free     again: the other one's word for the place says this turn

A core that never waits: it says what is free, and its user (quicoll.engine.host_ways) sends where nothing is. So a
parcel that is taken late, because its reader wants others first, holds up nobody: there is always the network.

Memory order: the payload stands before its notice is sent, and the system's calls that carry this are a barrier on
both sides. The reader's loads are done before he stores his word, as on x86-64 (layout.py); who sees the word may
write there anew.

Invariants (tests step every load and store, and kill a rank at each of them):
    - a place is written only while nobody may read it
    - a payload is used only where it is, as it was copied, what its writer's checksum says
    - what a notice names is held against the layout and against what was expected, before anything is read for it
Failure cases: those of layout.py. A reader that lies about what it has taken gets other bytes, and its checksum tells.
A reader that never says so keeps a place, until the end of the view; payloads go by the network when all are kept.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import xxhash

from quicoll.local.layout import PARCELS
from quicoll.local.small import Spoiled

if TYPE_CHECKING:
    from quicoll.local.layout import HostMemory

__all__ = ["NOTICE_BYTES", "Notice", "Parcels"]

_NOTICE: Final = struct.Struct("<QQQQ")
NOTICE_BYTES: Final = _NOTICE.size


class Notice(NamedTuple):
    """Where a parcel is. place: of its writer. turn: no other parcel of that rank has it; 0: there is none, and the
    payload comes over the network. nbytes, checksum: of the payload."""

    place: int
    turn: int
    nbytes: int
    checksum: int

    def packed(self) -> bytes:
        """Return it as it is sent."""
        return _NOTICE.pack(*self)

    @staticmethod
    def read(data: bytes | bytearray) -> Notice:
        """Return what was sent, of NOTICE_BYTES; nothing of it is known to be true."""
        return Notice(*_NOTICE.unpack(data))


class Parcels:
    """What a rank gives and takes. One thread at a time; ranks are numbered as in the memory.

    given: how many parcels it has given, ever.
    """

    def __init__(self, memory: HostMemory) -> None:
        """Start with all places free.

        Args:
            memory: The ranks'.
        Raises:
            OSError: There is no memory for the table of what is taken.
        """
        self._memory = memory
        self._layout = memory.layout
        memory.make(self._layout.taken_at, self._layout.taken_bytes)
        self._ever = 0  # places that have memory
        self._free: list[int] = []  # of those, taken from the end: what was used last is still in the caches
        self._under_way: dict[int, tuple[int, int]] = {}  # by turn, so in their order: the reader, the place
        self.given = 0

    def fits(self, nbytes: int) -> bool:
        """Return whether a payload may be a parcel."""
        return nbytes <= self._layout.parcel

    def give(self, reader: int, payload: memoryview) -> Notice | None:
        """Put a payload into a place; None where none is free, or there is no memory for one more.

        Args:
            reader: For whom.
            payload: Flat bytes, which are the caller's again afterwards.
        """
        place = self._place()
        if place is None:
            return None
        nbytes = len(payload)
        slot = self._memory.view(self._memory.rank, self._layout.parcel_at(place), nbytes)
        np.copyto(slot, np.frombuffer(payload, np.uint8))
        self.given += 1
        self._under_way[self.given] = reader, place
        return Notice(place, self.given, nbytes, xxhash.xxh3_64_intdigest(payload))

    def _place(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._ever == PARCELS:
            return None
        try:
            self._memory.make(self._layout.parcel_at(self._ever), self._layout.parcel)
        except OSError:
            return None
        self._ever += 1
        return self._ever - 1

    def taken(self) -> list[int]:
        """Free the places of all parcels that have been taken, and return the turns of these, in their order."""
        load, word, own = self._memory.load, self._layout.taken, self._memory.rank
        over = [turn for turn, (reader, place) in self._under_way.items() if load(reader, word(own, place)) == turn]
        for turn in over:
            self._free.append(self._under_way.pop(turn)[1])
        return over

    def take(self, writer: int, notice: Notice, target: memoryview) -> None:
        """Copy a parcel, and tell so.

        Args:
            writer: Who gave it.
            notice: Its notice, which names a parcel.
            target: Flat memory of as many bytes as are expected; its contents are undefined where this raises.
        Raises:
            Spoiled: The notice cannot be, or the bytes are not those of its checksum.
        """
        place, turn, nbytes, checksum = notice
        if place >= PARCELS or nbytes != len(target) or not self.fits(nbytes):
            raise Spoiled(writer, f"a parcel of {nbytes} bytes in place {place}, for {len(target)}", bits=False)
        np.copyto(np.frombuffer(target, np.uint8), self._memory.view(writer, self._layout.parcel_at(place), nbytes))
        found = xxhash.xxh3_64_intdigest(target)
        if found != checksum:
            raise Spoiled(writer, f"checksum {checksum:016x} at the source, {found:016x} as it was copied", bits=True)
        self._memory.store(self._layout.taken(writer, place), turn)
