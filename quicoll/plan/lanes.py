"""Common parts of the planners of moves: the place of each rank's part, and a plan of lanes that compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from quicoll.errors import LocalError
from quicoll.plan.chunks import Piece, chunks, require_at_least
from quicoll.plan.model import Buf, Lane, Parameter, Plan, Span

__all__ = ["move_plan", "part_chunks", "shifted"]


def part_chunks(
    world: int, counts: Sequence[int], itemsize: int, chunk_bytes: int
) -> tuple[list[int], list[list[Piece]]]:
    """Divide the parts of all ranks into chunks.

    Args:
        world: Number of ranks.
        counts: Elements of each rank.
        itemsize: Bytes of an element.
        chunk_bytes: The longest message.
    Returns:
        Where each part begins, and at last where they end; and the chunks of each.
    Raises:
        LocalError: An argument is out of its range.
    """
    if len(counts) != world:
        raise LocalError(f"counts for {len(counts)} ranks in a world of {world}")
    require_at_least(0, **{f"counts[{r}]": count for r, count in enumerate(counts)})
    require_at_least(1, itemsize=itemsize, chunk_bytes=chunk_bytes)
    return [0, *accumulate(counts)], [chunks((0, count), max(1, chunk_bytes // itemsize)) for count in counts]


def shifted(buf: Buf, piece: Piece, offset: int) -> Span:
    """Return a piece of one rank's part as a span, `offset` elements further on."""
    return Span(buf, 0, piece[0] + offset, piece[1] + offset)


def move_plan(
    collective: str,
    *,
    algorithm: str,
    rank: int,
    world: int,
    lanes: Sequence[Lane],
    width: int,
    given: int | None,
    output: int,
    itemsize: int,
    chunk_bytes: int,
    parameters: Sequence[Parameter],
    sites: tuple[int, ...] | None = None,
) -> Plan:
    """Make a plan whose elements are moved as they are.

    Args:
        given: Elements of INPUT; None where there is none.
        sites: What an algorithm that goes by them has to agree on as well.
        collective, algorithm, rank, world, lanes, width, output, itemsize, chunk_bytes, parameters: As in `Plan`.
    Returns:
        The plan.
    """
    common: list[Parameter] = [("itemsize", itemsize), ("chunk_bytes", chunk_bytes)]
    if sites is not None:
        common.append(("sites", sites))
    return Plan(
        collective=collective,
        algorithm=algorithm,
        rank=rank,
        world=world,
        lanes=tuple(lanes),
        inputs=() if given is None else (given,),
        output=output,
        leaves=0,
        itemsize=itemsize,
        wide_itemsize=itemsize,
        width=width,
        parameters=(*parameters, *common),
    )
