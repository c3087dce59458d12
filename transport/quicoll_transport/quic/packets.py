"""Short-header packets: protection of one and of many at once (RFC 9001 section 5, RFC 9000 section 17.3.1).

One packet is sealed into bytes and opened into bytes. A run, packets of one size back to back in one memory, is sealed
and opened in place: its headers, numbers and nonces are written, masked and unmasked by numpy, all masks come
from one call of the cipher, and only the AEAD itself is called for each packet.

Our packet numbers take four bytes, so that 2^31 packets may be under way and the sample for header protection is the
first 16 bytes of the ciphertext. A peer's take one to four.

Invariants:

- A run decides exactly as its packets one by one. `open_run` takes packets from the first one on as far as they are
  alike: same connection id, present phase, numbers of one length, and so near the largest one that it does not matter
  which of them are opened first. What comes behind is not touched, so that no header is ever unmasked twice: it is the
  beginning of the next run, or a packet of its own for `open_packet`.
- A forged packet in a run drops itself only.
- A packet that was opened is authentic, no more: duplicates are for the caller to find, by the numbers.
- Where a forged packet of a run was, the memory means nothing, but for its last 16 bytes, which are as they came: they
  may be those of a stateless reset (RFC 9000 section 10.3.1).

Failure cases: too short, or no short header: None, and nothing is counted. Forged: None, or a place in `forged`, and
counted in the KeyPhases. Authentic with reserved bits set: PacketError (RFC 9000 section 17.3.1). Sealing more than a
key may bear is an OverflowError, a mistake of ours: `KeyPhases.room` says how many are left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from operator import length_hint
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from numpy.typing import NDArray  # noqa: TC002 - mypyc evaluates the types of a NamedTuple's fields

from quicoll_transport.quic.keys import MOST_SEALED, PROTOCOL_VIOLATION, KeyPhases, Keys, PacketError

if TYPE_CHECKING:
    from cryptography.utils import Buffer

__all__ = [
    "NUMBER",
    "TAG",
    "OpenedRun",
    "Slab",
    "Slabs",
    "Slots",
    "expand_number",
    "open_packet",
    "open_run",
    "seal",
    "seal_run",
]

TAG = 16  # bytes of an authentication tag, and of a sample
NUMBER = 4  # bytes of our packet numbers
_SAMPLE_AT = 4  # behind the beginning of the number, however long it is (RFC 9001 section 5.4.2)
_FIXED = 0x40  # bits of the first byte
_SPIN = 0x20
_RESERVED = 0x18
_MOST_NUMBER = (1 << 62) - 1
_LAYOUTS = 4  # of packets, for which a slab keeps views; whoever varies them pays for it
_SLABS = 2  # of which a receiver keeps the views
_exhaust = deque[object](maxlen=0).extend


# -- one packet --------------------------------------------------------------------------------------------------------


def expand_number(truncated: int, bits: int, expected: int) -> int:
    """Return a packet number from its last bits: the nearest to `expected` (RFC 9000 appendix A.3).

    Args:
        truncated: As it was in the packet.
        bits: How many bits of it, 8 to 32.
        expected: The number behind the largest one that was opened.
    """
    window = 1 << bits
    number = (expected & ~(window - 1)) | truncated
    if number <= expected - window // 2 and number <= _MOST_NUMBER - window:
        return number + window
    if number > expected + window // 2 and number >= window:
        return number - window
    return number


def seal(keys: Keys, cid: bytes, number: int, payload: Buffer) -> bytes:
    """Return one packet.

    Args:
        keys: `KeyPhases.send`.
        cid: The peer's connection id.
        number: Packet number, never used before.
        payload: Frames, one byte at least.

    Raises:
        OverflowError: The key has sealed as many as it may.
    """
    _count(keys, number, 1)
    low = number & 0xFFFFFFFF
    header = bytes((_FIXED | keys.phase << 2 | NUMBER - 1,)) + cid + low.to_bytes(NUMBER, "big")
    sealed = keys.encrypt((keys.iv ^ number).to_bytes(12, "big"), payload, header)
    mask = keys.mask(sealed[:TAG])
    hidden = (low ^ int.from_bytes(mask[1:5], "big")).to_bytes(NUMBER, "big")
    return bytes((header[0] ^ mask[0] & 0x1F,)) + cid + hidden + sealed


def open_packet(
    phases: KeyPhases, data: Buffer, cid_length: int, largest: int, now_ns: int
) -> tuple[int, bytes] | None:
    """Return number and payload of a datagram that is one short-header packet; None: it is none, or forged.

    Args:
        phases: Their keys are tried; a step to the next ones is taken, forgeries are counted.
        data: The datagram. It is not changed.
        cid_length: Bytes of our connection ids.
        largest: The largest number that was opened so far, -1: none.
        now_ns: The present time.

    Raises:
        PacketError: Reserved bits are set, or keys were updated as they may not be.
    """
    at = 1 + cid_length
    sample = at + _SAMPLE_AT
    if len(data) < sample + TAG or data[0] & 0xC0 != _FIXED:
        return None
    mask = phases.receive.mask(data[sample : sample + TAG])
    first = data[0] ^ mask[0] & 0x1F
    size = (first & 3) + 1
    truncated = int.from_bytes(data[at : at + size], "big") ^ int.from_bytes(mask[1 : 1 + size], "big")
    number = expand_number(truncated, 8 * size, largest + 1)
    keys = phases.candidate(first >> 2 & 1, number)
    header = bytes((first,)) + data[1:at] + truncated.to_bytes(size, "big")
    try:
        payload = keys.decrypt((keys.iv ^ number).to_bytes(12, "big"), data[at + size :], header)
    except InvalidTag:
        phases.on_forged()
        return None
    phases.on_opened(keys, number, now_ns)
    if first & _RESERVED:
        raise PacketError(PROTOCOL_VIOLATION, "reserved bits are set")
    return number, payload


def _count(keys: Keys, number: int, packets: int) -> None:
    if keys.packets + packets > MOST_SEALED:
        raise OverflowError(f"{keys.packets} packets were sealed under this key, {packets} more are too many")
    if not keys.packets:
        keys.first = number
    keys.packets += packets


# -- many packets ------------------------------------------------------------------------------------------------------


class Slots:
    """Views of packets of one layout, back to back in one piece of memory: made once, used for every run.

    Attributes:
        size: Bytes of a packet.
        head: Bytes of its header.
        count: How many packets the memory holds.
        rows: Their bytes, a row each.
    """

    def __init__(self, memory: memoryview, size: int, head: int) -> None:
        count = len(memory) // size
        self.size, self.head, self.count = size, head, count
        self.rows: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, count * size).reshape(count, size)
        self.index: NDArray[np.int64] = np.arange(0, dtype=np.int64)
        self.nonces: NDArray[np.uint8] = np.zeros((0, 12), np.uint8)
        self.nonce: list[memoryview] = []
        self.header: list[memoryview] = []
        self.sealed: list[memoryview] = []  # payload and tag
        self.text: list[memoryview] = []  # payload
        self._memory = memory

    def reach(self, stop: int) -> None:
        """Have the views of the first `stop` packets: no more are made than are used."""
        have = len(self.nonce)
        if stop <= have:
            return
        memory, size, head = self._memory, self.size, self.head
        stop = min(self.count, max(stop, 2 * have))
        self.index = np.arange(stop, dtype=np.int64)
        self.nonces = np.zeros((stop, 12), np.uint8)
        nonces = self.nonces.data.cast("B")
        self.nonce = [nonces[i * 12 : i * 12 + 12] for i in range(stop)]
        for i in range(have, stop):
            start, end = i * size, (i + 1) * size
            self.header.append(memory[start : start + head])
            self.sealed.append(memory[start + head : end])
            self.text.append(memory[start + head : end - TAG])

    def set_nonces(self, base: int, numbers: NDArray[np.int64], iv: int) -> None:
        """Write the nonces of packets from slot `base` on (RFC 9001 section 5.3)."""
        nonces = self.nonces[base : base + len(numbers)]
        nonces[:] = np.frombuffer(iv.to_bytes(12, "big"), np.uint8)
        nonces[:, 4:] ^= numbers.astype(">u8").view(np.uint8).reshape(-1, 8)


class Slab:
    """Memory for runs of datagrams, sent from or received into, and the views of it that were used last."""

    def __init__(self, memory: bytearray | memoryview) -> None:
        self.memory = memoryview(memory).cast("B")
        self._slots: OrderedDict[tuple[int, int, int], Slots] = OrderedDict()

    def slots(self, size: int, head: int, at: int = 0) -> Slots:
        """Return views of the memory from byte `at` on.

        Args:
            size: Bytes of a packet.
            head: Bytes of its header.
            at: Where the first packet begins.
        """
        key = (size, head, at)
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = Slots(self.memory[at:], size, head)
            if len(self._slots) > _LAYOUTS:
                self._slots.popitem(last=False)
        else:
            self._slots.move_to_end(key)
        return found


class Slabs:
    """The slabs of whoever receives into memory that is not his: pieces of a few large buffers, over and over."""

    def __init__(self) -> None:
        self._slabs: list[tuple[int, Slab]] = []  # with the address of the first byte; the last used is first

    def find(self, memory: memoryview) -> tuple[Slab, int]:
        """Return the slab that a piece of memory is in, and at which byte; a new one if it is in none that is known."""
        owner = memory.obj
        address = _address(memory)
        for i, (start, slab) in enumerate(self._slabs):
            if slab.memory.obj is owner and start <= address and address + len(memory) <= start + len(slab.memory):
                if i:
                    self._slabs.insert(0, self._slabs.pop(i))
                return slab, address - start
        whole = memoryview(owner)  # all of it, as the next piece will come from elsewhere in it
        slab = Slab(whole if whole.contiguous and whole.itemsize == 1 else memory)
        start = _address(slab.memory)
        self._slabs.insert(0, (start, slab))
        del self._slabs[_SLABS:]
        return slab, address - start


def _address(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def seal_run(
    slots: Slots,
    base: int,
    keys: Keys,
    cid: bytes,
    number: int,
    prefix: bytes,
    offset: int,
    pieces: Sequence[bytes | memoryview],
    fin: bool,
) -> tuple[int, int]:
    """Make packets from slot `base` on, each of one STREAM frame without length (RFC 9000 section 19.8).

    Only the last one may be shorter than its slot.

    Args:
        slots: With a head of 1 + len(cid) + NUMBER bytes.
        base: The first slot.
        keys: `KeyPhases.send`.
        cid: The peer's connection id.
        number: Of the first packet.
        prefix: The stream id, as it is written.
        offset: In the stream, of the first byte.
        pieces: The bytes, as they lie in memory: one at least, and no more than fit in.
        fin: Whether the stream ends with them.

    Returns:
        Packets made, and their bytes.

    Raises:
        OverflowError: The key may not seal so many.
    """
    head, size, frame = slots.head, slots.size, 9 + len(prefix)
    step = size - head - frame - TAG
    count, rest = divmod(sum(map(len, pieces)), step)
    packets = count + (rest > 0)
    slots.reach(base + packets)
    rows = slots.rows[base : base + packets]
    _count(keys, number, packets)
    _spread(pieces, rows[:, head + frame : size - TAG])
    index = slots.index[:packets]
    frames = rows[:, head : head + frame]
    frames[:, 0] = 0x0C  # with an offset, without a length
    if fin:
        frames[-1, 0] = 0x0D
    frames[:, 1:-8] = np.frombuffer(prefix, np.uint8)
    frames[:, -8:] = (index * step + (offset - (1 << 62))).astype(">i8").view(np.uint8).reshape(packets, 8)
    numbers = index + number
    rows[:, 0] = _FIXED | keys.phase << 2 | NUMBER - 1
    rows[:, 1 : head - NUMBER] = np.frombuffer(cid, np.uint8)
    rows[:, head - NUMBER : head] = numbers.astype(">u4").view(np.uint8).reshape(packets, NUMBER)
    slots.set_nonces(base, numbers, keys.iv)
    end = base + count
    texts, headers = slots.text[base:end], slots.header[base:end]
    _exhaust(map(keys.encrypt_into, slots.nonce[base:end], texts, headers, slots.sealed[base:end]))
    made = count * size
    if rest:
        sealed = slots.sealed[end][: frame + rest + TAG]
        keys.encrypt_into(slots.nonce[end], sealed[:-TAG], slots.header[end], sealed)
        made += head + len(sealed)
    mask = np.frombuffer(keys.mask(rows[:, head : head + TAG].tobytes()), np.uint8).reshape(packets, TAG)
    rows[:, 0] ^= mask[:, 0] & 0x1F
    rows[:, head - NUMBER : head] ^= mask[:, 1:5]
    return packets, made


def _spread(pieces: Sequence[bytes | memoryview], rows: NDArray[np.uint8]) -> None:
    """Write bytes into rows, one behind the other."""
    step = rows.shape[1]
    row = column = 0
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        if column:
            begun = data[: step - column]
            rows[row, column : column + len(begun)] = begun
            data = data[len(begun) :]
            row, column = (row, column + len(begun)) if column + len(begun) < step else (row + 1, 0)
        whole, rest = divmod(len(data), step)
        if whole:
            rows[row : row + whole] = data[: whole * step].reshape(whole, step)
            row += whole
        if rest:
            rows[row, :rest] = data[whole * step :]
            column = rest


class OpenedRun(NamedTuple):
    """What became of the first packets of a run.

    Attributes:
        taken: How many that were, forged ones included; those behind them are as they were.
        numbers: Of the authentic ones, in the order in which they came.
        text: Their payloads, a row each, in the memory of the run (a copy where some were forged).
        forged: Places of those that were forged.
    """

    taken: int
    numbers: NDArray[np.int64]
    text: NDArray[np.uint8]
    forged: Sequence[int]


_NOTHING = OpenedRun(0, np.empty(0, np.int64), np.empty((0, 0), np.uint8), ())


def open_run(
    phases: KeyPhases, slab: Slab, at: int, size: int, count: int, cid: bytes, largest: int, now_ns: int
) -> OpenedRun:
    """Open packets of one size in place, from the first one on as far as they are alike (see the module's head).

    Args:
        phases: The keys of the present phase are used; forgeries are counted.
        slab: The memory.
        at: Where in it the first packet begins.
        size: Bytes of each.
        count: How many there are, one at least.
        cid: Our connection id that they have to be for.
        largest: The largest number that was opened so far, -1: none.
        now_ns: The present time.
    """
    keys, expected = phases.receive, largest + 1
    start = 1 + len(cid)
    sample = start + _SAMPLE_AT
    if size <= sample + TAG or expected > _MOST_NUMBER >> 1:  # of the smallest some are empty, so they go one by one
        return _NOTHING
    rows = np.frombuffer(slab.memory, np.uint8, count * size, at).reshape(count, size)
    mask = np.frombuffer(keys.mask(rows[:, sample : sample + TAG].tobytes()), np.uint8).reshape(count, TAG)
    first = int(rows[0, 0]) ^ int(mask[0, 0]) & 0x1F
    length = (first & 3) + 1
    if first & ~_SPIN != _FIXED | keys.phase << 2 | length - 1:
        return _NOTHING
    head = start + length
    headers = rows[:, :head].copy()
    headers[:, 0] ^= mask[:, 0] & 0x1F
    headers[:, start:] ^= mask[:, 1 : 1 + length]
    like = (headers[:, :start] == np.frombuffer(bytes((first,)) + cid, np.uint8)).all(axis=1)
    # The largest number moves on while packets are opened. As long as all are within a quarter of the window around
    # it, and there are no smaller ones, the nearest to each of them is the same (RFC 9000 appendix A.3).
    ahead = _numbers_ahead(headers[:, start:], expected)
    quarter = 1 << 8 * length - 2
    like &= (ahead < quarter) & (ahead >= -min(expected, quarter - 1))
    if not like.all():
        count = int(like.argmin())
        if not count:
            return _NOTHING
    numbers = ahead[:count] + expected
    slots = slab.slots(size, head, at)
    slots.reach(count)
    rows[:count, :head] = headers[:count]
    slots.set_nonces(0, numbers, keys.iv)
    forged = _decrypt(keys, slots, count)
    text = rows[:count, head : size - TAG]
    if forged:
        phases.on_forged(len(forged))
        numbers, text = np.delete(numbers, forged), np.delete(text, forged, axis=0)
    if len(numbers):
        phases.on_opened(keys, int(numbers.min()), now_ns)
    return OpenedRun(count, numbers, text, forged)


def _numbers_ahead(written: NDArray[np.uint8], expected: int) -> NDArray[np.int64]:
    """Return how far from `expected` the nearest number is that ends in each row's bytes."""
    count, length = written.shape
    wide = np.zeros((count, 4), np.uint8)
    wide[:, 4 - length :] = written
    truncated: NDArray[np.int64] = wide.view(">u4").reshape(count).astype(np.int64)
    window = 1 << 8 * length
    half = window >> 1
    ahead: NDArray[np.int64] = ((truncated + (half - expected % window)) & (window - 1)) - half
    return ahead


def _decrypt(keys: Keys, slots: Slots, count: int) -> list[int]:
    """Open the first slots in place; return the places of those that were forged."""
    forged: list[int] = []
    nonces = iter(slots.nonce[:count])
    work = map(keys.decrypt_into, nonces, slots.sealed, slots.header, slots.text)
    while True:
        try:
            _exhaust(work)
            return forged
        except InvalidTag:  # what is left of `nonces` says which one it was; the next round goes on behind it
            forged.append(count - 1 - length_hint(nonces))
