"""Everything that can happen to a link, at random and in any order, and what must hold whatever happens."""

from __future__ import annotations

import itertools
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
from quicoll_transport.link import (
    Outgoing,
    Posted,
    SendState,
)


class World:
    """Everything that can happen to a link, and what must hold whatever happens."""

    def __init__(self, credit: int) -> None:
        self.flip = Flip(0)
        self.pair = Pair(credit=credit, max_resends=1, fault=self.flip)
        self.credit = credit
        self.numbers = itertools.count()
        self.sizes: dict[int, int] = {}
        self.unposted: list[int] = []
        self.sent: dict[int, Outgoing] = {}
        self.posted: list[Posted] = []
        self.told: dict[int, int] = {}
        self.taken_back: list[tuple[Posted, bytes]] = []
        self.words: dict[Side, list[bytes]] = {self.pair.a: [], self.pair.b: []}
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

    def post(self, index: int) -> Posted | None:
        if not self.unposted:
            return None
        number = self.unposted.pop(index % len(self.unposted))
        posted = self.pair.b.core.post(tag(number), memoryview(bytearray(self.sizes[number])), self.done)
        self.posted.append(posted)
        return posted

    def cancel(self, message: Outgoing) -> None:
        self.pair.a.core.cancel(message)

    def withdraw(self, posted: Posted) -> None:
        if not posted.done:
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

    def check(self) -> None:
        assert 0 <= self.pair.b.core.stats.held_bytes <= self.credit
        assert 0 <= self.pair.credit_used() <= self.credit
        for side in (self.pair.a, self.pair.b):
            assert side.apps == self.words[self.pair.other(side)][: len(side.apps)], "in order, each once"
        for item in (*self.sent.values(), *self.posted):
            assert self.told.get(id(item), 0) == int(item.done)
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


@pytest.mark.parametrize("seed", range(40))
def test_random_walk(seed: int) -> None:
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
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
