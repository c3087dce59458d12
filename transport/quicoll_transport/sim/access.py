"""A host's access link: what all its paths share, on the way out and on the way in.

    sender's uplink (rate, queue) -> the path (loss, its own rate, delay) -> receiver's downlink (rate, queue)

A datagram takes the uplink's time before anything befalls it on the path, so one that is lost there has used the
uplink; it enters the downlink's queue when it has passed the path, in the order of arrival from whatever host. Both
queues are first in, first out, and drop what they cannot hold. Draws no chance. A host without an access link is bound
by its paths alone, and what goes from a host to itself passes neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.faults.rules import Rate

__all__ = ["AccessLink"]

_HEADERS = 28  # IPv4 and UDP
_LEAST_QUEUE = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLink:
    """How a host is attached to the network.

    Attributes:
        up: Bytes a second that it sends at most, with IP and UDP headers; None for no bound.
        down: Bytes a second that it receives at most; None for no bound.
        up_queue: What waits in front of `up` at most, in bytes; what exceeds it is lost.
        down_queue: What waits in front of `down` at most.
    Raises:
        ConfigurationError: A rate is below one byte a second, or a queue does not hold a packet of 1500 bytes.
    """

    up: int | None = None
    down: int | None = None
    up_queue: int = 256 << 10
    down_queue: int = 256 << 10

    def __post_init__(self) -> None:
        for what in ("up_queue", "down_queue"):
            if getattr(self, what) < _LEAST_QUEUE:
                raise ConfigurationError(f"{what} holds {_LEAST_QUEUE} bytes at least, not {getattr(self, what)}")
        self.uplink()
        self.downlink()

    def uplink(self) -> Rate | None:
        """Return a new queue for what is sent; None: nothing bounds it."""
        return _line(self.up, self.up_queue)

    def downlink(self) -> Rate | None:
        """Return a new queue for what arrives; None: nothing bounds it."""
        return _line(self.down, self.down_queue)


def _line(rate: int | None, queue: int) -> Rate | None:
    return None if rate is None else Rate(rate, queue_bytes=queue, overhead_bytes=_HEADERS)
