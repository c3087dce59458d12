"""The events of a run: a reader of the growing files, and how long each recovery took.

All times are CLOCK_MONOTONIC in seconds, which is one clock for all processes of a machine, so that a fault seen by one
process and its consequences seen by others can be subtracted.

    fault ----------------> aborted -----------------> resumed ............... rejoined
      |  lost_after, then     |  new view, the step      |  the next committed
      |  the last of the      |  begun again             |  step of the others
      |  others has noticed
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["EventReader", "FaultMark", "Moment", "Recovery", "measure_recovery"]

_NOTICED = ("step_aborted", "view_ended")


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of one process; `t` in seconds."""

    t: float
    node: str
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMark:
    """Something that was done to `node` at `t`: "killed" or "network cut"."""

    t: float
    node: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The recovery of the other workers from a fault, in seconds; None for what did not happen.

    Attributes:
        cause: Of the fault.
        rank: The node's rank when it happened.
        node: The node that it happened to.
        abort_s: From the fault until the last of the others had aborted.
        resume_s: From there to the next committed step.
        rejoined_s: From the fault until a view held the node again.
    """

    cause: str
    rank: int | None
    node: str
    abort_s: float | None
    resume_s: float | None
    rejoined_s: float | None

    @property
    def complete(self) -> bool:
        """True if the others went on and the node came back."""
        return None not in (self.abort_s, self.resume_s, self.rejoined_s)


class EventReader:
    """Reads event files while they are written; each call of `read` returns what is new, in order of time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Moment]:
        """New events of all files; a line that is not complete yet is left for the next call."""
        fresh: list[Moment] = []
        for path in sorted(self._directory.glob("*.jsonl")):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            fresh.extend(_moment(line) for line in whole.splitlines() if line.strip())
        return sorted(fresh, key=lambda moment: (moment.t, moment.node))


def measure_recovery(moments: Iterable[Moment], fault: FaultMark, *, nodes: Sequence[str]) -> Recovery:
    """Follow one fault through the events of the workers.

    Args:
        moments: All events, in any order.
        fault: What was done.
        nodes: The workers.
    Returns:
        How long each part of the recovery took.
    """
    history = sorted(moments, key=lambda moment: moment.t)
    members: Sequence[str] | None = next(
        (m.fields["nodes"] for m in reversed(history) if m.kind == "view_installed" and m.t <= fault.t), None
    )
    rank = list(members).index(fault.node) if members is not None and fault.node in members else None
    # A worker that was not in the view with the node could not lose it.
    others = [node for node in nodes if node != fault.node and (members is None or node in members)]
    after = [moment for moment in history if moment.t > fault.t]
    noticed = [_first(after, (node,), _NOTICED) for node in others]
    seen = [moment.t for moment in noticed if moment is not None]
    if not seen or len(seen) < len(noticed):
        return Recovery(cause=fault.cause, rank=rank, node=fault.node, abort_s=None, resume_s=None, rejoined_s=None)
    aborted = max(seen)
    later = [moment for moment in after if moment.t > aborted]
    resumed = _first(later, others, ("step_committed",))
    joined = [m for m in later if m.kind == "view_installed" and m.node in others and fault.node in m.fields["nodes"]]
    return Recovery(
        cause=fault.cause,
        rank=rank,
        node=fault.node,
        abort_s=aborted - fault.t,
        resume_s=resumed.t - aborted if resumed is not None else None,
        rejoined_s=joined[0].t - fault.t if joined else None,
    )


def _first(moments: Iterable[Moment], nodes: Sequence[str], kinds: Sequence[str]) -> Moment | None:
    return next((moment for moment in moments if moment.node in nodes and moment.kind in kinds), None)


def _moment(line: bytes) -> Moment:
    fields: dict[str, Any] = json.loads(line)
    fields.pop("time", None)  # one clock is enough
    return Moment(float(fields.pop("t")), str(fields.pop("node")), str(fields.pop("kind")), fields)
