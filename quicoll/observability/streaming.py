"""The thread that takes what a rank does out of its recorder, and gives it to who writes it down or counts it.

Beside the job, and never in its way: what is called is appended to a queue (`FlightStream`), and this thread empties it
every PAUSE_S. Sinks are the trace for a timeline (`quicoll.observability.flight_trace`), OpenTelemetry and Prometheus
(`quicoll.observability.figures`).

    a sink raises       it is logged once, the sink gets no more, the others and the job go on
    the process ends    in order: the rest is given, END_S are waited for that. Killed: what came in the last PAUSE_S is
                        lost
    a child of a fork   has no such thread, and gives nothing

Invariants: nobody waits for a sink but this thread, and who ends, for END_S; what waits is bounded (`FlightStream`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from quicoll.observability.thread_stacks import STREAM_THREAD

if TYPE_CHECKING:
    from quicoll.observability.flight import FlightStream, Streamed
    from quicoll_transport.events import LinkSnapshot

__all__ = ["Sink", "StreamThread"]

log = logging.getLogger("quicoll")

PAUSE_S = 0.25
END_S = 2.0
_LINKS_EVERY = 8
"""Turns between two looks at the links."""

AskLinks = Callable[[Callable[[Sequence["LinkSnapshot"]], None]], None]
"""Asks for the figures of all links, and has a function called with them on some thread, or does nothing."""


class Sink(Protocol):
    """Gets all that a rank does, on one thread."""

    def take(self, told: Sequence[Streamed]) -> None:
        """Take what has come since the last time, perhaps nothing."""
        ...

    def take_links(self, links: Sequence[LinkSnapshot]) -> None:
        """Take the figures of all links at this moment."""
        ...

    def close(self, dropped: int) -> None:
        """Nothing comes any more.

        Args:
            dropped: How many operations were left out because too many waited.
        """
        ...


class StreamThread:
    """See the module's head."""

    def __init__(self, stream: FlightStream, sinks: Sequence[Sink]) -> None:
        """Begin.

        Args:
            stream: What is taken from.
            sinks: Who gets it.
        """
        self.ask_links: AskLinks = lambda give: None
        self._stream = stream
        self._sinks = list(sinks)
        self._links: Sequence[LinkSnapshot] | None = None
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=STREAM_THREAD, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the rest, and wait for that, END_S at most. Another call does nothing."""
        if os.getpid() == self._pid and not self._closing.is_set():
            self._closing.set()
            self._thread.join(END_S)

    def _run(self) -> None:
        turn = 0
        while not self._closing.wait(PAUSE_S):
            self._give(self._stream.drain())
            if turn % _LINKS_EVERY == 0:
                self.ask_links(self._got_links)
            turn += 1
        self._give(self._stream.drain(last=True))
        self._each(lambda sink: sink.close(self._stream.dropped))

    def _got_links(self, links: Sequence[LinkSnapshot]) -> None:
        self._links = links

    def _give(self, told: Sequence[Streamed]) -> None:
        links, self._links = self._links, None
        self._each(lambda sink: sink.take(told))
        if links is not None:
            self._each(lambda sink: sink.take_links(links))

    def _each(self, do: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                do(sink)
            except Exception:
                self._sinks.remove(sink)
                log.exception("%s failed, and gets no more of what happens", type(sink).__name__)
