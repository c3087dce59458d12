"""Ours are replaced, the peer's are followed, and neither can be made to grow."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quicoll_transport.quic.connection_ids import (
    CONNECTION_ID_LIMIT_ERROR,
    RESET_LEAST,
    OwnIds,
    PeerIds,
    reset_datagram,
    reset_key,
    reset_token,
)
from quicoll_transport.quic.frame_reader import read_frames
from quicoll_transport.quic.frames import (
    PROTOCOL_VIOLATION,
    FrameError,
    NewConnectionIdFrame,
    RetireConnectionIdFrame,
)

KEY, FIRST = bytes(32), b"12345678"


def ours(limit: int = 8) -> OwnIds:
    return OwnIds(FIRST, limit=limit, key=KEY, draw=random.Random(1).randbytes)


def theirs(limit: int = 4) -> PeerIds:
    return PeerIds(FIRST, limit=limit, token=reset_token(KEY, FIRST))


def told(number: int, before: int = 0, cid: bytes | None = None) -> NewConnectionIdFrame:
    return NewConnectionIdFrame(number, before, cid or number.to_bytes(8, "big"), reset_token(KEY, bytes([number])))


def refused(work: Callable[[], object], code: int) -> None:
    with pytest.raises(FrameError) as caught:
        work()
    assert caught.value.code == code


@pytest.mark.parametrize(("limit", "count"), [(2, 2), (3, 3), (8, 4), (1 << 40, 4)])
def test_the_peer_gets_as_many_as_it_keeps_and_no_more_than_we_want(limit: int, count: int) -> None:
    ids = ours(limit)
    assert len(ids) == count
    assert ids.news == list(range(1, count))
    for number in ids.news:
        (frame,) = read_frames(ids.frame(number) or b"")
        assert isinstance(frame, NewConnectionIdFrame)
        assert frame.cid in ids
        assert frame.reset_token == reset_token(KEY, frame.cid)


def test_what_is_retired_is_gone_and_replaced() -> None:
    ids = ours()
    for number in range(50):
        before = len(ids)
        ids.retire(number, b"another")
        ids.retire(number, b"another")  # a repetition
        assert len(ids) == before
        assert ids.frame(number) is None
    assert ids.gone[0] == FIRST
    assert len(ids.gone) == 50
    assert FIRST not in ids


def test_retirements_that_cannot_be_are_refused() -> None:
    ids = ours()
    refused(lambda: ids.retire(4, b"another"), PROTOCOL_VIOLATION)
    refused(lambda: ids.retire(0, FIRST), PROTOCOL_VIOLATION)


def test_ids_of_the_peer_are_used_in_their_order_when_it_asks_for_that() -> None:
    ids = theirs()
    for number in (1, 2, 3):
        ids.add(told(number))
    ids.add(told(1))  # again
    assert ids.current == FIRST
    ids.add(told(4, before=2))
    assert ids.current == told(2).cid
    assert ids.news == [0, 1]
    (frame,) = read_frames(ids.frame(1) or b"")
    assert frame == RetireConnectionIdFrame(1)
    ids.on_acked(1)
    assert ids.frame(1) is None


def test_an_id_that_comes_after_its_retirement_is_retired_at_once() -> None:
    ids = theirs()
    ids.add(told(5, before=4))
    ids.add(told(2))
    assert ids.news == [0, 2]
    assert ids.current == told(5).cid


def test_each_path_has_an_id_and_retires_it_when_it_is_left() -> None:
    ids = theirs()
    for number in (1, 2):
        ids.add(told(number))
    assert ids.of(7) == told(1).cid
    assert ids.current == FIRST, "a probe has gone by another path, no more"
    ids.use(7)
    assert (ids.current, ids.of(7), ids.of(0)) == (told(1).cid, told(1).cid, FIRST)
    ids.leave(0)
    assert ids.news == [0]
    ids.leave(0)  # a repetition, as of a path that nothing was sent by
    assert ids.of(8) == told(2).cid
    ids.leave(8)
    assert ids.news == [0, 2]
    assert ids.current == told(1).cid


def test_two_paths_share_an_id_where_the_peer_has_given_too_few() -> None:
    ids = theirs()
    ids.use(1)
    assert (ids.current, ids.of(0)) == (FIRST, FIRST)
    ids.leave(0)
    assert ids.news == [], "the other path needs it"
    ids.add(told(1))
    assert ids.of(2) == told(1).cid


def test_ids_of_all_paths_are_replaced_where_the_peer_asks_for_that() -> None:
    ids = theirs()
    ids.add(told(1))
    ids.use(5)
    ids.add(told(2, before=2))
    assert ids.current == told(2).cid
    assert ids.of(0) == told(2).cid, "there is no other"
    assert ids.news == [0, 1]


def test_an_id_that_comes_late_is_taken_where_nothing_else_is_left() -> None:
    ids = theirs()
    ids.add(told(2))
    ids.of(1)
    ids.leave(1)
    assert ids.news == [2]
    ids.add(told(1, before=1))
    assert ids.current == told(1).cid
    assert ids.news == [2, 0]


def test_an_id_that_was_retired_and_is_told_again_is_not_used_again() -> None:
    ids = PeerIds(FIRST, limit=4, token=bytes(16))
    ids.add(told(1))
    ids.of(7)
    ids.leave(7)
    ids.add(told(1))
    assert ids.of(8) == FIRST, "there is no other"
    refused(lambda: ids.add(told(1, before=1)), PROTOCOL_VIOLATION)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_in_whatever_order_each_path_has_an_id_that_the_peer_knows(seed: int) -> None:
    """Of a peer that repeats itself, is late and contradicts itself; 500 of them, each up to its first violation."""
    violations = 0
    for number in range(500):
        rng = random.Random(f"{seed} {number}")
        ids = PeerIds(FIRST, limit=rng.choice((2, 4, 8)), token=rng.choice((None, bytes(16))))
        highest = rng.choice((3, 6, 12, 40))
        try:
            for _ in range(rng.choice((5, 20, 60))):
                path, sequence = rng.randrange(6), rng.randrange(1, highest)
                match rng.choice(("add", "add", "add", "of", "use", "leave")):
                    case "add":
                        ids.add(told(sequence, before=rng.randrange(sequence + 1) if rng.random() < 0.3 else 0))
                    case "of":
                        ids.of(path)
                    case "use":
                        ids.use(path)
                    case "leave" if path != ids.path:
                        ids.leave(path)
                assert (ids.current, ids.token) == ids._known[ids._in_use[ids.path]]
                assert {*ids._in_use.values()} <= {*ids._known}
                assert not {*ids._owed} & {*ids._known}, "who was told that an id is retired throws its packets away"
                assert min(ids._known) >= ids._before
        except FrameError:
            violations += 1
    assert 0 < violations < 400


def test_ids_that_cannot_be_are_refused() -> None:
    ids = theirs()
    ids.add(told(1))
    refused(lambda: ids.add(told(1, cid=b"different")), PROTOCOL_VIOLATION)
    refused(lambda: ids.add(told(2, cid=told(1).cid)), PROTOCOL_VIOLATION)
    refused(lambda: PeerIds(b"", limit=4).add(told(1)), PROTOCOL_VIOLATION)
    ids.add(told(2))
    ids.add(told(3))
    refused(lambda: ids.add(told(4)), CONNECTION_ID_LIMIT_ERROR)


def test_a_peer_that_has_ids_retired_faster_than_it_says_that_it_knows_is_cut_off() -> None:
    def flood() -> None:
        ids = theirs()
        for number in range(1, 200):
            ids.add(told(number, before=number))

    refused(flood, CONNECTION_ID_LIMIT_ERROR)
    ids = theirs()
    for number in range(1, 200):
        ids.add(told(number, before=number))
        ids.on_acked(number - 1)


def a_reset(cid: bytes) -> bytes:
    datagram = reset_datagram(KEY, cid, 100, random.Random(2).randbytes)
    assert datagram is not None
    return datagram


def test_a_reset_is_known_by_the_token_of_an_id_that_is_in_use_and_no_other() -> None:
    """RFC 9000 section 10.3.1: nobody can have answered a packet that carried an id which was never used."""
    ids = theirs()
    ids.add(NewConnectionIdFrame(1, 0, b"abcdefgh", reset_token(KEY, b"abcdefgh")))
    first, second, other = (a_reset(cid) for cid in (FIRST, b"abcdefgh", b"nobody's"))
    assert [ids.is_reset(datagram) for datagram in (first, second, other)] == [True, False, False]
    assert not ids.is_reset(first[:-1] + bytes([first[-1] ^ 1]))
    assert not ids.is_reset(first[-20:]), "no packet is so short"
    assert first[0] & 0xC0 == 0x40
    ids.use(1)
    assert [ids.is_reset(datagram) for datagram in (first, second, other)] == [True, True, False]
    ids.leave(0)
    assert [ids.is_reset(datagram) for datagram in (first, second, other)] == [False, True, False]


def test_an_id_without_a_token_gives_way_to_the_first_that_has_one() -> None:
    """A client's first id has none (section 18.2): its process could never say that it was started anew."""
    ids = PeerIds(FIRST, limit=4)
    assert not ids.is_reset(bytes(40))
    ids.add(NewConnectionIdFrame(1, 0, b"abcdefgh", reset_token(KEY, b"abcdefgh")))
    assert (ids.current, ids.news) == (b"abcdefgh", [0])
    assert ids.is_reset(a_reset(b"abcdefgh"))
    ids.add(NewConnectionIdFrame(2, 0, b"ijklmnop", reset_token(KEY, b"ijklmnop")))
    assert ids.current == b"abcdefgh"


def test_a_reset_is_shorter_than_what_it_answers_and_what_is_no_packet_gets_none() -> None:
    for size in range(1, 1500):
        datagram = reset_datagram(KEY, FIRST, size, random.Random(3).randbytes)
        assert (datagram is None) == (size < len(FIRST) + 22)
        assert datagram is None or RESET_LEAST <= len(datagram) < size
        assert datagram is None or len(datagram) <= 43


def test_two_who_know_nothing_of_each_other_fall_silent_soon() -> None:
    answers, size = 0, 1200
    while (datagram := reset_datagram(KEY, FIRST, size, random.Random(4).randbytes)) is not None:
        answers, size = answers + 1, len(datagram)
    assert answers == 15


def test_the_key_of_resets_follows_from_the_secret_and_the_port_alone() -> None:
    keys = [reset_key(secret, port) for secret in (b"one", b"two") for port in (1, 2)]
    assert len(set(keys)) == 4
    assert keys == [reset_key(secret, port) for secret in (b"one", b"two") for port in (1, 2)]
