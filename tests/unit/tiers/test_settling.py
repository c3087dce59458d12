"""Deleted pieces: what was deleted comes back nowhere, and deletions are forgotten, whoever was cut off meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.errors import LocalError, PeerError
from quicoll.membership.view import Member, View
from quicoll.tiers.exchange import PieceRound, answer_question
from quicoll.tiers.pieces import (
    MAX_COUNT,
    MAX_PIECES,
    Horizon,
    PieceStore,
    PieceVersion,
    SharedPiece,
    deleted_as,
    packed,
    unpacked,
)
from quicoll.tiers.settling import PieceListing, PieceSummary, newest_horizon, next_horizon, settlement


@dataclass(eq=False)
class Process:
    """One life of a rank. deleted: what it has deleted itself, or has been told of in an exchange of its view."""

    node: str
    step: int = 0
    view: int = 0
    store: PieceStore = field(default_factory=lambda: PieceStore(100_000))
    deleted: set[bytes] = field(default_factory=set)

    def write(self, name: str, value: bytes) -> None:
        self.store.write({name: packed(name, value)}, step=self.step, writer=self.node)

    def delete(self, name: str) -> None:
        before = self.values().get(name)
        self.store.write({}, step=self.step, writer=self.node, delete=[name])
        if before is not None:
            self.deleted.add(before)

    def values(self) -> dict[str, bytes]:
        return {name: unpacked(piece) for name, piece in self.store.pieces().items() if not piece.entry.deleted}

    def summary(self) -> PieceSummary:
        return PieceSummary("s", self.store.digest, self.store.horizon, self.step)


def asks(one: Process, other: Process, *, stop: float = 0.0, rng: random.Random | None = None) -> None:
    """A round of questions, which may break off anywhere."""
    exchange = PieceRound("s", one.store, 7, step=one.step)
    while exchange.question is not None:
        if rng is not None and rng.random() < stop:
            return
        exchange.take(answer_question(lambda name: other.store, exchange.question))
    assert exchange.error == ""


def view_of(number: int, members: Sequence[Process], step: int) -> View:
    return View(
        view_id=number,
        members=tuple(Member(rank=rank, node=each.node, incarnation=1) for rank, each in enumerate(members)),
        seed=1,
        committed_step=step,
        committed_view=0,
    )


def make_strong(
    members: Sequence[Process], number: int, *, reached: Sequence[bool] = (), pulled: bool = True
) -> dict[str, bytes] | None:
    """What SharedState.strong does, in a view. reached: who still hears that nobody lacks anything.

    pulled: whether the ranks get what they lack. Returns what ranks return, None where it ended before.
    """
    view = view_of(number, members, min(each.step for each in members))
    summaries = [each.summary() for each in members]
    horizon = newest_horizon(summaries, view, max(each.step for each in members))
    for each in members:
        if each.store.horizon < horizon:
            each.store.renew(horizon)
    pins = [each.store.pin() for each in members]
    listings = [PieceListing(tuple(piece.entry for piece in pin.values())) for pin in pins]
    found = settlement(summaries, listings, view, horizon)
    for each in members:
        each.store.settle(found.known, found.horizon)
    if not pulled:
        return None
    after = next_horizon(summaries, found.newest, view)
    result: list[dict[str, bytes]] = []
    deleted = set().union(*(each.deleted for each in members))
    for each in members:
        got = {}
        for name, entry in found.newest.items():
            holder = view.rank_of(found.holders[name][0])
            assert holder is not None
            piece = deleted_as(entry) if entry.deleted else members[holder].store.find(name, entry.version)
            assert piece is not None
            if each is not members[holder]:
                members[holder].store.told(name, entry.version)  # as `answer_question` does, for whoever fetches it
            each.store.merge(piece, found.horizon)
            if not entry.deleted:
                got[name] = unpacked(piece)
        result.append(got)
        each.deleted |= deleted
    for each, pin in zip(members, pins, strict=True):
        each.store.unpin(pin)
    for rank, each in enumerate(members):
        if after is not None and (not reached or reached[rank]):
            each.store.settle(found.kept(after), after)
    assert all(got == result[0] for got in result)
    assert not deleted & set(result[0].values()), "what was deleted on a rank of the view was made strong"
    return result[0]


@given(rng=st.randoms(use_true_random=False), ranks=st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_what_was_deleted_comes_back_nowhere_and_all_come_to_the_same(rng: random.Random, ranks: int) -> None:
    """Ranks write, delete, ask each other, are cut off, end and come anew; the majority's view makes pieces strong.

    The oracle: every value is written once. One that a living process has deleted, or has been told of as deleted, is
    on no rank in the end.
    """
    processes = [Process(f"n{rank}") for rank in range(ranks)]
    inside = list(range(ranks))  # who is in the view, and linked to the others in it
    number = view = 1
    step = 0
    for each in processes:
        each.view = view
    for _ in range(60):
        act = rng.random()
        rank = rng.randrange(ranks)
        one = processes[rank]
        if act < 0.25:
            number += 1
            one.write(rng.choice("abc"), f"{number}".encode())
        elif act < 0.4:
            one.delete(rng.choice("abc"))
        elif act < 0.65:
            other = rng.randrange(ranks)
            if other != rank and (rank in inside) == (other in inside):
                asks(one, processes[other], stop=0.1, rng=rng)
        elif act < 0.75:  # a step of the view
            step += 1
            for member in inside:
                processes[member].step = step
        elif act < 0.85:
            reached = [rng.random() < 0.7 for _ in inside]
            make_strong([processes[member] for member in inside], view, reached=reached, pulled=rng.random() < 0.8)
        elif act < 0.95:  # another view, of a majority; who comes back has the state, and so its step
            view += 1
            count = rng.randrange(ranks // 2 + 1, ranks + 1)
            inside = sorted(rng.sample(range(ranks), count))
            for member in inside:
                processes[member].step, processes[member].view = step, view
        else:
            processes[rank] = Process(one.node, step=step if rank in inside else 0)
    for each in processes:
        each.step = step
    for _ in range(ranks + 1):
        for one in processes:
            for other in processes:
                if one is not other:
                    asks(one, other)
    assert len({each.store.digest for each in processes}) == 1
    assert len({each.store.horizon for each in processes}) == 1
    deleted = set().union(*(each.deleted for each in processes))
    for each in processes:
        assert not deleted & set(each.values().values())


def converged(*processes: Process) -> None:
    for _ in range(len(processes)):
        for one in processes:
            for other in processes:
                if one is not other:
                    asks(one, other)
    assert len({each.store.digest for each in processes}) == 1


def test_a_deletion_spreads_and_is_forgotten_when_all_ranks_of_a_view_have_had_a_later_step() -> None:
    one, other = Process("n0", step=3), Process("n1", step=3)
    one.write("a", b"1")
    converged(one, other)
    other.delete("a")
    other.delete("never there")
    converged(one, other)
    assert one.values() == other.values() == {}
    assert one.store.names == ["a"]
    make_strong([one, other], 1)
    assert one.store.names == ["a"], "no step since: a write of this step could be older than the deletion"
    one.step = other.step = 4
    make_strong([one, other], 1)
    assert (one.store.names, other.store.names) == ([], [])
    assert one.store.horizon == other.store.horizon == Horizon(4, 1)
    one.write("a", b"2")
    converged(one, other)
    assert other.values() == {"a": b"2"}


def test_a_rank_that_missed_it_lets_go_of_what_was_deleted_and_keeps_what_it_alone_has_written() -> None:
    one, other, cut_off = (Process(f"n{rank}", step=3) for rank in range(3))
    one.write("a", b"1")
    one.write("b", b"3")
    converged(one, other, cut_off)
    cut_off.write("mine", b"nobody has it")
    one.delete("a")
    one.step = other.step = 5
    make_strong([one, other], 2)
    assert one.store.names == ["b"]
    asks(other, cut_off)
    assert other.values() == {"b": b"3"}, "what is older than the horizon is not taken from who is behind"
    asks(cut_off, other)
    assert cut_off.store.horizon == Horizon(), "a horizon of a step that this rank does not know is not believed"
    cut_off.step = 5
    converged(one, other, cut_off)
    assert cut_off.values() == {"b": b"3", "mine": b"nobody has it"}


def test_a_rank_that_missed_it_lets_go_also_where_it_makes_pieces_strong_at_once() -> None:
    one, cut_off = Process("n0", step=3), Process("n1", step=3)
    one.write("a", b"1")
    converged(one, cut_off)
    cut_off.write("mine", b"2")
    one.delete("a")
    one.step = 4
    make_strong([one], 2)
    assert one.store.names == []
    cut_off.step = 4
    assert make_strong([one, cut_off], 3) == {"mine": b"2"}
    assert one.values() == cut_off.values() == {"mine": b"2"}


def test_an_empty_value_that_was_deleted_elsewhere_does_not_come_back_as_one_that_nobody_has() -> None:
    one, cut_off = Process("n0", step=3), Process("n1", step=3)
    cut_off.write("a", b"")
    asks(one, cut_off)
    assert one.values() == {"a": b""}
    one.delete("a")
    one.step = 4
    make_strong([one], 2)
    assert one.store.names == []
    cut_off.step = 4
    converged(one, cut_off)
    assert one.values() == cut_off.values() == {}


def test_a_horizon_is_made_once_of_a_step() -> None:
    one, other = Process("n0", step=4), Process("n1", step=4)
    one.write("a", b"1")
    one.delete("a")
    one.step = other.step = 5
    make_strong([one, other], 1, reached=[True, False])
    assert (one.store.horizon, other.store.horizon) == (Horizon(5, 1), Horizon())
    one.step = other.step = 6
    other.write("b", b"1")
    other.delete("b")
    make_strong([one, other], 1)
    assert one.store.horizon == other.store.horizon == Horizon(5, 1), "what is deleted in a step is not yet old"


def test_a_store_that_is_full_takes_deletions_of_what_it_has_and_says_who_can_forget_them() -> None:
    full = Process("n0", step=1)
    full.store.write({f"{n:04}": packed(f"{n:04}", b"x") for n in range(MAX_PIECES)}, step=1, writer="n0")
    full.delete("0000")
    assert full.store.nbytes == MAX_PIECES - 1
    with pytest.raises(LocalError, match=r"1 of those here were deleted, which strong\(\) forgets"):
        full.write("more", b"")
    full.write("0000", b"again")
    unknown = Process("n1")
    unknown.write("other", b"")
    unknown.delete("other")
    (entry,) = unknown.store.entries()
    assert "pieces already" in full.store.no_room(entry)
    tight = PieceStore(3)
    tight.write({"a": packed("a", b"123")}, step=0, writer="n0")
    tight.write({"b": packed("b", b"123")}, step=0, writer="n0", delete=["a"])
    assert (tight.nbytes, tight.names) == (3, ["a", "b"])


@pytest.mark.parametrize("horizon", [Horizon(9, 1), Horizon(MAX_COUNT, 1), Horizon(3, 8)])
def test_a_horizon_that_cannot_be_is_its_ranks_fault(horizon: Horizon) -> None:
    members = [Process("n0", step=4), Process("n1", step=4)]
    summaries = [members[0].summary(), PieceSummary("s", b"", horizon, 4)]
    with pytest.raises(PeerError, match="has forgotten deletions up to step") as caught:
        newest_horizon(summaries, view_of(7, members, 4), 4)
    assert caught.value.node == "n1"


def test_a_rank_that_says_it_knows_of_no_step_keeps_deletions_and_changes_nothing_else() -> None:
    one, other = Process("n0", step=3), Process("n1", step=0)
    one.write("a", b"1")
    one.delete("a")
    one.step = 9
    assert make_strong([one, other], 1) == {}
    assert one.store.names == other.store.names == ["a"]


def test_a_deletion_of_a_version_that_is_beyond_all_steps_is_kept() -> None:
    one, other = Process("n0", step=3), Process("n1", step=3)
    one.write("a", b"1")
    piece = one.store.pieces()["a"]
    version = PieceVersion(MAX_COUNT, 1, "n9", piece.entry.version.digest)
    other.store.merge(SharedPiece(type(piece.entry)("a", version, "bytes", "uint8", (1,)), piece.data))
    other.delete("a")
    assert make_strong([one, other], 1) == {}
    assert one.store.horizon == Horizon()
