"""Second copies of what one rank alone writes to its disk: its shards, and what is its node's own.

Where each rank writes to a disk of its own, what all ranks hold is on every disk, and a shard on one. With `copies` of
it the ranks after its owner, round and round, write it too. They are given it when the checkpoint begins, in the step:
what was copied of the state goes to them as it is, and into their files beside their own.

Every rank tells all others what it gives, with digests, so that they know it before it comes; each file's manifest has
digests of its own, and `manifest.merged` refuses a checkpoint whose copies differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from quicoll.checkpoint.parts import HeldPart, width_of
from quicoll.checkpoint.regions import Region
from quicoll.errors import LocalError, PeerError
from quicoll.state.chunks import DIGEST_BYTES
from quicoll.state.manifest import TensorRecord
from quicoll.train.fetching import flat_digest, moved

if TYPE_CHECKING:
    from quicoll.checkpoint.datafile import Piece
    from quicoll.collectives.group import Group
    from quicoll.train.fetching import InThread

__all__ = ["copies_of_others"]

_Index = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


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


async def copies_of_others(
    pieces: Sequence[Piece], *, copies: int, group: Group, view_id: int, in_thread: InThread
) -> tuple[list[HeldPart], list[Piece]]:
    """Give this rank's shards to the ranks that write them too, and return what this one is to write of others.

    Args:
        pieces: What this rank writes; their bytes do not change meanwhile.
        copies: How many ranks write each shard, 2 or more; no more than there are.
        group: All ranks of the view; all of them call this.
        view_id: The view's number.
        in_thread: Runs what blocks.
    Returns:
        Parts and pieces, as of this rank's own.
    Raises:
        PeerError: A rank was lost, or told what cannot be, or of more than there is memory for.
        Corrupted: A piece came with other bits than its owner told.
    """
    own = [piece for piece in pieces if not piece[0].replicated]
    told = await group.all_gather_object(await in_thread(_told, own))
    world, rank = len(told), group.rank
    pairs: dict[tuple[int, int], list[tuple[TensorRecord, Any]]] = {}
    parts: list[HeldPart] = []
    coming: list[Piece] = []
    for back in range(1, min(copies, world)):
        giver, receiver = (rank - back) % world, (rank + back) % world
        mine = _decoded(told[rank], rank, view_id)
        pairs[rank, receiver] = [
            (_record(each, data.nbytes), np.frombuffer(data, np.uint8))
            for each, (_, _, data) in zip(mine, own, strict=True)
        ]
        for each in _decoded(told[giver], giver, view_id):
            part = _part(each, giver, view_id)
            region = Region(each.offset, each.extent)
            memory = _room(part, region, giver, view_id)
            if not parts or (parts[-1].name, parts[-1].node, parts[-1].region) != (part.name, part.node, part.region):
                parts.append(part)
            coming.append((parts[-1], region, memory.data))
            pairs.setdefault((giver, rank), []).append((_record(each, memory.nbytes), memory))
    await moved({pair: what for pair, what in pairs.items() if what}, group, view_id)
    return parts, coming


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


def _part(each: _Given, rank: int, view_id: int) -> HeldPart:
    """The part that a rank has told of."""
    held = Region(each.part_offset, each.part_shape)
    try:
        width_of(each.code)
        held.check(each.shape, f"tensor {each.name!r}")
        Region(each.offset, each.extent).check(each.shape, f"tensor {each.name!r}")
    except LocalError as error:
        raise PeerError(f"told of a shard that cannot be: {error.message}", rank=rank, view=view_id) from error
    return HeldPart(each.name, each.node, each.code, each.shape, held, each.torch, False, None)


def _room(part: HeldPart, region: Region, rank: int, view_id: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory for what comes; it is filled as fast as the rank sends, and not before."""
    nbytes = region.size * part.width
    try:
        return np.empty(nbytes, np.uint8)
    except (MemoryError, ValueError) as error:
        raise PeerError(
            f"gives {nbytes} bytes of tensor {part.name!r} as a second copy, for which there is no memory here",
            rank=rank,
            view=view_id,
        ) from error


def _record(each: _Given, nbytes: int) -> TensorRecord:
    return TensorRecord(f"{each.name}{Region(each.offset, each.extent)}", "uint8", (nbytes,), "numpy", each.digest)
