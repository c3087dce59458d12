"""One UDP socket, its connections, and the links to peers. A sans-IO core decides; a thin asyncio shell carries out.

shell        Endpoint: socket, timer, look-ups, log
inquiry      how a peer sees this side, asked without a link
link         Link: a peer as callers see it
channel      Channel: whole messages in order
transfer     Transfer: a message under way
config       EndpointConfig
core         the sans-IO core: bytes and time in, what is to be done out
"""

from __future__ import annotations

from quicoll_transport.endpoint.channel import Channel
from quicoll_transport.endpoint.config import EndpointConfig
from quicoll_transport.endpoint.link import Link
from quicoll_transport.endpoint.shell import Endpoint
from quicoll_transport.endpoint.transfer import Transfer
from quicoll_transport.link.core import LinkState

__all__ = ["Channel", "Endpoint", "EndpointConfig", "Link", "LinkState", "Transfer"]
