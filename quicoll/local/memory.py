"""A rank's own memory, which the other ranks of its host may read and nobody else may write; and theirs, for reading.

Each rank makes one memfd, maps it, and seals it: F_SEAL_FUTURE_WRITE makes every later mapping read-only, F_SEAL_SHRINK
and F_SEAL_GROW take away the SIGBUS of a file that is cut short. A memfd has no name: when the last process that has it
is gone, so is it, also after SIGKILL. All of its pages but those of rooms are there from the start (posix_fallocate):
where memory is short the making of it fails, with ENOSPC or ENOMEM, and not the first touch. The pages of a room are
made when it is first used, in the same way: until then it is a hole, which nobody touches.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from quicoll.local.layout import WITHDRAWN
from quicoll.local.sealing import ADD_SEALS, FUTURE_WRITE, GET_SEALS, OF_ONE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quicoll.local.arena import Arena, PeerArena
    from quicoll.local.layout import SegmentLayout
    from quicoll.numerics.dtypes import Array

__all__ = ["Segment", "SharedMemory"]

_SEALS = OF_ONE_SIZE | FUTURE_WRITE


class Segment:
    """One rank's segment, mapped here: writable where it is our own."""

    def __init__(self, fd: int, layout: SegmentLayout, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, layout.size, mmap.MAP_SHARED, protection)
        whole = memoryview(self._map)
        self.words = whole.cast("Q")
        self.data = whole
        self.array: Array = np.frombuffer(self._map, np.uint8)
        # What small calls touch is mapped from the start. Of 16 ranks the rings are 4 GiB of mappings, which took each
        # of them 0.1 s to join; they are mapped when a first large call uses them.
        self.array[: layout.rings_at : mmap.PAGESIZE].max()
        self._descriptor = -1
        self._on_short: Callable[[OSError], None] = lambda error: None

    @classmethod
    def make(
        cls, layout: SegmentLayout, on_short: Callable[[OSError], None] = lambda error: None
    ) -> tuple[Segment, int]:
        """Make a segment of this process.

        Args:
            layout: What stands where in it.
            on_short: Called where there is no memory for a room of it.
        Returns:
            The segment, and the descriptor by which others map it.
        Raises:
            OSError: There is no memory for it, or the system has none of this kind.
        """
        fd = os.memfd_create("quicoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.size)
            os.posix_fallocate(fd, 0, layout.base)
            made = cls(fd, layout, writable=True)
            fcntl.fcntl(fd, ADD_SEALS, _SEALS)
            made._on_short = on_short
            made._descriptor = os.dup(fd)
            weakref.finalize(made, os.close, made._descriptor)
        except BaseException:
            os.close(fd)
            raise
        return made, fd

    @classmethod
    def received(cls, fd: int, layout: SegmentLayout) -> Segment:
        """Map a segment that another rank has made.

        Args:
            fd: Its descriptor.
            layout: What has to stand where in it.
        Raises:
            ValueError: No rank of ours would send this.
            OSError: It cannot be mapped.
        """
        if fcntl.fcntl(fd, GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != layout.size:
            raise ValueError("a segment that is not sealed, or of another size")
        return cls(fd, layout, writable=False)

    def allocate(self, at: int, size: int) -> None:
        """See that there are pages, in a segment of this process. Raises OSError."""
        try:
            os.posix_fallocate(self._descriptor, at, size)
        except OSError as error:
            self._on_short(error)
            raise


class SharedMemory:
    """Segments of this system, as `quicoll.local.layout.HostMemory` has them.

    Used by one thread at a time, under a lock of its user's.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        rank: int,
        own: Segment,
        peers: Mapping[int, Segment],
        arena: Arena | None = None,
        arenas: Mapping[int, PeerArena] = MappingProxyType({}),
    ) -> None:
        """Take what was met.

        Args:
            layout: Of all segments.
            rank: This one.
            own: Its segment.
            peers: Those of the others, by rank.
            arena: That of this process.
            arenas: Those of the others, by rank, where they have one.
        """
        self.layout = layout
        self.rank = rank
        segments = [own if each == rank else peers[each] for each in range(layout.world)]
        self._words = [segment.words for segment in segments]
        self._data = [segment.data for segment in segments]
        self._arrays = [segment.array for segment in segments]
        self._segment = own
        self._own = own.words
        self._own_data = own.data
        self._barrier = threading.Lock()
        self._arena = arena
        self._arenas = arenas

    def load(self, rank: int, word: int) -> int:
        return self._words[rank][word]

    def store(self, word: int, value: int) -> None:
        self._own[word] = value

    def fence(self) -> None:
        # Nobody else ever holds it (whoever uses this memory holds a lock of his own), so taking it is a locked
        # instruction of the processor, which on x86-64 is a full barrier; 0.1 us.
        with self._barrier:
            pass

    def read(self, rank: int, at: int, size: int) -> bytes:
        return bytes(self._data[rank][at : at + size])

    def write(self, at: int, data: bytes | memoryview) -> None:
        self._own_data[at : at + len(data)] = data

    def view(self, rank: int, at: int, size: int) -> Array:
        return self._arrays[rank][at : at + size]

    def make(self, at: int, size: int) -> None:
        self._segment.allocate(at, size)

    def place(self, values: Array) -> int:
        return 0 if self._arena is None else self._arena.place(values)

    def withdraw(self, record: int) -> None:
        self._own[record // 8 + 1] = WITHDRAWN

    def lent(self, rank: int, place: int, size: int) -> Array | None:
        arena = self._arenas.get(rank)
        return None if arena is None else arena.lent(place, size)
