"""The asyncio shell: one UDP socket, its sessions, and the links to peers. Bytes and time in, messages out.

shell        Endpoint: who owns what, the turn of the loop, the ends of connections
reception    how a session becomes a link's connection: gate, guard, authentication, Hello
dialling     which address is tried next, and when again
agenda       the one timer
connection   a session and what the endpoint knows of it
links        Link: a peer as callers see it
transfer     Transfer: a message under way
config       EndpointConfig
"""

from __future__ import annotations

from quicoll_transport.endpoint.config import EndpointConfig
from quicoll_transport.endpoint.link import Link
from quicoll_transport.endpoint.shell import Endpoint
from quicoll_transport.endpoint.transfer import Transfer
from quicoll_transport.link.core import LinkState

__all__ = ["Endpoint", "EndpointConfig", "Link", "LinkState", "Transfer"]
