"""Events read as sentences in the log."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from quicoll.observability.events import Observers
from quicoll.observability.sentences import sentence


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("listening", {"address": "127.0.0.1:1"}, "listens at 127.0.0.1:1"),
        ("listening", {"address": "127.0.0.1:1", "seed": 7}, "listens at 127.0.0.1:1; the job's seed is 7"),
        (
            "view_installed",
            {"view": 2, "world_size": 2, "rank": 0, "nodes": ["a", "b"]},
            "rank 0 of 2 in view 2: a, b",
        ),
        ("view_installed", {"view": 2, "world_size": 2, "nodes": ["a", "b"]}, "view 2 is at work, 2 ranks: a, b"),
        ("view_ended", {"view": 2, "cause": "b was lost", "lost": ["b"]}, "view 2 is over: b was lost"),
        (
            "step_aborted",
            {"step": 11, "view": 2, "cause": "b has finished and left the job", "lost": ["b"]},
            "step 11 was not committed: b has finished and left the job",
        ),
        (
            "peer_lost",
            {"peer": "b", "cause": "b has finished and left the job", "left": True},
            "b has finished and left the job",
        ),
        ("peer_lost", {"peer": "b", "cause": "silent for 2 s", "silent_for": 2.0}, "lost b: silent for 2 s"),
        (
            "straggler",
            {"rank": 1, "peer": "b", "op": "barrier#3", "seconds": 0.5, "view": 1},
            "rank 1 (b) called barrier#3 0.500 s after most",
        ),
        (
            "state_learned",
            {"seconds": 3.21, "passes": 2, "chunks": 70, "cause": ""},
            "has learned 70 chunks of the state in 3.2 s",
        ),
        (
            "state_learned",
            {"seconds": 3.21, "passes": 0, "chunks": 9, "cause": "lost: silent for 2 s"},
            "has learned 9 chunks of the state in 3.2 s, and no more: lost: silent for 2 s",
        ),
        ("link_changed", {"peer": "b", "state": "up"}, "link changed peer=b state=up"),
        ("held", {}, "held"),
    ],
)
def test_an_event_is_one_sentence(kind: str, fields: dict[str, Any], said: str) -> None:
    assert sentence(kind, fields) == said


def test_every_kind_that_the_reference_has_is_a_sentence() -> None:
    _, _, below = (Path(__file__).parents[3] / "docs" / "settings.md").read_text().partition("\n## Events\n")
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| (.*) \|$", below.partition("### Of the transport")[0], re.MULTILINE)
    assert len(rows) > 30
    for kind, told in rows:
        fields: dict[str, Any] = dict.fromkeys(re.findall(r"`(\w+)`", told), 1)
        assert not sentence(kind, fields).startswith(kind.replace("_", " ") + " "), kind


def test_the_log_has_the_node_and_the_sentence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quicoll"):
        Observers("worker-0", lambda: 0).emit("held", cause="1 of 2 nodes are here: worker-0 {0} %s")
    assert [record.getMessage() for record in caplog.records] == [
        "worker-0: waits: 1 of 2 nodes are here: worker-0 {0} %s"
    ]
