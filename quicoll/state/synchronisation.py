"""Bring all ranks of a view to one state, before any step begins in it.

A rank's state has a version: the coordinator's number of the latest decision that it includes, and the number of the
last step. The step's number counts what the state has been through. It travels with the state (a checkpoint, or a
member's memory), while the coordinator numbers its decisions by itself; so a job that starts again from a checkpoint
goes on from the checkpoint's number.

When a view begins, the ranks compare their versions. The newest is that of the latest decision, then of the highest
step. The lowest rank that holds it and has registered `save` gives it to all that are behind:

    all_gather   version of each rank, and whether it has registered save and load
    broadcast    size of the manifest, then the manifest: name, type, shape and digest of each tensor, sorted by name
    transfer     the tensors, from the giver to the ranks that are behind (quicoll.state.transfer)
    barrier      nobody begins before all have the state

Invariants: every rank computes the giver from the same numbers, so no rank waits for one that does not take part; a
state whose digest differs is never loaded; `load` is called once, with the whole state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.checks import done
from quicoll.errors import LocalError, PeerError
from quicoll.numerics.buffers import empty, memory, wrap
from quicoll.numerics.dtypes import DType
from quicoll.state.manifest import MAX_MANIFEST, TensorRecord, checked, decode_manifest, encode_manifest
from quicoll.state.transfer import together, transfer
from quicoll.state.version import StateVersion, compare

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.state.rank_state import RankState

__all__ = ["Handover", "synchronise"]


@dataclass(frozen=True, slots=True)
class Handover:
    """This rank received a state of `version` from rank `giver`."""

    giver: int
    version: StateVersion


async def synchronise(state: RankState, group: Group, *, view_id: int) -> Handover | None:
    """Bring every rank of a view to the newest state that any of them holds.

    Args:
        state: What this rank holds. Its version is brought up to date.
        group: All ranks of the view, with operations numbered apart from the user's.
        view_id: The view's number, for errors.
    Returns:
        From whom this rank received a state, or None if it kept its own.
    Raises:
        LocalError: This rank is behind and nothing can be handed to it, or what `save` returned is no state.
        PeerError: A rank was lost, or the giver sent a malformed manifest.
        Corrupted: A tensor arrived with other bits than the giver announced.
    """
    version = state.version
    mine = np.array([version.decision, version.step, state.save is not None], np.int64)
    rows = (await group.all_gather(mine)).reshape(-1, 3)
    found = compare([(StateVersion(int(decision), int(step)), bool(able)) for decision, step, able in rows])
    if not found.behind:
        return None
    if found.giver is None:
        if found.newest.step and group.rank in found.behind:
            raise LocalError(
                f"this rank's state is after step {version.step}, the job's after step {found.newest.step}: "
                "call job.register_state(save, load) so that it can be handed over"
            )
        # Nothing was ever trained, or this rank is current: the decisions before this one concern no state of its own.
        state.version = StateVersion(found.newest.decision, version.step)
        return None
    given = checked(state.save()) if group.rank == found.giver and state.save is not None else {}
    records = await _manifest(group, given, giver=found.giver, view_id=view_id)
    received: dict[str, Any] = {}
    if group.rank in (found.giver, *found.behind):
        received = given or {record.name: _empty(record) for record in records}
        await transfer(
            group,
            giver=found.giver,
            receivers=found.behind,
            records=records,
            tensors=[received[record.name] for record in records],
            view_id=view_id,
        )
    await together(group)
    if group.rank not in found.behind:
        return None
    if state.load is None:
        raise LocalError("no state registered")
    done(state.load(received), "load")
    state.version = found.newest
    return Handover(found.giver, found.newest)


async def _manifest(group: Group, given: dict[str, Any], *, giver: int, view_id: int) -> tuple[TensorRecord, ...]:
    """Send the manifest of the giver's state to all ranks."""
    giving = group.rank == giver
    manifest = encode_manifest(given) if giving else b""
    size = int((await group.broadcast(np.array([len(manifest)], np.int64), root=giver))[0])
    if not 0 <= size <= MAX_MANIFEST:
        raise PeerError(f"a state manifest of {size} bytes", rank=giver, view=view_id)
    packed = np.frombuffer(manifest, np.uint8) if giving else np.empty(size, np.uint8)
    packed = await group.broadcast(packed, root=giver)
    return decode_manifest(memory(packed), giver=giver, view_id=view_id)


def _empty(tensor: TensorRecord) -> Any:
    """Allocate memory for an announced tensor. The giver, a member, holds as much itself: that bounds its size."""
    dtype = DType.parse(tensor.dtype)
    flat = empty(math.prod(tensor.shape), dtype)
    return wrap(flat, dtype, tensor.shape, "torch" if tensor.torch else "numpy")
