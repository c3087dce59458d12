"""One global seed, and seeds derived from it by name: equal on every rank, independent of each other.

    mask = job.seed.for_layer(3).for_token(17).for_step(step.number).generator().bernoulli((hidden,), 0.9)

Derivation is BLAKE2b (RFC 7693) keyed by the parent seed over an unambiguous encoding of the labels; it is the same
on every platform and in every version, and golden values in the tests keep it so.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from quicoll.checks import whole
from quicoll.errors import LocalError
from quicoll.numerics.generator import Generator

if TYPE_CHECKING:
    from quicoll.numerics.buffers import ArrayKind

__all__ = ["Seed"]


@dataclass(frozen=True, slots=True, order=True)
class Seed:
    """A 63-bit seed. `int(seed)` goes wherever an integer seed is expected.

    Attributes:
        value: From 0 to 2**63 - 1.
    Raises:
        LocalError: The value is no such integer.
    """

    value: int

    def __post_init__(self) -> None:
        value = whole(self.value, "a seed")
        if not 0 <= value < 1 << 63:
            raise LocalError(f"a seed is from 0 to 2**63 - 1, not {value}")
        object.__setattr__(self, "value", value)

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def derive(self, *labels: str | int) -> Seed:
        """Derive an independent seed by name, e.g. `job.seed.derive("dropout", layer, step)`.

        Args:
            labels: Text or integers, of which ("1",) and (1,) differ. An integer counts by its value, also numpy's and
                0-dimensional torch tensors.
        Returns:
            The seed; the same on every rank.
        Raises:
            LocalError: A label is neither text nor an integer (bool and float are neither), or is not Unicode.
        """
        key = self.value.to_bytes(8, "big")
        state = blake2b(key=key, digest_size=8, person=b"quicoll-seed-v1")
        for label in labels:
            kind = b"s" if isinstance(label, str) else b"i"
            text = label if isinstance(label, str) else str(whole(label, "a label that is not text"))
            try:
                data = text.encode()
            except UnicodeEncodeError:
                raise LocalError(f"a label of a seed must be Unicode text, not {text!r}") from None
            state.update(kind + len(data).to_bytes(4, "big") + data)
        return Seed(int.from_bytes(state.digest(), "big") >> 1)

    def for_layer(self, index: int) -> Seed:
        """Derive the seed of a layer. Derivations may follow each other; their order counts.

        Args:
            index: The layer.
        Returns:
            The seed.
        """
        return self.derive("layer", whole(index, "a layer"))

    def for_token(self, index: int) -> Seed:
        """Derive the seed of a token.

        Args:
            index: Its place in the whole batch, not on this rank.
        Returns:
            The seed.
        """
        return self.derive("token", whole(index, "a token"))

    def for_step(self, index: int) -> Seed:
        """Derive the seed of a step. A step that was aborted and begun again draws the same numbers.

        Args:
            index: The step's number.
        Returns:
            The seed.
        """
        return self.derive("step", whole(index, "a step"))

    def for_shard(self, index: int) -> Seed:
        """Derive the seed of a logical shard, on whichever rank it is.

        Args:
            index: The shard.
        Returns:
            The seed.
        """
        return self.derive("shard", whole(index, "a shard"))

    def generator(self, kind: ArrayKind = "numpy") -> Generator:
        """Make a generator of random tensors from this seed.

        Args:
            kind: "numpy" or "torch"; the bits are the same.
        Returns:
            A generator whose first draw has number 0.
        """
        return Generator(self.value, kind=kind)
