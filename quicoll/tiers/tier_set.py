"""Which tiers there are, which of them are active, and on which nodes each one is: one value, equal on all ranks.

    version     0 for the set of a job that has agreed on none; each later set has the next number
    active      the tiers in use, in the order in which the program goes through them. The others are cold
    placement   for each tier, active or cold, the nodes that hold it; none named: every rank of the view

Nodes and not ranks: a node keeps its name in every view, and its rank changes. `ranks` says which ranks they are in a
view, `absent` which of them are not in it.

Two sets are equal if, and only if, their encodings are: placement is kept in the order of the tiers' names. What comes
from a peer or a checkpoint goes through the same checks as what a caller makes, and is bounded before it is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import xxhash

from quicoll.checks import MAX_MEMBERS, MAX_NAME, MAX_WHOLE
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.membership.view import View

__all__ = ["MAX_TIERS", "MAX_TIER_SET", "TierSet"]

MAX_TIERS = 64
"""Tiers of a set."""
MAX_TIER_SET = 1 << 20
"""Bytes of an encoded set."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Nodes = Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class _Encoded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A set on the wire and in a state. placement: (tier, nodes) in the order of the tiers' names."""

    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_WHOLE)]
    active: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_TIERS)]
    placement: Annotated[tuple[tuple[_Name, _Nodes], ...], msgspec.Meta(max_length=MAX_TIERS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Encoded)


class TierSet:
    """The tiers of a job at one time; see the module's head. Equal sets compare equal; nothing of one changes.

    Attributes:
        version: Its number: a set that is proposed has the number after that of the set in force.
        active: The tiers in use, in order.
        placement: The nodes that hold each tier, by tier, in the order of the tiers' names; () is every rank.
        encoded: The set as bytes, the same for equal sets.
        digest: 16 bytes over `encoded`.
    """

    __slots__ = ("active", "digest", "encoded", "placement", "version")

    version: int
    active: tuple[str, ...]
    placement: Mapping[str, tuple[str, ...]]
    encoded: bytes
    digest: bytes

    def __init__(
        self,
        active: Sequence[str] = (),
        placement: Mapping[str, Sequence[str]] | None = None,
        *,
        version: int = 0,
    ) -> None:
        """Make a set.

        Args:
            active: The tiers in use, in order.
            placement: The nodes of each tier. An active tier that is not in it is on every rank.
            version: The set's number, 0 to 2**63 - 1. `changed` gives the next one.
        Raises:
            LocalError: There are too many tiers or nodes, a name is empty or too long, or something is named twice.
        """
        try:
            given: dict[str, tuple[str, ...]] = dict.fromkeys(_sequence(active, "active"), ())
            placed = dict(placement or {})
            given |= {name: _sequence(nodes, f"the nodes of {name!r}") for name, nodes in placed.items()}
            found = msgspec.convert((version, tuple(active), tuple(sorted(given.items()))), _Encoded)
            encoded = _encoder.encode(found)
        except (msgspec.MsgspecError, TypeError, UnicodeEncodeError) as error:
            raise LocalError(f"this is no set of tiers: {error}") from None
        if len(encoded) > MAX_TIER_SET:
            raise LocalError(f"a set of tiers of {len(encoded)} bytes: at most {MAX_TIER_SET}")
        for names, what in ((found.active, "the active tiers"), *((nodes, tier) for tier, nodes in found.placement)):
            if len(names) != len(dict.fromkeys(names)):
                raise LocalError(f"something is named twice in {what}: {', '.join(names)}")
        for attribute, value in (
            ("version", found.version),
            ("active", found.active),
            ("placement", MappingProxyType(dict(found.placement))),
            ("encoded", encoded),
            ("digest", xxhash.xxh3_128_digest(encoded)),
        ):
            object.__setattr__(self, attribute, value)

    @classmethod
    def decode(cls, data: bytes) -> TierSet:
        """Read what `encoded` has given.

        Args:
            data: The bytes.
        Raises:
            LocalError: They are no set, or not as `encoded` gives one.
        """
        if len(data) > MAX_TIER_SET:
            raise LocalError(f"a set of tiers of {len(data)} bytes: at most {MAX_TIER_SET}")
        try:
            found = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LocalError(f"this is no set of tiers: {error}") from None
        made = cls(found.active, dict(found.placement), version=found.version)
        if made.encoded != data:
            raise LocalError("this is no set of tiers: it is encoded in another way than a TierSet is")
        return made

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a TierSet does not change: make another one by changed({name}=...)")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TierSet) and self.encoded == other.encoded

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __repr__(self) -> str:
        return f"<TierSet {self.version} active={list(self.active)} cold={list(self.cold)}>"

    @property
    def cold(self) -> tuple[str, ...]:
        """The tiers that are not active, in the order of their names."""
        return tuple(name for name in self.placement if name not in self.active)

    def changed(
        self, *, active: Sequence[str] | None = None, placement: Mapping[str, Sequence[str]] | None = None
    ) -> TierSet:
        """Return the set that would follow this one.

        Args:
            active: The tiers in use, in order; None: as they are.
            placement: The nodes of tiers, new ones or in the place of what they have; None: as they are. A tier leaves
                the set when a new TierSet is made without it.
        Returns:
            The set, with the next version.
        Raises:
            LocalError: As for a new TierSet.
        """
        return TierSet(
            self.active if active is None else active,
            {**self.placement, **(placement or {})},
            version=self.version + 1,
        )

    def ranks(self, tier: str, view: View) -> tuple[int, ...]:
        """Return the ranks of a view that hold a tier.

        Args:
            tier: Its name.
            view: The view, for instance `job.view`.
        Returns:
            In the order in which the placement names their nodes; all ranks where it names none. Nodes that are not in
            the view are left out.
        Raises:
            LocalError: There is no such tier.
        """
        if tier not in self.placement:
            raise LocalError(f"there is no tier {tier!r} in this set, which has {list(self.placement)}")
        nodes = self.placement[tier]
        if not nodes:
            return tuple(range(view.world_size))
        return tuple(rank for rank in map(view.rank_of, nodes) if rank is not None)

    def absent(self, view: View) -> tuple[str, ...]:
        """Return the nodes that hold a tier and are not in a view, in the order of their names.

        Args:
            view: The view.
        """
        named = {node: None for nodes in self.placement.values() for node in nodes}
        return tuple(sorted(node for node in named if view.rank_of(node) is None))


def _sequence(value: Any, what: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise LocalError(f"{what}: a sequence of names, not {value!r}")
    return tuple(value)
