"""Collectives as data: pure functions that say what each rank sends, receives and reduces.

`model` has the parts of a plan and the rules of running one; `reductions` (over `canonical`, `routes` and `ring`),
`broadcasts`, `moves` and `hierarchical` the algorithms; `chunks` and `lanes` what these share; `check` the proof that
the plans of all ranks fit together; `forecast` what they take on a `network`, `choice` which is the cheapest;
`schedule` the way from a call's arguments to a plan. A plan depends on its arguments alone, is immutable and may be
kept and used again.
"""

from quicoll.plan.broadcasts import all_gather, barrier, broadcast
from quicoll.plan.check import validate
from quicoll.plan.chunks import MIB
from quicoll.plan.hierarchical import MOVES
from quicoll.plan.model import (
    Buf,
    CopyStep,
    Lane,
    Pair,
    Plan,
    PlanStep,
    RecvStep,
    ReduceStep,
    Scratch,
    SendStep,
    Span,
    Tree,
    operands,
    reads,
    writes,
)
from quicoll.plan.moves import all_to_all, gather, scatter, send
from quicoll.plan.reductions import CANONICAL, REDUCTIONS, Algorithm, all_reduce, reduce, reduce_scatter

# By collective, what can be asked for by name; those that are not here have one way.
ALGORITHMS: dict[str, tuple[str, ...]] = {**REDUCTIONS, **MOVES}

__all__ = [
    "ALGORITHMS",
    "CANONICAL",
    "MIB",
    "MOVES",
    "Algorithm",
    "Buf",
    "CopyStep",
    "Lane",
    "Pair",
    "Plan",
    "PlanStep",
    "RecvStep",
    "ReduceStep",
    "Scratch",
    "SendStep",
    "Span",
    "Tree",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "operands",
    "reads",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "validate",
    "writes",
]
