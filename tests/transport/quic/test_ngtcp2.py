"""Planes and ngtcp2, a QUIC stack that is not aioquic (tests/helpers/ngtcp2.py says what it is and what it speaks).

Skipped where the programs are not installed (`apt-get install ngtcp2-client ngtcp2-server`). It has no migration by
its server and sends no stateless resets, so those go one way only.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from ngtcp2 import CLIENT, SERVER, Http3, Http3Gate, Wire, bodies, http3_client, program, serving

from quicoll_transport.quic.terms import SessionConfig
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import WORKER, Identity

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(120)]

with_client = pytest.mark.skipif(CLIENT is None, reason="gtlsclient is not installed (Debian: ngtcp2-client)")
with_server = pytest.mark.skipif(SERVER is None, reason="gtlsserver is not installed (Debian: ngtcp2-server)")

SIZE = 2_000_000
CONTENT = random.Random(3).randbytes(SIZE)
H3_NO_ERROR, H3_CLOSED_CRITICAL_STREAM = 0x100, 0x104  # RFC 9114 section 8.1
SMALL = ["--max-window=0", "--max-stream-window=0", "--max-data=20K"]


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    made = ephemeral("ngtcp2", [(WORKER, "a"), (WORKER, "b")], algorithm="p256")
    return {node: made[Identity("ngtcp2", WORKER, node)] for node in "ab"}


class Fetch:
    """A plane as server, and a run of gtlsclient that asks it for something."""

    def __init__(self, shown: dict[str, Any], folder: Path) -> None:
        self.shown, self.folder = shown, folder
        self.config: dict[str, Any] = {}
        self.options: dict[str, Any] = {}  # of the plane
        self.response, self.held = CONTENT, None  # type: bytes, int | None
        self.retry = False
        self.loss = 0.0

    def wire(self) -> Wire:
        made = type("Answering", (Http3,), {"response": self.response, "held": self.held})
        config = SessionConfig(**self.config)
        gate = Http3Gate(made, credentials=self.shown["a"], config=config, retry=self.retry, **self.options)
        return Wire(loss=self.loss, seed=1, gate=gate)

    def command(self, wire: Wire, *options: str, count: int = 1) -> list[str]:
        paths = [f"https://localhost/data{number}" for number in range(count)]
        always = ["--quiet", "--exit-on-all-streams-close", f"--download={self.folder}"]
        return [str(CLIENT), *always, *options, "127.0.0.1", str(wire.port), *paths]

    def upload(self, wire: Wire, *options: str) -> list[str]:
        (self.folder / "up").write_bytes(CONTENT)
        return self.command(wire, "--http-method=POST", "--data=up", *options)

    def go(self, wire: Wire, command: list[str], *, seconds: float = 60.0) -> Http3:
        """Run it to its end, which is to be a good one; return the plane that has served it."""
        with program(command, self.folder) as client:
            wire.pump(lambda: client.poll() is not None, seconds=seconds)
        assert client.returncode == 0, self.words
        return self.served(wire)

    def served(self, wire: Wire) -> Http3:
        assert wire.peer is not None, self.words
        assert wire.peer.plane.violation is None
        return wire.peer

    @property
    def words(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-2000:]

    def got(self, count: int = 1) -> list[bool]:
        return [(self.folder / f"data{number}").read_bytes() == self.response for number in range(count)]


@pytest.fixture
def fetch(shown: dict[str, Any], tmp_path: Path) -> Fetch:
    return Fetch(shown, tmp_path)


# -- ngtcp2 asks -------------------------------------------------------------------------------------------------------


@with_client
@pytest.mark.parametrize(("loss", "asks"), [(0.0, "plane"), (0.03, "plane"), (0.03, "ngtcp2")])
def test_a_client_of_ngtcp2_gets_all_bytes(fetch: Fetch, loss: float, asks: str) -> None:
    """asks: who asks for new keys; gtlsclient gives up where it wants to and the other side has just done so."""
    fetch.loss, fetch.config = loss, {"key_packets": 100 if asks == "plane" else 1 << 22}
    with fetch.wire() as wire:
        command = fetch.command(wire, *(["--key-update=30ms"] if asks == "ngtcp2" else []))
        peer = fetch.go(wire, command)
        assert fetch.got() == [True]
        assert peer.plane.keys.updates > 0, peer.plane.sender.number


@with_client
@pytest.mark.parametrize(("loss", "window"), [(0.0, 16 << 20), (0.03, 64 << 10)])
def test_a_client_of_ngtcp2_sends_all_bytes(fetch: Fetch, loss: float, window: int) -> None:
    fetch.loss, fetch.config, fetch.response = loss, {"window_bytes": window}, b"thanks"
    with fetch.wire() as wire:
        peer = fetch.go(wire, fetch.upload(wire))
        assert list(peer.requests.values()) == [CONTENT]
        assert fetch.got() == [True]


@with_client
def test_a_client_of_ngtcp2_that_has_to_retry_gets_many_streams_through_small_windows(fetch: Fetch) -> None:
    """The plane allows one stream of requests at a time; it is allowed 20 KiB of all streams, 16 KiB of each."""
    fetch.retry, fetch.response = True, CONTENT[:100_000]
    with fetch.wire() as wire:
        fetch.go(wire, fetch.command(wire, *SMALL, "--max-stream-data-bidi-local=16K", count=10))
        assert wire.retries >= 1
        assert fetch.got(10) == [True] * 10


@with_client
def test_jumbo_frames_go_both_ways_where_the_path_carries_them(fetch: Fetch) -> None:
    fetch.options = {"largest": 8952}
    with fetch.wire() as wire:
        peer = fetch.go(wire, fetch.upload(wire, "--max-udp-payload-size=9000"))
        assert list(peer.requests.values()) == [CONTENT]
        assert fetch.got() == [True]
        assert peer.plane.sender.mtu.size == 8952


@with_client
@pytest.mark.parametrize("host", ["same", "another"])
def test_a_client_of_ngtcp2_is_followed_to_an_address_that_it_goes_to(fetch: Fetch, host: str) -> None:
    """It validates the path and names other connection ids; so does the plane (RFC 9000 section 9.5)."""
    fetch.held = SIZE // 2

    def has_gone() -> bool:
        peer = wire.peer
        if peer is not None and peer.requests and peer.plane.recovery.is_idle:
            peer.plane.ping()  # gtlsclient sends nothing from its new address before it has heard something
        return len(wire.heard) > 1

    with fetch.wire() as wire, program(fetch.command(wire, "--change-local-addr=300ms"), fetch.folder) as client:
        wire.elsewhere = host == "another"
        wire.pump(has_gone, seconds=10)
        peer = fetch.served(wire)
        wire.pump(lambda: peer.plane.paths.current.address == wire.heard[1] and peer.plane.paths.current.validated)
        assert peer.handshake.handover is not None
        assert peer.plane.peer_ids.current != peer.handshake.handover.peer_cid
        peer.go_on()
        wire.pump(lambda: client.poll() is not None)
    assert client.returncode == 0, fetch.words
    assert fetch.got() == [True]


@with_client
@pytest.mark.parametrize(
    ("host", "options"),
    [("same", []), ("another", []), pytest.param("another", ["--scid="], id="another, a client without ids")],
)
def test_a_client_of_ngtcp2_is_followed_where_a_nat_puts_it(fetch: Fetch, host: str, options: list[str]) -> None:
    """It knows nothing of it, sends on, and answers a challenge; the plane may use the id that it has used before."""
    fetch.config = {"window_bytes": 256 << 10}
    with fetch.wire() as wire, program(fetch.upload(wire, *options), fetch.folder) as client:
        wire.pump(lambda: wire.peer is not None and len(wire.peer.received.get(0, b"")) > SIZE // 4)
        peer = fetch.served(wire)
        first = peer.plane.peer_ids.current
        wire.renumber(another_host=host == "another")
        wire.pump(lambda: client.poll() is not None)
    assert client.returncode == 0, fetch.words
    assert peer.plane.violation is None
    assert list(peer.requests.values()) == [CONTENT]
    assert peer.plane.paths.current.address == wire.heard[1]
    assert peer.plane.paths.current.validated
    assert peer.plane.peer_ids.current == first


@with_client
def test_both_are_through_at_once_when_a_client_of_ngtcp2_closes(fetch: Fetch) -> None:
    with fetch.wire() as wire:
        peer = fetch.go(wire, fetch.command(wire), seconds=20)
        wire.pump(lambda: peer.closed is not None, seconds=5)
        assert_over(wire, peer, code=H3_NO_ERROR, by_peer=True)


@with_client
def test_both_are_through_at_once_when_the_plane_closes(fetch: Fetch) -> None:
    with fetch.wire() as wire, program(fetch.upload(wire), fetch.folder) as client:
        wire.pump(lambda: wire.peer is not None and len(wire.peer.received.get(0, b"")) > SIZE // 10)
        peer = fetch.served(wire)
        peer.plane.close(H3_NO_ERROR, "enough")
        wire.pump(lambda: client.poll() is not None, seconds=5)
        assert "ERR_DRAINING" in fetch.words
        assert_over(wire, peer, code=H3_NO_ERROR, by_peer=False)


@with_client
def test_a_client_of_ngtcp2_knows_a_stateless_reset(fetch: Fetch) -> None:
    with fetch.wire() as wire, program(fetch.upload(wire), fetch.folder) as client:
        wire.pump(lambda: wire.peer is not None and len(wire.peer.received.get(0, b"")) > SIZE // 10)
        wire.forget()
        wire.pump(lambda: client.poll() is not None, seconds=5)
        assert wire.resets > 0
        assert "ERR_DRAINING" in fetch.words


# -- ngtcp2 serves -----------------------------------------------------------------------------------------------------


def dialled(wire: Wire, credentials: Any, port: int, config: SessionConfig, **options: Any) -> Http3:
    """Return a client that is connected to gtlsserver, which may need a moment until it listens."""
    peer = wire.peer = http3_client(credentials, config, port, **options)
    wire.pump(lambda: peer.ready and peer.plane.confirmed)
    peer.begin()
    return peer


@with_server
@pytest.mark.parametrize(
    ("loss", "options", "config", "count"),
    [
        pytest.param(0.0, ["--validate-addr"], {"key_packets": 20}, 1, id="retry, and new keys"),
        pytest.param(0.03, [], {"key_packets": 20}, 1, id="loss, and new keys"),
        pytest.param(0.0, [], {"window_bytes": 64 << 10}, 20, id="many streams, small windows"),
    ],
)
def test_a_server_of_ngtcp2_sends_all_bytes(
    shown: dict[str, Any], tmp_path: Path, loss: float, options: list[str], config: dict[str, Any], count: int
) -> None:
    content = CONTENT[: SIZE // count]
    (tmp_path / "data").write_bytes(content)
    with serving(tmp_path, shown["b"], "--quiet", *options) as port, Wire(loss=loss, seed=2) as wire:
        peer = dialled(wire, shown["a"], port, SessionConfig(**config))
        streams = [peer.ask("/data") for _ in range(count)]
        assert streams[0] == 0
        wire.pump(lambda: sum(peer.ended.get(4 * n, False) for n in range(count)) == count or peer.closed is not None)
    assert peer.closed is None
    assert [bodies(peer.received[4 * n]) == content for n in range(count)] == [True] * count
    assert peer.plane.keys.updates > 0 or "key_packets" not in config


@with_server
@pytest.mark.parametrize(
    ("loss", "options", "largest"),
    [
        pytest.param(0.0, [], 65000, id="datagrams of 65000 bytes"),
        pytest.param(0.03, [*SMALL, "--max-stream-data-bidi-remote=16K"], 1452, id="loss, small windows"),
    ],
)
def test_a_server_of_ngtcp2_gets_all_bytes(
    shown: dict[str, Any], tmp_path: Path, loss: float, options: list[str], largest: int
) -> None:
    """It answers when the request is whole."""
    (tmp_path / "data").write_bytes(b"thanks")
    with serving(tmp_path, shown["b"], "--quiet", *options) as port, Wire(loss=loss, seed=2) as wire:
        peer = dialled(wire, shown["a"], port, SessionConfig(), largest=largest)
        peer.ask("/data", CONTENT)
        wire.pump(lambda: peer.ended.get(0, False) or peer.closed is not None)
        assert peer.closed is None
        assert bodies(peer.received[0]) == b"thanks"
        assert peer.plane.sender.mtu.size == largest or loss, "losses in a row look like a black hole"
        assert peer.plane.outbound.fresh_bytes > SIZE


@with_server
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_server_of_ngtcp2_follows_a_plane_that_a_nat_moves(shown: dict[str, Any], tmp_path: Path, way: str) -> None:
    (tmp_path / "data").write_bytes(CONTENT if way == "down" else b"thanks")
    with serving(tmp_path, shown["b"], "--quiet") as port, Wire(seed=2) as wire:
        peer = dialled(wire, shown["a"], port, SessionConfig(window_bytes=256 << 10))
        peer.ask("/data", None if way == "down" else CONTENT)
        gone = (lambda: len(peer.received.get(0, b""))) if way == "down" else (lambda: peer.plane.outbound.fresh_bytes)
        wire.pump(lambda: gone() > SIZE // 4)
        assert not peer.ended.get(0, False)
        wire.rebind()
        peer.plane.ping()  # as a link's heartbeat would: nobody finds one who is silent
        wire.pump(lambda: peer.ended.get(0, False) or peer.closed is not None)
        assert peer.closed is None
        assert bodies(peer.received[0]) == (CONTENT if way == "down" else b"thanks")


@with_server
def test_both_are_through_at_once_when_a_server_of_ngtcp2_closes(shown: dict[str, Any], tmp_path: Path) -> None:
    with serving(tmp_path, shown["b"], "--quiet") as port, Wire(seed=2) as wire:
        peer = dialled(wire, shown["a"], port, SessionConfig())
        peer.plane.outbound.write(peer.control_stream, b"", fin=True)
        wire.pump(lambda: peer.closed is not None, seconds=5)
        assert_over(wire, peer, code=H3_CLOSED_CRITICAL_STREAM, by_peer=True)


@with_server
def test_a_server_of_ngtcp2_lets_go_of_a_connection_that_a_plane_closes(shown: dict[str, Any], tmp_path: Path) -> None:
    with serving(tmp_path, shown["b"], "--no-quic-dump", "--no-http-dump") as port, Wire(seed=2) as wire:
        peer = dialled(wire, shown["a"], port, SessionConfig())
        peer.plane.close(H3_NO_ERROR, "enough")
        output = tmp_path / "output"
        wire.pump(lambda: "Draining Period is over" in output.read_text(errors="replace"), seconds=5)
        assert "reason=[enough]" in output.read_text(errors="replace")
        assert_over(wire, peer, code=H3_NO_ERROR, by_peer=False)


def assert_over(wire: Wire, peer: Http3, *, code: int, by_peer: bool) -> None:
    """A connection that was closed has said its last words once, and says nothing more."""
    cause = peer.plane.cause
    assert cause is not None
    assert (cause.code, cause.by_peer, cause.is_application) == (code, by_peer, True)
    wire.pump(lambda: not peer.plane.ending.has_words, seconds=5)
    assert peer.datagrams(time.monotonic_ns()) == []
    assert peer.next_timer() is None
