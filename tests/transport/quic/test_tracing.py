"""A plane's events in a qlog trace: packet by packet, and nothing that could end or move a connection."""

from __future__ import annotations

import json
from typing import Any

from lone_plane import MS, LonePlane

from quicoll_transport.quic import frames as f


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def log_event(self, *, category: str, event: str, data: dict[str, Any]) -> None:
        json.dumps(data)
        self.events.append((category, event, data))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [data for _, name, data in self.events if name == event]


def traced() -> tuple[LonePlane, Log]:
    log = Log()
    lone = LonePlane(trace=log)
    lone.settle()
    log.events.clear()
    return lone, log


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [data["header"]["packet_number"] for data in events]


def test_a_run_is_written_packet_by_packet() -> None:
    lone, log = traced()
    stream = lone.plane.outbound.open()
    lone.plane.outbound.write(stream, memoryview(bytes(10_000)), fin=True)
    said = lone.hear()
    sent = [data for data in log.of("packet_sent") if data["frames"][0]["frame_type"] == "stream"]
    assert len(sent) > 4
    assert numbers(sent) == [one.number for one in said]
    assert [data["raw"]["length"] for data in sent] == [one.size for one in said]
    for data, one in zip(sent, said, strict=True):
        (frame,) = data["frames"]
        (real,) = one.frames
        assert (frame["offset"], frame["length"], frame["fin"]) == (real.offset, len(real.data), real.fin)


def test_what_comes_is_written_alone_and_in_runs_and_duplicates_are_not() -> None:
    lone, log = traced()
    first = lone.packet(f.StreamFrame(2, 0, bytes(50), False))
    lone.give(first)
    lone.give(first)
    run = [lone.packet(f.stream_head(2, 50 + 50 * i, None, fin=False) + bytes(50)) for i in range(6)]
    size = max(map(len, run))
    alike = [packet for packet in run if len(packet) == size]
    lone.give(b"".join(alike), size=size)
    received = log.of("packet_received")
    assert len(received) == 1 + len(alike)
    assert numbers(received) == sorted(numbers(received))
    assert received[0]["frames"] == [{"frame_type": "stream", "stream_id": 2, "offset": 0, "length": 50, "fin": False}]
    assert {data["header"]["packet_type"] for data in received} == {"1RTT"}


def test_what_cannot_be_opened_is_dropped_by_name() -> None:
    lone, log = traced()
    packets = [bytearray(lone.packet(b"\1" * 60)) for _ in range(6)]
    packets[2][-1] ^= 1
    packets[4][-1] ^= 1
    lone.give(b"".join(packets), size=len(packets[0]))
    lone.give(b"\x40" + bytes(60))
    dropped = log.of("packet_dropped")
    assert [data["trigger"] for data in dropped] == ["payload_decrypt_error"] * 3
    assert [data["raw"]["length"] for data in dropped] == [len(packets[0]), len(packets[0]), 61]
    assert len(log.of("packet_received")) == 4


def test_ranges_of_an_acknowledgement_include_their_ends() -> None:
    lone, log = traced()
    lone.say(f.AckFrame([(4, 5), (0, 3)], 7) if lone.plane.sender.number > 4 else f.AckFrame([(0, 1)], 7))
    (frame,) = log.of("packet_received")[0]["frames"]
    assert frame["frame_type"] == "ack"
    assert frame["ack_delay"] == 7
    assert frame["acked_ranges"][-1][0] == 0
    assert all(low <= high for low, high in frame["acked_ranges"])
    assert frame["acked_ranges"] in ([[4, 4], [0, 2]], [[0, 0]])


def test_what_could_end_or_move_a_connection_is_left_out() -> None:
    lone, log = traced()
    secrets = b"\xaa" * 16, b"\xbb" * 8, b"\xcc" * 8
    lone.say(
        f.NewConnectionIdFrame(1, 0, b"anewid--", secrets[0]),
        f.PathChallengeFrame(secrets[1]),
        f.PathResponseFrame(secrets[2]),
    )
    lone.hear()
    text = json.dumps(log.events)
    for secret in secrets:
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text
    kinds = [frame["frame_type"] for frame in log.of("packet_received")[0]["frames"]]
    assert kinds == ["new_connection_id", "path_challenge", "path_response"]
    assert text.count("redacted") == 4, "and our answer's"
    assert b"anewid--".hex() in text


def test_a_packet_that_is_no_packet_is_written_as_far_as_it_goes() -> None:
    lone, log = traced()
    lone.say(b"\x01\x21")
    (data,) = log.of("packet_received")
    assert [frame["frame_type"] for frame in data["frames"]] == ["ping", "unknown"]
    assert data["frames"][1]["reason"]


def test_a_close_says_why() -> None:
    lone, log = traced()
    lone.say(f.CloseFrame(0x7101, None, b"you know \xff why"))
    (frame,) = log.of("packet_received")[0]["frames"]
    assert frame == {
        "frame_type": "close",
        "code": 0x7101,
        "trigger_frame_type": None,
        "reason": "you know \ufffd why",
    }


def test_metrics_are_written_where_they_have_changed() -> None:
    lone, log = traced()
    lone.plane.outbound.write(lone.plane.outbound.open(), memoryview(bytes(100)), fin=True)
    (said,) = lone.hear()
    lone.now += 20 * MS
    lone.say(f.AckFrame([(said.number, said.number + 1)], 0))
    (first,) = log.of("metrics_updated")
    assert first["latest_rtt"] == 20_000
    assert "min_rtt" not in first, "that is what it was"
    lone.say(f.AckFrame([(said.number, said.number + 1)], 0))
    assert log.of("metrics_updated") == [first], "nothing has changed"


def test_nobody_traces_nothing_is_written() -> None:
    lone = LonePlane()
    lone.settle()
    assert lone.plane.sender._trace is None
