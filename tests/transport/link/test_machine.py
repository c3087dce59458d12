"""Everything that can happen to a link, at random and in any order, and what must hold whatever happens."""

from __future__ import annotations

import itertools
import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from link_pair import Flip, Pair, Side, assert_clean, holds, payload, tag

from quicoll_transport.errors import (
    MessageCorrupted,
    MessageRefused,
)
from quicoll_transport.link.core import (
    Outgoing,
    Posted,
    SendState,
)

CHANNELS = (0, 7)
LIMIT = 5000


class World:
    """Everything that can happen to a link, and what must hold whatever happens."""

    def __init__(self, credit: int) -> None:
        self.flip = Flip(0)
        self.pair = Pair(credit=credit, max_resends=1, fault=self.flip)
        self.credit = credit
        self.numbers = itertools.count()
        self.begin()

    def begin(self) -> None:
        """A new link, between new incarnations."""
        self.sizes: dict[int, int] = {}
        self.unposted: list[int] = []
        self.sent: dict[int, Outgoing] = {}
        self.posted: list[Posted] = []
        self.told: dict[int, int] = {}
        self.taken_back: list[tuple[Posted, bytes]] = []
        self.words: dict[Side, list[bytes]] = {self.pair.a: [], self.pair.b: []}
        self.pushed: dict[int, list[tuple[Outgoing, bytes]]] = {channel: [] for channel in CHANNELS}
        self.taken: dict[int, list[Posted]] = {channel: [] for channel in CHANNELS}
        self.pair.up()

    def done(self, item: Outgoing | Posted) -> None:
        self.told[id(item)] = self.told.get(id(item), 0) + 1

    def send(self, size: int) -> Outgoing:
        number = next(self.numbers)
        self.sizes[number] = size
        self.unposted.append(number)
        message = self.pair.a.core.send(tag(number), memoryview(payload(number, size)), self.done)
        self.sent[number] = message
        return message

    def push(self, channel: int, size: int) -> Outgoing:
        data = payload(next(self.numbers), size)
        message = self.pair.a.core.channel_send(channel, memoryview(data), self.done)
        self.pushed[channel].append((message, data))
        return message

    def take(self, channel: int) -> None:
        taken = self.taken[channel]
        if not taken or taken[-1].done:
            taken.append(self.pair.b.core.channel_take(channel, LIMIT, self.done))

    def post(self, index: int) -> Posted | None:
        if not self.unposted:
            return None
        number = self.unposted.pop(index % len(self.unposted))
        posted = self.pair.b.core.post(tag(number), memoryview(bytearray(self.sizes[number])), self.done)
        self.posted.append(posted)
        return posted

    def cancel(self, message: Outgoing) -> None:
        if any(message is item for item in (*self.sent.values(), *self.channel_items())):  # not of an earlier link
            self.pair.a.core.cancel(message)

    def withdraw(self, posted: Posted) -> None:
        if not posted.done and posted in self.posted:
            self.pair.b.core.withdraw(posted)
            self.posted.remove(posted)
            self.taken_back.append((posted, bytes(posted.buffer)))
            self.unposted.append(int.from_bytes(posted.tag, "big"))

    def say(self, side: Side) -> None:
        word = str(next(self.numbers)).encode()
        self.words[side].append(word)
        side.core.send_app(word)

    def move(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            side, work = rng.choice([self.pair.a, self.pair.b]), rng.choice("phf")
            if work == "p":
                self.pair.pull(side)
            elif work == "h":
                self.pair.hear(side)
            else:
                self.pair.flow(side, rng.randrange(6))

    def die(self, first: Side | None, linger: int, again: bool) -> None:
        """The connection dies; the side that has not noticed goes on with what reached it; perhaps there is another."""
        self.pair.die(first=first)
        self.move(linger, linger)
        if again:
            self.pair.join()

    def reconnect(self) -> None:
        if not self.pair.joined:
            self.pair.join()

    def restart(self, side: Side) -> None:
        """A node starts again: its link is gone without a word, its peer's ends, and there is another one."""
        pair, survivor = self.pair, self.pair.other(side)
        survivor.core.lose("the peer restarted", now_ns=pair.now)
        for item in (*self.sent.values(), *self.posted, *self.channel_items()):
            if isinstance(item, Outgoing) == (survivor is pair.a):
                assert item.done, "nothing is pending at the end of a link"
                assert self.told[id(item)] == 1
        self.told = {}
        before = [(posted, bytes(posted.buffer)) for posted in self.posted if not posted.done]
        self.pair = Pair(credit=self.credit, max_resends=1, fault=self.flip)
        self.begin()
        self.taken_back = before if survivor is pair.b else []

    def channel_items(self) -> list[Outgoing | Posted]:
        pushed = [message for messages in self.pushed.values() for message, _ in messages]
        return [*pushed, *(posted for taken in self.taken.values() for posted in taken)]

    def check_channels(self) -> None:
        for channel in CHANNELS:
            for n, posted in enumerate(self.taken[channel]):
                if not posted.done:
                    continue
                message, data = self.pushed[channel][n]
                if posted.void:
                    assert message.state is SendState.CANCELLED
                elif posted.error is None:
                    assert posted.buffer == data, "each at its place"
                elif isinstance(posted.error, MessageRefused):
                    assert len(data) > LIMIT
                else:
                    assert isinstance(posted.error, MessageCorrupted)
                    assert posted.error.channel == channel
                    assert posted.error.counter == n

    def check(self) -> None:
        assert 0 <= self.pair.b.core.stats.credit_held <= self.credit
        assert 0 <= self.pair.credit_used() <= self.credit
        for side in (self.pair.a, self.pair.b):
            assert side.apps == self.words[self.pair.other(side)][: len(side.apps)], "in order, each once"
        for item in (*self.sent.values(), *self.posted, *self.channel_items()):
            assert self.told.get(id(item), 0) == int(item.done)
        self.check_channels()
        for posted in self.posted:
            number = int.from_bytes(posted.tag, "big")
            if posted.done and posted.error is None:
                assert holds(posted, number)
            if isinstance(posted.error, MessageCorrupted):
                twin = self.sent[number]
                assert not twin.done or twin.state is SendState.CANCELLED or isinstance(twin.error, MessageCorrupted)
        for posted, before in self.taken_back:
            assert bytes(posted.buffer) == before, "a withdrawn buffer is not written"

    def finish(self) -> None:
        """Whatever happened: with one more connection everything is either done or waits for its other half."""
        self.pair.join()
        self.pair.settle()
        while self.unposted:
            self.post(0)
        self.pair.settle()
        for channel in CHANNELS:
            for n in range(len(self.pushed[channel])):
                if n == len(self.taken[channel]):
                    self.take(channel)
                self.pair.settle()
                assert self.taken[channel][n].done, f"message {n} of channel {channel} does not come"
            for waiting in self.taken[channel][len(self.pushed[channel]) :]:
                assert not waiting.done
                self.pair.b.core.withdraw(waiting)
                self.taken[channel].remove(waiting)
        assert all(item.done for item in self.channel_items())
        for number, message in self.sent.items():
            assert message.done, f"message {number} is {message.state}"
        for posted in list(self.posted):
            if not posted.done:  # its message was cancelled or refused
                number = int.from_bytes(posted.tag, "big")
                twin = self.sent[number]
                assert twin.state is SendState.CANCELLED or isinstance(twin.error, MessageRefused)
                self.withdraw(posted)
        self.pair.b.core.discard(b"")  # what has arrived and nobody took
        self.pair.settle()
        self.check()
        for side in (self.pair.a, self.pair.b):
            assert side.apps == self.words[self.pair.other(side)]
        assert_clean(self.pair)


@pytest.mark.parametrize("seed", range(int(os.environ.get("QUICOLL_TEST_WALKS", "80"))))
def test_random_walk(seed: int) -> None:
    """QUICOLL_TEST_WALKS: how many walks of 150 steps (80)."""
    rng = random.Random(seed)
    world = World(rng.choice([0, 1500, 6000, 20_000]))
    for _ in range(150):
        match rng.randrange(16):
            case 0 | 1 | 2:
                world.send(rng.choice([0, 1, 300, 1200, 3000, 8000]))
            case 3 | 4 | 5:
                world.post(rng.randrange(1000))
            case 6 if world.sent:
                world.cancel(rng.choice(list(world.sent.values())))
            case 7 if world.posted:
                world.withdraw(rng.choice(world.posted))
            case 8:
                world.say(rng.choice([world.pair.a, world.pair.b]))
            case 9:
                world.flip.times = rng.randrange(4)
            case 10 | 11:
                world.die(rng.choice([None, world.pair.a, world.pair.b]), rng.randrange(30), rng.random() < 0.8)
            case 12:
                world.reconnect()
            case 13 | 14:
                world.push(rng.choice(CHANNELS), rng.choice([0, 1, 300, 1200, 3000, 8000]))
            case 15 | 16:
                world.take(rng.choice(CHANNELS))
            case 17 if pushed := [m for messages in world.pushed.values() for m, _ in messages]:
                world.cancel(rng.choice(pushed))
            case 18 if rng.random() < 0.2:
                world.restart(rng.choice([world.pair.a, world.pair.b]))
            case _:
                world.move(rng.randrange(1 << 30), rng.randrange(80))
        world.check()
    world.finish()


class LinkMachine(RuleBasedStateMachine):
    """The same world, driven by hypothesis, which looks for small examples."""

    sends: Bundle[Outgoing] = Bundle("sends")
    posts: Bundle[Posted | None] = Bundle("posts")

    @initialize(credit=st.sampled_from([0, 1500, 6000]))
    def start(self, credit: int) -> None:
        self.world = World(credit)

    @rule(target=sends, size=st.sampled_from([0, 1, 300, 1200, 3000]))
    def send(self, size: int) -> Outgoing:
        return self.world.send(size)

    @rule(target=sends, channel=st.sampled_from(CHANNELS), size=st.sampled_from([0, 1, 300, 3000, 8000]))
    def push(self, channel: int, size: int) -> Outgoing:
        return self.world.push(channel, size)

    @rule(channel=st.sampled_from(CHANNELS))
    def take(self, channel: int) -> None:
        self.world.take(channel)

    @rule(side=st.sampled_from("ab"))
    def restart(self, side: str) -> None:
        self.world.restart(getattr(self.world.pair, side))

    @rule(target=posts, index=st.integers(0, 100))
    def post(self, index: int) -> Posted | None:
        return self.world.post(index)

    @rule(message=consumes(sends))
    def cancel(self, message: Outgoing) -> None:
        self.world.cancel(message)

    @rule(posted=consumes(posts))
    def withdraw(self, posted: Posted | None) -> None:
        if posted is not None:
            self.world.withdraw(posted)

    @rule(side=st.sampled_from("ab"))
    def say(self, side: str) -> None:
        self.world.say(getattr(self.world.pair, side))

    @rule(times=st.integers(1, 3))
    def corrupt(self, times: int) -> None:
        self.world.flip.times = times

    @rule(seed=st.integers(0, 1 << 20), count=st.integers(1, 60))
    def move(self, seed: int, count: int) -> None:
        self.world.move(seed, count)

    @rule(first=st.sampled_from([None, "a", "b"]), linger=st.integers(0, 20), again=st.booleans())
    def die(self, first: str | None, linger: int, again: bool) -> None:
        self.world.die(None if first is None else getattr(self.world.pair, first), linger, again)

    @rule()
    def reconnect(self) -> None:
        self.world.reconnect()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestLinkMachine = LinkMachine.TestCase
TestLinkMachine.settings = settings(
    derandomize=True,
    deadline=None,
    max_examples=int(os.environ.get("QUICOLL_TEST_EXAMPLES", "60")),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
