"""The timeline: generators of one seed, and the trace."""

from __future__ import annotations

from typing import Any

import pytest

from quicoll_transport.sim import Timeline


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(1)


def test_generators_depend_on_the_seed_and_the_label_alone() -> None:
    def draws(seed: int, label: str) -> list[float]:
        rng = Timeline(seed).rng(label)
        return [rng.random() for _ in range(3)]

    one = Timeline(1)
    one.rng("b").random()
    assert [one.rng("a").random() for _ in range(2)] == [draws(1, "a")[0]] * 2
    assert len({draws(seed, label)[0] for seed in (1, 2) for label in ("a", "b")}) == 4


def test_the_digest_tells_apart_time_kind_who_what_and_bytes() -> None:
    def digest(t_ns: int, *note: Any) -> str:
        timeline = Timeline(1)
        timeline.now_ns += t_ns
        timeline.note(*note)
        return timeline.digest

    notes = [(0, "k", "w", "x", b"d"), (1, "k", "w", "x", b"d"), (0, "l", "w", "x", b"d"), (0, "k", "v", "x", b"d")]
    notes += [(0, "k", "w", "y", b"d"), (0, "k", "w", "x", b"e"), (0, "k", "w", "x"), (0, "k", "w", "x", b"dd")]
    assert len({digest(*note) for note in notes}) == len(notes)
    assert digest(*notes[0]) == digest(*notes[0])


def test_a_digest_changes_from_the_first_event_on(timeline: Timeline) -> None:
    assert timeline.digest == Timeline(2).digest, "nothing has happened yet"
    timeline.note("k", "w", "x")
    assert (timeline.digest != Timeline(1).digest, timeline.events) == (True, 1)


def test_a_recorder_is_told_time_since_the_beginning_and_details_and_changes_nothing(timeline: Timeline) -> None:
    told: list[tuple[int, str, str, Any]] = []
    other = Timeline(1)
    with timeline.recording(lambda *entry: told.append(entry)):
        for each in (timeline, other):
            each.now_ns += 5
            each.note("a", "w", "text")
            each.note("b", "w", "text", detail={"field": 1})
    timeline.note("c", "w", "unheard")
    assert told == [(5, "a", "w", "text"), (5, "b", "w", {"field": 1})]
    other.note("c", "w", "unheard")
    assert timeline.digest == other.digest
