"""A host with several addresses: one socket at each, so that what is sent leaves by the provider or network of its own.

A datagram leaves by one of the sockets:

    paired    `pair` has named the address that it goes to: the first of a peer's addresses is reached from the first of
              ours, the second from the second, and so on; where a peer has more of them than we have, from our first
    heard     something came from there, by this socket: what is answered comes from the address that was asked, or
              the other side takes it for somebody else's (RFC 9000 section 9)
    else      the first socket of the family

Pairs go first: who sends from an address that is not its own must not have the say which way answers take. They are
what the layer above says. Of both kinds the last ones are kept, `_PAIRED` and `_HEARD`.

The address of all of them together is the first one's. What a socket cannot do (bind, take a datagram) is told as by
a single one; the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quicoll_transport.errors import AddressError, ConfigurationError
from quicoll_transport.net.addresses import canonical, is_numeric, is_v6
from quicoll_transport.net.udp import UdpSocket

if TYPE_CHECKING:
    import asyncio

    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.net.udp import DatagramIO, OnRuns, OnUnreachable

__all__ = ["MultihomedIO", "bound_io"]

_HEARD = 4096
_PAIRED = 1 << 16


def bound_io(addresses: Sequence[Address], *, loop: asyncio.AbstractEventLoop) -> DatagramIO:
    """Return a socket at this address of ours, or sockets at all of these.

    Args:
        addresses: Each (host, port), in the order in which they are announced.
        loop: The endpoint's, running.
    Raises:
        AddressError: One cannot be bound; it names which and why.
    """
    sockets: list[UdpSocket] = []
    try:
        for host, port, *_ in addresses:
            sockets.append(UdpSocket(str(host), int(port), loop=loop))
    except AddressError:
        for socket in sockets:
            socket.close()
        raise
    return sockets[0] if len(sockets) == 1 else MultihomedIO(sockets)


class MultihomedIO:
    """A DatagramIO over several, which are its own from here on. See the module's head."""

    def __init__(self, sockets: Sequence[DatagramIO]) -> None:
        """Take sockets over.

        Args:
            sockets: Of one host, in the order in which its addresses are announced.
        Raises:
            ConfigurationError: There are none.
        """
        if not sockets:
            raise ConfigurationError("a host has one address at least")
        self._sockets = tuple(sockets)
        self._paired: dict[Address, int] = {}
        self._heard: dict[Address, int] = {}
        self._on_runs: OnRuns | None = None

    @property
    def local_address(self) -> Address:
        return self._sockets[0].local_address

    @property
    def local_addresses(self) -> tuple[Address, ...]:
        """All of them, in order."""
        return tuple(socket.local_address for socket in self._sockets)

    def pair(self, addresses: Sequence[Address]) -> None:
        """Reach the addresses of a peer from ours, one from each, in their order.

        Args:
            addresses: The peer's, the first of its first path; names are passed over.
        """
        for number, address in enumerate(addresses):
            if is_numeric(str(address[0])):
                _note(self._paired, canonical(address), number if number < len(self._sockets) else 0, _PAIRED)

    def start(self, on_runs: OnRuns, on_unreachable: OnUnreachable) -> None:
        self._on_runs = on_runs
        for number, socket in enumerate(self._sockets):
            socket.start(self._hearing(number), on_unreachable)

    def send(self, runs: Sequence[DatagramRun]) -> None:
        numbers = [self._leaves_by(run.address) for run in runs]
        if numbers and numbers.count(numbers[0]) == len(numbers):
            self._sockets[numbers[0]].send(runs)
            return
        for number in range(len(self._sockets)):
            if part := [run for run, by in zip(runs, numbers, strict=True) if by == number]:
                self._sockets[number].send(part)

    async def resolve(self, host: str, port: int) -> list[Address]:
        error: AddressError | None = None
        for socket in self._sockets:  # of one family each, perhaps
            try:
                return await socket.resolve(host, port)
            except AddressError as failed:
                error = error or failed
        raise error or AddressError(f"cannot resolve {host!r}")

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._on_runs = None

    def _leaves_by(self, address: Address) -> int:
        number = self._paired.get(address)
        if number is None:
            number = self._heard.get(address)
        if number is None:
            v6 = is_v6(address)
            number = next((n for n, one in enumerate(self._sockets) if is_v6(one.local_address) is v6), 0)
        return number

    def _hearing(self, number: int) -> OnRuns:
        def received(runs: list[DatagramRun]) -> float | None:
            for run in runs:
                if self._heard.get(run.address) != number:
                    _note(self._heard, run.address, number, _HEARD)
            return None if self._on_runs is None else self._on_runs(runs)

        return received


def _note(numbers: dict[Address, int], address: Address, number: int, most: int) -> None:
    """Note a number as the last one, in the place of the first one where there are too many."""
    numbers.pop(address, None)
    if len(numbers) >= most:
        del numbers[next(iter(numbers))]
    numbers[address] = number
