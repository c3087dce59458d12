"""What aioquic says at INFO of each handshake is said at DEBUG."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from quicoll_transport.quic import Gate, Session, SessionConfig, handshake_in_memory
from quicoll_transport.quic.logs import lower

if TYPE_CHECKING:
    import pytest


def test_a_handshake_says_nothing_at_info_and_its_lines_at_debug(
    caplog: pytest.LogCaptureFixture, credentials_of: Any
) -> None:
    config = SessionConfig()

    def levels(level: int) -> set[int]:
        caplog.clear()
        with caplog.at_level(level):
            client = Session.client(
                credentials=credentials_of("a"), config=config, address=("192.0.2.1", 2), now_ns=10**18
            )
            handshake_in_memory(client, Gate(credentials=credentials_of("b"), config=config), now_ns=10**18)
            logging.getLogger("quic").warning("a warning stays one")
        return {record.levelno for record in caplog.records if record.name == "quic"}

    lower()  # once more changes nothing
    assert levels(logging.INFO) == {logging.WARNING}
    assert levels(logging.DEBUG) == {logging.DEBUG, logging.WARNING}
    assert any("ALPN negotiated" in record.getMessage() for record in caplog.records)
