"""What a doctor makes of what a coordinator has answered."""

from __future__ import annotations

from typing import Any

import pytest

from quicoll import Config
from quicoll.doctor.network import clock, nat, nat_kind, path
from quicoll_transport.endpoint.inquiry import Seen
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import COORDINATOR, Identity

HOME = Identity("job", COORDINATOR, "coordinator")


@pytest.fixture(scope="module")
def seen() -> Any:
    certificate = ephemeral("job", [(COORDINATOR, "coordinator")])[HOME].certificate

    def make(**told: Any) -> Seen:
        values = {"address": ("10.0.0.7", 5000), "ahead_ns": 0, "rtt_ns": 2_000_000, "datagram_bytes": 1452, **told}
        return Seen(peer=HOME, certificate=certificate, **values)

    return make


@pytest.mark.parametrize(
    ("seconds", "rtt", "state", "says"),
    [
        (0.2, 0.002, "fine", "agree to 0.2 s"),
        (3.0, 8.0, "fine", "agree to 4 s"),  # no better than half a round trip is known
        (-30.0, 0.002, "note", "30.0 s ahead of"),
        (90.0, 0.002, "wrong", "90.0 s behind"),
    ],
)
def test_a_clock_is_judged_by_how_far_it_is_off(seen: Any, seconds: float, rtt: float, state: str, says: str) -> None:
    finding = clock(seen(ahead_ns=round(seconds * 1e9), rtt_ns=round(rtt * 1e9)))
    assert (finding.state, says in finding.says) == (state, True)


def test_a_path_that_loses_what_links_begin_with_is_noted(seen: Any) -> None:
    assert path(seen(datagram_bytes=1200)).state == "note"
    assert path(seen(datagram_bytes=8952)).state == "fine"


@pytest.mark.parametrize(
    ("settings", "state", "says"),
    [
        ({"listen": "10.0.0.7:5000"}, "fine", "no NAT"),
        ({"listen": "192.168.1.2:5000"}, "note", "NAT is on the way"),
        ({"listen": "192.168.1.2:5000", "advertise": "10.0.0.7:7000"}, "fine", "other ranks are told 10.0.0.7:7000"),
        ({"listen": "192.168.1.2:5000", "advertise": "10.0.0.8:7000"}, "note", "other ranks are told 10.0.0.8:7000"),
        ({"listen": "192.168.1.2:5000", "advertise": "gate:7000"}, "fine", "other ranks are told gate:7000"),
    ],
)
def test_nat_is_seen_by_the_address_that_the_coordinator_sees(
    seen: Any, settings: dict[str, str], state: str, says: str
) -> None:
    finding = nat(seen(), Config.resolve(environ={}, **settings))
    assert (finding.state, says in finding.says) == (state, True)
    if "NAT is on the way" in finding.says:
        assert "advertise=10.0.0.7:MAPPED" in finding.advice


@pytest.mark.parametrize(
    ("settings", "sightings", "state", "says"),
    [
        ({"listen": "10.0.0.7:5000"}, [("10.0.0.7", 5000), ("10.0.0.7", 5000)], "", ""),
        ({"listen": "192.168.1.2:5000", "advertise": "10.0.0.7:7000"}, [("10.0.0.7", 1), ("10.0.0.7", 2)], "", ""),
        ({"listen": "192.168.1.2:5000"}, [], "", ""),
        ({"listen": "192.168.1.2:5000"}, [("10.0.0.7", 1)], "note", "cannot be told from one answer"),
        ({"listen": "192.168.1.2:5000"}, [("192.168.1.2", 9), ("10.0.0.7", 1)], "note", "cannot be told"),
        ({"listen": "192.168.1.2:5000"}, [("10.0.0.7", 1), ("10.0.0.7", 1)], "fine", "each opens the way"),
        ({"listen": "192.168.1.2:5000"}, [("10.0.0.7", 1), ("10.0.0.7", 2)], "note", "by the job's relay"),
    ],
)
def test_the_kind_of_nat_follows_from_two_who_see_one_port(
    settings: dict[str, str], sightings: list[tuple[str, int]], state: str, says: str
) -> None:
    named = [(f"peer{number}:4433", address) for number, address in enumerate(sightings)]
    found = nat_kind(named, Config.resolve(environ={}, **settings))
    assert [finding.state for finding in found] == ([state] if state else [])
    assert all(says in finding.says and "10.0.0.7" in finding.says for finding in found)
