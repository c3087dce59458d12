"""Parity behind the tail of what is sent, between two planes on a path in virtual time that loses what a test says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from quic_pairs import PairNet, PlanePeer, transfer

from quicoll_transport.quic.terms import SessionConfig
from quicoll_transport.security.credentials import Credentials

MS = 1_000_000
FULL = 1452  # bytes of a datagram that is full
CredentialsOf = Callable[..., Credentials]


STEP = 1413  # bytes of a stream in each of them


class Wide:
    """Congestion control that is none: the whole tail leaves at once, whatever was lost before."""

    window, arrears_ns = 4 << 20, 0

    def __init__(self, datagram: int) -> None: ...

    def rate(self, smoothed_ns: int) -> int | None:
        return None

    def _ignore(self, *what: Any) -> None: ...

    on_sent = on_acked = on_lost = on_spurious = on_persistent_congestion = on_datagram_size = _ignore


class Line:
    """A pair of planes, and what became of datagrams of the client that are full, counted from its making on."""

    def __init__(
        self, credentials_of: CredentialsOf, *, modes: tuple[str, str] = ("auto", "auto"), **path: Any
    ) -> None:
        path.setdefault("delay_ns", 20 * MS)
        a, b = (SessionConfig(congestion="bbr", parity=mode, window_bytes=64 << 20) for mode in modes)
        self.net = PairNet(
            PlanePeer.client(credentials_of("a"), a, controller=Wide),
            lambda first: PlanePeer.server(credentials_of("b"), first, b, controller=Wide),
            **path,
        )
        self.net.shake_hands()
        self.net.run(200 * MS)
        self.lose: set[int] = set()
        self.count = 0
        self.net.tap = self._tap

    def _tap(self, side: int, data: bytes) -> bool:
        if side or len(data) < FULL - 16 or data[0] & 0x80:
            return True
        self.count += 1
        return self.count - 1 not in self.lose

    @property
    def client(self) -> Any:
        return self.net.client.plane

    @property
    def server(self) -> Any:
        return self.net.server.plane

    def believe(self, share: float, burst: int = 1) -> None:
        """Let the client take it that packets are lost."""
        loss = self.client.protection.loss
        loss._sent, loss._lost = 10_000, round(10_000 * share)
        loss._bursts = loss._lost // burst
        loss._sent_total = self.client.sender.number
        loss._lost_total = self.client.recovery.lost_packets - self.client.recovery.spurious_packets


@pytest.fixture
def line(credentials_of: CredentialsOf) -> Callable[..., Line]:
    def make(**options: Any) -> Line:
        return Line(credentials_of, **options)

    return make


Make = Callable[..., Line]


def packets_of(line: Line) -> list[Any]:
    return list(line.client.protection._sets.values())


def test_what_is_lost_of_a_tail_is_made_from_parity_and_not_sent_again(line: Make) -> None:
    path = line()
    path.believe(0.01)
    path.lose = {3, 50, 51}
    took = transfer(path.net, [200_000], sides=(0,))
    full = path.count
    assert took < 40 * MS + 20 * MS, "it came in one way and what the parity took, not in a round trip more"
    assert path.server.repairs.repaired_bytes == pytest.approx(3 * STEP, abs=20)
    lost = path.client.recovery.lost_packets
    path.net.run(500 * MS)
    assert path.client.recovery.lost_packets - lost == 3, "congestion control hears of what was lost"
    assert path.count == full, "nothing of it was sent again"
    assert path.client.protection.held_bytes == path.server.repairs.repaired_bytes
    assert not packets_of(path)
    assert len(path.client.outbound) == 0


def test_without_parity_the_same_loss_takes_a_round_trip_more(line: Make) -> None:
    path = line(modes=("auto", "off"))
    assert path.client.protection is None
    path.lose = {3, 50, 51}
    assert transfer(path.net, [200_000], sides=(0,)) >= 60 * MS


@pytest.mark.parametrize("modes", [("off", "auto"), ("auto", "off"), ("off", "off")])
def test_both_sides_have_to_take_part(line: Make, modes: tuple[str, str]) -> None:
    path = line(modes=modes)
    for plane in (path.client, path.server):
        assert plane.protection is None
        assert plane.repairs is None


def test_a_side_without_bbr_takes_parity_and_sends_none(credentials_of: CredentialsOf) -> None:
    a, b = SessionConfig(congestion="cubic"), SessionConfig(congestion="bbr")
    net = PairNet(
        PlanePeer.client(credentials_of("a"), a), lambda first: PlanePeer.server(credentials_of("b"), first, b)
    )
    net.shake_hands()
    client, server = net.client.plane, net.server.plane
    assert (client.protection, server.repairs) == (None, None)
    assert server.protection is not None
    assert client.repairs is not None


def test_more_losses_than_rows_are_sent_again(line: Make) -> None:
    path = line()
    path.believe(0.01)
    path.lose = set(range(20, 40))
    transfer(path.net, [200_000], sides=(0,))
    path.net.run(500 * MS)
    assert path.server.repairs.repaired_bytes == 0
    assert path.client.protection.parity_bytes > 0
    assert not packets_of(path)
    assert len(path.client.outbound) == 0


def test_what_no_parity_can_bring_back_is_sent_again_at_once(line: Make) -> None:
    took = []
    for mode in ("auto", "off"):
        path = line(modes=(mode, "auto"))
        if mode == "auto":
            path.believe(0.01)
        path.lose = set(range(20, 80))
        took.append(transfer(path.net, [200_000], sides=(0,)))
    assert took[0] == took[1]
    assert path.client.protection is None


def test_a_tail_of_several_streams_is_repaired_though_some_of_them_are_whole_and_read(line: Make) -> None:
    path = line()
    path.believe(0.01)
    path.lose = {70}
    took = transfer(path.net, [60_000, 60_000, 60_000, 60_000], sides=(0,))
    assert took < 60 * MS
    assert path.server.repairs.repaired_bytes > 1000


def test_the_end_of_a_stream_that_is_lost_is_repaired_with_its_end(line: Make) -> None:
    path = line()
    path.believe(0.01)
    sent = path.net.client.open(random.Random(1).randbytes(142 * STEP))
    path.lose = {141}
    path.net.until(lambda: path.net.server.ended.get(sent.id, False))
    assert path.server.repairs.repaired_bytes == pytest.approx(STEP, abs=3)


def test_bursts_are_shared_by_groups(line: Make) -> None:
    path = line()
    path.believe(0.01, burst=8)
    path.lose = set(range(300, 308))
    took = transfer(path.net, [1_000_000], sides=(0,))
    assert took < 60 * MS
    assert path.server.repairs.repaired_bytes == pytest.approx(8 * STEP, abs=40)


def test_a_stream_that_is_given_up_harms_no_other_one(line: Make) -> None:
    path = line()
    path.believe(0.01)
    path.lose = {5, 100}
    gone = path.net.client.open(bytes(100_000), fin=False)
    other = random.Random(2).randbytes(100_000)
    kept = path.net.client.open(other)
    path.net.carry()
    path.client.outbound.reset(gone, 7)
    path.net.until(lambda: path.net.server.ended.get(kept.id, False))
    assert path.net.server.received[kept.id] == other
    path.net.run(1000 * MS)
    assert path.net.server.resets == {gone.id: 7}
    assert len(path.client.outbound) == 0
    assert not packets_of(path)


def test_a_loss_whose_parity_is_lost_as_well_is_sent_again(line: Make) -> None:
    path = line()
    path.believe(0.01)
    path.lose = {3, *range(141, 170)}
    transfer(path.net, [200_000], sides=(0,))
    path.net.run(1000 * MS)
    assert path.server.repairs.repaired_bytes == 0
    assert len(path.client.outbound) == 0
    assert not packets_of(path)


def test_nothing_is_protected_where_a_round_trip_is_short(line: Make) -> None:
    path = line(delay_ns=MS)
    path.believe(0.01)
    transfer(path.net, [200_000], sides=(0,))
    assert path.client.protection.parity_bytes == 0
    assert path.server.repairs.recent_bytes == 0


def test_nothing_is_protected_while_nothing_was_lost(line: Make) -> None:
    path = line()
    transfer(path.net, [200_000, 200_000], sides=(0,))
    assert path.client.protection.parity_bytes == 0


def test_parity_is_three_percent_and_two_packets_of_each_group_at_most(line: Make) -> None:
    path = line()
    path.believe(0.09)
    for size in (30_000, 200_000, 1_000_000, 3_000_000):
        before = path.client.protection.parity_bytes
        transfer(path.net, [size], sides=(0,))
        path.net.run(1000 * MS)
        path.believe(0.09)
        segments = -(-size // STEP)
        assert path.client.protection.parity_bytes - before <= (0.03 * segments + 2 * -(-segments // 200)) * STEP


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("runs", [True, False])
def test_every_byte_arrives_where_a_tenth_is_lost_and_order_too(
    credentials_of: CredentialsOf, seed: int, runs: bool
) -> None:
    path = Line(credentials_of, seed=seed, loss=0.02, jitter_ns=3 * MS, duplicate=0.02, runs=runs)
    for size in (40_000, 300_000, 1_000_000):
        transfer(path.net, [size, size // 3, 1000], sides=(0, 1))
    assert path.client.protection.parity_bytes + path.server.protection.parity_bytes > 0
    path.net.loss = 0.0
    path.net.run(5000 * MS)
    for plane in (path.client, path.server):
        assert not plane.protection._sets
        assert len(plane.outbound) == 0
