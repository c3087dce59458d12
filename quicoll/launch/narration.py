"""What became of a job after a loss, in one line each: for `quicoll run` and `quicoll demo`.

A loop that begins an aborted step again says nothing of it, nor does a worker that comes back; so who watches a run
would not see that it has gone on as promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quicoll.membership.coordinator.admission import name_list

__all__ = ["Narrator", "step_aborted_line", "view_line"]


def view_line(view: int, nodes: Sequence[str]) -> str:
    """Return that a view is at work.

    Args:
        view: Its number.
        nodes: Its members.
    """
    return f"view {view}: {len(nodes)} {'member' if len(nodes) == 1 else 'members'}, {name_list(nodes)}"


def step_aborted_line(step: int, view: int, cause: str) -> str:
    """Return that a step was committed nowhere.

    Args:
        step: Its number, as ranks count.
        view: The view that it was begun in.
        cause: Why.
    """
    return f"step {step} aborted in view {view}: {cause}"


class Narrator:
    """Takes the events of all workers of a run, and gives each thing once, whoever tells it first.

    The first view of the run is as everybody expects it, and is left out; so is what is handed over at the start.
    """

    def __init__(self) -> None:
        """Begin with nothing told."""
        self._views: set[int] = set()
        self._aborted: set[tuple[int, int]] = set()

    def line(self, event: Mapping[str, Any]) -> str:
        """Return what is to be said of an event of a worker, "" for nothing.

        Args:
            event: As in a file of events.
        """
        match event["kind"]:
            case "view_installed" if event["view"] not in self._views:
                self._views.add(event["view"])
                return view_line(event["view"], event["nodes"]) if len(self._views) > 1 else ""
            case "step_aborted" if (event["step"], event["view"]) not in self._aborted:
                self._aborted.add((event["step"], event["view"]))
                return step_aborted_line(event["step"], event["view"], event["cause"])
            case "state_received" if event["step"]:
                return f"{event['node']} has received the state of step {event['step']}"
        return ""
