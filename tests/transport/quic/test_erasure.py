"""Reed-Solomon parity against what it has to bring back, and against arithmetic with a table."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pytest

from quicoll_transport.quic.erasure import MOST_PARITY_ROWS, MOST_SEGMENTS, parity_row, repair_segments

if TYPE_CHECKING:
    from numpy.typing import NDArray


def slow_product(a: int, b: int) -> int:
    """Multiply in GF(256) as it is defined: polynomials modulo x^8 + x^4 + x^3 + x^2 + 1."""
    total = 0
    while b:
        total ^= a if b & 1 else 0
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return total


def slow_inverse(a: int) -> int:
    return next(b for b in range(1, 256) if slow_product(a, b) == 1)


def segments_of(rng: np.random.Generator, count: int, words: int = 3) -> NDArray[np.uint64]:
    return rng.integers(0, 1 << 64, (count, words), np.uint64, endpoint=False)


def test_the_first_row_is_the_xor_of_the_segments() -> None:
    segments = segments_of(np.random.default_rng(1), 57)
    assert (parity_row(segments, 0) == np.bitwise_xor.reduce(segments, axis=0)).all()


@pytest.mark.parametrize("j", [0, 1, 7, MOST_PARITY_ROWS - 1])
def test_a_row_is_what_the_definition_says(j: int) -> None:
    segments = segments_of(np.random.default_rng(j), MOST_SEGMENTS, 1)
    expected = [0] * 8
    for i, row in enumerate(segments.view(np.uint8).tolist()):
        coefficient = slow_product(255 ^ i, slow_inverse((255 - j) ^ i))
        expected = [total ^ slow_product(coefficient, value) for total, value in zip(expected, row, strict=True)]
    assert parity_row(segments, j).view(np.uint8).tolist() == expected


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_every_loss_of_a_few_segments_is_repaired_by_every_choice_of_as_many_rows(count: int) -> None:
    segments = segments_of(np.random.default_rng(count), count)
    rows = {j: parity_row(segments, j) for j in range(4)}
    for lost in range(min(count, 4) + 1):
        for missing in combinations(range(count), lost):
            for chosen in combinations(rows, lost):
                broken = segments.copy()
                broken[list(missing)] = 0x5A
                repair_segments(broken, missing, {j: rows[j] for j in chosen})
                assert (broken == segments).all(), (missing, chosen)


@pytest.mark.parametrize("seed", range(30))
def test_many_segments_are_repaired_up_to_the_number_of_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, lost = int(rng.integers(1, MOST_SEGMENTS + 1)), int(rng.integers(1, MOST_PARITY_ROWS + 1))
    segments = segments_of(rng, count, int(rng.integers(1, 40)))
    missing = sorted(rng.choice(count, min(lost, count), replace=False).tolist())
    chosen = rng.choice(MOST_PARITY_ROWS, len(missing), replace=False).tolist()
    broken = segments.copy()
    broken[missing] = 0
    repair_segments(broken, missing, {j: parity_row(segments, j) for j in chosen})
    assert (broken == segments).all()


def test_a_strided_part_of_a_table_has_the_parity_of_its_copy() -> None:
    table = segments_of(np.random.default_rng(4), 40)
    assert (parity_row(table[1::3], 5) == parity_row(table[1::3].copy(), 5)).all()


def test_fewer_rows_than_what_is_missing_are_refused() -> None:
    segments = segments_of(np.random.default_rng(5), 9)
    with pytest.raises(ValueError, match="2 segments are missing, and there are 1 rows"):
        repair_segments(segments, [1, 4], {0: parity_row(segments, 0)})
