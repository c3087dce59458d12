"""Pieces on their way over links: who answers what, and what a peer that misbehaves can make a rank do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from quicoll.tiers import exchange, spreading
from quicoll.tiers.exchange import (
    MAX_PIECE_MESSAGE,
    ComparePieces,
    FetchPiece,
    PieceChunk,
    PieceMessage,
    PiecePage,
    SamePieces,
    decode_pieces,
    encode_pieces,
)
from quicoll.tiers.pieces import Horizon, PieceEntry, PieceStore, PieceVersion, packed
from quicoll.tiers.spreading import ANSWERS, Spreader
from quicoll_transport.errors import LinkLost, MessageRefused

if TYPE_CHECKING:
    from quicoll_transport.endpoint import Link


class Wire:
    """A link and its channel: what comes is put in, what goes is kept, and never arrives unless `arrives` says so."""

    def __init__(self, number: int = 1, node: str = "n1", *, arrives: bool = True) -> None:
        self.number = number
        self.node = node
        self.ended = False
        self.limit = 0
        self.closed = ""
        self.sent: list[PieceMessage] = []
        self._arrives = arrives
        self._coming: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    def channel(self, number: int) -> Wire:
        return self

    async def receive(self) -> bytes:
        data = await self._coming.get()
        if isinstance(data, Exception):
            raise data
        return data

    def send(self, data: bytes) -> Sent:
        self.sent.append(decode_pieces(data, node="n0"))
        return Sent(self._arrives)

    def close(self, reason: str) -> None:
        self.closed = reason
        self.lose()

    def lose(self) -> None:
        self.ended = True
        self._coming.put_nowait(LinkLost("gone", peer=self.node))

    def say(self, number: int, body: Any) -> None:
        self._coming.put_nowait(encode_pieces(PieceMessage(number, body)))

    def put(self, data: bytes | Exception) -> None:
        self._coming.put_nowait(data)


class Sent:
    def __init__(self, arrives: bool) -> None:
        self.done = arrives

    def abort(self) -> None:
        self.done = True

    async def within(self, timeout: float, *, what: str) -> None:
        if not self.done:
            await asyncio.get_running_loop().create_future()


class Bench:
    """A rank with one shared state of two pieces, and a wire to each peer."""

    def __init__(self, *wires: Wire, rate: float = 1e9) -> None:
        self.store = PieceStore(1000)
        self.store.write({"a": packed("a", b"0123"), "b": packed("b", b"45")}, step=0, writer="n0")
        self.events: list[tuple[str, dict[str, Any]]] = []
        links = {wire.node: cast("Link", wire) for wire in wires}
        self.spreader = Spreader(
            asyncio.get_running_loop(), lambda: links, lambda kind, **fields: self.events.append((kind, fields))
        )
        self.spreader.open("s", self.store, rate, lambda: 3)

    def fetch(self) -> FetchPiece:
        return FetchPiece("s", "a", self.store.entries()[0].version, 0, 4)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_questions_of_a_peer_are_answered_with_their_numbers() -> None:
    wire = Wire()
    bench = Bench(wire)
    wire.say(7, ComparePieces("s", bench.store.digest))
    wire.say(9, bench.fetch())
    await turns()
    assert wire.sent == [PieceMessage(7, SamePieces()), PieceMessage(9, PieceChunk(b"0123"))]
    assert wire.limit == MAX_PIECE_MESSAGE
    bench.spreader.close()
    await turns()
    assert len(asyncio.all_tasks()) == 1


async def test_a_peer_that_asks_and_takes_no_answer_gets_no_more_than_a_few() -> None:
    slow, other = Wire(arrives=False), Wire(2, "n2")
    bench = Bench(slow, other)
    for number in range(100):
        slow.say(number, bench.fetch())
    other.say(1, bench.fetch())
    await turns(300)
    assert len(slow.sent) == ANSWERS
    assert len(other.sent) == 1
    bench.spreader.close()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01\x91\x09"])
async def test_a_malformed_message_closes_its_link_and_no_other(data: bytes) -> None:
    wire, other = Wire(), Wire(2, "n2")
    bench = Bench(wire, other)
    wire.put(data)
    await turns()
    other.say(1, bench.fetch())
    await turns()
    assert "malformed" in wire.closed
    assert (other.closed, len(other.sent)) == ("", 1)
    bench.spreader.close()


async def test_one_message_that_cannot_be_taken_costs_no_more_than_itself() -> None:
    wire = Wire()
    bench = Bench(wire)
    wire.put(MessageRefused("too large", peer="n1"))
    wire.say(3, bench.fetch())
    await turns()
    assert (wire.closed, len(wire.sent)) == ("", 1)
    bench.spreader.close()


async def test_answers_to_nothing_that_was_asked_are_dropped() -> None:
    wire = Wire()
    bench = Bench(wire)
    wire.say(1, PieceChunk(b"x"))
    wire.say(2, SamePieces())
    await turns()
    assert (wire.sent, wire.closed, bench.events) == ([], "", [])
    bench.spreader.close()


async def test_a_pull_goes_from_a_holder_that_is_lost_to_the_next() -> None:
    first, second = Wire(1, "n1"), Wire(2, "n2")
    bench = Bench(first, second)
    there = packed("p", b"abc")
    pulling = asyncio.ensure_future(
        bench.spreader.pull("s", [(there.entry, ["n1", "n2"])], horizon=Horizon(), timeout=60.0)
    )
    await turns()
    (asked,) = first.sent
    assert isinstance(asked.body, FetchPiece)
    first.lose()
    await turns()
    (asked,) = second.sent
    second.say(asked.number, PieceChunk(b"abc"))
    found = await pulling
    assert (dict(found.lacking), list(found.pieces)) == ({}, ["p"])
    assert bench.store.names == ["a", "b", "p"]
    bench.spreader.close()


async def test_a_pull_ends_by_its_time_and_says_why() -> None:
    wire = Wire()
    bench = Bench(wire)
    there = packed("p", b"abc")
    pulling = asyncio.ensure_future(bench.spreader.pull("s", [(there.entry, ["n1"])], horizon=Horizon(), timeout=0.05))
    await turns()
    wire.say(wire.sent[0].number, PieceChunk(b"xyz"))
    found = await pulling
    assert dict(found.pieces) == {}
    assert found.lacking["p"] == "n1: gave other bits than its digest says"
    assert bench.store.names == ["a", "b"]
    bench.spreader.close()


async def test_a_pull_of_what_does_not_fit_asks_nobody() -> None:
    wire = Wire()
    bench = Bench(wire)
    found = await bench.spreader.pull("s", [(packed("p", bytes(2000)).entry, ["n1"])], horizon=Horizon(), timeout=60.0)
    assert "does not fit" in found.lacking["p"]
    assert wire.sent == []
    bench.spreader.close()


async def test_no_memory_is_taken_for_a_piece_that_can_never_be_held_though_it_is_older_than_what_is_here() -> None:
    """The ranks have agreed on a version, and a newer one has been written here since."""
    wire = Wire()
    bench = Bench(wire)
    old = PieceEntry("a", PieceVersion(0, 0, "n1", b"0" * 16), "numpy", "float64", (1 << 50,))
    found = await bench.spreader.pull("s", [(old, ["n1"])], horizon=Horizon(), timeout=60.0)
    assert "larger than max_bytes=1000" in found.lacking["a"]
    assert wire.sent == []
    bench.spreader.close()


async def test_a_round_without_memory_for_a_piece_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "INTERVAL_S", 0.0)
    wire = Wire()
    bench = Bench(wire)
    there = packed("p", bytes(900))
    monkeypatch.setattr(exchange, "PieceArrival", no_memory)
    await turns()
    wire.say(wire.sent[0].number, PiecePage((there.entry,), more=False))
    await turns(40)
    assert len(wire.sent) > 1
    assert isinstance(wire.sent[1].body, ComparePieces)
    bench.spreader.close()


def no_memory(*args: Any) -> None:
    raise MemoryError
