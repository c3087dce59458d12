"""What is decided, and what is to be said of it: the one place where a record is made.

Invariants: the history is that of all records handed out by `Persist` so far, taken as written; so whatever is asked
next is judged by what was decided just now. A record is queued before anything that is said because of it, since both
go through here in the order of the calls. Nothing is taken back.

Failure cases: a record that contradicts the history is a LocalError, and is not queued. One that cannot be written is
the shell's to end by (actions.py): the history here is then ahead of the journal, and nobody asks it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll.membership.coordinator.action_queue import ActionQueue
    from quicoll.membership.coordinator.history import History, JournalRecord

__all__ = ["Ledger"]


class Ledger:
    """The history, and the queue in which its records go out.

    Args:
        history: What the journal holds.
        out: The coordinator's actions.

    Attributes:
        history: Everything that was recorded so far; changed by `record` alone.
    """

    def __init__(self, history: History, out: ActionQueue) -> None:
        self.history = history
        self.out = out

    def record(self, record: JournalRecord) -> None:
        """Decide it: it is durable before anything that is said after this."""
        self.history = self.history.apply(record)
        self.out.persist(record)
