"""Runs of datagrams: what carriers, sockets and networks pass each other instead of datagrams one by one.

A system call, a look-up and a call of the carrier for each datagram cost more than the datagram itself. So datagrams of
one size, to or from one address, travel together, back to back in one piece of memory; only the last may be shorter.
That is what Linux takes with UDP_SEGMENT and gives with UDP_GRO (udp(7)), and one datagram is a run of one.

A run is an envelope and nothing else: what is sent, lost, delayed or answered is the datagram. Whoever decides over
datagrams takes runs apart (`apart`), so that no decision depends on how somebody happened to batch them; `joined` puts
them together again. An empty datagram says nothing and is in no run.

Memory. Of a run to send it is good until its carrier is asked again or released; of one that was received, until the
call that brought it returns. Whoever keeps bytes for longer copies them (`kept`). Received memory may be overwritten by
whom it is given to, so packets are opened in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

__all__ = ["DatagramRun", "RunsBySender", "apart", "joined"]


class DatagramRun:
    """Datagrams of one size, back to back, to or from one address. See the module's head for whose the memory is.

    Attributes:
        memory: Their bytes, one dimension of unsigned bytes; never empty.
        size: Bytes of each; the last one may be shorter.
        address: Of the other side, canonical.
        waited_ns: How long they lay in this host, from when its network had them until they were taken; 0 where that
            is not known, and of what is to be sent.
    """

    __slots__ = ("address", "memory", "size", "waited_ns")

    def __init__(self, memory: memoryview, size: int, address: Address, waited_ns: int = 0) -> None:
        self.memory = memory
        self.size = size
        self.address = address
        self.waited_ns = waited_ns

    def __len__(self) -> int:
        """Return the number of datagrams."""
        return -(-len(self.memory) // self.size)

    def __repr__(self) -> str:
        return f"DatagramRun({len(self)} of {self.size} bytes, {len(self.memory)} in all, {self.address})"

    def datagrams(self) -> Iterator[memoryview]:
        """Iterate over the datagrams, in order; nothing is copied."""
        memory, size = self.memory, self.size
        for start in range(0, len(memory), size):
            yield memory[start : start + size]

    def part(self, start: int, stop: int) -> DatagramRun:
        """Return the datagrams from number `start` up to `stop`, over the same memory; there has to be one at least."""
        return DatagramRun(self.memory[start * self.size : stop * self.size], self.size, self.address, self.waited_ns)

    def kept(self) -> DatagramRun:
        """Return the same datagrams in memory of their own."""
        return DatagramRun(memoryview(bytearray(self.memory)), self.size, self.address, self.waited_ns)


class _Taken:
    """What one sender has sent, as it is taken. spans: where it stands in the slab, from and to, in order. whole: its
    last datagram is as long as the others, so that more may follow."""

    __slots__ = ("first_ns", "last_ns", "sender", "size", "spans", "whole")

    def __init__(self, sender: Address, size: int, first_ns: int) -> None:
        self.sender = sender
        self.size = size
        self.first_ns = self.last_ns = first_ns
        self.spans: list[tuple[int, int]] = []
        self.whole = True


class RunsBySender:
    """Puts what a socket gives into the fewest runs that keep the order of each sender.

    Datagrams of several senders come in turn, and what takes time above is the run: one of two datagrams takes as long
    as one of ten. Nothing is known of the order in which two senders sent, so nothing depends on it. What stands in one
    place already stays there; what does not is copied, which is nothing beside opening it.
    """

    def __init__(self, slab: memoryview, together_ns: int) -> None:
        """Begin with nothing.

        Args:
            slab: Where what the socket gives is read to, one behind the other.
            together_ns: From the first of a run to its last at most: they have one time of arrival.
        """
        self._slab = slab
        self._together_ns = together_ns
        self._taken: list[_Taken] = []
        self._last: dict[Address, _Taken] = {}
        self.filled = 0  # bytes of the slab

    def add(self, length: int, size: int, sender: Address, at_ns: int) -> None:
        """Take what has been read behind all else.

        Args:
            length: Bytes of it, not 0.
            size: Of each datagram in it; the last may be shorter.
            sender: Whose they are.
            at_ns: When they came; 0 where that is not known.
        """
        start = self.filled
        stop = self.filled = start + length
        run = self._last.get(sender)
        if (
            run is None
            or not run.whole
            or not (size == run.size or size == length < run.size)
            or at_ns - run.first_ns > self._together_ns
        ):
            run = self._last[sender] = _Taken(sender, size, at_ns)
            self._taken.append(run)
        run.whole = length % run.size == 0
        run.last_ns = at_ns
        spans = run.spans
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))

    def runs(self, beside: memoryview) -> list[tuple[DatagramRun, int]]:
        """Return the runs, by the first datagram of each, and when the last one of each came.

        Args:
            beside: As long as the slab, for those that stand in several places.
        """
        found: list[tuple[DatagramRun, int]] = []
        at = 0
        for run in self._taken:
            spans = run.spans
            if len(spans) == 1:
                memory = self._slab[spans[0][0] : spans[0][1]]
            else:
                first = at
                for start, stop in spans:
                    beside[at : at + stop - start] = self._slab[start:stop]
                    at += stop - start
                memory = beside[first:at]
            found.append((DatagramRun(memory, run.size, run.sender), run.last_ns))
        return found


def joined(datagrams: Iterable[tuple[bytes | memoryview, Address]]) -> list[DatagramRun]:
    """Put datagrams together into the fewest runs that keep their order, in memory of their own.

    Args:
        datagrams: Each with its address. Empty ones are left out.
    """
    runs: list[DatagramRun] = []
    pieces: list[bytes | memoryview] = []
    to: Address = ()
    size = last = 0
    for data, address in datagrams:
        if not data:
            continue
        if pieces and (last < size or len(data) > size or address != to):
            runs.append(DatagramRun(memoryview(bytearray().join(pieces)), size, to))
            pieces = []
        if not pieces:
            size, to = len(data), address
        last = len(data)
        pieces.append(data)
    if pieces:
        runs.append(DatagramRun(memoryview(bytearray().join(pieces)), size, to))
    return runs


def apart(runs: Iterable[DatagramRun]) -> Iterator[tuple[bytes, Address]]:
    """Iterate over copies of the datagrams of all runs, in order, each with its address; undoes `joined`."""
    for run in runs:
        if len(run.memory) <= run.size:
            yield bytes(run.memory), run.address
        else:
            for datagram in run.datagrams():
                yield bytes(datagram), run.address
