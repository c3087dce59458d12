"""Logging, by the standard library: what quicoll says, where it goes, and how to hear it without writing a line.

    quicoll.events        each event in a sentence, at the level of its kind; its fields are in the record as well
                          (`node`, `kind`, `fields`), for a formatter that writes key-values
    quicoll.coordinator, .relay, .train, .checkpoint, .torch, .transport    these parts
    quicoll               everything else; all names are below it

    ERROR      something of a peer's or ours is wrong, or is not done that was asked for
    WARNING    the job goes on, and somebody should look at it
    INFO       what changes the job: views, aborted steps, who comes and goes
    DEBUG      what happens at each step or each connection

Handlers and levels are the program's. Where it says nothing, Python prints warnings and errors to stderr. The setting
`log` is for a program that leaves it at that: it sets the level of `quicoll`, and adds a handler where there is none.
"""

from __future__ import annotations

import logging

__all__ = ["LOG_LEVELS", "hear", "level_of_event"]

LOG_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
"""By the words of the setting."""

_OFTEN = {"step_committed", "link_changed", "suspicion_changed", "dial_started", "connection_up", "connection_down"}
_OFTEN |= {"resent", "stalled"}
_LOOK = {"flight_unwritten", "tiers_refused", "piece_refused", "payload_corrupted", "lane_lost"}


def level_of_event(kind: str) -> int:
    """Return the level at which an event is logged.

    Args:
        kind: As of `quicoll.Event`.
    """
    return logging.WARNING if kind in _LOOK else logging.DEBUG if kind in _OFTEN else logging.INFO


def hear(level: str) -> None:
    """Let what quicoll says from a level on be heard, on stderr where the program has no handler.

    Args:
        level: One of `LOG_LEVELS`.
    """
    log = logging.getLogger("quicoll")
    log.setLevel(LOG_LEVELS[level])
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
