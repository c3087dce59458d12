"""Membership and atomic steps: views, quorum, step decisions, the coordinator's journal.

`CoordinatorCore` and `MemberCore` are pure: messages, losses and time in, actions out. `Journal` is the only part that
touches a disk. docs/internals/membership.md describes the whole protocol.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

# Imported when first asked for (PEP 562): a rank needs the member's side, and not the coordinator's.
_HOMES = {
    "CoordinatorConfig": "coordinator.config",
    "CoordinatorCore": "coordinator.core",
    "Committed": "coordinator.history",
    "History": "coordinator.history",
    "InstalledView": "coordinator.history",
    "JournalRecord": "coordinator.history",
    "Left": "coordinator.history",
    "Proposed": "coordinator.history",
    "Seeded": "coordinator.history",
    "Journal": "journal",
    "MemoryJournal": "journal",
    "RecordStore": "journal",
    "MemberCore": "member.core",
    "MAX_MESSAGE": "messages",
    "CoordinatorMessage": "messages",
    "MemberMessage": "messages",
    "decode": "messages",
    "encode": "messages",
    "MAX_MEMBERS": "view",
    "Member": "view",
    "View": "view",
}

if not TYPE_CHECKING:  # a checker that saw it would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted(__all__)
