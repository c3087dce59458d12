"""An operator's side: asks the coordinator of a running job for something, and waits until it is so.

    dialling   the link is made, and made again a moment after it has ended, until the time is over
    asking     `Scale` is sent; sent again on the next link where no answer came. It says how many ranks, not how many
               more, so that twice is as good as once
    refused    the coordinator says why not: the end
    waiting    it is taken; `Inquire` asks how far it is, until nothing is missing
    replaced   somebody has asked for something else meanwhile: the end

The coordinator keeps what it was asked for, whether or not anybody waits for it: who gives up here takes nothing back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quicoll.config import coordinator_addresses
from quicoll.errors import LocalError, PeerError
from quicoll.membership.incarnation import CHANCE_BYTES, above, first
from quicoll.membership.messages import COORDINATOR_NODE
from quicoll.membership.operators import (
    OPERATOR,
    Inquire,
    OperatorAnswer,
    OperatorMessage,
    OperatorReply,
    Scale,
    decode_answer,
)
from quicoll.membership.operators import encode_operation as encode
from quicoll_transport.endpoint import Endpoint, EndpointConfig, LinkState
from quicoll_transport.errors import LinkLost, TransportError
from quicoll_transport.net.addresses import is_v6
from quicoll_transport.net.resolver import Resolver, resolve_all
from quicoll_transport.net.udp import DatagramIO, UdpSocket
from quicoll_transport.security.access import Access
from quicoll_transport.security.identity import COORDINATOR, Identity
from quicoll_transport.security.policy import Policy

if TYPE_CHECKING:
    from pathlib import Path

    from quicoll_transport.endpoint import Link
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.credentials import Credentials

__all__ = ["OperatorLink", "ask_for_ranks", "open_link"]

_LOOK_S = 0.25
"""Seconds from one question to the next, and from the end of a link to the next one."""


class OperatorLink:
    """A link to the coordinator that is dialled again; one question at a time."""

    def __init__(self, credentials: Credentials, addresses: Sequence[Address], io: DatagramIO) -> None:
        """Open the endpoint on the running loop.

        Args:
            credentials: The operator's own.
            addresses: The coordinator's; of several the one after the other is asked, until one leads.
            io: The network; it belongs to this from here on.
        """
        self._loop = asyncio.get_running_loop()
        self._coordinator = Identity(credentials.identity.job, COORDINATOR, COORDINATOR_NODE)
        self._addresses = tuple(addresses)
        self._at = 0  # of these, the one that is asked
        self._endpoint = Endpoint(
            credentials=credentials,
            config=EndpointConfig(),
            io=io,
            loop=self._loop,
            incarnation=first(os.urandom(CHANCE_BYTES)),
            authorize=Policy(roles=()),  # nobody has to dial an operator
            on_link=lambda link: link.close("an operator takes no links"),
        )
        self._link: Link | None = None
        self._answer: asyncio.Future[OperatorReply] | None = None
        self._trouble = ""

    @property
    def job(self) -> str:
        """The job's name, as in the certificate."""
        return self._coordinator.job

    @property
    def several(self) -> bool:
        """Whether there is more than one coordinator to ask."""
        return len(self._addresses) > 1

    @property
    def address(self) -> Address:
        """Of the coordinator that is asked at present."""
        return self._addresses[self._at]

    @property
    def trouble(self) -> str:
        """Why there is no answer, for people."""
        refusal = "" if self._link is None else self._link.refusal
        return refusal or self._trouble or "no answer yet"

    def go_on(self) -> None:
        """Ask the next one of several coordinators from here on."""
        self._at = (self._at + 1) % len(self._addresses)
        if self._link is not None and self.several:
            self._link.close("another coordinator is asked")

    async def ask(self, message: OperatorMessage) -> OperatorReply | None:
        """Ask once; None where the link ended before the answer, and a moment has passed.

        Args:
            message: The question.
        Raises:
            PeerError: The coordinator refuses this operator, or answers with something else.
        """
        link = self._link
        if link is None or link.ended:
            link = self._link = self._endpoint.link(self._coordinator, addresses=[self._addresses[self._at]], dial=True)
            link.listen(self._received, self._changed)
        try:
            if link.state is not LinkState.UP:
                await link.wait_up()
            link.send_app(encode(message))
            self._answer = self._loop.create_future()  # from here on the end of the link is told by it
            return await self._answer
        except LinkLost as error:
            self._trouble = str(error)
            self.go_on()
            if link.outdated_by:  # another command with this certificate is at work, or was a moment ago
                self._endpoint.start_over(above(link.outdated_by, self._endpoint.incarnation))
            await asyncio.sleep(_LOOK_S)
            return None
        finally:
            self._answer = None

    async def aclose(self) -> None:
        """End the link."""
        await self._endpoint.aclose(reason="done")

    def _received(self, link: Link, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            return
        try:
            self._answer.set_result(decode_answer(data, node=link.node))
        except PeerError as error:
            self._answer.set_exception(error)

    def _changed(self, link: Link) -> None:
        if link.ended and self._answer is not None and not self._answer.done():
            self._answer.set_exception(LinkLost(link.cause, peer=link.node))


async def open_link(coordinator: str, certs: str | Path, *, role: str, node: str, timeout: float) -> OperatorLink:
    """Return a link over a socket of its own, which nothing was asked over yet.

    Args:
        coordinator: Where it listens, "host:port"; of several that take over from each other, with commas between them.
        certs: Directory with <role>-<node>.pem, its key, and ca.pem.
        role: In the certificate.
        node: The name in the certificate.
        timeout: Seconds for looking up names.
    Raises:
        LocalError: Certificates or the address cannot work.
    """
    try:
        credentials = Access.read(certs, role=role, node=node).credentials
        addresses = coordinator_addresses(coordinator)
        targets, failed = await resolve_all(addresses, Resolver().resolve, timeout=timeout)
        if not targets:
            raise LocalError(f"the coordinator's address {coordinator!r}: {failed[0] if failed else 'none'}")
        host = "::" if is_v6(targets[0]) else "0.0.0.0"  # noqa: S104 - nobody dials it
        io = UdpSocket(host, 0, loop=asyncio.get_running_loop())
    except TransportError as error:
        raise LocalError(str(error)) from error
    return OperatorLink(credentials, addresses, io)


async def ask_for_ranks(
    world_size: int | None,
    leave: tuple[str, ...] = (),
    *,
    coordinator: str,
    certs: str | Path,
    node: str = OPERATOR,
    timeout: float = 300.0,
    wait: bool = True,
    say: Callable[[OperatorAnswer], None] = lambda _: None,
) -> OperatorAnswer:
    """Ask a running job for another number of ranks, and wait until its view is so.

    Args:
        world_size: Ranks that are wanted; None: as many as there are.
        leave: Nodes that shall leave.
        coordinator: Where it listens, "host:port"; of several that take over from each other, with commas between them.
        certs: Directory with operator-<node>.pem, its key, and ca.pem.
        node: The operator's name in its certificate.
        timeout: Seconds for all of it.
        wait: Whether to wait until the view stands, or only until the request is taken.
        say: Called with each answer that differs from the one before.
    Returns:
        The last answer; what it waits for is missing still.
    Raises:
        LocalError: Certificates or the address cannot work; or the request is refused, and nothing has changed.
        PeerError: The coordinator was not reached in time.
    """
    link = await open_link(coordinator, certs, role=OPERATOR, node=node, timeout=timeout)
    last: OperatorAnswer | None = None
    try:
        async with asyncio.timeout(timeout):
            while last is None or (wait and last.waiting_for):
                answer = await link.ask(Scale(world_size=world_size, leave=leave) if last is None else Inquire())
                if not isinstance(answer, OperatorAnswer):
                    continue
                if answer.refusal:
                    raise LocalError(f"the coordinator refuses: {answer.refusal}")
                if last is not None and answer.world_size != last.world_size:
                    raise LocalError(f"somebody has asked for {answer.world_size} ranks meanwhile")
                if answer != last:
                    say(answer)
                last = answer
                if wait and answer.waiting_for:
                    await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        if last is None:
            raise PeerError(
                f"the coordinator at {coordinator} did not answer within {timeout:g} s: {link.trouble}"
            ) from None
    finally:
        await link.aclose()
    if last is None:
        raise AssertionError("the loop ends with an answer")
    return last
