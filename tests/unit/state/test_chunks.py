"""How a state is cut into chunks, and that what goes out of one comes into another as it was."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from quicoll.numerics.buffers import tensor_digest
from quicoll.state.chunks import ChunkedState, ChunkTable, Piece, chunk_digest
from quicoll.state.tensor_memory import TensorMemory, readable, writable


def cut(sizes: list[tuple[int, int]], limit: int) -> list[list[Piece]]:
    table = ChunkTable(sizes, limit)
    return [list(table.pieces(chunk)) for chunk in range(len(table))]


def state_of(tensors: Sequence[TensorMemory], limit: int) -> ChunkedState:
    return ChunkedState(tensors, ChunkTable([(each.elements, each.dtype.itemsize) for each in tensors], limit))


def test_a_large_tensor_is_chunks_of_its_own_and_small_ones_share_one() -> None:
    assert cut([(3, 4), (40, 4), (2, 1), (0, 8), (5, 2)], limit=64) == [
        [Piece(0, 0, 3)],
        [Piece(1, 0, 16)],
        [Piece(1, 16, 32)],
        [Piece(1, 32, 40), Piece(2, 0, 2), Piece(4, 0, 5)],
    ]


def test_a_state_without_elements_has_no_chunks() -> None:
    assert cut([], 64) == cut([(0, 4), (0, 1)], 64) == []


def test_no_element_is_cut_even_where_one_is_longer_than_a_chunk() -> None:
    assert cut([(2, 16)], limit=8) == [[Piece(0, 0, 1)], [Piece(0, 1, 2)]]


def test_thousands_of_small_tensors_are_few_chunks() -> None:
    assert len(ChunkTable([(25, 4)] * 10_000, 1 << 20)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_in_one_chunk_and_no_chunk_is_longer_than_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [(rng.choice([0, 1, 7, 300]) * rng.randrange(4), rng.choice([1, 2, 4, 8, 16])) for _ in range(30)]
    limit = rng.choice([16, 100, 4096])
    table = ChunkTable(sizes, limit)
    seen: dict[int, int] = {}
    for chunk in range(len(table)):
        pieces = list(table.pieces(chunk))
        nbytes = sum((piece.stop - piece.start) * sizes[piece.tensor][1] for piece in pieces)
        assert 0 < nbytes == table.nbytes(chunk) <= limit
        for piece in pieces:
            assert piece.start == seen.get(piece.tensor, 0)
            seen[piece.tensor] = piece.stop
    assert seen == {tensor: elements for tensor, (elements, _) in enumerate(sizes) if elements}


def test_what_is_read_from_one_state_and_written_to_another_makes_them_equal() -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((30, 7)).astype(np.float32)
    given = [rng.integers(0, 9, 50), wide[:, ::2], np.array(True), np.empty((0, 3)), rng.standard_normal(9)]
    taken = [np.zeros_like(value) for value in given]
    taken[1] = np.zeros((4, 30), np.float32).T  # the same elements, in another order of memory

    def state(values: list[np.ndarray], opened: object) -> ChunkedState:
        return state_of(
            [opened(f"t{i}", v, dtype=v.dtype.name, shape=v.shape) for i, v in enumerate(values)],
            limit=64,
        )

    source, target = state(given, readable), state(taken, writable)
    assert len(source.table) > 5
    for chunk in range(len(source.table)):
        data = source.read(chunk)
        assert source.digest(chunk) == chunk_digest(np.ascontiguousarray(data))
        target.write(chunk, data)
        assert target.digest(chunk) == source.digest(chunk)
    assert [tensor_digest(value) for value in taken] == [tensor_digest(value) for value in given]


def test_a_chunk_names_the_first_and_the_last_of_its_tensors() -> None:
    values = {name: np.zeros(4, np.uint8) for name in "abc"}
    state = state_of([readable(n, v, dtype="uint8", shape=(4,)) for n, v in values.items()], limit=12)
    assert state.names(0) == "'a' to 'c'"
    assert state_of(state.tensors, limit=4).names(1) == "'b'"
