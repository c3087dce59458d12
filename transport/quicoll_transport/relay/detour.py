"""The socket of an endpoint that reaches some of its peers through a relay.

A way through a relay has an address (wire.py). What the endpoint sends there goes to the relay under the way's label,
and what the relay passes on under that label comes from there; so connections, their paths and their guards need not
know of it. What comes from elsewhere than the relay under a label is lost, and so is what comes under no label of ours.

Datagrams have to leave room for the label: one that does not is lost, and the endpoint learns what passes, as from a
router on the way. What the system says of the relay is said of all ways through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quicoll_transport.net.addresses import is_detour
from quicoll_transport.net.runs import DatagramRun, joined
from quicoll_transport.net.trouble import Trouble
from quicoll_transport.relay.wire import HEAD_BYTES, MOST_PASSED, detour_address, head, label_of

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.udp import DatagramIO, OnRuns, OnUnreachable

__all__ = ["DetourIO"]

_LEAST = 1200  # which QUIC never goes below


class DetourIO:
    """A DatagramIO over another one, which is used as it is while there are no ways through relays.

    Args:
        inner: The socket.
        loop: The endpoint's.
    """

    def __init__(self, inner: DatagramIO, *, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop
        self._ways: dict[Address, tuple[bytes, Address]] = {}  # label and relay, by the way's address
        self._by_label: dict[bytes, Address] = {}
        self._opened = 0
        self._on_runs: OnRuns | None = None
        self._on_unreachable: OnUnreachable | None = None

    @property
    def local_address(self) -> Address:
        return self._inner.local_address

    def open(self, label: bytes, relay: Address) -> Address:
        """Return the address of a way through a relay; the one that there is where it is open already.

        Args:
            label: By which the relay knows it.
            relay: Where the relay is, canonical.
        """
        way = self._by_label.get(label)
        if way is None:
            way = self._by_label[label] = detour_address(self._opened)
            self._opened += 1
        self._ways[way] = (label, relay)
        return way

    def shut(self, way: Address) -> None:
        """Forget a way; what is sent there from now on is lost."""
        label, _ = self._ways.pop(way, (b"", ()))
        self._by_label.pop(label, None)

    def start(self, on_runs: OnRuns, on_unreachable: OnUnreachable) -> None:
        self._on_runs, self._on_unreachable = on_runs, on_unreachable
        self._inner.start(self._received, self._troubled)

    async def resolve(self, host: str, port: int) -> list[Address]:
        return await self._inner.resolve(host, port)

    def close(self) -> None:
        self._inner.close()
        self._on_runs = self._on_unreachable = None
        self._ways.clear()
        self._by_label.clear()

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, runs: Sequence[DatagramRun]) -> None:
        if not self._opened:
            self._inner.send(runs)
            return
        out: list[DatagramRun] = []
        for run in runs:
            if not is_detour(run.address):
                out.append(run)
            elif (way := self._ways.get(run.address)) is None:
                pass  # a way that is shut
            elif run.size > MOST_PASSED:
                cause = f"datagrams are too long; a relay passes on {MOST_PASSED} bytes"
                self._loop.call_soon(self._tell, run.address, Trouble(cause, refused=False, limit=MOST_PASSED))
                last = run.part(len(run) - 1, len(run))
                if len(last.memory) <= MOST_PASSED:  # the others are longer: which of them share a run decides nothing
                    out.append(_under(way[0], DatagramRun(last.memory, len(last.memory), way[1]), way[1]))
            else:
                out.append(_under(way[0], run, way[1]))
        if out:
            self._inner.send(out)

    # -- receiving -----------------------------------------------------------------------------------------------

    def _received(self, runs: list[DatagramRun]) -> float | None:
        if self._ways:
            runs = self._unpacked(runs)
        return self._on_runs(runs) if runs and self._on_runs is not None else None

    def _unpacked(self, runs: list[DatagramRun]) -> list[DatagramRun]:
        relays = {relay[:2] for _, relay in self._ways.values()}
        found: list[DatagramRun] = []
        for run in runs:
            if run.address[:2] in relays:
                found += self._from_relay(run)
            else:
                found.append(run)
        return found

    def _from_relay(self, run: DatagramRun) -> list[DatagramRun]:
        """Return what a relay has passed on as if it came from the other side, and what is its own as it is."""
        found: list[DatagramRun] = []
        passed: list[tuple[memoryview, Address]] = []
        for number, data in enumerate(run.datagrams()):
            label = label_of(data)
            if label is None:
                found.append(run.part(number, number + 1) if len(run) > 1 else run)
            elif (way := self._by_label.get(label)) is not None and self._ways[way][1][:2] == run.address[:2]:
                passed.append((data[HEAD_BYTES:], way))
        return [*found, *joined(passed)]

    def _troubled(self, address: Address, trouble: Trouble) -> None:
        """Tell what the system says of a destination, and of all ways that lead over it."""
        for way, (_, relay) in list(self._ways.items()):
            if relay[:2] == address[:2]:
                limit = max(_LEAST, trouble.limit - HEAD_BYTES) if trouble.limit else 0
                # Never as a refusal, which would say that the peer's process is gone: nothing is known of that.
                self._tell(way, Trouble(f"its relay: {trouble.cause}", refused=False, limit=limit))
        self._tell(address, trouble)

    def _tell(self, address: Address, trouble: Trouble) -> None:
        if self._on_unreachable is not None:
            self._on_unreachable(address, trouble)


def _under(label: bytes, run: DatagramRun, relay: Address) -> DatagramRun:
    """Return a run as it goes to the relay."""
    first = head(label)
    memory = bytearray()
    for data in run.datagrams():
        memory += first
        memory += data
    return DatagramRun(memoryview(memory), run.size + HEAD_BYTES, relay)
