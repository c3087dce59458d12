"""torchft over quicoll: process groups that torchft's Manager makes anew whenever the replicas change.

    manager = torchft.Manager(pg=ProcessGroupQuicoll(timeout=timedelta(seconds=30)), ...)

They stand where torchft's own `ProcessGroupGloo` and `ProcessGroupBabyGloo` would stand. From torch 2.14 on the Manager
takes a group of torch's as it is, too: `quicoll.torch_backend.group_at(..., enable_reconfigure=True)`.
"""

from __future__ import annotations

from typing import Any

from torchft.process_group import ProcessGroupBaby, ProcessGroupWrapper

import quicoll.torch_backend

__all__ = ["ProcessGroupBabyQuicoll", "ProcessGroupQuicoll"]


class ProcessGroupQuicoll(ProcessGroupWrapper):
    """A group in this process. `reconfigure` gives up the one before it and makes the next."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return quicoll.torch_backend.group_at(store, rank, world_size, timeout=self._timeout)

    def getBackendName(self) -> str:
        return "torchft-quicoll"

    def shutdown(self) -> None:
        """Leave, when the others have what they need of this rank: a group that is only dropped goes on."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()


class ProcessGroupBabyQuicoll(ProcessGroupBaby):
    """A group in a process of its own, which is killed when the group is given up."""

    @classmethod
    def _create_pg(cls, store: Any, rank: int, world_size: int) -> Any:
        return quicoll.torch_backend.group_at(store, rank, world_size)

    def getBackendName(self) -> str:
        return "torchft-baby-quicoll"
