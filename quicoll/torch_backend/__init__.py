"""quicoll by name in torch programs: `dist.init_process_group("quicoll")`. docs/torch_backend.md is the user's view.

Where the package is installed, torch finds the backend at its own import, by the entry point "torch.backends"; anywhere
else `import quicoll.torch_backend` makes it known. Nothing else of this room is imported, and no thread is started,
before a process group is made.

    registration    makes the name known; may never raise
    process_group   what torch holds: its own class over `methods`
    reconfiguration which processes a group is made of, and how that changes
    methods         torch's operations as operations of a group
    asked           torch's options and overloads, read; its tensors as flat memory and back
    staged          tensors on other devices, by way of the host
    work            the handle of an operation, as torch waits for it
    sessions        this process's part in a job: joined at torch's store, left at the end
    failures        quicoll's errors as classes that torch programs catch
    profiled        operations in torch's profiles
    supplied        two functional operations of torch's that would go past the group
    untraced        torch.compile leaves the methods alone
    pool            threads on which callbacks may block
    names           what it is called
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from quicoll.torch_backend.registration import register_backend

__all__ = ["group_at"]

register_backend()


def group_at(
    store: Any,
    rank: int,
    world_size: int,
    *,
    timeout: timedelta = timedelta(minutes=30),
    enable_reconfigure: bool = False,
) -> Any:
    """Make a process group without `init_process_group`: for whoever keeps groups of their own, as torchft does.

    It has a job of its own, whatever torch's default group is, and a process may have many. Blocks until the ranks
    have met. Its `shutdown` leaves when the others have what they need of this rank, and waits a second for that;
    `abort` leaves at once; one that is dropped without either works on until the interpreter ends.

    Args:
        store: torch's, at which nobody has met before: a PrefixStore with a prefix of its own.
        rank: Of this process.
        world_size: How many processes come.
        timeout: For operations, and for the ranks to come, which have a minute at least.
        enable_reconfigure: Whether to wait for `reconfigure` instead of for the other ranks.
    Returns:
        A `torch.distributed.ProcessGroup`.
    Raises:
        QuicollError: A rank has not come, or the settings cannot be used; a RuntimeError too.
    """
    from quicoll.torch_backend.process_group import GroupPlace, create

    return create(GroupPlace(store, rank, world_size, timeout, enable_reconfigure))
