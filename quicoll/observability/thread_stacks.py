"""Where the threads of this process are: a text for people, bounded, without values of variables or lines of source.

Any thread may ask for it, the engine's above all: a rank that is late is asked by those who wait for it, and its own
threads are somewhere else. The thread that asks is left out, unless it is the main one, and so are those that
write flight files and traces. What is shown of a file is its name and the two directories above it.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from quicoll.observability.flight_record import MAX_STACK

__all__ = ["FLIGHT_THREAD", "STREAM_THREAD", "thread_stacks"]

FLIGHT_THREAD = "quicoll-flight"
STREAM_THREAD = "quicoll-stream"

_THREADS = 32
_FRAMES = 24
_PARTS = 3


def thread_stacks(most: int = MAX_STACK) -> str:
    """Return the stacks of the other threads, the innermost frame first, the main thread first.

    Args:
        most: Characters of it; what is more is cut, and said to be.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    here = threading.get_ident()
    frames = {
        ident: frame
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - there is no public way to other threads' frames
        if ident == main or not (ident == here or names.get(ident) in (FLIGHT_THREAD, STREAM_THREAD))
    }
    order = sorted(frames, key=lambda ident: (ident != main, names.get(ident, "").startswith("quicoll-"), ident))
    lines: list[str] = []
    for ident in order[:_THREADS]:
        lines.append(f"thread {names.get(ident, 'of no Python name')}:")
        lines += _stack(frames[ident])
    if len(order) > _THREADS:
        lines.append(f"and {len(order) - _THREADS} threads more")
    text = "\n".join(lines)
    end = "\n... cut here"
    return text if len(text) <= most else text[: most - len(end)] + end


def _stack(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        code = frame.f_code
        if code.co_filename == threading.__file__ and code.co_name.startswith("_bootstrap"):
            return lines
        where = "/".join(code.co_filename.replace("\\", "/").split("/")[-_PARTS:])
        lines.append(f"  {where}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    if frame is not None:
        lines.append("  ... and its callers")
    return lines
