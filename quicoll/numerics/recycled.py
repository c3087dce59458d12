"""Memory of large results, used again when nothing refers to it any more.

A fresh 64 MiB comes from the kernel as pages that are zeroed one by one as they are first written: 8 to 11 ms in each
operation, where the memory of the last one would be written in a fraction of a millisecond. So what a result lay in is
kept when its owner has dropped it, and lent to the next result of its size.

    lent    arrays lie in it, by a lease
    kept    nothing refers to it; the next of its size is lent it
    gone    it did not fit beside what is kept, or the recycler is closed

When it may be lent again is not guessed. An array does not own this memory: its base is a `Lease`, and the lease is
the one object that knows the memory's address. numpy keeps an array's base alive for as long as the array and hands it
on to every view, whatever way that was made; a memoryview, and what reads by the buffer protocol, holds the array it
was made of; torch.from_numpy gives its storage a reference to the array, and all tensors, autograd's saved ones and
DLPack capsules of it share that storage; a link that writes what arrives holds a memoryview. So the lease dies with the
last of them and not before, and its `__del__`, which is the only way back here, is the proof that there is none. What
it cannot see is what nothing in the language can: a bare address that somebody has written down
(`data_ptr()`, `__array_interface__`), which was no better while the memory was malloc's.

Copies (pickle, copy, `.clone()`, `share_memory_`) are memory of their own.

Invariants: a block is lent to one lease at a time, and kept only after that has died; what is kept is `most` bytes at
most, and nothing once closed, also of what comes back later; nothing here waits. There is no lock, because a lease may
die anywhere: in the garbage collector, in the middle of `take`, on a thread of torch's. One operation on a dict decides
who has a block: whose `pop` finds it.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.numerics.dtypes import Array

__all__ = ["LEAST_RECYCLED", "MOST_KEPT", "Lease", "Recycler"]

LEAST_RECYCLED = 1 << 20
"""Bytes of a result from which it is worth the while: malloc has smaller ones ready, with their pages."""
MOST_KEPT = 256 << 20
"""Bytes that a job keeps for results to come."""


class _Block:
    """Memory of so many bytes from `address` on, which lies on a page's border. It is `memory`'s."""

    __slots__ = ("address", "memory", "nbytes")

    def __init__(self, memory: Array, nbytes: int) -> None:
        start: int = memory.__array_interface__["data"][0]
        self.memory = memory
        self.address = start + -start % mmap.PAGESIZE
        self.nbytes = nbytes


def of_malloc(nbytes: int) -> Array:
    """Return memory in which so many bytes are on a page's border."""
    return np.empty(nbytes + mmap.PAGESIZE, np.uint8)


class Leasable(Protocol):
    """Memory of so many bytes from an address on."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


B = TypeVar("B", bound=Leasable)
T = TypeVar("T", contravariant=True)


class Owner(Protocol[T]):
    """Whose memory is lent. It may be told on any thread, in the middle of anything that this does."""

    def give_back(self, block: T, /) -> None: ...


class Lease(Generic[B]):
    """The base of an array in a block (`numpy.asarray` makes it); gives the block back when nothing refers to it any
    more."""

    __slots__ = ("__array_interface__", "_block", "_owner")

    def __init__(self, block: B, owner: Owner[B]) -> None:
        self._block = block
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (block.address, False),
            "shape": (block.nbytes,),
            "typestr": "|u1",
        }

    def __del__(self) -> None:
        self._owner.give_back(self._block)


class Recycler:
    """See the module's head. Any thread may use it."""

    __slots__ = ("_allocate", "_kept", "_most")

    def __init__(self, most: int = MOST_KEPT, *, allocate: Callable[[int], Array] = of_malloc) -> None:
        """Keep nothing yet.

        Args:
            most: Bytes that are kept at most.
            allocate: Gives memory of uint8 in which so many bytes are on a page's border, or raises MemoryError.
        """
        self._most = most
        self._allocate = allocate
        self._kept: dict[_Block, None] = {}  # the one that came back first, first

    @property
    def kept(self) -> int:
        """Bytes that are kept."""
        return sum([block.nbytes for block in list(self._kept)])

    def take(self, nbytes: int) -> Array:
        """Return memory for so many bytes, on a page's border, uninitialised: a flat array of uint8.

        Args:
            nbytes: More than none.
        Raises:
            MemoryError: There is none.
        """
        for block in reversed(list(self._kept)):  # what came back last is still in a cache
            if block.nbytes == nbytes and self._kept.pop(block, self) is None:
                return self._lent(block)
        return self._lent(_Block(self._allocate(nbytes), nbytes))

    def _lent(self, block: _Block) -> Array:
        lease: Any = Lease(block, self)
        return np.asarray(lease)

    def give_back(self, block: _Block) -> None:
        """Keep a block that nothing refers to, where it fits; those that came back before it make room."""
        if block.nbytes <= self._most:
            self._kept[block] = None
        self._make_room()

    def close(self) -> None:
        """Let go of what is kept, and keep nothing more."""
        self._most = 0
        self._make_room()

    def _make_room(self) -> None:
        while self.kept > self._most:
            for oldest in list(self._kept)[:1]:
                self._kept.pop(oldest, None)
