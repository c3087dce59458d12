"""Short-header packets: protection of one and of many at once (RFC 9001 section 5, RFC 9000 section 17.3.1).

One packet is sealed into bytes and opened into bytes. A run, packets of one size back to back in one memory, is sealed
and opened in place, and all its masks come from one call of the cipher. Of a few packets the headers, numbers and
nonces are written, masked and unmasked one by one; of more by numpy, whose forty calls for a run take as long whatever
its length, and only the AEAD itself is called for each packet. Both ways make the same packets and take the same.

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
    "FEW_OPENED",
    "FEW_SEALED",
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
FEW_OPENED = 32  # packets of a run up to which numpy's calls take longer than to go one by one,
FEW_SEALED = 12  # and of one to be sent, whose memory is always the same
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
        memory: It.
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
        self.memory = memory

    def reach(self, stop: int) -> None:
        """Have the views of the first `stop` packets: no more are made than are used."""
        have = len(self.nonce)
        if stop <= have:
            return
        memory, size, head = self.memory, self.size, self.head
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
    _count(keys, number, packets)
    if packets <= FEW_SEALED:
        return packets, _seal_few(slots, base, keys, cid, number, prefix, offset, pieces, packets, fin)
    slots.reach(base + packets)
    rows = slots.rows[base : base + packets]
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


def _seal_few(
    slots: Slots,
    base: int,
    keys: Keys,
    cid: bytes,
    number: int,
    prefix: bytes,
    offset: int,
    pieces: Sequence[bytes | memoryview],
    packets: int,
    fin: bool,
) -> int:
    """Make packets as `seal_run` does, one by one; return their bytes."""
    memory, size, head = slots.memory, slots.size, slots.head
    first = _FIXED | keys.phase << 2 | NUMBER - 1
    beginning = bytes((first,)) + cid
    frame = bytes((0x0C,)) + prefix  # with an offset, without a length
    begin = at = base * size
    samples: list[bytes] = []
    piece, used = 0, 0  # from which byte of which piece on
    for i in range(packets):
        if fin and i == packets - 1:
            frame = bytes((0x0D,)) + prefix
        header = beginning + (number + i & 0xFFFFFFFF).to_bytes(NUMBER, "big")
        memory[at : at + head] = header
        text = at + head
        end = text + len(frame) + 8
        memory[text:end] = frame + (offset | 3 << 62).to_bytes(8, "big")
        most = at + size - TAG
        while end < most and piece < len(pieces):
            data = pieces[piece]
            part = data if not used and len(data) <= most - end else data[used : used + most - end]
            memory[end : end + len(part)] = part
            end += len(part)
            offset += len(part)
            used += len(part)
            if used == len(data):
                piece, used = piece + 1, 0
        nonce = (keys.iv ^ number + i).to_bytes(12, "big")
        keys.encrypt_into(nonce, memory[text:end], header, memory[text : end + TAG])
        samples.append(bytes(memory[text : text + TAG]))
        at = end + TAG
    mask = keys.mask(b"".join(samples))
    for i in range(packets):
        start, m = begin + i * size, i * TAG
        memory[start] = first ^ mask[m] & 0x1F
        hidden = (number + i & 0xFFFFFFFF) ^ int.from_bytes(mask[m + 1 : m + 1 + NUMBER], "big")
        memory[start + head - NUMBER : start + head] = hidden.to_bytes(NUMBER, "big")
    return at - begin


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
    numbers: list[int]
    text: NDArray[np.uint8]
    forged: Sequence[int]


_NOTHING = OpenedRun(0, [], np.empty((0, 0), np.uint8), ())


def open_run(
    phases: KeyPhases, slabs: Slabs, memory: memoryview, size: int, cid: bytes, largest: int, now_ns: int
) -> OpenedRun:
    """Open packets of one size in place, from the first one on as far as they are alike (see the module's head).

    Args:
        phases: The keys of the present phase are used; forgeries are counted.
        slabs: Of whoever receives.
        memory: The packets, one at least.
        size: Bytes of each.
        cid: Our connection id that they have to be for.
        largest: The largest number that was opened so far, -1: none.
        now_ns: The present time.
    """
    keys, expected, count = phases.receive, largest + 1, len(memory) // size
    sample = 1 + len(cid) + _SAMPLE_AT
    if size <= sample + TAG or expected > _MOST_NUMBER >> 1:  # of the smallest some are empty, so they go one by one
        return _NOTHING
    mask = keys.mask(memory[sample : sample + TAG] if count == 1 else _samples(memory, size, count, sample))
    first = memory[0] ^ mask[0] & 0x1F
    length = (first & 3) + 1
    if first & ~_SPIN != _FIXED | keys.phase << 2 | length - 1:
        return _NOTHING
    beginning = bytes((first,)) + cid
    if count <= FEW_OPENED:
        numbers, forged = _open_few(keys, memory, size, count, beginning, length, mask, expected)
    else:
        numbers, forged = _open_many(keys, slabs, memory, size, count, beginning, length, mask, expected)
    taken, head = len(numbers) + len(forged), len(beginning) + length
    if not taken:
        return _NOTHING
    rows = np.frombuffer(memory, np.uint8, taken * size).reshape(taken, size)
    text = rows[:, head : size - TAG]
    if forged:
        phases.on_forged(len(forged))
        text = np.delete(text, forged, axis=0)
    if numbers:
        phases.on_opened(keys, min(numbers), now_ns)
    return OpenedRun(taken, numbers, text, forged)


def _samples(memory: memoryview, size: int, count: int, at: int) -> bytes:
    if count > FEW_OPENED:
        rows = np.frombuffer(memory, np.uint8, count * size).reshape(count, size)
        return rows[:, at : at + TAG].tobytes()
    return b"".join([memory[start : start + TAG] for start in range(at, count * size, size)])


def _open_few(
    keys: Keys, memory: memoryview, size: int, count: int, beginning: bytes, length: int, mask: bytes, expected: int
) -> tuple[list[int], list[int]]:
    """Open packets one by one as far as they are alike; return their numbers, and the places of those that were forged.

    Args:
        keys: To open them with.
        memory: The packets.
        size: Bytes of each.
        count: How many there are.
        beginning: The first byte and the connection id of each, unmasked.
        length: Bytes of each number.
        mask: Of all of them.
        expected: The number behind the largest one that was opened so far.
    """
    numbers: list[int] = []
    forged: list[int] = []
    first, cid, start = beginning[0], beginning[1:], len(beginning)
    head = start + length
    window, quarter = 1 << 8 * length, 1 << 8 * length - 2
    half, least = window >> 1, -min(expected, quarter - 1)
    iv, decrypt = keys.iv, keys.decrypt_into
    for i in range(count):
        at, m = i * size, i * TAG
        written = bytes(memory[at : at + head])
        if written[0] ^ mask[m] & 0x1F != first or written[1:start] != cid:
            break
        truncated = int.from_bytes(written[start:], "big") ^ int.from_bytes(mask[m + 1 : m + 1 + length], "big")
        ahead = (truncated + (half - expected % window) & window - 1) - half
        if not least <= ahead < quarter:  # see `_open_many`
            break
        number = expected + ahead
        nonce, header = (iv ^ number).to_bytes(12, "big"), beginning + truncated.to_bytes(length, "big")
        stop = at + size
        try:
            decrypt(nonce, memory[at + head : stop], header, memory[at + head : stop - TAG])
        except InvalidTag:
            forged.append(i)
        else:
            numbers.append(number)
    return numbers, forged


def _open_many(
    keys: Keys,
    slabs: Slabs,
    memory: memoryview,
    size: int,
    count: int,
    beginning: bytes,
    length: int,
    mask: bytes,
    expected: int,
) -> tuple[list[int], list[int]]:
    """Open packets all together as far as they are alike; as `_open_few`."""
    start = len(beginning)
    head = start + length
    rows = np.frombuffer(memory, np.uint8, count * size).reshape(count, size)
    masks = np.frombuffer(mask, np.uint8).reshape(count, TAG)
    headers = rows[:, :head].copy()
    headers[:, 0] ^= masks[:, 0] & 0x1F
    headers[:, start:] ^= masks[:, 1 : 1 + length]
    like = (headers[:, :start] == np.frombuffer(beginning, np.uint8)).all(axis=1)
    # The largest number moves on while packets are opened. As long as all are within a quarter of the window around
    # it, and there are no smaller ones, the nearest to each of them is the same (RFC 9000 appendix A.3).
    ahead = _numbers_ahead(headers[:, start:], expected)
    quarter = 1 << 8 * length - 2
    like &= (ahead < quarter) & (ahead >= -min(expected, quarter - 1))
    if not like.all():
        count = int(like.argmin())
    if not count:
        return [], []
    numbers = ahead[:count] + expected
    slab, at = slabs.find(memory)
    slots = slab.slots(size, head, at)
    slots.reach(count)
    rows[:count, :head] = headers[:count]
    slots.set_nonces(0, numbers, keys.iv)
    forged = _decrypt(keys, slots, count)
    return (np.delete(numbers, forged) if forged else numbers).tolist(), forged


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
