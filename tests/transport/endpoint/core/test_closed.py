"""Connections that have ended: what is said again, how often, and what it costs to remember them."""

from __future__ import annotations

from datagrams import one

from quicoll_transport.carrier import LastWords
from quicoll_transport.endpoint.core.closed import MOST, MOST_BYTES, ClosedConnections
from quicoll_transport.net.runs import DatagramRun

ADDRESS, ELSEWHERE = ("192.0.2.1", 1), ("192.0.2.66", 6)
S = 1_000_000_000
WORDS = (bytes(60), ADDRESS)
CID = b"12345678"


def gone(*words: tuple[bytes, tuple[object, ...]], until_ns: int = S) -> ClosedConnections:
    closed = ClosedConnections()
    closed.add([CID, b"abcdefgh"], LastWords(words, until_ns), 0)
    return closed


def many(count: int, size: int) -> DatagramRun:
    return DatagramRun(memoryview(bytearray(count * size)), size, ADDRESS)


def test_words_are_said_again_ever_more_seldom() -> None:
    closed = gone(WORDS)
    said = [len(closed.answer(CID, one(bytes(40), ADDRESS), 5) or ()) for _ in range(1000)]
    assert sum(said) == 10
    assert [i + 1 for i, count in enumerate(said) if count][:5] == [1, 2, 4, 8, 16]


def test_a_run_of_datagrams_draws_one_answer() -> None:
    closed = gone(WORDS)
    assert closed.answer(CID, many(60, 1200), 5) == (WORDS,)
    assert closed.answer(CID, one(bytes(40), ADDRESS), 5) == ()


def test_every_id_of_the_connection_leads_to_it_and_no_other_does() -> None:
    closed = gone(WORDS)
    assert closed.answer(b"abcdefgh", one(bytes(40), ADDRESS), 5) == (WORDS,)
    assert closed.answer(CID, one(bytes(40), ADDRESS), 5) == (WORDS,), "the second datagram of the connection"
    assert closed.answer(CID, one(bytes(40), ADDRESS), 5) == ()
    assert closed.answer(b"nobody's", one(bytes(40), ADDRESS), 5) is None


def test_words_go_to_where_the_peer_was_and_no_more_than_three_times_what_came() -> None:
    """What draws them is not authenticated (RFC 9000 section 10.2.1)."""
    closed = gone((bytes(1200), ADDRESS))
    came = said = 0
    for _ in range(300):
        came += 40
        for data, address in closed.answer(CID, one(bytes(40), ELSEWHERE), 5) or ():
            assert address == ADDRESS
            said += len(data)
        assert said <= 3 * came
    assert said > 0


def test_nothing_is_said_where_the_peer_has_ended_it() -> None:
    """RFC 9000 section 10.2.2; and nobody is told that we know nothing of it."""
    closed = gone()
    assert [closed.answer(CID, one(bytes(40), ADDRESS), 5) for _ in range(50)] == [()] * 50


def test_it_is_over_at_its_time() -> None:
    closed = gone(WORDS)
    assert closed.answer(CID, one(bytes(40), ADDRESS), S - 1) is not None
    assert closed.answer(CID, one(bytes(40), ADDRESS), S) is None
    assert (len(closed), closed.nbytes) == (0, 0)
    closed = gone(WORDS)
    closed.expire(S - 1)
    assert len(closed) == 1
    closed.expire(S)
    assert (len(closed), closed.nbytes) == (0, 0)


def test_their_number_and_their_bytes_are_bounded_and_the_oldest_goes_first() -> None:
    for size in (10, 4000):
        closed = ClosedConnections()
        for i in range(3 * MOST):
            closed.add([i.to_bytes(8, "big")], LastWords(((bytes(size), ADDRESS),), S), 0)
            assert len(closed) <= MOST
            assert closed.nbytes <= MOST_BYTES
        kept = [closed.answer(i.to_bytes(8, "big"), one(bytes(4000), ADDRESS), 5) is not None for i in range(3 * MOST)]
        most = min(MOST, MOST_BYTES // size)
        assert kept == [False] * (3 * MOST - most) + [True] * most


def test_an_id_that_is_used_again_leads_to_the_later_one() -> None:
    closed = gone(WORDS)
    later = (b"later", ADDRESS)
    closed.add([CID], LastWords((later,), 2 * S), 0)
    assert closed.answer(CID, one(bytes(40), ADDRESS), 5) == (later,)
    closed.expire(S)
    assert closed.answer(CID, one(bytes(40), ADDRESS), S) == (later,)
