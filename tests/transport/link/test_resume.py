"""Interrupted messages go on where they stopped; lengths and offsets hold far above 32 bits."""

from __future__ import annotations

import mmap
import os
import random
from typing import Any

import pytest
from link_pair import Flip, Pair, assert_clean, holds, payload, tag

from quicoll_transport.errors import MessageCorrupted, MessageRefused, ProtocolError
from quicoll_transport.link.core import LinkState, SendState, StartMessage
from quicoll_transport.link.frames import MAX_PARTIALS, MESSAGE_COST, Header, Hello, checksum

GIB = 1 << 30

# -- continuing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("posted", ["before", "while it is down", "after"])
def test_an_interrupted_message_continues_behind_the_bytes_that_are_in_place(posted: str, credit: int) -> None:
    pair = Pair(credit=credit).up()
    taken = pair.post(1, 20_000) if posted == "before" or credit == 100 else None
    sent = pair.send(1, 20_000)
    while pair.moved < 7000:
        pair.walk("pa hb pb ha fb")
    pair.die()
    if posted == "while it is down":
        taken = taken or pair.post(1, 20_000)
    pair.up()
    pair.settle()
    taken = taken or pair.post(1, 20_000)
    pair.settle()
    assert sent.state is SendState.ACKED
    assert holds(taken, 1)
    assert pair.moved == 20_000, "no byte travelled twice"
    assert pair.a.core.stats.bytes_resumed == 7000
    assert_clean(pair)


@pytest.mark.parametrize("credit", [1 << 20, 100])
def test_a_hundred_reconnections_inside_one_message_cost_no_byte_and_hand_it_over_once(credit: int) -> None:
    pair = Pair(credit=credit, chunk=100).up()
    told: list[object] = []
    buffer = bytearray(101_000)
    data = payload(1, 101_000)
    posted = pair.b.core.post(tag(1), memoryview(buffer), told.append)
    sent = pair.a.core.send(tag(1), memoryview(data), told.append)
    for n in range(1, 101):
        while pair.moved < 1000 * n:
            pair.walk("pa hb pb ha fb")
        pair.die(first=[None, pair.a, pair.b][n % 3])
        pair.join()
    pair.settle()
    assert buffer == data
    assert told == [posted, sent]
    assert pair.moved == 101_000
    assert pair.a.core.stats.resends == 100
    assert pair.b.core.stats.messages_received == 1
    assert_clean(pair)


def test_every_message_under_way_continues_however_many_are_interrupted_at_once() -> None:
    pair = Pair(credit=1 << 22, chunk=100).up()
    count = MAX_PARTIALS + 40
    posted = [pair.post(n, 1000) for n in range(0, count, 2)]
    for n in range(count):
        pair.send(n, 1000)
    while pair.pull(pair.a):
        pass
    for n in range(count):  # the later ones have more in place
        for _ in range(1 + n % 5):
            pair.flow(pair.b, n)
    before = pair.moved
    pair.die()
    assert len(pair.b.core._inbox.partial()) == MAX_PARTIALS
    kept = sum(filled for _, filled in pair.b.core._inbox.partial())
    pair.up()
    pair.settle()
    posted += [pair.post(n, 1000) for n in range(1, count, 2)]
    pair.settle()
    assert all(holds(p, n) for p, n in zip(posted, [*range(0, count, 2), *range(1, count, 2)], strict=True))
    assert pair.moved == 1000 * count + before - kept
    assert kept > 0.7 * before, "the fullest are kept"
    assert_clean(pair)


def test_memory_of_an_interrupted_unposted_message_stays_within_the_credit() -> None:
    cost = 5000 + MESSAGE_COST
    pair = Pair(credit=2 * cost).up()
    pair.send(1, 5000), pair.send(2, 5000)
    pair.walk("pa pa fb")
    pair.flow(pair.b, 1)
    for _ in range(5):
        pair.die()
        assert pair.b.core.stats.credit_held == 2 * cost
        pair.join()
    pair.settle()
    assert pair.b.core.stats.credit_peak == 2 * cost
    assert holds(pair.post(1, 5000), 1)
    assert holds(pair.post(2, 5000), 2)
    pair.settle()
    assert_clean(pair)


def test_a_corrupt_message_goes_again_from_its_first_byte_also_after_a_resumption() -> None:
    pair = Pair(fault=Flip(1), credit=100).up()
    posted, sent = pair.post(1, 10_000), pair.send(1, 10_000)
    while pair.moved < 6000:
        pair.walk("pa hb pb ha fb")
    pair.die()
    pair.up()
    pair.settle()
    assert sent.state is SendState.ACKED
    assert holds(posted, 1)
    assert pair.moved == 20_000
    assert (pair.b.core.stats.corrupt, pair.a.core.stats.resends) == (1, 2)
    assert_clean(pair)


def test_a_resumed_message_that_stays_corrupt_names_its_tag_and_both_digests_at_both_ends() -> None:
    pair = Pair(fault=Flip(99), max_resends=2).up()
    posted, sent = pair.post(1, 10_000), pair.send(1, 10_000)
    pair.walk("pa fb fb")
    pair.die()
    pair.up()
    pair.settle()
    good = payload(1, 10_000)
    bad = bytearray(good)
    bad[5000] ^= 0x10
    for error, peer in ((sent.error, "b"), (posted.error, "a")):
        assert isinstance(error, MessageCorrupted)
        assert (error.peer, error.tag, error.sequence) == (peer, tag(1), 0)
        assert (error.channel, error.counter) == (None, None)
        assert (error.expected, error.found) == (checksum(good), checksum(bad))
        assert error.usable
        for part in (tag(1).hex(), "message 0", f"{error.expected:016x}", f"{error.found:016x}"):
            assert part in str(error)
    assert_clean(pair)


@pytest.mark.parametrize("what", ["cancel", "withdraw", "discard"])
@pytest.mark.parametrize("when", ["down", "hello said", "stream on its way"])
@pytest.mark.parametrize("credit", [100_000, 100])
def test_an_interrupted_message_can_be_taken_back_at_either_end(what: str, when: str, credit: int) -> None:
    if what == "discard" and credit == 100:
        return  # it has a posted buffer, which is withdrawn instead
    pair = Pair(credit=credit).up()
    buffer = bytearray(20_000)
    posted = None if what == "discard" else pair.b.core.post(tag(1), memoryview(buffer), lambda posted: None)
    sent = pair.send(1, 20_000)
    while pair.moved < 7000:
        pair.walk("pa hb pb ha fb")
    pair.die()
    if when != "down":
        pair.join()
        pair.walk("pa pb hb")
    if when == "stream on its way":
        while pair.pull(pair.b) or pair.hear(pair.a) or pair.pull(pair.a):
            pass
    if what == "cancel":
        pair.a.core.cancel(sent)
    elif posted is not None:
        pair.b.core.withdraw(posted)
    else:
        pair.b.core.discard(b"")
    before = bytes(buffer)
    if not pair.joined:
        pair.join()
    pair.settle()
    if what == "cancel":
        assert sent.state is SendState.CANCELLED
        assert posted is not None
        pair.b.core.withdraw(posted)
        pair.settle()
    else:
        assert isinstance(sent.error, MessageRefused)
    assert bytes(buffer) == before
    assert_clean(pair)


def test_a_second_message_with_the_tag_of_an_interrupted_one_does_not_touch_its_buffer() -> None:
    pair = Pair().up()
    posted, first = pair.post(1, 5000), pair.send(1, 5000)
    pair.walk("pa fb fb")
    pair.die()
    second = pair.a.core.send(tag(1), memoryview(bytes(5000)), lambda message: None)
    pair.join()
    while pair.hear(pair.a) or pair.hear(pair.b) or pair.pull(pair.a) or pair.pull(pair.b):
        pass
    while pair.flow(pair.b, 1):
        pass
    pair.settle()
    assert holds(posted, 1)
    assert first.state is SendState.ACKED
    assert isinstance(second.error, MessageRefused)
    assert_clean(pair)


# -- lies about it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [((0, 11),), ((1, 1),), ((5, 1),)])
def test_a_hello_with_bytes_that_were_never_sent_changes_nothing(partial: tuple[tuple[int, int], ...]) -> None:
    pair = Pair().up()
    sent = pair.send(0, 10)
    pair.die()
    queued = pair.send(1, 10)
    pair.a.core.connected()
    with pytest.raises(ProtocolError, match="never sent"):
        pair.a.core.hello(Hello(2, 7, 1, 1, 0, (), 0, 100, partial), 0)
    assert pair.a.core.state is LinkState.DOWN
    assert (sent.state, queued.state) == (SendState.SENDING, SendState.QUEUED)


def test_a_hello_may_name_a_message_that_is_over() -> None:
    pair = Pair().up()
    sent = pair.send(0, 10)
    pair.die()
    pair.a.core.cancel(sent)
    pair.a.core.connected()
    pair.a.core.hello(Hello(2, 7, 1, 1, 0, (), 0, 100, ((0, 5),)), 0)
    assert pair.a.core.state is LinkState.UP


@pytest.mark.parametrize(
    "change", [{"offset": 1999}, {"length": 6000}, {"checksum": 1}, {"tag": tag(2)}, {"sequence": 1}]
)
def test_a_stream_that_continues_what_was_not_interrupted_breaks_the_protocol(change: dict[str, Any]) -> None:
    pair = Pair().up()
    pair.post(1, 5000), pair.send(1, 5000)
    pair.walk("pa fb fb")
    pair.die()
    pair.join()
    pair.walk("pa pb ha hb")
    said: dict[str, Any] = {"tag": tag(1), "sequence": 0, "length": 5000, "checksum": checksum(payload(1, 5000))}
    header = Header(**{**said, "attempt": 1, "offset": 2000, **change})
    with pytest.raises(ProtocolError, match="not interrupted"):
        pair.b.core.message_begin(header)


# -- above 32 bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [100, 8 * GIB])
def test_a_message_above_4_gib_keeps_its_length_offsets_and_checksum_through_a_reconnection(credit: int) -> None:
    """The bytes themselves stay where they are: untouched pages of sparse memory, but for some around the borders."""
    size = 4 * GIB + 12_345
    marks = [0, (1 << 31) - 2, (1 << 32) - 2, (1 << 32) + 1, size - 3]
    with mmap.mmap(-1, size, access=mmap.ACCESS_COPY) as source, mmap.mmap(-1, size, access=mmap.ACCESS_COPY) as target:
        for memory in (source, target):
            if hasattr(mmap, "MADV_HUGEPAGE"):  # one fault in 2 MiB instead of one in 4 KiB
                memory.madvise(mmap.MADV_HUGEPAGE)
        for n, at in enumerate(marks):
            source[at : at + 3] = bytes([n + 1] * 3)
        pair = Pair(credit=credit).up()
        posted = pair.b.core.post(tag(1), memoryview(target), lambda posted: None)
        sent = pair.a.core.send(tag(1), memoryview(source), lambda message: None)
        pair.walk("pa hb pb ha pa")
        (stream,) = pair.b.streams
        inflow = pair.b.core.message_begin(Header.decode(stream.header))
        assert inflow is not None
        assert inflow.header.length == size
        for n, at in enumerate(marks[:3]):  # up to the middle of the mark across the border
            inflow.view[at : at + 2] = stream.payload[at : at + 2]
            inflow.filled = at + 2 if n else inflow.filled
        assert inflow.filled == 1 << 32
        inflow.view[marks[1] + 2] = source[marks[1] + 2]
        inflow.view[2] = source[2]
        pair.die()
        assert pair.b.core._inbox.partial() == ((0, 1 << 32),)
        pair.join()
        pair.walk("pa pb ha hb")
        while not pair.b.streams:
            pair.walk("pa hb")
        (stream,) = pair.b.streams
        header = Header.decode(stream.header)
        assert (header.offset, header.length, len(stream.payload)) == (1 << 32, size, 12_345)
        inflow = pair.b.core.message_begin(header)
        assert inflow is not None
        assert inflow.filled == 1 << 32
        inflow.view[inflow.filled :] = stream.payload
        inflow.filled += len(stream.payload)
        pair.b.streams.clear()
        pair.b.core.message_end(inflow)
        pair.settle()
        assert posted.done
        assert posted.error is None
        assert sent.state is SendState.ACKED
        assert pair.a.core.stats.bytes_sent == pair.b.core.stats.bytes_received == size
        assert pair.a.core.stats.bytes_resumed == 1 << 32
        assert [target[at] for at in marks] == [source[at] for at in marks]
        assert_clean(pair)
        del inflow, stream, posted, sent, pair


@pytest.mark.parametrize("seed", range(int(os.environ.get("QUICOLL_TEST_RESUME_SEEDS", "20"))))
def test_without_corruption_no_byte_of_a_living_message_travels_twice(seed: int) -> None:
    """QUICOLL_TEST_RESUME_SEEDS: how many random histories (20)."""
    rng = random.Random(seed)
    pair = Pair(credit=rng.choice([0, 3000, 100_000]), chunk=rng.choice([1, 50, 700])).up()
    sizes = [rng.choice([0, 1, 500, 2000]) for _ in range(12)]
    posted = {}
    for n, size in enumerate(sizes):
        if rng.random() < 0.7:
            posted[n] = pair.post(n, size)
        pair.send(n, size)
        for _ in range(rng.randrange(60)):
            work, side = rng.choice([pair.pull, pair.hear, pair.flow]), rng.choice([pair.a, pair.b])
            work(side)
        if rng.random() < 0.6:
            pair.die()
            pair.join()
    pair.settle()
    for n, size in enumerate(sizes):
        taken = posted.get(n) or pair.post(n, size)
        pair.settle()
        assert holds(taken, n)
    assert pair.moved == sum(sizes)
    assert_clean(pair)


def test_the_payload_of_a_started_message_is_what_follows_its_offset() -> None:
    pair = Pair().up()
    pair.send(1, 10)
    action = pair.a.core.poll(0)
    assert isinstance(action, StartMessage)
    action.message.offset = 4
    assert bytes(action.message.rest()) == payload(1, 10)[4:]
    assert Header.decode(action.message.header()).offset == 4
