"""Process groups over quicoll in one process, whose members change: each is driven by a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from quicoll.torch_backend import group_at

__all__ = ["LONG", "Members", "change", "total"]

LONG = timedelta(seconds=200)  # nothing of what is shown takes as long


def change(uuid: int, groups: Sequence[Any], timeout: timedelta | None = LONG) -> Any:
    """What `reconfigure` takes: torch's class for it is new in 2.14, and its attributes are enough."""
    handles = [each if isinstance(each, str) else each.get_reconfigure_handle() for each in groups]
    return SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout)


def total(group: Any, number: float) -> float:
    """The sum of one number of each member."""
    x = torch.tensor([float(number)])
    group.allreduce([x]).wait()
    return x.item()


class Members:
    """Groups that wait for `reconfigure`, at one store."""

    def __init__(self, count: int) -> None:
        self.store = dist.HashStore()
        self.threads = ThreadPoolExecutor(count)
        self.groups = [
            group_at(self.store, rank, count, timeout=LONG, enable_reconfigure=True) for rank in range(count)
        ]
        self.together: tuple[int, ...] = ()
        self._uuid = 0

    def each(self, work: Callable[[Any, int], Any], numbers: Sequence[int] | None = None) -> list[Any]:
        """What `work` gives for each of these groups, or all, at once; or the error that it raises."""

        def one(number: int) -> Any:
            try:
                return work(self.groups[number], number)
            except BaseException as error:
                return error

        return list(self.threads.map(one, range(len(self.groups)) if numbers is None else numbers))

    def fresh(self) -> int:
        """A uuid that was not used."""
        self._uuid += 1
        return self._uuid

    def join(self, *numbers: int) -> None:
        """These groups go on together, in this order."""
        uuid, members = self.fresh(), [self.groups[number] for number in numbers]
        for found in self.each(lambda group, _: group.reconfigure(change(uuid, members)).wait(), numbers):
            if isinstance(found, BaseException):
                raise found
        self.together = numbers

    def close(self) -> None:
        self.each(lambda group, _: group.abort())
        self.threads.shutdown()
