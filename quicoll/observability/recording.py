"""What is kept of a rank while it runs, put together: its flight recorder, and who gets all that it is told.

    flight_dir      the last of everything, written when something fails (`quicoll.observability.flight_files`)
    trace_dir       everything, for a timeline (`quicoll.observability.flight_trace`)
    telemetry       figures and spans for OpenTelemetry (`quicoll.observability.open_telemetry`)
    metrics         figures for Prometheus (`quicoll.observability.prometheus`)

Where none is asked for there is no recorder, no thread, and nothing is noted.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quicoll.observability.events import make_directory
from quicoll.observability.figures import Figures
from quicoll.observability.flight import FlightRecorder, FlightStream
from quicoll.observability.flight_files import FlightWriter, flight_file, monotonic_clock
from quicoll.observability.flight_record import FLIGHT_FORMAT, FlightHeader
from quicoll.observability.flight_trace import SUFFIX, TraceFile
from quicoll.observability.open_telemetry import OpenTelemetryInstruments, Spans
from quicoll.observability.prometheus import PrometheusInstruments
from quicoll.observability.streaming import StreamThread

if TYPE_CHECKING:
    from quicoll.observability.streaming import Sink

__all__ = ["RankRecord", "record_flight", "record_rank"]


class RankRecord:
    """What is kept of one process. recorder: is told what it does. streaming: gives all of that on, where anybody wants
    more than the last. served: where its figures are, for Prometheus; "" where they are nowhere."""

    def __init__(self, recorder: FlightRecorder, streaming: StreamThread | None, served: str = "") -> None:
        """Put them together: the end of the recorder is that of both."""
        self.recorder = recorder
        self.streaming = streaming
        self.served = served
        if streaming is not None:
            write = recorder.close

            def close() -> None:
                write()
                streaming.close()

            recorder.close = close


def record_rank(
    *,
    job: str,
    node: str,
    chance: int,
    flight_dir: str | Path | None = None,
    trace_dir: str | Path | None = None,
    telemetry: bool = False,
    metrics: str | None = None,
) -> RankRecord | None:
    """Begin to record this process as its settings say.

    Args:
        job: The job's name.
        node: This rank's name.
        chance: A number that tells this process from others of its id, which another host may have.
        flight_dir: Directory for the last of everything; None keeps none.
        trace_dir: Directory for everything; None writes none.
        telemetry: Whether OpenTelemetry gets figures and spans.
        metrics: "host:port" at which figures are served for Prometheus; None serves none.
    Returns:
        What is kept; None where nothing is asked for.
    Raises:
        LocalError: Nothing can be written or served there, or a package is missing.
    """
    if flight_dir is None and trace_dir is None and not telemetry and metrics is None:
        return None
    for directory, what in ((flight_dir, "flight files"), (trace_dir, "traces")):
        if directory is not None:
            make_directory(directory, what)
    process = _process(chance)
    sinks: list[Sink] = []
    try:
        served = _add_sinks(sinks, job, node, process, trace_dir, telemetry, metrics)
    except BaseException:
        for sink in sinks:
            sink.close(0)
        raise
    stream = FlightStream() if sinks else None
    recorder = _recorder(job, node, process, "rank", stream)
    if flight_dir is not None:
        FlightWriter(recorder, flight_file(flight_dir, node, process))
    return RankRecord(recorder, None if stream is None else StreamThread(stream, sinks), served)


def _add_sinks(
    sinks: list[Sink],
    job: str,
    node: str,
    process: str,
    trace_dir: str | Path | None,
    telemetry: bool,
    metrics: str | None,
) -> str:
    """Make those that are asked for; return where figures are served, "" where nowhere."""
    if trace_dir is not None:
        header = FlightHeader(
            format=FLIGHT_FORMAT,
            role="rank",
            job=job,
            node=node,
            process=process,
            clock=monotonic_clock(),
            host=socket.gethostname(),
            t=time.monotonic_ns(),
            wall=time.time_ns(),
            why="a trace",
        )
        sinks.append(TraceFile(flight_file(trace_dir, node, process).with_suffix(SUFFIX), header))
    if telemetry:
        sinks.append(Figures(OpenTelemetryInstruments(job=job, node=node)))
        sinks.append(Spans(job=job, node=node, wall_less_clock_ns=time.time_ns() - time.monotonic_ns()))
    served = ""
    if metrics is not None:
        instruments = PrometheusInstruments(metrics, job=job, node=node)
        served = instruments.address
        sinks.append(Figures(instruments))
    return served


def record_flight(directory: str | Path, *, job: str, node: str, chance: int = 0, role: str = "rank") -> FlightRecorder:
    """Begin to record this process; its file is written when something fails.

    Args:
        directory: For the files of the run; made if it does not exist.
        job: The job's name.
        node: This rank's name.
        chance: A number that tells this process from others of its id, which another host may have.
        role: "rank" or "supervisor".
    Returns:
        The recorder; its `close` ends it.
    Raises:
        LocalError: Nothing can be written there.
    """
    make_directory(directory, "flight files")
    process = _process(chance)
    recorder = _recorder(job, node, process, role, None)
    FlightWriter(recorder, flight_file(directory, node, process))
    return recorder


def _process(chance: int) -> str:
    return f"{os.getpid()}-{chance & 0xFFFFFF:06x}"


def _recorder(job: str, node: str, process: str, role: str, stream: FlightStream | None) -> FlightRecorder:
    return FlightRecorder(
        job=job,
        node=node,
        process=process,
        clock=monotonic_clock(),
        host=socket.gethostname(),
        now_ns=time.monotonic_ns,
        wall_ns=time.time_ns,
        role=role,
        stream=stream,
    )
