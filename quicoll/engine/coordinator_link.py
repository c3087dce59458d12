"""The link to the coordinator that leads, dialled again for as long as the engine lives.

dialled     the link is made; the endpoint tries until it is up, or ends. Of a coordinator with several addresses it
            tries all, and goes on over another one when one falls silent
up          `on_up`: the coordinator can be told things
ended       `on_down` with the reason; a new link follows after `_REDIAL_S`, to the next coordinator where there are
            several (coordinator_choice.py)
stopped     the engine leaves: nothing is dialled, nothing is reported any more
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from quicoll.engine.coordinator_choice import CoordinatorChoice
from quicoll.errors import PeerError
from quicoll.membership.messages import decode, encode
from quicoll_transport.endpoint import Endpoint, Link, LinkState
from quicoll_transport.errors import AddressError
from quicoll_transport.net.addresses import format_address, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quicoll.membership.messages import FromRelay, ToRelay
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.identity import Identity

__all__ = ["CoordinatorLink"]

log = logging.getLogger("quicoll")

_REDIAL_S = 0.1


class CoordinatorLink:
    """See the module's head."""

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        coordinators: Sequence[Sequence[Address]],
        *,
        pair: Callable[[Sequence[Address]], None],
        avoid_ns: int,
        loop: asyncio.AbstractEventLoop,
        on_up: Callable[[], None],
        on_down: Callable[[Link], None],
        on_message: Callable[[FromRelay], None],
        on_place: Callable[[Link], None],
        on_change: Callable[[], None],
    ) -> None:
        """Prepare; `dial` begins.

        Args:
            endpoint: Where links are made.
            identity: The coordinator's.
            coordinators: The addresses of each coordinator; any of them may lead.
            pair: Called with the addresses of one of them before it is dialled; see MultihomedIO.
            avoid_ns: How long one that has failed is not gone back to because another says that it leads.
            loop: The endpoint's.
            on_up: Called when a link is up.
            on_down: Called with a link that has ended, whether or not it was ever up.
            on_message: Called with each message of the coordinator.
            on_place: Called with the link when its state, or where the coordinator is, may have changed.
            on_change: Called after every change of the link's state, when the others have been called.
        """
        self._endpoint = endpoint
        self._identity = identity
        self._choice = CoordinatorChoice([each[0] for each in coordinators], avoid_ns=avoid_ns)
        self._addresses = {(str(each[0][0]), int(each[0][1])): list(each) for each in coordinators}
        self._pair = pair
        self._loop = loop
        self._on_up = on_up
        self._on_down = on_down
        self._on_message = on_message
        self._on_place = on_place
        self._on_change = on_change
        self._link: Link | None = None
        self._redial: asyncio.TimerHandle | None = None
        self._ended = ""  # why the last link ended
        self._heard: float | None = None  # when the coordinator was last heard, by the loop's clock, before it was lost
        self._stopped = False

    def dial(self) -> None:
        """Make a link."""
        self._redial = None
        addresses = self._addresses[self._choice.present]
        self._pair(addresses)
        link = self._endpoint.link(self._identity, addresses=addresses, dial=True)
        self._link = link
        link.listen(self._app, self._state)

    def send(self, message: ToRelay) -> None:
        """Send a message; where there is no link the coordinator hears the state when there is one again."""
        if self._link is not None and not self._link.ended:
            self._link.send_app(encode(message))

    @property
    def place(self) -> Address | None:
        """Where the coordinator is, shown by its answers; None while there is no link to it."""
        return None if self._link is None or self._link.ended else self._link.proved_address

    def close(self, cause: str) -> None:
        """End the link, and dial again."""
        if self._link is not None:
            self._link.close(cause)

    def led_by(self, leader: str) -> bool:
        """Take in that the coordinator stands by; return whether another one is dialled now in its place.

        Args:
            leader: Its address, as the present one knows it; "" where it does not.
        """
        try:
            named = self._choice.named(parse_address(leader)[:2], now_ns=self._now_ns()) if leader else False
        except AddressError:
            return False  # of another program's; ours name themselves as they listen
        if named:
            link = self._link
            self.renew()
            if link is not None:
                link.close("another coordinator leads")
        return named

    def renew(self) -> None:
        """Have nothing to do with the present link any more, and dial another one in a while."""
        self._link = None
        self._dial_later()

    def _dial_later(self) -> None:
        if self._redial is not None:
            self._redial.cancel()
        self._redial = self._loop.call_later(_REDIAL_S, self.dial)

    def stop(self) -> None:
        """Dial no more. The link stays, so that what was sent last is delivered."""
        self._stopped = True
        if self._redial is not None:
            self._redial.cancel()

    def absence(self) -> str:
        """Return that the coordinator is not there, since when and why, for people; "" while there is a link to it."""
        link = self._link
        if link is not None and link.stats.connections and not link.ended:
            return ""
        why = (link.refusal if link is not None else "") or self._ended
        why = f" ({why})" if why else ""
        if self._heard is None:
            return f"cannot reach the coordinator at {self._all_addresses()}{why}"
        gone = f"the coordinator at {self._all_addresses()} is gone: it has not answered for"
        return f"{gone} {self._loop.time() - self._heard:.1f} s{why}"

    def silence(self, link: Link) -> str:
        """Return why a link has ended, and since when the coordinator was not heard, for people."""
        silent = link.error.silent_for if link.error is not None else 0.0
        return f"not heard for {silent:.1f} s at {format_address(self._choice.present)} ({link.cause})"

    def _all_addresses(self) -> str:
        return " or ".join(format_address(address) for address in self._choice.addresses)

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def _state(self, link: Link) -> None:
        if self._stopped or link is not self._link:
            return
        self._on_place(link)
        if link.ended:
            self._ended = link.cause
            if link.stats.connections:
                self._heard = self._loop.time() - (link.error.silent_for if link.error is not None else 0.0)
            self._on_down(link)
            self._choice.failed(now_ns=self._now_ns())
            self._dial_later()
        elif link.stats.connections == 1 and link.state is LinkState.UP and not link.suspect:
            self._on_up()  # the first connection only: one that replaces it carries the same link on
        self._on_change()

    def _app(self, link: Link, data: bytes) -> None:
        if self._stopped:
            return
        try:
            message = decode(data, sender="coordinator", node=link.node)
        except PeerError as error:
            log.error("%s", error)
            link.close("malformed message")
            return
        self._on_message(message)
