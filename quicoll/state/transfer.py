"""Send the tensors of a state from the rank that gives it to those that receive it, each checked by its digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quicoll.errors import Corrupted
from quicoll.numerics.buffers import tensor_digest

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.state.manifest import TensorRecord

__all__ = ["transfer"]


async def transfer(
    group: Group,
    *,
    giver: int,
    receivers: tuple[int, ...],
    records: Sequence[TensorRecord],
    tensors: Sequence[Any] | None,
    view_id: int,
) -> None:
    """Bring a state's tensors to the ranks that receive it. Only the giver and the receivers call this.

    Args:
        group: All ranks of the view.
        giver: The rank that gives.
        receivers: Those that receive, ascending.
        records: The tensors, in the manifest's order.
        tensors: On the giver its own, elsewhere the memory in which they end; in the same order.
        view_id: The view's number, for errors.
    Raises:
        PeerError: A rank was lost.
        Corrupted: A tensor arrived with other bits than the giver announced.
    """
    for record, tensor in zip(records, tensors or (), strict=True):
        if group.rank == giver:
            for receiver in receivers:
                await group.send(tensor, to=receiver)
        else:
            await group.recv(tensor, source=giver, out=tensor)
            if tensor_digest(tensor) != record.digest:
                raise Corrupted(f"the state's {record.path!r} fails its digest", rank=giver, view=view_id)
