"""aioquic's log, one level down: what it says of each handshake at INFO is of interest at DEBUG.

It has one logger, "quic", and says three lines for each connection. Warnings and errors stay what they are.
"""

from __future__ import annotations

import logging

__all__ = ["lower"]


class _Lower(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.INFO:
            record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return True


_lower = _Lower()


def lower() -> None:
    """See the module's head. Called again it does nothing."""
    logging.getLogger("quic").addFilter(_lower)
