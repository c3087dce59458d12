"""Membership and atomic steps: views, quorum, step decisions, the coordinator's journal.

`CoordinatorCore` and `MemberCore` are pure: messages, losses and time in, actions out. `Journal` is the only part that
touches a disk. docs/internals/membership.md describes the whole protocol.
"""

from __future__ import annotations

from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.core import CoordinatorCore
from quicoll.membership.coordinator.history import (
    Committed,
    History,
    InstalledView,
    JournalRecord,
    Left,
    Proposed,
    Seeded,
)
from quicoll.membership.journal import Journal, MemoryJournal, RecordStore
from quicoll.membership.member.core import MemberCore
from quicoll.membership.messages import MAX_MESSAGE, CoordinatorMessage, MemberMessage, decode, encode
from quicoll.membership.view import MAX_MEMBERS, Member, View

__all__ = [
    "MAX_MEMBERS",
    "MAX_MESSAGE",
    "Committed",
    "CoordinatorConfig",
    "CoordinatorCore",
    "CoordinatorMessage",
    "History",
    "InstalledView",
    "Journal",
    "JournalRecord",
    "Left",
    "Member",
    "MemberCore",
    "MemberMessage",
    "MemoryJournal",
    "Proposed",
    "RecordStore",
    "Seeded",
    "View",
    "decode",
    "encode",
]
