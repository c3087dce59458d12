"""Mutants of the ways between ranks behind address translators, and the scenarios that find them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quicoll.engine import peer_links
from quicoll.engine.detours import Detours
from quicoll.membership.coordinator import probes
from quicoll.membership.coordinator.roster import Roster
from quicoll.membership.relaying import RelayDesk
from quicoll.sim import Settings
from quicoll.sim.scenario.language import parse_events
from quicoll.sim.scenario.swarm import Scenario
from quicoll_transport.endpoint.core.peer import Peer
from quicoll_transport.relay.table import RelayTable

if TYPE_CHECKING:
    import pytest

    from quicoll.membership.messages import AskRelay, RelayAnswer
    from quicoll_transport.endpoint import Link
    from quicoll_transport.net.addresses import Address

    Patch = pytest.MonkeyPatch

__all__ = ["WAY_MUTANTS"]

RESTRICTED, PORTS, SYMMETRIC = "restricted-cone", "port-restricted-cone", "symmetric"


def scenario(text: str, nats: tuple[str, ...], relay: str, *, nat_lifetime: float = 120.0) -> Scenario:
    """Return a scenario in which some ranks are behind translators."""
    settings = Settings(
        ranks=len(nats), nats=nats, nat_lifetime=nat_lifetime, relay=relay, lost_after=0.5, recovery=10.0, limit=60.0
    )
    return Scenario(seed=5, steps=8, compute_s=0.2, settings=settings, events=parse_events(text))


def the_relay_hands_datagrams_to_the_wrong_member(patch: Patch) -> None:
    """Back to who has sent them, under the label that goes there."""
    forward = RelayTable.forward

    def astray(self: RelayTable, label: bytes, source: Address, size: int, now_ns: int) -> tuple[bytes, Address] | None:
        return None if forward(self, label, source, size, now_ns) is None else (label, source)

    patch.setattr(RelayTable, "forward", astray)


def a_rank_is_dialled_where_it_was_seen_first(patch: Patch) -> None:
    """A mapping that has run out, or was lost, is never opened again."""
    saw = Roster.saw

    def once(self: Roster, node: str, address: tuple[str, int]) -> None:
        if node not in self._seen:
            saw(self, node, address)

    patch.setattr(Roster, "saw", once)


def who_opens_never_dials(patch: Patch) -> None:
    """Only the side that dials first does, whichever router lets nothing in."""
    patch.setattr(peer_links, "DIALS_TOO_S", -1.0)


def who_is_expected_is_told_once(patch: Patch) -> None:
    """What the other side of a probe does has an end, and the probe has none."""
    patch.setattr(probes, "AGAIN_NS", 10**15)


def nobody_hears_that_a_rank_has_moved_until_it_joins_anew(patch: Patch) -> None:
    patch.setattr(Peer, "moved", lambda self: None)


def detours_are_never_left(patch: Patch) -> None:
    """Not where the relay is gone, either, or the coordinator that is it: a new one knows nothing of them."""
    patch.setattr(Detours, "forget", lambda self: None)


def the_relay_knows_a_node_by_its_first_link(patch: Patch) -> None:
    ask = RelayDesk.ask

    def stubborn(self: RelayDesk, link: Link, message: AskRelay) -> RelayAnswer:
        return ask(self, self._links.get(link.node, link), message)

    patch.setattr(RelayDesk, "ask", stubborn)
    patch.setattr(RelayDesk, "ended", lambda self, link: None)


def all_ranks_use_the_relay(patch: Patch) -> None:
    """Those as well that are behind no translator, and have lost each other for another reason."""
    patch.setattr(peer_links, "behind_nat", lambda one, other: True)


QUIET = scenario("sim.at(0.1).heal()", (SYMMETRIC, SYMMETRIC, ""), "own")
A_ROUTER_STARTS_ANEW = scenario("sim.at(0.8).rebind(1); sim.at(2.0).heal()", (PORTS, PORTS), "none")
THE_RELAY_STARTS_ANEW = scenario(
    "sim.at(0.8).crash('relay'); sim.at(2.0).restart('relay'); sim.at(2.5).heal()", (SYMMETRIC, PORTS), "own"
)
THE_COORDINATOR_STARTS_ANEW = scenario(
    "sim.at(0.8).crash('coordinator'); sim.at(1.4).restart('coordinator'); sim.at(2.0).heal()", (SYMMETRIC, PORTS), ""
)
A_RANK_STARTS_ANEW = scenario(
    "sim.at(0.8).crash(1); sim.at(2.0).restart(1); sim.at(2.5).heal()", (SYMMETRIC, PORTS, ""), "own"
)
A_RANK_IS_LEFT_OUT = scenario(
    "sim.at(0.6).crash(0); sim.at(0.7).rebind(1); sim.at(1.5).restart(0); sim.at(2.1).rebind(1); sim.at(3.0).heal()",
    (RESTRICTED, SYMMETRIC),
    "none",
)
TWO_LOSE_EACH_OTHER_FOR_LONG = scenario(
    "sim.at(0.6).partition({0}, {1}); sim.at(2.3).rebind(1); sim.at(9.0).heal()",
    (RESTRICTED, PORTS),
    "none",
    nat_lifetime=1.0,
)
TWO_LOSE_EACH_OTHER = scenario("sim.at(0.5).partition({0}, {1}); sim.at(6.0).heal()", ("", "", PORTS), "own")

WAY_MUTANTS: tuple[tuple[Any, Scenario, str], ...] = (
    (the_relay_hands_datagrams_to_the_wrong_member, QUIET, "progress"),
    (a_rank_is_dialled_where_it_was_seen_first, A_ROUTER_STARTS_ANEW, "progress"),
    (who_opens_never_dials, A_RANK_IS_LEFT_OUT, "progress"),
    (who_is_expected_is_told_once, TWO_LOSE_EACH_OTHER_FOR_LONG, "progress"),
    (nobody_hears_that_a_rank_has_moved_until_it_joins_anew, A_ROUTER_STARTS_ANEW, "progress"),
    (detours_are_never_left, THE_RELAY_STARTS_ANEW, "progress"),
    (detours_are_never_left, THE_COORDINATOR_STARTS_ANEW, "progress"),
    (the_relay_knows_a_node_by_its_first_link, A_RANK_STARTS_ANEW, "progress"),
    (all_ranks_use_the_relay, TWO_LOSE_EACH_OTHER, "ways"),
)
