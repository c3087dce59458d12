"""A rank's figures for an experiment tracker (Weights & Biases, MLflow, or any other that has a function to log with).

The tracker's packages are not known here: what is called is a function `(figures, step=...)`, which may wait for a
network. So a thread of the tracker's own calls it, and what comes meanwhile is added up:

    an event            a few additions, on the engine's thread; nobody waits
    a row of the user   is appended, in order
    every `every` s     rows first, as they came; then one with what the events add up to, at the last step known
    no step is known    what the events add up to is kept until there is one, or until the end
    the function raises it is logged, once in a row of failures; what it was to have is lost, the next is tried
    `close`             the rest is given, END_S are waited for that: a tracker that hangs holds no program up
    a child of a fork   has no such thread, and takes and gives nothing: who held the lock when it began is not there to
                        let it go

Invariants: the function is called by one thread, one call after the other; MOST_ROWS wait at most, the oldest are left
out first, and are counted.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Self, SupportsFloat

from quicoll.errors import LocalError

if TYPE_CHECKING:
    from types import TracebackType

    from quicoll.observability.events import Event

__all__ = ["Tracker"]

log = logging.getLogger("quicoll")

MOST_ROWS: Final = 4096
END_S: Final = 5.0
_PROGRESS: Final = ("step_s", "communication_share", "data_share", "samples_per_s", "loss")

Row = tuple[dict[str, float], int]


class Tracker:
    """Gives what happens to a rank, and figures of yours, to an experiment tracker; an observer, and a context manager.

        with quicoll.Tracker(run.log) as tracker:                 # run = wandb.init(...)
            async with quicoll.join(observer=tracker) as job:
                ...
                tracker.log({"loss": loss}, step=job.committed_step)

    Figures have names that begin with "quicoll/": `world_size` (0 while there is no view), `view`; `step_interval_s`,
    the mean time from one commit to the next; `aborted`, `lost` and `late_s`, totals since the beginning of steps that
    were not committed, of ranks that were lost, and of seconds that others waited for a late one; what the event
    `progress` says (`communication_share`, ...); `dropped`, rows of yours that were left out because too many waited.
    """

    def __init__(self, log: Callable[..., object], *, every: float = 1.0) -> None:
        """Begin; nothing is called before there is something to say.

        Args:
            log: Called as log(figures, step=number), with a dictionary of floats, by a thread of the tracker's:
                the `log` of wandb's run, mlflow's `log_metrics` with its `run_id`, or a function of yours.
            every: Seconds from one call to the next.
        Raises:
            LocalError: `log` cannot be called, or `every` is not a positive number of seconds.
        """
        if not callable(log):
            raise LocalError(f"a tracker needs a function to call, not {type(log).__name__}: run.log, and not run")
        if not (math.isfinite(every) and every > 0):
            raise LocalError(f"a tracker is called every so many seconds, more than 0, not {every!r}")
        self._call = log
        self._every = every
        self._lock = threading.Lock()
        self._rows: deque[Row] = deque()
        self._summary = _Summary()
        self._failing = False
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="quicoll-tracker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Take an event: `quicoll.join(observer=tracker)`."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._summary.take(event)

    def log(self, figures: Mapping[str, SupportsFloat], *, step: int) -> None:
        """Log figures of yours, in one order with those of the job; returns at once. Nothing in a child of a fork.

        wandb drops figures of a step that is before the last one, which happens where two threads log to one run.

        Args:
            figures: Numbers by their names; scalar tensors and arrays will do.
            step: The step that they are of.
        Raises:
            LocalError: A figure is not a number.
        """
        row = {name: _number(name, value) for name, value in figures.items()}
        if os.getpid() != self._pid:
            return
        with self._lock:
            if len(self._rows) >= MOST_ROWS:
                self._rows.popleft()
                self._summary.add("dropped", 1)
            self._rows.append((row, step))
            self._summary.reached(step)

    def close(self) -> None:
        """Give the rest, and wait for that, five seconds at most. Another call does nothing."""
        if os.getpid() == self._pid and not self._closing.is_set():
            self._closing.set()
            self._thread.join(END_S)
            if self._thread.is_alive():
                log.warning("the experiment tracker took more than %g s for the last figures: they may be lost", END_S)

    def _run(self) -> None:
        while not self._closing.wait(self._every):
            self._give(last=False)
        self._give(last=True)

    def _give(self, *, last: bool) -> None:
        with self._lock:
            rows = list(self._rows)
            self._rows.clear()
            row = self._summary.row(last=last)
        for figures, step in [*rows, *([row] if row is not None else [])]:
            try:
                self._call(figures, step=step)
            except Exception:  # whatever a tracker raises: a job does not end for its figures
                if not self._failing:
                    log.exception("the experiment tracker failed: figures of step %d are lost", step)
                self._failing = True
            else:
                self._failing = False


class _Summary:
    """What the events add up to since the last row."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._totals = {"aborted": 0.0, "lost": 0.0, "late_s": 0.0, "dropped": 0.0}
        self._new: dict[str, float] = {}
        self._committed = 0
        self._committed_ns: int | None = None  # when the last of the commits before these was
        self._latest_ns = 0

    def take(self, event: Event) -> None:
        fields = event.fields
        match event.kind:
            case "step_committed":
                self._commit(event.t_ns, fields["step"])
            case "step_aborted":
                self.add("aborted", 1)
            case "peer_lost":
                self.add("lost", 1)
            case "straggler":
                self.add("late_s", fields["seconds"])
            case "view_installed":
                self._new |= {"view": float(fields["view"]), "world_size": float(fields["world_size"])}
            case "view_ended":
                self._new["world_size"] = 0.0
            case "progress":
                self._new |= {name: float(fields[name]) for name in _PROGRESS if fields.get(name) is not None}

    def add(self, name: str, value: float) -> None:
        self._totals[name] += value
        self._new[name] = self._totals[name]

    def reached(self, step: int) -> None:
        self._step = step if self._step is None else max(self._step, step)

    def row(self, *, last: bool) -> Row | None:
        """What is new, at the last step that is known; None where nothing is. last: no step will be known any more."""
        if self._step is None and not last:
            return None
        if self._committed and self._committed_ns is not None:
            self._new["step_interval_s"] = (self._latest_ns - self._committed_ns) / 1e9 / self._committed
        if self._committed:
            self._committed, self._committed_ns = 0, self._latest_ns
        new, self._new = self._new, {}
        return ({f"quicoll/{name}": value for name, value in new.items()}, self._step or 0) if new else None

    def _commit(self, t_ns: int, step: int) -> None:
        if self._committed_ns is None:  # the first: there is no time before it
            self._committed_ns = t_ns
        else:
            self._committed += 1
        self._latest_ns = t_ns
        self.reached(step)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise LocalError(f"the figure {name!r} is not a number: {value!r:.100}") from error
