"""Where the peer is: it moves, or seems to; nothing much goes where it has not shown that it is."""

from __future__ import annotations

import random

from quicoll_transport.quic.paths import Path, Paths

MS = 1_000_000
PTO = 100 * MS
CID = b"12345678"
HOME, PORT, AWAY = ("10.0.0.1", 1), ("10.0.0.1", 2), ("10.0.0.9", 1)


def server() -> Paths:
    paths = Paths(HOME, is_client=False, draw=random.Random(1).randbytes)
    paths.heard(HOME, 1200, CID)
    return paths


def moved(paths: Paths, address: tuple[str, int], now_ns: int = 0, *, cid: bytes = CID, size: int = 400) -> Path:
    path = paths.heard(address, size, cid)
    paths.move(path, now_ns, PTO)
    return path


def challenges(paths: Paths, now_ns: int) -> dict[tuple[object, ...], bytes]:
    return {path.address: challenge for path, challenge, _ in paths.probes(now_ns, PTO) if challenge is not None}


def test_a_client_takes_packets_from_its_server_only() -> None:
    paths = Paths(HOME, is_client=True, draw=random.Random(1).randbytes)
    assert paths.accepts(HOME)
    assert not paths.accepts(PORT)
    assert server().accepts(AWAY)


def test_a_packet_from_elsewhere_that_moves_nothing_changes_nothing() -> None:
    paths = server()
    assert paths.heard(AWAY, 100, CID).address == AWAY
    assert paths.current.address == HOME
    assert challenges(paths, 0) == {}


def test_both_paths_are_challenged_on_a_move_and_little_goes_to_the_new_one() -> None:
    paths = server()
    path = moved(paths, AWAY)
    assert paths.current is path
    assert path.room == 1200
    asked = challenges(paths, 0)
    path.sent += 1150
    assert path.room == 50
    assert sorted(asked) == [HOME, AWAY]
    paths.on_response(asked[AWAY], 0)
    assert path.validated
    assert path.room > 1 << 40
    assert paths.changed, "nothing is known of the capacity of a path to another host"


def test_another_port_of_the_same_host_is_the_same_path() -> None:
    paths = server()
    moved(paths, PORT)
    assert not paths.moved, "it has not shown that it is there"
    paths.on_response(challenges(paths, 0)[PORT], 0)
    assert paths.current.validated
    assert not paths.changed
    assert paths.moved, "but at another address"


def test_a_path_that_does_not_answer_is_left_for_the_one_before() -> None:
    paths = server()
    moved(paths, AWAY)
    asked = 0
    now_ns = 0
    while paths.current.address == AWAY:
        asked += len(challenges(paths, now_ns))
        at = paths.next_timer()
        assert at is not None
        assert at > now_ns or asked == 0 or paths.has_probe(at)
        now_ns = max(at, now_ns + 1)
        paths.on_timer(now_ns)
    assert now_ns >= 3000 * MS
    assert asked <= 2 * 5, "each wait is twice the one before (RFC 9000 section 8.2.1)"
    assert paths.current.address == HOME
    assert not paths.changed
    assert not paths.moved
    assert paths.next_timer() is None


def test_a_spoofed_move_ends_with_the_next_packet_from_home() -> None:
    paths = server()
    moved(paths, AWAY)
    moved(paths, HOME)
    assert paths.current.address == HOME
    assert paths.current.validated
    assert not paths.changed
    assert not paths.moved


def test_each_move_to_another_address_is_told_once_and_one_back_as_well() -> None:
    paths = server()
    moved(paths, PORT)
    paths.on_response(challenges(paths, 0)[PORT], 0)
    paths.moved = False
    moved(paths, PORT)
    assert not paths.moved
    moved(paths, HOME)
    assert paths.moved, "where the peer has shown to be before, and so is known to be"


def test_a_path_that_was_asked_with_little_is_asked_again_with_all_that_quic_needs() -> None:
    """RFC 9000 section 8.2.1: the answer to a small challenge says nothing of the path's MTU."""
    paths = server()
    path = moved(paths, AWAY, size=399)
    assert path.room == 1197
    paths.on_response(challenges(paths, 0)[AWAY], 50 * MS)
    assert path.validated
    assert path.room > 1 << 40, "the peer is there"
    assert not path.passes
    assert not paths.changed
    assert paths.next_timer() is not None
    assert paths.next_timer() == 50 * MS, "at once"
    paths.on_response(challenges(paths, 50 * MS)[AWAY], 90 * MS)
    assert path.passes
    assert paths.changed
    assert HOME in [one.address for one in paths]


def test_an_answer_to_the_first_challenge_is_none_to_the_second() -> None:
    paths = server()
    path = moved(paths, AWAY, size=399)
    small = challenges(paths, 0)[AWAY]
    paths.on_response(small, 50 * MS)
    challenges(paths, 50 * MS)
    paths.on_response(small, 60 * MS)
    assert not path.passes
    assert not paths.has_probe(60 * MS), "nor does it draw a challenge again and again"


def test_a_path_that_does_not_carry_1200_bytes_is_left_and_is_none_to_return_to() -> None:
    paths = server()
    path = moved(paths, AWAY, size=399)
    paths.on_response(challenges(paths, 0)[AWAY], 50 * MS)
    now_ns = 50 * MS
    moved(paths, PORT, now_ns)
    moved(paths, AWAY, now_ns)
    while paths.next_timer() is not None:
        challenges(paths, now_ns)
        now_ns = max(paths.next_timer() or 0, now_ns + 1)
        paths.on_timer(now_ns)
    assert 3000 * MS < now_ns < 4000 * MS
    assert paths.current.address == HOME
    assert path not in list(paths)


def test_only_an_answer_to_what_was_asked_validates() -> None:
    paths = server()
    path = moved(paths, AWAY)
    paths.on_response(bytes(8), 0)
    assert not path.validated
    first = challenges(paths, 0)[AWAY]
    challenges(paths, PTO)
    paths.on_response(first, PTO)
    assert path.validated, "an answer may be late"


def test_a_challenge_is_answered_once_by_the_path_that_it_came_by() -> None:
    paths = server()
    path = paths.heard(AWAY, 1200, CID)
    paths.on_challenge(path, b"first--1")
    paths.on_challenge(path, b"second-2")
    assert paths.has_probe(0)
    assert [(p.address, c, r) for p, c, r in paths.probes(0, PTO)] == [(AWAY, None, b"second-2")]
    assert not paths.has_probe(0)
    assert paths.probes(0, PTO) == []


def test_paths_are_bounded_and_those_that_count_stay() -> None:
    paths = server()
    for number in range(100):
        moved(paths, (f"192.0.2.{number}", number), number)
    assert len(paths._all) <= 4
    assert paths.current.address == ("192.0.2.99", 99)
    for number in range(100, 200):
        paths.heard((f"192.0.2.{number}", number), 100, CID)
    assert paths.current.address == ("192.0.2.99", 99)
    moved(paths, HOME)
    assert paths.current.validated, "the one that was validated last is not forgotten"


def test_a_path_that_a_nat_has_made_shares_the_id_of_the_one_before() -> None:
    paths = server()
    before = paths.current.ids
    assert moved(paths, PORT).ids == before
    assert moved(paths, HOME).ids == before
    assert paths.gone == []


def test_a_path_that_the_peer_has_chosen_has_ids_of_its_own_until_nobody_is_there() -> None:
    """RFC 9000 section 9.5: it names another id of ours, so that nobody can tell both paths belong together."""
    paths = server()
    first = paths.current
    second = moved(paths, PORT, cid=b"another-")
    assert (first.ids, second.ids) == (0, 1)
    paths.on_response(challenges(paths, 0)[PORT], 0)
    paths.on_timer(10**10)
    assert paths.gone == [0], "the peer is not at its old address any more"
    paths.gone.clear()
    assert moved(paths, HOME).ids not in (0, 1), "and if it comes back, it is on a path that nobody has seen"


def test_ids_of_paths_that_fail_or_are_forgotten_are_let_go_of() -> None:
    paths = server()
    moved(paths, AWAY, cid=b"another-")
    paths.on_timer(10**10)
    assert sorted(paths.gone) == [0, 1], "neither has answered; the one before is believed, and begins anew"
    assert paths.current.address == HOME
    paths.gone.clear()
    for number in range(100):
        paths.heard((f"192.0.2.{number}", 1), 100, bytes([number]))
    assert len(paths.gone) == 97
    assert paths.current.ids not in paths.gone
