"""Packets one by one and in runs: aioquic is the oracle for one, and one by one is the oracle for a run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.packet import QuicProtocolVersion, decode_packet_number
from aioquic.tls import CipherSuite
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll_transport.quic import packets
from quicoll_transport.quic.keys import (
    AES_128_GCM_SHA256,
    AES_256_GCM_SHA384,
    MOST_SEALED,
    PROTOCOL_VIOLATION,
    KeyPhases,
    Keys,
    PacketError,
)
from quicoll_transport.quic.packets import (
    NUMBER,
    TAG,
    OpenedRun,
    Slab,
    Slabs,
    expand_number,
    open_packet,
    open_run,
    seal,
    seal_run,
)

SUITES = [AES_128_GCM_SHA256, AES_256_GCM_SHA384]
CID = b"ourcid!!"
HEAD = 1 + len(CID) + NUMBER
STREAM = b"\x02"  # a stream id as it is written


ONE_BY_ONE, TOGETHER = 1000, 0  # packets up to which a run goes one by one


@contextlib.contextmanager
def taking_few(few: int) -> Iterator[None]:
    """Runs of more than so many packets go together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packets, "FEW_OPENED", few)
        patch.setattr(packets, "FEW_SEALED", few)
        yield


@pytest.fixture(params=[ONE_BY_ONE, TOGETHER])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    with taking_few(request.param):
        yield


def open_slab(phases: KeyPhases, slab: Slab, at: int, size: int, count: int, largest: int, now_ns: int) -> OpenedRun:
    return open_run(phases, Slabs(), slab.memory[at : at + size * count], size, CID, largest, now_ns)


def secret_of(suite: int) -> bytes:
    return bytes(range(32 if suite == AES_128_GCM_SHA256 else 48))


def receiver(suite: int = AES_128_GCM_SHA256) -> KeyPhases:
    secret = secret_of(suite)
    return KeyPhases(suite, secret, secret, key_packets=1 << 22, pto_ns=lambda: 100, confirmed=True)


def oracle(suite: int) -> CryptoContext:
    context = CryptoContext()
    version = QuicProtocolVersion.VERSION_1
    context.setup(cipher_suite=CipherSuite(suite), secret=secret_of(suite), version=version)
    return context


def craft(
    keys: Keys,
    number: int,
    payload: bytes,
    *,
    length: int = 4,
    cid: bytes = CID,
    bits: int = 0,
    phase: int | None = None,
) -> bytes:
    """A packet as any peer may make it. bits: spin and reserved ones; phase: the bit, if it is not that of the keys."""
    bit = keys.phase if phase is None else phase
    first = 0x40 | bits | bit << 2 | length - 1
    truncated = (number & (1 << 8 * length) - 1).to_bytes(length, "big")
    header = bytes((first,)) + cid + truncated
    sealed = keys.encrypt((keys.iv ^ number).to_bytes(12, "big"), payload, header)
    mask = keys.mask((truncated + sealed)[4:20])
    hidden = bytes(a ^ b for a, b in zip(truncated, mask[1:], strict=False))
    return bytes((first ^ mask[0] & 0x1F,)) + cid + hidden + sealed


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_number_of_the_rfc() -> None:
    """RFC 9000 appendix A.3."""
    assert expand_number(0x9B32, 16, 0xA82F30EA + 1) == 0xA82F9B32


@settings(derandomize=True, deadline=None)
@given(expected=st.integers(0, (1 << 62) - 1), truncated=st.integers(0, (1 << 32) - 1), length=st.integers(1, 4))
def test_numbers_are_expanded_as_aioquic_does(expected: int, truncated: int, length: int) -> None:
    truncated %= 1 << 8 * length
    assert expand_number(truncated, 8 * length, expected) == decode_packet_number(truncated, 8 * length, expected)


@settings(derandomize=True, deadline=None)
@given(number=st.integers(0, (1 << 62) - 1), length=st.integers(1, 4), data=st.data())
def test_a_number_near_the_expected_one_comes_back(number: int, length: int, data: st.DataObject) -> None:
    half = 1 << 8 * length - 1
    expected = number + data.draw(st.integers(-half, half - 1))
    if 0 <= expected < (1 << 62) - 2 * half:
        assert expand_number(number % (2 * half), 8 * length, expected) == number


# -- one packet --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("number", [0, 1, 0xFFFFFFFF, 1 << 32, (1 << 62) - 1])
def test_a_packet_is_the_one_that_aioquic_makes(suite: int, number: int) -> None:
    header = bytes((0x43,)) + CID + (number & 0xFFFFFFFF).to_bytes(4, "big")
    expected = oracle(suite).encrypt_packet(header, b"\x01" + bytes(30), number)
    assert seal(Keys(suite, secret_of(suite)), CID, number, b"\x01" + bytes(30)) == expected


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_what_aioquic_makes_is_opened(suite: int, length: int) -> None:
    context, phases = oracle(suite), receiver(suite)
    for number in (0, 7, 120, 121):
        header = bytes((0x40 | length - 1,)) + CID + number.to_bytes(length, "big")
        packet = context.encrypt_packet(header, b"\x01" * 20, number)
        assert open_packet(phases, packet, len(CID), number - 1, 0) == (number, b"\x01" * 20)
    assert phases.receive.first == 0


def test_the_shortest_packet_is_opened_and_a_shorter_one_is_none() -> None:
    """Four bytes from the number on stand before the sample (RFC 9001 section 5.4.2)."""
    phases = receiver()
    for length in (1, 2, 3, 4):
        packet = craft(phases.receive, 9, b"\x01" * (4 - length), length=length)
        assert open_packet(phases, packet, len(CID), 8, 0) == (9, b"\x01" * (4 - length))
        assert open_packet(phases, packet[:-1], len(CID), 8, 0) is None
    assert phases.forged == 0, "what cannot be a packet is no forgery"


@pytest.mark.parametrize("bit", [0x80, 0x40])
def test_what_has_no_short_header_is_none_and_not_counted(bit: int) -> None:
    phases = receiver()
    packet = bytearray(seal(phases.send, CID, 0, b"\x01" * 30))
    packet[0] ^= bit
    assert open_packet(phases, packet, len(CID), -1, 0) is None
    assert phases.forged == 0


def test_every_flipped_bit_is_noticed() -> None:
    phases = receiver()
    packet = seal(phases.send, CID, 300, b"\x01" * 8)
    flips = 0
    for place, bit in itertools.product(range(len(packet)), range(8)):
        forged = bytearray(packet)
        forged[place] ^= 1 << bit
        assert open_packet(phases, forged, len(CID), 299, 0) is None
        flips += not (place == 0 and bit in (6, 7))
    assert phases.forged == flips
    assert phases.updates == 0


@pytest.mark.parametrize("bits", [0x08, 0x10, 0x18])
def test_reserved_bits_of_an_authentic_packet_are_an_error(bits: int) -> None:
    phases = receiver()
    with pytest.raises(PacketError, match="reserved bits") as caught:
        open_packet(phases, craft(phases.receive, 0, b"\x01" * 9, bits=bits), len(CID), -1, 0)
    assert caught.value.code == PROTOCOL_VIOLATION


def test_the_spin_bit_means_nothing() -> None:
    phases = receiver()
    assert open_packet(phases, craft(phases.receive, 0, b"\x01" * 9, bits=0x20), len(CID), -1, 0) == (0, b"\x01" * 9)


# -- making a run ------------------------------------------------------------------------------------------------------


def frame(offset: int, part: bytes, *, fin: bool) -> bytes:
    return bytes((0x0D if fin else 0x0C,)) + STREAM + (offset | 3 << 62).to_bytes(8, "big") + part


@given(
    size=st.integers(HEAD + 10 + TAG + 1, 300),
    length=st.integers(1, 3000),
    cuts=st.sets(st.integers(1, 2999), max_size=5),
    number=st.integers(0, 1 << 40),
    offset=st.integers(0, 1 << 50),
    base=st.integers(0, 3),
    phase=st.integers(0, 1),
    fin=st.booleans(),
    suite=st.sampled_from(SUITES),
)
@pytest.mark.parametrize("few", [ONE_BY_ONE, TOGETHER])
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_run_is_its_packets_made_one_by_one(
    few: int,
    size: int,
    length: int,
    cuts: set[int],
    number: int,
    offset: int,
    base: int,
    phase: int,
    fin: bool,
    suite: int,
) -> None:
    keys, single = (Keys(suite, secret_of(suite), phase=phase) for _ in range(2))
    step = size - HEAD - 10 - TAG
    source = (np.arange(length) * 7).astype(np.uint8)
    ends = sorted({cut for cut in cuts if cut < length} | {length})
    pieces = [memoryview(source)[start:stop] for start, stop in itertools.pairwise([0, *ends])]
    expected = b"".join(
        seal(
            single,
            CID,
            number + i,
            frame(offset + at, source[at : at + step].tobytes(), fin=fin and at + step >= length),
        )
        for i, at in enumerate(range(0, length, step))
    )
    slab = Slab(bytearray(b"\xaa") * (size * (base - -length // step + 2)))
    with taking_few(few):
        count, made = seal_run(slab.slots(size, HEAD), base, keys, CID, number, STREAM, offset, pieces, fin)
    start = base * size
    assert slab.memory[start : start + made] == expected
    assert count == -(-length // step) == keys.packets == single.packets
    assert keys.first == single.first == number
    assert set(slab.memory[:start]) <= {0xAA}, "what is before it stays"


@pytest.mark.usefixtures("both_ways")
def test_a_run_seals_no_more_than_the_key_bears() -> None:
    keys = receiver().send
    keys.packets = MOST_SEALED - 2
    slab = Slab(bytearray(300))
    with pytest.raises(OverflowError, match="3 more are too many"):
        seal_run(slab.slots(100, HEAD), 0, keys, CID, 0, STREAM, 0, [bytes(180)], False)
    assert bytes(slab.memory) == bytes(300)


# -- opening a run -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of the datagrams of a run, and of the keys."""

    payloads: list[tuple[int, bytes] | None]
    error: int | None
    state: tuple[Any, ...]


def outcome(phases: KeyPhases, payloads: list[tuple[int, bytes] | None], error: int | None) -> Outcome:
    state = (phases.forged, phases.updates, phases.send.phase, phases.receive.phase, phases.receive.first)
    return Outcome(payloads, error, (*state, phases.next_timer()))


def one_by_one(phases: KeyPhases, datagrams: list[bytes], largest: int) -> Outcome:
    opened: list[tuple[int, bytes] | None] = []
    for data in datagrams:
        try:
            packet = open_packet(phases, data, len(CID), largest, 5) if data[1 : 1 + len(CID)] == CID else None
        except PacketError as error:
            return outcome(phases, opened, error.code)
        opened.append(packet)
        largest = max(largest, packet[0] if packet else -1)
    return outcome(phases, opened, None)


def in_runs(phases: KeyPhases, slab: Slab, at: int, size: int, count: int, largest: int) -> tuple[Outcome, int]:
    """The outcome, and how many packets were taken in runs."""
    opened: list[tuple[int, bytes] | None] = []
    together = 0
    while count > len(opened):
        start = at + len(opened) * size
        run = open_slab(phases, slab, start, size, count - len(opened), largest, 5)
        assert run.taken == len(run.numbers) + len(run.forged) == len(run.text) + len(run.forged)
        if run.taken:
            together += run.taken
            good = iter(zip(run.numbers, run.text, strict=True))
            for place in range(run.taken):
                number, text = (None, None) if place in run.forged else next(good)
                opened.append(None if text is None else (number, text.tobytes()))
            largest = max(largest, max(run.numbers, default=-1))
            continue
        data = bytes(slab.memory[start : start + size])
        try:
            packet = open_packet(phases, data, len(CID), largest, 5) if data[1 : 1 + len(CID)] == CID else None
        except PacketError as error:
            return outcome(phases, opened, error.code), together
        opened.append(packet)
        largest = max(largest, packet[0] if packet else -1)
    return outcome(phases, opened, None), together


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, list[bytes], int]:
    """(largest, size, datagrams, where they begin): mostly alike, with anything in between that may be."""
    largest = draw(st.sampled_from([-1, 0, 5, 63, 127, 255, 40_000, 1 << 31, (1 << 32) - 2, 1 << 40]))
    size = draw(st.sampled_from([30, 31, 47, 80]))
    usual = draw(st.integers(1, 4))
    keys = receiver().receive
    following = keys.following()
    number, datagrams = largest, []
    for _ in range(draw(st.integers(1, 30))):
        kind = draw(st.sampled_from(["next"] * 12 + ["jump", "back", "length", "step", "cid", "bits", "flip", "noise"]))
        number += 1
        length, used, cid, bits = usual, keys, CID, draw(st.sampled_from([0, 0, 0, 0x20]))
        if kind == "jump":
            number += draw(st.sampled_from([1, 3, 40, 70, 130, 20_000, 1 << 30]))
        elif kind == "back":
            number = max(0, number - draw(st.sampled_from([1, 2, 10, 64, 100])))
        elif kind == "length":
            length = draw(st.integers(1, 4))
        elif kind == "step":
            keys, following = following, keys
            used = keys
        elif kind == "cid":
            cid = b"another!"
        elif kind == "bits":
            bits = draw(st.sampled_from([0x08, 0x10]))
        packet = bytearray(
            craft(
                used, number, bytes((number & 0xFF,)) * (size - 1 - 8 - length - TAG), length=length, cid=cid, bits=bits
            )
        )
        if kind == "flip":
            packet[draw(st.integers(0, size - 1))] ^= 1 << draw(st.integers(0, 7))
        elif kind == "noise":
            packet[:] = draw(st.binary(min_size=size, max_size=size))
        datagrams.append(bytes(packet))
    return largest, size, datagrams, draw(st.integers(0, 70))


@given(run=runs())
@pytest.mark.parametrize("few", [ONE_BY_ONE, TOGETHER, 7])
@settings(max_examples=120, deadline=None, derandomize=True)
def test_a_run_decides_as_its_packets_one_by_one(few: int, run: tuple[int, int, list[bytes], int]) -> None:
    largest, size, datagrams, at = run
    slab = Slab(bytearray(at) + b"".join(datagrams) + b"behind")
    expected = one_by_one(receiver(), datagrams, largest)
    with taking_few(few):
        found, _ = in_runs(receiver(), slab, at, size, len(datagrams), largest)
    assert found == expected
    assert bytes(slab.memory[:at]) == bytes(at)
    assert bytes(slab.memory[-6:]) == b"behind"


def crafted(count: int, size: int, *, length: int = 4, first: int = 0) -> list[bytes]:
    keys = receiver().receive
    text = size - 1 - len(CID) - length - TAG
    return [craft(keys, first + i, bytes((i,)) * text, length=length) for i in range(count)]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_numbers_of_every_length_are_taken_in_one_run(length: int) -> None:
    datagrams = crafted(60, 100, length=length, first=1000)
    slab = Slab(bytearray().join(datagrams))
    run = open_slab(receiver(), slab, 0, 100, 60, 999, 0)
    assert run.taken == 60
    assert run.numbers == list(range(1000, 1060))
    assert [row.tobytes() for row in run.text] == [bytes((i,)) * (75 - length) for i in range(60)]


@pytest.mark.usefixtures("both_ways")
def test_numbers_of_one_byte_are_taken_as_far_as_they_are_unambiguous() -> None:
    slab = Slab(bytearray().join(crafted(100, 60, length=1)))
    run = open_slab(receiver(), slab, 0, 60, 100, -1, 0)
    assert run.numbers == list(range(64))


@pytest.mark.usefixtures("both_ways")
def test_numbers_below_nought_are_large_ones() -> None:
    """Nothing is nearer to the first number than what lies a window above (RFC 9000 appendix A.3)."""
    datagrams = crafted(3, 60, first=0xFFFFFFF0)
    expected = one_by_one(receiver(), datagrams, -1)
    assert expected.payloads[0] is not None
    assert expected.payloads[0][0] == 0xFFFFFFF0
    assert in_runs(receiver(), Slab(bytearray().join(datagrams)), 0, 60, 3, -1)[0] == expected


@pytest.mark.usefixtures("both_ways")
def test_every_packet_of_a_run_has_a_payload() -> None:
    empty = seal(receiver().send, CID, 0, b"")
    assert open_slab(receiver(), Slab(bytearray(empty * 9)), 0, len(empty), 9, -1, 0).taken == 0
    assert open_packet(receiver(), empty, len(CID), -1, 0) == (0, b"")


@pytest.mark.usefixtures("both_ways")
def test_a_spinning_bit_does_not_hinder_runs() -> None:
    keys = receiver().receive
    datagrams = [craft(keys, i, b"\x01" * 31, bits=0x20) for i in range(9)]
    assert open_slab(receiver(), Slab(bytearray().join(datagrams)), 0, 60, 9, -1, 0).taken == 9


@pytest.mark.usefixtures("both_ways")
def test_a_run_may_come_in_any_order_and_hold_the_same_packet_twice() -> None:
    datagrams = crafted(8, 60, first=10)
    order = [3, 0, 7, 7, 1, 2, 6, 5, 4, 0]
    slab = Slab(bytearray().join(datagrams[i] for i in order))
    phases = receiver()
    run = open_slab(phases, slab, 0, 60, 10, 12, 0)
    assert run.numbers == [10 + i for i in order]
    assert phases.receive.first == 10


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("places", [[0], [39], [17], [0, 1, 2], [5, 6, 30, 39], list(range(40))])
def test_forged_packets_in_a_run_drop_themselves_only(places: list[int]) -> None:
    datagrams = [bytearray(data) for data in crafted(40, 90)]
    for place in places:
        datagrams[place][50] ^= 1
    slab, phases = Slab(bytearray().join(datagrams)), receiver()
    run = open_slab(phases, slab, 0, 90, 40, -1, 0)
    assert (run.taken, list(run.forged)) == (40, places)
    assert phases.forged == len(places)
    good = [i for i in range(40) if i not in places]
    assert run.numbers == good
    assert [row[0] for row in run.text] == good
    for place in places:
        assert slab.memory[place * 90 + 74 : place * 90 + 90] == datagrams[place][74:], "maybe of a stateless reset"


@pytest.mark.usefixtures("both_ways")
def test_a_header_is_never_unmasked_twice() -> None:
    """A run ends before what is not like its first packet, and leaves it and all behind it as they were."""
    datagrams = crafted(20, 90)
    datagrams[7] = craft(receiver().receive, 7, bytes((7,)) * 62, length=3)
    joined = b"".join(datagrams)
    slab, phases = Slab(bytearray(joined)), receiver()
    assert open_slab(phases, slab, 0, 90, 20, -1, 0).taken == 7
    assert slab.memory[630:] == joined[630:]
    assert open_slab(phases, slab, 630, 90, 13, 6, 0).taken == 1
    assert open_slab(phases, slab, 720, 90, 12, 7, 0).numbers == list(range(8, 20))
    assert phases.forged == 0


@pytest.mark.usefixtures("both_ways")
def test_a_run_under_the_next_keys_is_for_the_first_packet_alone() -> None:
    following = receiver().receive.following()
    datagrams = [craft(following, i, b"\x01" * 61) for i in range(6)]
    slab, phases = Slab(bytearray().join(datagrams)), receiver()
    phases.receive.first = 0
    run = open_slab(phases, slab, 0, 90, 6, -1, 0)
    assert (run.taken, phases.forged) == (0, 0)
    assert open_packet(phases, datagrams[0], len(CID), -1, 0) is not None
    assert open_slab(phases, slab, 90, 90, 5, 0, 0).numbers == [1, 2, 3, 4, 5]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_views_are_made_once_for_each_layout_and_kept_for_few() -> None:
    slab = Slab(bytearray(1000))
    first = slab.slots(100, HEAD)
    assert slab.slots(100, HEAD) is first
    for size in (50, 60, 70):
        slab.slots(size, HEAD)
    assert slab.slots(100, HEAD) is first
    slab.slots(80, HEAD)
    assert slab.slots(100, HEAD) is first, "the one that was used last stays"
    for size in (51, 61, 71, 81):
        slab.slots(size, HEAD)
    assert slab.slots(100, HEAD) is not first


def test_no_more_views_are_made_than_are_used() -> None:
    slots = Slab(bytearray(1 << 16)).slots(40, HEAD)
    slots.reach(3)
    assert len(slots.text) == len(slots.nonce) == 3
    slots.reach(5)
    assert len(slots.text) == 6, "twice as many, so that growing costs little"
    slots.reach(slots.count)
    assert len(slots.text) == len(slots.nonce) == slots.count


def test_pieces_of_known_memory_are_found_in_it() -> None:
    slabs = Slabs()
    large, other = memoryview(bytearray(1000)), memoryview(bytearray(500))
    slab, at = slabs.find(large[300:400])
    assert at == 300
    assert slabs.find(large[:50]) == (slab, 0)
    elsewhere, at = slabs.find(other[7:])
    assert elsewhere is not slab
    assert at == 7
    assert slabs.find(large[999:]) == (slab, 999)
    for _ in range(2):
        slabs.find(memoryview(bytearray(10)))
    assert slabs.find(large[300:400])[0] is not slab, "it keeps two"


@pytest.mark.usefixtures("both_ways")
def test_a_run_is_opened_in_memory_of_somebody_else() -> None:
    datagrams = crafted(9, 77)
    memory = memoryview(bytearray(b"\0" * 131 + b"".join(datagrams) + b"\0" * 131))
    run = open_run(receiver(), Slabs(), memory[131 : 131 + 9 * 77], 77, CID, -1, 0)
    assert run.numbers == list(range(9))
    assert memory[131 + 13 : 131 + 61] == bytes(48)
    assert memory[131 + 77 + 13 : 131 + 77 + 61] == bytes((1,)) * 48, "in place"


@pytest.mark.usefixtures("both_ways")
def test_a_numpy_array_is_memory_as_well() -> None:
    array = np.frombuffer(b"".join(crafted(5, 77)), np.uint8).copy()
    assert open_run(receiver(), Slabs(), memoryview(array)[77:], 77, CID, 0, 0).numbers == [1, 2, 3, 4]
