"""The core of a link: states, messages, credit, cancelling, reconnection, corruption, the end, and a lying peer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from link_pair import MS, Flip, Pair, assert_clean, holds, payload, tag

from quicoll_transport.errors import (
    ConfigurationError,
    LinkLost,
    MessageCorrupted,
    MessageRefused,
    ProtocolError,
)
from quicoll_transport.frames import (
    HEADER_SIZE,
    MAX_APP,
    MAX_OFFERS,
    MAX_RANGES,
    MESSAGE_COST,
    Ack,
    App,
    Cancel,
    Control,
    Credit,
    Grant,
    Header,
    Hello,
    Nack,
    Offer,
    Ping,
    Pong,
    Refuse,
    checksum,
    encode_control,
)
from quicoll_transport.link import (
    TRANSITIONS,
    LinkCore,
    LinkState,
    Outgoing,
    Posted,
    ResetMessage,
    SendState,
    StartMessage,
)

# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", LinkState)
@pytest.mark.parametrize("after", LinkState)
def test_only_the_transitions_of_the_table_are_possible(before: LinkState, after: LinkState) -> None:
    pair = Pair()
    pair.a.core.state = before
    if after in TRANSITIONS[before]:
        pair.a.core._become(after)
        assert pair.a.core.state is after
        assert pair.a.states == [after]
    else:
        with pytest.raises(AssertionError, match="cannot become"):
            pair.a.core._become(after)
        assert pair.a.core.state is before


def in_state(state: LinkState) -> Pair:
    pair = Pair()
    if state is not LinkState.CONNECTING:
        pair.up()
    if state is LinkState.DOWN:
        pair.die()
    elif state is LinkState.LOST:
        pair.a.core.lose("gone", now_ns=0)
    elif state is LinkState.CLOSED:
        pair.a.core.close("done")
    assert pair.a.core.state is state
    return pair


def greet(core: LinkCore) -> None:
    core.disconnected()
    core.connected()
    core.hello(Hello(2, 7, 1, 1, 0, (), 0, 0), 0)


C, U, D, L, X = LinkState.CONNECTING, LinkState.UP, LinkState.DOWN, LinkState.LOST, LinkState.CLOSED


@pytest.mark.parametrize(
    ("event", "after"),
    [  # what happens, and the state that each of C, U, D, L, X is left in
        (greet, (U, U, U, L, X)),
        (lambda core: core.connected(), (C, U, D, L, X)),
        (lambda core: core.disconnected(), (C, D, D, L, X)),
        (lambda core: core.lose("gone", now_ns=0), (L, L, L, L, X)),
        (lambda core: core.close("done"), (X, X, X, L, X)),
        (lambda core: core.handle_timer(0), (C, U, D, L, X)),
        (lambda core: core.heard(0), (C, U, D, L, X)),
        (lambda core: core.cancel(core.send(tag(1), memoryview(b"x"), lambda m: None)), (C, U, D, L, X)),
        (lambda core: core.control(Ping(1), 0), (C, U, D, L, X)),
        (lambda core: [core.handle_timer(n * 50 * MS) for n in range(200)], (L, L, L, L, X)),
    ],
    ids=["hello", "connected", "disconnected", "lose", "close", "early timer", "heard", "cancel", "ping", "silence"],
)
@pytest.mark.parametrize("before", LinkState)
def test_every_event_in_every_state_leads_where_the_table_says_and_nowhere_else(
    before: LinkState, event: Callable[[LinkCore], object], after: tuple[LinkState, ...]
) -> None:
    core = in_state(before).a.core
    event(core)
    found = after[[C, U, D, L, X].index(before)]
    assert core.state is found
    assert core.ended == (not TRANSITIONS[found])


def test_every_state_is_reached_by_what_it_stands_for() -> None:
    pair = Pair()
    assert pair.a.core.state is LinkState.CONNECTING
    pair.up()
    pair.die()
    pair.up()
    pair.die()
    pair.a.core.lose("gone", now_ns=0)
    pair.b.core.close("done")
    assert pair.a.states == [LinkState.UP, LinkState.DOWN, LinkState.UP, LinkState.DOWN, LinkState.LOST]
    assert pair.b.states == [LinkState.UP, LinkState.DOWN, LinkState.UP, LinkState.DOWN, LinkState.CLOSED]


@pytest.mark.parametrize("end", ["lose", "close"])
def test_an_ended_link_stays_as_it_is(end: str) -> None:
    pair = Pair().up()
    core = pair.a.core
    core.lose("gone", now_ns=0) if end == "lose" else core.close("done")
    state, error = core.state, core.error
    core.lose("again", now_ns=0)
    core.close("again")
    core.handle_timer(10**12)
    core.heard(10**12)
    core.unreachable(10**12)
    core.disconnected()
    core.connected()
    core.hello(Hello(2, 7, 1, 1, 0, (), 0, 0), 0)
    core.control(Ping(1), 0)
    core.discard(b"")
    assert (core.state, core.error) == (state, error)
    assert core.next_timer() is None
    assert core.poll() is None
    assert pair.a.states == [LinkState.UP, state]


def test_a_link_that_is_not_reached_is_lost_at_its_connect_deadline_with_the_last_refusal() -> None:
    pair = Pair()
    core = pair.a.core
    core.refusal = "refused"
    assert core.next_timer() == 5000 * MS
    core.handle_timer(5000 * MS - 1)
    core.unreachable(100)
    assert core.state is LinkState.CONNECTING
    core.handle_timer(5000 * MS)
    assert core.state is LinkState.LOST
    assert "not reached within 5.0 s (refused)" in core.cause


@pytest.mark.parametrize("joined", [True, False])
def test_silence_makes_suspect_and_then_lost_up_or_down(joined: bool) -> None:
    pair = Pair().up()
    if not joined:
        pair.die()
    core, suspicions = pair.a.core, []
    while (at := core.next_timer()) is not None:
        core.handle_timer(at)
        suspicions.append(core.suspect)
    assert suspicions[0] is False
    assert True in suspicions
    assert at is None
    assert core.state is LinkState.LOST
    assert isinstance(core.error, LinkLost)
    assert core.error.silent_for == pytest.approx(1.0)
    assert core.error.peer == "b"


def test_suspicion_ends_when_the_peer_is_heard_and_both_changes_are_told() -> None:
    pair = Pair().up()
    core = pair.a.core
    while not core.suspect:
        core.handle_timer(core.next_timer() or 0)
    assert pair.a.states == [LinkState.UP, LinkState.UP], "told once"
    core.heard(600 * MS)
    assert not core.suspect
    assert pair.a.states == [LinkState.UP] * 3


def test_time_before_the_first_connection_is_no_stall_and_no_silence() -> None:
    pair = Pair()
    pair.now = 4900 * MS
    pair.up()
    core = pair.a.core
    core.handle_timer(pair.now)
    assert core.state is LinkState.UP
    assert core.detector.stalls == 0


def test_heartbeats_are_answered_and_measure_the_round_trip() -> None:
    pair = Pair().up()
    pair.now = 200 * MS
    pair.a.core.handle_timer(pair.now)
    pair.pull(pair.a)
    pair.now = 230 * MS
    pair.settle()
    assert pair.a.core.detector.rtt_ns == 30 * MS


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
        assert pair.b.core.stats.held_bytes == size + MESSAGE_COST
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
        assert pair.b.core.stats.held_peak == 0
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
    assert 0 < pair.b.core.stats.held_peak <= 5000
    order = list(range(300))
    rng.shuffle(order)
    posted = {}
    for n in order:
        posted[n] = pair.post(n, sizes[n])
        pair.settle()
        assert pair.b.core.stats.held_bytes <= 5000
    assert all(holds(posted[n], n) for n in order)
    assert all(m.state is SendState.ACKED for m in sent)
    assert pair.b.core.stats.held_peak <= 5000
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


# -- connections that die --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("first", [None, "a", "b"])
@pytest.mark.parametrize("steps", range(24))
def test_resumed_message_arrives_exactly_once_wherever_the_connection_died(
    steps: int, first: str | None, credit: int
) -> None:
    pair = Pair(credit=credit).up()
    told: list[object] = []
    buffer = bytearray(3000)
    posted = pair.b.core.post(tag(1), memoryview(buffer), told.append)
    sent = pair.a.core.send(tag(1), memoryview(payload(1, 3000)), told.append)
    pair.a.core.send_app(b"x")
    works = [(pair.pull, pair.a), (pair.hear, pair.b), (pair.flow, pair.b), (pair.pull, pair.b), (pair.hear, pair.a)]
    for work, side in itertools.islice(itertools.cycle(works), steps):
        work(side)
    pair.die(first=None if first is None else getattr(pair, first))
    if first is not None:  # the other side still takes what has reached it, and answers into the void
        rest = pair.other(getattr(pair, first))
        while pair.hear(rest) or pair.flow(rest) or pair.pull(rest):
            pass
    pair.up()
    pair.settle()
    assert sent.state is SendState.ACKED
    assert holds(posted, 1)
    assert told.count(posted) == told.count(sent) == 1
    assert pair.b.core.stats.messages_received == 1
    assert pair.b.apps == [b"x"]
    assert_clean(pair)


def test_a_message_whose_acknowledgement_was_lost_is_not_sent_again() -> None:
    pair = Pair().up()
    sent, posted = pair.send(1, 3000), pair.post(1, 3000)
    while pair.pull(pair.a):
        pass
    while pair.flow(pair.b):
        pass
    assert posted.done
    assert sent.state is SendState.SENDING
    pair.die()
    pair.up()
    assert sent.state is SendState.ACKED
    assert pair.a.core.stats.resends == 0
    assert_clean(pair)


def test_application_messages_stay_in_order_and_single_over_any_number_of_connections() -> None:
    pair = Pair().up()
    rng = random.Random(17)
    words = [str(n).encode() for n in range(200)]
    for n, word in enumerate(words):
        pair.a.core.send_app(word)
        for _ in range(rng.randrange(6)):
            rng.choice([pair.pull, pair.hear])(rng.choice([pair.a, pair.b]))
        if n % 10 == 9:
            pair.die(first=rng.choice([None, pair.a, pair.b]))
            if n % 30 == 9:
                while pair.hear(pair.b):
                    pass
            pair.join()
    pair.settle()
    assert pair.b.apps == words
    assert pair.a.core.drained
    assert_clean(pair)


@pytest.mark.parametrize("size", [0, MAX_APP])
def test_application_messages_that_wait_are_bounded_in_number_and_sum(size: int) -> None:
    pair = Pair()

    def flood() -> None:
        for _ in range(100_000):
            pair.a.core.send_app(bytes(size))

    with pytest.raises(MessageRefused, match="wait for the peer"):
        flood()
    pair.up()
    pair.settle()
    assert pair.a.core.drained
    pair.a.core.send_app(b"there is room again")
    pair.settle()
    assert pair.b.apps[-1] == b"there is room again"
    assert_clean(pair)


def test_application_message_above_the_limit_is_refused_here() -> None:
    with pytest.raises(MessageRefused, match="above"):
        Pair().a.core.send_app(bytes(MAX_APP + 1))


def test_offers_and_grants_are_made_again_after_a_reconnection() -> None:
    pair = Pair(credit=0).up()
    waiting, granted = pair.send(1, 2000), pair.send(2, 2000)
    posted = pair.post(2, 2000)
    pair.pull(pair.a), pair.pull(pair.a), pair.hear(pair.b), pair.hear(pair.b)  # Grant is on its way
    pair.die()
    pair.up()
    pair.settle()
    assert holds(posted, 2)
    assert granted.state is SendState.ACKED
    late = pair.post(1, 2000)
    pair.settle()
    assert holds(late, 1)
    assert waiting.state is SendState.ACKED
    assert_clean(pair)


def test_a_refusal_that_died_with_its_connection_does_not_pass_for_success() -> None:
    pair = Pair().up()
    posted, sent = pair.post(1, 10), pair.send(1, 2000)
    while pair.pull(pair.a):
        pass
    while pair.flow(pair.b):
        pass
    assert isinstance(posted.error, MessageRefused)
    for _ in range(3):
        pair.die()
        pair.join()
        while pair.hear(pair.b) or pair.pull(pair.b):
            pass
    pair.up()
    pair.settle()
    assert isinstance(sent.error, MessageRefused)
    assert_clean(pair)


# -- corruption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_corrupt_payload_is_sent_again_from_the_source(times: int, posted_first: bool, credit: int) -> None:
    pair = Pair(max_resends=2, fault=Flip(times), credit=credit).up()
    posted = pair.post(1, 3000) if posted_first else None
    sent = pair.send(1, 3000)
    pair.settle()
    posted = posted or pair.post(1, 3000)
    pair.settle()
    assert sent.state is SendState.ACKED
    assert holds(posted, 1)
    assert sent.attempt == pair.a.core.stats.resends == pair.b.core.stats.corrupt == times
    assert_clean(pair)


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize("dies", [False, True])
def test_payload_that_stays_corrupt_fails_at_both_ends_with_both_digests(
    dies: bool, posted_first: bool, credit: int
) -> None:
    pair = Pair(max_resends=2, fault=Flip(3), credit=credit).up()
    posted = pair.post(1, 3000) if posted_first else None
    sent = pair.send(1, 3000)
    if not posted_first and credit == 100:
        pair.settle()
        posted = pair.post(1, 3000)
    while pair.b.core.stats.corrupt < 3:
        pair.walk("pa fb hb pb ha")
    if dies:  # the news of it too
        pair.die()
        pair.up()
    pair.settle()
    posted = posted or pair.post(1, 3000)
    pair.settle()
    for error in (sent.error, posted.error):
        assert isinstance(error, MessageCorrupted)
        assert error.expected == checksum(payload(1, 3000))
        assert error.found != error.expected
    assert sent.error.found == posted.error.found  # type: ignore[union-attr]
    assert pair.b.core.stats.messages_received == 0
    assert pair.a.core.state is LinkState.UP
    assert_clean(pair)


def test_failed_checksums_are_counted_over_reconnections() -> None:
    pair = Pair(max_resends=2, fault=Flip(99)).up()
    posted, sent = pair.post(1, 3000), pair.send(1, 3000)
    for expected in (1, 2, 3):
        while pair.b.core.stats.corrupt < expected:
            pair.walk("pa pb ha hb fb")
        pair.die()
        pair.join()
    pair.settle()
    assert isinstance(sent.error, MessageCorrupted)
    assert isinstance(posted.error, MessageCorrupted)
    assert_clean(pair)


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["lose", "close"])
@pytest.mark.parametrize("connected", [True, False])
def test_after_the_end_nothing_is_pending(end: str, connected: bool) -> None:
    pair = Pair(credit=3000).up()
    told: list[Outgoing | Posted] = []
    core = pair.b.core
    sent = [core.send(tag(n), memoryview(payload(n, 700)), told.append) for n in range(8)]
    posted = [core.post(tag(n), memoryview(bytearray(700)), told.append) for n in range(8)]
    for n in (0, 50):
        pair.send(n, 700)
    core.send_app(b"word")
    pair.chunk = 100
    for _ in range(3):
        pair.walk("pa pb fb hb")
    inflows = list(core._inbox._inflows.values())
    assert inflows
    if not connected:
        pair.die()
    core.lose("gone", now_ns=7) if end == "lose" else core.close("gone")
    assert sorted(map(id, told)) == sorted(map(id, [*sent, *posted])), "each was told exactly once"
    for item in told:
        assert isinstance(item.error, LinkLost)
        assert item.done
    assert not any(inflow.alive for inflow in inflows)
    for table in (core._outbox._outgoing, core._outbox._queue, core._outbox._app, core._inbox._posted):
        assert not table
    assert core.stats.held_bytes == 0
    late = [core.send(tag(90), memoryview(b"x"), told.append), pair.post(91, 1)]
    assert all(item.done and item.error is core.error for item in late)
    with pytest.raises(LinkLost, match="gone"):
        core.send_app(b"late")
    core.cancel(sent[0])
    core.withdraw(posted[0])
    assert core.message_begin(Header(tag(4), 99, 700, 0)) is None
    actions = []
    while (action := core.poll()) is not None:
        actions.append(action)
    if connected:
        assert any(isinstance(action, ResetMessage) for action in actions)


# -- callbacks that call back ----------------------------------------------------------------------------------------


def test_sending_from_on_state_sends_once() -> None:
    pair = Pair()
    sent: list[Outgoing] = []

    def on_state(state: LinkState) -> None:
        if state is LinkState.UP:
            sent.append(pair.send(len(sent), 100))
            pair.a.core.send_app(str(len(sent)).encode())

    pair.a.core._on_state = on_state
    for _ in range(3):
        pair.up()
        pair.settle()
        pair.die()
    assert len(sent) == 3
    assert all(m.state is SendState.ACKED and m.attempt == 0 for m in sent)
    assert pair.b.apps == [b"1", b"2", b"3"]
    assert pair.a.core.stats.resends == 0


@pytest.mark.parametrize("state", [LinkState.UP, LinkState.DOWN])
def test_closing_from_on_state_is_the_end(state: LinkState) -> None:
    pair = Pair()

    def on_state(now: LinkState) -> None:
        pair.a.states.append(now)
        if now is state:
            pair.a.core.close("enough")

    pair.a.core._on_state = on_state
    sent = pair.send(1, 10)
    pair.join()
    pair.settle()
    pair.die()
    assert pair.a.core.state is LinkState.CLOSED
    assert pair.a.states[-1] is LinkState.CLOSED
    assert sent.done


@pytest.mark.parametrize("reconnect", [False, True])
def test_on_done_may_cancel_the_others_while_acknowledgements_or_hello_are_worked_through(reconnect: bool) -> None:
    pair = Pair(credit=10_000).up()
    messages: list[Outgoing] = []
    told: list[Outgoing] = []

    def cancel_all(done: Outgoing) -> None:
        told.append(done)
        for message in messages:
            pair.a.core.cancel(message)

    messages += [pair.a.core.send(tag(n), memoryview(payload(n, 1000)), cancel_all) for n in range(20)]
    while pair.pull(pair.a):
        pass
    while pair.flow(pair.b):
        pass
    if reconnect:
        pair.die()
        pair.up()
    pair.settle()
    assert sorted(map(id, told)) == sorted(map(id, messages)), "each was told exactly once"
    pair.b.core.discard(b"")
    pair.settle()
    assert_clean(pair)


def test_on_done_may_send_post_cancel_withdraw_and_close_while_the_link_ends() -> None:
    pair = Pair(credit=1500).up()
    core = pair.a.core
    told: list[Outgoing | Posted] = []
    items: list[Outgoing | Posted] = []

    def on_done(item: Outgoing | Posted) -> None:
        told.append(item)
        core.close("inside")
        core.lose("inside", now_ns=0)
        assert core.send(tag(100 + len(told)), memoryview(b"x"), lambda message: None).error is core.error
        assert core.post(tag(200 + len(told)), memoryview(bytearray(1)), lambda posted: None).error is core.error
        for other in items:
            core.cancel(other) if isinstance(other, Outgoing) else core.withdraw(other)

    for n in range(5):
        items.append(core.send(tag(n), memoryview(payload(n, 1000)), on_done))
        items.append(core.post(tag(n), memoryview(bytearray(5)), on_done))
    core.lose("outside", now_ns=0)
    assert core.state is LinkState.LOST
    assert pair.a.states == [LinkState.UP, LinkState.LOST]
    assert all(item.done for item in items)
    assert len(set(map(id, told))) == len(told)


def test_on_app_may_answer_and_end_the_link() -> None:
    pair = Pair().up()

    def on_app(data: bytes) -> None:
        pair.b.apps.append(data)
        pair.b.core.send_app(b"re " + data)
        if data == b"2":
            pair.b.core.close("heard enough")

    pair.b.core._inbox._on_app = on_app
    for word in (b"1", b"2", b"3"):
        pair.a.core.send_app(word)
    pair.settle()
    assert pair.b.apps == [b"1", b"2"]
    assert b"re 1" in pair.a.apps
    assert pair.b.core.state is LinkState.CLOSED


# -- a peer that breaks the rules ------------------------------------------------------------------------------------


def eager(sequence: int, size: int, *, digest: int | None = None) -> Header:
    data = payload(sequence, size)
    return Header(tag(sequence), sequence, size, checksum(data) if digest is None else digest)


def arrive(core: LinkCore, header: Header) -> None:
    inflow = core.message_begin(header)
    if inflow is not None:
        inflow.view[:] = payload(header.sequence, header.length)
        inflow.filled = header.length
        core.message_end(inflow)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Hello(2, 7, 1, 1, 0, (), 0, 0), "second Hello"),
        (Ack(2, (), 0), "never sent"),
        (Ack(0, ((1, 3),), 0), "never sent"),
        (Ack(0, (), 2), "never sent"),
        (Credit(10**9), "more credit than was used"),
        (App(1, b""), "where 0 is next"),
        (Grant(1), "not sent"),
        (Nack(1, 0, 0, False), "not sent"),
        (Nack(1, 0, 0, True), "not sent"),
        (Refuse(1, "no"), "not sent"),
        (Cancel(5, 100_001), "credit"),
    ],
    ids=repr,
)
def test_words_that_a_peer_may_not_say(message: Control, reason: str) -> None:
    pair = Pair().up()
    pair.a.core.send_app(b"one")
    pair.send(0, 10)
    with pytest.raises(ProtocolError, match=reason):
        pair.a.core.control(message, 0)


def test_words_about_a_message_that_is_still_queued_here() -> None:
    for message in (Ack(1, (), 0), Grant(0), Nack(0, 0, 0, True), Refuse(0, "no")):
        pair = Pair().up()
        pair.a.core._outbox._offered = MAX_OFFERS  # as if so many offers waited
        pair.a.core._outbox._peer_credit = 0
        queued = pair.send(0, 10)
        assert queued.state is SendState.QUEUED
        with pytest.raises(ProtocolError):
            pair.a.core.control(message, 0)
        assert queued.state is SendState.QUEUED


@pytest.mark.parametrize(
    "hello",
    [
        Hello(2, 7, 1, 1, 3, (), 0, 100),
        Hello(2, 7, 1, 1, 0, ((0, 5),), 0, 100),
        Hello(2, 7, 1, 1, 0, ((0, 2),), 0, 100),  # the second message was not sent yet
        Hello(2, 7, 1, 1, 0, (), 10**6, 100),
    ],
)
def test_hello_that_acknowledges_what_was_never_sent_changes_nothing(hello: Hello) -> None:
    pair = Pair().up()
    sent = pair.send(0, 10)
    pair.die()
    queued = pair.send(1, 10)
    pair.a.core.connected()
    with pytest.raises(ProtocolError, match="never sent"):
        pair.a.core.hello(hello, 0)
    assert pair.a.core.state is LinkState.DOWN
    assert (sent.state, queued.state) == (SendState.SENDING, SendState.QUEUED)


def test_messages_that_a_peer_may_not_send() -> None:
    core = Pair(credit=5000).up().b.core
    with pytest.raises(ProtocolError, match="neither granted nor eager"):
        core.message_begin(Header(tag(0), 0, 10, 0, eager=False))
    assert core.message_begin(eager(0, 4000)) is not None
    with pytest.raises(ProtocolError, match="arrives twice at once"):
        core.message_begin(eager(0, 4000))
    with pytest.raises(ProtocolError, match="exceed the credit"):
        core.message_begin(eager(1, 2000))
    with pytest.raises(ProtocolError, match="exceed the credit"):
        core.message_begin(Header(tag(1), 1, 1 << 47, 0))
    inflow = core.message_begin(eager(2, 100))
    assert inflow is not None
    inflow.filled = 99
    with pytest.raises(ProtocolError, match="ends at 99 of 100"):
        core.message_end(inflow)


@pytest.mark.parametrize(
    ("reason", "credit", "flood"),
    [
        ("credit", 10 * MESSAGE_COST, lambda core, n: arrive(core, eager(n, 0))),
        ("offers wait", MESSAGE_COST, lambda core, n: core.control(Offer(n, tag(n), 1), 0)),
        ("fail their checksum", MESSAGE_COST, lambda core, n: arrive(core, eager(n, 0, digest=1))),
        ("gaps", MESSAGE_COST, lambda core, n: core.control(Cancel(2 * n, 0), 0)),
        ("refusals", 0, lambda core, n: core.control(Offer(n, tag(n, view=9), 1), 0)),
    ],
)
def test_a_lying_peer_cannot_make_us_hold_more_than_the_bounds(
    reason: str, credit: int, flood: Callable[[LinkCore, int], None]
) -> None:
    core = Pair(credit=credit).up().b.core
    core.discard((9).to_bytes(8, "big"))

    def lie() -> None:
        for n in range(5 * MAX_OFFERS):
            flood(core, n)

    with pytest.raises(ProtocolError, match=reason):
        lie()
    assert core.stats.held_peak <= credit


def test_acknowledging_a_huge_range_costs_what_is_outstanding_and_not_what_is_named() -> None:
    pair = Pair(credit=0).up()
    out = pair.a.core._outbox
    out._next = 1 << 60
    sent = pair.send(1, 10)
    pair.a.core.control(Ack(0, ((5, (1 << 60) + 1),), 0), 0)
    assert sent.state is SendState.ACKED


def test_old_and_unknown_words_do_no_harm() -> None:
    pair = Pair().up()
    sent, posted = pair.send(0, 10), pair.post(0, 10)
    pair.settle()
    for message in (Ack(0, (), 0), Ack(1, (), 0), Grant(0), Nack(0, 0, 1, False), Nack(0, 9, 1, True), Pong(5)):
        pair.a.core.control(message, 0)
    pair.a.core.control(Refuse(0, "late"), 0)
    assert sent.state is SendState.ACKED
    assert holds(posted, 0)
    pair.b.core.control(App(0, b"once"), 0)
    pair.b.core.control(App(0, b"once"), 0)
    assert pair.b.apps == [b"once"]
    pair.b.core.control(Cancel(0, 10 + MESSAGE_COST), 0)
    assert pair.b.core._inbox.receipts._released == 10 + MESSAGE_COST, "its credit was given back when it was taken"
    arrive(pair.b.core, eager(0, 10))
    assert pair.b.core.stats.messages_received == 1


def test_reset_stream_leaves_the_buffer_waiting_and_frees_held_memory() -> None:
    pair = Pair().up()
    posted = pair.post(0, 3000)
    core = pair.b.core
    for header in (eager(0, 3000), eager(1, 3000)):
        inflow = core.message_begin(header)
        assert inflow is not None
        inflow.filled = 1000
        core.message_reset(inflow)
        core.message_reset(inflow)
    assert core.stats.held_bytes == 0
    assert posted.inflow is None
    arrive(core, eager(0, 3000))
    assert holds(posted, 0)


def test_control_words_fit_the_wire() -> None:
    pair = Pair().up()
    pair.send(1, 10)
    action = pair.a.core.poll()
    assert isinstance(action, StartMessage)
    assert len(action.message.header()) == HEADER_SIZE
    assert encode_control(Ping(1))
