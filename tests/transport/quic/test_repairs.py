"""What a peer can do with parity frames: one plane, and a peer that says what a test wants."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from lone_plane import MS, LonePlane

from quicoll_transport.quic import frames as f
from quicoll_transport.quic import repairs
from quicoll_transport.quic.erasure import MOST_PARITY_ROWS, parity_row
from quicoll_transport.quic.parameters import SENDS_PARITY, TAKES_PARITY

ROOM = 1000
STEP = ROOM - 1  # of streams whose ids take one byte
STREAM = 2
BOTH = SENDS_PARITY | TAKES_PARITY


def rows_of(data: bytes, rows: int, *, groups: int = 1, set_id: int = 0) -> list[f.ParityFrame]:
    """Return the parity of a stream's bytes, as a peer that means well makes it."""
    padded = data.ljust(-(-len(data) // STEP) * STEP, b"\0")
    flat = np.zeros((len(padded) // STEP, ROOM), np.uint8)
    flat[:, :STEP] = np.frombuffer(padded, np.uint8).reshape(-1, STEP)
    table = flat.view(np.uint64)
    return [
        f.ParityFrame(set_id, group, row, parity_row(table[group::groups], row).tobytes()[:STEP])
        for row in range(rows)
        for group in range(groups)
    ]


def about(data: bytes, *, groups: int = 1, set_id: int = 0, fin: bool = True) -> f.ProtectedFrame:
    return f.ProtectedFrame(set_id, ROOM, groups, [(STREAM, 0, len(data), fin)])


class Receiving(LonePlane):
    """A server's plane that takes parity, over a round trip of 10 ms."""

    def __init__(self, ours: int = BOTH) -> None:
        super().__init__(is_client=False, ours=ours)
        self.settle()
        assert (self.plane.recovery.rtt.min_ns or 0) >= repairs.LEAST_KEPT_NS

    @property
    def repairs(self) -> Any:
        return self.plane.repairs

    def stripe(self, data: bytes, *segments: int) -> None:
        """Say these segments of a stream."""
        for at in segments:
            piece = data[at * STEP : (at + 1) * STEP]
            self.say(f.StreamFrame(STREAM, at * STEP, piece, (at + 1) * STEP >= len(data)))

    def whole(self, data: bytes) -> bool:
        return bytes(self.received.get(STREAM, b"")) == data and STREAM not in self.plane.inbound._streams


DATA = random.Random(7).randbytes(9 * STEP + 500)


@pytest.mark.parametrize("missing", [(0,), (9,), (3, 4), (0, 5, 9)])
@pytest.mark.parametrize("described_first", [True, False])
def test_missing_segments_are_made_and_the_peer_is_told(missing: tuple[int, ...], described_first: bool) -> None:
    plane = Receiving()
    plane.stripe(DATA, *(at for at in range(10) if at not in missing))
    frames: list[Any] = [about(DATA), *rows_of(DATA, len(missing))]
    for frame in frames if described_first else frames[::-1]:
        assert not plane.whole(DATA)
        plane.say(frame)
    assert plane.whole(DATA)
    assert plane.heard(f.RepairedFrame) == [f.RepairedFrame(0)]
    assert plane.repairs.repaired_bytes == sum(500 if at == 9 else STEP for at in missing)
    assert plane.code is None


def test_any_rows_do_and_doubles_count_once() -> None:
    plane = Receiving()
    plane.stripe(DATA, *range(2, 10))
    plane.say(about(DATA))
    rows = rows_of(DATA, 6)
    for frame in (rows[5], rows[5], rows[5]):
        plane.say(frame)
    assert not plane.whole(DATA)
    plane.say(rows[2])
    assert plane.whole(DATA)


def test_a_stream_of_which_nothing_came_is_made() -> None:
    plane = Receiving()
    data = DATA[: 2 * STEP]
    for frame in (about(data), *rows_of(data, 2)):
        plane.say(frame)
    assert plane.whole(data)


def test_what_comes_late_counts_and_nothing_is_told_where_nothing_was_made() -> None:
    plane = Receiving()
    plane.stripe(DATA, *range(8))
    plane.say(about(DATA))
    plane.say(rows_of(DATA, 1)[0])
    plane.stripe(DATA, 8)
    assert plane.whole(DATA), "one row is enough now"
    assert plane.repairs.repaired_bytes == 500
    plane = Receiving()
    plane.stripe(DATA, *range(8))
    plane.say(about(DATA))
    plane.stripe(DATA, 8, 9)
    assert plane.heard(f.RepairedFrame) == []
    assert not plane.repairs.has_open


def test_the_end_of_a_stream_is_taken_from_the_description_where_only_that_is_missing() -> None:
    plane = Receiving()
    data = DATA[: 4 * STEP]
    for at in (0, 1, 3):
        plane.say(f.StreamFrame(STREAM, at * STEP, data[at * STEP : (at + 1) * STEP]))
    for frame in (about(data), *rows_of(data, 1)):
        plane.say(frame)
    assert plane.whole(data)


def test_wrong_parity_makes_wrong_bytes_of_what_is_missing_and_of_nothing_else() -> None:
    plane = Receiving()
    plane.stripe(DATA, *range(9))
    wrong = rows_of(DATA, 1)[0]
    plane.say(about(DATA))
    plane.say(f.ParityFrame(0, 0, 0, bytes(len(wrong.data))))
    assert bytes(plane.received[STREAM])[: 9 * STEP] == DATA[: 9 * STEP]
    assert bytes(plane.received[STREAM]) != DATA
    assert plane.code is None


@pytest.mark.parametrize(
    "frame",
    [
        f.ParityFrame(0, 32, 0, b"x"),
        f.ParityFrame(0, 0, MOST_PARITY_ROWS, b"x"),
        f.ProtectedFrame(0, ROOM, 1, []),
        f.ProtectedFrame(0, 10, 1, [(STREAM, 0, 100, True)]),
        f.ProtectedFrame(0, ROOM, 0, [(STREAM, 0, 100, True)]),
        f.ProtectedFrame(0, ROOM, 1, [(STREAM, 0, 0, True)]),
        f.ProtectedFrame(0, ROOM, 1, [(STREAM, 0, 1 << 40, True)]),
    ],
    ids=repr,
)
def test_what_cannot_be_ends_the_connection(frame: Any) -> None:
    plane = Receiving()
    plane.say(frame)
    assert plane.code == f.FRAME_ENCODING_ERROR


@pytest.mark.parametrize(
    "frame", [about(DATA), f.ParityFrame(0, 0, 0, b"x"), f.RepairedFrame(0)], ids=lambda x: type(x).__name__
)
def test_parity_that_was_not_agreed_on_ends_the_connection(frame: Any) -> None:
    plane = Receiving(ours=0)
    plane.say(frame)
    assert plane.code == f.FRAME_ENCODING_ERROR


@pytest.mark.parametrize(
    ("stream_id", "code"),
    [(3, f.STREAM_STATE_ERROR), (4 * 500 + 2, 0x04)],
    ids=["not to receive on", "beyond the limit"],
)
def test_parity_about_a_stream_that_may_not_be_ends_the_connection(stream_id: int, code: int) -> None:
    plane = Receiving()
    plane.say(f.ProtectedFrame(0, ROOM, 1, [(stream_id, 0, 100, True)]))
    plane.say(f.ParityFrame(0, 0, 0, bytes(ROOM - (1 if stream_id < 64 else 2))))
    assert plane.code == code


def test_made_bytes_are_bound_by_flow_control_as_all_are() -> None:
    plane = Receiving()
    start = (1 << 20) - 10
    plane.say(f.ProtectedFrame(0, ROOM, 1, [(STREAM, start, start + 500, False)]))
    plane.say(f.ParityFrame(0, 0, 0, bytes(STEP)))
    assert plane.code == f.FLOW_CONTROL_ERROR


def test_parity_about_a_stream_that_is_over_or_given_up_is_of_no_use_and_harms_nothing() -> None:
    plane = Receiving()
    plane.stripe(DATA, *range(10))
    plane.say(f.StreamFrame(6, 0, b"some"), f.ResetStreamFrame(6, 1, 5000))
    for frame in (about(DATA), *rows_of(DATA, 2), f.ProtectedFrame(1, ROOM, 1, [(6, 0, 5000, True)])):
        plane.say(frame)
    assert plane.repairs.repaired_bytes == 0
    assert not plane.repairs.has_open
    assert plane.resets == {6: 1}
    assert plane.code is None


@pytest.mark.parametrize("seed", range(30))
def test_what_came_lately_is_found_as_it_came_in_whatever_pieces_and_order(seed: int) -> None:
    rng = random.Random(seed)
    streams = {stream_id: rng.randbytes(4000) for stream_id in (2, 6)}
    recent = repairs._Recent()
    here: dict[int, set[int]] = {stream_id: set() for stream_id in streams}
    for _ in range(300):
        stream_id = rng.choice([2, 6])
        if seed % 2 and rng.random() < 0.05:
            recent.forget(stream_id, rng.randrange(4000))
        start, size = rng.randrange(3900), rng.choice([1, 20, 100, 640])
        rows = size == 640 and start <= 3360
        data = streams[stream_id][start : start + size]
        table = np.zeros((8, 100), np.uint8)
        if rows:
            table[:, 7:87] = np.frombuffer(data, np.uint8).reshape(8, 80)
        recent.put(stream_id, start, table[:, 7:87] if rows else memoryview(data), len(data))
        here[stream_id] |= set(range(start, start + len(data)))
        for _ in range(4):
            low = rng.randrange(3900)
            high = rng.randrange(low + 1, min(low + 800, 4000) + 1)
            found = recent.find(stream_id, low, high)
            is_here = here[stream_id] >= set(range(low, high))
            if is_here and (found or not seed % 2):
                assert found == streams[stream_id][low:high]
            else:
                assert found is None
    for stream_id in streams:
        recent.forget(stream_id, 4000)
    assert recent.nbytes == 0


def test_of_one_stream_the_latest_half_is_kept_where_more_came_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "_MOST_RECENT", 64 << 10)
    recent = repairs._Recent()
    data = random.Random(5).randbytes(200 << 10)
    recent.put(6, 0, memoryview(data[:1000]), 1000)
    for start in range(0, len(data), 1000):
        recent.put(2, start, memoryview(data[start : start + 1000]), len(data[start : start + 1000]))
        assert recent.nbytes <= 64 << 10
        stop = min(start + 1000, len(data))
        low = max(0, stop - (24 << 10))
        assert recent.find(2, low, stop) == data[low:stop]
    assert recent.find(6, 0, 1000) is None
    assert recent.find(2, 0, 1000) is None


@pytest.mark.parametrize("step", [0, 1, 300])
def test_bytes_that_come_again_and_again_are_bounded_as_others_are(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "_MOST_RECENT", 64 << 10)
    recent = repairs._Recent()
    data = random.Random(7).randbytes(1400 + 300 * step)
    for number in range(300):
        start = 100 + number * step
        recent.put(2, start, memoryview(data[number * step : number * step + 1400]), 1400)
        assert recent.nbytes <= 64 << 10
        assert sum(map(len, recent._streams[2]._pieces)) < recent.nbytes
        found = recent.find(2, start, start + 1400)
        assert found in (None, data[number * step : number * step + 1400])


def test_what_a_peer_can_make_us_keep_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "_MOST_RECENT", 256 << 10)
    monkeypatch.setattr(repairs, "_MOST_ROWS", 64 << 10)
    plane = Receiving()
    rng = random.Random(3)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3000):
            set_id, group, row = rng.randrange(1 << 40), rng.randrange(32), rng.randrange(MOST_PARITY_ROWS)
            plane.say(f.ParityFrame(set_id, group, row, bytes(1100)))
            stream_id, offset = 4 * rng.randrange(100) + 2, rng.randrange(9000)
            plane.say(f.StreamFrame(stream_id, offset, bytes(900)))
            if not _ % 10:
                spans = [(4 * rng.randrange(100) + 2, rng.randrange(9000), 9500, False) for _ in range(90)]
                plane.say(f.ProtectedFrame(set_id, ROOM, 8, spans))
            plane.hear()
            assert plane.code is None
            assert plane.repairs.recent_bytes <= 256 << 10
            assert plane.repairs._rows_bytes <= 64 << 10
            assert len(plane.repairs._sets) <= 8
        assert tracemalloc.get_traced_memory()[0] - before < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", range(8))
def test_parity_of_any_kind_leads_to_the_right_bytes_or_none_where_rows_are_right(seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(rng.randrange(1, 40 * STEP))
    groups = rng.randrange(1, min(5, -(-len(data) // STEP) + 1))
    plane = Receiving()
    segments = -(-len(data) // STEP)
    said: list[Any] = [about(data, groups=groups)] * 2 + rows_of(data, 4, groups=groups)
    said += [at for at in range(segments) if rng.random() < 0.9]
    rng.shuffle(said)
    for what in said:
        if isinstance(what, int):
            plane.stripe(data, what)
        else:
            plane.say(what)
        assert plane.code is None
        got = bytes(plane.received.get(STREAM, b""))
        assert data.startswith(got)
    plane.stripe(data, *range(segments))
    assert plane.whole(data)
    plane.pass_time(50 * MS)
    assert not plane.repairs.has_open
