"""Which parts of an arena are free."""

from __future__ import annotations

import random

import pytest

from quicoll.local.arena import FreeParts

SIZE = 64


@pytest.mark.parametrize("seed", range(40))
def test_a_part_is_somebodys_once_and_what_is_given_back_is_there_again(seed: int) -> None:
    chance, parts = random.Random(seed), FreeParts(SIZE)
    taken: dict[int, int] = {}
    for _ in range(300):
        if taken and chance.random() < 0.5:
            start = chance.choice(list(taken))
            parts.give(start, taken.pop(start))
            continue
        nbytes = chance.randrange(1, 24)
        start_or_none = parts.take(nbytes)
        used = {each for start, size in taken.items() for each in range(start, start + size)}
        gaps = [all(each not in used for each in range(at, at + nbytes)) for at in range(SIZE - nbytes + 1)]
        if start_or_none is None:
            assert not any(gaps)
        else:
            assert start_or_none == gaps.index(True)  # the first that is large enough
            taken[start_or_none] = nbytes
    for start, nbytes in taken.items():
        parts.give(start, nbytes)
    assert parts.take(SIZE) == 0
    assert parts.take(1) is None


def test_of_nothing_there_is_no_part() -> None:
    assert FreeParts(0).take(1) is None
