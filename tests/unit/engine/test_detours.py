"""When the relay is asked, what its answers open, and what shuts that again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quicoll.engine.detours import Detours
from quicoll.membership.messages import AskRelay, RelayAnswer, decode, encode
from quicoll_transport.errors import LinkLost

PLACE, ELSEWHERE = ("192.0.2.9", 4433), ("192.0.2.8", 4434)
LABEL = b"12345678"


class Link:
    """To a relay that is a process of its own."""

    def __init__(self, identity: Any, addresses: Any) -> None:
        self.identity, self.addresses, self.node = identity, list(addresses), identity.node
        self.proved_address: Any = ELSEWHERE
        self.ended, self.cause, self.closed = False, "", ""
        self.said: list[Any] = []

    def listen(self, on_app: Any, on_state: Any) -> None:
        self.on_app, self.on_state = on_app, on_state

    def send_app(self, data: bytes) -> None:
        if self.ended:
            raise LinkLost("gone", peer=self.node)
        self.said.append(decode(data, sender="member"))

    def close(self, reason: str) -> None:
        self.closed = reason

    def end(self, cause: str) -> None:
        self.ended, self.cause = True, cause
        self.on_state(self)


class Bench:
    def __init__(self, relay: str | None = "") -> None:
        self.asked: list[AskRelay] = []
        self.opened: list[Any] = []
        self.shut: list[Any] = []
        self.told: list[Any] = []
        self.links: list[Link] = []
        self.place: Any = PLACE
        io: Any = SimpleNamespace(open=self._open, shut=self.shut.append)
        endpoint: Any = SimpleNamespace(link=self._link)
        self.detours = Detours(
            io, endpoint, job="j", ask_coordinator=self.asked.append, coordinator_place=lambda: self.place
        )
        self.detours.on_way = lambda *told: self.told.append(told)
        self.detours.on_shut = lambda *told: self.told.append(told)
        if relay is not None:
            self.detours.use(relay)

    def _open(self, label: bytes, relay: Any) -> Any:
        self.opened.append((label, relay))
        return (f"240.0.0.{len(self.opened)}", 1)

    def _link(self, identity: Any, *, addresses: Any, dial: bool) -> Link:
        assert dial
        self.links.append(Link(identity, addresses))
        return self.links[-1]


def test_the_coordinator_is_asked_once_and_its_answer_opens_a_way() -> None:
    bench = Bench()
    assert bench.detours.way("b") is None
    assert bench.detours.way("b") is None
    assert bench.asked == [AskRelay(peer="b")]
    bench.detours.answered(RelayAnswer(peer="b", label=LABEL))
    way = ("240.0.0.1", 1)
    assert (bench.opened, bench.told) == ([(LABEL, PLACE)], [("b", way)])
    assert bench.detours.way("b") == way
    assert bench.detours.trouble() == ""
    bench.detours.answered(RelayAnswer(peer="b", label=b"87654321"))
    bench.detours.answered(RelayAnswer(peer="c", label=LABEL))
    assert len(bench.opened) == 1, "nobody has asked for these"


@pytest.mark.parametrize("relay", [None, "none"])
def test_without_a_relay_nobody_is_asked_and_the_error_says_so(relay: str | None) -> None:
    bench = Bench(relay)
    assert bench.detours.way("b") is None
    assert (bench.asked, bench.links) == ([], [])
    assert "no relay" in bench.detours.trouble()


def test_a_refusal_is_told_and_asked_about_again() -> None:
    bench = Bench()
    bench.detours.way("b")
    bench.detours.answered(RelayAnswer(peer="b", reason="it asks for too many"))
    assert bench.detours.trouble() == "the relay refuses: it asks for too many"
    assert bench.detours.way("b") is None
    assert len(bench.asked) == 2
    bench.place = None
    bench.detours.answered(RelayAnswer(peer="b", label=LABEL))
    assert "moved" in bench.detours.trouble()
    assert bench.opened == []


def test_what_a_coordinator_has_opened_goes_with_its_link_and_with_every_new_welcome() -> None:
    bench = Bench()
    for end in (bench.detours.coordinator_gone, lambda: bench.detours.use("")):
        bench.detours.way("b")
        bench.detours.answered(RelayAnswer(peer="b", label=LABEL))
        end()
        assert bench.detours.way("b") is None
        bench.detours.coordinator_gone()
    assert bench.shut == [("240.0.0.1", 1), ("240.0.0.2", 1)]
    assert [len(told) for told in bench.told] == [2, 2], "the links are lost by silence, as the coordinator is"


def own() -> tuple[Bench, Link]:
    bench = Bench("192.0.2.8:4434")
    assert bench.detours.way("b") is None
    (link,) = bench.links
    return bench, link


def test_a_relay_of_its_own_is_dialled_when_it_is_needed_and_asked_there() -> None:
    bench, link = own()
    bench.detours.way("c")
    assert (str(link.identity), link.addresses) == ("relay/relay", [("192.0.2.8", 4434)])
    assert link.said == [AskRelay(peer="b"), AskRelay(peer="c")]
    assert (bench.asked, len(bench.links)) == ([], 1)
    bench.detours.answered(RelayAnswer(peer="b", label=LABEL))
    assert bench.opened == [], "the coordinator was not asked"
    link.on_app(link, encode(RelayAnswer(peer="b", label=LABEL)))
    assert bench.opened == [(LABEL, ELSEWHERE)]
    bench.detours.coordinator_gone()
    bench.detours.use("192.0.2.8:4434")
    assert bench.shut == [], "it lives on"


def test_when_a_relay_of_its_own_is_gone_those_who_went_by_it_hear_why_and_it_is_asked_anew() -> None:
    bench, link = own()
    link.on_app(link, encode(RelayAnswer(peer="b", label=LABEL)))
    bench.detours.way("c")
    link.end("silent for 0.5 s")
    why = "the relay at 192.0.2.8:4434 cannot be reached: silent for 0.5 s"
    assert bench.told[1:] == [("b", ("240.0.0.1", 1), why)]
    assert bench.shut == [("240.0.0.1", 1)]
    assert bench.detours.trouble() == why
    bench.detours.way("b")
    assert len(bench.links) == 2
    link.on_app(link, encode(RelayAnswer(peer="b", label=LABEL)))
    assert len(bench.opened) == 1, "of the link before"


def test_what_a_relay_says_that_is_no_answer_ends_its_link() -> None:
    _bench, link = own()
    link.on_app(link, b"\xff")
    assert link.closed == "malformed message"


def test_an_address_that_is_none_is_told() -> None:
    bench = Bench("nowhere")
    assert bench.detours.way("b") is None
    assert "the relay's address" in bench.detours.trouble()
    assert bench.links == []


def test_a_link_that_has_just_ended_is_not_waited_for() -> None:
    bench, link = own()
    link.ended = True
    assert bench.detours.way("c") is None
