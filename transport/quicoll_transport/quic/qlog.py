"""qlog on request: each connection's trace becomes one file when the connection ends. Nothing of it may do harm.

The format is qlog 0.3 (draft-ietf-quic-qlog-main-schema-02) as aioquic writes it; qvis and other readers take it.
aioquic puts three secrets into its traces that this module leaves out: stateless reset tokens (RFC 9000 section
10.3; they can end the connection), address validation tokens, and the data of path challenges. TLS keys
are in no trace.

Bounds: the last `events` events of a connection are kept in memory, and of the files that this process has written
into the directory the last `files` stay. An event is about 180 bytes in the file, several times that in memory. A file
appears under its name complete or not at all. A write that fails is logged and the trace is gone. Tracing costs a
connection a fifth to a half more CPU time, and writing happens on the endpoint's loop, about 5 ms for a thousand
events: qlog is for looking at a problem, not for production.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

from aioquic.quic.logger import QLOG_VERSION, QuicLogger, QuicLoggerTrace

__all__ = ["QlogDirectory"]

log = logging.getLogger("quicoll.transport")

_REDACTED = "redacted"
_SECRETS = frozenset({"reset_token", "stateless_reset_token", "token", "retry_token"})


class _Trace(QuicLoggerTrace):
    """The last events of one connection, without what must not be written down."""

    def __init__(self, *, is_client: bool, odcid: bytes, events: int) -> None:
        super().__init__(is_client=is_client, odcid=odcid)
        self._events = deque(maxlen=events)

    def encode_new_connection_id_frame(
        self,
        connection_id: bytes,
        retire_prior_to: int,
        sequence_number: int,
        stateless_reset_token: bytes,
    ) -> dict[str, Any]:
        frame = super().encode_new_connection_id_frame(connection_id, retire_prior_to, sequence_number, b"")
        return {**frame, "reset_token": _REDACTED}

    def encode_new_token_frame(self, token: bytes) -> dict[str, Any]:
        return {**super().encode_new_token_frame(b""), "length": len(token), "token": _REDACTED}

    def encode_path_challenge_frame(self, data: bytes) -> dict[str, Any]:
        return {**super().encode_path_challenge_frame(b""), "data": _REDACTED}

    def encode_path_response_frame(self, data: bytes) -> dict[str, Any]:
        return {**super().encode_path_response_frame(b""), "data": _REDACTED}

    def encode_transport_parameters(self, owner: str, parameters: Any) -> dict[str, Any]:
        return _without_secrets(super().encode_transport_parameters(owner, parameters))

    def log_event(self, *, category: str, event: str, data: dict[str, Any]) -> None:
        super().log_event(category=category, event=event, data=_without_secrets(data))


def _without_secrets(data: dict[str, Any]) -> dict[str, Any]:
    return {key: _REDACTED if key in _SECRETS else value for key, value in data.items()}


class QlogDirectory(QuicLogger):
    """Gives aioquic its traces; `end_trace` writes one and never raises. `label` begins the files' names."""

    def __init__(self, directory: str | os.PathLike[str], *, label: str, files: int = 64, events: int = 10_000) -> None:
        super().__init__()
        self.directory = Path(directory)
        self._label = "".join(c if c.isalnum() or c in "-_" else "_" for c in label)
        self._files = files
        self._events = events
        self._number = 0
        self._written: deque[Path] = deque()

    def start_trace(self, is_client: bool, odcid: bytes) -> QuicLoggerTrace:
        return _Trace(is_client=is_client, odcid=odcid, events=self._events)

    def end_trace(self, trace: QuicLoggerTrace) -> None:
        content = trace.to_dict()
        side = content["vantage_point"]["type"]
        name = f"{self._label}-{os.getpid()}-{self._number:06d}-{side}-{content['common_fields']['ODCID']}.qlog"
        self._number += 1
        path = self.directory / name
        part = path.with_suffix(".part")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            document = {"qlog_format": "JSON", "qlog_version": QLOG_VERSION, "traces": [content]}
            part.write_text(json.dumps(document), encoding="ascii")
            part.replace(path)
        except (OSError, TypeError, ValueError) as error:
            log.warning("a qlog trace is lost, %s cannot be written: %s", path, error)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            return
        self._written.append(path)
        while len(self._written) > self._files:
            with contextlib.suppress(OSError):
                self._written.popleft().unlink(missing_ok=True)
