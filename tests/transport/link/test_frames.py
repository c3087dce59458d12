"""What crosses a link: everything that we encode comes back, and nothing else is taken."""

from __future__ import annotations

import itertools
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.errors import ProtocolError
from quicoll_transport.link.control_stream import ControlReader, encode_control
from quicoll_transport.link.frames import (
    HEADER_SIZE,
    INLINE_BYTES,
    MAX_APP,
    MAX_CHANNEL,
    MAX_CONTROL,
    MAX_LENGTH,
    MAX_PARTIALS,
    MAX_RANGES,
    TAG_SIZE,
    Ack,
    App,
    Cancel,
    Control,
    Grant,
    Header,
    Hello,
    InlineMessage,
    Inquiry,
    Nack,
    Offer,
    Ping,
    Pong,
    RefuseMessage,
    Sighting,
    channel_of,
    channel_tag,
    checksum,
)

TAG = bytes(range(TAG_SIZE))
fixed = settings(derandomize=True, deadline=None, max_examples=60)

u64 = st.integers(0, (1 << 64) - 1)
u63 = st.integers(0, (1 << 63) - 1)
u62 = st.integers(0, (1 << 62) - 1)
tags = st.binary(min_size=TAG_SIZE, max_size=TAG_SIZE)
channel_tags = st.builds(channel_tag, st.integers(0, MAX_CHANNEL), u64)
any_tags = st.one_of(tags, channel_tags)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    length = draw(st.integers(0, MAX_LENGTH))
    return Header(
        draw(any_tags),
        draw(u63),
        length,
        draw(u64),
        draw(st.integers(0, (1 << 32) - 1)),
        draw(st.booleans()),
        draw(st.integers(0, length)),
    )


@st.composite
def partials(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    sequences = sorted(draw(st.sets(u62, max_size=MAX_PARTIALS)))
    return tuple((sequence, draw(st.integers(1, MAX_LENGTH))) for sequence in sequences)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    cuts = sorted(draw(st.sets(u62, max_size=40)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


controls: st.SearchStrategy[Control] = st.one_of(
    st.builds(Hello, u62, u62, u62, u62, u62, ranges(), u62, u62, partials()),
    st.builds(Inquiry, st.binary(max_size=INLINE_BYTES)),
    st.builds(Sighting, st.text(max_size=40), st.integers(0, 65535), u62),
    st.builds(Ping, u62),
    st.builds(Pong, u62),
    st.builds(Ack, u62, ranges(), u62, u62),
    st.builds(InlineMessage, st.binary(max_size=80), st.binary(max_size=INLINE_BYTES)),
    st.builds(Offer, u62, any_tags, st.integers(0, MAX_LENGTH)),
    st.builds(Grant, u62),
    st.builds(Nack, u62, u62, u64, st.booleans()),
    st.builds(Cancel, u62, u62),
    st.builds(RefuseMessage, u62, st.text(max_size=200)),
    st.builds(App, u62, st.binary(max_size=2000)),
)


def framed(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "big") + body


# -- the header ------------------------------------------------------------------------------------------------------


@fixed
@given(header=headers())
def test_header_comes_back_as_it_was(header: Header) -> None:
    data = header.encode()
    assert len(data) == HEADER_SIZE
    assert Header.decode(data) == header
    assert Header.decode(bytearray(data)) == header
    assert Header.decode(memoryview(data)) == header


def test_tags_of_channels_and_of_callers_cannot_be_taken_for_each_other() -> None:
    tag = channel_tag(7, 9)
    assert len(tag) != TAG_SIZE
    assert channel_of(tag) == (7, 9)
    assert channel_of(tag + bytes(TAG_SIZE - len(tag))) is None
    for void in (False, True):
        header = Header(tag, 1, 0, checksum(b""), void=void)
        assert Header.decode(header.encode()) == header


@pytest.mark.parametrize(
    "partial",
    [
        ((3, 1), (3, 1)),
        ((4, 1), (3, 1)),
        ((1, 0),),
        ((1, MAX_LENGTH + 1),),
        (((1 << 63) + 1, 1),),
        tuple((n, 1) for n in range(MAX_PARTIALS + 1)),
    ],
)
def test_interrupted_messages_that_no_hello_of_ours_would_list(partial: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ProtocolError, match="Hello lists"):
        ControlReader().feed(encode_control(Hello(1, 1, 0, 0, 0, (), 0, 0, partial)))


def test_every_flipped_bit_of_a_header_is_found() -> None:
    data = Header(TAG, 7, 1000, 0x1234, 2, eager=False).encode()
    for bit in range(8 * HEADER_SIZE):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            Header.decode(changed)


@pytest.mark.parametrize("size", [0, 1, HEADER_SIZE - 1, HEADER_SIZE + 1, 2 * HEADER_SIZE])
def test_header_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"header of {size} bytes"):
        Header.decode(bytes(size))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((b"qx", 1, 0, 0, TAG, 0, 0, 0, 0), "another protocol"),
        ((b"qc", 2, 0, 0, TAG, 0, 0, 0, 0), "another protocol or version"),
        ((b"qc", 1, 8, 0, TAG, 0, 0, 0, 0), "unknown flags"),
        ((b"qc", 1, 0x80, 0, TAG, 0, 0, 0, 0), "unknown flags"),
        ((b"qc", 1, 0, 0, TAG, 0, MAX_LENGTH + 1, 0, 0), "above the limit"),
        ((b"qc", 1, 0, 0, TAG, 0, (1 << 64) - 1, 0, 0), "above the limit"),
        ((b"qc", 1, 0, 0, TAG, 1 << 63, 0, 0, 0), "out of range"),
        ((b"qc", 1, 0, 0, TAG, 0, 5, 0, 6), "begins at 6"),
        ((b"qc", 1, 2, 0, channel_tag(1, 2) + bytes(7) + b"x", 0, 5, 0, 0), "malformed channel"),
        ((b"qc", 1, 2, 0, channel_tag(MAX_CHANNEL + 1, 2) + bytes(8), 0, 5, 0, 0), "malformed channel"),
        ((b"qc", 1, 4, 0, TAG, 0, 0, 0, 0), "void"),
        ((b"qc", 1, 6, 0, channel_tag(1, 2) + bytes(8), 0, 1, 0, 0), "void"),
    ],
)
def test_header_with_a_good_checksum_but_bad_content_is_refused(values: tuple[object, ...], reason: str) -> None:
    body = struct.pack("!2sBBI24sQQQQ", *values)
    with pytest.raises(ProtocolError, match=reason):
        Header.decode(body + checksum(body).to_bytes(8, "big"))


def test_checksum_is_the_published_xxh3() -> None:
    assert checksum(b"") == 0x2D06800538D394C2  # the reference value of XXH3_64bits for no input, seed 0
    assert checksum(memoryview(b"abc")) == checksum(bytearray(b"abc")) == checksum(b"abc")


# -- control messages ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@fixed
@given(messages=st.lists(controls, max_size=8), data=st.data())
def test_control_messages_come_back_however_the_stream_is_cut(messages: list[Control], data: st.DataObject) -> None:
    stream = b"".join(map(encode_control, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = ControlReader()
    received: list[Control] = []
    for start, stop in itertools.pairwise([0, *cuts, len(stream)]):
        received += reader.feed(stream[start:stop])
    assert received == messages


def test_control_messages_come_back_byte_by_byte() -> None:
    messages: list[Control] = [Ping(5), App(0, b"x" * 300), Ack(3, ((5, 6),), 1, 7)]
    reader = ControlReader()
    received = [m for byte in b"".join(map(encode_control, messages)) for m in reader.feed(bytes([byte]))]
    assert received == messages


@fixed
@given(noise=st.binary(min_size=1, max_size=300))
def test_noise_is_refused_or_waits_but_is_never_taken_for_more_than_it_is(noise: bytes) -> None:
    reader = ControlReader()
    try:
        for message in reader.feed(len(noise).to_bytes(4, "big") + noise):
            assert encode_control(message)  # a real message by chance
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "value",
    [
        [99, 1],  # unknown type
        ["Ping", 1],
        {"t": 2, "t_ns": 1},  # a map where an array belongs
        [2],  # missing field
        [2, 1, 1],  # surplus field
        [2, "1"],
        [2, 1.5],
        [2, None],
        [2, -1],
        [7, True],
        [5, -5],
        [6, 1, b"short", 3],  # tag of another size
        [6, 1, bytes(TAG_SIZE + 1), 3],
        [6, 1, bytes(TAG_SIZE), MAX_LENGTH + 1],
        [6, 1, "x" * TAG_SIZE, 3],
        [4, 0, [[3, 3]], 0],  # empty range
        [4, 0, [[3, 2]], 0],
        [4, 0, [[-1, 2]], 0],
        [4, 0, [[5, 6], [1, 2]], 0],  # out of order
        [4, 0, [[1, 4], [3, 6]], 0],  # overlapping
        [4, 0, [[1, 2, 3]], 0],
        [4, 0, [[1, (1 << 63) + 1]], 0],
        [4, 0, [[2 * i, 2 * i + 1] for i in range(MAX_RANGES + 1)], 0],
        [1, 1, 1, 0, 0, 0, [[2 * i, 2 * i + 1] for i in range(MAX_RANGES + 1)], 0, 0],
        [10, 1, "x" * 401],
        [10, 1, b"bytes"],
        [9, 1 << 63, 0],  # the end of its range would be above what msgpack carries
        [5, 1 << 63],
        [11, 1, "text"],
        [8, 1, 1, 1, 1],  # an integer where a truth value belongs
        None,
        [],
        17,
        "x",
    ],
    ids=lambda value: repr(value)[:40],
)
def test_malformed_control_message_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        ControlReader().feed(framed(value))


def test_text_that_is_no_utf8_is_refused() -> None:
    body = bytes([0x93, 10, 1, 0xA2]) + b"\xff\xff"
    with pytest.raises(ProtocolError, match="malformed"):
        ControlReader().feed(len(body).to_bytes(4, "big") + body)


def test_deeply_nested_control_message_is_refused() -> None:
    body = b"\x91" * 100_000
    with pytest.raises(ProtocolError):
        ControlReader().feed(len(body).to_bytes(4, "big") + body)


def test_trailing_bytes_inside_a_control_message_are_refused() -> None:
    body = msgspec.msgpack.encode([2, 1]) + b"\x00"
    with pytest.raises(ProtocolError):
        ControlReader().feed(len(body).to_bytes(4, "big") + body)


def test_size_above_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ProtocolError, match="above the limit"):
        ControlReader().feed((MAX_CONTROL + 1).to_bytes(4, "big"))


def test_largest_application_message_passes_and_a_larger_one_is_not_encoded() -> None:
    number = (1 << 62) - 1
    largest = App(number, bytes(MAX_APP))
    assert ControlReader().feed(encode_control(largest)) == [largest]
    with pytest.raises(ProtocolError, match="above the limit"):
        encode_control(App(number, bytes(MAX_CONTROL)))


def test_largest_acknowledgement_passes() -> None:
    top = 1 << 62
    also = tuple((top + 2 * i, top + 2 * i + 1) for i in range(MAX_RANGES))
    ack = Ack(top, also, top, top)
    assert ControlReader().feed(encode_control(ack)) == [ack]


def test_what_came_before_a_malformed_message_is_not_held_back_by_a_partial_one() -> None:
    reader = ControlReader()
    ping = encode_control(Ping(1))
    assert reader.feed(ping + ping[:-1]) == [Ping(1)]
    assert reader.feed(ping[-1:]) == [Ping(1)]
