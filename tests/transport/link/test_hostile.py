"""The core of a link and a peer that breaks the rules: refused by name, and at a bounded cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from link_pair import Pair, holds, payload, tag

from quicoll_transport.errors import ProtocolError
from quicoll_transport.link.control_stream import encode_control
from quicoll_transport.link.core import LinkCore, LinkState, SendState, StartMessage
from quicoll_transport.link.frames import (
    HEADER_SIZE,
    MAX_OFFERS,
    MESSAGE_COST,
    Ack,
    App,
    Cancel,
    Control,
    Grant,
    Header,
    Hello,
    Nack,
    Offer,
    Ping,
    Pong,
    RefuseMessage,
    checksum,
)


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
        (Ack(2, (), 0, 0), "never sent"),
        (Ack(0, ((1, 3),), 0, 0), "never sent"),
        (Ack(0, (), 2, 0), "never sent"),
        (Ack(0, (), 0, 10**9), "more credit than was used"),
        (App(1, b""), "where 0 is next"),
        (Grant(1), "not sent"),
        (Nack(1, 0, 0, False), "not sent"),
        (Nack(1, 0, 0, True), "not sent"),
        (RefuseMessage(1, "no"), "not sent"),
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
    for message in (Ack(1, (), 0, 0), Grant(0), Nack(0, 0, 0, True), RefuseMessage(0, "no")):
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


@pytest.mark.slow
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
    assert core.stats.credit_peak <= credit


def test_acknowledging_a_huge_range_costs_what_is_outstanding_and_not_what_is_named() -> None:
    pair = Pair(credit=0).up()
    out = pair.a.core._outbox
    out._next = 1 << 60
    sent = pair.send(1, 10)
    pair.a.core.control(Ack(0, ((5, (1 << 60) + 1),), 0, 0), 0)
    assert sent.state is SendState.ACKED


def test_old_and_unknown_words_do_no_harm() -> None:
    pair = Pair().up()
    sent, posted = pair.send(0, 10), pair.post(0, 10)
    pair.settle()
    for message in (Ack(0, (), 0, 0), Ack(1, (), 0, 0), Grant(0), Nack(0, 0, 1, False), Nack(0, 9, 1, True), Pong(5)):
        pair.a.core.control(message, 0)
    pair.a.core.control(RefuseMessage(0, "late"), 0)
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
    assert core.stats.credit_held == 0
    assert posted.inflow is None
    arrive(core, eager(0, 3000))
    assert holds(posted, 0)


def test_control_words_fit_the_wire() -> None:
    pair = Pair().up()
    pair.send(1, 10)
    action = pair.a.core.poll(0)
    assert isinstance(action, StartMessage)
    assert len(action.message.header()) == HEADER_SIZE
    assert encode_control(Ping(1))
