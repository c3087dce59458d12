"""Planes on a socket, and ngtcp2 on the other end of it: Debian's gtlsclient and gtlsserver (0.12.1 with GnuTLS).

They speak HTTP/3, of which a few bytes are enough: a request is a HEADERS frame and maybe DATA, so is a response.
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

from cryptography.hazmat.primitives import serialization
from ports import named_port
from quic_pairs import RESET_KEY, PlanePeer

from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic.connection_ids import reset_datagram, reset_token
from quicoll_transport.quic.gate import Gate
from quicoll_transport.quic.handshake import Handshake, handshake_configuration
from quicoll_transport.quic.parameters import local_parameters
from quicoll_transport.quic.terms import SessionConfig, destination_cid
from quicoll_transport.quic.varint import pull, varint

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.quic.streams import ReceiveStream, SendStream
    from quicoll_transport.security.credentials import Credentials

__all__ = ["CLIENT", "SERVER", "Http3", "Http3Gate", "Wire", "bodies", "http3_client", "program", "serving"]

CLIENT, SERVER = shutil.which("gtlsclient"), shutil.which("gtlsserver", path="/usr/sbin:/usr/bin:/usr/local/bin")
_CONTROL = b"\x00\x04\x00"  # a control stream with an empty SETTINGS frame (RFC 9114 sections 6.2.1 and 7.2.4)
_FOUND = b"\x01\x03\x00\x00\xd9"  # HEADERS: status 200 (RFC 9204 appendix A)
_GET, _POST = b"\xd1", b"\xd4"


def bodies(data: bytes | bytearray) -> bytes:
    """Return what the DATA frames of a stream of HTTP/3 carry."""
    out, at = bytearray(), 0
    while at < len(data):
        kind, at = pull(data, at)
        size, at = pull(data, at)
        if kind == 0:
            out += data[at : at + size]
        at += size
    return bytes(out)


class Http3(PlanePeer):
    """A plane on a socket. As a server it answers each request with `response`, from `held` on when told to go on."""

    response = b""
    held: int | None = None

    def __init__(self, handshake: Handshake, config: SessionConfig, **options: Any) -> None:
        super().__init__(handshake, config, **options)
        self.requests: dict[int, bytes] = {}  # bodies of those that have come whole
        self._later: list[tuple[SendStream, bytes]] = []

    def stream_arrived(self, stream: ReceiveStream) -> None:
        super().stream_arrived(stream)
        if stream.id & 3 or self.handshake.is_client or not self.ended[stream.id] or stream.id in self.requests:
            return
        if not self.requests:
            self.begin()
        self.requests[stream.id] = bodies(self.received.pop(stream.id))
        answer = self.plane.outbound.respond(stream.id)
        data = _FOUND + b"\x00" + varint(len(self.response)) + self.response
        if self.held is None:
            self.plane.outbound.write(answer, data, fin=True)
        else:
            self.plane.outbound.write(answer, data[: self.held])
            self._later.append((answer, data[self.held :]))

    def go_on(self) -> None:
        """Send the rest of all responses."""
        for answer, rest in self._later:
            self.plane.outbound.write(answer, rest, fin=True)
        self._later.clear()

    def begin(self) -> None:
        """Say what has to be said first."""
        self.control_stream = self.open(_CONTROL, fin=False)

    def ask(self, path: str, body: bytes | None = None) -> int:
        """Send GET https://localhost/path, or POST with a body; return the stream."""
        method = _GET if body is None else _POST
        fields = b"\x00\x00" + method + b"\xd7\x51" + bytes([len(path)]) + path.encode() + b"\x50\x09localhost"
        data = b"" if body is None else b"\x00" + varint(len(body)) + body
        return self.open(b"\x01" + varint(len(fields)) + fields + data, unidirectional=False).id


class Http3Gate(Gate):
    """The gate of servers, which lets Http3 in."""

    def __init__(
        self, made: type[Http3], *, credentials: Credentials, config: SessionConfig, retry: bool, **options: Any
    ) -> None:
        """made: what serves a client, with `options`."""
        super().__init__(credentials=credentials, config=config, retry=retry)
        self._made = made
        self._settings = config
        self._options = options

    def rotate(self, credentials: Credentials) -> None:
        super().rotate(credentials)
        self._shown = credentials

    def _open(self, cid: bytes, original: bytes, retried: bytes | None) -> Http3:  # no Session
        quic = handshake_configuration(self._shown, self._settings, is_client=False)
        quic.alpn_protocols = ["h3"]
        handshake = Handshake(
            quic,
            local_parameters(self._settings),
            reset_token=lambda own: reset_token(RESET_KEY, own),
            original_cid=original,
            retry_cid=retried,
        )
        return self._made(handshake, self._settings, **self._options)


def http3_client(credentials: Credentials, config: SessionConfig, port: int, **options: Any) -> Http3:
    """Return a client that dials a port of this machine."""
    quic = handshake_configuration(credentials, config, is_client=True)
    quic.alpn_protocols = ["h3"]
    handshake = Handshake(quic, local_parameters(config))
    handshake.connect(("127.0.0.1", port), time.monotonic_ns())
    return Http3(handshake, config, **options)


class Wire:
    """A socket with faults, and a plane behind it.

    peer: the plane; a server's is there once its gate has let somebody in. retries: datagrams with which the gate has
    answered instead. resets: stateless resets that were sent.
    heard: addresses of the other side, as the plane sees them, in the order in which they came.
    elsewhere: when true, every address but the first is seen as one of another host.
    """

    def __init__(self, *, loss: float = 0.0, seed: int = 0, gate: Http3Gate | None = None) -> None:
        self.random, self.loss, self.gate = random.Random(seed), loss, gate
        self.peer: Http3 | None = None
        self.retries = self.resets = 0
        self.heard: list[Address] = []
        self.elsewhere = False
        self._real: dict[Address, Address] = {}
        self._shift: Address | None = None
        self._is_forgotten = False
        self._socket = self._open()

    def _open(self) -> socket.socket:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind(("127.0.0.1", 0))
        opened.setblocking(False)
        return opened

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def rebind(self) -> None:
        """Send from another port from now on, as behind a NAT that has lost its state."""
        old, self._socket = self._socket, self._open()
        old.close()

    def renumber(self, *, another_host: bool) -> None:
        """Let the other side come from another address from now on, of which it knows nothing itself."""
        self._shift = ("192.0.2.3" if another_host else "192.0.2.1", 9)

    def forget(self) -> None:
        """Know nothing of the connection any more, as a process that was started anew."""
        self.peer, self._is_forgotten = None, True

    def pump(self, condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
        """Go on until a condition holds. Fails when it takes too long."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it takes too long"
            wait = 0.05
            if self.peer is not None:
                self._send(self.peer)
                due = self.peer.next_timer()
                wait = wait if due is None else min(wait, max(0.0, (due - time.monotonic_ns()) / 1e9))
            if select.select([self._socket], [], [], wait)[0]:
                self._receive()
            if self.peer is not None and (due := self.peer.next_timer()) is not None and due <= time.monotonic_ns():
                self.peer.handle_timer(time.monotonic_ns())

    def _send(self, peer: Http3) -> None:
        for run in peer.datagrams(time.monotonic_ns()):
            for data in run.datagrams():
                if self.random.random() >= self.loss:
                    self._socket.sendto(data, self._real.get(run.address, run.address))

    def _receive(self) -> None:
        for _ in range(64):
            try:
                data, address = self._socket.recvfrom(65536)
            except BlockingIOError:
                return
            if self.random.random() >= self.loss:
                self._take(data, self._seen(address))

    def _seen(self, address: Address) -> Address:
        # As if it were another host: a gate lets in at once who is on this one.
        seen = address if self.gate is None else ("192.0.2.1", address[1])
        if self.elsewhere and self.heard and seen != self.heard[0]:
            seen = ("192.0.2.2", address[1])
        seen = self._shift or seen
        self._real[seen] = address
        if seen not in self.heard:
            self.heard.append(seen)
        return seen

    def _take(self, data: bytes, address: Address) -> None:
        now_ns = time.monotonic_ns()
        if self._is_forgotten:
            cid = destination_cid(data)
            reply = reset_datagram(RESET_KEY, cid or b"", len(data), self.random.randbytes)
            if reply is not None and not data[0] & 0x80:
                self.resets += 1
                self._socket.sendto(reply, self._real[address])
            return
        if self.peer is None and self.gate is not None:
            admitted: Any = self.gate.admit(data, address, now_ns)
            if isinstance(admitted, bytes):
                self.retries += 1
                self._socket.sendto(admitted, self._real[address])
            else:
                self.peer = admitted
        if self.peer is not None:
            self.peer.receive(DatagramRun(memoryview(bytearray(data)), len(data), address), now_ns)


@contextmanager
def program(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a folder, where its words go to the file `output`; it is ended at the end."""
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def serving(folder: Path, credentials: Credentials, *options: str) -> Iterator[int]:
    """Run gtlsserver over the files of a folder; give its port."""
    encoding, none = serialization.Encoding.PEM, serialization.NoEncryption()
    key = credentials.private_key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, none)
    (folder / "key.pem").write_bytes(key)
    (folder / "cert.pem").write_bytes(credentials.certificate.public_bytes(encoding))
    port = named_port()
    command = [str(SERVER), f"--htdocs={folder}", *options, "127.0.0.1", str(port), "key.pem", "cert.pem"]
    with program(command, folder):
        yield port
