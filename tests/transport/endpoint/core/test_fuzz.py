"""Slices of the fuzzer of datagrams (docs/internals/fuzzing.md), and that its oracle can fail.

QUICOLL_TEST_DATAGRAM_INPUTS=1000000 throws so many.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from quicoll_fuzz.datagrams import run_datagram_episode
from quicoll_fuzz.world import Finding

from quicoll_transport.quic.connection_ids import PeerIds
from quicoll_transport.quic.gate import Gate

INPUTS = int(os.environ.get("QUICOLL_TEST_DATAGRAM_INPUTS", "3000"))


def test_datagrams_of_nobody_change_nothing() -> None:
    tally: dict[str, int] = {}
    run_datagram_episode(1, 0, INPUTS, tally)
    assert tally["inputs"] >= INPUTS
    assert min(tally["runs"], tally["answers"], tally["messages"]) > 0


def test_the_same_seed_is_the_same_run() -> None:
    tallies: list[dict[str, int]] = [{}, {}]
    for tally in tallies:
        run_datagram_episode(2, 7, 400, tally)
    assert tallies[0] == tallies[1]


@pytest.mark.interpreted
def test_a_reset_that_is_believed_without_its_whole_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerIds, "is_reset", lambda self, data: self.token is not None and data[-16:-12] in self.token)
    monkeypatch.setattr("quicoll_transport.endpoint.core.table.Table.disowned", first_of)
    with pytest.raises(Finding, match="connection was lost"):
        run_datagram_episode(1, 0, 20_000, {})


def first_of(table: Any, data: memoryview) -> Any:
    return next(iter(table), None)


def test_answers_that_are_larger_than_what_drew_them_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "disown", lambda self, data: bytes(4 * len(data)))
    with pytest.raises(Finding, match="bytes to"):
        run_datagram_episode(1, 0, 20_000, {})
