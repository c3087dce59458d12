"""Calls in slots: every rank writes its call, and what it gives where that fits, where all see it.

A core without input or output: memory goes in (`HostMemory`), and it never waits. Whoever calls `publish` and `take`
takes all calls as far as they go; who does that, on which thread, and when he sleeps, is the shell's business
(quicoll.engine.neighbourhood).

The k-th call of a view on this rank, k from 0:

    waiting      all slots are in use: a peer has not taken call k - SLOTS yet
    published    head, text, counts and payload are in slot k % SLOTS, PUBLISHED is k + 1
    compared     all peers have published a k-th call, and each is the same as ours: by its number in the group and by
                 the digest of its signature. Otherwise the call has failed, and nothing of it is used
    taken        the counts of all are known, and CONSUMED is k + 1. Where all payloads fit into slots they have been
                 copied, their checksums found right, and the result stands in memory of ours. Where one does not the
                 call is agreed on (`passage`), and the payloads of all go through the rings (large.py)

Agreement costs nothing of its own: a result is computed only after all have been compared, and it takes the payloads
of all. A rank that calls something else that goes through memory is found out by the comparison. One that calls
something that goes over QUIC announces that with a number that is taken here, or leaves out one that is not: see
quicoll.engine.neighbourhood.

Which way the payloads take follows from the heads, which all ranks read: so all take the same, also where each rank
knows only its own size before (`counts`). Calls go through the rings in the order of their places.

Invariants (tests step every load and store, and kill a rank at each of them):
    - calls are published and taken in the order in which they were added
    - a slot is written again only when all peers have taken what stood there. For PUBLISHED of any rank is at most
      CONSUMED of every other one + SLOTS; a peer of which that is not true breaks the protocol
    - nothing is used that differs from its checksum, which its writer made before he counted it
    - sizes that a peer names are bounded before anything is read or taken for them
    - after a failure nothing is published and nothing taken any more
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import xxhash

from quicoll.local.layout import CONSUMED, MAX_WORLD, PUBLISHED, SLOTS, SMALL_BYTES, TEXT_BYTES

if TYPE_CHECKING:
    from quicoll.local.layout import HostMemory, SegmentLayout
    from quicoll.local.passages import Passage

__all__ = ["Counts", "Differing", "SmallCall", "SmallCalls", "Spoiled", "under_way"]

# place, number in the group, digest, how many counts, bytes that the rank gives, bytes of text, checksum
_HEAD: Final = struct.Struct("<QQ16sQQQQ")
_MOST_KNOWN: Final = 64

Counts: TypeAlias = Sequence[tuple[int, ...]]
"""What each rank says of its own sizes, by rank."""


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
    """A call that ranks of one host make through its memory: small, as long as all that they give fits into slots.

    number: in its group. signature: everything that must be equal on all ranks. nbytes: that this rank gives. payload:
    these, copied; b"" where they are more than a slot holds. counts: what this rank says of its sizes, where the
    others cannot know them. sizes: bytes that each rank gives, where all know them before; None: as each says. reads:
    whether this rank uses what the others give. combine: takes the payloads and the counts, by rank, and leaves the
    result where its owner finds it. carry: gives the way of payloads that do not fit, by the counts.
    done: it has been taken. passage: then, where payloads did not fit, their way; else None. place: its place among
    all calls here, None until it is published. digest: of the signature, from then on; our own slot may hold a later
    call by the time that this one is taken.
    """

    __slots__ = (
        "_carry",
        "_combine",
        "counts",
        "digest",
        "done",
        "nbytes",
        "number",
        "passage",
        "payload",
        "place",
        "reads",
        "signature",
        "sizes",
    )

    def __init__(
        self,
        number: int,
        signature: str,
        given: Callable[[], bytes],
        nbytes: int,
        combine: Callable[[Sequence[bytes], Counts], None],
        carry: Callable[[SegmentLayout, Counts], Passage],
        *,
        counts: tuple[int, ...] = (),
        sizes: Sequence[int] | None = None,
        reads: bool = True,
    ) -> None:
        if len(counts) > MAX_WORLD:
            raise AssertionError(f"{len(counts)} counts are more than there are ranks")
        self.number = number
        self.signature = signature
        self.nbytes = nbytes
        self.payload = given() if 0 < nbytes <= SMALL_BYTES else b""
        self.counts = counts
        self.sizes = sizes
        self.reads = reads
        self._combine = combine
        self._carry = carry
        self.passage: Passage | None = None
        self.digest = b""
        self.done = False
        self.place: int | None = None

    @property
    def fits(self) -> bool:
        """Whether what this rank gives fits into a slot, and what the others give where that is known."""
        return max(self.sizes or (self.nbytes,)) <= SMALL_BYTES

    @property
    def is_small(self) -> bool:
        """Whether what all ranks give fits into slots, and all know so before."""
        return self.sizes is not None and max(self.sizes) <= SMALL_BYTES

    def combine(self, payloads: Sequence[bytes], counts: Counts) -> None:
        """All payloads are here: leave the result where its owner finds it."""
        self._combine(payloads, counts)

    def carry(self, layout: SegmentLayout, counts: Counts) -> None:
        """All have called, and not all payloads fit: settle the way that they take."""
        self.passage = self._carry(layout, counts)


class SmallCalls:
    """All calls of a view that go through memory, on one rank. See the module's head.

    published: how many calls are in slots, or were. consumed: how many have been taken. Both change here alone.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._slots = [memory.layout.slot(number) for number in range(SLOTS)]
        self._text_at = memory.layout.text(0) - self._slots[0]
        self._payload_at = memory.layout.payload(0) - self._slots[0]
        self._rank = memory.rank
        self._peers = [rank for rank in range(memory.layout.world) if rank != memory.rank]
        self._waiting: deque[SmallCall] = deque()
        self._flying: deque[SmallCall] = deque()
        self.published = 0
        self.consumed = 0
        self._seen = [0] * memory.layout.world  # PUBLISHED, as it was last seen
        self._room = 0  # the least CONSUMED of the peers, as it was last seen
        self._failure: Exception | None = None
        self._known: dict[str, tuple[bytes, bytes]] = {}  # texts and digests of signatures

    def add(self, call: SmallCall) -> None:
        """Take the next call; `publish` follows."""
        self._waiting.append(call)

    @property
    def waiting(self) -> bool:
        """Whether a call waits for a slot."""
        return bool(self._waiting)

    def present(self, call: SmallCall) -> list[int]:
        """Return the ranks that have published as many calls as make up this one, this rank included, ascending."""
        place = self.published + self._waiting.index(call) if call.place is None else call.place
        here = [rank for rank in self._peers if self._memory.load(rank, PUBLISHED) > place]
        return sorted([*here, self._rank])

    def publish(self) -> None:
        """Write what waits to slots, as far as there is room. `take` follows.

        Raises:
            Spoiled: A peer's words are not what they can be.
        """
        if self._waiting and self._failure is None:
            try:
                self._publish()
            except Exception as error:  # whatever it is, nothing is published or taken any more
                self._failure = error
                raise

    def take(self) -> list[SmallCall]:
        """Take all calls that all have published.

        Who is to be woken by whoever publishes last has put a fence between `publish` and this: of two that publish in
        one moment at least one sees here that both have.

        Returns:
            Those that have been taken now.
        Raises:
            Differing: The ranks called different things. It is raised again each time, as all of these are, and not
                before all calls that were taken have been returned.
            Spoiled: A peer's words or bits are not what they can be.
            Exception: What combining raises, or finding the way of what does not fit.
        """
        taken: list[SmallCall] = []
        if self._failure is not None:
            raise self._failure
        try:
            while self._flying and self._all_published(self.consumed):
                call = self._flying[0]
                self._take(call)
                self._flying.popleft()
                self.consumed += 1
                self._memory.store(CONSUMED, self.consumed)
                call.done = True
                taken.append(call)
        except Exception as error:
            self._failure = error
            if not taken:
                raise
        return taken

    def _publish(self) -> None:
        memory = self._memory
        while self._waiting and self._has_room(self.published):
            call = self._waiting.popleft()
            place = call.place = self.published
            text, digest = self._known.get(call.signature) or self._learn(call.signature)
            call.digest = digest
            given = _packed(call.counts) + call.payload if call.counts else call.payload
            sum_ = xxhash.xxh3_64_intdigest(given)
            shown = text[:TEXT_BYTES]
            at = self._slots[place % SLOTS]
            if given:
                memory.write(at + self._payload_at, given)
            memory.write(at + self._text_at, shown)
            head = _HEAD.pack(place, call.number, digest, len(call.counts), call.nbytes, len(shown), sum_)
            memory.write(at, head)
            self._flying.append(call)
            self.published += 1
            memory.store(PUBLISHED, self.published)

    def _learn(self, signature: str) -> tuple[bytes, bytes]:
        if len(self._known) == _MOST_KNOWN:
            self._known.clear()
        text = signature.encode(errors="replace")
        known = self._known[signature] = text, xxhash.xxh3_128_digest(text)
        return known

    def _has_room(self, place: int) -> bool:
        if place - SLOTS < self._room:
            return True
        found = [self._memory.load(rank, CONSUMED) for rank in self._peers]
        for rank, count in zip(self._peers, found, strict=True):
            if count > self.published:
                raise Spoiled(rank, f"has taken {count} of {self.published} calls", bits=False)
        self._room = min(found)
        return place - SLOTS < self._room

    def _all_published(self, place: int) -> bool:
        for rank in self._peers:
            if self._seen[rank] <= place:
                count = self._memory.load(rank, PUBLISHED)
                if not self._seen[rank] <= count <= self.consumed + SLOTS:
                    raise Spoiled(rank, f"counts {count} calls where {self.consumed} have been taken", bits=False)
                self._seen[rank] = count
                if count <= place:
                    return False
        return True

    def _take(self, call: SmallCall) -> None:
        """Compare what all have called, and use what they give. Raises Differing, Spoiled and what using it raises."""
        memory, place = self._memory, self.consumed
        at = self._slots[place % SLOTS]
        heads = [(rank, _HEAD.unpack(memory.read(rank, at, _HEAD.size))) for rank in self._peers]
        same, fits = True, call.nbytes <= SMALL_BYTES
        for rank, (found, number, digest, many, nbytes, _, _) in heads:
            if found != place:
                raise Spoiled(rank, f"has call {found} where {place} belongs", bits=False)
            if number != call.number or digest != call.digest:
                same = False
            elif many > MAX_WORLD or (call.sizes is not None and nbytes != call.sizes[rank]):
                raise Spoiled(rank, f"gives {nbytes} bytes and {many} counts", bits=False)
            elif nbytes > SMALL_BYTES:
                fits = False
        if not same:
            called = {rank: (head[1], self._text(rank, place, head[5])) for rank, head in heads}
            called[self._rank] = call.number, call.signature
            raise Differing(called)
        if fits and not call.reads:
            call.combine([], [])
            return
        payloads = [call.payload] * memory.layout.world
        counts = [call.counts] * memory.layout.world
        for rank, (_, _, _, many, nbytes, _, sum_) in heads:
            here = 8 * many + (nbytes if nbytes <= SMALL_BYTES else 0)
            part = memory.read(rank, at + self._payload_at, here) if here else b""
            if xxhash.xxh3_64_intdigest(part) != sum_:
                raise Spoiled(rank, "what it gave differs from its checksum", bits=True)
            if many:
                counts[rank] = struct.unpack_from(f"<{many}Q", part)
                part = part[8 * many :]
            elif call.counts:
                counts[rank] = ()
            payloads[rank] = part
        if fits:
            call.combine(payloads, counts)
        else:
            call.carry(memory.layout, counts)

    def _text(self, rank: int, place: int, size: int) -> str:
        at = self._slots[place % SLOTS] + self._text_at
        return self._memory.read(rank, at, min(size, TEXT_BYTES)).decode(errors="replace")


def under_way(memory: HostMemory, rank: int, at: int = 0) -> str:
    """Return the text of the first call that a rank has published and not taken; "" where there is none.

    Args:
        memory: The ranks'.
        rank: Whose call.
        at: Where the part of its segment begins that it uses for that group.
    """
    taken = memory.load(rank, at // 8 + CONSUMED)
    if memory.load(rank, at // 8 + PUBLISHED) <= taken:
        return ""
    slot = at + memory.layout.slot(taken % SLOTS)
    size = _HEAD.unpack(memory.read(rank, slot, _HEAD.size))[5]
    text_at = slot + memory.layout.text(0) - memory.layout.slot(0)
    return memory.read(rank, text_at, min(size, TEXT_BYTES)).decode(errors="replace")


def _packed(counts: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(counts)}Q", *counts)
