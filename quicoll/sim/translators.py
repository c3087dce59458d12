"""Which simulated workers are behind which address translator, and which of them can open a way to each other.

`Settings.nats` has an entry for each worker: "" for no translator, a kind for one of its own, or the number of an
earlier worker, "0", for the one that this worker is behind.

Two workers behind different translators reach each other without help if one of the translators lets in what the other
one sends. Each side may dial, and each side sends something to where it sees the other, so that counts which has been
sent to:

    full-cone               lets in anybody, and so whoever the other one is
    restricted-cone         lets in the other's host, from whichever port that sends
    port-restricted-cone    lets in the very port that it has sent to, so the other one has to be seen at one port
    symmetric               likewise, and is itself seen at another port by everybody

so it is those two of which one is symmetric, and the other symmetric or port-restricted-cone, that need a relay. Two
behind one translator use their own addresses; one that is behind none is let in as an answer to what the other sends.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicoll.errors import LocalError
from quicoll_transport.sim import NatKind

__all__ = ["opens", "translators"]

_KINDS = tuple(kind.value for kind in NatKind)
_BY_PORT = (NatKind.PORT_RESTRICTED_CONE, NatKind.SYMMETRIC)


def translators(nats: Sequence[str]) -> dict[int, tuple[int, NatKind]]:
    """Return for each worker that is behind a translator whose it is, and its kind.

    Args:
        nats: As in `Settings`.
    Raises:
        LocalError: An entry is no kind, and no earlier worker that has one of its own.
    """
    found: dict[int, tuple[int, NatKind]] = {}
    for worker, entry in enumerate(nats):
        if entry in _KINDS:
            found[worker] = worker, NatKind(entry)
        elif entry.isdecimal() and found.get(int(entry), (-1,))[0] == int(entry):
            found[worker] = found[int(entry)]
        elif entry:
            raise LocalError(
                f"{entry!r} is no kind of address translator, nor an earlier worker that has one of its own; there are "
                f"{', '.join(_KINDS)}"
            )
    return found


def opens(nats: Sequence[str], one: int, other: int) -> bool:
    """Return whether two workers can reach each other without a relay.

    Args:
        nats: As in `Settings`.
        one: The number of a worker; one without an entry is behind no translator.
        other: Another one.
    """
    behind = translators(nats)
    first, second = behind.get(one), behind.get(other)
    if first is None or second is None or first[0] == second[0]:
        return True
    kinds = first[1], second[1]
    return NatKind.SYMMETRIC not in kinds or not all(kind in _BY_PORT for kind in kinds)
