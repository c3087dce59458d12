"""Keys of 1-RTT packets and how they change: RFC 9001 sections 5.1 and 6.

`Keys` protect the packets of one direction in one phase. `KeyPhases` holds those of a connection and says which of them
a packet is under. Each direction steps for itself: who begins seals under the next keys from then on, and takes the
peer's first packet under the next keys for the answer; who is told so by a packet follows before it seals again.

Invariants. One bit in the header names the phase, so nobody may ever be two steps ahead:

- We begin (`update`) only when the handshake is confirmed, the peer has followed our last step, it has acknowledged a
  packet under our present keys (6.1), and no old keys are kept any more, that is 3 PTO after the last step (6.5).
- Where the bit is not that of the present phase, the number decides (6.5): below the lowest that was opened under the
  present keys a packet can only be under the old ones, else only under the next. Only what opens under the next ones
  steps; nothing that is forged changes anything but `forged`.
- The next keys exist before they are needed, and where no old ones are left the next ones are tried in their place. So
  each packet costs one decryption, and the time it takes tells nothing about phases (6.3, 9.5).
- Under one key 2^23 packets are sealed at most, and 2^52 forged packets are looked at in all phases together (6.6, for
  packets of up to 2^16 bytes). New keys are asked for long before (`is_due`); `room` is what is left.

Failure cases: PacketError with KEY_UPDATE_ERROR where the peer steps again before it can have had an answer (6.2), or
has used newer keys for smaller numbers (6.4). AEAD_LIMIT_REACHED is for the caller to say, from `room` and `forged`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

if TYPE_CHECKING:
    from cryptography.utils import Buffer

__all__ = [
    "AES_128_GCM_SHA256",
    "AES_256_GCM_SHA384",
    "KEY_UPDATE_ERROR",
    "MOST_FORGED",
    "MOST_SEALED",
    "PROTOCOL_VIOLATION",
    "KeyPhases",
    "Keys",
    "PacketError",
    "expand_label",
]

AES_128_GCM_SHA256 = 0x1301  # cipher suites of TLS 1.3 (RFC 8446 appendix B.4)
AES_256_GCM_SHA384 = 0x1302
PROTOCOL_VIOLATION = 0x0A  # RFC 9000 section 20.1
KEY_UPDATE_ERROR = 0x0E
MOST_SEALED = 1 << 23
MOST_FORGED = 1 << 52
_LAST_WORDS = 64  # packets of MOST_SEALED that only a close may use
_HASHES: dict[int, tuple[hashes.HashAlgorithm, int]] = {  # of a suite, and bytes of its keys
    AES_128_GCM_SHA256: (hashes.SHA256(), 16),
    AES_256_GCM_SHA384: (hashes.SHA384(), 32),
}


class PacketError(Exception):
    """An authentic packet that may not be: the connection is closed with `code`.

    Attributes:
        code: A transport error of RFC 9000 section 20.1.
        text: What was wrong.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def expand_label(suite: int, secret: bytes, label: str, size: int) -> bytes:
    """Return HKDF-Expand-Label of TLS 1.3 without context (RFC 8446 section 7.1).

    Args:
        suite: Of _HASHES; its hash is taken.
        secret: To be expanded.
        label: Without "tls13 ".
        size: Bytes wanted.
    """
    text = b"tls13 " + label.encode("ascii")
    info = size.to_bytes(2, "big") + bytes((len(text),)) + text + b"\0"
    return HKDFExpand(_HASHES[suite][0], size, info).derive(secret)


class Keys:
    """What protects the packets of one direction in one key phase (RFC 9001 section 5).

    Attributes:
        phase: 0 or 1, the bit in the header.
        iv: As a number; the nonce of a packet is this, exclusive-or its number (5.3).
        mask: Encrypts samples, 16 bytes each, for header protection (5.4.3); the same through all phases.
        packets: How many were sealed.
        first: Lowest number that was sealed or opened with these; -1: none yet.
    """

    __slots__ = (
        "_secret",
        "_suite",
        "decrypt",
        "decrypt_into",
        "encrypt",
        "encrypt_into",
        "first",
        "iv",
        "mask",
        "packets",
        "phase",
    )

    def __init__(
        self, suite: int, secret: bytes, *, phase: int = 0, mask: Callable[[Buffer], bytes] | None = None
    ) -> None:
        """Derive keys from a traffic secret (5.1).

        Args:
            suite: AES_128_GCM_SHA256 or AES_256_GCM_SHA384.
            secret: Of this direction and phase.
            phase: 0 or 1.
            mask: Of the phase before; None: this is the first phase.
        """
        size = _HASHES[suite][1]
        aead = AESGCM(expand_label(suite, secret, "quic key", size))
        self._suite = suite
        self._secret = secret
        self.phase = phase
        self.iv = int.from_bytes(expand_label(suite, secret, "quic iv", 12), "big")
        self.encrypt, self.decrypt = aead.encrypt, aead.decrypt
        self.encrypt_into, self.decrypt_into = aead.encrypt_into, aead.decrypt_into
        if mask is None:
            key = expand_label(suite, secret, "quic hp", size)
            # One block at a time is what the RFC asks for, so that equal samples have equal masks.
            mask = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update  # noqa: S305 - so it has to be ECB
        self.mask: Callable[[Buffer], bytes] = mask
        self.packets = 0
        self.first = -1

    def following(self) -> Keys:
        """Return the keys of the next phase (6.1)."""
        suite, size = self._suite, _HASHES[self._suite][0].digest_size
        secret = expand_label(suite, self._secret, "quic ku", size)
        return Keys(suite, secret, phase=self.phase ^ 1, mask=self.mask)


class KeyPhases:
    """The keys of a connection, in both directions. See the module's head.

    Attributes:
        send: The keys to seal with.
        receive: The keys of the present phase; runs are opened with these alone.
        updates: Steps of our sending keys so far.
        forged: Packets that failed their authentication, under whatever keys.
    """

    def __init__(
        self,
        suite: int,
        send_secret: bytes,
        receive_secret: bytes,
        *,
        key_packets: int,
        pto_ns: Callable[[], int],
        confirmed: bool,
    ) -> None:
        """Begin with phase 0.

        Args:
            suite: The cipher suite of the handshake.
            send_secret: Our application traffic secret.
            receive_secret: The peer's.
            key_packets: Packets to seal under one key before `is_due`.
            pto_ns: The present probe timeout; asked when old keys begin to be kept.
            confirmed: Whether the handshake is (a server's is when it is complete).
        """
        self.send = Keys(suite, send_secret)
        self.receive = Keys(suite, receive_secret)
        self.updates = 0
        self.forged = 0
        self._send_next = self.send.following()
        self._next = self.receive.following()
        self._old: Keys | None = None
        self._old_until = 0
        self._key_packets = key_packets
        self._pto_ns = pto_ns
        self._confirmed = confirmed
        self._acknowledged = False  # a packet under the present sending keys

    # -- sending -------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many packets may still be sealed before new keys; none: close with AEAD_LIMIT_REACHED (6.6)."""
        room = MOST_SEALED - _LAST_WORDS - self.send.packets
        return room if room > 0 else 0

    @property
    def is_due(self) -> bool:
        """Whether new keys should be asked for."""
        return self.send.packets >= self._key_packets

    def confirm(self) -> None:
        """Note that the handshake is confirmed (4.1.2)."""
        self._confirmed = True

    def on_acknowledged(self, largest: int) -> None:
        """Note that the peer has acknowledged packet `largest`, and maybe others below it."""
        if 0 <= self.send.first <= largest:
            self._acknowledged = True

    def update(self) -> bool:
        """Seal under the next keys from now on, if that is allowed now; return whether it was (6.1, 6.5)."""
        level = self.send.phase == self.receive.phase
        if not (self._confirmed and level and self._acknowledged and self._old is None):
            return False
        self._step_sending()
        return True

    # -- receiving -----------------------------------------------------------------------------------------------

    def candidate(self, phase: int, number: int) -> Keys:
        """Return the one set of keys that a packet may be under (6.5).

        Args:
            phase: Its key phase bit.
            number: Its packet number.
        """
        if phase == self.receive.phase:
            return self.receive
        if 0 <= number < self.receive.first and self._old is not None:
            return self._old
        return self._next

    def on_opened(self, keys: Keys, number: int, now_ns: int) -> None:
        """Note that a packet, or a run of them, was authentic; step where it is the first under the next keys.

        Args:
            keys: What `candidate` gave for it; `receive` for a run.
            number: Its number, of a run the lowest one.
            now_ns: The present time.

        Raises:
            PacketError: KEY_UPDATE_ERROR; see the module's head.
        """
        if keys is self.receive:
            if number < keys.first or keys.first < 0:
                keys.first = number
        elif keys is self._next:
            self._step_receiving(number, now_ns)

    def on_forged(self, count: int = 1) -> None:
        """Count packets that failed their authentication."""
        self.forged += count

    # -- time ----------------------------------------------------------------------------------------------------

    def next_timer(self) -> int | None:
        """Return when old keys are to be dropped."""
        return None if self._old is None else self._old_until

    def on_timer(self, now_ns: int) -> None:
        """Drop the old keys if they are due (6.5)."""
        if self._old is not None and now_ns >= self._old_until:
            self._old = None

    # -- inside --------------------------------------------------------------------------------------------------

    def _step_receiving(self, number: int, now_ns: int) -> None:
        present = self.receive
        if number < present.first:
            raise PacketError(KEY_UPDATE_ERROR, f"packet {number} is under newer keys than packet {present.first}")
        if self.send.phase == present.phase:
            if self.updates and not self.send.packets:
                raise PacketError(KEY_UPDATE_ERROR, "keys were updated twice without an answer")
            self._step_sending()
        self._old, self.receive = present, self._next
        self.receive.first = number
        self._next = self.receive.following()
        self._old_until = now_ns + 3 * self._pto_ns()

    def _step_sending(self) -> None:
        self.send = self._send_next
        self._send_next = self.send.following()
        self._acknowledged = False
        self.updates += 1
