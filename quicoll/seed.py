"""One global seed, and seeds derived from it by name: equal on every rank, independent of each other.

Derivation is BLAKE2b (RFC 7693) keyed by the parent seed over an unambiguous encoding of the labels; it is the same
on every platform and in every version, and golden values in the tests keep it so.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

__all__ = ["Seed"]


@dataclass(frozen=True, slots=True, order=True)
class Seed:
    """A 63-bit seed. `int(seed)` goes wherever an integer seed is wanted; `derive` makes an independent one."""

    value: int

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def derive(self, *labels: str | int) -> Seed:
        """The seed for these labels, e.g. `job.seed.derive("dropout", layer, step)`. ("1",) and (1,) differ."""
        key = self.value.to_bytes(8, "big")
        state = blake2b(key=key, digest_size=8, person=b"quicoll-seed-v1")
        for label in labels:
            data = str(label).encode()
            state.update((b"i" if isinstance(label, int) else b"s") + len(data).to_bytes(4, "big") + data)
        return Seed(int.from_bytes(state.digest(), "big") >> 1)
