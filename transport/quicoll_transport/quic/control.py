"""Frames that are neither ACK nor STREAM and wait to be sent. What each says is asked when it goes.

A frame waits as a key: its kind and what it is about. So it is never queued twice, what was raised again in the
meantime goes out as its latest value, and a frame that was lost waits again under the same key, with what is true then
(RFC 9000 section 13.3). The number of keys is bounded by what they are about: streams that are open, ids that are
active, retirements that are owed, sets of parity that are remembered. PATH_CHALLENGE and PATH_RESPONSE belong to their
path (see paths).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

__all__ = ["ControlFrames", "ControlKey", "Saying"]


class Saying(IntEnum):
    """Kinds of frames. The second part of a key: a stream's id, a number, 1 for unidirectional streams, or 0."""

    PING = 0
    HANDSHAKE_DONE = 1
    MAX_DATA = 2
    MAX_STREAM_DATA = 3
    MAX_STREAMS = 4
    DATA_BLOCKED = 5
    STREAM_DATA_BLOCKED = 6
    STREAMS_BLOCKED = 7
    RESET_STREAM = 8
    STOP_SENDING = 9
    NEW_CONNECTION_ID = 10
    RETIRE_CONNECTION_ID = 11
    REPAIRED = 12


ControlKey: TypeAlias = tuple[Saying, int]


class ControlFrames:
    """See the module's head. Whoever knows what to say of a kind registers it (`answers`)."""

    __slots__ = ("_answers", "_count", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Saying, dict[int, None]] = {kind: {} for kind in Saying}
        self._count = 0
        self._answers: dict[Saying, Callable[[int], bytes | None]] = {}

    def __bool__(self) -> bool:
        return self._count > 0

    def __len__(self) -> int:
        return self._count

    def answers(self, kind: Saying, frame: Callable[[int], bytes | None]) -> None:
        """Ask `frame` for the frames of a kind; it returns None when there is nothing to say any more."""
        self._answers[kind] = frame

    def want(self, kind: Saying, about: int = 0) -> None:
        """Let a frame be sent; also: again."""
        if about not in self._waiting[kind]:
            self._waiting[kind][about] = None
            self._count += 1

    def fill(self, parts: list[bytes | memoryview], room: int) -> tuple[list[ControlKey], int]:
        """Append frames to a packet, in the order of kinds, those of a kind in the order in which they were wanted.

        So it does not matter in which order a run of packets made them due.

        Args:
            parts: Of the packet.
            room: Bytes that are left in it.

        Returns:
            What was sent, and the bytes that are left now.
        """
        sent: list[ControlKey] = []
        if not self._count:
            return sent, room
        for kind, waiting in self._waiting.items():
            while waiting:
                about = next(iter(waiting))
                frame = self._answers[kind](about)
                if frame is not None:
                    if len(frame) > room:
                        return sent, room
                    parts.append(frame)
                    sent.append((kind, about))
                    room -= len(frame)
                del waiting[about]
                self._count -= 1
        return sent, room
