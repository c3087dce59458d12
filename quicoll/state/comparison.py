"""The ranks of a group tell each other what they hold, and find the first thing in which they differ.

    tell        one row of numbers from each rank: version, able, torn, learned, digests, number of lines and bytes, its
                settings of how often states are compared and which are learned, how many learn from it, what it is a
                state of. All that `quicoll.state.version.compare`, `quicoll.state.description.misfits` and
                `quicoll.state.learning.who_learns` need
    heard       a digest of all rows as this rank has heard them, from each rank: whoever tells one rank something else
                than the others would have it take part in another handover than they do, or in none. Where a rank has
                heard other rows the comparison ends by Corrupted, on every rank, before anything follows from it
    difference  only where digests differ. Three more rows from each rank: digests of up to RANGES ranges of its lines;
                of each line in the first range that differs; the text of the first line that differs. So at most
                8 KiB from each rank in each, and every rank finds the same

Two states differ in a line that one of them does not have, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from quicoll.errors import Corrupted
from quicoll.state.tree import MAX_NODES
from quicoll.state.version import HeldState, StateVersion

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.collectives.handle import Handle
    from quicoll.state.rank_state import RankState
    from quicoll.state.tree import FlatState, Line

__all__ = ["FirstDifference", "Told", "first_difference", "heard", "heard_alike", "read", "row", "tell_all"]

RANGES = 1024
_TEXT = 512  # bytes of a line's text
_ROW = 15
_ABLE, _TORN, _LEARNED = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Told:
    """What the ranks have told, by rank. check_every, learn_from: the lowest rank's settings, which hold for all."""

    held: tuple[HeldState, ...]
    check_every: int
    learn_from: int


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first line in which states differ. path: of it. texts: what is there on which ranks, for people."""

    path: str
    texts: tuple[tuple[str, tuple[int, ...]], ...]

    def describe(self, nodes: Sequence[str]) -> str:
        """Return it in words. nodes: by rank."""
        what = " and ".join(f"{text} on {', '.join(nodes[rank] for rank in ranks)}" for text, ranks in self.texts)
        return f"the first difference is in {self.path!r}: {what}" if self.path else f"they are {what}"


def row(
    state: RankState, mine: FlatState | None, *, check_every: int, learn_from: int, pupils: int = 0
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return what this rank tells of its state. mine: as it was read; None where none is registered."""
    numbers = np.zeros(_ROW, np.int64)
    flags = (0 if mine is None else _ABLE) | (_TORN if state.torn else 0)
    flags |= _LEARNED if state.learned else 0
    numbers[:5] = state.version.decision, state.version.step, flags, check_every, learn_from
    if mine is not None:
        numbers[5:8] = len(mine.lines), mine.nbytes, pupils
        numbers[8:12] = np.frombuffer(mine.kind_digest + mine.digest, np.int64)
        numbers[12:14] = np.frombuffer(state.described.digest, np.int64)
        numbers[14] = len(state.described.lines)
    return numbers


def tell_all(group: Group, mine: np.ndarray[Any, np.dtype[np.int64]]) -> Handle[np.ndarray[Any, np.dtype[np.int64]]]:
    """Begin to tell all ranks a `row`; `heard` takes what comes."""
    return group.all_gather(mine, counts=[_ROW] * group.world_size)


async def heard(
    group: Group, gathered: np.ndarray[Any, np.dtype[np.int64]], *, nodes: Sequence[str], view_id: int
) -> Told:
    """Compare with the other ranks what has been told, and return it. All ranks call this with what they have heard.

    Args:
        group: The ranks.
        gathered: What `tell_all` has brought.
        nodes: Their names, by rank, for errors.
        view_id: The view's number, for errors.
    Raises:
        Corrupted: A rank has heard something else than another.
        PeerError: A rank was lost.
    """
    await heard_alike(group, gathered, nodes=nodes, view_id=view_id)
    return read(gathered)


async def heard_alike(group: Group, gathered: np.ndarray[Any, Any], *, nodes: Sequence[str], view_id: int) -> None:
    """Compare with the other ranks what has been told. All ranks call this with what they have heard.

    Args:
        group: The ranks.
        gathered: What all have told.
        nodes: Their names, by rank, for errors.
        view_id: The view's number, for errors.
    Raises:
        Corrupted: A rank has heard something else than another.
        PeerError: A rank was lost.
    """
    digest = np.frombuffer(xxhash.xxh3_128_digest(gathered.tobytes()), np.int64)
    sides: dict[bytes, list[int]] = {}
    told = await group.all_gather(digest, counts=[len(digest)] * group.world_size)
    others = told.reshape(-1, len(digest))
    for rank, other in enumerate(others):
        sides.setdefault(other.tobytes(), []).append(rank)
    if len(sides) == 1:
        return
    most = max(sides.values(), key=len)
    odd = [rank for side in sides.values() if side is not most for rank in side] if 2 * len(most) > len(others) else []
    who = f"{', '.join(nodes[rank] for rank in odd)}, or who sends to it" if odd else "who is wrong is not known"
    raise Corrupted(
        f"the ranks were told different things of their states: {who}; nothing was handed over",
        rank=odd[0] if len(odd) == 1 else None,
        view=view_id,
        odd=tuple(odd),
    )


def read(gathered: np.ndarray[Any, np.dtype[np.int64]]) -> Told:
    """Return what the ranks have told."""
    rows = gathered.reshape(-1, _ROW)
    held = tuple(
        HeldState(
            StateVersion(int(numbers[0]), int(numbers[1])),
            able=bool(numbers[2] & _ABLE),
            torn=bool(numbers[2] & _TORN),
            kind=numbers[8:10].tobytes(),
            digest=numbers[10:12].tobytes(),
            lines=int(numbers[5]),
            nbytes=int(numbers[6]),
            learned=bool(numbers[2] & _LEARNED),
            pupils=int(numbers[7]),
            described=numbers[12:14].tobytes(),
            described_lines=int(numbers[14]),
        )
        for numbers in rows
    )
    return Told(held, int(rows[0][3]), int(rows[0][4]))


async def first_difference(
    group: Group, lines: Sequence[Line], held: Sequence[HeldState], sides: Sequence[Sequence[int]], *, alike: bool
) -> FirstDifference:
    """Find the first line in which states differ. All ranks of the group call this with the same arguments.

    Args:
        group: The ranks.
        lines: Of this rank's state; none where it registered none.
        held: What all have told.
        sides: The ranks whose states are looked at, by state.
        alike: Whether names, types and shapes are equal; otherwise only these are looked at.
    Returns:
        The same on every rank.
    Raises:
        PeerError: A rank was lost.
    """
    among = sorted(rank for side in sides for rank in side)
    most = min(max(held[rank].lines for rank in among), MAX_NODES)
    width = -(-most // RANGES)
    digests = np.array([_digest(line, alike=alike) for line in lines[: width * RANGES]], np.uint64)
    ranges = np.zeros(-(-most // width), np.uint64)
    for number in range(len(ranges)):
        part = digests[number * width : (number + 1) * width]
        ranges[number] = xxhash.xxh3_64_intdigest(part.tobytes())
    at = _first(await group.all_gather(ranges), among, len(ranges))
    part = np.zeros(width, np.uint64)
    known = digests[at * width : (at + 1) * width]
    part[: len(known)] = known
    at = at * width + _first(await group.all_gather(part), among, width)
    found = lines[at] if at < len(lines) else None
    texts = [bytes(text).rstrip(b"\0").decode(errors="replace") for text in await _texts(group, found)]
    said: dict[str, list[int]] = {}
    path = ""
    for side in sides:
        where, _, what = texts[side[0]].partition("\n")
        path = path or where
        shown = f"{where!r}, {what}" if where not in (path, "") else what  # an empty text: there is no such line
        said.setdefault(shown or "nothing", []).extend(side)
    if len(said) == 1:
        said = {f"{next(iter(said))}, other bits": [rank for side in sides[1:] for rank in side]}
    return FirstDifference(path, tuple((what, tuple(ranks)) for what, ranks in said.items()))


async def _texts(group: Group, line: Line | None) -> Any:
    text = np.zeros(_TEXT, np.uint8)
    if line is not None:
        packed = f"{line.path[:240]}\n{line.what}".encode()[:_TEXT]
        text[: len(packed)] = np.frombuffer(packed, np.uint8)
    return (await group.all_gather(text)).reshape(-1, _TEXT)


def _digest(line: Line, *, alike: bool) -> int:
    """Never 0, which stands for a line that is not there."""
    return xxhash.xxh3_64_intdigest(line.shape + line.content if alike else line.shape) | 1


def _first(gathered: np.ndarray[Any, Any], among: Sequence[int], width: int) -> int:
    """The first place in which the rows of these ranks are not all equal."""
    rows = gathered.reshape(-1, width)[list(among)]
    return int(np.argmax((rows != rows[0]).any(axis=0)))
