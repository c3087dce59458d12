"""The transport's events as events of the job: none is forgotten, and the documents' table has them all."""

from __future__ import annotations

import re
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from quicoll import Event
from quicoll.observability.events import Observers
from quicoll.observability.transport import TRANSPORT_KINDS, forward_to, told_fields
from quicoll_transport import events as transport
from quicoll_transport.link.core import LinkState

ROOT = Path(__file__).parents[3]
PEER, LINK = "worker/worker-1", 4


def test_every_event_of_the_transport_has_a_kind() -> None:
    assert set(TRANSPORT_KINDS) == set(typing.get_args(transport.TransportEvent)) - {transport.CredentialsRotated}
    assert len(set(TRANSPORT_KINDS.values())) == len(TRANSPORT_KINDS)


@pytest.mark.parametrize(
    ("event", "kind", "told"),
    [
        (
            transport.LinkChanged(9, PEER, LINK, LinkState.LOST, "silent"),
            "link_changed",
            {"peer": "worker-1", "link": 4, "state": "lost", "cause": "silent"},
        ),
        (
            transport.SuspicionChanged(9, PEER, LINK, True, 1_234_567_890),
            "suspicion_changed",
            {"peer": "worker-1", "link": 4, "suspect": True, "silent_for": 1.235},
        ),
        (
            transport.DialStarted(9, PEER, LINK, ("::1", 5000, 0, 0), 2),
            "dial_started",
            {"peer": "worker-1", "link": 4, "address": "[::1]:5000", "attempt": 2},
        ),
        (transport.PeerRefused(9, "", None, "why"), "peer_refused", {"peer": "", "address": "", "reason": "why"}),
        (transport.Resent(9, PEER, LINK, 1, 3), "resent", {"peer": "worker-1", "link": 4, "count": 1, "total": 3}),
    ],
)
def test_peers_are_nodes_durations_are_seconds_and_addresses_text(
    event: transport.TransportEvent, kind: str, told: dict[str, object]
) -> None:
    heard: list[Event] = []
    forward_to(Observers("worker-0", lambda: 7, heard.append))(event)
    assert heard == [Event(7, "worker-0", kind, told)]


def test_a_rotation_is_told_once_and_not_by_the_transport() -> None:
    heard: list[Event] = []
    forward_to(Observers("worker-0", lambda: 7, heard.append))(transport.CredentialsRotated(9, "f" * 64))
    assert heard == []


def test_the_table_of_transport_events_has_all_kinds_with_their_fields() -> None:
    _, _, below = (ROOT / "docs/settings.md").read_text().partition("\n### Of the transport\n")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", below, re.MULTILINE)
    renamed = {"silent_for_ns": "silent_for"}
    assert {kind: set(re.findall(r"`(\w+)`", told)) for kind, told in rows} == {
        name: {renamed.get(each.name, each.name) for each in fields(kind) if each.name != "t_ns"}
        for kind, name in TRANSPORT_KINDS.items()
    }
    assert set(told_fields(transport.Stalled(9, PEER, LINK, 1))) == {"peer", "link", "count"}
