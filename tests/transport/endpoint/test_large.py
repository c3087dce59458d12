"""Large transfers: memory of both processes, copies per byte. docs/internals/transport.md says what is asserted."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import random
import re
import sys
import time
import tracemalloc
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from depth import deep
from endpoint_world import session_of
from link_pair import Pair, payload, tag

from quicoll_transport.endpoint import Endpoint, EndpointConfig
from quicoll_transport.link.core import LinkConfig, LinkCore, LinkId, Posted
from quicoll_transport.link.detector import DetectorConfig
from quicoll_transport.link.frames import Header, checksum
from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import Gate, Session, SessionConfig, handshake_in_memory
from quicoll_transport.quic import streams as quic_streams

if TYPE_CHECKING:
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.security.credentials import Credentials

log = logging.getLogger("quicoll.tests")

MS = 1_000_000
PATIENT_NS = 100_000 * MS
CREDIT = 4 << 20
_M_MMAP_THRESHOLD = -3  # mallopt(3)

# What is resident beside the callers' buffers, in parts (docs/internals/transport.md says why each is there):
WORDS = 64 << 10  # control messages under way
SLAB = 1280 << 10  # where runs of packets are made
SPARE = 9 / 8  # a bytearray takes an eighth more than it holds
MOVED = 2  # and while it grows, it is there twice
HOLES = 5  # as the allocator of the C library has it: 3.0 to 4.0 times were measured, holes of smaller ones included
PACKET = 2048  # of our records and the library's, for each packet that is not acknowledged
REST = 8 << 20  # the interpreter, its pools, and all that does not grow with anything
CredentialsOf = Callable[..., Any]

# -- copies per byte -------------------------------------------------------------------------------------------------


def sessions(credentials_of: CredentialsOf) -> tuple[Session, Session]:
    config = SessionConfig()
    client = Session.client(credentials=credentials_of("a"), config=config, address=("192.0.2.1", 2), now_ns=10**18)
    server, _, _ = handshake_in_memory(client, Gate(credentials=credentials_of("b"), config=config))
    return client, server


def receiver() -> LinkCore:
    return LinkCore(
        peer="peer",
        local=LinkId(1, 1),
        config=LinkConfig(DetectorConfig.from_lost_after(1000 * MS), credit_bytes=1 << 26),
        now_ns=0,
        on_app=lambda data: None,
        on_state=lambda state: None,
    )


def carry(client: Session, server: Session, done: Callable[[], bool]) -> None:
    now = 10**18 + 10**9
    for _ in range(20_000):
        if done():
            return
        now += 2 * MS
        for session, other in ((client, server), (server, client)):
            at = session.next_timer()
            if at is not None and at <= now:
                session.handle_timer(now)
            for run in session.datagrams_to_send(now):
                other.receive(run, now)
    raise AssertionError("the message does not arrive")


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["posted", "posted later", "channel"])
def test_we_copy_no_byte_to_send_it_and_one_to_receive_it(
    kind: str, credentials_of: CredentialsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what ciphers read and write: none when sending, one into place; one more where it is posted too late.

    What comes with the header, in one datagram, is held until the header is read: that much is copied twice.
    """
    size = 3 << 20
    data = random.Random(1).randbytes(size)
    client, server = sessions(credentials_of)
    count = {"lent": 0, "placed": 0, "held": 0}
    find, put, hold = quic_streams.SendStream.pieces, quic_streams.ReceiveStream._put, quic_streams.ReceiveStream._hold

    def finding(self: quic_streams.SendStream, start: int, stop: int) -> list[bytes | memoryview]:
        pieces = find(self, start, stop)
        for piece in pieces:
            if isinstance(piece, memoryview):
                assert piece.obj is data, "a view of the caller's memory, no copy of it"
                count["lent"] += len(piece)
        return pieces

    def putting(self: quic_streams.ReceiveStream, target: Any, offset: int, piece: Any, length: int) -> None:
        count["placed"] += length
        put(self, target, offset, piece, length)

    def holding(self: quic_streams.ReceiveStream, offset: int, piece: Any, length: int) -> None:
        count["held"] += length
        hold(self, offset, piece, length)

    monkeypatch.setattr(quic_streams.SendStream, "pieces", finding)
    monkeypatch.setattr(quic_streams.ReceiveStream, "_put", putting)
    monkeypatch.setattr(quic_streams.ReceiveStream, "_hold", holding)
    core = receiver()
    memory = bytearray(size)
    channel = kind == "channel"
    header = Header(
        (Pair().a.core._outbox.channel_message(0, memoryview(b""), lambda m: None, None).tag) if channel else tag(1),
        0,
        size,
        checksum(data),
    )
    posted: Posted | None = None
    if kind == "posted":
        posted = core.post(tag(1), memoryview(memory), lambda posted: None)
    server.attach(core)
    client.start_message("m", header.encode(), memoryview(data))
    carry(client, server, lambda: core.stats.messages_received == 1)
    if channel:
        posted = core.channel_take(0, size, lambda posted: None)
        assert posted.buffer.obj is not memory
    elif posted is None:
        posted = core.post(tag(1), memoryview(memory), lambda posted: None)
    assert posted.error is None
    assert posted.buffer == data
    assert count["lent"] == size
    assert size + len(header.encode()) - 1452 <= count["placed"] <= size + 1452
    assert count["held"] <= 1452


def test_the_link_itself_allocates_nothing_of_the_size_of_a_message() -> None:
    """Traced: beside the two buffers, the cores and the harness between them stay below one percent of it."""
    size = 32 << 20
    data, memory = payload(1, size), bytearray(size)
    pair = Pair(credit=100, chunk=1 << 16).up()
    tracemalloc.start()
    try:
        pair.b.core.post(tag(1), memoryview(memory), lambda posted: None)
        sent = pair.a.core.send(tag(1), memoryview(data), lambda message: None)
        pair.settle()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent.done
    assert memory == data
    assert peak < size // 100


# -- memory of two processes -----------------------------------------------------------------------------------------


def resident(field: str) -> int:
    """VmRSS: now, VmHWM: the most since it was reset; bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def resident_from_now() -> int:
    """VmRSS, and VmHWM starts again from it (proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


class Held:
    """The most that is held of a session beside the callers' memory, looked at after each of its turns."""

    streams = backlog = packets = 0

    def __init__(self, session: Session, socket: UdpSocket) -> None:
        self._session, self._socket, self._turn = session, socket, session.datagrams_to_send
        session.datagrams_to_send = self._look

    def _look(self, now_ns: int) -> list[DatagramRun]:
        out, plane = self._turn(now_ns), self._session._plane
        if plane is not None:
            held = sum(sys.getsizeof(stream._held) for stream in plane.inbound._streams.values())
            self.streams = max(self.streams, held + len(plane.sender._slab.memory))
            self.packets = max(self.packets, len(plane.recovery._runs))
        waiting = sum(len(run.memory) for run in (*self._socket._backlog, *out))
        self.backlog = max(self.backlog, waiting)
        return out


async def transfer(credentials: Credentials, peer: Credentials, size: int, pipe: Connection, *, sends: bool) -> None:
    loop = asyncio.get_running_loop()
    socket = UdpSocket("127.0.0.1", 0, loop=loop)
    endpoint = Endpoint(
        credentials=credentials,
        config=EndpointConfig(lost_after_ns=PATIENT_NS, connect_ns=PATIENT_NS, credit_bytes=CREDIT),
        io=socket,
        loop=loop,
        incarnation=1,
        authorize=lambda identity: None,
        on_link=lambda link: None,
    )
    if sends:
        address = await loop.run_in_executor(None, pipe.recv)
        link = endpoint.link(peer.identity, addresses=[address], dial=True)
    else:
        pipe.send(endpoint.address)
        link = endpoint.link(peer.identity)
    await link.wait_up()
    memory = bytearray(b"\x01") * size if sends else bytearray(size)
    if sends:
        for at in range(0, size, 4096):
            memory[at : at + 4] = (at >> 12).to_bytes(4, "big")
    held = Held(session_of(link), socket)
    before, began = resident_from_now(), time.perf_counter()
    if sends:
        await link.send(tag(1), memoryview(memory)).future
    else:
        await link.post(tag(1), memoryview(memory)).future
    seconds, beside = time.perf_counter() - began, resident("VmHWM") - before
    assert link.stats.connections == 1
    pipe.send((beside, seconds, checksum(memory), link.stats.credit_peak, held.streams, held.backlog, held.packets))
    await loop.run_in_executor(None, pipe.recv)
    await endpoint.aclose(timeout=1.0)


def process(
    credentials: Credentials, peer: Credentials, size: int, pipe: Connection, sends: bool, mapped: bool
) -> None:
    if mapped:
        assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10) == 1
    asyncio.run(transfer(credentials, peer, size, pipe, sends=sends))


@pytest.mark.interpreted
@pytest.mark.loopback
@pytest.mark.skipif(sys.platform != "linux", reason="peak resident memory is read from /proc")
@pytest.mark.parametrize("mapped", [False, True], ids=["usual allocator", "large blocks given back"])
def test_a_large_transfer_costs_both_processes_their_buffers_and_what_quic_holds(
    credentials_of: CredentialsOf, mapped: bool
) -> None:
    """64 MiB; QUICOLL_TEST_TRANSFER_MIB=1024 for the full size. --log-cli-level=INFO shows the figures.

    mapped: glibc maps each large block and gives it back at once, so that what is resident is what is held.
    """
    size = int(os.environ.get("QUICOLL_TEST_TRANSFER_MIB", deep("64", "128"))) << 20
    fork = multiprocessing.get_context("fork")  # so that the keys need no file
    a, b = credentials_of("a"), credentials_of("b")
    pipes = [fork.Pipe(), fork.Pipe()]
    made = [
        fork.Process(target=process, args=(a, b, size, pipes[0][1], True, mapped)),
        fork.Process(target=process, args=(b, a, size, pipes[1][1], False, mapped)),
    ]
    try:
        for one in made:
            one.start()
        for _, theirs in pipes:
            theirs.close()
        (sender, _), (target, _) = pipes
        sender.send(target.recv())
        results = [sender.recv(), target.recv()]
        for ours in (sender, target):
            ours.send("done")
        for one in made:
            one.join()
            assert one.exitcode == 0
    finally:
        for one in made:
            if one.is_alive():
                one.kill()
                one.join()
            one.close()
        for ours, _ in pipes:
            ours.close()
    for who, (beside, seconds, _, held, streams, backlog, packets) in zip(("sender", "receiver"), results, strict=True):
        text = "%d MiB, %s: %.1f MiB beside it (streams %.1f, backlog %.1f, %d packets), %.1f s, %d held"
        log.info(text, size >> 20, who, beside / 2**20, streams / 2**20, backlog / 2**20, packets, seconds, held)
        assert held <= CREDIT
        assert streams <= SLAB + SPARE * WORDS
        assert beside <= (MOVED if mapped else HOLES) * streams + backlog + PACKET * packets + held + REST
    assert results[0][2] == results[1][2]
