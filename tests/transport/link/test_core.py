"""The core of a link: its states, its end, and callbacks that call back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from link_pair import MS, Pair, assert_clean, payload, tag

from quicoll_transport.errors import LinkLost
from quicoll_transport.link.core import LINK_TRANSITIONS, LinkCore, LinkState, Outgoing, Posted, ResetMessage, SendState
from quicoll_transport.link.frames import Header, Hello, Ping

# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", LinkState)
@pytest.mark.parametrize("after", LinkState)
def test_only_the_transitions_of_the_table_are_possible(before: LinkState, after: LinkState) -> None:
    pair = Pair()
    pair.a.core.state = before
    if after in LINK_TRANSITIONS[before]:
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
    assert core.ended == (not LINK_TRANSITIONS[found])


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
    assert core.poll(0) is None
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
    assert core.stats.credit_held == 0
    late = [core.send(tag(90), memoryview(b"x"), told.append), pair.post(91, 1)]
    assert all(item.done and item.error is core.error for item in late)
    with pytest.raises(LinkLost, match="gone"):
        core.send_app(b"late")
    core.cancel(sent[0])
    core.withdraw(posted[0])
    assert core.message_begin(Header(tag(4), 99, 700, 0)) is None
    actions = []
    while (action := core.poll(0)) is not None:
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
