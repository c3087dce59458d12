"""What happened, for people and programs: events with a monotonic time, one observer interface, a JSON-lines writer.

Observers are called on the engine's loop and must be quick: no heartbeat is sent meanwhile, and one that waits for
long ends the calls of its rank (quicoll.engine.runtime). One that raises is logged and does no harm.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from quicoll.errors import LocalError
from quicoll.observability.flight import FlightRecorder
from quicoll.observability.logs import level_of_event
from quicoll.observability.sentences import sentence

__all__ = ["Event", "JsonLines", "Observer", "Observers", "event_json", "make_directory"]

log = logging.getLogger("quicoll.events")

_ENCODE = json.JSONEncoder(default=str).encode
_IN_EACH_STEP = ("step_committed",)
_LATE_S = 0.02  # until that is written at the latest


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. docs/settings.md says which kinds come of ranks, which of the coordinator.

    Kinds and fields: listening(address, seed); node_joined(peer, incarnation); view_proposed(view, nodes);
    view_installed(view, world_size, nodes, rank); shared_memory(view, used, reason, ranks);
    lane_used(view, lane, peer, address); lane_shut(view, lane, peer, used, reason); lane_lost(lane, reason);
    view_ended(view, cause, lost); step_committed(step, view);
    step_aborted(step, view, cause, lost); peer_lost(peer, cause, silent_for, left); held(cause);
    path_changed(peer, address, before);
    state_received(from_rank, step, confirmed_by); state_handed(step, nodes, tensor, from_node);
    state_differs(step, nodes, tensor, from_node); state_torn(step, cause); state_learning(from_node, chunks);
    state_learned(seconds, passes, chunks, cause); standing_by(from_node); own_state_kept(names, own_step, step);
    shards_received(blocks, view);
    fault(what); refused(reason); straggler(rank, peer, op, seconds, view); job_done(step, nodes); leads(token, seed);
    stands_by(cause, leader); nodes_forgotten(nodes); scale_asked(world_size, leave); node_dismissed(peer, cause);
    node_released(peer); dismissed(reason); progress(step, epoch, step_s, communication_share, data_share,
    samples_per_s);
    tiers_changed(version, active, cold); tiers_refused(version, nodes, reason); piece_refused(state, peer, reason);
    certificates_rotated(fingerprint); certificate_denied(fingerprint); flight_unwritten(reason);
    metrics_served(address).
    With `transport_events` also those of quicoll.observability.transport.

    Attributes:
        t_ns: When: the loop's monotonic clock (on Linux the same for all processes of a host), or virtual time.
        node: Where: the node's name.
        kind: What.
        fields: The kind's fields.
    """

    t_ns: int
    node: str
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


Observer: TypeAlias = Callable[[Event], None]


class Observers:
    """Gives each event to every observer, and to the log."""

    def __init__(
        self, node: str, now_ns: Callable[[], int], *observers: Observer | None, flight: FlightRecorder | None = None
    ) -> None:
        """Name those who get the events.

        Args:
            node: Where the events happen.
            now_ns: The loop's clock.
            observers: Called in this order; None is left out.
            flight: Gets them as well; None where no flight recorder is kept.
        """
        self.flight = flight
        self._node = node
        self._now_ns = now_ns
        self._observers = [observer for observer in (*observers, flight) if observer is not None]

    def emit(self, kind: str, **fields: Any) -> None:
        """Give an event to every observer, and to the log in a sentence, at the level of its kind.

        Args:
            kind: One of those that Event lists.
            fields: The kind's fields.
        """
        self.give(Event(self._now_ns(), self._node, kind, fields))

    def give(self, event: Event) -> None:
        """Give on an event that has happened, at its own time.

        Args:
            event: It.
        """
        kind, fields = event.kind, event.fields
        level = level_of_event(kind)
        if log.isEnabledFor(level):
            about = {"node": event.node, "kind": kind, "fields": fields}
            log.log(level, "%s: %s", event.node, sentence(kind, fields), extra=about)
        for observer in self._observers:
            try:
                observer(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # sys.exit() too: it would end the engine and not the program
                log.exception("an observer failed on %s", kind)

    def close(self) -> None:
        """Close the files among the observers."""
        for observer in self._observers:
            if isinstance(observer, JsonLines | FlightRecorder):
                observer.close()


class JsonLines:
    """Appends one JSON object a line: {"t": seconds, "time": date and time, "node": ..., "kind": ..., fields...}.

    Whole lines go together, so that a reader sees half a line of a killed process at most at the very end. They are
    written at once; but `step_committed`, which comes in each step and on the way of its answer, within 20 ms, or with
    the line after it: to write it at once took a fifteenth of an empty step, in three processes.
    """

    def __init__(self, path: str | Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Open the file, and make its directory unless it is there.

        Args:
            path: The file; what is in it stays.
            now: Date and time, aware.
        Raises:
            LocalError: It cannot be written.
        """
        path = Path(path)
        self._now = now
        self._waiting: deque[tuple[Event, datetime]] = deque()  # in order
        make_directory(path.parent, "events")
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalError(f"cannot write events to {path}: {error.strerror or error}") from error

    def __call__(self, event: Event) -> None:
        """Write an event; after `close` it is dropped."""
        if self._fd < 0:
            return
        self._waiting.append((event, self._now()))
        if event.kind not in _IN_EACH_STEP:
            self._write()
        elif len(self._waiting) == 1:
            try:
                asyncio.get_running_loop().call_later(_LATE_S, self._write_late)
            except RuntimeError:  # no loop runs here
                self._write()

    def _write(self) -> None:
        lines = []
        while self._waiting:
            event, time = self._waiting.popleft()
            lines.append(event_json(event, time) + "\n")
        if lines and self._fd >= 0:
            os.write(self._fd, "".join(lines).encode())

    def _write_late(self) -> None:
        try:
            self._write()
        except OSError:
            log.exception("an event was not written")

    def close(self) -> None:
        """Write what waits, and close the file; another time it does nothing."""
        if self._fd >= 0:
            self._write_late()
            os.close(self._fd)
            self._fd = -1


def event_json(event: Event, time: datetime) -> str:
    """Return an event as a line of a file of events has it.

    Args:
        event: What happened.
        time: Date and time, aware.
    """
    when = time.isoformat(timespec="milliseconds")
    line = {"t": event.t_ns / 1e9, "time": when, "node": event.node, "kind": event.kind, **event.fields}
    return _ENCODE(line)


def make_directory(path: str | Path, what: str) -> None:
    """Make a directory for files that are written while the job runs, unless it is there.

    Args:
        path: The directory.
        what: What it is for, for the error.
    Raises:
        LocalError: It cannot be made, or nothing can be written there.
    """
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise LocalError(f"cannot write {what} to {directory}: {error.strerror or error}") from error
