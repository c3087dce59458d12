"""What a plane does, written into a qlog trace: events of the transport and of recovery, packet by packet.

Runs are taken apart here, so only while somebody traces; a plane without a trace does not come here. What could end or
move a connection is left out, as in all traces (see qlog): reset tokens, tokens, the data of path challenges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quicoll_transport.quic.frame_reader import read_frames
from quicoll_transport.quic.frames import AckFrame, FrameError, PathChallengeFrame, PathResponseFrame

if TYPE_CHECKING:
    from quicoll_transport.quic.frames import Frame
    from quicoll_transport.quic.records import Carried, SentStripe
    from quicoll_transport.quic.recovery import LossRecovery, PacketRun

__all__ = ["PlaneTrace", "TraceLog"]

_REDACTED = "redacted"
_SECRET = frozenset({"token", "reset_token"})


class TraceLog(Protocol):
    """A qlog trace."""

    def log_event(self, *, category: str, event: str, data: dict[str, Any]) -> None: ...


class PlaneTrace:
    """See the module's head."""

    def __init__(self, trace: TraceLog) -> None:
        self._trace = trace
        self._metrics: dict[str, int] = {}

    def packet_sent(self, number: int, size: int, payload: bytes) -> None:
        """Write down a packet of ours. payload: its frames."""
        self._packet("packet_sent", number, size, _frames(payload))

    def run_sent(self, run: PacketRun[Carried], stripe: SentStripe) -> None:
        """Write down a run of packets of ours, one by one."""
        for number in range(run.first, run.stop):
            start, stop, fin = stripe.part(run, number, number + 1)
            frame = {"frame_type": "stream", "stream_id": stripe.stream.id, "offset": start, "length": stop - start}
            self._packet("packet_sent", number, run.bytes(number, number + 1), [{**frame, "fin": fin}])

    def packet_received(self, number: int, size: int, payload: bytes) -> None:
        """Write down a packet of the peer's."""
        self._packet("packet_received", number, size, _frames(payload))

    def packets_dropped(self, count: int, size: int) -> None:
        """Write down datagrams that could not be opened."""
        for _ in range(count):
            self._trace.log_event(
                category="transport",
                event="packet_dropped",
                data={"trigger": "payload_decrypt_error", "raw": {"length": size}},
            )

    def metrics(self, recovery: LossRecovery[Carried]) -> None:
        """Write down what recovery has come to, where it has changed."""
        rtt = recovery.rtt
        present = {
            "bytes_in_flight": recovery.in_flight,
            "congestion_window": recovery.controller.window,
            "latest_rtt": rtt.latest_ns // 1000,
            "min_rtt": (rtt.min_ns or 0) // 1000,
            "rtt_variance": rtt.variance_ns // 1000,
            "smoothed_rtt": rtt.smoothed_ns // 1000,
        }
        changed = {name: value for name, value in present.items() if self._metrics.get(name) != value}
        if changed:
            self._metrics = present
            self._trace.log_event(category="recovery", event="metrics_updated", data=changed)

    def _packet(self, event: str, number: int, size: int, frames: list[dict[str, Any]]) -> None:
        self._trace.log_event(
            category="transport",
            event=event,
            data={
                "frames": frames,
                "header": {"packet_number": number, "packet_type": "1RTT"},
                "raw": {"length": size},
            },
        )


def _frames(payload: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        for frame in read_frames(payload):
            found.append(_describe(frame))  # noqa: PERF401 - those before a wrong one stay
    except FrameError as error:
        found.append({"frame_type": "unknown", "reason": error.reason})
    return found


def _describe(frame: Frame) -> dict[str, Any]:
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(frame).__name__.removesuffix("Frame"))
    out: dict[str, Any] = {"frame_type": words.lstrip("_")}
    if isinstance(frame, AckFrame):
        return {**out, "ack_delay": frame.delay, "acked_ranges": [[start, stop - 1] for start, stop in frame.ranges]}
    for name, value in frame._asdict().items():
        if name in _SECRET or isinstance(frame, PathChallengeFrame | PathResponseFrame):
            out[name] = _REDACTED
        elif name == "frame_type":  # of a close: what the peer got wrong
            out["trigger_frame_type"] = value
        elif name == "data":
            out["length"] = len(value)
        elif name == "reason":
            out[name] = bytes(value).decode(errors="replace")
        else:
            out[name] = bytes(value).hex() if isinstance(value, bytes) else value
    return out
