"""Frames wait as keys: once each, with what is true when they go."""

from __future__ import annotations

from quicoll_transport.quic.control import ControlFrames, Saying


def frames() -> tuple[ControlFrames, dict[int, bytes | None]]:
    control, says = ControlFrames(), dict[int, bytes | None]()
    control.answers(Saying.MAX_STREAM_DATA, lambda about: says.get(about))
    control.answers(Saying.PING, lambda about: b"\x01")
    return control, says


def filled(control: ControlFrames, room: int = 1000) -> tuple[list[bytes | memoryview], list[tuple[Saying, int]]]:
    parts: list[bytes | memoryview] = []
    sent, left = control.fill(parts, room)
    assert left == room - sum(map(len, parts))
    return parts, sent


def test_what_is_wanted_again_is_said_once_and_as_it_is_now() -> None:
    control, says = frames()
    for value in (b"old", b"new"):
        says[4] = value
        control.want(Saying.MAX_STREAM_DATA, 4)
        control.want(Saying.PING)
    assert len(control) == 2
    assert filled(control) == ([b"\x01", b"new"], [(Saying.PING, 0), (Saying.MAX_STREAM_DATA, 4)])
    assert not control


def test_the_order_is_that_of_kinds_whatever_was_wanted_first() -> None:
    orders = []
    for order in ((Saying.PING, Saying.MAX_STREAM_DATA), (Saying.MAX_STREAM_DATA, Saying.PING)):
        control, says = frames()
        says[0] = b"a"
        for kind in order:
            control.want(kind)
        orders.append(filled(control)[1])
    assert orders[0] == orders[1] == [(Saying.PING, 0), (Saying.MAX_STREAM_DATA, 0)]


def test_what_there_is_no_more_to_say_of_is_not_said() -> None:
    control, says = frames()
    says.update({1: b"a", 2: None, 3: b"c"})
    for about in (1, 2, 3, 4):
        control.want(Saying.MAX_STREAM_DATA, about)
    assert filled(control)[0] == [b"a", b"c"]
    assert not control


def test_what_does_not_fit_waits_for_the_next_packet_in_its_order() -> None:
    control, says = frames()
    for about in range(10):
        says[about] = bytes([about] * 10)
        control.want(Saying.MAX_STREAM_DATA, about)
    assert len(filled(control, 35)[0]) == 3
    assert len(control) == 7
    assert filled(control)[0] == [bytes([about] * 10) for about in range(3, 10)]
