"""Second copies of shards: what a rank may tell of what it gives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

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


async def in_thread(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no list", "no list of shards"),
        ((*FLOATS[:3], (1 << 60,), (0,), (1 << 60,), False, (0,), (1 << 60,), bytes(16)), "there is no memory here"),
        ((*FLOATS[:3], (8,), (0,), (9,), False, (0,), (8,), bytes(16)), "does not fit|outside|beyond|reaches"),
        ((*FLOATS[:3], (8,), (0,), (8,), False, (4,), (8,), bytes(16)), "a shard that cannot be"),
        ((*FLOATS[:2], "F33", *FLOATS[3:]), "a shard that cannot be"),
    ],
)
async def test_what_another_rank_gives_is_refused_where_it_cannot_be(given: object, words: str) -> None:
    told = msgspec.msgpack.encode([given] if isinstance(given, tuple) else given)
    group: Any = Telling(told)
    with pytest.raises(PeerError, match=words) as refused:
        await copies_of_others([], copies=2, group=group, view_id=3, in_thread=in_thread)
    assert (refused.value.rank, refused.value.view) == (1, 3)
