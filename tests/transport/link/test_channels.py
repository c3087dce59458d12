"""Channels in the core: exactly once, in order, each for itself, within the credit, whatever is withdrawn."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
from link_pair import Flip, Pair, Side, assert_clean, payload, tag

from quicoll_transport.errors import ConfigurationError, LinkLost, MessageCorrupted, MessageRefused, ProtocolError
from quicoll_transport.link.core import Outgoing, Posted, SendState
from quicoll_transport.link.frames import MAX_CHANNEL, MESSAGE_COST, Header, Offer, channel_tag, checksum

LIMIT = 1 << 20


def push(pair: Pair, channel: int, number: int, size: int) -> Outgoing:
    return pair.a.core.channel_send(channel, memoryview(payload(number, size)), lambda message: None)


def take(pair: Pair, channel: int, *, limit: int = LIMIT) -> Posted:
    return pair.b.core.channel_take(channel, limit, lambda posted: None)


def is_message(posted: Posted, number: int, size: int) -> bool:
    return posted.done and posted.error is None and not posted.void and posted.buffer == payload(number, size)


def arrive(side: Side, header: Header) -> None:
    inflow = side.core.message_begin(header)
    if inflow is not None:
        inflow.filled = header.length
        side.core.message_end(inflow)


# -- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, 50_000, 3 << 20])
@pytest.mark.parametrize("credit", [1 << 23, 100])
@pytest.mark.parametrize("asked", ["before", "while it arrives", "after"])
def test_a_message_of_any_size_arrives_without_a_posted_buffer(size: int, credit: int, asked: str) -> None:
    pair = Pair(credit=credit, chunk=1 << 16).up()
    posted = take(pair, 3, limit=4 << 20) if asked == "before" else None
    sent = push(pair, 3, 1, size)
    if asked == "while it arrives":
        pair.walk("pa hb fb")
        posted = take(pair, 3, limit=4 << 20)
    pair.settle()
    posted = posted or take(pair, 3, limit=4 << 20)
    pair.settle()
    assert is_message(posted, 1, size)
    assert sent.state is SendState.ACKED
    assert pair.moved == size
    assert_clean(pair)


def test_messages_of_a_channel_are_taken_in_the_order_in_which_they_were_sent_however_they_arrive() -> None:
    pair = Pair(credit=20_000).up()
    rng = random.Random(5)
    sizes = [rng.choice([0, 10, 900, 3000, 30_000]) for _ in range(60)]
    for n, size in enumerate(sizes):
        push(pair, 0, n, size)
    for n, size in enumerate(sizes):
        for _ in range(40):
            pair.pull(pair.a), pair.hear(pair.b), pair.flow(pair.b, rng.randrange(9))
        posted = take(pair, 0)
        pair.settle()
        assert is_message(posted, n, size)
        assert pair.b.core.stats.credit_held <= 20_000
    pair.settle()
    assert_clean(pair)


def test_channels_do_not_wait_for_each_other_nor_for_tags() -> None:
    pair = Pair(credit=5000).up()
    stuck = [push(pair, 1, n, 4000) for n in range(3)]  # nobody takes channel 1, and its messages use the credit up
    tagged = pair.send(50, 4000)
    moving = [push(pair, 2, 10 + n, 4000) for n in range(3)]
    for n in range(3):
        posted = take(pair, 2)
        pair.settle()
        assert is_message(posted, 10 + n, 4000)
    assert pair.post(50, 4000).done is False
    pair.settle()
    assert tagged.state is SendState.ACKED
    assert all(m.state is SendState.ACKED for m in moving)
    assert [m.state for m in stuck] == [SendState.ACKED, SendState.OFFERED, SendState.OFFERED]
    for n in range(3):
        posted = take(pair, 1)
        pair.settle()
        assert is_message(posted, n, 4000)
    assert_clean(pair)


def test_both_directions_of_a_channel_are_two_orders() -> None:
    pair = Pair().up()
    push(pair, 1, 1, 100)
    pair.b.core.channel_send(1, memoryview(b"back"), lambda message: None)
    pair.settle()
    assert is_message(take(pair, 1), 1, 100)
    answer = pair.a.core.channel_take(1, LIMIT, lambda posted: None)
    assert answer.buffer == b"back"


def test_discarding_every_tag_leaves_channels_alone() -> None:
    pair = Pair(credit=2000).up()
    pair.b.core.discard(b"")
    push(pair, 0, 1, 1000), push(pair, 0, 2, 4000)
    pair.settle()
    pair.b.core.discard(b"\0")
    for n, size in ((1, 1000), (2, 4000)):
        posted = take(pair, 0)
        pair.settle()
        assert is_message(posted, n, size)
    assert_clean(pair)


def test_what_waited_is_handed_over_in_the_memory_in_which_it_waited() -> None:
    pair = Pair().up()
    push(pair, 0, 1, 1000)
    pair.settle()
    (held,) = pair.b.core._inbox._held.values()
    posted = take(pair, 0)
    assert posted.buffer.obj is held.data.obj
    posted.buffer[0] ^= 1  # writable


@pytest.mark.parametrize("number", [-1, MAX_CHANNEL + 1])
def test_a_channel_outside_the_bounds_is_refused_here(number: int) -> None:
    pair = Pair().up()
    with pytest.raises(ConfigurationError, match="channel"):
        push(pair, number, 1, 1)
    with pytest.raises(ConfigurationError, match="channel"):
        take(pair, number)


def test_one_channel_is_waited_for_once_at_a_time_and_needs_flat_memory() -> None:
    pair = Pair().up()
    take(pair, 0)
    with pytest.raises(ConfigurationError, match="waited for already"):
        take(pair, 0)
    with pytest.raises(ConfigurationError, match="contiguous"):
        pair.a.core.channel_send(0, memoryview(bytes(8))[::2], lambda message: None)
    push(pair, MAX_CHANNEL, 1, 5)
    pair.settle()
    assert is_message(take(pair, MAX_CHANNEL), 1, 5)


# -- limits, corruption ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("asked_first", [True, False])
def test_a_message_above_the_limit_is_refused_and_the_next_one_is_not(credit: int, asked_first: bool) -> None:
    pair = Pair(credit=credit).up()
    posted = take(pair, 0, limit=999) if asked_first else None
    large, small = push(pair, 0, 1, 1000), push(pair, 0, 2, 999)
    pair.settle()
    posted = posted or take(pair, 0, limit=999)
    pair.settle()
    assert isinstance(posted.error, MessageRefused)
    assert "above the limit of 999" in str(posted.error)
    assert len(posted.buffer) == 0
    if asked_first or credit == 100:
        assert isinstance(large.error, MessageRefused)
        assert pair.moved <= 999, "it was refused before it travelled"
    after = take(pair, 0, limit=999)
    pair.settle()
    assert is_message(after, 2, 999)
    assert small.state is SendState.ACKED
    assert_clean(pair)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_size_that_is_only_named_takes_no_memory() -> None:
    pair = Pair(credit=100).up()
    before = resident_bytes()
    posted = take(pair, 0, limit=1 << 47)
    pair.b.core.control(Offer(0, channel_tag(0, 0), 64 << 30), 0)
    assert posted.done or len(posted.buffer) == 64 << 30
    assert resident_bytes() - before < 64 << 20
    if not posted.done:
        pair.b.core.withdraw(posted)
        posted.buffer.release()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_that_cannot_be_had_is_a_refusal() -> None:
    pair = Pair(credit=100).up()
    posted = take(pair, 0, limit=1 << 48)
    pair.b.core.control(Offer(0, channel_tag(0, 0), 1 << 48), 0)
    assert isinstance(posted.error, MessageRefused)
    assert "no memory" in str(posted.error)


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("asked_first", [True, False])
def test_a_message_that_stays_corrupt_names_its_channel_at_both_ends_and_the_next_one_comes(
    credit: int, asked_first: bool
) -> None:
    pair = Pair(credit=credit, fault=Flip(3), max_resends=2).up()
    push(pair, 9, 0, 0)
    posted = take(pair, 9)
    pair.settle()
    assert is_message(posted, 0, 0)
    posted = take(pair, 9) if asked_first else None
    sent = push(pair, 9, 1, 3000)
    pair.settle()
    posted = posted or take(pair, 9)
    pair.settle()
    for error, peer in ((sent.error, "b"), (posted.error, "a")):
        assert isinstance(error, MessageCorrupted)
        assert (error.peer, error.channel, error.counter, error.sequence, error.tag) == (peer, 9, 1, 1, b"")
        assert error.expected == checksum(payload(1, 3000)) != error.found
        assert "message 1 of channel 9" in str(error)
    assert sent.error.found == posted.error.found
    push(pair, 9, 2, 3000)
    after = take(pair, 9)
    pair.settle()
    assert is_message(after, 2, 3000)
    assert_clean(pair)


# -- withdrawing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reconnect", [False, True])
@pytest.mark.parametrize("asked_first", [False, True])
@pytest.mark.parametrize("credit", [100_000, 6000, 100])
@pytest.mark.parametrize("steps", range(0, 16))
def test_a_message_that_is_withdrawn_at_any_stage_does_not_stop_its_channel(
    steps: int, credit: int, asked_first: bool, reconnect: bool
) -> None:
    pair = Pair(credit=credit).up()
    posted = take(pair, 4) if asked_first else None
    push(pair, 4, 0, 10)
    withdrawn = push(pair, 4, 1, 5000)
    push(pair, 4, 2, 20)
    works = itertools.cycle([(pair.pull, pair.a), (pair.hear, pair.b), (pair.flow, pair.b), (pair.pull, pair.b)])
    for work, side in itertools.islice(works, steps):
        work(side)
    pair.a.core.cancel(withdrawn)
    if reconnect:
        pair.die()
        pair.join()
    got: list[memoryview] = []
    while len(got) < 3:
        posted = posted or take(pair, 4)
        pair.settle()
        assert posted.done
        assert posted.error is None
        if posted.void:
            got.append(memoryview(payload(1, 5000)))
        else:
            got.append(posted.buffer)
        posted = None
    assert got == [payload(0, 10), payload(1, 5000), payload(2, 20)]
    pair.settle()
    assert withdrawn.state in (SendState.CANCELLED, SendState.ACKED)
    assert_clean(pair)


@pytest.mark.parametrize("first", ["its stream", "the void one"])
def test_a_void_message_may_overtake_the_one_in_whose_place_it_stands(first: str) -> None:
    pair = Pair().up()
    posted = take(pair, 0)
    sent = push(pair, 0, 1, 3000)
    pair.pull(pair.a)
    if first == "its stream":
        pair.flow(pair.b)
    pair.a.core.cancel(sent)
    stream = pair.b.streams[0]
    while pair.pull(pair.a):
        pass
    if stream not in pair.b.streams:  # the reset is slower than everything else
        pair.b.streams.insert(0, stream)
        if first == "its stream":
            header = Header.decode(stream.header)
            assert stream.inflow is not None
            assert not stream.inflow.alive
            stream.begun, stream.inflow = False, None
            del header
    while pair.flow(pair.b, 1):
        pass
    pair.settle()
    assert posted.done
    assert posted.void
    push(pair, 0, 2, 5)
    after = take(pair, 0)
    pair.settle()
    assert is_message(after, 2, 5)
    assert_clean(pair)


# -- ends and lies ---------------------------------------------------------------------------------------------------


def test_the_end_of_the_link_ends_every_wait_and_every_send_of_a_channel() -> None:
    pair = Pair(credit=100).up()
    posted, sent = take(pair, 0), pair.b.core.channel_send(0, memoryview(bytes(500)), lambda message: None)
    pair.b.core.lose("gone", now_ns=0)
    late = take(pair, 0), pair.b.core.channel_send(0, memoryview(b""), lambda message: None)
    for item in (posted, sent, *late):
        assert isinstance(item.error, LinkLost)


def test_what_a_peer_sends_for_a_place_that_was_taken_is_refused() -> None:
    pair = Pair().up()
    for n in range(3):
        push(pair, 0, n, 10)
        posted = take(pair, 0)
        pair.settle()
        assert is_message(posted, n, 10)
    arrive(pair.b, Header(channel_tag(0, 1), 3, 10, 0))
    pair.b.core.control(Offer(4, channel_tag(0, 2), 10), 0)
    inbox = pair.b.core._inbox
    assert {3, 4} <= set(inbox.receipts._rejected)
    assert inbox.held_bytes == 0


def test_a_peer_that_skips_ahead_or_uses_many_channels_costs_its_credit_and_no_more() -> None:
    pair = Pair(credit=100 * MESSAGE_COST).up()
    for n in range(100):
        arrive(pair.b, Header(channel_tag(n, 1 << 60), n, 0, checksum(b"")))
    with pytest.raises(ProtocolError, match="credit"):
        arrive(pair.b, Header(channel_tag(0, 5), 100, 0, checksum(b"")))
    assert pair.b.core.stats.credit_peak == 100 * MESSAGE_COST
    assert pair.b.core._inbox._taken == {}


def test_a_tag_of_a_channels_length_is_no_callers_tag() -> None:
    pair = Pair().up()
    with pytest.raises(ConfigurationError, match="a tag has 24 bytes"):
        pair.a.core.send(channel_tag(0, 0), memoryview(b""), lambda message: None)
    with pytest.raises(ConfigurationError, match="a tag has 24 bytes"):
        pair.b.core.post(channel_tag(0, 0), memoryview(bytearray()), lambda posted: None)
    lookalike = channel_tag(0, 0) + bytes(8)
    sent = pair.a.core.send(lookalike, memoryview(b"tagged"), lambda message: None)
    push(pair, 0, 1, 6)
    posted = take(pair, 0)
    pair.settle()
    assert is_message(posted, 1, 6)
    assert sent.state is SendState.ACKED
    assert lookalike == tag(0)
