"""The order in which a peer's addresses are dialled, and how long each may stay silent.

A peer may have several addresses, a name may stand for several. They are tried in rounds, one at a time, in
the order of RFC 8305 section 4: families alternate, and the one that worked last goes first. An attempt that fails is
followed by the next at once. One that is not answered is given up after the Connection Attempt Delay (RFC 8305 section
5, 250 ms), and that doubles with every round, so that a slow path is not given up for ever. Attempts are not raced:
a link has one connection, and a handshake costs both sides more than the wait does. With a single address an attempt
has all of the handshake's time. An address that becomes known in the middle of a round is tried in it, last.
"""

from __future__ import annotations

from collections import deque
from itertools import zip_longest
from typing import TYPE_CHECKING

from quicoll_transport.net.addresses import format_address, is_v6

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll_transport.net.addresses import Address

__all__ = ["MAX_CANDIDATES", "DialPlan", "alternate"]

MAX_CANDIDATES = 16  # addresses of one round; a resolver's answer is bounded by nothing else
_ATTEMPT_DELAY_NS = 250_000_000


def alternate(addresses: Sequence[Address]) -> list[Address]:
    """Return addresses without repetitions, the families in turn, beginning with that of the first."""
    unique = list(dict.fromkeys(addresses))
    families: tuple[list[Address], list[Address]] = ([], [])
    for address in unique:
        families[is_v6(address) != is_v6(unique[0])].append(address)
    return [address for turn in zip_longest(*families) for address in turn if address is not None]


class DialPlan:
    """Which address of a peer comes next, and how long it may stay silent. See the module's head.

    begin -> next, next, ... until None; `worked` or another `begin` ends the round.

    found: all addresses of the last round, in its order.
    """

    __slots__ = ("_failed", "_good", "_left", "_rounds", "_several", "_tried", "current", "found")

    def __init__(self) -> None:
        self._left: deque[Address] = deque()
        self._good: Address | None = None
        self._rounds = 0
        self._several = False
        self._failed: dict[Address, str] = {}
        self._tried: dict[Address, None] = {}  # an ordered set: all of this round
        self.current: Address | None = None
        self.found: tuple[Address, ...] = ()

    def begin(self, candidates: Sequence[Address]) -> None:
        """Start a round with these (canonical) addresses, MAX_CANDIDATES of them at most."""
        turns = alternate(candidates)[:MAX_CANDIDATES]
        if self._good in turns:
            turns.remove(self._good)
            turns.insert(0, self._good)
        self._left = deque(turns)
        self.found = tuple(turns)
        self._tried = dict.fromkeys(turns)
        self._several = len(turns) > 1
        self._rounds += 1
        self._failed.clear()

    def add(self, candidate: Address) -> bool:
        """Try another (canonical) address in the round that is under way, last.

        Returns:
            Whether it is tried in this round; else the next one has it.
        """
        if self.current is None or len(self._tried) >= MAX_CANDIDATES or candidate in self._tried:
            return False
        self._tried[candidate] = None
        self._left.append(candidate)
        self._several = True
        return True

    @property
    def more(self) -> bool:
        """Whether this round has another address to try."""
        return bool(self._left)

    def next(self) -> Address | None:
        self.current = self._left.popleft() if self._left else None
        return self.current

    def patience_ns(self, most_ns: int) -> int:
        """Return how long the current attempt may be without an answer; `most_ns` when there is nothing else to try."""
        if not self._several:
            return most_ns
        return min(most_ns, _ATTEMPT_DELAY_NS << min(self._rounds - 1, 16))

    def failed(self, reason: str) -> str:
        """Note why the current attempt failed; return the reasons of this round, with addresses if several."""
        if not self._several or self.current is None:
            return reason
        self._failed[self.current] = reason
        return "; ".join(f"{format_address(address)}: {why}" for address, why in self._failed.items())

    def use(self, address: Address) -> None:
        """Note that the present attempt is one to this address, which was begun outside of rounds."""
        self.current = address

    def worked(self) -> None:
        """Note that the current attempt made a connection; next time its address goes first."""
        if self.current is not None:
            self._good = self.current
        self._left.clear()
        self._several = False
        self._rounds = 0
