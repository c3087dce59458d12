"""Storms over planes and stock aioquic in all four pairs (tests/helpers/quic_storm.py says what must hold).

QUICOLL_TEST_STORMS=100 takes a hundred times as many seeds.
"""

from __future__ import annotations

import os

import pytest
from quic_storm import PAIRS, StormError, run_storm

from quicoll_transport.quic.flow import Allowance
from quicoll_transport.quic.outbound import OutboundStreams

FACTOR = int(os.environ.get("QUICOLL_TEST_STORMS", "1"))
SEEDS = (0, 1, 2, 3, 20)


@pytest.mark.slow
@pytest.mark.timeout(60 + 60 * FACTOR)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_what_was_sent_arrives_and_nothing_is_left_behind(pair: tuple[str, str]) -> None:
    """Among them one with a Retry, and moves of the client: by a NAT, and by its own will."""
    storms = [run_storm(seed, pair=pair) for seed in (SEEDS if FACTOR == 1 else range(5 * FACTOR))]
    assert any(storm.retry for storm in storms)
    assert any(storm.repaired_bytes for storm in storms) == (pair == PAIRS[0]), "take other seeds"
    assert [any(storm.moves[meant] for storm in storms) for meant in (False, True)] == [True, True], "take other seeds"


@pytest.mark.slow
@pytest.mark.timeout(60 + 60 * FACTOR)
def test_datagrams_in_runs_and_one_by_one_lead_to_the_same_bytes() -> None:
    """Every datagram of both planes is the same, and so is when it is sent: no decision depends on a batch."""
    for seed in (15, 97, *range(1000, 1000 + 5 * FACTOR)):  # with the first two much is made from parity
        storms = [run_storm(seed, pair=PAIRS[0], batched=batched) for batched in (True, False)]
        assert storms[0].digest == storms[1].digest, seed
        assert storms[0].datagrams > 20


def test_a_storm_notices_bytes_that_are_not_those_that_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    place = run_storm.__globals__["PlaneSide"].stream_arrived

    def spoil(self: object, stream: object) -> None:
        place(self, stream)
        for data in self.received.values():
            if len(data) > 100:
                data[50] ^= 1

    monkeypatch.setattr(run_storm.__globals__["PlaneSide"], "stream_arrived", spoil)
    with pytest.raises(StormError, match=r"was altered[^$]*--first 3 --seeds 1"):
        run_storm(3)


@pytest.mark.interpreted
def test_a_storm_notices_a_stream_that_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutboundStreams, "on_lost", lambda self, stream, start, stop, *, fin: None)
    with pytest.raises(StormError, match=r"it takes too long|held|idle timeout"):
        run_storm(3)


@pytest.mark.interpreted
def test_a_storm_notices_a_decision_that_depends_on_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is raised at the packet that makes that due, instead of when it is told."""

    def take(self: Allowance, nbytes: int) -> bool:
        self.taken += nbytes
        if self.limit - self.taken >= self.window // 2:
            return False
        self.limit = self.taken + self.window
        return True

    monkeypatch.setattr(Allowance, "take", take)
    monkeypatch.setattr(Allowance, "raised", lambda self: self.limit)
    digests = [run_storm(1000, pair=PAIRS[0], batched=batched).digest for batched in (True, False)]
    assert digests[0] != digests[1]
