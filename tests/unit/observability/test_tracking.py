"""Figures for an experiment tracker: what events add up to, in which order rows come, and what a tracker cannot do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quicoll.errors import LocalError
from quicoll.observability import tracking
from quicoll.observability.events import Event
from quicoll.observability.tracking import Tracker

SECOND = 1_000_000_000
NEVER = 3600.0  # what is logged is logged at the end, all at once


class Log:
    """A tracker's function; `fails` at its first calls."""

    def __init__(self, fails: int = 0) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.called = threading.Event()
        self.fails = fails

    def __call__(self, figures: dict[str, float], *, step: int) -> None:
        self.called.set()
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the tracker's server is away")
        self.rows.append((step, figures))


def event(kind: str, *, at: float = 0.0, **fields: Any) -> Event:
    return Event(round(at * SECOND), "worker-0", kind, fields)


def test_events_add_up_to_one_row_at_the_last_committed_step() -> None:
    log = Log()
    with Tracker(log, every=NEVER) as tracker:
        tracker(event("view_installed", view=3, world_size=2, nodes=["a", "b"], rank=0))
        for step in (1, 2, 3):
            tracker(event("step_committed", at=step / 2, step=step, view=3))
        tracker(event("step_aborted", step=4, view=3, cause="b was lost", lost=["b"]))
        tracker(event("straggler", rank=1, peer="b", op="all_reduce#0", seconds=0.25, view=3))
        tracker(event("peer_lost", peer="b", cause="silent", silent_for=2.0))
        shares = {"communication_share": 0.25, "data_share": 0.0}
        tracker(event("progress", step=3, epoch=0, step_s=0.5, samples_per_s=8.0, **shares))
        tracker(event("view_ended", view=3, cause="b was lost", lost=["b"]))
    assert log.rows == [
        (
            3,
            {
                "quicoll/view": 3.0,
                "quicoll/world_size": 0.0,
                "quicoll/step_interval_s": 0.5,
                "quicoll/aborted": 1.0,
                "quicoll/late_s": 0.25,
                "quicoll/lost": 1.0,
                "quicoll/step_s": 0.5,
                "quicoll/communication_share": 0.25,
                "quicoll/data_share": 0.0,
                "quicoll/samples_per_s": 8.0,
            },
        )
    ]


def test_a_row_has_what_is_new_and_totals_go_on() -> None:
    summary = tracking._Summary()
    for at, step in ((1, 1), (2, 2)):
        summary.take(event("step_committed", at=at, step=step, view=1))
    summary.take(event("step_aborted", step=3, view=1, cause="", lost=[]))
    assert summary.row(last=False) == ({"quicoll/aborted": 1.0, "quicoll/step_interval_s": 1.0}, 2)
    assert summary.row(last=False) is None
    summary.take(event("step_aborted", step=3, view=1, cause="", lost=[]))
    summary.take(event("step_committed", at=6, step=3, view=1))
    assert summary.row(last=True) == ({"quicoll/aborted": 2.0, "quicoll/step_interval_s": 4.0}, 3)


def test_nothing_is_logged_before_a_step_is_known() -> None:
    summary = tracking._Summary()
    summary.take(event("view_installed", view=1, world_size=4, nodes=[], rank=0))
    assert summary.row(last=False) is None
    summary.reached(7)
    assert summary.row(last=False) == ({"quicoll/view": 1.0, "quicoll/world_size": 4.0}, 7)


def test_rows_of_the_user_come_first_in_their_order_and_steps_never_go_back() -> None:
    log = Log()
    with Tracker(log, every=NEVER) as tracker:
        for step in (1, 2):
            tracker.log({"loss": np.float32(1 / step)}, step=step)
            tracker(event("step_committed", at=step, step=step, view=1))
        tracker.log({"loss": 0.25}, step=3)
    assert log.rows == [
        (1, {"loss": 1.0}),
        (2, {"loss": 0.5}),
        (3, {"loss": 0.25}),
        (3, {"quicoll/step_interval_s": 1.0}),
    ]


def test_it_is_called_again_and_again_by_a_thread_of_its_own() -> None:
    threads = []
    called = threading.Event()

    def log(figures: dict[str, float], *, step: int) -> None:
        threads.append(threading.current_thread())
        called.set()

    with Tracker(log, every=0.001) as tracker:
        for step in (1, 2):
            called.clear()
            tracker.log({"loss": 1.0}, step=step)
            assert called.wait(60)
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


def test_a_tracker_that_fails_is_told_of_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(fails=2)
    with caplog.at_level(logging.ERROR, "quicoll"), Tracker(log, every=NEVER) as tracker:
        for step in (1, 2, 3):
            tracker.log({"loss": 1.0}, step=step)
    assert log.rows == [(3, {"loss": 1.0})]
    assert [record.getMessage() for record in caplog.records] == [
        "the experiment tracker failed: figures of step 1 are lost"
    ]


def test_a_tracker_that_hangs_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "END_S", 0.0)
    released = threading.Event()
    tracker = Tracker(lambda figures, step: released.wait(60), every=NEVER)
    tracker.log({"loss": 1.0}, step=1)
    tracker.close()
    assert "they may be lost" in caplog.text
    released.set()
    tracker._thread.join(60)


def test_what_waits_is_bounded_and_what_was_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "MOST_ROWS", 2)
    log = Log()
    with Tracker(log, every=NEVER) as tracker:
        for step in range(5):
            tracker.log({"loss": 0.0}, step=step)
    assert log.rows == [(3, {"loss": 0.0}), (4, {"loss": 0.0}), (4, {"quicoll/dropped": 3.0})]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Tracker(object()), "run.log, and not run"),
        (lambda: Tracker(print, every=0.0), "more than 0, not 0.0"),
        (lambda: Tracker(print, every=float("nan")), "not nan"),
    ],
)
def test_what_cannot_work_is_said_at_once(make: Callable[[], Tracker], says: str) -> None:
    with pytest.raises(LocalError, match=says):
        make()


def test_a_figure_that_is_no_number_is_refused_where_it_is_given() -> None:
    with Tracker(Log(), every=NEVER) as tracker, pytest.raises(LocalError, match="'loss' is not a number: 'low'"):
        tracker.log({"loss": "low"}, step=1)


def test_a_child_of_a_fork_waits_for_no_lock_that_nobody_there_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        def __enter__(self) -> None:
            raise AssertionError("it would wait for ever")

        def __exit__(self, *_: object) -> None: ...

    log, wrong = Log(), dict[str, Any](loss=object())
    with Tracker(log, every=NEVER) as tracker, monkeypatch.context() as child:
        child.setattr(tracking.os, "getpid", lambda: -1)
        child.setattr(tracker, "_lock", Held())
        tracker.log({"loss": 1.0}, step=1)
        tracker(Event(1, "a", "step_aborted", {}))
        with pytest.raises(LocalError, match="not a number"):
            tracker.log(wrong, step=1)  # what is refused in the parent, too
        tracker.close()
    assert log.rows == []
