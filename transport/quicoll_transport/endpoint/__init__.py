"""One UDP socket, its connections, and the links to peers. A sans-IO core decides; a thin asyncio shell carries out.

shell        Endpoint: socket, timer, look-ups, log
link         Link: a peer as callers see it
channel      Channel: whole messages in order
transfer     Transfer: a message under way
config       EndpointConfig

core         EndpointCore: who owns what
traffic      connections at work, and their ends
greeting     from a connection of nobody to one of a link
admission    who comes in: the rules of gate, guard, authentication and Hello
dialling     which address is tried next, and when again
table        which connections there are, and which one carries each link
connection   a carrier and what the endpoint knows of it
peer         a link and what the endpoint knows of its peer
agenda       when to look at what again
terms        what core and shell say to each other
"""

from __future__ import annotations

from quicoll_transport.endpoint.channel import Channel
from quicoll_transport.endpoint.config import EndpointConfig
from quicoll_transport.endpoint.link import Link
from quicoll_transport.endpoint.shell import Endpoint
from quicoll_transport.endpoint.transfer import Transfer
from quicoll_transport.link.core import LinkState

__all__ = ["Channel", "Endpoint", "EndpointConfig", "Link", "LinkState", "Transfer"]
