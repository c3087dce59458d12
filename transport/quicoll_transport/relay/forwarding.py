"""The socket of a relay: what is to be passed on goes out again, and its endpoint sees the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quicoll_transport.net.runs import joined
from quicoll_transport.relay.wire import HEAD_BYTES, head, label_of

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.net.udp import DatagramIO, OnRuns, OnUnreachable
    from quicoll_transport.relay.table import RelayTable

__all__ = ["ForwardingIO"]


class ForwardingIO:
    """A DatagramIO over another one, for the endpoint of a relay. What cannot be sent at once waits as that one says.

    Args:
        inner: The socket.
        table: What is passed on.
        now_ns: The time.
    """

    def __init__(self, inner: DatagramIO, table: RelayTable, *, now_ns: Callable[[], int]) -> None:
        self._inner = inner
        self._table = table
        self._now_ns = now_ns
        self._on_runs: OnRuns | None = None

    @property
    def local_address(self) -> Address:
        return self._inner.local_address

    def start(self, on_runs: OnRuns, on_unreachable: OnUnreachable) -> None:
        self._on_runs = on_runs
        self._inner.start(self._received, on_unreachable)

    def send(self, runs: Sequence[DatagramRun]) -> None:
        self._inner.send(runs)

    async def resolve(self, host: str, port: int) -> list[Address]:
        return await self._inner.resolve(host, port)

    def close(self) -> None:
        self._inner.close()
        self._on_runs = None

    def _received(self, runs: list[DatagramRun]) -> None:
        if len(self._table):
            runs = self._pass_on(runs)
        if runs and self._on_runs is not None:
            self._on_runs(runs)

    def _pass_on(self, runs: list[DatagramRun]) -> list[DatagramRun]:
        """Send on what is to be; return what is the endpoint's."""
        own: list[DatagramRun] = []
        out: list[tuple[bytes, Address]] = []
        now_ns = self._now_ns()
        for run in runs:
            for number, data in enumerate(run.datagrams()):
                label = label_of(data)
                if label is None:
                    own.append(run.part(number, number + 1) if len(run) > 1 else run)
                elif (further := self._table.forward(label, run.address, len(data), now_ns)) is not None:
                    out.append((head(further[0]) + bytes(data[HEAD_BYTES:]), further[1]))
        if out:
            self._inner.send(joined(out))
        return own
