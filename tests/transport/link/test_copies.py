"""Messages that are copied: among the control messages, acknowledged along with what is said next, exactly once."""

from __future__ import annotations

from typing import Any

import pytest
from link_pair import MS, Flip, Pair, assert_clean, holds, payload, tag

from quicoll_transport.errors import ConfigurationError, LinkLost, MessageCorrupted, MessageRefused, ProtocolError
from quicoll_transport.link.control_stream import ControlReader, encode_control
from quicoll_transport.link.frames import INLINE_BYTES, Ack, App, Cancel, Header, InlineMessage, checksum

LATE = 5 * MS


def copy(pair: Pair, number: int, size: int) -> None:
    pair.a.core.send_copy(tag(number), payload(number, size))


def deliver(pair: Pair) -> None:
    """All that is said arrives, while no time passes."""
    while any(work(side) for side in (pair.a, pair.b) for work in (pair.pull, pair.hear, pair.flow)):
        pass


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES])
@pytest.mark.parametrize("posted_first", [True, False])
def test_a_copy_arrives_without_a_stream_of_its_own(size: int, posted_first: bool) -> None:
    pair = Pair().up()
    posted = pair.post(1, size) if posted_first else None
    copy(pair, 1, size)
    pair.settle()
    posted = posted or pair.post(1, size)
    pair.settle()
    assert holds(posted, 1)
    assert pair.moved == 0
    assert pair.a.core.stats.messages_sent == pair.b.core.stats.messages_received == 1
    assert_clean(pair)


def test_more_than_a_few_bytes_are_not_copied() -> None:
    pair = Pair().up()
    with pytest.raises(ConfigurationError, match="4097 bytes"):
        copy(pair, 1, INLINE_BYTES + 1)
    with pytest.raises(ConfigurationError, match="a tag of 3"):
        pair.a.core.send_copy(b"tag", b"")


def test_nobody_hears_of_a_copy_on_a_link_that_has_ended() -> None:
    pair = Pair().up()
    pair.a.core.close("done")
    copy(pair, 1, 5)
    deliver(pair)
    assert pair.a.core.drained


def test_what_nobody_waits_for_is_acknowledged_after_a_while_in_one_word() -> None:
    pair = Pair().up()
    pair.post(1, 5)
    pair.b.core.handle_timer(pair.now)  # the first heartbeat; what it says would be said along with it
    deliver(pair)
    pair.a.said.clear()
    pair.a.core.send_app(b"called")
    copy(pair, 1, 5)
    deliver(pair)
    assert pair.a.said == []
    assert pair.b.core.next_timer() == pair.b.core.news_ns == pair.now + LATE
    pair.b.core.handle_timer(pair.now + LATE - 1)
    deliver(pair)
    assert pair.a.said == []
    pair.b.core.handle_timer(pair.now + LATE)
    deliver(pair)
    assert [type(word) for word in pair.a.said] == [Ack]
    assert_clean(pair)


def test_an_acknowledgement_goes_along_with_what_is_said_anyway() -> None:
    pair = Pair().up()
    pair.a.core.send_app(b"question")
    deliver(pair)
    pair.a.said.clear()
    pair.b.core.send_app(b"answer")
    pair.pull(pair.b)
    pair.pull(pair.b)
    pair.hear(pair.a)
    pair.hear(pair.a)
    assert [type(word) for word in pair.a.said] == [App, Ack]
    assert pair.b.core.news_ns is None


def test_acknowledgements_go_along_once_in_a_millisecond_and_none_is_later_than_it_would_be_alone() -> None:
    pair = Pair().up()
    said: list[int] = []
    begun = pair.now
    for at in range(0, 4 * MS, MS // 4):
        pair.now = begun + at
        pair.a.core.send_app(b"question")
        deliver(pair)
        pair.a.said.clear()
        pair.b.core.send_app(b"answer")
        deliver(pair)
        said += [at for word in pair.a.said if isinstance(word, Ack)]
    assert said == [0, MS, 2 * MS, 3 * MS]
    assert pair.b.core.news_ns == begun + 3 * MS + MS // 4 + LATE, "since the oldest that is not acknowledged came"
    pair.now = pair.b.core.news_ns
    pair.b.core.handle_timer(pair.now)
    pair.a.core.handle_timer(pair.now)
    deliver(pair)
    assert pair.a.core.drained
    assert_clean(pair)


def test_the_first_acknowledgement_on_a_connection_goes_along_whenever_the_last_one_went() -> None:
    pair = Pair().up()
    for _ in range(2):
        pair.a.core.send_app(b"question")
        deliver(pair)
        pair.a.said.clear()
        pair.b.core.send_app(b"answer")
        deliver(pair)
        assert [type(word) for word in pair.a.said] == [App, Ack]
        pair.die()
        pair.up()
        deliver(pair)


def test_what_somebody_waits_for_is_acknowledged_at_once() -> None:
    pair = Pair().up()
    pair.post(1, 5)
    sent = pair.send(1, 5)
    deliver(pair)
    assert sent.done


def test_many_words_are_acknowledged_before_the_sender_has_to_wait() -> None:
    pair = Pair().up()
    for _ in range(1000):
        pair.a.core.send_app(bytes(1000))
        deliver(pair)
    assert pair.a.core._outbox._app_bytes < 100_000


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_a_copy_arrives_exactly_once_wherever_the_connection_died(moves: int) -> None:
    pair = Pair().up()
    posted = pair.post(1, 5)
    copy(pair, 1, 5)
    for work, side in [(pair.pull, pair.a), (pair.hear, pair.b), (pair.pull, pair.b)][:moves]:
        work(side)
    pair.die()
    assert pair.b.core.news_ns is None
    pair.up()
    pair.settle()
    assert holds(posted, 1)
    assert pair.b.core.stats.messages_received == 1
    assert_clean(pair)


def test_a_spoilt_copy_is_sent_again_and_one_that_stays_spoilt_fails_where_it_is_waited_for() -> None:
    pair = Pair(fault=Flip(2)).up()
    posted = pair.post(1, 5)
    copy(pair, 1, 5)
    pair.settle()
    assert holds(posted, 1)
    pair = Pair(fault=Flip(99)).up()
    posted = pair.post(1, 5)
    copy(pair, 1, 5)
    pair.settle()
    assert isinstance(posted.error, MessageCorrupted)
    assert_clean(pair)


def test_a_copy_that_nobody_wants_is_refused_and_forgotten() -> None:
    pair = Pair().up()
    pair.b.core.discard(tag(1)[:8])
    copy(pair, 1, 5)
    pair.settle()
    assert any(isinstance(word, Cancel) for word in pair.b.said)
    assert_clean(pair)
    assert isinstance(pair.post(1, 5).error, MessageRefused)


@pytest.mark.parametrize("credit", [1000, 3 << 20])
def test_copies_beyond_the_credit_are_offered_and_many_have_streams(credit: int) -> None:
    pair = Pair(credit=credit).up()
    count = 2500
    for number in range(count):
        copy(pair, number, 1000)
    pair.settle()
    inline = sum(isinstance(word, InlineMessage) for word in pair.b.said)
    assert inline == min(credit // 1256, (1 << 20) // 1256)
    posted = [pair.post(number, 1000) for number in range(count)]
    pair.settle()
    assert all(holds(each, number) for number, each in enumerate(posted))
    assert_clean(pair)


def test_the_end_of_the_link_leaves_nothing() -> None:
    pair = Pair().up()
    copy(pair, 1, 5)
    deliver(pair)
    for side in (pair.a, pair.b):
        side.core.lose("silence", now_ns=pair.now)
        assert side.core.next_timer() is None
        assert isinstance(side.core.error, LinkLost)
    assert pair.a.core.drained


@pytest.mark.parametrize(
    ("change", "data"),
    [({"length": 4}, b"12345"), ({"offset": 1}, b"12345"), ({"eager": False}, b"12345"), ({"length": 6}, b"12345")],
)
def test_a_copy_that_is_not_whole_breaks_the_protocol(change: dict[str, int], data: bytes) -> None:
    pair = Pair().up()
    fields: dict[str, Any] = {"tag": tag(1), "sequence": 0, "length": 5, "checksum": checksum(data), **change}
    header = Header(**fields)
    with pytest.raises(ProtocolError):
        pair.b.core.control(InlineMessage(header.encode(), data), pair.now)


def test_a_copy_above_the_bound_is_refused_before_it_is_looked_at() -> None:
    word = InlineMessage(bytes(72), bytes(INLINE_BYTES + 1))
    with pytest.raises(ProtocolError, match="inline message of 4097 bytes"):
        ControlReader().feed(encode_control(word))
