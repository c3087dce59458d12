"""The measured rate of a path: on paths whose rate is known, and in cases that can be worked out by hand."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from depth import some

from quicoll_transport.link.core import LinkConfig, LinkCore, LinkId
from quicoll_transport.link.detector import DetectorConfig
from quicoll_transport.link.frames import TAG_SIZE, Header, checksum
from quicoll_transport.quic import Gate, Session, SessionConfig, handshake_in_memory
from quicoll_transport.quic.delivery import DeliveryRate
from quicoll_transport.security.credentials import Credentials

MS = 1_000_000
START = 10**18
CLIENT, SERVER = ("127.0.0.1", 1), ("127.0.0.1", 2)
CredentialsOf = Callable[..., Credentials]


class Path:
    """Two sessions on virtual time; what the client sends leaves at `rate` bytes a second, one after the other."""

    def __init__(self, credentials_of: CredentialsOf, *, rate: float, one_way_ns: int, loss: float = 0.0) -> None:
        config = SessionConfig()
        self.client = Session.client(credentials=credentials_of("a"), config=config, address=SERVER, now_ns=START)
        gate = Gate(credentials=credentials_of("b"), config=config)
        self.server = handshake_in_memory(self.client, gate, now_ns=START)[0]
        self.now = START + 100 * MS
        self._rate, self._one_way, self._loss = rate, one_way_ns, loss
        self._free = self.now
        self._rng = random.Random(1)
        self._coming: list[tuple[int, int, bool, bytes]] = []
        self._carried = 0

    def send(self, *sizes: int) -> None:
        """Messages of these sizes, until all have arrived and been acknowledged."""
        core = LinkCore(
            peer="peer",
            local=LinkId(1, 1),
            config=LinkConfig(DetectorConfig.from_lost_after(10**6 * MS), credit_bytes=1 << 20),
            now_ns=0,
            on_app=lambda data: None,
            on_state=lambda state: None,
        )
        self.server.attach(core)
        items = []
        for number, size in enumerate(sizes):
            data, tag = bytes(size), number.to_bytes(TAG_SIZE, "big")
            items.append(core.post(tag, memoryview(bytearray(size)), lambda item: None))
            header = Header(tag, number, size, checksum(data)).encode()
            self.client.start_message(number, header, memoryview(data))
        self._flush()
        while self.client._waiting or self.client._feeding or self.client._open:
            self._step()
        assert all(item.done for item in items)

    def _flush(self) -> None:
        for data, _ in self.client.datagrams_to_send(self.now):
            self._free = max(self._free, self.now) + round(len(data) / self._rate * 1e9)
            if self._rng.random() >= self._loss:
                self._carry(self._free + self._one_way, data, to_server=True)
        for data, _ in self.server.datagrams_to_send(self.now):
            self._carry(self.now + self._one_way, data, to_server=False)

    def _carry(self, at: int, data: bytes, *, to_server: bool) -> None:
        self._carried += 1
        heapq.heappush(self._coming, (at, self._carried, to_server, data))

    def _step(self) -> None:
        timers = [at for session in (self.client, self.server) if (at := session.next_timer()) is not None]
        self.now = max(self.now, min([*timers, *(self._coming[0][:1] if self._coming else ())]))
        while self._coming and self._coming[0][0] <= self.now:
            _, _, to_server, data = heapq.heappop(self._coming)
            target, source = (self.server, CLIENT) if to_server else (self.client, SERVER)
            target.receive([data], source, self.now)
        for session in (self.client, self.server):
            session.handle_timer(self.now)
            while session.next_event() is not None:
                pass
        self._flush()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "size", "one_way_ms"),
    some(
        [
            (1_000_000, 2_500_000, 20),
            (1_000_000, 2_500_000, 1),
            (10_000_000, 6_000_000, 1),
            (10_000_000, 6_000_000, 20),
        ],
        2,
    ),
)
def test_the_rate_of_a_path_is_found_where_windows_say_more(
    credentials_of: CredentialsOf, rate: int, size: int, one_way_ms: int
) -> None:
    """Nothing is lost here, so the window grows for as long as there is anything to send."""
    path = Path(credentials_of, rate=rate, one_way_ns=one_way_ms * MS)
    assert path.client.path_stats().delivery_rate is None
    path.send(size)
    stats = path.client.path_stats()
    assert stats.delivery_rate is not None
    assert 0.85 * rate < stats.delivery_rate <= 1.02 * rate
    assert stats.min_rtt_ns is not None
    assert stats.cwnd * 10**9 // stats.min_rtt_ns > 2 * rate
    assert path.server.path_stats().delivery_rate is None, "the other direction has sent nothing"


@pytest.mark.slow
def test_losses_do_not_make_it_more_than_the_path_takes(credentials_of: CredentialsOf) -> None:
    path = Path(credentials_of, rate=4_000_000, one_way_ns=5 * MS, loss=0.01)
    path.send(2_000_000, 500_000)
    found = path.client.path_stats().delivery_rate
    assert found is not None
    assert found < 1.1 * 4_000_000


def test_who_sends_little_at_a_time_measures_nothing(credentials_of: CredentialsOf) -> None:
    """Their sender is the limit, and not the path."""
    path = Path(credentials_of, rate=10_000_000, one_way_ns=20 * MS)
    for _ in range(20):
        path.send(10_000)
    assert path.client.path_stats().delivery_rate is None


def test_a_sample_begins_with_an_acknowledgement_and_ends_a_round_trip_and_enough_bytes_later() -> None:
    rate = DeliveryRate()
    rate.note(0, 0, rtt_ns=50 * MS, more=True)
    rate.note(0, 49 * MS, rtt_ns=50 * MS, more=True)
    rate.note(1000, 50 * MS, rtt_ns=50 * MS, more=True)  # the first: from here on
    rate.note(101_000, 99 * MS, rtt_ns=50 * MS, more=True)
    assert rate.rate is None
    rate.note(201_000, 100 * MS, rtt_ns=50 * MS, more=True)
    assert rate.rate == 200_000 * 20
    rate.note(202_000, 150 * MS, rtt_ns=50 * MS, more=True)  # too few bytes to say anything
    assert rate.rate == 4_000_000
    rate.note(301_000, 200 * MS, rtt_ns=50 * MS, more=True)
    assert rate.rate == min(4_000_000, 100_000 * 10)


def test_a_pause_ends_a_sample_and_the_last_one_before_it_counts() -> None:
    rate = DeliveryRate()
    for k in range(2):
        rate.note(k, k * MS, rtt_ns=0, more=True)
    rate.note(1_000_001, 21 * MS, rtt_ns=0, more=False)
    assert rate.rate == 50_000_000
    rate.note(1_000_001, 10_000 * MS, rtt_ns=0, more=True)
    rate.note(1_000_002, 10_001 * MS, rtt_ns=0, more=True)
    rate.interrupt()
    rate.note(9_000_000, 10_100 * MS, rtt_ns=0, more=True)
    assert rate.rate == 50_000_000


def test_the_rate_is_the_median_of_the_last_eight_samples() -> None:
    rate = DeliveryRate()
    at = total = 0
    rate.note(0, 0, rtt_ns=0, more=True)
    rate.note(total := 1, at := 1, rtt_ns=0, more=True)
    for size in (*[10**9] * 9, 10**6, 2 * 10**6, 3 * 10**6, 4 * 10**6, 5 * 10**6, 6 * 10**6, 7 * 10**6):
        rate.note(total := total + size, at := at + 1000 * MS, rtt_ns=0, more=True)
    assert rate.rate == 4 * 10**6
