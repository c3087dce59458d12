"""Send a state from the rank that gives it to the others, tensor by tensor, each checked by its digest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import Corrupted, PeerError
from quicoll.numerics.buffers import detached, empty, memory, tensor_digest, wrap
from quicoll.numerics.dtypes import DType
from quicoll.state.manifest import MAX_MANIFEST, TensorRecord, checked, decode_manifest, encode_manifest

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.state.rank_state import RankState

__all__ = ["transfer"]


async def transfer(state: RankState, group: Group, giver: int, view_id: int) -> dict[str, Any]:
    """Send the giver's state to all ranks; the tensors by name, each checked by its digest."""
    giving = group.rank == giver
    given = checked(state.save()) if giving and state.save is not None else {}
    manifest = encode_manifest(given) if giving else b""
    size = int((await group.broadcast(np.array([len(manifest)], np.int64), root=giver))[0])
    if not 0 <= size <= MAX_MANIFEST:
        raise PeerError(f"a state manifest of {size} bytes", rank=giver, view=view_id)
    packed = np.frombuffer(manifest, np.uint8) if giving else np.empty(size, np.uint8)
    packed = await group.broadcast(packed, root=giver)
    received: dict[str, Any] = {}
    for tensor in decode_manifest(memory(packed), giver=giver, view_id=view_id):
        # A state is what its tensors hold; it may be given as parameters that require grad.
        value = await group.broadcast(detached(given[tensor.name]) if giving else _empty(tensor), root=giver)
        if tensor_digest(value) != tensor.digest:
            raise Corrupted(f"the state's {tensor.name!r} fails its digest", rank=giver, view=view_id)
        received[tensor.name] = value
    return received


def _empty(tensor: TensorRecord) -> Any:
    """Allocate memory for an announced tensor. The giver, a member, holds as much itself: that bounds its size."""
    dtype = DType.parse(tensor.dtype)
    flat = empty(math.prod(tensor.shape), dtype)
    return wrap(flat, dtype, tensor.shape, "torch" if tensor.torch else "numpy")
