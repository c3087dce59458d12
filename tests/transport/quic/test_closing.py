"""Ends of a connection: one cause, last words that are said once, and nothing after."""

from __future__ import annotations

from quicoll_transport.carrier import CLOSE_FORGOTTEN
from quicoll_transport.quic.closing import ConnectionEnd, EndCause
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
    assert not ending.is_open
    assert ending.is_silent
    assert not ending.has_words
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


def test_last_words_are_those_of_the_first_close_and_are_said_once() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.close(0x7101, "you know why", is_application=True)
    ending.close(1, "another", is_application=False)
    assert ending.has_words
    assert list(read_frames(ending.last_words())) == [CloseFrame(0x7101, None, b"you know why")]
    assert not ending.has_words
    assert ending.last_words() == b""
    assert ending.next_timer(PTO) is None
    assert ending.cause == EndCause(0x7101, "you know why", by_peer=False, is_application=True)


def test_after_the_peers_close_nothing_is_said() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.on_close(CloseFrame(7, 0, b"\xffno"))
    assert ending.cause == EndCause(7, "\ufffdno", by_peer=True, is_application=False)
    ending.close(1, "too late", is_application=True)
    assert ending.last_words() == b""
    assert ending.next_timer(PTO) is None


def test_after_a_stateless_reset_nothing_is_said_and_the_cause_says_so() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.on_reset()
    ending.on_close(CloseFrame(7, 0, b"no"))
    assert ending.cause == EndCause(CLOSE_FORGOTTEN, "the peer knows nothing of this connection", True, False)
    ending.close(1, "too late", is_application=True)
    assert ending.last_words() == b""


def test_two_that_close_at_once_keep_their_own_cause() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.close(1, "ours", is_application=True)
    ending.on_close(CloseFrame(2, None, b"theirs"))
    assert ending.cause is not None
    assert ending.cause.reason == "ours"


def test_long_words_are_cut() -> None:
    ending = ConnectionEnd(idle_ns=S, now_ns=0)
    ending.close(1, "x" * 100_000, is_application=True)
    assert len(ending.last_words()) < 600
