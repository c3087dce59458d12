"""Small calls: every rank writes its share where all see it, and each computes the result itself.

A core without input or output: memory goes in (`HostMemory`), and it never waits. Whoever calls `advance` takes all
calls as far as they go; who does that, on which thread, and when he sleeps, is the shell's business
(quicoll.engine.neighbourhood).

The k-th small call of a view on this rank, k from 0:

    waiting      all slots are in use: a peer has not taken call k - SLOTS yet
    published    head, text and payload are in slot k % SLOTS, PUBLISHED is k + 1
    compared     all peers have published a k-th call, and each is the same as ours: by its number in the group and by
                 the digest of its signature. Otherwise the call has failed, and nothing of it is used
    taken        payloads have been copied and their checksums found right, the result stands in memory of ours, and
                 CONSUMED is k + 1

Agreement costs nothing of its own: a result is computed only after all have been compared, and it takes the payloads
of all. A rank that calls something else that is small is found out by the comparison. One that calls something that
goes over QUIC announces that with a number that is taken here, or leaves out one that is not: see
quicoll.engine.neighbourhood.

Invariants (tests step every load and store, and kill a rank at each of them):
    - calls are published and taken in the order in which they were added
    - a slot is written again only when all peers have taken what stood there. For PUBLISHED of any rank is at most
      CONSUMED of every other one + SLOTS; a peer of which that is not true breaks the protocol
    - nothing is combined that differs from its checksum, which its writer made before he counted it
    - after a failure nothing is published and nothing taken any more
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import xxhash

from quicoll.local.layout import CONSUMED, PUBLISHED, SLOTS, SMALL_BYTES, TEXT_BYTES

if TYPE_CHECKING:
    from quicoll.local.layout import HostMemory

__all__ = ["Differing", "SmallCall", "SmallCalls", "Spoiled"]

_HEAD: Final = struct.Struct("<QQ16sQQQ")  # place, number in the group, digest, bytes of payload, of text, checksum


class Differing(Exception):
    """Ranks called different things. called: (number, signature) by rank, of those that are known."""

    def __init__(self, called: dict[int, tuple[int, str]]) -> None:
        super().__init__(f"different calls: {called}")
        self.called = called


class Spoiled(Exception):
    """What `rank` has written is not what it wrote. bits: its payload differs from its checksum; else its counts."""

    def __init__(self, rank: int, why: str, *, bits: bool) -> None:
        super().__init__(why)
        self.rank = rank
        self.bits = bits


class SmallCall:
    """A call whose payloads fit into slots.

    number: in its group. signature: everything that must be equal on all ranks. payload: of this rank. sizes: bytes of
    each rank's payload. combine: takes the payloads, by rank, and leaves the result where its owner finds it.
    done: it has been taken. place: its place among all small calls, None until it is published. digest: of the
    signature, from then on; our own slot may hold a later call by the time that this one is taken.
    """

    __slots__ = ("combine", "digest", "done", "number", "payload", "place", "signature", "sizes")

    def __init__(
        self,
        number: int,
        signature: str,
        payload: bytes,
        sizes: Sequence[int],
        combine: Callable[[Sequence[bytes]], None],
    ) -> None:
        if max(sizes) > SMALL_BYTES:
            raise AssertionError(f"{max(sizes)} bytes are no small call")
        self.number = number
        self.signature = signature
        self.payload = payload
        self.sizes = sizes
        self.combine = combine
        self.digest = b""
        self.done = False
        self.place: int | None = None


class SmallCalls:
    """All small calls of a view on one rank. See the module's head."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._slots = [memory.layout.slot(number) for number in range(SLOTS)]
        self._text_at = memory.layout.text(0) - self._slots[0]
        self._payload_at = memory.layout.payload(0) - self._slots[0]
        self._rank = memory.rank
        self._peers = [rank for rank in range(memory.layout.world) if rank != memory.rank]
        self._waiting: deque[SmallCall] = deque()
        self._flying: deque[SmallCall] = deque()
        self._published = 0
        self._consumed = 0
        self._seen = [0] * memory.layout.world  # PUBLISHED, as it was last seen
        self._room = 0  # the least CONSUMED of the peers, as it was last seen
        self._failure: Exception | None = None

    def add(self, call: SmallCall) -> None:
        """Take the next call; `advance` follows."""
        self._waiting.append(call)

    @property
    def waiting(self) -> bool:
        """Whether a call waits for a slot."""
        return bool(self._waiting)

    @property
    def published(self) -> int:
        """How many calls are in slots, or were."""
        return self._published

    @property
    def consumed(self) -> int:
        """How many calls have been taken."""
        return self._consumed

    def present(self, call: SmallCall) -> list[int]:
        """Return the ranks that have published as many calls as make up this one, this rank included, ascending."""
        place = self._published + self._waiting.index(call) if call.place is None else call.place
        here = [rank for rank in self._peers if self._memory.load(rank, PUBLISHED) > place]
        return sorted([*here, self._rank])

    def advance(self) -> list[SmallCall]:
        """Take all calls as far as they go.

        Returns:
            Those that have been taken now.
        Raises:
            Differing: The ranks called different things. It is raised again each time, as all of these are, and not
                before all calls that were taken have been returned.
            Spoiled: A peer's words or bits are not what they can be.
            Exception: What combining raises.
        """
        taken: list[SmallCall] = []
        if self._failure is not None:
            raise self._failure
        try:
            self._publish()
            while self._flying and self._all_published(self._consumed):
                call = self._flying[0]
                call.combine(self._payloads(call))
                self._flying.popleft()
                self._consumed += 1
                self._memory.store(CONSUMED, self._consumed)
                call.done = True
                taken.append(call)
                self._publish()
        except Exception as error:
            self._failure = error
            if not taken:
                raise
        return taken

    def _publish(self) -> None:
        memory = self._memory
        while self._waiting and self._has_room(self._published):
            call = self._waiting.popleft()
            place = call.place = self._published
            text = call.signature.encode(errors="replace")
            digest = call.digest = xxhash.xxh3_128_digest(text)
            sum_ = xxhash.xxh3_64_intdigest(call.payload)
            shown = text[:TEXT_BYTES]
            at = self._slots[place % SLOTS]
            if call.payload:
                memory.write(at + self._payload_at, call.payload)
            memory.write(at + self._text_at, shown)
            memory.write(at, _HEAD.pack(place, call.number, digest, len(call.payload), len(shown), sum_))
            self._flying.append(call)
            self._published += 1
            memory.store(PUBLISHED, self._published)

    def _has_room(self, place: int) -> bool:
        if place - SLOTS < self._room:
            return True
        found = [self._memory.load(rank, CONSUMED) for rank in self._peers]
        for rank, count in zip(self._peers, found, strict=True):
            if count > self._published:
                raise Spoiled(rank, f"has taken {count} of {self._published} calls", bits=False)
        self._room = min(found)
        return place - SLOTS < self._room

    def _all_published(self, place: int) -> bool:
        for rank in self._peers:
            if self._seen[rank] <= place:
                count = self._memory.load(rank, PUBLISHED)
                if not self._seen[rank] <= count <= self._consumed + SLOTS:
                    raise Spoiled(rank, f"counts {count} calls where {self._consumed} have been taken", bits=False)
                self._seen[rank] = count
                if count <= place:
                    return False
        return True

    def _payloads(self, call: SmallCall) -> list[bytes]:
        """Compare what all have called, and copy what they give. Raises Differing and Spoiled."""
        memory, place = self._memory, self._consumed
        at = self._slots[place % SLOTS]
        own = call.number, call.digest
        heads = {rank: _HEAD.unpack(memory.read(rank, at, _HEAD.size)) for rank in self._peers}
        for rank, head in heads.items():
            if head[0] != place:
                raise Spoiled(rank, f"has call {head[0]} where {place} belongs", bits=False)
        if any(head[1:3] != own for head in heads.values()):
            called = {rank: (head[1], self._text(rank, place, head[4])) for rank, head in heads.items()}
            called[self._rank] = call.number, call.signature
            raise Differing(called)
        parts: list[bytes] = []
        for rank, size in enumerate(call.sizes):
            if rank == self._rank:
                parts.append(call.payload)
                continue
            part = memory.read(rank, at + self._payload_at, size) if size else b""
            if heads[rank][3] != size or xxhash.xxh3_64_intdigest(part) != heads[rank][5]:
                raise Spoiled(rank, "what it gave differs from its checksum", bits=True)
            parts.append(part)
        return parts

    def _text(self, rank: int, place: int, size: int) -> str:
        at = self._slots[place % SLOTS] + self._text_at
        return self._memory.read(rank, at, min(size, TEXT_BYTES)).decode(errors="replace")
