"""On which host a rank is: whether all of a launch are on one, and at which address the others reach this one.

A launcher may say that all ranks are on one host. Where none does, each leaves the name of its host in the store, and
rank 0 waits for all of them. Ranks that share a boot and a network namespace reach each other by loopback; two
containers of one machine do not, though they have one boot.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from quicoll.errors import LocalError, PeerError
from quicoll_transport.net.addresses import is_unspecified, parse_addresses

if TYPE_CHECKING:
    from quicoll.config import Config
    from quicoll.rendezvous.stores import Store

__all__ = ["leave_host", "own_host", "share_host"]

_BOOT = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"
_LOOK_S = 0.05


def leave_host(store: Store, rank: int) -> None:
    """Say in the store on which host this rank is.

    Args:
        store: That all ranks of the launch share.
        rank: Of this process.
    """
    store.set(f"host/{rank}", _host_name().encode())


def share_host(store: Store, world_size: int, timeout: float, given_up: Callable[[], bool]) -> bool:
    """Wait until all ranks have said on which host they are, and return whether it is this one.

    Args:
        store: Where `leave_host` has said it.
        world_size: How many ranks there are.
        timeout: Seconds.
        given_up: Whether nobody waits for the answer any more.
    Raises:
        PeerError: A rank has not come in time; the first one is named.
        LocalError: It was given up.
    """
    own, deadline = _host_name().encode(), time.monotonic() + timeout
    together = True
    for rank in range(world_size):
        while (found := store.get(f"host/{rank}")) is None:
            if given_up():
                raise LocalError("rendezvous: it was given up")
            if time.monotonic() > deadline:
                raise PeerError(f"rendezvous: rank {rank} did not come within {timeout:g} s; is it running?", rank=rank)
            time.sleep(_LOOK_S)
        together = together and found == own
    return together


def _host_name() -> str:
    """Return what two processes share exactly if they are on one host, as far as the system says."""
    try:
        with open(_BOOT) as file:
            return f"{file.read().strip()} {os.readlink(_NETWORK)}"
    except OSError:
        return socket.gethostname()


def own_host(config: Config, environ: Mapping[str, str], *, together: bool) -> str:
    """Return the address of this host at which the other ranks reach the coordinator.

    Args:
        config: With `listen`, if the user has named an address.
        environ: With MASTER_ADDR, under torchrun.
        together: Whether all ranks are on this host.
    Raises:
        LocalError: It knows none.
    """
    if config.listen:
        host, _ = parse_addresses(config.listen)[0]
        if not is_unspecified(host):
            return host
    if together:
        return "127.0.0.1"
    known: list[str] = [*_addresses(environ.get("MASTER_ADDR")), *_outward()]
    for address in known:
        loopback: bool = ipaddress.ip_address(address).is_loopback
        if not loopback and _is_ours(address):
            return address
    raise LocalError(
        "rendezvous: this host does not know an address at which the others reach it; set listen (QUICOLL_LISTEN), for "
        "instance to its address and port 0"
    )


def _addresses(name: str | None) -> list[str]:
    if not name:
        return []
    try:
        return [str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)]
    except OSError:
        return []


def _outward() -> list[str]:
    """Return this host's addresses towards the world. Connecting a UDP socket sends nothing."""
    found: list[str] = []
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found.append(str(probe.getsockname()[0]))
    return [*found, *_addresses(socket.gethostname())]


def _is_ours(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        return True
    return False
