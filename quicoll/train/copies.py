"""Second copies of what one rank alone writes to its disk: its shards, and what is its node's own.

Where each rank writes to a disk of its own, what all ranks hold is on every disk, and a shard on one. With `copies` of
it the ranks after its owner, round and round, write it too. They are given it when the checkpoint begins, in the step:
what was copied of the state goes to them as it is, and into their files beside their own.

Every rank tells all others what it gives, with digests, so that they know it before it comes; each file's manifest has
digests of its own, and `manifest.merged` refuses a checkpoint whose copies differ.

Invariants. What a rank gives is bounded in bytes, `limit` for each giver, before anybody takes memory for it: all ranks
look at what all have told, so all of them refuse a giver, or none does. The memory into which copies come is lent
(`quicoll.checkpoint.lending`); where an exchange fails it is not given back, as a transfer may be under way still.

    failure                                     what follows
    a rank's own shards are above the limit     LocalError there, before it tells anything
    a rank tells of more, or what cannot be     PeerError on all ranks, naming it
    a rank is lost; the view ends               PeerError
    a piece comes with other bits than told     Corrupted by the transfer
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from quicoll.checkpoint.parts import HeldPart, width_of
from quicoll.checkpoint.regions import Region, overlap_of
from quicoll.errors import LocalError, PeerError
from quicoll.state.chunks import DIGEST_BYTES
from quicoll.state.manifest import TensorRecord
from quicoll.train.fetching import flat_digest, moved

if TYPE_CHECKING:
    from quicoll.checkpoint.datafile import Piece
    from quicoll.checkpoint.lending import CopyMemory, Loan
    from quicoll.collectives.group import Group
    from quicoll.train.fetching import InThread

__all__ = ["COPY_LIMIT", "copies_of_others", "demand_copies"]

COPY_LIMIT = 32 << 30
"""Bytes that one rank gives as copies to each of those that write them too, where nothing else is said."""

_Index = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=64)]


class _Given(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece that a rank gives: of which tensor, which part of it the rank holds, and which region of that it is."""

    name: str
    node: str
    code: str
    shape: _Index
    part_offset: _Index
    part_shape: _Index
    torch: bool
    offset: _Index
    extent: _Index
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


_decoder = msgspec.msgpack.Decoder(list[_Given])


def demand_copies(copies: int, limit: int, *, shared: bool) -> None:
    """Raise LocalError unless shards can be written so often.

    Args:
        copies: On how many disks each shard is written.
        limit: Bytes that one rank gives at most.
        shared: Whether all ranks write to one place.
    """
    if copies < 1 or (shared and copies > 1):
        raise LocalError(f"copies is 1, or more where each rank has a disk of its own (shared=False), not {copies}")
    if limit < 1:
        raise LocalError(f"copy_limit is 1 byte or more, not {limit}")


async def copies_of_others(
    pieces: Sequence[Piece],
    *,
    copies: int,
    limit: int,
    memory: CopyMemory,
    group: Group,
    view_id: int,
    in_thread: InThread,
) -> tuple[list[HeldPart], list[Piece], Loan]:
    """Give this rank's shards to the ranks that write them too, and return what this one is to write of others.

    Args:
        pieces: What this rank writes; their bytes do not change meanwhile.
        copies: How many ranks write each shard, 2 or more; no more than there are.
        limit: Bytes that one rank gives at most; the same on all ranks.
        memory: Where what comes is put.
        group: All ranks of the view; all of them call this.
        view_id: The view's number.
        in_thread: Runs what blocks.
    Returns:
        Parts and pieces, as of this rank's own, and the loan of the pieces' memory.
    Raises:
        LocalError: This rank's shards have more bytes than the limit, or there is no memory for what others give.
        PeerError: A rank was lost, or told what cannot be, or of more bytes than the limit.
        Corrupted: A piece came with other bits than its owner told.
    """
    own = [piece for piece in pieces if not piece[0].replicated]
    total = sum(data.nbytes for _, _, data in own)
    if total > limit:
        raise LocalError(
            f"the shards of this rank have {total} bytes, and a rank gives copies of {limit} at most: a larger"
            " copy_limit, on all ranks, allows more"
        )
    told = await group.all_gather_object(await in_thread(_told, own))
    world, rank = len(told), group.rank
    apart = range(1, min(copies, world))
    givers = [(rank - back) % world for back in apart]
    given: dict[int, list[_Given]] = {}
    for giver, data in enumerate(told):
        found = _decoded(data, giver, view_id)
        _demand_bounded(found, limit, giver, view_id)
        if giver == rank or giver in givers:
            given[giver] = found
    wanted = [(giver, each) for giver in givers for each in given[giver]]
    loan = memory.lend([_nbytes(each) for _, each in wanted])
    pairs: dict[tuple[int, int], list[tuple[TensorRecord, Any]]] = {}
    for back in apart:
        pairs[rank, (rank + back) % world] = [
            (_record(each), np.frombuffer(data, np.uint8)) for each, (_, _, data) in zip(given[rank], own, strict=True)
        ]
    parts: list[HeldPart] = []
    coming: list[Piece] = []
    for (giver, each), room in zip(wanted, loan.pieces, strict=True):
        part = _part(each)
        if not parts or (parts[-1].name, parts[-1].node, parts[-1].region) != (part.name, part.node, part.region):
            parts.append(part)
        coming.append((parts[-1], Region(each.offset, each.extent), room))
        pairs.setdefault((giver, rank), []).append((_record(each), np.frombuffer(room, np.uint8)))
    await moved({pair: what for pair, what in pairs.items() if what}, group, view_id)
    return parts, coming, loan


def _told(own: Sequence[Piece]) -> bytes:
    return msgspec.msgpack.encode(
        [
            _Given(
                part.name,
                part.node,
                part.code,
                part.shape,
                part.region.offset,
                part.region.shape,
                part.of_torch,
                region.offset,
                region.shape,
                flat_digest(data),
            )
            for part, region, data in own
        ]
    )


def _decoded(data: object, rank: int, view_id: int) -> list[_Given]:
    try:
        return _decoder.decode(data) if isinstance(data, bytes) else []
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PeerError(f"told something that is no list of shards: {error}", rank=rank, view=view_id) from error


def _demand_bounded(given: Sequence[_Given], limit: int, rank: int, view_id: int) -> None:
    """Raise PeerError unless what a rank has told can be, and has no more bytes than the limit."""
    total = 0
    for each in given:
        held, region = Region(each.part_offset, each.part_shape), Region(each.offset, each.extent)
        try:
            total += _nbytes(each)
            held.check(each.shape, f"tensor {each.name!r}")
            region.check(each.shape, f"tensor {each.name!r}")
        except LocalError as error:
            raise PeerError(f"told of a shard that cannot be: {error.message}", rank=rank, view=view_id) from error
        if region.size == 0 or overlap_of(region, held) != region:
            raise PeerError(
                f"told of {region} of tensor {each.name!r}, of which it holds {held}", rank=rank, view=view_id
            )
    if total > limit:
        raise PeerError(
            f"gives {total} bytes as second copies, and a rank gives {limit} at most", rank=rank, view=view_id
        )


def _nbytes(each: _Given) -> int:
    return math.prod(each.extent) * width_of(each.code)


def _part(each: _Given) -> HeldPart:
    """The part that a rank has told of."""
    held = Region(each.part_offset, each.part_shape)
    return HeldPart(each.name, each.node, each.code, each.shape, held, each.torch, False, None)


def _record(each: _Given) -> TensorRecord:
    return TensorRecord(
        f"{each.name}{Region(each.offset, each.extent)}", "uint8", (_nbytes(each),), "numpy", each.digest
    )
