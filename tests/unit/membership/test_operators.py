"""What an operator hears of a coordinator, and who may ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from quicoll.errors import PeerError
from quicoll.membership.coordinator.scaling import Standing
from quicoll.membership.operators import (
    ASK_BURST,
    ASK_RATE,
    LOOK_AGE_NS,
    OPERATOR,
    READER,
    Inquire,
    Look,
    OperatorAnswer,
    OperatorReply,
    Operators,
    Scale,
    StandsBy,
    decode_answer,
    decode_operation,
    encode_operation,
)
from quicoll_transport.security.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable

STANDING = Standing(world_size=3, leave=("d",), view_id=5, nodes=("a", "b", "c", "d"), waiting_for="d shall leave")


class Link:
    """An operator's link, as the coordinator sees it."""

    node = "operator"

    def __init__(self, role: str = OPERATOR) -> None:
        self.identity = Identity("job", role, "operator")
        self.answers: list[OperatorReply] = []
        self.closed = ""

    def listen(self, on_app: Any, on_state: Any) -> None:
        self.on_app = on_app

    def send_app(self, data: bytes) -> None:
        self.answers.append(decode_answer(data, node="coordinator"))

    def close(self, reason: str) -> None:
        self.closed = reason

    def say(self, data: bytes) -> None:
        self.on_app(self, data)


class Clock:
    now = 0


def listening(
    standing: Standing | None = STANDING, refusal: str = "", *, role: str = OPERATOR
) -> tuple[Link, list[Any]]:
    asked: list[Any] = []

    def scale(world_size: int | None, leave: tuple[str, ...]) -> str:
        asked.append((world_size, leave))
        return refusal

    link: Any = Link(role)
    operators(scale=scale, standing=standing).listen(link)
    return link, asked


def operators(
    *,
    scale: Any = None,
    standing: Standing | None = STANDING,
    look: Callable[[bool], bytes] = lambda links: encode_operation(StandsBy(leader="a:1")),
    clock: Clock | None = None,
) -> Operators:
    clock = clock or Clock()
    return Operators(scale, lambda: standing, lambda answer: answer(), look, lambda: clock.now)


def test_a_request_is_taken_and_answered_with_how_it_stands() -> None:
    link, asked = listening()
    link.say(encode_operation(Scale(world_size=3, leave=("d",))))
    assert asked == [(3, ("d",))]
    expected = OperatorAnswer(world_size=3, leave=("d",), view_id=5, nodes=STANDING.nodes, waiting_for="d shall leave")
    assert link.answers == [expected]


def test_who_asks_how_far_it_is_asks_for_nothing() -> None:
    link, asked = listening()
    link.say(encode_operation(Inquire()))
    assert (asked, len(link.answers)) == ([], 1)


def test_a_refusal_is_told() -> None:
    link, _ = listening(refusal="9 ranks are above --max-world-size 4")
    link.say(encode_operation(Scale(world_size=9)))
    assert refusals(link) == ["9 ranks are above --max-world-size 4"]


def refusals(link: Link) -> list[str]:
    return [answer.refusal for answer in link.answers if isinstance(answer, OperatorAnswer)]


def test_a_reader_may_look_and_ask_how_far_it_is_and_nothing_else() -> None:
    link, asked = listening(role=READER)
    link.say(encode_operation(Scale(world_size=1)))
    assert asked == []
    assert refusals(link) == ["reader/operator may look, and ask for nothing: this needs an operator's certificate"]
    link.say(encode_operation(Inquire()))
    link.say(encode_operation(Look()))
    assert isinstance(link.answers[1], OperatorAnswer)
    assert link.answers[2] == StandsBy(leader="a:1")


def test_who_looks_is_answered_by_a_coordinator_that_does_not_lead_too() -> None:
    link, _ = listening(standing=None)
    link.say(encode_operation(Look()))
    assert (link.answers, link.closed) == ([StandsBy(leader="a:1")], "")


def test_who_looks_at_nearly_the_same_moment_sees_the_same_and_it_is_made_once() -> None:
    clock, made = Clock(), []

    def look(links: bool) -> bytes:
        made.append(clock.now if not links else -1)
        return encode_operation(StandsBy(leader=f"seen at {clock.now}"))

    asked = operators(look=look, clock=clock)
    links: list[Any] = [Link(READER) for _ in range(3)]
    for link in links:
        asked.listen(link)
        link.say(encode_operation(Look()))
        clock.now += LOOK_AGE_NS // 3
    assert made == [0]
    clock.now = LOOK_AGE_NS
    links[0].say(encode_operation(Look()))
    assert made == [0, LOOK_AGE_NS]
    asked.forget()  # who leads has changed
    links[1].say(encode_operation(Look()))
    assert made == [0, LOOK_AGE_NS, LOOK_AGE_NS]
    for link in links[:2]:
        link.say(encode_operation(Look(links=True)))  # another picture, which is made once, too
    links[2].say(encode_operation(Look()))
    assert made[3:] == [-1]
    assert encode_operation(Look()) == msgspec.msgpack.encode({"type": "look"})  # which older coordinators answer


def test_who_asks_too_often_loses_its_link_and_others_are_answered_as_before() -> None:
    clock = Clock()
    asked = operators(clock=clock)
    flood: Any = Link(READER)
    other: Any = Link(READER)
    asked.listen(flood)
    asked.listen(other)
    for _ in range(ASK_BURST):
        flood.say(encode_operation(Look()))
    assert (len(flood.answers), flood.closed) == (ASK_BURST, "")
    clock.now += 10**9 // ASK_RATE
    flood.say(encode_operation(Look()))
    assert flood.closed == ""
    flood.say(encode_operation(Look()))
    assert (len(flood.answers), flood.closed) == (ASK_BURST + 1, "more than 10 questions a second")
    other.say(encode_operation(Look()))
    assert len(other.answers) == 1


def test_a_coordinator_that_does_not_decide_ends_the_link() -> None:
    link, asked = listening(standing=None)
    link.say(encode_operation(Scale(world_size=9)))
    assert (asked, link.answers, link.closed) == ([], [], "another coordinator leads the job")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "join", "incarnation": 1}),
        msgspec.msgpack.encode({"type": "scale", "world_size": 0}),
        msgspec.msgpack.encode({"type": "scale", "world_size": 5000}),
        msgspec.msgpack.encode({"type": "scale", "leave": ["x" * 300]}),
        msgspec.msgpack.encode({"type": "scale", "leave": ["x"] * 2000}),
        msgspec.msgpack.encode({"type": "scale", "more": 1}),
        msgspec.msgpack.encode({"type": "inquire", "pad": b"x" * (1 << 20)}),
    ],
)
def test_what_is_malformed_ends_the_link_and_is_not_answered(data: bytes) -> None:
    link, asked = listening()
    link.say(data)
    assert (asked, link.answers, link.closed) == ([], [], "malformed message")
    with pytest.raises(PeerError):
        decode_operation(data, node="operator")
