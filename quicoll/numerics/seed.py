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
    """A 63-bit seed. `int(seed)` goes wherever an integer seed is wanted; `derive` makes an independent one.

    Raises LocalError for a value that is no integer from 0 to 2**63 - 1.
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
        """The seed for these labels, e.g. `job.seed.derive("dropout", layer, step)`. ("1",) and (1,) differ.

        An integer counts by its value, whatever its type (numpy's, torch's 0-dim tensors of integers). Raises
        LocalError for a label that is neither text nor an integer (bool and float are neither), and for text that is
        not Unicode.
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
        """The seed of layer `index`. These may follow each other; the order counts, as in a path of names."""
        return self.derive("layer", whole(index, "a layer"))

    def for_token(self, index: int) -> Seed:
        """The seed of token `index`: of its place in the whole batch, not of its place on this rank."""
        return self.derive("token", whole(index, "a token"))

    def for_step(self, index: int) -> Seed:
        """The seed of step `index`: a step that was aborted and begun again draws the same numbers."""
        return self.derive("step", whole(index, "a step"))

    def for_shard(self, index: int) -> Seed:
        """The seed of logical shard `index`, whichever rank holds it."""
        return self.derive("shard", whole(index, "a shard"))

    def generator(self, kind: ArrayKind = "numpy") -> Generator:
        """Random tensors from this seed (`quicoll.numerics.generator`); kind: "numpy" or "torch", the bits are the
        same."""
        return Generator(self.value, kind=kind)
