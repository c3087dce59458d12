"""The class that torch holds: its own ProcessGroup, with `Methods` in front of it.

torch 2.13 lets no Python class be a Backend ("No constructor defined!"), so the whole group is ours: torch gives it to
the program as it is. It is made of two bases by `type`, because the stubs of torch's class describe the overloads of
C++ and not what Python classes override. What torch asks of a group beside operations stands in `Described`: names,
ranks, the store, and what it cannot do. There is no `new_group`: torch would call it for every group of the program.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]  # public, though not in its __all__

from quicoll.errors import QuicollError
from quicoll.torch_backend.asked import seconds_of
from quicoll.torch_backend.failures import for_torch
from quicoll.torch_backend.methods import Methods
from quicoll.torch_backend.names import BACKEND
from quicoll.torch_backend.sessions import JobSession, open_session, session_of_default_group

if TYPE_CHECKING:
    from quicoll.collectives.group import ThreadGroup

__all__ = ["Described", "create"]

_DEFAULT_S = 1800.0  # torch's own


class Described(Methods):
    """What torch asks of a group, beside operations."""

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def begin(self, session: JobSession, options: Any, *, owner: bool) -> None:
        """Take the place of a group.

        Args:
            session: Of whose job it is.
            options: As torch gave them.
            owner: Whether the session ends with it.
        """
        self._session, self._owner = session, owner
        self._own_rank, self._own_size = options.group_rank, options.group_size
        self._own_store = options.store
        self._name = self._description = ""
        ranks = list(options.global_ranks_in_group)
        group = session.group if owner else session.subgroup(ranks, options.group_id)
        timeout = seconds_of(options.timeout) or _DEFAULT_S
        self.begin_methods(group, timeout=timeout, engine_thread=session.on_engine_thread)

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
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return that memory is not of the group's making."""
        return False

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Take another timeout for operations that name none."""
        self._timeout = seconds_of(timeout) or _DEFAULT_S

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def shutdown(self) -> None:
        """Leave the job, if it is that of this group; waits until the others have what they need of this rank."""
        if self._owner:
            self._session.close()

    def abort(self) -> None:
        """Leave the job at once: every operation under way raises, here and on the other ranks."""
        if self._owner:
            self._session.close(reason="aborted", patience=0.0, finished=False)

    # torch's C++ class takes these names, its Python functions those above.
    rank = getRank
    size = getSize
    name = getBackendName
    _set_default_timeout = set_timeout


def _made(self: Any, rank: int, size: int) -> None:
    ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]  # the stubs lack the constructor for subclasses


_Group: Any = type("QuicollProcessGroup", (Described, ProcessGroup), {"__init__": _made, "__module__": __name__})


def create(options: Any) -> Any:
    """Make a process group, as torch asks for one.

    Args:
        options: torch's: store, group_rank, group_size, timeout, group_id, and global_ranks_in_group, which is empty
            for the default group.
    Raises:
        QuicollError: As `JobSession`; a RuntimeError too.
    """
    try:
        default = not options.global_ranks_in_group
        session = None if default else session_of_default_group()
        owner = session is None
        if session is None:
            session = open_session(
                PrefixStore("quicoll", options.store),
                rank=options.group_rank,
                world_size=options.group_size,
                timeout=seconds_of(options.timeout) or _DEFAULT_S,
                default=default,
            )
        group = _Group(options.group_rank, options.group_size)
        group.begin(session, options, owner=owner)
    except QuicollError as error:
        raise for_torch(error) from error.__cause__
    return group
