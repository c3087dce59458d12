"""What is durable of evidence (evidence.py): who is left out or on probation, and who is still suspected of what.

Durations, not dates. A coordinator that starts again does not know for how long there was none: the clock that it was
timed by may have begun anew, and the date may have been set. So what a node had still to serve counts from the start
again, and half of it is remitted: with every start less is left, so no number of starts keeps a node out for ever, and
none lets it in at once. Probation goes by time that ended in commits, which stands still while there is no coordinator.

One record that replaces the one before: it is written when a node is left out, when it is cleared, when it is trusted
again and when a coordinator starts, which is at most twice for each view, and takes a row of bounded size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_NOTED", "Lessons", "NodeLesson"]

MAX_NOTED: Final = 64
"""Nodes that are noted, and candidates of an elimination; where there are more of these it is begun anew."""


@dataclass(frozen=True, slots=True)
class NodeLesson:
    """What is held against a node.

    Attributes:
        node: The node.
        count: How often it was left out since it was trusted last.
        out_ns: For how long it is left out still; 0 where it is not.
        probation_ns: For how long it is on probation still, of the time that ends in commits.
        total: Its sum of the last hours, in the evidence's own unit.
    """

    node: str
    count: int
    out_ns: int
    probation_ns: int
    total: int


@dataclass(frozen=True, slots=True)
class Lessons:
    """All of it.

    Attributes:
        nodes: What is held against nodes.
        candidates: Of the elimination (elimination.py) that is going on; empty where there is none.
        fitting: Those of them without which a view worked.
        odd: Nodes that were in a minority.
        tried: Nodes that were left out for it.
    """

    nodes: tuple[NodeLesson, ...] = ()
    candidates: tuple[str, ...] = ()
    fitting: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
