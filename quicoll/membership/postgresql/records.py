"""The coordinator's records as rows: a kind, a body in msgpack, a checksum over both and the row's place.

No field can hold code. A kind that is not known, a body that does not fit its kind and a wrong checksum are damage:
nothing of such a journal is used.
"""

from __future__ import annotations

import zlib

import msgspec

from quicoll.errors import LocalError
from quicoll.membership.coordinator.history import (
    Committed,
    Forgotten,
    InstalledView,
    JournalRecord,
    Left,
    Noted,
    Proposed,
    Scaled,
    Seeded,
    WentOn,
)

__all__ = ["row_body", "row_checksum", "row_kind", "row_record"]

_KINDS: dict[str, type[JournalRecord]] = {
    "seeded": Seeded,
    "proposed": Proposed,
    "installed": InstalledView,
    "committed": Committed,
    "left": Left,
    "forgotten": Forgotten,
    "went on": WentOn,
    "noted": Noted,
    "scaled": Scaled,
}
_NAMES = {record: kind for kind, record in _KINDS.items()}


def row_kind(record: JournalRecord) -> str:
    """Return the name under which records of this class are kept."""
    return _NAMES[type(record)]


def row_body(record: JournalRecord) -> bytes:
    """Return the record's fields as bytes."""
    return msgspec.msgpack.encode(record)


def row_checksum(job: str, number: int, token: int, kind: str, body: bytes) -> int:
    """Return the checksum of a row: what it says, and where it stands."""
    return zlib.crc32(msgspec.msgpack.encode((job, number, token, kind, body)))


def row_record(kind: str, body: bytes) -> JournalRecord:
    """Return the record of a row.

    Args:
        kind: Its kind.
        body: Its fields.
    Raises:
        LocalError: There is no such kind, or the body is none of it.
    """
    if kind not in _KINDS:
        raise LocalError(f"a record of the kind {kind!r} is not known")
    try:
        return msgspec.msgpack.decode(body, type=_KINDS[kind])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LocalError(f"a record of the kind {kind!r} cannot be read: {error}") from error
