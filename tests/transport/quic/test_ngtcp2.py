"""Planes and ngtcp2, a QUIC stack that is not aioquic: Debian's gtlsclient and gtlsserver (ngtcp2 0.12.1 with GnuTLS).

They speak HTTP/3, of which a few bytes are enough here. Skipped where the programs are not installed
(`apt-get install ngtcp2-client ngtcp2-server`).
"""

from __future__ import annotations

import random
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives import serialization
from quic_pairs import PlanePeer

from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic.handshake import Handshake, handshake_configuration, local_parameters
from quicoll_transport.quic.terms import SessionConfig, destination_cid
from quicoll_transport.quic.varint import pull, varint
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.quic.streams import ReceiveStream

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(120)]

CLIENT, SERVER = shutil.which("gtlsclient"), shutil.which("gtlsserver", path="/usr/sbin:/usr/bin:/usr/local/bin")
SIZE = 3_000_000
CONTROL = b"\x00\x04\x00"  # a control stream with an empty SETTINGS frame (RFC 9114 sections 6.2.1 and 7.2.4)
FOUND = b"\x01\x03\x00\x00\xd9"  # HEADERS: status 200 (RFC 9204 appendix A)


def get(path: str) -> bytes:
    """A HEADERS frame: GET https://localhost/path."""
    fields = b"\x00\x00\xd1\xd7\x51" + bytes([len(path)]) + path.encode() + b"\x50\x09localhost"
    return b"\x01" + varint(len(fields)) + fields


def bodies(data: bytes) -> bytes:
    """The DATA frames of a stream of HTTP/3."""
    out, at = bytearray(), 0
    while at < len(data):
        kind, at = pull(data, at)
        size, at = pull(data, at)
        if kind == 0:
            out += data[at : at + size]
        at += size
    return bytes(out)


class Http3(PlanePeer):
    """A plane on a socket; as a server it answers each request with SIZE bytes."""

    def stream_arrived(self, stream: ReceiveStream) -> None:
        super().stream_arrived(stream)
        if stream.id == 0 and not self.handshake.is_client and self.ended[0]:
            response = self.plane.outbound.respond(0)
            self.plane.outbound.write(response, FOUND + b"\x00" + varint(SIZE) + bytes(SIZE), fin=True)
            self.open(CONTROL, fin=False)


class Wire:
    """A socket with faults, and a plane behind it."""

    def __init__(self, *, loss: float, seed: int) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.random, self.loss = random.Random(seed), loss
        self.peer: Http3 | None = None
        self.make: Callable[[bytes], Http3] | None = None

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def pump(self, condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it takes too long"
            if self.peer is not None:
                self._send(self.peer)
                due = self.peer.next_timer()
                wait = 0.05 if due is None else min(0.05, max(0.0, (due - time.monotonic_ns()) / 1e9))
            else:
                wait = 0.05
            if select.select([self.socket], [], [], wait)[0]:
                self._receive()
            if self.peer is not None and (due := self.peer.next_timer()) is not None and due <= time.monotonic_ns():
                self.peer.handle_timer(time.monotonic_ns())

    def _send(self, peer: Http3) -> None:
        for run in peer.datagrams(time.monotonic_ns()):
            for data in run.datagrams():
                if self.random.random() >= self.loss:
                    self.socket.sendto(data, run.address)

    def _receive(self) -> None:
        for _ in range(64):
            try:
                data, address = self.socket.recvfrom(65536)
            except BlockingIOError:
                return
            if self.random.random() < self.loss:
                continue
            if self.peer is None and self.make is not None:
                self.peer = self.make(data)
            if self.peer is not None:
                self.peer.receive(DatagramRun(memoryview(bytearray(data)), len(data), address), time.monotonic_ns())


@pytest.fixture(scope="module")
def shown() -> dict[Identity, Any]:
    return ephemeral("ngtcp2", [(WORKER, "a"), (WORKER, "b")], algorithm="p256")


def make(shown: dict[Identity, Any], node: str, *, first: bytes | None, **config: Any) -> Http3:
    settings = SessionConfig(initial_rtt_ns=50_000_000, **config)
    quic = handshake_configuration(shown[Identity("ngtcp2", WORKER, node)], settings, is_client=first is None)
    quic.alpn_protocols = ["h3"]
    original = None if first is None else destination_cid(first)
    handshake = Handshake(quic, local_parameters(settings), original_cid=original)
    return Http3(handshake, settings)


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(10)


@pytest.mark.skipif(CLIENT is None, reason="gtlsclient is not installed (Debian: ngtcp2-client)")
@pytest.mark.parametrize(("loss", "asks"), [(0.0, "plane"), (0.03, "plane"), (0.03, "ngtcp2")])
def test_a_client_of_ngtcp2_gets_all_bytes_from_a_plane(
    shown: dict[Identity, Any], tmp_path: Path, loss: float, asks: str
) -> None:
    """asks: who asks for new keys; gtlsclient gives up where it wants to and the other side has just done so."""
    with Wire(loss=loss, seed=1) as wire:
        wire.make = lambda first: make(shown, "a", first=first, key_packets=100 if asks == "plane" else 1 << 22)
        port = wire.socket.getsockname()[1]
        command = [str(CLIENT), "--quiet", "--exit-on-all-streams-close", f"--download={tmp_path}"]
        command += ["--key-update=30ms"] if asks == "ngtcp2" else []
        command += ["127.0.0.1", str(port), "https://localhost/data"]
        with running(command, tmp_path) as client:
            wire.pump(lambda: client.poll() is not None)
        assert client.returncode == 0, (tmp_path / "output").read_text(errors="replace")[-2000:]
        assert (tmp_path / "data").read_bytes() == bytes(SIZE)
        assert wire.peer is not None
        assert wire.peer.plane.violation is None
        assert wire.peer.plane.keys.updates > 0, wire.peer.plane.sender.number


@pytest.mark.skipif(SERVER is None, reason="gtlsserver is not installed (Debian: ngtcp2-server)")
@pytest.mark.parametrize("loss", [0.0, 0.03])
def test_a_plane_gets_all_bytes_from_a_server_of_ngtcp2(
    shown: dict[Identity, Any], tmp_path: Path, loss: float
) -> None:
    theirs = shown[Identity("ngtcp2", WORKER, "b")]
    encoding, none = serialization.Encoding.PEM, serialization.NoEncryption()
    key = theirs.private_key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, none)
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "cert.pem").write_bytes(theirs.certificate.public_bytes(encoding))
    content = random.Random(3).randbytes(SIZE)
    (tmp_path / "data").write_bytes(content)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(SERVER), "--quiet", f"--htdocs={tmp_path}", "127.0.0.1", str(port), "key.pem", "cert.pem"]
    with Wire(loss=loss, seed=2) as wire, running(command, tmp_path):
        peer = wire.peer = make(shown, "a", first=None, key_packets=20)
        peer.handshake.connect(("127.0.0.1", port), time.monotonic_ns())
        wire.pump(lambda: peer.ready and peer.plane.confirmed)
        peer.open(CONTROL, fin=False)
        peer.open(get("/data"), unidirectional=False)
        wire.pump(lambda: peer.ended.get(0, False) or peer.closed is not None)
    assert peer.closed is None
    assert bodies(bytes(peer.received[0])) == content
    assert peer.plane.keys.updates > 0
