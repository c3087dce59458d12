"""Messages and views: what goes in comes out, and nothing malformed or unbounded gets in."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.checks import MAX_ADDRESSES
from quicoll.errors import LocalError, PeerError
from quicoll.membership import messages as m
from quicoll.membership.view import MAX_INT, MAX_MEMBERS, Member, View, has_quorum, natural_key, rank_key


def view(*nodes: str, view_id: int = 3) -> View:
    members = tuple(
        Member(rank=rank, node=node, incarnation=9, addresses=(("10.0.0.1", 4433),), site="fra", committed_step=6)
        for rank, node in enumerate(nodes or ("a", "b"))
    )
    return View(view_id=view_id, members=members, seed=5, committed_step=7, committed_view=2)


def hidden() -> Member:
    return Member(rank=0, node="c", incarnation=9, addresses=(("10.0.0.1", 4433),), seen_at=("203.0.113.1", 65535))


FROM_MEMBER: list[m.MemberMessage] = [
    m.Join(incarnation=1),
    m.Join(
        incarnation=MAX_INT,
        addresses=(("host", 1), ("::1", 65535)),
        world_size=4,
        rank_hint=2,
        committed_step=8,
        doubt=(3, 9),
        site="fra",
        lost_after_ns=10**15,
        adopts=True,
        timeout_ns=1,
        hold_timeout_ns=10**15,
        seed=MAX_INT,
    ),
    m.AskRelay(peer="b"),
    m.Confirm(view_id=3),
    m.Decline(view_id=3, unreachable=("b", "c"), reason="timed out"),
    m.BeginStep(view_id=3, step=8),
    m.Vote(view_id=3, step=8, ok=True, digest=bytes(range(64))),
    m.Vote(view_id=3, step=8, ok=False, reason="not a number", culprit="b"),
    m.Report(view_id=3, lost=(("b", "silence"),), reason="all_reduce#2", culprit="b"),
    m.Report(view_id=3, reason="all_reduce#2", kind="mismatch"),
    m.Leave(reason="done"),
    m.Leave(reason="done", finished=9, committed_step=8),
    m.Reached(number=1),
    m.Vote(view_id=3, step=8, ok=True, digest=b"d", groups=((0, b""), (2**63 - 1, bytes(64)))),
    m.Vote(view_id=3, step=8, ok=True, groups=tuple((number, bytes(16)) for number in range(m.MAX_GROUPS))),
]
FROM_COORDINATOR: list[m.CoordinatorMessage] = [
    m.Welcome(seed=5, committed_step=7, doubt_committed=True, waiting_for="b"),
    m.RefuseJoin(reason="other world size"),
    m.Adopt(lost_after_ns=1),
    m.Propose(view=view()),
    m.Install(view_id=3),
    m.Decide(view_id=3, step=8, commit=True, next_view=view(view_id=4)),
    m.Decide(view_id=3, step=8, commit=False, cause="b was lost", lost=("b",), culprit="b"),
    m.Aborted(view_id=3, cause="b was lost", lost=("b",), culprit="b"),
    m.Withhold(cause="no quorum"),
    m.Outdated(latest=MAX_INT),
    m.Probe(number=1, members=view().members),
    m.Probe(number=1, members=view().members, own=hidden()),
    m.Expect(member=hidden(), own=hidden()),
    m.JobEnded(step=9),
    m.RelayAnswer(peer="b", label=b"12345678"),
    m.RelayAnswer(peer="b", reason="too many"),
    m.Welcome(seed=5, committed_step=7, relay="192.0.2.1:4434"),
]


@pytest.mark.parametrize("message", FROM_MEMBER, ids=lambda message: type(message).__name__)
def test_a_members_message_survives_the_wire_and_is_refused_from_a_coordinator(message: m.MemberMessage) -> None:
    data = m.encode(message)
    assert m.decode(data, sender="member") == message
    with pytest.raises(PeerError, match="malformed"):
        m.decode(data, sender="coordinator")


@pytest.mark.parametrize("message", FROM_COORDINATOR, ids=lambda message: type(message).__name__)
def test_a_coordinators_message_survives_the_wire_and_is_refused_from_a_member(message: m.CoordinatorMessage) -> None:
    data = m.encode(message)
    assert m.decode(data, sender="coordinator") == message
    with pytest.raises(PeerError, match="malformed"):
        m.decode(data, sender="member")


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "nobody"},
        {"type": "confirm"},
        {"type": "confirm", "view_id": -1},
        {"type": "confirm", "view_id": 2**63},
        {"type": "confirm", "view_id": "3"},
        {"type": "confirm", "view_id": 3, "more": 1},
        {"type": "join", "incarnation": 1, "world_size": 0},
        {"type": "join", "incarnation": 1, "world_size": MAX_MEMBERS + 1},
        {"type": "join", "incarnation": 1, "addresses": [["h", 0]]},
        {"type": "join", "incarnation": 1, "addresses": [["h", 1]] * (MAX_ADDRESSES + 1)},
        {"type": "join", "incarnation": 1, "addresses": [["h" * 256, 1]]},
        {"type": "join", "incarnation": 1, "doubt": [1]},
        {"type": "vote", "view_id": 1, "step": 1, "ok": 1},
        {"type": "vote", "view_id": 1, "step": 1, "ok": True, "digest": b"x" * (m.MAX_DIGEST + 1)},
        {"type": "report", "view_id": 1, "lost": [["b", "x" * (m.MAX_TEXT + 1)]]},
        {"type": "report", "view_id": 1, "lost": [["", "x"]]},
        {"type": "report", "view_id": 1, "kind": "something"},
        {"type": "decline", "view_id": 1, "unreachable": ["b"] * (MAX_MEMBERS + 1)},
    ],
    ids=str,
)
def test_a_message_that_breaks_a_bound_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(PeerError, match="malformed") as caught:
        m.decode(msgspec.msgpack.encode(fields), sender="member", node="n7")
    assert caught.value.node == "n7"


@pytest.mark.parametrize(
    "change",
    [
        {"members": []},
        {"members": [msgspec.to_builtins(view().members[1]), msgspec.to_builtins(view().members[0])]},
        {"members": [{**msgspec.to_builtins(view().members[0]), "rank": rank} for rank in (0, 1)]},
        {"committed_view": 3},
        {"view_id": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_view_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    fields = {"type": "propose", "view": {**msgspec.to_builtins(view()), **change}}
    with pytest.raises(PeerError, match="malformed"):
        m.decode(msgspec.msgpack.encode(fields), sender="coordinator")


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
@pytest.mark.parametrize("name", ["lost", "reason"])
def test_a_claimed_size_takes_no_memory(name: str, header: bytes) -> None:
    """An array, string or binary of four gigabytes is claimed, in a dozen bytes."""
    data = b"\x82" + b"".join(msgspec.msgpack.encode(part) for part in ("type", "report", name)) + header
    tracemalloc.start()
    with pytest.raises(PeerError, match="malformed"):
        m.decode(data, sender="member")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(PeerError, match="is above"):
        m.decode(bytes(m.MAX_MESSAGE + 1), sender="member")


def test_an_error_does_not_repeat_what_a_peer_sent_at_length() -> None:
    data = msgspec.msgpack.encode({"type": "leave", "x" * 100_000: 1})
    with pytest.raises(PeerError) as caught:
        m.decode(data, sender="member")
    assert len(str(caught.value)) < 2 * m.MAX_TEXT


@given(st.binary(max_size=200), st.integers(0, len(FROM_MEMBER) - 1), st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_garbage_is_either_a_message_or_refused(garbage: bytes, index: int, seed: int) -> None:
    damaged = bytearray(m.encode(FROM_MEMBER[index]))
    chance = random.Random(seed)
    for _ in range(chance.randrange(1, 4)):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    for data in (garbage, bytes(damaged), bytes(damaged[: len(damaged) // 2])):
        try:
            message = m.decode(data, sender="member")
        except PeerError:
            continue
        assert m.decode(m.encode(message), sender="member") == message


@pytest.mark.parametrize(
    "message",
    [
        m.Confirm(view_id=-1),
        m.Leave(reason="x" * (m.MAX_TEXT + 1)),
        m.Leave(reason="\ud800"),
        m.Join(incarnation=1, addresses=(("h", 70000),)),
        m.Vote(view_id=1, step=1, ok=True, digest=b"x" * (m.MAX_DIGEST + 1)),
        m.Vote(view_id=1, step=1, ok=True, groups=((7, b"x" * (m.MAX_DIGEST + 1)),)),
        m.Vote(view_id=1, step=1, ok=True, groups=((-1, b"x"),)),
        m.Vote(view_id=1, step=1, ok=True, groups=((7, b"x"),) * (m.MAX_GROUPS + 1)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_receiver_would_refuse_cannot_be_sent(message: m.MemberMessage) -> None:
    with pytest.raises(LocalError, match="not a valid"):
        m.encode(message)


def test_the_largest_view_fits_into_a_message() -> None:
    members = tuple(
        Member(
            rank=rank,
            node=f"{rank:0128}",
            incarnation=MAX_INT,
            addresses=(("h" * 255, 65535),) * MAX_ADDRESSES,
            site="s" * 128,
            committed_step=MAX_INT,
        )
        for rank in range(MAX_MEMBERS)
    )
    largest = View(
        view_id=MAX_INT,
        members=members,
        seed=MAX_INT,
        committed_step=MAX_INT,
        committed_view=1,
    )
    data = m.encode(m.Decide(view_id=1, step=1, commit=True, next_view=largest))
    assert m.decode(data, sender="coordinator") == m.Decide(view_id=1, step=1, commit=True, next_view=largest)


def test_long_text_is_clipped_to_what_a_message_takes() -> None:
    assert m.clip("short") == "short"
    assert len(m.clip("x" * 1000)) == m.MAX_TEXT
    assert m.clip("x" * 1000).endswith("x...")


def test_a_view_finds_its_members_by_name() -> None:
    subject = view("a", "b", "c")
    assert subject.world_size == 3
    assert subject.nodes == ("a", "b", "c")
    assert subject.rank_of("c") == 2
    assert subject.member("b") == subject.members[1]
    assert subject.rank_of("d") is None
    assert subject.member("d") is None


def test_views_are_equal_by_value_however_they_were_used() -> None:
    used, fresh = view("a", "b"), view("a", "b")
    assert used.rank_of("a") == 0  # fills its index
    assert used == fresh


@pytest.mark.parametrize(
    ("nodes", "base", "enough"),
    [
        ("ab", "abc", True),
        ("a", "abc", False),
        ("ab", "abcd", False),
        ("abx", "abcd", False),
        ("abc", "abcd", True),
        ("a", "a", True),
        ("xyz", "a", False),
        ("", "", False),
    ],
)
def test_a_quorum_is_more_than_half_of_the_base_by_name(nodes: str, base: str, enough: bool) -> None:
    assert has_quorum(nodes, base) is enough
    if nodes:
        assert view(*nodes).quorum(base) is enough


def test_names_sort_as_people_count() -> None:
    names = ["node-10", "node-2", "node-02", "node", "10", "9", "node-2b", "node-2-1"]
    assert sorted(names, key=natural_key) == ["9", "10", "node", "node-02", "node-2", "node-2-1", "node-2b", "node-10"]


@given(st.lists(st.text(min_size=1, max_size=12), unique=True))
@settings(derandomize=True, deadline=None)
def test_every_set_of_names_has_one_order(names: list[str]) -> None:
    """Names with and without digits, in any script, compare without error, and the order is total."""
    ordered = sorted(names, key=natural_key)
    names.reverse()
    assert sorted(names, key=natural_key) == ordered
    assert len({natural_key(name) for name in names}) == len(names)


def test_hinted_ranks_come_first_in_the_order_of_their_hints() -> None:
    hints = {"d": 0, "a": None, "c": 7, "b": None}
    assert sorted(hints, key=lambda node: rank_key(node, hints[node])) == ["d", "c", "a", "b"]
