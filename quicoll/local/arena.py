"""Memory for tensors that the other ranks of a host read where it stands: that of `quicoll.empty` (tensors.py).

A process has one arena: a memfd with room for as many bytes as the machine has memory, 256 GiB at most, of which only
what tensors lie in has pages. The ranks that it meets map it for reading (meeting.py). What a large call gives need not
be copied into a ring then: the rank says where in its arena it stands (large.py).

A part of it:

    free    has no pages, and is nobody's
    taken   arrays lie in it, by a lease. Its pages were made before: where memory is short that fails, and no touch
    left    nothing refers to it any more (quicoll.numerics.recycled says how that is known); its lease may have died
            anywhere, in the garbage collector as well, so it is written down, and whoever has the lock next gives its
            pages back to the system, which makes it free

Who may write. This process alone: what it gives away is a descriptor for reading. It is not sealed against writing, as
a segment is (memory.py), because pages of what is sealed so cannot be given back; who has this user's rights could open
it anew, as he could write to the memory of any process of this user. It is sealed against being cut short, which would
end its readers.

A child of a fork shares the pages with its parent, as it does with no other memory, and would write to tensors that
its parent's peers read. So its mapping is made private before the child's first own step: what it writes is its own. It
sees what its parent writes until it has written to that page itself; where the system has no memory for that, it may
only read, and ends when it writes. Its `quicoll.empty` has an arena of its own. A process that is started anew, as by
`subprocess` or by multiprocessing's "spawn", has nothing of it.

Invariants (tests draw sequences):
    - a part is of one lease at a time, and free only after that has died
    - what a peer names is looked at only inside of the arena, whatever it is
Failure cases: no memory: MemoryError, before there is a tensor. A system without sealed memory, or with a limit of a
process's addresses, which this takes many of: no arena, and `quicoll.empty` gives memory that is not shared. Killed:
the memory has no name, and goes with the last process that maps it. A tensor is dropped when its call has failed, while
a peer still reads it: he reads zeros, and large.py says what he makes of a checksum that differs.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.local.sealing import ADD_SEALS, GET_SEALS, OF_ONE_SIZE, unusable
from quicoll.numerics.recycled import Lease

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array

__all__ = ["Arena", "FreeParts", "PeerArena", "arena_here"]

_MOST = 256 << 30  # bytes: a process has 128 TiB of addresses, and maps that of each rank of the host
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of Linux; `mmap` has no names for them


class FreeParts:
    """Which parts of a number of bytes are free. Of those that are large enough the first is taken."""

    def __init__(self, size: int) -> None:
        """Begin with all of them free."""
        self._parts = [(0, size)] if size else []  # first byte and the one after the last; ascending, apart

    def take(self, nbytes: int) -> int | None:
        """Take so many; return the first, None where no part is large enough."""
        for number, (start, stop) in enumerate(self._parts):
            if stop - start >= nbytes:
                self._parts[number : number + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Make bytes that were taken free again."""
        stop = start + nbytes
        number = bisect.bisect_left(self._parts, (start, stop))
        first, last = number, number
        if number < len(self._parts) and self._parts[number][0] == stop:
            stop, last = self._parts[number][1], number + 1
        if number and self._parts[number - 1][1] == start:
            start, first = self._parts[number - 1][0], number - 1
        self._parts[first:last] = [(start, stop)]


class _Part:
    """Bytes of an arena, whole pages. address: of the first, in this process."""

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes


class Arena:
    """This process's own. Any thread may use it.

    size: bytes of addresses. descriptor: by which peers map it, for reading; open as long as the process.
    own_descriptor: by which a process of this rank's own does, for writing too.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: The system has none of this kind, or no addresses for it.
        """
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            raise OSError("the process's addresses are limited")
        self.size = min(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, _MOST)
        with contextlib.ExitStack() as made:
            self.own_descriptor = os.memfd_create("quicoll-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            made.callback(os.close, self.own_descriptor)
            os.ftruncate(self.own_descriptor, self.size)
            fcntl.fcntl(self.own_descriptor, ADD_SEALS, OF_ONE_SIZE)
            self._map = mmap.mmap(self.own_descriptor, self.size, mmap.MAP_SHARED)
            self.descriptor = os.open(f"/proc/self/fd/{self.own_descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            made.pop_all()
        self._array: Array = np.frombuffer(self._map, np.uint8)
        self._start: int = self._array.__array_interface__["data"][0]
        self._end = self._start  # of all that was ever taken
        self._free = FreeParts(self.size)
        self._left: deque[_Part] = deque()
        self._lock = threading.Lock()
        self._others = False  # this is the child of a fork, and it is its parent's
        self._map_at = ctypes.PyDLL(None).mmap
        self._map_at.restype = ctypes.c_void_p
        self._map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def take(self, nbytes: int) -> Array:
        """Return memory for so many bytes, on a page's border, of undefined contents: a flat array of uint8.

        Args:
            nbytes: More than none.
        Raises:
            MemoryError: There is none.
        """
        self._tidy()
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            at = self._free.take(whole)
        if at is None:
            raise MemoryError(f"{nbytes} bytes, where {self.size} are the most")
        try:
            os.posix_fallocate(self.own_descriptor, at, whole)
        except OSError as error:
            with self._lock:
                self._free.give(at, whole)
            raise MemoryError(str(error)) from error
        with self._lock:
            self._end = max(self._end, self._start + at + whole)
        self._tidy()  # what a collector has left while the lock was ours
        lease: Any = Lease(_Part(self._start + at, whole), self)
        return np.asarray(lease)[:nbytes]

    def give_back(self, part: _Part) -> None:
        """Take back what nothing refers to any more; called by its lease."""
        if not self._others:
            self._left.append(part)
            self._tidy()

    def _tidy(self) -> None:
        """Make free what was left, unless another one is at it: he looks once more after he has let go of the lock."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                part = self._left.popleft()
                at = part.address - self._start
                with contextlib.suppress(OSError):  # then it is free, and has its pages
                    self._map.madvise(mmap.MADV_REMOVE, at, part.nbytes)
                self._free.give(at, part.nbytes)
            except IndexError:  # another one was faster
                pass
            finally:
                self._lock.release()

    def place(self, values: Array) -> int:
        """Return where contiguous memory stands in this arena, by its first byte counted from 1; 0 where it does not.

        Args:
            values: That array, which nobody frees meanwhile.
        """
        start: int = values.__array_interface__["data"][0]
        return start - self._start + 1 if self._start <= start and start + values.nbytes <= self._end else 0

    def lent(self, place: int, nbytes: int) -> Array | None:
        """As `PeerArena.lent`, where the peer is of this process."""
        return _inside(self._array, place, nbytes)

    def leave_to_parent(self) -> None:
        """In the child of a fork: have what lies in it as the child's own."""
        self._others = True
        size, flags = self._end - self._start, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        for protection in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ):
            if size and self._map_at(self._start, size, protection, flags, self.own_descriptor, 0) == self._start:
                return


class PeerArena:
    """Another process's, mapped for reading: another rank's, or this rank's own, which then may be written."""

    def __init__(self, fd: int, *, writes: bool = False) -> None:
        """Map it.

        Args:
            fd: Its descriptor, which stays the caller's.
            writes: Whether it is written to here.
        Raises:
            ValueError: No rank of ours would send this.
            OSError: It cannot be mapped.
        """
        if fcntl.fcntl(fd, GET_SEALS) & OF_ONE_SIZE != OF_ONE_SIZE:
            raise ValueError("memory for tensors that is not sealed")
        size = os.fstat(fd).st_size
        try:
            protection = mmap.PROT_READ | mmap.PROT_WRITE if writes else mmap.PROT_READ
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        except OSError as error:
            why = f"{error.strerror}: {size >> 20} MiB of addresses for another rank's tensors; is ulimit -v set?"
            raise OSError(error.errno, why) from error
        self._map.madvise(mmap.MADV_DONTDUMP)  # it is in the dump of its owner
        self._array: Array = np.frombuffer(self._map, np.uint8)

    def lent(self, place: int, nbytes: int) -> Array | None:
        """Return bytes as they stand there; None for what is not inside of it.

        Args:
            place: As `Arena.place` has it.
            nbytes: How many.
        """
        return _inside(self._array, place, nbytes)


def _inside(array: Array, place: int, nbytes: int) -> Array | None:
    return array[place - 1 : place - 1 + nbytes] if 0 < place <= array.size - nbytes + 1 else None


class _Here:
    """What this process has. known: it was asked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known = False
        self.arena: Arena | None = None


def arena_here() -> Arena | None:
    """Return this process's arena, which is made when it is first asked for; None where it can have none."""
    with _here.lock:
        if not _here.known:
            _here.known = True
            with contextlib.suppress(OSError):
                _here.arena = None if unusable() else Arena()
        return _here.arena


def _in_child() -> None:
    global _here
    if _here.arena is not None:
        _here.arena.leave_to_parent()
    _here = _Here()  # another thread may have held the lock when it forked


_here = _Here()
os.register_at_fork(after_in_child=_in_child)
