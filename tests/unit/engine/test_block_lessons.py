"""What a spare and an owner of blocks say to each other over their link: bounded, in turns, beside the steps."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from lesson_link import Link

import quicoll.engine.block_lessons
from quicoll.engine.block_lessons import BlockSupply, BlockTraffic
from quicoll.engine.messages import (
    BLOCK_LESSONS,
    PLACES,
    AskBlocks,
    Blocks,
    EndLesson,
    decode_message,
    encode_message,
)
from quicoll.errors import PeerError

VIEW, A, B = 7, 11, 22  # the incarnations of nodes "a", which owns blocks, and "b", the spare
MADE_OF = bytes(range(16))


def digests(*versions: int) -> Any:
    return np.repeat(np.array(versions, np.uint8)[:, None], 16, axis=1)


def supply(*versions: int, size: int = 4, missing: int | None = None) -> BlockSupply:
    """Places whose bytes are all their version; `missing` is not here."""

    def part(place: int) -> Any:
        return None if place == missing else np.full(size, versions[place], np.uint8)

    return BlockSupply(digests(*versions), part)


class Pair:
    def __init__(self, places: int = 3) -> None:
        loop = asyncio.get_running_loop()
        self.places = places
        self.to_spare, self.to_owner = Link("b", B), Link("a", A)
        self.to_spare.other, self.to_owner.other = self.to_owner, self.to_spare
        self.links: dict[str, Any] = {"a": self.to_owner, "b": self.to_spare}
        self.owner = BlockTraffic(loop=loop, link_to=lambda node: self.links.get(node))
        self.spare = BlockTraffic(loop=loop, link_to=lambda node: self.links.get(node))
        self.to_spare.to, self.to_owner.to = self.owner, self.spare
        self.number = 0
        self.asked: list[Any] = []  # the loop itself keeps no task alive

    async def open(self, *, made_of: bytes = MADE_OF, incarnation: int = B, timeout: float = 5.0) -> None:
        await self.owner.open(VIEW, "b", incarnation, made_of=made_of, places=self.places, timeout=timeout)

    async def publish(self, *versions: int, **how: Any) -> tuple[str, ...]:
        live = await self.owner.publish({"b": supply(*versions, **how)})
        await turns()
        return live

    def ask(self, *, size: int = 4) -> Any:
        self.number += 1
        sizes = [size] * self.places
        asked = self.spare.ask("a", A, VIEW, number=self.number, made_of=MADE_OF, sizes=sizes, timeout=5.0)
        self.asked.append(asyncio.ensure_future(asked))
        return self.asked[-1]

    async def came(self, **how: Any) -> dict[int, int]:
        """The version of each place that comes for a question."""
        return {place: int(data[0]) for place, data in (await self.ask(**how)).items()}


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_spare_gets_what_is_here_and_then_what_has_become_another() -> None:
    pair = Pair()
    await pair.open()
    await pair.publish(1, 1, 1)
    assert await pair.came() == {0: 1, 1: 1, 2: 1}
    asked = pair.ask()
    await pair.publish(1, 1, 1)
    assert not asked.done()  # a step that has changed nothing
    await pair.publish(1, 2, 1)
    assert {place: int(data[0]) for place, data in (await asked).items()} == {1: 2}


async def test_what_was_asked_before_there_was_anything_comes_with_the_first_step_that_gives_it() -> None:
    pair = Pair()
    await pair.open()
    asked = pair.ask()
    await turns()
    assert not asked.done()
    assert pair.to_spare.heard == []
    await pair.publish(1, 1, 1)
    assert set(await asked) == {0, 1, 2}


async def test_what_changes_while_an_answer_is_under_way_comes_with_the_next_one() -> None:
    pair = Pair()
    await pair.open()
    pair.to_spare.deaf = True  # the answer is on its way for long
    asked = pair.ask()
    await pair.publish(1, 1, 1)
    await pair.publish(2, 2, 2)
    assert len(pair.to_spare.heard) == 1  # one answer at a time
    pair.to_spare.deaf = False
    pair.spare.receive(pair.to_owner, pair.to_spare.heard[0])
    assert {int(data[0]) for data in (await asked).values()} == {1}
    assert set((await pair.came()).values()) == {2}


async def test_where_steps_are_faster_than_the_link_every_place_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quicoll.engine.block_lessons, "ANSWER_BYTES", 8)  # two places
    pair = Pair(places=5)
    await pair.open()
    seen: list[int] = []
    for version in range(1, 6):
        await pair.publish(*[version] * 5)
        seen += await pair.came()
    assert seen == [0, 1, 2, 3, 4, 0, 1, 2, 3]


async def test_an_answer_is_of_a_bounded_number_of_places_and_bytes() -> None:
    pair = Pair(places=PLACES + 2)
    await pair.open()
    await pair.publish(*[1] * (PLACES + 2))
    assert list(await pair.came()) == list(range(PLACES))
    assert list(await pair.came()) == [PLACES, PLACES + 1]


async def test_one_place_may_be_larger_than_an_answer_otherwise_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quicoll.engine.block_lessons, "ANSWER_BYTES", 8)
    pair = Pair(places=2)
    await pair.open()
    await pair.publish(1, 1, size=100)
    assert await pair.came(size=100) == {0: 1}
    assert await pair.came(size=100) == {1: 1}


async def test_a_node_that_was_shown_to_nobody_gets_nothing() -> None:
    pair = Pair()
    with pytest.raises(PeerError, match="gives its blocks no more"):
        await pair.ask()
    assert pair.to_spare.sent == {}


async def test_another_process_of_the_node_and_places_of_another_make_get_nothing() -> None:
    for wrong in ({"incarnation": B + 1}, {"made_of": bytes(16)}):
        pair = Pair()
        await pair.open(**wrong)
        await pair.publish(1, 1, 1)
        with pytest.raises(PeerError, match="gives its blocks no more"):
            await pair.ask()
        assert pair.to_spare.sent == {}


async def test_blocks_that_others_own_now_end_the_lesson() -> None:
    pair = Pair()
    await pair.open()
    asked = pair.ask()
    await pair.publish(1, 1, 1, missing=1)
    with pytest.raises(PeerError, match="gives its blocks no more"):
        await asked
    assert await pair.publish(1, 1, 1) == ()


async def test_places_that_are_not_taken_in_time_end_the_lesson_and_are_taken_back() -> None:
    pair = Pair()
    await pair.open(timeout=0.01)
    asked = pair.ask()
    await turns()
    pair.to_spare.deaf = True  # of the answer the spare hears nothing, and then that there is no more
    await pair.publish(1, 1, 1)
    pair.to_spare.deaf = False
    with pytest.raises(PeerError, match="gives its blocks no more"):
        await asked
    assert all(transfer.aborted for _, transfer in pair.to_spare.sent.values())
    assert await pair.owner.publish({}) == ()


async def test_a_link_that_ends_ends_the_question_and_the_lesson() -> None:
    pair = Pair()
    await pair.open()
    asked = pair.ask()
    await turns()
    pair.to_spare.ended = pair.to_owner.ended = True
    pair.to_owner.cause = "it was killed"
    pair.spare.link_ended(pair.to_owner)
    with pytest.raises(PeerError, match="it was killed"):
        await asked
    assert await pair.owner.publish({}) == ()


@pytest.mark.parametrize(("first", "following"), [(0, 0), (2, 2), (0, 1 << PLACES), (1 << 40, 1)])
async def test_an_answer_that_cannot_be_is_refused_before_there_is_memory_for_it(first: int, following: int) -> None:
    pair = Pair()
    await pair.open()
    asked = pair.ask()
    await turns()
    pair.spare.receive(pair.to_owner, Blocks(BLOCK_LESSONS | VIEW, 1, first, following))
    with pytest.raises(PeerError, match="blocks that cannot be"):
        await asked
    assert pair.to_owner.posted == {}


async def test_more_bytes_than_an_answer_has_are_refused_before_there_is_memory_for_them() -> None:
    pair = Pair()
    await pair.open()
    asked = pair.ask(size=quicoll.engine.block_lessons.ANSWER_BYTES // 2 + 1)
    await turns()
    pair.spare.receive(pair.to_owner, Blocks(BLOCK_LESSONS | VIEW, 1, 0, 3))
    with pytest.raises(PeerError, match="blocks that cannot be"):
        await asked


async def test_an_answer_to_an_earlier_question_is_dropped() -> None:
    pair = Pair()
    await pair.open()
    asked = pair.ask()
    await turns()
    pair.spare.receive(pair.to_owner, Blocks(BLOCK_LESSONS | VIEW, 0, 0, 1))
    await turns()
    assert not asked.done()
    asked.cancel()


async def test_a_spare_that_ends_wants_nothing_more_and_the_owner_forgets_it() -> None:
    pair = Pair()
    await pair.open()
    pair.spare.end("a", A, VIEW)
    await turns()
    assert pair.to_owner.discarded
    assert pair.to_owner.heard == [EndLesson(BLOCK_LESSONS | VIEW)]
    assert await pair.owner.publish({}) == ()


async def test_a_spare_that_is_shown_again_begins_anew_and_what_was_under_way_is_taken_back() -> None:
    pair = Pair()
    await pair.open()
    pair.to_spare.deaf = True
    pair.ask()
    await pair.publish(1, 1, 1)
    await pair.open()
    await turns()
    assert all(transfer.aborted for _, transfer in pair.to_spare.sent.values())
    pair.to_spare.deaf = False
    await pair.publish(1, 1, 1)
    assert len(await pair.came()) == 3


async def test_an_engine_that_stops_sends_nothing_any_more() -> None:
    pair = Pair()
    await pair.open()
    pair.to_spare.deaf = True
    pair.ask()
    await pair.publish(1, 1, 1)
    pair.owner.stop()
    await turns()
    assert all(transfer.aborted for _, transfer in pair.to_spare.sent.values())


@pytest.mark.parametrize("message", [AskBlocks(BLOCK_LESSONS | 3, 1, MADE_OF), Blocks(BLOCK_LESSONS, 1, 5, 1 << 47)])
def test_messages_come_as_they_were_sent(message: Any) -> None:
    assert decode_message(encode_message(message), node="a") == message


@pytest.mark.parametrize(
    "message", [AskBlocks(1, 1, bytes(15)), AskBlocks(-1, 1, MADE_OF), Blocks(1, 1, -1, 1), Blocks(1, 1, 0, 1 << 62)]
)
def test_messages_that_no_rank_would_send_are_refused(message: Any) -> None:
    with pytest.raises(PeerError):
        decode_message(encode_message(message), node="a")
