"""Operators that spoil bytes: any bytes, QUIC datagrams with their header fields, and the plaintext frames in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

__all__ = ["EXTREMES", "disturb", "mutate_bytes", "mutate_datagram", "mutate_frames", "random_frames", "varint"]

EXTREMES = (0, 1, 2, 63, 64, 16383, 16384, (1 << 30) - 1, 1 << 30, (1 << 62) - 1)
_VERSIONS = (b"\x00\x00\x00\x00", b"\x00\x00\x00\x01", b"\x6b\x33\x43\xcf", b"\x0a\x0a\x0a\x0a", b"\xff\x00\x00\x1d")
_TYPES = (*range(0x1F), 0x30, 0x31, 0x40, (1 << 62) - 1)  # RFC 9000 section 19, RFC 9221, and two of nobody's


def varint(value: int) -> bytes:
    """A variable-length integer (RFC 9000 section 16), in its shortest form."""
    for bits, size in ((6, 1), (14, 2), (30, 4)):
        if value < 1 << bits:
            return (value | ((size.bit_length() - 1) << (8 * size - 2))).to_bytes(size, "big")
    return (value & ((1 << 62) - 1) | 3 << 62).to_bytes(8, "big")


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(8 * len(changed))
        changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _extend(data: bytes, rng: random.Random) -> bytes:
    return data + (rng.randbytes(rng.randrange(1, 64)) if rng.random() < 0.5 else bytes(rng.randrange(1, 1500)))


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    new = rng.choice((rng.randbytes(rng.randrange(1, 9)), varint(rng.choice(EXTREMES)), b"\xff" * 8, bytes(8)))
    return (data[:at] + new + data[at + len(new) :])[: max(len(data), 1)]


def _remove(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 9) :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at : at + rng.randrange(1, 32)] * rng.randrange(2, 5) + data[at:]


def mutate_bytes(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Spoil any bytes in one way: bits, length, a run of bytes, or a splice with one of `others`."""
    if not data:
        return rng.randbytes(rng.randrange(1, 40))
    if others and rng.random() < 0.15:
        other = rng.choice(others)
        return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
    operators: tuple[Callable[[bytes, random.Random], bytes], ...] = (
        _flip,
        _truncate,
        _extend,
        _overwrite,
        _remove,
        _repeat,
    )
    return rng.choice(operators)(data, rng)


def mutate_datagram(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Spoil a QUIC datagram, its invariant header (RFC 8999) more often than the rest."""
    if len(data) < 21 or rng.random() < 0.4:
        return mutate_bytes(data, rng, others)
    changed = bytearray(data)
    kind = rng.randrange(8)
    if kind == 0:  # first byte: form, fixed bit, type, reserved bits, packet number's length
        changed[0] = rng.randrange(256)
    elif not changed[0] & 0x80:
        if kind < 4:  # another connection's id
            other = rng.choice(others)
            changed[1:9] = other[1:9] if other and not other[0] & 0x80 else rng.randbytes(8)
        else:  # the protected packet number and the sample that protects it
            at = rng.randrange(9, len(changed))
            changed[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[1:5] = rng.choice(_VERSIONS)
    elif kind == 2:  # length of the destination id, up to what the RFC forbids
        changed[5] = rng.choice((0, 1, 8, 20, 21, 255))
    elif kind == 3:  # its bytes
        changed[6 : 6 + changed[5]] = rng.randbytes(changed[5])
    elif kind == 4:  # ids swapped
        end = 6 + changed[5]
        if end < len(changed):
            size = changed[end]
            first, second = changed[5:end], changed[end : end + 1 + size]
            changed[5 : end + 1 + size] = second + first
    elif kind == 5:  # length of the source id
        end = 6 + changed[5]
        if end < len(changed):
            changed[end] = rng.choice((0, 1, 20, 21, 255))
    else:  # what follows the ids: the token's length and bytes, or the packet's length
        end = 6 + changed[5]
        if end + 9 < len(changed):
            at = end + 1 + changed[end]
            new = varint(rng.choice(EXTREMES)) if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 70))
            changed[at : at + len(new)] = new
    return bytes(changed)


def disturb(data: bytes, rng: random.Random, other: bytes) -> list[tuple[float, bytes]]:
    """What somebody on the path makes of one datagram, with delays in seconds: it mostly still arrives."""
    chance = rng.random()
    if chance < 0.5:
        return [(0.0, data)]
    if chance < 0.8:
        return [(0.0, mutate_datagram(data, rng, [other]) or b"\0"), (0.0, data)]
    if chance < 0.87:
        return [(0.0, data), (rng.random() * 0.02, data)]
    if chance < 0.94:
        return [(rng.random() * 0.01, data)]
    return [(0.0, mutate_datagram(data, rng, [other]) or b"\0")]


def random_frames(rng: random.Random, size: int) -> bytes:
    """`size` bytes of frames whose fields are of the right kind and of extreme value."""
    made = bytearray()
    while len(made) < size:
        made += varint(rng.choice(_TYPES))
        for _ in range(rng.randrange(6)):
            made += varint(rng.choice(EXTREMES) if rng.random() < 0.6 else rng.randrange(1 << rng.randrange(1, 62)))
        if rng.random() < 0.3:
            made += rng.randbytes(rng.randrange(1, 20))
    return bytes(made[:size])


def mutate_frames(payload: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Spoil the plaintext of a packet, keeping its size (its header says it)."""
    size = len(payload)
    if rng.random() < 0.35:
        changed = random_frames(rng, rng.randrange(1, size + 1))
        changed += payload if rng.random() < 0.5 else b""
    else:
        changed = mutate_bytes(payload, rng, others)
    return changed[:size] + bytes(max(0, size - len(changed)))
