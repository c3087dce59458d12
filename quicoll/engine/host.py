"""What ranks of one host ask of it, as interfaces: to meet, to be woken, to hear of ends, and for the time.

Neighbours (neighbours.py) and neighbourhood (neighbourhood.py) decide, and touch the system by these alone. The system
answers in this_host.py; a host that is simulated answers on a virtual clock (quicoll.sim.hosts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from quicoll.local.layout import HostMemory
    from quicoll.local.meeting import MeetingPlace
    from quicoll.membership.view import View

__all__ = ["Belongings", "HostHere", "HostWakes", "MetHost"]


class HostWakes(Protocol):
    """How ranks that have met wake each other, and how one of them sleeps.

    A rank can be woken in two places. In front is its caller, or its event loop: one at a time is woken there. At the
    back is its engine. To wake is to leave a mark, which stays until it is seen, however often it is left meanwhile: a
    rank that is awake, or stopped, finds it when it looks.

    crowded: who looks has the processor that another one needs, so nobody does.
    """

    crowded: bool

    def now(self) -> float:
        """Return seconds, of the clock of the engine's loop."""
        ...

    def now_ns(self) -> int:
        """Return nanoseconds, for how long something took."""
        ...

    def processor(self) -> int:
        """Return on which processor the thread that calls runs; 0 where that makes no difference, or is not known."""
        ...

    def offer(self) -> None:
        """Let whoever waits for this processor have it."""
        ...

    def listen(self, on_back: Callable[[], None], on_ended: Callable[[int], None]) -> None:
        """Begin to listen, on the engine's loop.

        Args:
            on_back: Called when this rank was woken at the back.
            on_ended: Called once with each rank whose process has ended.
        """
        ...

    def ring(self, rank: int, *, front: bool) -> None:
        """Wake a rank, in front or at the back; never waits. Under a lock of the user's, as all that follows."""
        ...

    @property
    def thread_in_front(self) -> bool:
        """Whether a thread sleeps in front, or is about to."""
        ...

    def wait_in(self, loop: asyncio.AbstractEventLoop, on_front: Callable[[], None]) -> bool:
        """Have `on_front` called whenever this rank is woken in front, on a loop, which is that of this thread.

        Returns:
            Whether it will be: False where somebody else is in front.
        """
        ...

    def take_front(self) -> bool:
        """Let this thread sleep in front. Return whether it may: not where somebody else is there."""
        ...

    def leave_front(self) -> None:
        """The thread that has taken the front sleeps no more; also after `close`."""
        ...

    def sleep(self, seconds: float) -> None:
        """Sleep until this rank is woken in front, or for so long. By who has taken the front; without the lock."""
        ...

    def close(self) -> None:
        """Let go of all, and wake the thread that sleeps. On the engine's loop, once."""
        ...


@dataclass(frozen=True, slots=True)
class MetHost:
    """What ranks have that have met. memory, memory_for_large: the same, for two threads."""

    memory: HostMemory
    memory_for_large: HostMemory
    wakes: HostWakes


class Belongings(Protocol):
    """What a rank brings to a meeting: its memory, and how it is woken. name: of the place where it is met."""

    name: bytes

    async def meet(
        self,
        *,
        view_id: int,
        rank: int,
        places: Mapping[int, MeetingPlace],
        secrets: Mapping[int, bytes],
        within: float,
    ) -> MetHost:
        """Meet all others, once.

        Args:
            view_id: The view.
            rank: This rank in it.
            places: By rank, where the others are.
            secrets: By rank, what this rank has told the others beside its own name.
            within: Seconds for all of it.
        Returns:
            What this rank and they have given, which belongs to the caller.
        Raises:
            MeetingFailed: Somebody was not met in time, or gave something else.
            OSError: What was given cannot be used, or ValueError.
        """
        ...

    def close(self) -> None:
        """Give back what a meeting has not given to the caller."""
        ...


class HostHere(Protocol):
    """The host that this rank is on. name: what it has in common with others of the same host."""

    name: str

    def sharers(self, view: View, rank: int) -> tuple[int, ...]:
        """Return the ranks of a view that may be on one host with one of them, with that one, ascending; none where
        they are too many. It follows from the view alone, so it is the same on each of them."""
        ...

    def bring(self, world: int, loop: asyncio.AbstractEventLoop) -> Belongings:
        """Make what this rank brings to a meeting of so many ranks; `loop` is its engine's.

        Raises:
            OSError: There is no memory for it, or was none for a room of what was brought before, or the system has
                none of this kind.
        """
        ...
