"""One stream in one direction, whatever is lost, repeated, cut otherwise or comes in another order."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass

import numpy as np
import pytest

from quicoll_transport.errors import ProtocolError
from quicoll_transport.quic.frames import FINAL_SIZE_ERROR, FLOW_CONTROL_ERROR, FrameError
from quicoll_transport.quic.streams import ReceiveStream, SendStream

WINDOW = 1 << 20


@dataclass
class Place:
    """A StreamTarget."""

    view: memoryview
    filled: int = 0
    alive: bool = True


def data_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def arrive(stream: ReceiveStream, offset: int, data: bytes, *, fin: bool = False) -> None:
    stream.admit(offset + len(data), fin=fin)
    stream.place(offset, memoryview(data), len(data))


# -- sending -----------------------------------------------------------------------------------------------------------


def test_pieces_are_read_from_the_callers_memory_and_end_with_it() -> None:
    stream, payload = SendStream(2, WINDOW), bytearray(data_of(1000))
    stream.write(b"head")
    stream.write(memoryview(payload), fin=True)
    assert stream.take(2000) == (0, 1004)
    head, body = stream.pieces(0, 1004)
    rest = stream.read(4, 1004)
    payload[0] ^= 1
    assert (bytes(head), bytes(body), bytes(rest)) == (b"head", payload, payload), "no copy was made"
    assert stream.read(2, 6) == b"ad" + payload[:2], "of what lies in two places one was"
    assert [bytes(piece) for piece in stream.pieces(2, 4)] == [b"ad"]


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_goes_until_it_is_acknowledged_and_none_after_that(seed: int) -> None:
    rng = random.Random(seed)
    data, stream = data_of(5000, seed), SendStream(2, WINDOW)
    for at in range(0, 5000, 1000):
        stream.write(memoryview(data)[at : at + 1000], fin=at == 4000)
    got, flying, done = bytearray(5000), [], False
    while not done:
        start, stop = stream.take(rng.randrange(1, 700))
        fin = stream.fin and stop == stream.length and (stop > start or stream.fin_lost or not stream.fin_sent)
        if stop > start or fin:
            got[start:stop] = stream.read(start, stop) if stop > start else b""
            stream.sent(start, stop, fin=fin)
            flying.append((start, stop, fin))
        if flying and (rng.random() < 0.5 or not stream.has_more()):
            start, stop, fin = flying.pop(rng.randrange(len(flying)))
            if rng.random() < 0.3:
                stream.on_lost(start, stop, fin=fin)
            else:
                done = stream.on_acked(start, stop, fin=fin)
    assert got == data
    assert not stream.has_more()
    assert stream.waiting == 0


def test_what_was_lost_goes_first_unless_it_has_arrived_after_all() -> None:
    stream = SendStream(2, WINDOW)
    stream.write(data_of(3000), fin=True)
    stream.sent(0, 2000, fin=False)
    stream.on_lost(500, 1500, fin=False)
    stream.on_acked(700, 900, fin=False)
    assert stream.take(5000) == (500, 700)
    stream.sent(500, 700, fin=False)
    assert stream.take(5000) == (900, 1500)
    stream.on_acked(500, 1500, fin=False)
    assert stream.take(5000) == (2000, 3000)


def test_the_peers_limit_holds_for_what_is_new_only() -> None:
    stream = SendStream(2, 100)
    stream.write(data_of(300))
    assert stream.take(1000) == (0, 100)
    stream.sent(0, 100, fin=False)
    assert stream.take(1000) == (100, 100)
    stream.on_lost(0, 50, fin=False)
    assert stream.take(1000) == (0, 50)
    assert stream.sent(0, 50, fin=False) == 0, "no byte of it is new"


def test_a_reset_lets_go_of_the_memory_at_once() -> None:
    stream, memory = SendStream(2, WINDOW), bytearray(1000)
    stream.write(memoryview(memory), fin=True)
    stream.sent(0, 500, fin=False)
    assert stream.reset(7) == 500
    memory.append(1)  # nobody looks at it any more: it can be resized
    stream.on_lost(0, 500, fin=False)
    assert not stream.on_acked(0, 500, fin=False)
    assert not stream.has_more()


def test_short_pieces_of_a_stream_of_words_become_one() -> None:
    stream = SendStream(0, WINDOW)
    for number in range(100):
        stream.write(bytes([number]))
    assert stream.take(1000) == (0, 100)
    stream.sent(0, 100, fin=False)
    stream.write(b"later")
    assert stream.take(1000) == (100, 105)


# -- receiving ---------------------------------------------------------------------------------------------------------


def cut(data: bytes, rng: random.Random) -> list[tuple[int, bytes]]:
    """Pieces of all of it, in any order, some more than once and cut otherwise."""
    pieces = []
    for _ in range(2):
        at = 0
        while at < len(data):
            size = rng.randrange(1, 400)
            pieces.append((at, data[at : at + size]))
            at += size
    rng.shuffle(pieces)
    return pieces


@pytest.mark.parametrize("seed", range(10))
def test_held_bytes_come_out_in_order_and_once(seed: int) -> None:
    rng, data = random.Random(seed), data_of(4000, seed)
    stream, out = ReceiveStream(2, WINDOW), b""
    for offset, piece in cut(data, rng):
        arrive(stream, offset, piece, fin=offset + len(piece) == len(data))
        if rng.random() < 0.5:
            out += stream.read()
            assert stream.taken == len(out) == stream.upto
    out += stream.read()
    assert out == data
    assert stream.is_whole
    assert stream.holes == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("resumed", [0, 1500])
def test_a_target_gets_every_byte_at_its_place_whatever_came_before_it_was_known(seed: int, resumed: int) -> None:
    rng = random.Random(seed)
    head, data = data_of(72, 9), data_of(4000, seed)
    memory = bytearray(data[:resumed]) + bytes(len(data) - resumed)
    stream, place = ReceiveStream(2, WINDOW), Place(memoryview(memory), filled=resumed)
    for offset, piece in cut(head + data[resumed:], rng):
        arrive(stream, offset, piece)
        if not stream.is_direct and stream.peek(72) is not None:
            assert stream.peek(72) == head
            stream.direct(place, 72)
        if stream.is_direct:
            assert place.filled == resumed + stream.upto - 72
            assert memory[: place.filled] == data[: place.filled]
    assert memory == data


def test_a_table_of_bytes_is_placed_as_its_rows_one_by_one() -> None:
    data = data_of(4000)
    rows = np.frombuffer(data, np.uint8).reshape(40, 100)
    for order in ([0, 1, 2, 3], [3, 0, 2, 1], [1, 1, 0, 3, 2]):
        memory = bytearray(4000 - 72)
        stream, place = ReceiveStream(2, WINDOW), Place(memoryview(memory))
        stream.direct(place, 72)
        for i in order:
            stream.admit(1000 * (i + 1), fin=False)
            stream.place(1000 * i, rows[10 * i : 10 * i + 10], 1000)
        assert memory == data[72:]
        assert stream.upto == 4000


def test_what_has_arrived_is_not_written_again() -> None:
    memory = bytearray(100)
    stream, place = ReceiveStream(2, WINDOW), Place(memoryview(memory))
    stream.direct(place, 0)
    arrive(stream, 0, b"a" * 50)
    arrive(stream, 20, b"b" * 60)
    assert memory == b"a" * 50 + b"b" * 30 + bytes(20)


def test_more_than_the_target_takes_is_an_error_before_and_after_it_is_known() -> None:
    stream = ReceiveStream(2, WINDOW)
    stream.direct(Place(memoryview(bytearray(10))), 5)
    with pytest.raises(ProtocolError, match="longer than its header says"):
        arrive(stream, 0, bytes(16))
    stream = ReceiveStream(2, WINDOW)
    arrive(stream, 0, bytes(16))
    with pytest.raises(ProtocolError, match="longer than its header says"):
        stream.direct(Place(memoryview(bytearray(10))), 5)


def test_a_target_that_is_given_up_is_not_written_to_and_can_shrink() -> None:
    memory = bytearray(100)
    stream, place = ReceiveStream(2, WINDOW), Place(memoryview(memory))
    stream.direct(place, 0)
    arrive(stream, 0, b"a" * 10)
    place.alive, place.view = False, memoryview(b"")
    memory.append(1)
    arrive(stream, 10, b"b" * 10)
    assert stream.is_orphaned
    assert place.filled == 10
    stream.discard()
    arrive(stream, 20, b"c" * 10)
    assert stream.taken == 30, "it makes room for others all the same"


def test_limits_and_sizes_are_held() -> None:
    stream = ReceiveStream(2, 100)
    with pytest.raises(FrameError) as caught:
        stream.admit(101, fin=False)
    assert caught.value.code == FLOW_CONTROL_ERROR
    assert stream.admit(60, fin=False) == 60
    assert stream.admit(50, fin=False) == 0
    assert stream.admit(80, fin=True) == 20
    for stop, fin in ((81, False), (79, True), (81, True)):
        with pytest.raises(FrameError) as caught:
            stream.admit(stop, fin=fin)
        assert caught.value.code == FINAL_SIZE_ERROR
    assert stream.admit(80, fin=True) == 0
    with pytest.raises(FrameError):
        stream.finish(20)


def test_a_message_above_4_gib_is_sent_to_its_last_byte_and_not_read_before() -> None:
    size = (4 << 30) + 70_001
    stream = SendStream(2, 1 << 40)
    with mmap.mmap(-1, size, access=mmap.ACCESS_COPY) as source:
        stream.write(bytes(72))
        stream.write(memoryview(source), fin=True)
        sent = 0
        while stream.has_more():
            start, stop = stream.take(1 << 28)
            fin = stop == stream.length
            sent += stream.sent(start, stop, fin=fin)
            done = stream.on_acked(start, stop, fin=fin)
        assert done
        assert sent == 72 + size
