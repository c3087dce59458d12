"""The class that torch holds: its own ProcessGroup, with `Methods` in front of it.

The whole group is ours: torch gives it to the program as it is. A Python class can be a `Backend` below torch's own
group from 2.14 on (2.13: "No constructor defined!"), and that would bring the flight recorder, and groups of a
backend for each device. But it would take more than it brings, as tried on 2.14.1. torch puts a holder of its own
around each Work that such a class gives, which passes on `wait` and the future and nothing else: `is_completed` is
False for ever, also after `wait`, `is_success` is True and `exception` None after a failure, and `recv` from any rank
fails for want of a source. And the rank and size of a Backend are fixed where it is made, so that no `reconfigure`
could change them. One class, then, on every version.

It is made of two bases by `type`, because the stubs of torch's class describe the overloads of
C++ and not what Python classes override. What torch asks of a group beside operations stands in `Described`: names,
ranks, the store, and what it cannot do. There is no `new_group`: torch would call it for every group of the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from quicoll.errors import QuicollError
from quicoll.torch_backend.asked import seconds_of
from quicoll.torch_backend.failures import for_torch
from quicoll.torch_backend.methods import Methods
from quicoll.torch_backend.names import BACKEND
from quicoll.torch_backend.reconfiguration import DEFAULT_S, Reconfigurable
from quicoll.torch_backend.supplied import supply_operations
from quicoll.torch_backend.untraced import untraced

if TYPE_CHECKING:
    from quicoll.collectives.group import ThreadGroup

__all__ = ["Described", "GroupPlace", "create"]

_DEVICES = ("cpu", "cuda")  # the first is torch's choice where a program leaves it open


@untraced
class Described(Methods):
    """What torch asks of a group, beside operations. Its place is given by who makes it."""

    supports_splitting = supports_coalescing = supports_time_estimate = False
    _own_rank: int
    _own_size: int
    _own_store: Any
    _name = _description = ""

    def __repr__(self) -> str:
        return f"<{BACKEND} {self._name} rank {self._own_rank} of {self._own_size}>"

    @property
    def thread_group(self) -> ThreadGroup:
        """The group of quicoll's that carries it."""
        return self._group

    def getBackendName(self) -> str:
        """Return "quicoll"."""
        return BACKEND

    def getRank(self) -> int:
        """Return this process's rank in the group."""
        return int(self._own_rank)

    def getSize(self) -> int:
        """Return how many ranks the group has."""
        return int(self._own_size)

    def getGroupName(self) -> str:
        """Return the name that torch has given."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take a name."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description that the program has given."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Take a description."""
        self._description = description

    def get_group_store(self) -> Any:
        """Return torch's store, as the group got it."""
        return self._own_store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in _DEVICES]

    def _get_backend(self, device: Any) -> Any:
        if torch.device(device).type not in _DEVICES:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return that memory is not of the group's making."""
        return False

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Take another timeout for operations that name none."""
        self._timeout = seconds_of(timeout) or DEFAULT_S

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return self._home.sequence

    # torch's C++ class takes these names, its Python functions those above.
    rank = getRank
    size = getSize
    name = getBackendName
    _set_default_timeout = set_timeout


@dataclass(frozen=True)
class GroupPlace:
    """What `create` takes, of a group that torch knows nothing of. See `quicoll.torch_backend.group_at`."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    enable_reconfigure: bool
    global_ranks_in_group: None = None


@untraced
class _Placed(Described, Reconfigurable):
    """With a place in a job that torch's ranks have made."""


def _made(self: Any, rank: int, size: int) -> None:
    ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]  # the stubs lack the constructor for subclasses


_Group: Any = type("QuicollProcessGroup", (_Placed, ProcessGroup), {"__init__": _made, "__module__": __name__})


def create(options: Any) -> Any:
    """Make a process group, as torch asks for one.

    Args:
        options: torch's, as `Reconfigurable.begin` takes them.
    Raises:
        QuicollError: As `JobSession`; a RuntimeError too.
    """
    supply_operations()
    try:
        group = _Group(options.group_rank, options.group_size)
        group.begin(options)
    except QuicollError as error:
        raise for_torch(error) from error.__cause__
    return group
