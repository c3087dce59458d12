"""What a rank says of a coordinator that is not there: where it was, since when, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quicoll.engine.coordinator_link import CoordinatorLink
from quicoll_transport.endpoint import LinkState
from quicoll_transport.errors import LinkLost


class FakeLink:
    def __init__(self) -> None:
        self.stats = SimpleNamespace(connections=0)
        self.state, self.ended, self.suspect = LinkState.CONNECTING, False, False
        self.cause = self.refusal = ""
        self.error: LinkLost | None = None

    def listen(self, on_app: Any, on_state: Any) -> None:
        self.on_state = on_state

    def close(self, reason: str) -> None:
        self.cause, self.ended, self.state = reason, True, LinkState.LOST
        self.on_state(self)

    def up(self) -> None:
        self.stats.connections, self.state = 1, LinkState.UP
        self.on_state(self)

    def lose(self, cause: str, silent_for: float) -> None:
        self.cause, self.ended, self.state = cause, True, LinkState.LOST
        self.error = LinkLost(cause, peer="coordinator", silent_for=silent_for)
        self.on_state(self)


class Bench:
    """A coordinator's link on a clock that stands; each call of `dial` makes the next of `links`."""

    def __init__(self, addresses: list[tuple[str, int]] | None = None, *further: tuple[str, int]) -> None:
        """further: more addresses of the first one."""
        self.now = 100.0
        self.dialled: list[Any] = []
        self.paired: list[Any] = []
        self.links: list[FakeLink] = []
        self.lost: list[str] = []
        loop: Any = SimpleNamespace(time=lambda: self.now, call_later=lambda *_: None)
        endpoint: Any = SimpleNamespace(link=self._made)
        identity: Any = None
        self.link = CoordinatorLink(
            endpoint,
            identity,
            [[one, *(further if at == 0 else ())] for at, one in enumerate(addresses or [("10.0.0.1", 4433)])],
            pair=lambda addresses: self.paired.append(list(addresses)),
            avoid_ns=3_000_000_000,
            loop=loop,
            on_up=lambda: None,
            on_down=lambda link: self.lost.append(self.link.silence(link)),
            on_message=lambda _: None,
            on_place=lambda _: None,
            on_change=lambda: None,
        )
        self.link.dial()

    def _made(self, _: Any, *, addresses: Any, dial: bool) -> FakeLink:
        self.dialled += addresses
        self.links.append(FakeLink())
        return self.links[-1]


def test_one_with_several_addresses_is_dialled_at_all_of_them_and_counts_as_one() -> None:
    first, second, other = ("10.0.0.1", 4433), ("10.1.0.1", 4433), ("10.0.0.2", 4433)
    bench = Bench([first, other], second)
    assert bench.dialled == [first, second]
    bench.links[0].lose("silent", 2.0)
    bench.link.dial()
    assert bench.dialled == [first, second, other]
    assert bench.paired == [[first, second], [other]]


def test_one_that_was_never_reached_is_said_to_be_out_of_reach_and_why() -> None:
    bench = Bench()
    assert bench.link.absence() == "cannot reach the coordinator at 10.0.0.1:4433"
    bench.links[0].refusal = "no answer"
    assert bench.link.absence() == "cannot reach the coordinator at 10.0.0.1:4433 (no answer)"
    bench.links[0].lose("not reached within 5.0 s", 5.0)
    bench.link.dial()
    assert bench.link.absence() == "cannot reach the coordinator at 10.0.0.1:4433 (not reached within 5.0 s)"
    bench.links[1].up()
    assert bench.link.absence() == ""


def test_one_that_is_gone_is_said_to_be_gone_and_since_it_was_last_heard() -> None:
    bench = Bench()
    bench.links[0].up()
    bench.now += 30
    bench.links[0].lose("silent for 2.00 s", 2.0)
    assert bench.lost == ["not heard for 2.0 s at 10.0.0.1:4433 (silent for 2.00 s)"]
    gone = "the coordinator at 10.0.0.1:4433 is gone: it has not answered for"
    assert bench.link.absence() == f"{gone} 2.0 s (silent for 2.00 s)"
    bench.link.dial()
    bench.now += 10.3
    bench.links[1].lose("not reached within 5.0 s (nobody listens)", 5.0)
    bench.link.dial()
    assert bench.link.absence() == f"{gone} 12.3 s (not reached within 5.0 s (nobody listens))"
    bench.links[2].up()
    assert bench.link.absence() == ""
    bench.links[2].lose("closed by the peer", 0.0)
    bench.now += 1
    assert bench.link.absence() == f"{gone} 1.0 s (closed by the peer)"


A, B = ("10.0.0.1", 4433), ("10.0.0.2", 4433)


def test_of_several_the_next_is_dialled_when_one_is_lost_or_does_not_answer() -> None:
    bench = Bench([A, B])
    assert bench.link.absence() == "cannot reach the coordinator at 10.0.0.1:4433 or 10.0.0.2:4433"
    bench.links[0].lose("no answer", 3.0)
    bench.link.dial()
    bench.links[1].up()
    bench.links[1].lose("silent", 1.0)
    assert bench.lost[-1].startswith("not heard for 1.0 s at 10.0.0.2:4433")
    bench.link.dial()
    assert bench.dialled == [A, B, A]


def test_the_one_that_is_named_as_the_leader_is_dialled_and_the_present_link_closed() -> None:
    bench = Bench([A, B])
    bench.links[0].up()
    assert bench.link.led_by("10.0.0.2:4433")
    bench.link.dial()
    assert bench.dialled == [A, B]
    assert bench.lost == []  # it was no loss


def test_a_leader_that_has_just_failed_is_not_gone_back_to_until_later_and_strangers_never_are() -> None:
    bench = Bench([A, B])
    bench.links[0].lose("no answer", 3.0)
    bench.link.dial()
    bench.links[1].up()
    assert not bench.link.led_by("10.0.0.1:4433")
    assert not bench.link.led_by("")
    assert not bench.link.led_by("10.9.9.9:1")
    assert not bench.link.led_by("no address")
    assert not bench.link.led_by("10.0.0.2:4433")  # the one that says so itself
    bench.now += 3.1
    assert bench.link.led_by("10.0.0.1:4433")
