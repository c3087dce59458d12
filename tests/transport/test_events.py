"""What an endpoint tells its observer, what a snapshot says, what is logged, and qlog files that never do harm."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from endpoint_world import fail_connection, session_of
from parity_net import Net, Process, on_simulated_network

from quicoll_transport import events as observe
from quicoll_transport.carrier import CLOSE_NORMAL, CLOSE_PROTOCOL, CLOSE_REFUSED
from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link, shell
from quicoll_transport.endpoint.core import endpoint as core
from quicoll_transport.endpoint.core import greeting, peer, traffic
from quicoll_transport.errors import LinkLost
from quicoll_transport.events import (
    ConnectionDown,
    ConnectionUp,
    DialStarted,
    LinkChanged,
    PayloadCorrupted,
    PeerRefused,
    Resent,
    Stalled,
    SuspicionChanged,
    TransportEvent,
)
from quicoll_transport.faults.compose import Cut, Drop, Faults
from quicoll_transport.link.core import LinkState
from quicoll_transport.link.detector import LOST_FLOOR_NS, LOST_START_NS
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic.connection_ids import reset_token
from quicoll_transport.quic.qlog import QlogDirectory
from quicoll_transport.security.credentials import Credentials

pytestmark = pytest.mark.loopback

MS = 1_000_000
PATIENT = EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=30_000 * MS)
CredentialsOf = Callable[..., Credentials]
E = TypeVar("E")


class Told:
    """An observer that keeps everything, and wakes whoever waits for more."""

    def __init__(self) -> None:
        self.events: list[TransportEvent] = []
        self._more = asyncio.Event()

    def __call__(self, event: TransportEvent) -> None:
        self.events.append(event)
        self._more.set()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._more.clear()
            await self._more.wait()


class World:
    def __init__(self, credentials_of: CredentialsOf) -> None:
        self.credentials_of = credentials_of
        self.endpoints: list[Endpoint] = []

    def open(
        self,
        node: str,
        *,
        observer: Callable[[TransportEvent], None] | None = None,
        config: EndpointConfig = PATIENT,
        faults: Faults | None = None,
        refuse: str | None = None,
        **who: Any,
    ) -> Endpoint:
        loop = asyncio.get_running_loop()
        made = Endpoint(
            credentials=self.credentials_of(node, **who),
            config=config,
            io=UdpSocket("127.0.0.1", 0, loop=loop),
            loop=loop,
            incarnation=len(self.endpoints) + 1,
            authorize=lambda identity: refuse,
            on_link=lambda link: None,
            faults=faults,
            observer=observer,
        )
        self.endpoints.append(made)
        return made

    async def link(self, a: Endpoint, b: Endpoint) -> tuple[Link, Link]:
        ours = a.link(b.identity, addresses=[b.address], dial=True)
        await ours.wait_up()
        return ours, b.links[a.identity]


@pytest.fixture
async def world(credentials_of: CredentialsOf) -> AsyncIterator[World]:
    made = World(credentials_of)
    yield made
    for endpoint in made.endpoints:
        await endpoint.aclose(timeout=0.0)


async def exchange(source: Link, target: Link, number: int, size: int) -> None:
    tag, memory = number.to_bytes(TAG_SIZE, "big"), bytearray(size)
    data = random.Random(number).randbytes(size)
    await asyncio.gather(target.post(tag, memoryview(memory)).future, source.send(tag, memoryview(data)).future)
    assert memory == data


# -- events ----------------------------------------------------------------------------------------------------------


async def test_the_life_of_a_link_is_told_in_order_at_both_ends(world: World) -> None:
    told_a, told_b = Told(), Told()
    a, b = world.open("a", observer=told_a), world.open("b", observer=told_b)
    ours, theirs = await world.link(a, b)
    ours.close("work is done")
    await told_b.until(lambda: theirs.ended)
    shown = [
        (type(event), getattr(event, "state", None), getattr(event, "peer", None), getattr(event, "link", None))
        for event in told_a.events
    ]
    assert shown == [
        (DialStarted, None, "worker/b", ours.number),
        (LinkChanged, LinkState.UP, "worker/b", ours.number),
        (ConnectionUp, None, "worker/b", ours.number),
        (LinkChanged, LinkState.CLOSED, "worker/b", ours.number),
        (ConnectionDown, None, "worker/b", ours.number),
    ]
    dial, up, down = told_a.of(DialStarted)[0], told_a.of(ConnectionUp)[0], told_a.of(ConnectionDown)[0]
    assert (dial.address, dial.attempt) == (b.address, 1)
    assert (up.address, up.dialled, up.connections) == (b.address, True, 1)
    assert (down.code, down.reason, down.by_peer, down.was_up) == (CLOSE_NORMAL, "work is done", False, True)
    assert told_a.of(LinkChanged)[-1].cause == "work is done"
    assert [event.state for event in told_b.of(LinkChanged)] == [LinkState.UP, LinkState.LOST]
    assert told_b.of(LinkChanged)[-1].cause == "closed by the peer (work is done)"
    assert not told_b.of(ConnectionUp)[0].dialled
    assert told_b.of(ConnectionDown)[0].by_peer
    times = [event.t_ns for event in told_a.events]
    assert times == sorted(times)


async def test_silence_is_told_as_suspicion_first_and_its_end_too(world: World) -> None:
    told = Told()
    faults = Faults(random.Random(1))
    config = EndpointConfig(lost_after_ns=1600 * MS)
    a, b = world.open("a", observer=told, config=config, faults=faults), world.open("b", config=config)
    ours, _ = await world.link(a, b)
    with faults.add(Cut()):
        await told.until(lambda: ours.suspect)
    await told.until(lambda: len(told.of(SuspicionChanged)) == 2)
    first, second = told.of(SuspicionChanged)
    assert (first.suspect, second.suspect) == (True, False)
    assert first.silent_for_ns >= 720 * MS
    faults.add(Cut())
    await told.until(lambda: ours.ended and bool(told.of(ConnectionDown)))
    assert [type(event) for event in told.events[-3:]] == [SuspicionChanged, LinkChanged, ConnectionDown]
    assert told.of(LinkChanged)[-1].state is LinkState.LOST
    assert "silent for" in told.of(LinkChanged)[-1].cause


async def test_a_connection_that_dies_and_what_is_sent_again_are_told(world: World) -> None:
    told = Told()
    a, b = world.open("a", observer=told), world.open("b")
    ours, theirs = await world.link(a, b)
    memory = bytearray(2_000_000)
    tag = bytes(TAG_SIZE)
    received = theirs.post(tag, memoryview(memory))
    sent = ours.send(tag, memoryview(random.Random(1).randbytes(len(memory))))
    while ours.snapshot().bytes_in_flight < 20_000:  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(0)
    fail_connection(ours, CLOSE_PROTOCOL, "a test")
    await asyncio.gather(sent.future, received.future)
    assert [event.state for event in told.of(LinkChanged)] == [LinkState.UP, LinkState.DOWN, LinkState.UP]
    assert [event.attempt for event in told.of(DialStarted)] == [1, 2]
    assert [event.connections for event in told.of(ConnectionUp)] == [1, 2]
    down = told.of(ConnectionDown)[0]
    assert (down.code, down.reason, down.was_up) == (CLOSE_PROTOCOL, "a test", True)
    await told.until(lambda: bool(told.of(Resent)))
    assert sum(event.count for event in told.of(Resent)) == told.of(Resent)[-1].total == ours.stats.resends


async def test_corruption_is_told_where_it_is_found_and_the_resend_where_it_is_made(world: World) -> None:
    told_a, told_b = Told(), Told()
    faults = Faults(random.Random(1))
    a, b = world.open("a", observer=told_a), world.open("b", observer=told_b, faults=faults)
    ours, theirs = await world.link(a, b)

    def damage(view: memoryview) -> None:
        view[0] ^= 1
        faults.payload_fault = None

    faults.payload_fault = damage
    await exchange(ours, theirs, 1, 1000)
    assert [(event.count, event.total) for event in told_b.of(PayloadCorrupted)] == [(1, 1)]
    assert [(event.count, event.total) for event in told_a.of(Resent)] == [(1, 1)]
    assert theirs.snapshot().corrupt == 1
    assert ours.snapshot().resends == 1


async def test_a_stall_of_our_own_loop_is_told(world: World) -> None:
    told = Told()
    a, b = world.open("a", observer=told), world.open("b")
    ours, _ = await world.link(a, b)
    ours._core.detector._due_ns -= 60_000 * MS  # as if the timer had come a minute late
    due = ours._core.detector.next_timer()
    assert due is not None
    ours._peer.handle_timer(due, None)
    a._core.touch(ours._peer)
    a._flush()
    assert [(event.peer, event.count) for event in told.of(Stalled)] == [("worker/b", 1)]
    assert ours.snapshot().stalls == 1


async def test_a_refused_peer_is_told_with_the_reason_that_the_peer_does_not_learn(world: World) -> None:
    told, dialler = Told(), Told()
    b = world.open("b", observer=told, refuse="not on the list")
    config = EndpointConfig(lost_after_ns=30_000 * MS, connect_ns=1000 * MS)
    a = world.open("a", observer=dialler, config=config)
    link = a.link(b.identity, addresses=[b.address], dial=True)
    with pytest.raises(LinkLost, match="refused"):
        await link.wait_up()
    refused = told.of(PeerRefused)[0]
    assert "not on the list" in refused.reason
    assert refused.address == a.address
    down = dialler.of(ConnectionDown)[0]
    assert (down.code, down.reason, down.by_peer, down.was_up) == (CLOSE_REFUSED, "refused", True, False)


async def test_an_observer_that_raises_is_reported_and_harms_nothing(world: World) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    def broken(event: TransportEvent) -> None:
        raise RuntimeError("a bug of the observer")

    ours, theirs = await world.link(world.open("a", observer=broken), world.open("b", observer=broken))
    await exchange(ours, theirs, 1, 100_000)
    assert reported
    assert all(str(context["exception"]) == "a bug of the observer" for context in reported)


async def test_an_observer_may_close_the_link_that_it_is_told_of(world: World) -> None:
    endpoints: list[Endpoint] = []

    def close(event: TransportEvent) -> None:
        if isinstance(event, LinkChanged) and event.state is LinkState.UP:
            endpoints[0].links[b.identity].close("seen enough")

    b = world.open("b")
    endpoints.append(world.open("a", observer=close))
    link = endpoints[0].link(b.identity, addresses=[b.address], dial=True)
    with contextlib.suppress(LinkLost):  # up for a moment, or ended already when the waiting task runs
        await link.wait_up()
    with pytest.raises(LinkLost, match="seen enough"):
        await link.send(bytes(TAG_SIZE), memoryview(b"x")).future


async def test_without_an_observer_no_event_is_built(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> None:
        raise AssertionError("an event for nobody")

    names = [name for name in observe.__all__ if name not in ("Observer", "LinkSnapshot", "TransportEvent")]
    places = [
        (module, name) for module in (core, greeting, peer, shell, traffic) for name in names if hasattr(module, name)
    ]
    assert {name for _, name in places} == set(names), "each event is built in one of these modules"
    for module, name in places:
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr(peer.Peer, "tell_counts", forbidden)
    ours, theirs = await world.link(world.open("a"), world.open("b"))
    await exchange(ours, theirs, 1, 100_000)
    ours.close("done")


@pytest.mark.interpreted
def test_events_are_frozen_and_hold_figures_and_names_only() -> None:
    kinds = [getattr(observe, name) for name in observe.__all__]
    events = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    assert len(events) >= 11
    for kind in events:
        assert kind.__dataclass_params__.frozen
        assert {field.type for field in dataclasses.fields(kind)} <= {
            "int", "str", "bool", "int | None", "LinkState", "Address", "Address | None",
        }  # fmt: skip


# -- snapshots -------------------------------------------------------------------------------------------------------


async def test_a_snapshot_says_what_the_link_did(world: World) -> None:
    ours, theirs = await world.link(world.open("a"), world.open("b"))
    await exchange(ours, theirs, 1, 500_000)
    await exchange(theirs, ours, 2, 1000)
    here, there = ours.snapshot(), theirs.snapshot()
    assert (here.peer, there.peer) == ("worker/b", "worker/a")
    assert (here.state, here.suspect, here.cause) == (LinkState.UP, False, "")
    assert (here.bytes_sent, here.messages_sent) == (there.bytes_received, there.messages_received) == (500_000, 1)
    assert (there.bytes_sent, there.messages_sent) == (here.bytes_received, here.messages_received) == (1000, 1)
    assert here.connections == there.connections == 1
    assert here.path_rtt_ns is not None
    assert here.path_min_rtt_ns is not None
    assert 0 < here.path_min_rtt_ns <= here.path_rtt_ns
    assert here.cwnd > 0
    assert (here.suspect_after_ns, here.lost_after_ns) == (13_500 * MS, 30_000 * MS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        here.cwnd = 0


async def test_a_snapshot_shows_credit_at_both_ends(world: World) -> None:
    ours, theirs = await world.link(world.open("a"), world.open("b"))
    tag = bytes(TAG_SIZE)
    await ours.send(tag, memoryview(bytes(10_000))).future
    assert ours.snapshot().credit_used >= 10_000
    assert theirs.snapshot().credit_held == theirs.snapshot().credit_peak >= 10_000
    await theirs.post(tag, memoryview(bytearray(10_000))).future
    assert theirs.snapshot().credit_held == 0
    assert theirs.snapshot().credit_peak >= 10_000
    await exchange(theirs, ours, 2, 10)
    await exchange(ours, theirs, 3, 10)
    assert ours.snapshot().credit_used < 10_000


async def test_a_snapshot_of_a_link_without_connection_has_no_path(world: World) -> None:
    ours, _ = await world.link(world.open("a"), world.open("b"))
    ours.close("done")
    await asyncio.sleep(0)
    after = ours.snapshot()
    assert (after.state, after.cause) == (LinkState.CLOSED, "done")
    assert (after.path_rtt_ns, after.cwnd, after.bytes_in_flight, after.lost_packets) == (None, 0, 0, 0)


def test_a_snapshot_shows_how_a_derived_deadline_follows_heartbeats_and_quic() -> None:
    """Simulated, since the round trips of a loopback interface are as long as the machine has other things to do."""

    async def look(process: Process) -> None:
        link = process.link("b")
        first = link.snapshot().lost_after_ns
        while link.rtt_ns is None:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.001)
        here = link.snapshot()
        assert first == LOST_START_NS
        assert here.lost_after_ns == LOST_FLOOR_NS, "the network is quick"
        assert here.suspect_after_ns == LOST_FLOOR_NS * 9 // 20
        assert link._core.detector._path_rto_ns > 0, "QUIC's estimate is heard too"

    async def run(net: Net) -> None:
        await net.pair(config=EndpointConfig(connect_ns=30_000 * MS))
        await net.call("a", look)
        await net.exchange("a", "b", 1, 1000)

    on_simulated_network(run)


async def test_lost_packets_are_counted(world: World) -> None:
    faults = Faults(random.Random(4))
    a, b = world.open("a", faults=faults), world.open("b")
    ours, theirs = await world.link(a, b)
    assert ours.snapshot().lost_packets == 0
    with faults.add(Drop(0.1)) as rule:
        await exchange(ours, theirs, 1, 1_000_000)
    assert rule.decided > 0
    after = ours.snapshot()
    assert 0 <= after.spurious_packets < after.lost_packets < after.sent_packets
    assert after.sent_packets > 1_000_000 // 1500


# -- log -------------------------------------------------------------------------------------------------------------


async def test_log_records_name_peer_and_link(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="quicoll.transport"):
        ours, _ = await world.link(world.open("a"), world.open("b"))
        b = world.open("d", refuse="no")
        link = world.open("c", config=EndpointConfig(connect_ns=1000 * MS)).link(
            b.identity, addresses=[b.address], dial=True
        )
        with pytest.raises(LinkLost):
            await link.wait_up()
    records = [record for record in caplog.records if record.name == "quicoll.transport"]
    assert records
    assert all(hasattr(record, "peer") and hasattr(record, "link") for record in records)
    assert ("worker/b", ours.number) in {(record.peer, record.link) for record in records}
    assert any(record.peer == "coordinator/c" and "refused" in record.message for record in records)


def texts(directory: Path) -> dict[str, str]:
    """Name and text of every file, in the order of names."""
    return {file.name: file.read_text() for file in sorted(directory.rglob("*")) if file.is_file()}


# -- qlog ------------------------------------------------------------------------------------------------------------


async def test_each_connection_leaves_one_whole_trace_when_it_ends(world: World, tmp_path: Path) -> None:
    config = dataclasses.replace(PATIENT, qlog_directory=tmp_path / "made" / "here")
    a, b = world.open("a", config=config), world.open("b", config=config)
    ours, theirs = await world.link(a, b)
    await exchange(ours, theirs, 1, 100_000)
    assert texts(tmp_path) == {}, "not before the end"
    await a.aclose()
    await b.aclose()
    written = texts(tmp_path)
    assert [name.rpartition(".")[2] for name in written] == ["qlog", "qlog"]
    sides = set()
    for text in written.values():
        document = json.loads(text)
        assert document["qlog_version"] == "0.3"
        (trace,) = document["traces"]
        sides.add(trace["vantage_point"]["type"])
        names = {event["name"] for event in trace["events"]}
        assert {"transport:packet_sent", "transport:packet_received", "recovery:metrics_updated"} <= names
    assert sides == {"client", "server"}


async def test_traces_hold_no_token_that_ends_or_moves_a_connection(world: World, tmp_path: Path) -> None:
    config = dataclasses.replace(PATIENT, qlog_directory=tmp_path)
    a, b = world.open("a", config=config), world.open("b", config=config)
    ours, theirs = await world.link(a, b)
    await exchange(ours, theirs, 1, 1000)
    secrets: list[bytes] = []
    for link in (ours, theirs):
        plane = session_of(link)._plane
        secrets += [reset_token(session_of(link)._reset_key, cid) for cid in plane.own_ids._active]
        secrets += [plane.keys.send._secret, plane.keys.receive._secret]
    assert len(secrets) > 4
    await a.aclose()
    await b.aclose()
    text = "".join(texts(tmp_path).values())
    assert '"reset_token": "redacted"' in text
    assert not [secret for secret in secrets if secret.hex() in text]


async def test_traces_that_cannot_be_written_are_logged_and_harmless(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    occupied = tmp_path / "a file"
    occupied.write_text("")
    config = dataclasses.replace(PATIENT, qlog_directory=occupied)
    ours, theirs = await world.link(world.open("a", config=config), world.open("b", config=config))
    await exchange(ours, theirs, 1, 1000)
    with caplog.at_level(logging.WARNING, logger="quicoll.transport"):
        for endpoint in world.endpoints:
            await endpoint.aclose()
    assert sum("a qlog trace is lost" in record.message for record in caplog.records) == 2
    assert occupied.read_text() == ""


def test_only_the_newest_files_stay_and_what_others_wrote_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.qlog"
    other.write_text("theirs")
    directory = QlogDirectory(tmp_path, label="../node/1", files=3)
    for i in range(10):
        directory.end_trace(directory.start_trace(is_client=True, odcid=bytes([i])))
    names = sorted(file.name for file in tmp_path.iterdir())
    assert len(names) == 4
    assert other.read_text() == "theirs"
    assert [name.rsplit("-", 1)[1] for name in names if name != "other.qlog"] == ["07.qlog", "08.qlog", "09.qlog"]


def test_a_trace_keeps_its_last_events_only(tmp_path: Path) -> None:
    directory = QlogDirectory(tmp_path, label="n", events=5)
    trace = directory.start_trace(is_client=False, odcid=b"\x01")
    for i in range(1000):
        trace.log_event(category="transport", event="packet_sent", data={"number": i, "token": "00ff"})
    events = trace.to_dict()["events"]
    assert [event["data"]["number"] for event in events] == [995, 996, 997, 998, 999]
    assert "00ff" not in repr(events)


async def test_traces_of_ended_connections_are_not_kept_in_memory(world: World, tmp_path: Path) -> None:
    config = dataclasses.replace(PATIENT, qlog_directory=tmp_path)
    a, b = world.open("a", config=config), world.open("b", config=config)
    await world.link(a, b)
    await a.aclose()
    await b.aclose()
    gc.collect()
    assert a._qlog is not None
    assert a._qlog._traces == []
