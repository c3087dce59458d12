"""Pieces: their versions, that stores come to the same whatever the order, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quicoll.errors import LocalError
from quicoll.tiers.pieces import (
    MAX_COUNT,
    MAX_PIECES,
    PieceEntry,
    PieceStore,
    PieceVersion,
    SharedPiece,
    newest_entries,
    packed,
    unpacked,
)

VALUES: list[Any] = [
    b"",
    b"abc",
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(7),
    np.zeros((0, 4), np.int16),
    np.arange(10)[::3],
    torch.arange(5, dtype=torch.bfloat16),
    torch.tensor([[1.5, -2.0]]),
]


def written(store: PieceStore, name: str, value: Any, *, step: int = 0, writer: str = "n0") -> SharedPiece:
    store.write({name: packed(name, value)}, step=step, writer=writer)
    return store.pieces()[name]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_in_memory_of_its_own(value: Any) -> None:
    piece = packed("p", value)
    assert piece.right
    back = unpacked(piece)
    assert type(back) is type(value)
    if isinstance(value, bytes):
        assert back == value
    else:
        assert (back.dtype, tuple(back.shape)) == (value.dtype, tuple(value.shape))
        assert bytes(back.tolist().__repr__(), "ascii") == bytes(value.tolist().__repr__(), "ascii")
        back += 1
        assert piece.right  # the piece's bytes are not the value's


def test_later_writes_do_not_change_a_piece() -> None:
    value = np.zeros(4)
    piece = packed("p", value)
    value += 1
    assert piece.right
    assert unpacked(piece).tolist() == [0.0] * 4


@pytest.mark.parametrize("value", [None, 3, "text", [1, 2], object()])
def test_what_is_no_value_is_refused(value: Any) -> None:
    with pytest.raises(LocalError, match="piece 'p'"):
        packed("p", value)


@pytest.mark.parametrize("name", ["", "x" * 129, 3, "\ud800"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(LocalError, match="no name"):
        packed(name, b"")


def test_a_write_is_newer_than_all_that_its_writer_has_seen() -> None:
    """Also where the writer knows of fewer committed steps than the one whose write it has seen."""
    ahead, behind = PieceStore(1000), PieceStore(1000)
    first = written(ahead, "p", b"1", step=7, writer="n0")
    assert behind.merge(first)
    second = written(behind, "p", b"2", step=6, writer="a")
    assert second.entry.version > first.entry.version
    assert ahead.merge(second)
    assert not behind.merge(first)
    assert unpacked(ahead.pieces()["p"]) == b"2"


def test_two_writes_of_one_version_are_told_apart_by_their_bits() -> None:
    """A process that lost its memory writes the first version again, with other bits."""
    before, again = PieceStore(100), PieceStore(100)
    one, other = written(before, "p", b"x"), written(again, "p", b"y")
    assert one.entry.version != other.entry.version
    before.merge(other)
    again.merge(one)
    assert before.digest == again.digest


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_stores_that_have_heard_of_all_writes_are_equal_whatever_the_order(rng: random.Random, ranks: int) -> None:
    stores = [PieceStore(10_000) for _ in range(ranks)]
    all_pieces: list[SharedPiece] = []
    for number in range(12):
        writer = rng.randrange(ranks)
        if all_pieces and rng.random() < 0.5:
            stores[writer].merge(rng.choice(all_pieces))
        name, value = rng.choice("abc"), bytes([rng.randrange(3)])
        all_pieces.append(written(stores[writer], name, value, step=rng.randrange(number + 1), writer=f"n{writer}"))
    for store in stores:
        heard = all_pieces * 2
        rng.shuffle(heard)
        for piece in heard:
            store.merge(piece)
    assert len({store.digest for store in stores}) == 1
    assert len({store.nbytes for store in stores}) == 1
    listing = newest_entries([[piece.entry] for piece in all_pieces])
    assert list(listing.values()) == stores[0].entries()


def test_a_store_holds_no_more_than_it_may() -> None:
    store = PieceStore(10)
    written(store, "a", bytes(6))
    with pytest.raises(LocalError, match="5 bytes do not fit beside 6 others into max_bytes=10"):
        store.write({"b": packed("b", bytes(5))}, step=0, writer="n0")
    assert store.names == ["a"]
    written(store, "a", bytes(10))  # in the place of the first
    big = written(PieceStore(100), "b", bytes(1))
    assert "does not fit" in store.no_room(big.entry)
    assert not store.merge(big)
    many = PieceStore(MAX_PIECES * 2)
    many.write({f"{n}": packed(f"{n}", b"") for n in range(MAX_PIECES)}, step=0, writer="n0")
    assert "pieces already" in many.no_room(big.entry)
    with pytest.raises(LocalError, match="at most"):
        many.write({"more": packed("more", b"")}, step=0, writer="n0")


def test_what_is_pinned_is_found_until_it_is_let_go() -> None:
    store = PieceStore(100)
    first = written(store, "p", b"1")
    pinned = store.pin()
    second = written(store, "p", b"2")
    assert store.find("p", first.entry.version) is first
    assert store.find("p", second.entry.version) is second
    store.unpin(pinned)
    assert store.find("p", first.entry.version) is None


def test_a_counter_that_can_grow_no_more_is_an_error_and_no_overflow() -> None:
    store = PieceStore(100)
    end = packed("p", b"z")
    version = PieceVersion(MAX_COUNT, MAX_COUNT, "n9", end.entry.version.digest)
    assert store.merge(SharedPiece(msgspec.structs.replace(end.entry, version=version), end.data))
    with pytest.raises(LocalError, match="too often"):
        written(store, "p", b"a")


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        ("numpy", "float64", [MAX_COUNT, 2]),
        ("numpy", "float63", [1]),
        ("bytes", "float32", [1]),
        ("bytes", "uint8", [1, 1]),
        ("numpy", "uint8", [-1]),
        ("list", "uint8", [1]),
        ("numpy", "uint8", [1] * 33),
        ("numpy", "uint8", [0, MAX_COUNT, MAX_COUNT]),  # of no bytes, and no array that numpy makes
        ("deleted", "uint8", [1]),
        ("deleted", "float32", [0]),
        ("deleted", "uint8", [0]),  # with another digest than a deletion has
    ],
)
def test_descriptions_that_cannot_be_are_refused_when_they_are_read(kind: str, dtype: str, shape: list[int]) -> None:
    data = msgspec.msgpack.encode(["p", [0, 0, "n0", b"0" * 16], kind, dtype, shape])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=PieceEntry)
