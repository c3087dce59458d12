"""A worker's checkpoints: when, where, and found again. What writes them is `quicoll.checkpoint`; this is the one place
of the room that calls it.

Rank 0 writes them after the commit, from a snapshot, in a thread: training does not wait for the disk unless the disk
is slower than `every` steps. What is written is the worker's whole state, data position and all (quicoll.train.worker).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quicoll import checkpoint
from quicoll.errors import CheckpointError, LocalError
from quicoll.train.packing import packed_state, state_of

if TYPE_CHECKING:
    from quicoll.train.packing import Packed

__all__ = ["CheckpointPolicy", "SavedState", "Saver", "newest_state", "state_of_step"]

_log = logging.getLogger("quicoll.train")


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When a worker writes checkpoints.

    Attributes:
        directory: Where they are, and are looked for at the start.
        every: One is written after each so many steps, after the last, and when rank 0 is asked to stop; 0: none is.
        keep: How many stay.
    Raises:
        LocalError: `every` is negative, or `keep` is not 1 or more.
    """

    directory: str | os.PathLike[str]
    every: int = 0
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise LocalError(f"every is 0 or more and keep 1 or more, not {self.every} and {self.keep}")


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state from a checkpoint. where: the file, for people."""

    step: int
    state: Mapping[Any, Any]
    where: str


async def newest_state(policy: CheckpointPolicy) -> SavedState | None:
    """Return the newest state that is whole; None where there is no checkpoint.

    Raises:
        CheckpointError: There are checkpoints, and none is whole.
    """
    found = await asyncio.to_thread(checkpoint.latest, policy.directory)
    return None if found is None else SavedState(found.step, state_of(found), str(found.path))


async def state_of_step(directory: str | os.PathLike[str], step: int) -> SavedState:
    """Return the state of one step.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    found = await asyncio.to_thread(checkpoint.of_step, directory, step)
    return SavedState(found.step, state_of(found), str(found.path))


class Saver:
    """At most one checkpoint under way in a thread; a second waits for the first, so that memory stays bounded."""

    def __init__(self, policy: CheckpointPolicy, *, newest: int) -> None:
        """Make it. newest: the step of the newest checkpoint that is there."""
        self._policy = policy
        self._newest = newest  # the step of the newest checkpoint that is there, or under way
        self._pending: asyncio.Task[None] | None = None
        self._error: CheckpointError | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step, which is not the last."""
        return step % self._policy.every == 0

    async def save(self, step: int, state: Mapping[Any, Any]) -> None:
        """Begin to write the checkpoint of a step, unless there is one. The state may change when this returns."""
        await self.finish()
        if step <= self._newest:
            return
        self._newest = step
        self._pending = asyncio.create_task(self._write(step, packed_state(state).snapshot()))

    async def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._pending is not None:
            await self._pending
            self._pending = None

    def raise_last(self) -> None:
        """Raise the error of the last checkpoint that was to be written, if it could not be."""
        if self._error is not None:
            raise self._error

    async def _write(self, step: int, state: Packed) -> None:
        self._error = None
        try:
            await asyncio.to_thread(
                checkpoint.save,
                self._policy.directory,
                step=step,
                tensors=state.tensors,
                metadata=state.metadata,
                keep=self._policy.keep,
            )
        except CheckpointError as error:
            self._error, self._newest = error, -1
            _log.error("training goes on without this checkpoint: %s", error)
