"""Which of the job's coordinators to dial: one leads, the others stand by and say who does.

Rules, and why:

- A link that ends, or never came up, is followed by one to the next address: whoever is there knows who leads.
- A coordinator that stands by is stayed with, unless it names another of ours that leads: it is one of those that may
  lead next, and then goes on with those who have joined.
- One that has failed is not gone back to for a while, though another still takes it for the leader: a lease outlives
  its holder for some seconds. Who is named is dialled again after that: only the way to it may have failed.
- Where one that was named fails, who named it is gone back to, not the next in turn: it was there a moment ago, and may
  lead next. So who reaches only one of several stays with that one, but for trials of the leader.
- Only addresses that this rank was given are dialled. Whoever answers there has to have the coordinator's certificate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll_transport.net.addresses import Address

__all__ = ["CoordinatorChoice"]


class CoordinatorChoice:
    """One present address.

    Args:
        addresses: Where coordinators listen, in the order in which they are tried.
        avoid_ns: How long one that has failed is not gone back to on another's word.
    Raises:
        LocalError: There is no address.
    """

    def __init__(self, addresses: Sequence[Address], *, avoid_ns: int) -> None:
        if not addresses:
            raise LocalError("a rank needs the address of a coordinator")
        self._addresses = tuple(dict.fromkeys((str(host), int(port)) for host, port, *_ in addresses))
        self._failed_ns: dict[tuple[str, int], int] = {}
        self._avoid_ns = avoid_ns
        self._at = 0
        self._namer: int | None = None  # of whom the present one was heard

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """All of them."""
        return self._addresses

    @property
    def present(self) -> tuple[str, int]:
        """The one to dial."""
        return self._addresses[self._at]

    def failed(self, *, now_ns: int) -> None:
        """Take in that the link to the present one has ended, or did not come up."""
        self._failed_ns[self.present] = now_ns
        self._at = (self._at + 1) % len(self._addresses) if self._namer is None else self._namer
        self._namer = None

    def named(self, leader: tuple[str, int], *, now_ns: int) -> bool:
        """Take in that the present one says who leads; return whether that one is to be dialled instead.

        Args:
            leader: The address of who leads.
            now_ns: The time now.
        """
        failed_ns = self._failed_ns.get(leader)
        avoided = failed_ns is not None and now_ns < failed_ns + self._avoid_ns
        if leader == self.present or leader not in self._addresses or avoided:
            return False
        self._namer, self._at = self._at, self._addresses.index(leader)
        return True
