"""What the network gives: a port to bind, the coordinator and peers as seen from here, and this host as they see it.

The coordinator is asked in the name of this node, over a connection that becomes no link (endpoint/inquiry.py), so a
rank of this node that is at work meanwhile is not disturbed. Its port is in use then, which is told as a note.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quicoll.doctor.certificates import expiry
from quicoll.doctor.finding import CheckResult, fine, note, wrong
from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.endpoint.inquiry import inquire
from quicoll_transport.errors import AddressError, AuthenticationError, LinkLost, TransportError
from quicoll_transport.net.addresses import format_address, parse_address, parse_addresses
from quicoll_transport.net.multihomed import bound_io
from quicoll_transport.net.resolver import Resolver
from quicoll_transport.net.trouble import Trouble
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic.terms import DATAGRAM_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll.config import Config
    from quicoll_transport.endpoint.inquiry import Seen
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.credentials import Credentials

__all__ = ["answer", "clock", "nat", "nat_kind", "path", "port", "reached", "spare_port"]

_CLOCK_NOTE_S = 1.0
_CLOCK_WRONG_S = 60.0
"""Certificates are dated five minutes back, so a host that is further behind takes new ones for not yet valid."""


def port(config: Config) -> tuple[list[CheckResult], str]:
    """Bind the address at which other ranks reach this one, and leave it again. Runs on a loop.

    Args:
        config: Of the rank.
    Returns:
        What was found, and the host to ask others from, the first of several; "" where one cannot be bound.
    """
    own = parse_addresses(config.listen)
    host = own[0][0]
    try:
        bound = bound_io(own, loop=asyncio.get_running_loop())
    except AddressError as error:
        if "in use" in str(error):
            says = f"{config.listen} is in use, perhaps by a rank of this node that is at work."
            return [note("port", says, "Where none should be: ss -ulpn shows whose it is.")], host
        return [
            wrong("port", f"{error}.", f"Set listen (from {config.sources['listen']}) to an address of this host.")
        ], ""
    bound.close()
    places = " and ".join(f"{at}, {'a free port' if number == 0 else f'port {number}'}" for at, number in own)
    return [fine("port", f"UDP can be bound at {places} (listen, from {config.sources['listen']}).")], host


def spare_port(host: str) -> int:
    """Return a port that is free: asked from one port, two who answer see whether NAT gives it one mapping. On a loop.

    Args:
        host: The address to ask from.
    """
    with contextlib.suppress(AddressError):
        bound = UdpSocket(host, 0, loop=asyncio.get_running_loop())
        bound.close()
        return int(bound.local_address[1])
    return 0


async def reached(
    name: str, address: str, config: Config, credentials: Credentials, host: str, *, timeout: float, local: int = 0
) -> tuple[list[CheckResult], Seen | None]:
    """Ask the coordinator, or another rank, how it sees this host.

    Args:
        name: Who is asked, for the sentences.
        address: Its "host:port".
        config: Of the rank.
        credentials: Its credentials.
        host: The address to ask from.
        timeout: Seconds.
        local: The port to ask from; 0 for any.
    Returns:
        What was found, and the answer; None where there was none.
    """
    try:
        async with asyncio.timeout(timeout):
            targets = await Resolver().resolve(*parse_address(address))
    except TimeoutError:
        return [
            wrong(name, f"The look-up of {address} did not end within {timeout:g} s.", "Look at the host's DNS.")
        ], None
    except TransportError as error:
        advice = f"Correct {name} (from {config.sources.get(name, 'argument')}), or the host's DNS."
        return [wrong(name, f"{address}: {error}.", advice)], None
    failed: TransportError | None = None
    for target in targets:
        try:
            io = UdpSocket(_same_family(host, target), local, loop=asyncio.get_running_loop())
            seen = await inquire(target, credentials=credentials, io=io, timeout=timeout, search=timeout / 2)
        except TransportError as error:
            failed = failed or error
            continue
        says = f"{seen.peer} answers at {format_address(target)} after {seen.rtt_ns / 1e6:.1f} ms."
        return [fine(name, says), *expiry(f"The certificate of {seen.peer.node}", seen.certificate, _now())], seen
    return [_unreached(name, address, failed)], None


def _now() -> datetime:
    return datetime.now(UTC)


def _same_family(host: str, target: Address) -> str:
    wanted = 6 if ":" in str(target[0]) else 4
    try:
        if ipaddress.ip_address(host).version == wanted:
            return host
    except ValueError:
        pass
    return "::" if wanted == 6 else "0.0.0.0"  # noqa: S104 - for one question


def _unreached(name: str, address: str, error: TransportError | None) -> CheckResult:
    if isinstance(error, AuthenticationError):
        advice = (
            "Both sides need certificates of one authority (ca.pem), of one job, and dates that hold by both clocks."
        )
        return wrong(name, f"{address} was reached, and one side refused the other: {error}.", advice)
    says = f"{address} cannot be reached: {error}."
    if isinstance(error, LinkLost) and error.cause == Trouble().cause:
        return wrong(name, says, "Start it, or correct the port: its host is there and says that nothing listens.")
    advice = "Is it running, at this address? Firewalls on the way have to pass UDP in both directions."
    return wrong(name, says, advice)


def clock(seen: Seen, name: str = "coordinator") -> CheckResult:
    """Compare this host's date with the one that was told.

    Args:
        seen: The answer.
        name: Whose it is.
    """
    ahead, within = seen.ahead_ns / 1e9, seen.rtt_ns / 2e9
    if abs(ahead) <= max(_CLOCK_NOTE_S, within):
        return fine("clock", f"This host's clock and the {name}'s agree to {max(abs(ahead), within):.2g} s.")
    says = f"This host's clock is {abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'} the {name}'s"
    advice = "Keep both by NTP: timedatectl set-ntp true, or chronyc makestep."
    if abs(ahead) <= _CLOCK_WRONG_S:
        return note("clock", f"{says}. Nothing decides by it but certificates' dates; logs do not line up.", advice)
    return wrong("clock", f"{says}: new certificates may count as not yet valid, old ones as expired.", advice)


def path(seen: Seen, name: str = "coordinator") -> CheckResult:
    """Say what the path carries.

    Args:
        seen: The answer.
        name: Where it leads to.
    """
    size = seen.datagram_bytes
    if size >= DATAGRAM_BYTES:
        return fine("mtu", f"The path to the {name} carries datagrams of {size} bytes.")
    says = f"The path to the {name} loses datagrams of {DATAGRAM_BYTES} bytes without a word; those of {size} arrive."
    advice = (
        "Links find that out by losses, each time anew: have a tunnel or VPN on the way carry 1500 bytes, or say so."
    )
    return note("mtu", says, advice)


def nat(seen: Seen, config: Config, name: str = "coordinator") -> CheckResult:
    """Say whether other ranks reach this one at the address that they are told.

    Args:
        seen: The answer.
        config: Of the rank.
        name: Who sees it.
    """
    host = _plain(seen.address[0])
    bound = [_plain(own) for own, _ in parse_addresses(config.listen)]
    if config.advertise is not None:
        told = [one for one, _ in parse_addresses(config.advertise)]
        if host in map(_plain, told) or not all(map(_numeric, told)):
            return fine("nat", f"The {name} sees this host at {host}; other ranks are told {config.advertise}.")
        says = f"The {name} sees this host at {host}, and other ranks are told {config.advertise} (advertise)."
        return note("nat", says, "Right where different ways lead out and in; else advertise the address that is seen.")
    if not all(map(_numeric, bound)) or host in bound:
        return fine("nat", f"The {name} sees this host at {host}, the address that is bound: no NAT on the way.")
    says = f"The {name} sees this host at {host}, and other ranks are told {config.listen}: NAT is on the way."
    advice = (
        f"It works as said below. A UDP port of {host} that is mapped to one of this host needs no help: set "
        f"listen=0.0.0.0:PORT and advertise={host}:MAPPED."
    )
    return note("nat", says, advice)


_OPENS = (
    "Ranks that are behind no NAT are dialled from here; where both are behind NAT of this kind, each opens the way "
    "for the other."
)
_RELAYED = (
    "Ranks that are behind no NAT are dialled from here; with others that are behind NAT, datagrams go by the job's "
    "relay: the coordinator, or what its --relay names."
)


def nat_kind(sightings: Sequence[tuple[str, tuple[str, int]]], config: Config) -> list[CheckResult]:
    """Say what kind of NAT it is, and by which way ranks will reach each other.

    Args:
        sightings: Who saw this host and where, all from one port of it.
        config: Of the rank.
    Returns:
        One result; none where there is no NAT, or a port is mapped.
    """
    bound = [_plain(own) for own, _ in parse_addresses(config.listen)]
    seen = {name: address for name, address in sightings if _plain(address[0]) not in bound}
    if config.advertise is not None or not all(map(_numeric, bound)) or not seen:
        return []
    shown = "; ".join(f"{name}: {format_address(address)}" for name, address in seen.items())
    if len(seen) == 1:
        says = f"Whether the NAT gives one port of this host one mapping cannot be told from one answer ({shown})."
        advice = "Name another process of the job that answers, such as a relay: --peer HOST:PORT."
        return [note("nat kind", says, advice)]
    if len({address[1] for address in seen.values()}) == 1:
        return [fine("nat kind", f"The NAT gives one port of this host one mapping for all ({shown}). {_OPENS}")]
    says = f"The NAT is symmetric: one port of this host has another mapping for each destination ({shown}). {_RELAYED}"
    return [note("nat kind", says, "Map a port, or have the router map independently of the destination (RFC 4787).")]


def _plain(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def _numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def answer(config: Config, credentials: Credentials, seconds: float) -> str:
    """Stand at this rank's address and answer who asks, so that a doctor elsewhere can see whether it is reached.

    Args:
        config: Of the rank.
        credentials: Its credentials.
        seconds: How long.
    Returns:
        The address.
    Raises:
        TransportError: It cannot be bound.
    """
    loop = asyncio.get_running_loop()
    endpoint = Endpoint(
        credentials=credentials,
        config=EndpointConfig(),
        io=bound_io(parse_addresses(config.listen), loop=loop),
        loop=loop,
        incarnation=1,
        authorize=lambda identity: None,
        on_link=lambda link: link.close("a doctor is here, and no rank"),
    )
    try:
        await asyncio.sleep(seconds)
        return format_address(endpoint.address)
    finally:
        await endpoint.aclose(timeout=0.0)
