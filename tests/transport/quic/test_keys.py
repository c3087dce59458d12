"""Keys and key phases: the vectors of RFC 9001 appendix A, and each rule of its section 6."""

from __future__ import annotations

import random

import pytest
from aioquic._crypto import CryptoError
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.tls import CipherSuite

from quicoll_transport.quic import keys as keys_module
from quicoll_transport.quic.keys import (
    AES_128_GCM_SHA256,
    AES_256_GCM_SHA384,
    KEY_UPDATE_ERROR,
    MOST_SEALED,
    KeyPhases,
    Keys,
    PacketError,
    expand_label,
)
from quicoll_transport.quic.packets import open_packet, seal

PTO = 100
CID = b"theircid"


def pair(
    suite: int = AES_128_GCM_SHA256, *, key_packets: int = 1 << 22, confirmed: bool = True
) -> tuple[KeyPhases, KeyPhases]:
    size = 32 if suite == AES_128_GCM_SHA256 else 48
    one, other = b"\1" * size, b"\2" * size
    options = {"key_packets": key_packets, "pto_ns": lambda: PTO}
    return (
        KeyPhases(suite, one, other, confirmed=confirmed, **options),
        KeyPhases(suite, other, one, confirmed=True, **options),
    )


class End:
    """One side of a path: its numbers, what it has opened, and acknowledgements as if by telepathy."""

    def __init__(self, phases: KeyPhases) -> None:
        self.phases = phases
        self.number = 0
        self.largest = -1

    def say(self, payload: bytes = b"x") -> bytes:
        self.number += 1
        return seal(self.phases.send, CID, self.number - 1, payload)

    def hear(self, packet: bytes, now_ns: int = 0) -> bytes | None:
        opened = open_packet(self.phases, packet, len(CID), self.largest, now_ns)
        if opened is None:
            return None
        self.largest = max(self.largest, opened[0])
        return opened[1]


def ends(**options: int) -> tuple[End, End]:
    a, b = pair(**options)
    return End(a), End(b)


def exchange(a: End, b: End, now_ns: int = 0) -> None:
    """A packet each way, both acknowledged."""
    for source, target in ((a, b), (b, a)):
        assert target.hear(source.say(), now_ns) == b"x"
        source.phases.on_acknowledged(target.largest)


# -- vectors -----------------------------------------------------------------------------------------------------------


def test_server_initial_keys_of_the_rfc() -> None:
    """RFC 9001 appendix A.1: these labels derive the 1-RTT keys as well."""
    secret = bytes.fromhex("3c199828fd139efd216c155ad844cc81fb82fa8d7446fa7d78be803acdda951b")

    def label(name: str, size: int) -> str:
        return expand_label(AES_128_GCM_SHA256, secret, name, size).hex()

    assert label("quic key", 16) == "cf3a5331653c364c88f0f379b6067e37"
    assert label("quic iv", 12) == "0ac1493ca1905853b0bba03e"
    assert label("quic hp", 16) == "c206b8d9b9f0f37644430b490eeaa314"


def test_client_initial_keys_of_the_rfc() -> None:
    secret = bytes.fromhex("c00cf151ca5be075ed0ebfb5c80323c42d6b7db67881289af4008f1f6c357aea")
    made = Keys(AES_128_GCM_SHA256, secret)
    assert made.iv == 0xFA044B2F42A3FD3B46FB255C
    sample = bytes.fromhex("d1b1c98dd7689fb8ec11d242b123dc9b")  # appendix A.2
    assert made.mask(sample)[:5].hex() == "437b9aec36"


def test_the_next_secret_is_derived_as_in_the_rfc() -> None:
    """Appendix A.5 has a "quic ku" secret; its suite has the same hash as AES-128-GCM."""
    secret = bytes.fromhex("9ac312a7f877468ebe69422748ad00a15443f18203a07d6060f688f30f21632b")
    following = expand_label(AES_128_GCM_SHA256, secret, "quic ku", 32)
    assert following.hex() == "1223504755036d556342ee9361d253421a826c9ecdf3c7148684b36b714881f9"


@pytest.mark.parametrize("suite", [AES_128_GCM_SHA256, AES_256_GCM_SHA384])
def test_header_protection_stays_the_same_in_all_phases(suite: int) -> None:
    first = Keys(suite, b"s" * (32 if suite == AES_128_GCM_SHA256 else 48))
    third = first.following().following()
    assert [first.phase, first.following().phase, third.phase] == [0, 1, 0]
    assert third.mask(bytes(16)) == first.mask(bytes(16))
    assert third.iv != first.iv


def test_no_secret_is_shown() -> None:
    assert "736563726574" not in repr(Keys(AES_128_GCM_SHA256, b"secret" * 5 + b"se"))


# -- who may update, and when ------------------------------------------------------------------------------------------


def test_no_update_before_the_handshake_is_confirmed() -> None:
    a, b = (End(phases) for phases in pair(confirmed=False))
    exchange(a, b)
    assert not a.phases.update()
    a.phases.confirm()
    assert a.phases.update()


def test_no_update_before_a_packet_under_the_present_keys_is_acknowledged() -> None:
    a, b = ends()
    assert not a.phases.update()
    b.hear(a.say())
    assert not a.phases.update()
    a.phases.on_acknowledged(0)
    assert a.phases.update()
    a.say()
    a.phases.on_acknowledged(0)  # of the phase before
    assert not a.phases.update()


def test_an_update_is_followed_and_everything_goes_on() -> None:
    a, b = ends()
    exchange(a, b)
    assert a.phases.update()
    assert (a.phases.send.phase, a.phases.receive.phase) == (1, 0)
    assert b.hear(a.say(), 10) == b"x"
    assert (b.phases.send.phase, b.phases.receive.phase) == (1, 1)
    assert a.hear(b.say(), 20) == b"x"
    assert a.phases.receive.phase == 1
    assert a.phases.updates == b.phases.updates == 1
    exchange(a, b)
    assert a.phases.forged == b.phases.forged == 0


def test_the_peer_is_not_overtaken() -> None:
    """Two steps ahead, the bit in the header would look like none: the peer has to follow first."""
    a, b = ends()
    exchange(a, b)
    assert a.phases.update()
    b.hear(a.say())
    a.phases.on_acknowledged(b.largest)  # as if the acknowledgement had come under the old keys
    assert not a.phases.update()


def test_no_update_while_old_keys_are_kept() -> None:
    a, b = ends()
    exchange(a, b)
    assert a.phases.update()
    exchange(a, b, 1000)
    for phases in (a.phases, b.phases):
        assert phases.next_timer() == 1000 + 3 * PTO
        phases.on_timer(1000 + 3 * PTO - 1)
        assert not phases.update()
        phases.on_timer(1000 + 3 * PTO)
        assert phases.next_timer() is None
        assert phases.update()


def test_both_may_begin_at_once() -> None:
    a, b = ends()
    exchange(a, b)
    assert a.phases.update()
    assert b.phases.update()
    to_b, to_a = a.say(), b.say()
    assert b.hear(to_b) == a.hear(to_a) == b"x"
    for end in (a, b):
        assert (end.phases.send.phase, end.phases.receive.phase, end.phases.updates) == (1, 1, 1)
    exchange(a, b)


def test_new_keys_are_due_after_so_many_packets() -> None:
    a, _ = ends(key_packets=3)
    for _ in range(2):
        a.say()
    assert not a.phases.is_due
    a.say()
    assert a.phases.is_due


# -- what a packet is under --------------------------------------------------------------------------------------------


def test_a_late_packet_under_the_old_keys_is_opened_and_steps_nowhere() -> None:
    a, b = ends()
    exchange(a, b)
    late = a.say(b"late")
    assert a.phases.update()
    assert b.hear(a.say(), 10) == b"x"
    assert b.hear(late, 20) == b"late"
    assert b.phases.receive.phase == 1
    assert b.phases.forged == 0


def test_the_first_number_of_a_phase_moves_down_with_what_comes_late() -> None:
    a, b = ends()
    exchange(a, b)
    old = a.say(b"old")
    assert a.phases.update()
    first, second = a.say(b"first"), a.say(b"second")
    assert b.hear(second) == b"second"
    assert b.phases.receive.first == 3
    assert b.hear(first) == b"first"
    assert b.phases.receive.first == 2
    assert b.hear(old) == b"old"
    assert b.phases.receive.first == 2


def test_old_keys_are_dropped_after_three_probe_timeouts() -> None:
    a, b = ends()
    exchange(a, b)
    late, later = a.say(b"late"), a.say(b"later")
    assert a.phases.update()
    b.hear(a.say(), 1000)
    b.phases.on_timer(1000 + 3 * PTO - 1)
    assert b.hear(late) == b"late"
    b.phases.on_timer(1000 + 3 * PTO)
    assert b.hear(later) is None
    assert b.phases.forged == 1


def test_a_forged_phase_bit_changes_nothing_and_costs_one_decryption(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = ends()
    exchange(a, b)
    made = 0
    derive = expand_label

    def counted(*arguments: object) -> bytes:
        nonlocal made
        made += 1
        return derive(*arguments)

    monkeypatch.setattr(keys_module, "expand_label", counted)
    for bit in (0, 4):
        packet = bytearray(a.say(b"x" * 40))
        packet[0] ^= bit
        packet[-1] ^= 1
        before = (b.phases.send, b.phases.receive)
        assert b.hear(bytes(packet)) is None
        assert (b.phases.send, b.phases.receive) == before
    assert b.phases.forged == 2
    assert made == 0, "no keys are made for it, so it takes no longer (section 9.5)"
    exchange(a, b)


def test_forged_bits_in_every_state_change_nothing() -> None:
    a, b = ends()
    exchange(a, b)
    now = 0
    for turn in range(6):
        starter, other = (a, b) if turn % 2 else (b, a)
        late = starter.say(b"late")
        assert starter.phases.update()
        genuine = starter.say(b"next")
        for packet in (late, genuine):
            forged = bytearray(packet)
            forged[0] ^= 4
            assert other.hear(bytes(forged), now) is None
        assert other.hear(genuine, now) == b"next"
        forged = bytearray(genuine)
        forged[0] ^= 4
        assert other.hear(bytes(forged), now) is None
        assert other.hear(late, now) == b"late"
        exchange(a, b, now)
        now += 10 * PTO
        for phases in (a.phases, b.phases):
            phases.on_timer(now)
    assert a.phases.updates == b.phases.updates == 6
    assert a.phases.forged == b.phases.forged == 9


# -- peers that do what they may not -----------------------------------------------------------------------------------


def test_a_peer_that_updates_twice_without_an_answer_is_told() -> None:
    a, b = ends()
    exchange(a, b)
    rogue = a.phases.send.following()
    assert b.hear(seal(rogue, CID, 5, b"one")) == b"one"
    with pytest.raises(PacketError, match="twice without an answer") as caught:
        b.hear(seal(rogue.following(), CID, 6, b"two"))
    assert caught.value.code == KEY_UPDATE_ERROR


def test_newer_keys_for_smaller_numbers_are_an_error() -> None:
    a, b = ends()
    exchange(a, b)
    rogue = a.phases.send.following()
    assert b.hear(seal(rogue, CID, 10, b"one")) == b"one"
    b.say()
    b.phases.on_timer(10**6)
    with pytest.raises(PacketError, match="packet 9 is under newer keys than packet 10") as caught:
        b.hear(seal(rogue.following(), CID, 9, b"two"))
    assert caught.value.code == KEY_UPDATE_ERROR


# -- limits ------------------------------------------------------------------------------------------------------------


def test_no_more_is_sealed_than_a_key_bears() -> None:
    a, _ = ends()
    a.phases.send.packets = MOST_SEALED - 64
    assert a.phases.room == 0
    for _ in range(64):
        a.say(b"last words")
    with pytest.raises(OverflowError, match="1 more are too many"):
        a.say()


def test_room_counts_down_and_is_as_before_after_an_update() -> None:
    a, b = ends()
    room = a.phases.room
    exchange(a, b)
    assert a.phases.room == room - 1
    assert a.phases.update()
    assert a.phases.room == room


@pytest.mark.parametrize("suite", [AES_128_GCM_SHA256, AES_256_GCM_SHA384])
@pytest.mark.parametrize("seed", range(4))
def test_many_updates_by_both_on_a_path_that_reorders(suite: int, seed: int) -> None:
    """Everything that is not lost is opened: old keys are kept for longer than anything is late."""
    a, b = (End(phases) for phases in pair(suite))
    rng = random.Random(seed)
    late: list[tuple[int, End, bytes, bytes]] = []
    opened = sent = 0
    for now in range(3000):
        source, target = (a, b) if rng.random() < 0.5 else (b, a)
        if rng.random() < 0.2:
            source.phases.update()
        payload = now.to_bytes(8, "big")
        late.append((now + rng.randrange(2 * PTO), target, source.say(payload), payload))
        sent += 1
        for item in [item for item in late if item[0] <= now]:
            late.remove(item)
            _, to, packet, expected = item
            assert to.hear(packet, now) == expected
            opened += 1
            (b if to is a else a).phases.on_acknowledged(to.largest)
        for phases in (a.phases, b.phases):
            phases.on_timer(now)
    assert opened == sent - len(late)
    assert min(a.phases.updates, b.phases.updates) >= 5
    assert abs(a.phases.updates - b.phases.updates) <= 1


# -- with stock aioquic ------------------------------------------------------------------------------------------------


class StockEnd:
    """aioquic's keys, with the face of End."""

    def __init__(self, suite: int) -> None:
        size = 32 if suite == AES_128_GCM_SHA256 else 48
        self.pair = CryptoPair()
        for context, secret in ((self.pair.send, b"\2" * size), (self.pair.recv, b"\1" * size)):
            context.setup(cipher_suite=CipherSuite(suite), secret=secret, version=QuicProtocolVersion.VERSION_1)
        self.number = 0
        self.largest = -1

    def say(self) -> bytes:
        header = bytes((0x41 | self.pair.key_phase << 2,)) + CID + self.number.to_bytes(2, "big")
        self.number += 1
        return self.pair.encrypt_packet(header, b"x" * 8, self.number - 1)

    def hear(self, packet: bytes) -> bytes:
        _, payload, self.largest = self.pair.decrypt_packet(packet, 1 + len(CID), self.largest + 1)
        return payload


@pytest.mark.parametrize("suite", [AES_128_GCM_SHA256, AES_256_GCM_SHA384])
@pytest.mark.parametrize("leads", ["ours", "stock", "both", "in turn"])
def test_keys_change_together_with_stock_aioquic(suite: int, leads: str) -> None:
    ours, stock = End(pair(suite)[0]), StockEnd(suite)
    for turn in range(8):
        now = turn * 10 * PTO
        ours.phases.on_timer(now)
        assert stock.hear(ours.say(b"y" * 8)) == b"y" * 8
        ours.phases.on_acknowledged(stock.largest)
        assert ours.hear(stock.say(), now) == b"x" * 8
        if leads in ("ours", "both") or (leads == "in turn" and turn % 2):
            assert ours.phases.update()
        if leads in ("stock", "both") or (leads == "in turn" and not turn % 2):
            stock.pair.update_key()
        if leads == "both":
            to_ours, to_stock = stock.say(), ours.say(b"y" * 8)
            assert (ours.hear(to_ours, now), stock.hear(to_stock)) == (b"x" * 8, b"y" * 8)
        elif ours.phases.updates > turn:
            assert stock.hear(ours.say(b"y" * 8)) == b"y" * 8
            assert ours.hear(stock.say(), now) == b"x" * 8
        else:
            assert ours.hear(stock.say(), now) == b"x" * 8
        assert ours.phases.updates == turn + 1
        assert ours.phases.send.phase == ours.phases.receive.phase == stock.pair.send.key_phase == (turn + 1) % 2
    assert ours.phases.forged == 0


def test_whoever_follows_and_steps_again_before_an_acknowledgement_is_not_understood() -> None:
    """Section 6.1 forbids it. `update` refuses; stock aioquic does not look, and seals two steps ahead."""
    ours, stock, other = End(pair()[0]), StockEnd(AES_128_GCM_SHA256), End(pair()[1])
    first = ours.say(b"y" * 8)
    assert stock.hear(first) == other.hear(first) == b"y" * 8
    assert ours.hear(stock.say()) == b"x" * 8
    ours.phases.on_acknowledged(0)
    assert ours.phases.update()
    step = ours.say(b"y" * 8)
    assert stock.hear(step) == other.hear(step) == b"y" * 8
    other.phases.on_timer(10 * PTO)  # no old keys are in the way
    assert not other.phases.update()
    other.say()
    other.phases.on_acknowledged(0)
    assert other.phases.update()
    stock.pair.update_key()
    before = ours.phases.receive
    assert ours.hear(stock.say()) is None  # the bit is that of the present phase, the keys are not
    assert (ours.phases.forged, ours.phases.receive) == (1, before)
    with pytest.raises(CryptoError):
        stock.hear(ours.say(b"y" * 8))
