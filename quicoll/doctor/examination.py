"""All checks of one host, in the order in which one explains the next: what is not there is not asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from quicoll.config import Config, coordinator_addresses
from quicoll.doctor import host, network
from quicoll.doctor.certificates import certificates
from quicoll.doctor.finding import CheckResult, note, wrong
from quicoll.errors import LocalError
from quicoll_transport.net.addresses import format_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll.config import JoinSettings

__all__ = ["examine_host"]

_LINKS = 8  # where nobody has said how many ranks there will be


async def examine_host(
    *, peers: Sequence[str] = (), patience: float = 5.0, **settings: Unpack[JoinSettings]
) -> list[CheckResult]:
    """Look at everything that a rank with these settings needs. Nothing is joined, and nothing is left behind.

    Args:
        peers: Other ranks' "host:port", to see whether they are reached from here.
        patience: Seconds for each answer.
        **settings: As `quicoll.join` takes them.
    Returns:
        What was found, in order.
    """
    findings = [*host.versions(), *host.compiled(), *host.batches(), *host.socket_buffers(), *host.descriptors()]
    try:
        config = await Config.resolve_in_loop(**settings)
    except LocalError as error:
        findings += host.memory_bounds(_LINKS)
        says = str(error) if str(error).endswith("?") else f"{error}."
        return [*findings, wrong("settings", says, "quicoll env shows where each setting comes from.")]
    findings += host.memory_bounds(config.world_size or _LINKS)
    found, credentials = certificates(config)
    findings += found
    bound, address = network.port(config)
    findings += bound
    if credentials is None or not address:
        says = "The coordinator was not asked: that takes certificates, and an address to ask from."
        return [*findings, note("coordinator", says)]
    local = network.spare_port(address)
    sightings: list[tuple[str, tuple[str, int]]] = []
    if config.sources["coordinator"] == "default":
        says = f"No coordinator is named; the default, {config.coordinator}, was not asked."
        findings.append(note("coordinator", says, "Set coordinator (QUICOLL_COORDINATOR)."))
    else:
        for each in coordinator_addresses(config.coordinator):  # of several any may come to lead
            told, seen = await network.reached(
                "coordinator", format_address(each), config, credentials, address, timeout=patience, local=local
            )
            findings += told
            if seen is not None:
                findings += [network.clock(seen), network.path(seen), network.nat(seen, config)]
                sightings.append((format_address(each), seen.address))
    for peer in peers:
        told, seen = await network.reached("peer", peer, config, credentials, address, timeout=patience, local=local)
        findings += told
        if seen is not None:
            who = seen.peer.node
            findings += [network.clock(seen, who), network.path(seen, who), network.nat(seen, config, who)]
            sightings.append((peer, seen.address))
    return findings + network.nat_kind(sightings, config)
