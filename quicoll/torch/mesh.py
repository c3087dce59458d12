"""A DeviceMesh of torch's over a group of quicoll's: DTensor, `parallelize_module`, DDP and FSDP2 inside of a job.

    with quicoll.blocking.join() as job:
        mesh = quicoll.torch.device_mesh(job.group, (2, 2), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with job.step():
            ...                             # what torch sends in here is part of the step: compared, and voted on

A program whose only group is torch's needs none of this: `init_process_group("quicoll")`, then torch's own
`init_device_mesh` (docs/torch_backend.md). Here the job is there first, with its steps and its state, and torch is
given process groups that are sub-groups of it. torch has one default group in a process, so this has one at a time.

States, of this process:

    none --device_mesh--> carried --device_mesh, same view, same group--> carried: another mesh over the same ranks
                          carried --the view ends--> stale: every operation of torch's raises
                          stale --device_mesh--> carried: torch's groups of before are destroyed, all of them
                          any --destroy_process_group--> none

Invariants. A carried group belongs to one view: torch's ranks never come to mean other nodes. Its sub-groups are named
by their ranks and by how many there were of these before in the view, which is equal on all their members, whether a
process has been in the job from the start or came for this view.

Failures. torch's default group is another one: LocalError. The shape is not of the group's size: LocalError. A lost
rank: every operation raises PeerError, which is torch's DistBackendError too; in the next view make a mesh anew.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]  # public, though not in its __all__

from quicoll.errors import LocalError, QuicollError
from quicoll.torch.groups import blocking_group
from quicoll.torch_backend.asked import seconds_of
from quicoll.torch_backend.failures import for_torch
from quicoll.torch_backend.process_group import Described
from quicoll.torch_backend.supplied import supply_operations

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from quicoll.collectives.group import ThreadGroup

__all__ = ["CARRIED_BACKEND", "device_mesh"]

CARRIED_BACKEND = "quicoll_carried"
"""What torch calls it. It is registered when the first mesh is made, and good for nothing but that."""

_DEFAULT_S = 1800.0  # torch's own


def device_mesh(
    group: Any, shape: Sequence[int], names: Sequence[str] | None = None, *, timeout: float = _DEFAULT_S
) -> DeviceMesh:
    """Make a mesh of a group's ranks, for the present view. Every rank of the group calls it alike.

    Args:
        group: `job.group`, or what its `split` gave, of a `quicoll.blocking` job; of an asyncio one on another thread
            than the loop's.
        shape: Ranks along each dimension, the last one's neighbours next to each other; their product is the group's
            size.
        names: Of the dimensions, for `mesh["tp"]`.
        timeout: Seconds for an operation of torch's that names none.
    Returns:
        The mesh, of CPU tensors.
    Raises:
        LocalError: The shape is not that of the group, or torch's default group is another one.
    """
    from torch.distributed.device_mesh import init_device_mesh  # slow to import, and needed by few

    outer = blocking_group(group)
    if math.prod(shape) != outer.world_size:
        raise LocalError(f"a mesh of shape {tuple(shape)} has not the {outer.world_size} ranks of {outer!r}")
    carried = _carried_now()
    if carried is not None and (carried.stale or carried.outer != _known(outer)):
        dist.destroy_process_group()
        carried = None
    if carried is None:
        if dist.is_initialized():
            raise LocalError(
                "torch has a default group already, which is not this one: where it is of the backend "
                '"quicoll", torch.distributed.device_mesh.init_device_mesh makes a mesh of it'
            )
        _begin(outer, timeout)
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=None if names is None else tuple(names))


class _Carried:
    """A group of one view, whose job is not torch's."""

    def __init__(self, outer: Any, number: int) -> None:
        self.outer = _known(outer)
        # Of all ranks, and yet a sub-group: it ends with the view, and the group itself does not.
        self.group: ThreadGroup = outer.for_threads().subgroup(range(outer.world_size), f"torch.{number}")
        self._names: Counter[tuple[int, ...]] = Counter()

    @property
    def stale(self) -> bool:
        return self.group.stale

    def subgroup(self, ranks: Sequence[int]) -> ThreadGroup:
        number = self._names[tuple(ranks)]
        self._names[tuple(ranks)] += 1
        return self.group.subgroup(ranks, f"mesh.{number}")

    def on_engine_thread(self) -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True


_last: _Carried | None = None
_numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()  # of the view of `_last`: how often each group was carried


def _known(group: Any) -> tuple[str, tuple[int, ...]]:
    return group.name, tuple(group.ranks)


def _carried_now() -> _Carried | None:
    """What carries torch's default group, if it is one of ours."""
    return _last if dist.is_initialized() and isinstance(dist.group.WORLD, _Group) else None


def _begin(outer: Any, timeout: float) -> None:
    """Make torch's default group."""
    global _last
    # In one view another name each time, on all ranks alike; in a new one from the beginning.
    if _last is not None and _last.stale:
        _numbers.clear()
    _last = _Carried(outer, _numbers[_known(outer)])
    _numbers[_known(outer)] += 1
    backends: Any = dist.Backend
    if CARRIED_BACKEND.upper() not in backends._plugins:  # noqa: SLF001 - torch has no other way to ask
        backends.register_backend(CARRIED_BACKEND, _create, extended_api=True, devices=["cpu"])
    dist.init_process_group(
        CARRIED_BACKEND,
        store=HashStore(),  # of this process: nothing is agreed there
        rank=outer.rank,
        world_size=outer.world_size,
        timeout=timedelta(seconds=timeout),
    )


def _create(options: Any, _: Any) -> Any:
    """Make a process group, as torch asks for one."""
    supply_operations()
    try:
        if _last is None:
            raise LocalError(f"{CARRIED_BACKEND} is for quicoll.torch.device_mesh alone")
        made = _Group(options.group_rank, options.group_size)
        made.begin(_last, options)
    except QuicollError as error:
        raise for_torch(error) from error.__cause__
    return made


class _Placed(Described):
    """With a place in a group that is carried; that it ends is nothing to the job."""

    def begin(self, carried: _Carried, options: Any) -> None:
        self._own_rank, self._own_size = options.group_rank, options.group_size
        self._own_store = options.store
        ranks = list(options.global_ranks_in_group)
        group = carried.subgroup(ranks) if ranks else carried.group
        timeout = seconds_of(options.timeout) or _DEFAULT_S
        self.begin_methods(group, timeout=timeout, engine_thread=carried.on_engine_thread)

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...


def _made(self: Any, rank: int, size: int) -> None:
    ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]  # the stubs lack the constructor for subclasses


_Group: Any = type("CarriedProcessGroup", (_Placed, ProcessGroup), {"__init__": _made, "__module__": __name__})
