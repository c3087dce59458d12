"""Second copies of shards: what a rank may tell of what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from quicoll.checkpoint.lending import CopyMemory, Loan
from quicoll.errors import PeerError
from quicoll.train.copies import copies_of_others

FLOATS = ("m", "", "F32", (8,), (0,), (8,), False, (0,), (8,), bytes(16))


class Telling:
    """A group of two, whose other rank tells this."""

    rank = 0

    def __init__(self, told: object) -> None:
        self.told = told

    async def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self.told]


class Counted(CopyMemory):
    """Memory of which it is known how often it was lent."""

    lent = 0

    def lend(self, sizes: Sequence[int]) -> Loan:
        self.lent += 1
        return super().lend(sizes)


async def in_thread(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no list", "no list of shards"),
        (
            (*FLOATS[:3], (1 << 60,), (0,), (1 << 60,), False, (0,), (1 << 60,), bytes(16)),
            r"gives 4611686018427387904 bytes as second copies, and a rank gives 1024 at most",
        ),
        ((*FLOATS[:3], (8,), (0,), (9,), False, (0,), (8,), bytes(16)), "does not fit|outside|beyond|reaches"),
        ((*FLOATS[:3], (8,), (0,), (8,), False, (4,), (8,), bytes(16)), "a shard that cannot be"),
        ((*FLOATS[:2], "F33", *FLOATS[3:]), "a shard that cannot be"),
    ],
)
async def test_what_another_rank_gives_is_refused_where_it_cannot_be(given: object, words: str) -> None:
    told = msgspec.msgpack.encode([given] if isinstance(given, tuple) else given)
    group: Any = Telling(told)
    memory = Counted()
    with pytest.raises(PeerError, match=words) as refused:
        await copies_of_others([], copies=2, limit=1024, memory=memory, group=group, view_id=3, in_thread=in_thread)
    assert (refused.value.rank, refused.value.view) == (1, 3)
    assert memory.lent == 0
