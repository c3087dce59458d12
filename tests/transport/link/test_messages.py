"""The core of a link: messages within their credit; their sizes; withdrawn, discarded, cancelled ones."""

from __future__ import annotations

import itertools
import random

import pytest
from link_pair import Pair, assert_clean, holds, payload, tag

from quicoll_transport.errors import ConfigurationError, MessageRefused
from quicoll_transport.link.core import LinkState, Outgoing, Posted, SendState
from quicoll_transport.link.frames import MAX_OFFERS, MAX_RANGES, MESSAGE_COST

# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 50_000])
@pytest.mark.parametrize("posted_first", [True, False])
def test_eager_message_arrives_whether_posted_before_or_after(size: int, posted_first: bool) -> None:
    pair = Pair().up()
    posted = pair.post(1, size) if posted_first else None
    sent = pair.send(1, size)
    pair.settle()
    assert sent.state is SendState.ACKED, "acknowledged when it has arrived, not when it is taken"
    if posted is None:
        assert pair.b.core.stats.credit_held == size + MESSAGE_COST
        posted = pair.post(1, size)
        pair.settle()
    assert holds(posted, 1)
    assert_clean(pair)


def test_eager_message_whose_buffer_is_posted_while_it_arrives() -> None:
    pair = Pair().up()
    sent = pair.send(1, 5000)
    pair.pull(pair.a)
    pair.flow(pair.b)
    posted = pair.post(1, 5000)
    wrong = pair.send(2, 5000)
    pair.pull(pair.a)
    pair.flow(pair.b, 1)
    misfit = pair.post(2, 4000)
    pair.settle()
    assert sent.state is wrong.state is SendState.ACKED
    assert holds(posted, 1)
    assert isinstance(misfit.error, MessageRefused)
    assert_clean(pair)


@pytest.mark.parametrize("posted_first", [True, False])
def test_message_above_the_credit_is_offered_and_travels_when_it_is_posted(posted_first: bool) -> None:
    pair = Pair(credit=1000).up()
    posted = pair.post(1, 20_000) if posted_first else None
    sent = pair.send(1, 20_000)
    assert sent.state is SendState.OFFERED
    pair.settle()
    if posted is None:
        assert sent.state is SendState.OFFERED
        assert pair.b.core.stats.credit_peak == 0
        posted = pair.post(1, 20_000)
        pair.settle()
    assert sent.state is SendState.ACKED
    assert holds(posted, 1)
    assert pair.credit_used() == 0, "a granted message takes no credit"
    assert_clean(pair)


def test_posted_receives_progress_while_unposted_messages_hog_the_credit() -> None:
    pair = Pair(credit=10 * (500 + MESSAGE_COST)).up()
    hogs = [pair.send(n, 500) for n in range(40)]
    pair.settle()
    assert [m.state for m in hogs] == [SendState.ACKED] * 10 + [SendState.OFFERED] * 30
    for n in range(100, 120):
        sent, posted = pair.send(n, 700), pair.post(n, 700)
        pair.settle()
        assert sent.state is SendState.ACKED
        assert holds(posted, n)
    late = [pair.post(n, 500) for n in reversed(range(40))]
    pair.settle()
    assert all(holds(posted, n) for n, posted in zip(reversed(range(40)), late, strict=True))
    assert_clean(pair)


def test_memory_for_unposted_messages_never_exceeds_the_credit_even_for_empty_ones() -> None:
    pair = Pair(credit=5000).up()
    rng = random.Random(3)
    sizes = [rng.choice([0, 0, 1, 100, 1500, 6000]) for _ in range(300)]
    sent = [pair.send(n, size) for n, size in enumerate(sizes)]
    pair.settle()
    assert 0 < pair.b.core.stats.credit_peak <= 5000
    order = list(range(300))
    rng.shuffle(order)
    posted = {}
    for n in order:
        posted[n] = pair.post(n, sizes[n])
        pair.settle()
        assert pair.b.core.stats.credit_held <= 5000
    assert all(holds(posted[n], n) for n in order)
    assert all(m.state is SendState.ACKED for m in sent)
    assert pair.b.core.stats.credit_peak <= 5000
    assert_clean(pair)


def test_messages_queued_before_the_link_is_up_travel_when_it_is() -> None:
    pair = Pair()
    sent = [pair.send(n, 100) for n in range(5)]
    posted = [pair.post(n, 100) for n in range(5)]
    cancelled = pair.send(9, 100)
    pair.a.core.cancel(cancelled)
    pair.a.core.send_app(b"first")
    pair.up()
    pair.settle()
    assert all(m.state is SendState.ACKED for m in sent)
    assert all(holds(p, n) for n, p in enumerate(posted))
    assert pair.b.apps == [b"first"]
    assert_clean(pair)


def test_more_offers_than_the_peer_takes_wait_their_turn() -> None:
    pair = Pair(credit=0).up()
    sent = [pair.send(n, 1) for n in range(MAX_OFFERS + 10)]
    states = [m.state for m in sent]
    assert states == [SendState.OFFERED] * MAX_OFFERS + [SendState.QUEUED] * 10
    pair.a.core.cancel(sent[0])
    assert sent[MAX_OFFERS].state is SendState.OFFERED
    posted = pair.post(5, 1)
    pair.settle()
    assert holds(posted, 5)
    assert sent[MAX_OFFERS + 1].state is SendState.OFFERED


@pytest.mark.slow
def test_what_arrived_is_acknowledged_however_many_gaps_are_before_it() -> None:
    pair = Pair(credit=100 * (MESSAGE_COST + 1)).up()
    count = 2 * MAX_RANGES + 100
    arrived = []
    for n in range(count):
        pair.send(2 * n, 100_000)  # offered, and never posted: a gap
        posted, sent = pair.post(2 * n + 1, 1), pair.send(2 * n + 1, 1)
        pair.settle()
        assert holds(posted, 2 * n + 1)
        arrived.append(sent)
    assert all(m.state is SendState.ACKED for m in arrived)
    unheard = [pair.send(10**6 + n, 1) for n in range(20)]
    taken = [pair.post(10**6 + n, 1) for n in range(20)]
    while pair.pull(pair.a):
        pass
    while pair.flow(pair.b):
        pass
    assert all(p.done for p in taken)
    pair.die()
    pair.up()
    assert all(m.state is SendState.ACKED for m in unheard), "Hello lists MAX_RANGES, acknowledgements the rest"


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (memoryview(b"abcd"), "writable"),
        (memoryview(bytearray(8)).cast("I"), "contiguous run of bytes"),
        (memoryview(bytearray(8))[::2], "contiguous run of bytes"),
    ],
)
def test_memory_that_is_no_flat_run_of_bytes_is_refused_here(view: memoryview, reason: str) -> None:
    pair = Pair().up()
    with pytest.raises(ConfigurationError, match=reason):
        pair.b.core.post(tag(1), view, lambda posted: None)
    if not view.readonly:
        with pytest.raises(ConfigurationError, match=reason):
            pair.a.core.send(tag(1), view, lambda message: None)
    assert_clean(pair)


def test_misuse_of_tags_is_refused_here() -> None:
    pair = Pair().up()
    with pytest.raises(ConfigurationError, match="tag"):
        pair.a.core.send(b"short", memoryview(b""), lambda message: None)
    with pytest.raises(ConfigurationError, match="tag"):
        pair.b.core.post(b"short", memoryview(bytearray()), lambda posted: None)
    pair.post(1, 5)
    with pytest.raises(ConfigurationError, match="already posted"):
        pair.post(1, 5)


@pytest.mark.parametrize("credit", [100_000, 0])
@pytest.mark.parametrize("when", ["both on their way", "one after the other"])
def test_a_second_message_with_the_same_tag_is_refused(credit: int, when: str) -> None:
    pair = Pair(credit=credit).up()
    first = pair.send(1, 300)
    if when == "one after the other":
        pair.settle()
    second = pair.send(1, 300)
    pair.settle()
    posted = pair.post(1, 300)
    pair.settle()
    assert holds(posted, 1)
    assert first.state is SendState.ACKED
    assert isinstance(second.error, MessageRefused)
    assert "tag" in str(second.error)
    assert_clean(pair)


# -- sizes, withdrawal, discarding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize("size", [0, 1999, 2001])
def test_message_of_another_size_than_its_buffer_fails_at_both_ends(credit: int, posted_first: bool, size: int) -> None:
    pair = Pair(credit=credit).up()
    posted = pair.post(1, size) if posted_first else None
    sent = pair.send(1, 2000)
    pair.settle()
    posted = posted or pair.post(1, size)
    pair.settle()
    assert isinstance(posted.error, MessageRefused)
    assert "2000 bytes" in str(posted.error)
    if posted_first or credit == 100:
        assert isinstance(sent.error, MessageRefused)
        assert pair.b.core.stats.bytes_received == 0, "it was refused before it travelled"
    else:
        assert sent.state is SendState.ACKED, "it had arrived before anybody posted"
    assert_clean(pair)
    assert pair.a.core.state is LinkState.UP


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("steps", range(8))
def test_withdrawn_buffer_is_never_written_again(credit: int, steps: int) -> None:
    pair = Pair(credit=credit).up()
    told: list[Posted] = []
    buffer = bytearray(5000)
    posted = pair.b.core.post(tag(1), memoryview(buffer), told.append)
    sent = pair.send(1, 5000)
    for _ in range(steps):
        pair.walk("pa hb pb ha fb")
    if posted.done:
        return
    pair.b.core.withdraw(posted)
    before = bytes(buffer)
    pair.settle()
    assert bytes(buffer) == before
    assert told == []
    again = pair.post(1, 5000)
    pair.settle()
    if sent.error is not None:
        assert isinstance(sent.error, MessageRefused)
        assert "withdrawn" in str(sent.error)
        pair.b.core.withdraw(again)
    else:
        assert holds(again, 1), "a message that was not on its way yet can still be had"
    assert_clean(pair)


def test_discard_drops_what_is_held_offered_and_arriving_and_what_comes_later() -> None:
    pair = Pair(credit=3 * (100 + MESSAGE_COST)).up()
    held = pair.send(1, 100, view=5)
    other = pair.send(2, 100, view=6)
    pair.settle()
    offered = pair.send(3, 5000, view=5)
    arriving = pair.send(4, 100, view=5)
    pair.chunk = 10
    pair.walk("pa hb pa fb")
    pair.b.core.discard((5).to_bytes(8, "big"))
    pair.b.core.discard((5).to_bytes(8, "big"))
    pair.settle()
    later = [pair.send(5, 50, view=5), pair.send(6, 50_000, view=5)]
    pair.settle()
    assert held.state is SendState.ACKED
    for message in (offered, arriving, *later):
        assert isinstance(message.error, MessageRefused), message
    refused = pair.post(1, 100, view=5)
    assert isinstance(refused.error, MessageRefused)
    posted = pair.post(2, 100, view=6)
    pair.settle()
    assert other.state is SendState.ACKED
    assert holds(posted, 2)
    assert_clean(pair)


def test_discarding_does_not_forget_early_prefixes_after_a_few_hundred() -> None:
    pair = Pair().up()
    for view in range(500):
        pair.b.core.discard(view.to_bytes(8, "big"))
    late = pair.send(1, 100, view=0)
    pair.settle()
    assert isinstance(late.error, MessageRefused)
    assert_clean(pair)


# -- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reconnect", [False, True])
@pytest.mark.parametrize("posted_first", [False, True])
@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("steps", range(12))
def test_cancel_at_every_stage_gives_the_credit_back_exactly_once(
    steps: int, credit: int, posted_first: bool, reconnect: bool
) -> None:
    pair = Pair(credit=credit).up()
    posted = pair.post(1, 5000) if posted_first else None
    told: list[Outgoing] = []
    sent = pair.a.core.send(tag(1), memoryview(payload(1, 5000)), told.append)
    works = itertools.cycle([(pair.pull, pair.a), (pair.hear, pair.b), (pair.flow, pair.b), (pair.pull, pair.b)])
    for work, side in itertools.islice(works, steps):
        work(side)
    pair.a.core.cancel(sent)
    pair.a.core.cancel(sent)
    if reconnect:
        pair.die()
        pair.up()
    pair.settle()
    assert told == [sent]
    assert sent.state in (SendState.CANCELLED, SendState.ACKED)
    posted = posted or pair.post(1, 5000)
    pair.settle()
    if posted.done:
        assert holds(posted, 1), "what had arrived is whole"
    else:
        pair.b.core.withdraw(posted)
        pair.settle()
    assert_clean(pair)
