"""Memory of copies: used again by the next save of the same size, and never while somebody may read it."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quicoll.checkpoint.lending import CopyMemory, Loan
from quicoll.errors import LocalError


def address(data: memoryview) -> int:
    found: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return found


def spans(loan: Loan) -> list[tuple[int, int]]:
    return [(address(data), address(data) + data.nbytes) for data in loan.pieces if data.nbytes]


def test_what_is_given_back_is_lent_again_for_as_many_bytes() -> None:
    memory = CopyMemory()
    first = memory.lend([1000, 24])
    where = spans(first)
    first.give_back()
    assert spans(memory.lend([1000, 24])) == where


def test_another_number_of_bytes_gets_memory_of_its_own_and_the_old_goes() -> None:
    memory = CopyMemory()
    memory.lend([1000]).give_back()
    larger = memory.lend([5000])
    assert [data.nbytes for data in larger.pieces] == [5000]
    assert memory._free is None


def test_memory_that_was_not_given_back_is_lent_to_nobody_else() -> None:
    memory = CopyMemory()
    forgotten = memory.lend([4096])
    for _ in range(3):
        other = memory.lend([4096])
        assert spans(other) != spans(forgotten)
        other.give_back()


def test_what_is_lent_at_one_time_never_shares_a_byte() -> None:
    """Against a model: any order of lending, giving back and forgetting."""
    for seed in range(50):
        rng, memory = random.Random(seed), CopyMemory()
        lent: list[Loan] = []
        for _ in range(40):
            match rng.randrange(3):
                case 0 | 1:
                    lent.append(memory.lend([rng.choice((100, 640)) for _ in range(rng.choice((0, 1, 3)))]))
                case 2 if lent:
                    lent.pop(rng.randrange(len(lent))).give_back()
            taken = sorted(span for loan in lent for span in spans(loan))
            assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))


def test_pieces_are_aligned_for_any_element() -> None:
    loan = CopyMemory().lend([1, 3, 8, 65])
    starts = [address(data) for data in loan.pieces]
    assert {(start - starts[0]) % 64 for start in starts} == {0}


def test_to_give_back_twice_is_a_mistake() -> None:
    loan = CopyMemory().lend([8])
    loan.give_back()
    with pytest.raises(AssertionError, match="twice"):
        loan.give_back()


def test_where_there_is_no_memory_a_local_error_says_how_much_was_asked_for() -> None:
    sizes: list[Any] = [1 << 60]
    with pytest.raises(LocalError, match=r"no memory for a copy of 1152921504606846976 bytes"):
        CopyMemory().lend(sizes)
