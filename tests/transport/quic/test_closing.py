"""Ends of a connection: one cause, last words that fade, and nothing for ever."""

from __future__ import annotations

from quicoll_transport.quic.closing import ConnectionEnd, EndCause, EndStage
from quicoll_transport.quic.frame_reader import read_frames
from quicoll_transport.quic.frames import CloseFrame

S = 1_000_000_000
PTO = S // 10


def test_silence_ends_it_and_what_is_heard_puts_that_off() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    assert ending.next_timer(PTO) == S
    ending.heard(S // 2)
    ending.on_timer(S, PTO)
    assert ending.is_open
    ending.on_timer(3 * S // 2, PTO)
    assert ending.stage is EndStage.OVER
    assert ending.cause == EndCause(0, "idle timeout", by_peer=False, is_application=False)
    assert ending.next_timer(PTO) is None


def test_only_the_first_question_after_an_answer_puts_it_off() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.asked(S // 2)
    ending.asked(S - 1)
    assert ending.next_timer(PTO) == 3 * S // 2


def test_the_idle_time_is_three_probe_timeouts_at_least_and_may_be_none() -> None:
    assert ConnectionEnd(idle_ns=S, now_ns=0).next_timer(2 * S) == 6 * S
    assert ConnectionEnd(idle_ns=0, now_ns=0).next_timer(PTO) is None


def test_last_words_are_said_again_ever_more_seldom_and_for_three_probe_timeouts() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.close(0x7101, "you know why", is_application=True)
    ending.close(1, "another", is_application=False)
    words = ending.last_words(5, PTO)
    assert words is not None
    assert list(read_frames(words)) == [CloseFrame(0x7101, None, b"you know why")]
    assert ending.last_words(6, PTO) is None
    said = 0
    for _ in range(1000):
        ending.on_packet()
        said += ending.last_words(7, PTO) is not None
    assert said == 10
    assert ending.next_timer(PTO) == 5 + 3 * PTO
    ending.on_timer(5 + 3 * PTO, PTO)
    assert ending.stage is EndStage.OVER
    assert ending.cause == EndCause(0x7101, "you know why", by_peer=False, is_application=True)


def test_after_the_peers_close_nothing_is_said() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.on_close(CloseFrame(7, 0, b"\xffno"), 3, PTO)
    assert ending.stage is EndStage.DRAINING
    assert ending.cause == EndCause(7, "\ufffdno", by_peer=True, is_application=False)
    ending.close(1, "too late", is_application=True)
    ending.on_packet()
    assert ending.last_words(4, PTO) is None
    ending.on_timer(3 + 3 * PTO, PTO)
    assert ending.stage is EndStage.OVER


def test_two_that_close_at_once_keep_their_own_cause() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.close(1, "ours", is_application=True)
    ending.on_close(CloseFrame(2, None, b"theirs"), 0, PTO)
    assert ending.stage is EndStage.DRAINING
    assert ending.cause is not None
    assert ending.cause.reason == "ours"


def test_long_words_are_cut() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.close(1, "x" * 100_000, is_application=True)
    assert len(ending.last_words(0, PTO) or b"") < 600
