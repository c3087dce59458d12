"""What an operator hears of a coordinator, and who may ask."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quicoll.errors import PeerError
from quicoll.membership.coordinator.scaling import Standing
from quicoll.membership.operators import (
    Inquire,
    OperatorAnswer,
    Operators,
    Scale,
    decode_answer,
    decode_operation,
    encode_operation,
)

STANDING = Standing(world_size=3, leave=("d",), view_id=5, nodes=("a", "b", "c", "d"), waiting_for="d shall leave")


class Link:
    """An operator's link, as the coordinator sees it."""

    node = "operator"

    def __init__(self) -> None:
        self.answers: list[OperatorAnswer] = []
        self.closed = ""

    def listen(self, on_app: Any, on_state: Any) -> None:
        self.on_app = on_app

    def send_app(self, data: bytes) -> None:
        self.answers.append(decode_answer(data, node="coordinator"))

    def close(self, reason: str) -> None:
        self.closed = reason

    def say(self, data: bytes) -> None:
        self.on_app(self, data)


def listening(standing: Standing | None = STANDING, refusal: str = "") -> tuple[Link, list[Any]]:
    asked: list[Any] = []

    def scale(world_size: int | None, leave: tuple[str, ...]) -> str:
        asked.append((world_size, leave))
        return refusal

    link: Any = Link()
    Operators(scale, lambda: standing, lambda answer: answer()).listen(link)
    return link, asked


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
    assert link.answers[0].refusal == "9 ranks are above --max-world-size 4"


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
