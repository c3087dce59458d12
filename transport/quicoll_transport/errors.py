"""Errors of the transport: one root, one class per cause.

Every error says whose fault it is by its class, which peer it concerns by its attribute, and whether the link
goes on by `usable`. Callers never parse the text. Foreign exceptions (OSError, ssl, aioquic) become one of these
at the single place where they enter: the datagram driver, the credential loader, the QUIC adapter.
"""

from __future__ import annotations

__all__ = [
    "AddressError",
    "AuthenticationError",
    "ConfigurationError",
    "DeadlineExceeded",
    "EndpointClosed",
    "LinkLost",
    "MessageCorrupted",
    "MessageRefused",
    "ProtocolError",
    "TransportError",
]


class TransportError(Exception):
    """Root of the transport's errors; never raised itself.

    peer: the node concerned, "" when none is known yet.
    usable: whether the link (or, where no link is concerned, the endpoint) can still be used.
    """

    usable: bool = False

    def __init__(self, message: str, *, peer: str = "", usable: bool | None = None) -> None:
        super().__init__(f"{message} (peer={peer})" if peer else message)
        self.peer = peer
        if usable is not None:
            self.usable = usable


class ConfigurationError(TransportError, ValueError):
    """The caller gave settings, keys or arguments that cannot work; nothing was sent."""

    usable = True


class AddressError(TransportError, OSError):
    """A local address cannot be used (occupied port, unknown host, no permission)."""


class AuthenticationError(TransportError):
    """A peer is not who it has to be; `reason` is what our log says, the peer only learns that it was refused."""

    def __init__(self, reason: str, *, peer: str = "") -> None:
        super().__init__(reason, peer=peer)
        self.reason = reason


class ProtocolError(TransportError):
    """The peer sent bytes that break the protocol; its connection is closed."""


class LinkLost(TransportError):
    """The peer was not heard within the link's deadline, restarted, or went away; a later incarnation may return.

    silent_for: seconds since anything of the peer was last heard.
    """

    def __init__(self, cause: str, *, peer: str, silent_for: float = 0.0) -> None:
        super().__init__(f"link lost: {cause}", peer=peer)
        self.cause = cause
        self.silent_for = silent_for


class MessageCorrupted(TransportError):
    """A payload failed its checksum more often than `max_resends`; both ends raise it.

    tag: the message's tag, b"" for one of a channel; channel, counter: of a channel's message, otherwise None.
    sequence: its number on the link. expected: xxh3-64 at the source; found: at the destination.
    """

    usable = True

    def __init__(
        self,
        *,
        peer: str,
        sequence: int,
        expected: int,
        found: int,
        tag: bytes = b"",
        channel: tuple[int, int] | None = None,
    ) -> None:
        name = f"tag {tag.hex()}" if channel is None else f"message {channel[1]} of channel {channel[0]}"
        super().__init__(
            f"message {sequence} ({name}) is corrupt: checksum {expected:016x} at the source, {found:016x} at the "
            "destination",
            peer=peer,
        )
        self.tag = tag if channel is None else b""
        self.channel: int | None = None if channel is None else channel[0]
        self.counter: int | None = None if channel is None else channel[1]
        self.sequence = sequence
        self.expected = expected
        self.found = found


class MessageRefused(TransportError):
    """The peer will not take this message (too large for the posted buffer, or withdrawn)."""

    usable = True


class DeadlineExceeded(TransportError, TimeoutError):
    """The operation `what` did not end within `seconds` and was taken back; the link to `peer` goes on."""

    usable = True

    def __init__(self, message: str, *, peer: str = "", what: str = "", seconds: float = 0.0) -> None:
        super().__init__(message, peer=peer)
        self.what = what
        self.seconds = seconds


class EndpointClosed(TransportError):
    """The endpoint was closed by its owner."""
