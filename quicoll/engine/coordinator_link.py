"""The link to the coordinator, dialled again for as long as the engine lives.

dialled     the link is made; the endpoint tries until it is up, or ends
up          `on_up`: the coordinator can be told things
ended       `on_down` with the reason; a new link follows after `_REDIAL_S`
stopped     the engine leaves: nothing is dialled, nothing is reported any more
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from quicoll.errors import PeerError
from quicoll.membership.messages import decode, encode
from quicoll_transport.endpoint import Endpoint, Link, LinkState
from quicoll_transport.net.addresses import format_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.membership.messages import CoordinatorMessage, MemberMessage
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
        address: Address,
        *,
        loop: asyncio.AbstractEventLoop,
        on_up: Callable[[], None],
        on_down: Callable[[Link], None],
        on_message: Callable[[CoordinatorMessage], None],
        on_change: Callable[[], None],
    ) -> None:
        """Prepare; `dial` begins.

        Args:
            endpoint: Where links are made.
            identity: The coordinator's.
            address: Where it listens.
            loop: The endpoint's.
            on_up: Called when a link is up.
            on_down: Called with a link that has ended, whether or not it was ever up.
            on_message: Called with each message of the coordinator.
            on_change: Called after every change of the link's state, when the others have been called.
        """
        self._endpoint = endpoint
        self._identity = identity
        self._address = address
        self._loop = loop
        self._on_up = on_up
        self._on_down = on_down
        self._on_message = on_message
        self._on_change = on_change
        self._link: Link | None = None
        self._redial: asyncio.TimerHandle | None = None
        self._ended = ""  # why the last link ended
        self._heard: float | None = None  # when the coordinator was last heard, by the loop's clock, before it was lost
        self._stopped = False

    def dial(self) -> None:
        """Make a link."""
        self._redial = None
        link = self._endpoint.link(self._identity, addresses=[self._address], dial=True)
        self._link = link
        link.listen(self._app, self._state)

    def send(self, message: MemberMessage) -> None:
        """Send a message; where there is no link the coordinator hears the state when there is one again."""
        if self._link is not None and not self._link.ended:
            self._link.send_app(encode(message))

    def close(self, cause: str) -> None:
        """End the link, and dial again."""
        if self._link is not None:
            self._link.close(cause)

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
            return f"cannot reach the coordinator at {format_address(self._address)}{why}"
        gone = f"the coordinator at {format_address(self._address)} is gone: it has not answered for"
        return f"{gone} {self._loop.time() - self._heard:.1f} s{why}"

    def silence(self, link: Link) -> str:
        """Return why a link has ended, and since when the coordinator was not heard, for people."""
        silent = link.error.silent_for if link.error is not None else 0.0
        return f"not heard for {silent:.1f} s at {format_address(self._address)} ({link.cause})"

    def _state(self, link: Link) -> None:
        if self._stopped or link is not self._link:
            return
        if link.ended:
            self._ended = link.cause
            if link.stats.connections:
                self._heard = self._loop.time() - (link.error.silent_for if link.error is not None else 0.0)
            self._on_down(link)
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
