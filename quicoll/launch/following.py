"""The files of events of a run's processes, read while they are written.

Of what ranks write only what is asked for is parsed: it is a line for every step, and there may be many in a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["CoordinatorEvents", "WorkerEvents"]


class _Tail:
    """What is written to one file from now on; it need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[bytes]:
        """Return the lines that are new. One that is still being written is left for the next call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


class CoordinatorEvents:
    """What the coordinator of a run tells from now on, but for committed steps."""

    def __init__(self, path: Path) -> None:
        """Begin at the present end of its file of events.

        Args:
            path: The file.
        """
        self._tail = _Tail(path)

    def read(self) -> list[dict[str, Any]]:
        """Return the new events, the oldest first."""
        return [json.loads(line) for line in self._tail.lines() if _COMMITTED not in line]


class WorkerEvents:
    """What the processes of one worker tell from now on.

    Attributes:
        committed: Whether the present process has committed a step, as far as it was read.
        heard: Whether any of them has told anything, as far as it was read: each that joins says where it listens.
    """

    def __init__(self, path: Path) -> None:
        """Begin at the present end of its file of events.

        Args:
            path: The file.
        """
        self._tail = _Tail(path)
        self._kept: list[dict[str, Any]] = []
        self.committed = False
        self.heard = False

    def begin(self) -> None:
        """Forget what an earlier process has committed: a new one is about to start."""
        self.look()
        self.committed = False

    def look(self) -> None:
        """Read on; what is found is kept for `read`."""
        for line in self._tail.lines():
            self.heard = True
            if _COMMITTED in line:
                self.committed = True
            elif any(mark in line for mark in _TOLD):
                self._kept.append(json.loads(line))

    def read(self) -> list[dict[str, Any]]:
        """Return the new events that are told to who watches, the oldest first."""
        self.look()
        kept, self._kept = self._kept, []
        return kept


def _mark(kind: str) -> bytes:
    """The bytes by which the line of such an event is known (`quicoll.observability.events.event_json`)."""
    return f'"kind": "{kind}"'.encode()


_COMMITTED = _mark("step_committed")
_TOLD = [_mark(kind) for kind in ("view_installed", "step_aborted", "state_received")]
