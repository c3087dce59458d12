"""Where peers are reached, told when it changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quicoll.engine.places import PeerPlaces
from quicoll_transport.endpoint import LinkState

FIRST, SECOND = ("10.0.0.1", 7), ("10.1.0.1", 7)


def link(place: Any, *, node: str = "b", state: LinkState = LinkState.UP) -> Any:
    ended = state in (LinkState.LOST, LinkState.CLOSED)
    return SimpleNamespace(node=node, state=state, ended=ended, proved_address=place)


def test_each_change_of_place_is_told_once_and_not_the_first_place_of_a_link() -> None:
    told: list[dict[str, str]] = []
    places = PeerPlaces(lambda kind, **fields: told.append({"kind": kind, **fields}))
    for each in (
        link(FIRST), link(FIRST), link(FIRST, state=LinkState.DOWN), link(None), link(SECOND), link(SECOND),
        link(FIRST, node="c"),
    ):  # fmt: skip
        places.note(each)
    assert told == [{"kind": "path_changed", "peer": "b", "address": "10.1.0.1:7", "before": "10.0.0.1:7"}]


def test_a_link_that_has_ended_leaves_no_place() -> None:
    told: list[str] = []
    places = PeerPlaces(lambda kind, **fields: told.append(kind))
    places.note(link(FIRST))
    places.note(link(FIRST, state=LinkState.LOST))
    places.note(link(SECOND))
    assert told == []
