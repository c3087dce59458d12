"""Collectives as data: pure functions that say what each rank sends, receives and reduces.

`model` has the parts of a plan and the rules of running one, `all_reduce` and `others` the algorithms, `check` the
proof that the plans of all ranks fit together. A plan depends on its arguments alone, is immutable and may be kept
and used again.
"""

from quicoll.plan.all_reduce import Algorithm, all_reduce
from quicoll.plan.check import validate
from quicoll.plan.cut import MIB
from quicoll.plan.model import (
    Buf,
    Copy,
    Lane,
    Plan,
    Recv,
    Reduce,
    Scratch,
    Send,
    Span,
    Step,
    Tree,
    operands,
    reads,
    writes,
)
from quicoll.plan.others import all_gather, barrier, broadcast

__all__ = [
    "MIB",
    "Algorithm",
    "Buf",
    "Copy",
    "Lane",
    "Plan",
    "Recv",
    "Reduce",
    "Scratch",
    "Send",
    "Span",
    "Step",
    "Tree",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "operands",
    "reads",
    "validate",
    "writes",
]
