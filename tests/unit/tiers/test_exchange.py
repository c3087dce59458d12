"""What ranks say to each other about pieces: stores become equal whatever is lost, late or twice; lies are refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.errors import PeerError
from quicoll.tiers.exchange import (
    MAX_CHUNK,
    PAGE,
    ComparePieces,
    FetchPiece,
    ListPieces,
    PieceAnswer,
    PieceChunk,
    PieceMessage,
    PiecePage,
    PieceQuestion,
    PieceRound,
    SamePieces,
    answer_question,
    decode_pieces,
    encode_pieces,
)
from quicoll.tiers.pieces import MAX_PIECES, PieceEntry, PieceStore, PieceVersion, SharedPiece, packed, unpacked

Answers = Callable[[PieceQuestion], PieceAnswer]


def store_of(room: int = 1 << 20, **values: bytes) -> PieceStore:
    store = PieceStore(room)
    store.write({name: packed(name, value) for name, value in values.items()}, step=0, writer="n0")
    return store


def asked(store: PieceStore) -> Answers:
    return lambda question: answer_question(lambda name: store if name == "s" else None, question)


def played(mine: PieceStore, peer: Answers, *, chunk: int = 4, most: int = 10_000) -> PieceRound:
    """A round to its end, with every message encoded and decoded."""
    exchange = PieceRound("s", mine, chunk)
    for number in range(most):
        question = exchange.question
        if question is None:
            return exchange
        there = decode_pieces(encode_pieces(PieceMessage(number, question)), node="n1").body
        assert there == question
        assert isinstance(there, ComparePieces | ListPieces | FetchPiece)
        back = decode_pieces(encode_pieces(PieceMessage(number, peer(there))), node="n1").body
        assert isinstance(back, SamePieces | PiecePage | PieceChunk)
        exchange.take(back)
    raise AssertionError("a round that does not end")


def test_a_round_brings_all_that_is_newer_and_nothing_else() -> None:
    mine, other = store_of(a=b"old", b=b"mine alone", e=b""), store_of(a=b"old")
    mine_before = mine.pieces()
    other.write({name: packed(name, value) for name, value in (("a", b"newer one"), ("c", b""))}, step=1, writer="n1")
    exchange = played(mine, asked(other))
    assert (exchange.error, exchange.refused, exchange.merged) == ("", "", 2)
    assert {name: unpacked(piece) for name, piece in mine.pieces().items()} == {
        "a": b"newer one",
        "b": b"mine alone",
        "c": b"",
        "e": b"",
    }
    assert mine.pieces()["b"] is mine_before["b"]
    assert played(mine, asked(other)).merged == 0


def test_equal_stores_cost_one_question() -> None:
    mine = store_of(a=b"1")
    other = PieceStore(100)
    other.merge(mine.pieces()["a"])
    exchange = PieceRound("s", mine, 4)
    exchange.take(asked(other)(ComparePieces("s", mine.digest)))
    assert exchange.question is None
    assert played(mine, asked(store_of()), most=3).error == ""
    unknown = PieceRound("t", mine, 4)
    unknown.take(asked(other)(ComparePieces("t", mine.digest)))
    assert unknown.question is None


def test_many_pieces_come_page_by_page() -> None:
    mine, other = (
        PieceStore(1 << 20),
        store_of(**{f"p{number:04}": bytes([number % 256]) for number in range(3 * PAGE)}),
    )
    assert played(mine, asked(other)).merged == 3 * PAGE
    assert mine.digest == other.digest


@given(
    rng=st.randoms(use_true_random=False),
    loss=st.floats(0, 0.4),
    ranks=st.integers(2, 4),
)
@settings(max_examples=60, deadline=None)
def test_stores_converge_after_the_last_write_whatever_is_lost(rng: random.Random, loss: float, ranks: int) -> None:
    """Rounds break off anywhere, old answers come in the place of new ones, writes go on meanwhile."""
    stores = [PieceStore(10_000) for _ in range(ranks)]
    old: list[PieceAnswer] = []

    def disturbed(peer: Answers, exchange: PieceRound) -> None:
        while exchange.question is not None:
            if rng.random() < loss:
                return
            told = peer(exchange.question)
            old.append(told)
            exchange.take(rng.choice(old) if rng.random() < loss / 4 else told)
            if rng.random() < 0.1:
                write()

    def write() -> None:
        rank, name = rng.randrange(ranks), rng.choice("abc")
        value = bytes(rng.randrange(3) for _ in range(rng.randrange(9)))
        stores[rank].write({name: packed(name, value)}, step=rng.randrange(3), writer=f"n{rank}")

    for _ in range(20):
        write()
        one, other = rng.sample(range(ranks), 2)
        disturbed(asked(stores[other]), PieceRound("s", stores[one], rng.randrange(1, 5)))
    newest: dict[str, PieceVersion] = {}
    for store in stores:
        for entry in store.entries():
            newest[entry.name] = max(entry.version, newest.get(entry.name, entry.version))
    for _ in range(ranks):  # after the last write: each asks each, as often as there are ranks
        for one in range(ranks):
            for other in range(ranks):
                if one != other:
                    assert played(stores[one], asked(stores[other])).error == ""
    assert len({store.digest for store in stores}) == 1
    assert {entry.name: entry.version for entry in stores[0].entries()} == newest
    assert all(piece.right for store in stores for piece in store.pieces().values())


def test_a_piece_that_is_written_anew_while_it_is_fetched_is_left_for_the_next_round() -> None:
    mine, other = PieceStore(1000), store_of(a=b"0123456789", b=b"b")
    exchange = PieceRound("s", mine, 4)
    exchange.take(asked(other)(ComparePieces("s", mine.digest)))
    exchange.take(asked(other)(_question(exchange)))
    other.write({"a": packed("a", b"another")}, step=0, writer="n1")
    while exchange.question is not None:
        exchange.take(asked(other)(exchange.question))
    assert (exchange.error, list(mine.pieces())) == ("", ["b"])
    played(mine, asked(other))
    assert mine.digest == other.digest


def _question(exchange: PieceRound) -> PieceQuestion:
    assert exchange.question is not None
    return exchange.question


def lying(other: PieceStore, lie: Callable[[PieceQuestion, PieceAnswer], PieceAnswer]) -> Answers:
    return lambda question: lie(question, asked(other)(question))


def other_bits(question: PieceQuestion, told: PieceAnswer) -> PieceAnswer:
    return PieceChunk(bytes(len(told.data))) if isinstance(told, PieceChunk) and told.data else told


def too_few(question: PieceQuestion, told: PieceAnswer) -> PieceAnswer:
    return PieceChunk(told.data[1:]) if isinstance(told, PieceChunk) and told.data else told


def no_chunk(question: PieceQuestion, told: PieceAnswer) -> PieceAnswer:
    return SamePieces() if isinstance(question, FetchPiece) else told


def backwards(question: PieceQuestion, told: PieceAnswer) -> PieceAnswer:
    return PiecePage(told.entries[::-1], told.more) if isinstance(told, PiecePage) else told


def for_ever(question: PieceQuestion, told: PieceAnswer) -> PieceAnswer:
    return PiecePage((), more=True) if isinstance(question, ComparePieces | ListPieces) else told


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (other_bits, "with other bits"),
        (too_few, "not those that it was asked for"),
        (no_chunk, "answered a FetchPiece with a SamePieces"),
        (backwards, "in another order"),
        (for_ever, "names none"),
    ],
)
def test_a_lie_ends_the_round_and_brings_nothing(
    lie: Callable[[PieceQuestion, PieceAnswer], PieceAnswer], said: str
) -> None:
    mine = PieceStore(1000)
    exchange = played(mine, lying(store_of(a=b"1234567", b=b"x"), lie), most=50)
    assert said in exchange.error
    assert len(mine) == 0


def test_a_list_without_an_end_ends_the_round() -> None:
    numbers = iter(range(10**9))

    def peer(question: PieceQuestion) -> PieceAnswer:
        version = PieceVersion(0, 0, "n1", b"0" * 16)  # as old as can be: nothing of it is wanted
        names = [f"{next(numbers):09}" for _ in range(PAGE)]
        return PiecePage(tuple(PieceEntry(name, version, "bytes", "uint8", (1 << 40,)) for name in names), more=True)

    exchange = played(PieceStore(10), peer, most=200)
    assert exchange.error == f"lists more than {MAX_PIECES} pieces"


def test_a_piece_of_no_bytes_is_looked_at_as_well() -> None:
    version = PieceVersion(1, 1, "n0", b"0" * 16)
    page = PiecePage((PieceEntry("a", version, "bytes", "uint8", (0,)),), more=False)
    mine = PieceStore(10)
    exchange = played(mine, lambda question: page)
    assert "with other bits" in exchange.error
    assert len(mine) == 0


def test_no_memory_is_taken_for_a_piece_that_does_not_fit() -> None:
    version = PieceVersion(1, 1, "n0", b"0" * 16)
    page = PiecePage((PieceEntry("a", version, "numpy", "float64", (1 << 50,)),), more=False)
    mine = store_of(100, b=b"mine")
    exchange = played(mine, lambda question: page)
    assert "does not fit" in exchange.refused
    assert mine.names == ["b"]


def test_an_answer_is_bounded_whatever_is_asked() -> None:
    other = store_of(a=b"0123456789")
    version = other.entries()[0].version
    assert asked(other)(FetchPiece("s", "a", version, 8, MAX_CHUNK)) == PieceChunk(b"89")
    assert asked(other)(FetchPiece("s", "a", version, 1 << 60, 10)) == PieceChunk(b"")
    assert asked(other)(FetchPiece("t", "a", version, 0, 10)) == PieceChunk(None)
    assert asked(other)(ListPieces("s", "zzz")) == PiecePage((), more=False)
    pages = asked(store_of(**{f"p{number:04}": b"" for number in range(2 * PAGE)}))(ListPieces("s", ""))
    assert isinstance(pages, PiecePage)
    assert (len(pages.entries), pages.more) == (PAGE, True)


@pytest.mark.parametrize(
    "message",
    [
        [1],
        [-1, [2]],
        [1, [7]],
        [1, [1, "", b"0" * 16]],
        [1, [1, "s", b"0"]],
        [1, [5, "s", "a", [0, 0, "n", b"0" * 16], 0, MAX_CHUNK + 1]],
        [1, [6, bytes(MAX_CHUNK + 1)]],
        [1, [4, [["p", [0, 0, "n", b"0" * 16], "numpy", "float9", [1]]], False]],
    ],
    ids=repr,
)
def test_messages_that_no_rank_of_ours_sends_are_refused(message: object) -> None:
    with pytest.raises(PeerError, match="malformed message about shared state"):
        decode_pieces(msgspec.msgpack.encode(message), node="n1")


def test_a_piece_is_of_one_version_from_its_first_byte_to_its_last() -> None:
    piece = packed("a", b"0123")
    assert piece.right
    assert not SharedPiece(piece.entry, packed("a", b"0124").data).right
