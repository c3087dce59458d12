"""The memory that an engine shares with one of its lanes: slots for what goes out, and for what comes in.

One memfd, made by the engine and sealed against growing and shrinking; nobody but the two has it, and it is gone with
the last of them, also after SIGKILL. Who may touch a slot follows from the orders (orders.py): from `LaneSend` or
`LaneReceive` to `LaneOver` it is the lane's, else the engine's. Their socket's calls are a barrier on both sides.

A slot's pages are made before it is first used (posix_fallocate), in the order of need: where there is no memory that
fails, and not the first touch.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from typing import Final, Protocol

__all__ = ["LARGEST", "LEAST", "SLOTS", "LaneMemory", "LanePlaces", "lanes_unusable", "slots_for"]

LEAST: Final = (64 << 10) + 1
"""Bytes of a message from which on a lane carries it: what a shorter one costs is its way, not its packets."""
LARGEST: Final = 8 << 20
"""Bytes of a slot at most; longer messages, of whoever has set longer chunks, go over the link."""
SLOTS: Final = 24
"""For each direction: more messages than plans of ours keep under way between two ranks."""

_MOST: Final = 64 << 20  # bytes for each direction, of a lane

# Of Linux's <fcntl.h>, which other systems' `fcntl` does not name.
_ADD_SEALS, _SEAL, _SHRINK, _GROW = 1033, 1, 2, 4


def lanes_unusable() -> str:
    """Return why there can be no lanes here; "" where there can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return f"{sys.platform} has no memory without a name"
    return ""


def slots_for(largest: int, most: int) -> int:
    """Return how many slots a lane has for each direction.

    Args:
        largest: Bytes of one.
        most: Not more than so many.
    """
    return max(1, min(most, _MOST // largest))


class LanePlaces(Protocol):
    """Slots, as engine and lane see them."""

    def make(self, slot: int) -> None:
        """See that an outgoing slot has memory, or an incoming one, which are numbered after those. Raises OSError."""
        ...

    def place(self, slot: int, nbytes: int) -> memoryview:
        """Return so many bytes of a slot."""
        ...


class LaneMemory:
    """Mapped here."""

    def __init__(self, descriptor: int, largest: int, slots: int) -> None:
        """Map it.

        Args:
            descriptor: Of the memfd; it stays the caller's, who may close it.
            largest: Bytes of a slot.
            slots: For each direction.
        Raises:
            OSError: It cannot be mapped.
        """
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self._largest = largest
        self._bytes = memoryview(mmap.mmap(descriptor, 2 * slots * largest))

    @classmethod
    def new(cls, largest: int, slots: int) -> tuple[LaneMemory, int]:
        """Make it; arguments as above.

        Returns:
            It, and its descriptor, which is the caller's.
        Raises:
            OSError: There is no memory for it.
        """
        descriptor = os.memfd_create("quicoll-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, 2 * slots * largest)
            fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL | _SHRINK | _GROW)
            return cls(descriptor, largest, slots), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def make(self, slot: int) -> None:
        os.posix_fallocate(self._descriptor, slot * self._largest, self._largest)

    def place(self, slot: int, nbytes: int) -> memoryview:
        return self._bytes[slot * self._largest : slot * self._largest + nbytes]
