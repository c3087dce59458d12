"""What every episode stands on: settings, credentials, first inputs, and the ear for exceptions."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING

from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import WORKER, Identity
from quicoll_transport.security.limits import GuardConfig

from .virtual import today

if TYPE_CHECKING:
    from quicoll_transport.security.credentials import Credentials

    from .hostile import Tally

__all__ = ["CONFIG", "CREDIT", "Errors", "Finding", "credentials", "seeds"]

MS = 1_000_000
CREDIT = 1 << 20
# The guard remembers 4096 sources by default, at 170 bytes each: enough to hide a leak, or to look like one.
CONFIG = EndpointConfig(
    lost_after_ns=20_000 * MS,
    connect_ns=60_000 * MS,
    handshake_ns=3_000 * MS,
    credit_bytes=CREDIT,
    max_handshakes=64,
    guard=GuardConfig(sources=64, known=64),
)

_made: dict[str, dict[Identity, Credentials]] = {}


class Finding(AssertionError):
    """The oracle failed; the text says how to see it again."""


def credentials(node: str, authority: str = "ours") -> Credentials:
    if not _made:
        draw = random.Random("credentials").randbytes
        for name in ("ours", "theirs"):
            _made[name] = ephemeral("fuzz", [(WORKER, node) for node in ("a", "b", "d")], now=today(), entropy=draw)
    return _made[authority][Identity("fuzz", WORKER, node)]


def seeds() -> list[bytes]:
    found: list[bytes] = []
    for line in Path(__file__).with_name("seeds.txt").read_text(encoding="ascii").splitlines():
        data = bytearray()
        for part in line.split() if not line.startswith("#") else []:
            digits, _, count = part.partition("*")
            data += bytes.fromhex(digits) * int(count or 1)
        if data:
            found.append(bytes(data))
    return found


class Errors(logging.Handler):
    """Sees the exceptions that endpoints log, and says whose they were."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(logging.ERROR)
        self.tally = tally
        self.ours: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        place, foreign = record.getMessage(), False
        trace = error.__traceback__ if error is not None else None
        while trace is not None:
            code = trace.tb_frame.f_code
            if "aioquic" in code.co_filename or "quicoll_transport" in code.co_filename:
                foreign = "aioquic" in code.co_filename
                place = f"{type(error).__name__} in {Path(code.co_filename).name}, {code.co_qualname}: {error}"
            trace = trace.tb_next
        if foreign:
            place = place.split(":")[0]
            self.tally.foreign[place] = self.tally.foreign.get(place, 0) + 1
        else:
            self.ours.append(place)
