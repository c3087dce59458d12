"""Which group of quicoll's a torch program means."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import quicoll.collectives.group as _groups
from quicoll.collectives.blocking_group import Group
from quicoll.errors import LocalError
from quicoll.torch_backend.process_group import Described

__all__ = ["blocking_group", "no_engine_thread"]


def blocking_group(given: Any = None) -> Group:
    """Return a group as threads without an event loop use it.

    Args:
        given: A group of a `quicoll.blocking` job or of an asyncio one, or a process group of the backend "quicoll".
            None takes torch's default group.
    Returns:
        The group.
    Raises:
        LocalError: It is none of these, or torch's default group is another backend's.
    """
    if isinstance(given, Group):
        return given
    if isinstance(given, _groups.Group):
        return Group(given)
    if isinstance(given, Described):
        return Group(given.thread_group)
    if given is not None:
        raise LocalError(f"a {type(given).__name__} is no group of quicoll's: pass job.group, or a process group of it")
    default: Any = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(default, Described):
        raise LocalError(
            "no group of quicoll's: pass group=job.group of a quicoll.blocking job, or make torch's default group with "
            'dist.init_process_group("quicoll")'
        )
    return Group(default.thread_group)


def no_engine_thread() -> bool:
    """Return whether this thread is an engine's: torch's passes run on its own threads and the caller's, so never."""
    return False
