"""Where the peers of a rank are reached, told when that changes while a link lives.

reached     the link is up, at an address that the peer has shown to be its own
elsewhere   it is up at another one: its path was cut and it goes on over another, or a router has given the peer
            another port. `path_changed` is told, once for each change
gone        the link has ended; the next one begins without a place before
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll_transport.endpoint import LinkState
from quicoll_transport.net.addresses import format_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll_transport.endpoint import Link
    from quicoll_transport.net.addresses import Address

__all__ = ["PeerPlaces"]


class PeerPlaces:
    """See the module's head."""

    def __init__(self, emit: Callable[..., None]) -> None:
        """Know of no peer.

        Args:
            emit: Called with (kind, **fields) for each event.
        """
        self._emit = emit
        self._places: dict[str, Address] = {}

    def note(self, link: Link) -> None:
        """Look at a link whose state, or whose peer's place, may have changed."""
        if link.ended:
            self._places.pop(link.node, None)
            return
        place = link.proved_address
        if link.state is not LinkState.UP or place is None:
            return
        before = self._places.get(link.node)
        self._places[link.node] = place
        if before is not None and before != place:
            self._emit("path_changed", peer=link.node, address=format_address(place), before=format_address(before))
