"""The transport's own events as events of the job: connections, suspicion, resends, refusals.

They are many and of interest to who looks at a network, so they are told on request only (`transport_events`). Peers
are named by node, as in all other events.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from quicoll_transport.events import (
    ConnectionDown,
    ConnectionUp,
    CredentialsRotated,
    DialStarted,
    LinkChanged,
    PayloadCorrupted,
    PeerRefused,
    Resent,
    Stalled,
    SuspicionChanged,
)
from quicoll_transport.net.addresses import format_address

if TYPE_CHECKING:
    from quicoll.observability.events import Observers
    from quicoll_transport.events import TransportEvent, TransportObserver

__all__ = ["TRANSPORT_KINDS", "forward_to", "told_fields"]

TRANSPORT_KINDS: dict[type[TransportEvent], str] = {
    LinkChanged: "link_changed",
    SuspicionChanged: "suspicion_changed",
    DialStarted: "dial_started",
    ConnectionUp: "connection_up",
    ConnectionDown: "connection_down",
    PeerRefused: "peer_refused",
    Resent: "resent",
    PayloadCorrupted: "payload_corrupted",
    Stalled: "stalled",
}
"""`CredentialsRotated` is not among them: it is told to everybody, as "certificates_rotated"."""


def forward_to(observers: Observers) -> TransportObserver:
    """Return an observer for an endpoint that passes its events on.

    Args:
        observers: Get each event under its kind of `TRANSPORT_KINDS`.
    """

    def forward(event: TransportEvent) -> None:
        if not isinstance(event, CredentialsRotated):
            observers.emit(TRANSPORT_KINDS[type(event)], **told_fields(event))

    return forward


def told_fields(event: TransportEvent) -> dict[str, Any]:
    """Return an event's fields as they are told: plain text and numbers, durations in seconds, no time of its own."""
    told: dict[str, Any] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        match field.name:
            case "t_ns":
                pass
            case "peer":
                told["peer"] = value.rpartition("/")[2]  # "role/node", or "" where nobody knows
            case "state":
                told["state"] = value.value
            case "silent_for_ns":
                told["silent_for"] = round(value / 1e9, 3)
            case "address":
                told["address"] = "" if value is None else format_address(value)
            case _:
                told[field.name] = value
    return told
